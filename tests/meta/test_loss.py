"""A pure function of the parameters: nothing of the user's model changes, whatever happens inside."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import CASES
from torch import nn

import prospr
from prospr.meta import SGD, metagrad, pure_loss
from prospr.meta.batches import to_device
from prospr.meta.loss import replay, training_mode, unwrap


def everything(model: nn.Module) -> dict[str, Any]:
    """All that a user can see of a model, by value and by identity."""
    return {
        "tensors": {n: t.clone() for n, t in [*model.named_parameters(), *model.named_buffers()]},
        "objects": [id(t) for t in [*model.parameters(), *model.buffers()]],
        "flags": [(m.training, sorted(m.__dict__)) for m in model.modules()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "flat": [[id(w) for w in m._flat_weights] for m in model.modules() if isinstance(m, nn.RNNBase)],
        "rng": torch.get_rng_state(),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_nothing_of_the_model_changes(case):
    model = case.model()
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    before = everything(model)
    loss = pure_loss(model, **case.settings)
    metagrad(loss, loss.params(), case.batches(3), SGD(lr=0.1, momentum=0.9))
    assert same(everything(model), before)


@pytest.mark.parametrize("fails_at", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_nothing_changes_when_the_loss_raises_in_the_middle(case, fails_at):
    model = case.model()
    before = everything(model)
    inner = case.settings.get("loss", prospr.meta.cross_entropy)
    calls = iter(range(100))

    def loss(model, batch):
        value = inner(model, batch)
        if next(calls) == fails_at:
            raise KeyError("a user's own error")
        return value

    pure = pure_loss(model, loss)
    with pytest.raises(KeyError, match="a user's own error"):
        metagrad(pure, pure.params(), case.batches(3), SGD(lr=0.1))
    assert same(everything(model), before)


def test_a_name_that_is_no_parameter_is_refused():
    loss = pure_loss(nn.Linear(2, 2))
    with pytest.raises(prospr.PruningError, match=r"'wait' is not a parameter of Linear; it has weight, bias"):
        loss({"wait": torch.ones(2, 2)}, None)


def test_training_mode_leaves_frozen_norms_of_a_training_model():
    net = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    net[1].eval()
    with training_mode(net):
        assert [m.training for m in net.modules()] == [True, True, False]
    net.eval()
    with training_mode(net):
        assert all(m.training for m in net.modules())
    assert not any(m.training for m in net.modules())


def test_batch_statistics_are_named():
    net = nn.Sequential(nn.BatchNorm1d(2), nn.LayerNorm(2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    net[2].eval()
    net[3] = nn.BatchNorm1d(2, track_running_stats=False).eval()  # without statistics it always takes the batch's
    assert pure_loss(net).batch_statistics() == ["0", "3"]


def test_replay_gives_the_same_numbers_and_the_state_back():
    state = torch.get_rng_state()
    with replay(7):
        a = torch.rand(3)
    with replay(7):
        b = torch.rand(3)
    assert torch.equal(a, b)
    assert torch.equal(state, torch.get_rng_state())
    with replay(None):
        torch.rand(1)
    assert torch.equal(state, torch.get_rng_state())


def test_batches_of_every_form_are_moved():
    @dataclass
    class Sample:
        x: torch.Tensor
        name: str

    class Encoding:
        def __init__(self):
            self.moved = None

        def to(self, device):
            self.moved = device
            return self

    Pair = namedtuple("Pair", "x y")
    x = torch.ones(2)
    cpu = torch.device("cpu")
    batch = [Pair(x, "a"), {"k": (x,)}, OrderedDict(z=x), Sample(x, "s"), Encoding(), 3, None]
    moved = to_device(batch, torch.device("meta"))
    assert moved[0].x.device.type == "meta"
    assert moved[0].y == "a"
    assert moved[1]["k"][0].device.type == "meta"
    assert moved[2]["z"].device.type == "meta"
    assert moved[3].x.device.type == "meta"
    assert moved[3].name == "s"
    assert moved[4].moved == torch.device("meta")
    assert moved[5:] == [3, None]
    assert to_device(x, cpu) is x


def test_wrappers_are_taken_off():
    net = nn.Linear(2, 2)
    assert unwrap(torch.compile(net, backend="eager")) is net
    assert unwrap(nn.DataParallel(net)) is net
    assert unwrap(net) is net
