"""Which channels go together, and what is kept whole."""

import re

import pytest
import torch
from channels.networks import NETWORKS
from channels.twins import find, some_groups


@pytest.mark.parametrize("network", NETWORKS, ids=lambda n: n.name)
def test_what_is_found_and_what_is_kept_whole(network):
    found = find(network.model(), network.example())
    assert set(network.free) <= set(found.sets)
    assert set(found.kept_whole) == set(network.kept)
    for name, reason in network.kept.items():
        assert re.search(reason, found.kept_whole[name]), found.kept_whole[name]


@pytest.mark.parametrize("network", NETWORKS, ids=lambda n: n.name)
def test_masks_of_groups_remove_those_groups(network):
    found = find(network.model(), network.example())
    if len(found):
        for seed in range(2):
            removed = some_groups(found, seed=seed)
            assert found.removed(found.masks(removed)) == removed
