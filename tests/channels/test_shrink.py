"""A network without channels computes what it computes with them masked."""

import pytest
import torch
from cases import CASES
from channels.networks import BY_NAME, NETWORKS
from channels.twins import Twins, assert_same, find, run, some_groups


ALL = [*NETWORKS]


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("network", ALL, ids=lambda n: n.name)
def test_same_in_float64(network, mode):
    twins = Twins(network).train(mode == "train")
    if network.random and mode == "train":
        pytest.skip("draws other random numbers for fewer channels")
    assert_same(run(twins.masked, twins.call), run(twins.small, twins.call), twins.plan, 1e-10)
