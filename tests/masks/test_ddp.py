"""Masks in data-parallel training."""

import pytest
import torch
import torch.multiprocessing
from masks.ranks import RANKS, run
from masks.training import OPTIMIZERS, STEPS, assert_held, assert_same, mlp, random_masks, train, weights


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """The state each rank ends with after a hundred steps on gloo."""
    folder = tmp_path_factory.mktemp("ddp")
    torch.multiprocessing.spawn(run, args=(str(folder), STEPS), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.mark.parametrize("when", ["before", "after"])
def test_two_processes(ends, when):
    model = mlp()
    del model[1]
    masks, before = random_masks(model), weights(model)
    first, second = (end[when] for end in ends)
    assert_same(first, second)  # bit for bit
    assert list(first) == ["0.weight", "0.bias", "0.weight_mask", "2.weight", "2.bias", "2.weight_mask"]

    masks.apply(model)
    train(model, OPTIMIZERS["sgd"](model.parameters()))  # one process, the whole batch
    for name, p in model.named_parameters():
        assert torch.allclose(first[name], p, rtol=1e-3, atol=1e-4)
    model.load_state_dict(first)
    for name, mask in masks.items():
        assert torch.equal(first[f"{name}_mask"], mask)
        assert bool((first[name][~mask] == 0).all())
    assert_held(model, masks, before)
