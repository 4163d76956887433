"""Masks and torch.compile."""

import pytest
import torch
from masks.training import OPTIMIZERS, assert_held, mlp, random_masks, train, weights


@pytest.fixture
def counters():
    """What the compiler did; fresh for each test."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    yield counters
    torch.compiler.reset()


@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled(when, counters):
    model, eager = mlp(), mlp()
    masks, before = random_masks(model), weights(model)
    masks.apply(eager)
    if when == "before":
        masks.apply(model)
    compiled = torch.compile(model, backend="aot_eager")
    if when == "after":
        train(compiled, torch.optim.SGD(model.parameters(), lr=0.0), steps=1)  # compiled without masks
        model[1].reset_running_stats()
        masks.apply(compiled)
        assert list(masks) == ["0.weight", "3.weight"]
    losses = train(compiled, OPTIMIZERS["sgd"](compiled.parameters()))
    assert counters["stats"]["unique_graphs"] >= 1
    assert not counters["graph_break"]
    assert_held(model, masks, before)
    assert losses == pytest.approx(train(eager, OPTIMIZERS["sgd"](eager.parameters())), rel=1e-4)


@pytest.mark.slow
def test_compiled_by_inductor(counters):
    model, eager = mlp(), mlp()
    masks, before = random_masks(model), weights(model)
    masks.apply(model)
    masks.apply(eager)
    compiled = torch.compile(model)
    losses = train(compiled, OPTIMIZERS["adamw"](compiled.parameters()))
    assert counters["stats"]["unique_graphs"] >= 1
    assert_held(model, masks, before)
    assert losses == pytest.approx(train(eager, OPTIMIZERS["adamw"](eager.parameters())), rel=1e-3)
