"""Finding, scoring and shrinking channels leave the model, and torch's random numbers, exactly as they were."""

import copy
import random

import pytest
import torch
from cases import CASES
from channels.networks import BY_NAME, NETWORKS
from channels.twins import find, some_groups
from scores.test_untouched import Snapshot
from torch import nn

import prospr

pytestmark = pytest.mark.filterwarnings("ignore::prospr.errors.KeptWholeWarning")
GO = [c for c in CASES if c.name not in ("weight-norm", "attention", "group-and-layer-norm", "lstm", "gru")]


@pytest.mark.parametrize("network", NETWORKS, ids=lambda n: n.name)
def test_after_finding_and_shrinking(network):
    model, example = network.model(), network.example()
    model.train()
    next(iter(model.children())).eval()
    kept = copy.deepcopy(example)
    snapshot = Snapshot(model)
    fast_path = torch.backends.mha.get_fastpath_enabled()
    found = find(model, example)
    if len(found):
        prospr.shrink(model, found.masks(some_groups(found)), example, weights="rescale")
    snapshot.check()
    assert torch.backends.mha.get_fastpath_enabled() == fast_path
    pairs = zip(kept, example, strict=True) if isinstance(kept, tuple) else [(kept[k], example[k]) for k in kept]
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("case", GO, ids=lambda c: c.name)
@pytest.mark.parametrize("method", ["prospr", "3sp", "random"])
def test_after_scoring(case, method):
    snapshot = Snapshot(case.model())
    prospr.score(snapshot.model, case.batches(4), method=method, granularity="channel", **case.settings)
    snapshot.check()


@pytest.mark.parametrize("when", [1, 2, 3, 5])
def test_after_a_forward_that_fails(when):
    """While it is traced, and while it is tried; the error is the model's own, not a reason to keep channels."""

    class Failing(nn.Module):
        calls = 0

        def __init__(self):
            super().__init__()
            self.first, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

        def forward(self, x):
            Failing.calls += 1
            x = self.norm(self.first(x))
            torch.rand(3)
            if Failing.calls in ((1, 2) if when == 1 else (when,)):  # it is tried on one sample, then on all
                raise ZeroDivisionError("in the middle")
            return self.head(x)

    snapshot = Snapshot(Failing())
    if when == 1:
        with pytest.raises(ZeroDivisionError, match="in the middle"):
            find(snapshot.model, torch.zeros(2, 4))
    else:
        find(snapshot.model, torch.zeros(2, 4))
    snapshot.check()


def test_after_settings_that_cannot_be():
    case = CASES[0]
    for how in ({"sparsity": 0.9999}, {"sparsity": 0.5, "budget": "bytes"}, {"sparsity": 0.5, "scope": "erk"}):
        snapshot = Snapshot(case.model())
        with pytest.raises(prospr.errors.SettingError):
            prospr.prune(snapshot.model, case.batches(4), granularity="channel", **how)
        snapshot.check()


def test_buffers_that_a_forward_pass_writes_to():
    class Writing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 3)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("hidden", torch.zeros(6), persistent=False)

        def forward(self, x):
            self.calls += 1
            x = torch.relu(self.first(x))
            self.hidden = x.detach().mean(0)
            return self.head(x)

    model = Writing()
    hidden = model.hidden
    snapshot = Snapshot(model)
    found = find(model, torch.ones(2, 5))
    snapshot.check()
    assert model.hidden is hidden
    assert model.calls == 0
    assert len(found) == 6


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_where_gradients_are_off(guard):
    network = BY_NAME["resnet18"]
    model, example = network.model(), network.example()
    with guard():
        masks = prospr.prune(model, None, 0.5, method="magnitude", granularity="channel", example=example)
        small = prospr.shrink(model, masks, example)
    assert all(p.requires_grad and not p.is_inference() for p in small.parameters())
    small(*example).sum().backward()


def test_a_start_that_depends_on_data_is_not_made():
    class ActNorm(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.scale, self.shift, self.begun = (
                nn.Parameter(torch.ones(width)),
                nn.Parameter(torch.zeros(width)),
                False,
            )

        def forward(self, x):
            if not self.begun and self.training:
                with torch.no_grad():
                    self.shift.copy_(-x.mean(0))
                    self.scale.copy_(1 / x.std(0))
                self.begun = True
            return (x + self.shift) * self.scale

    model = nn.Sequential(nn.Linear(6, 8), ActNorm(8), nn.ReLU(), nn.Linear(8, 3))
    prospr.channels.groups(model, torch.randn(4, 6))
    assert not model[1].begun
    assert torch.equal(model[1].scale, torch.ones(8))


def test_channels_do_not_depend_on_pythons_random_numbers():
    class Drop(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.block, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            x = self.stem(x).relu()
            if not self.training or random.random() > 0.5:
                x = x + self.block(x).relu()
            return self.head(x)

    torch.manual_seed(0)
    model, found = Drop(), set()
    for seed in range(12):
        random.seed(seed)
        state = random.getstate()
        found.add(len(prospr.channels.groups(model, torch.randn(1, 6))))
        assert random.getstate() == state
    assert len(found) == 1


def test_channels_last_changes_nothing():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    x = torch.randn(2, 3, 8, 8)
    plain = len(prospr.channels.groups(net, x))
    other = prospr.channels.groups(net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last))
    assert len(other) == plain == 8
