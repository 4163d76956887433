"""Scoring leaves the model, and torch's random numbers, exactly as they were."""

import copy
import random

import pytest
import torch
from cases import CASES
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import prospr

METHODS = ["prospr", "prospr-published", "snip", "magnitude", "random"]
SCORED = [case for case in CASES if case.name != "weight-norm"]  # its weights are computed: nothing to prune


class Snapshot:
    """Everything about a model that scoring must not change."""

    def __init__(self, model: nn.Module):
        for i, p in enumerate(model.parameters()):
            if i % 2 == 0 and p.requires_grad:
                p.grad = torch.full_like(p, 0.25)
        self.model = model
        self.before = self.take()

    def take(self):
        model = self.model
        return {
            "state": copy.deepcopy(model.state_dict()),
            "tensors": [(name, id(t)) for name, t in (*model.named_parameters(), *model.named_buffers())],
            "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
            "requires": [p.requires_grad for p in model.parameters()],
            "modes": [m.training for m in model.modules()],
            "attributes": [sorted(m.__dict__) for m in model.modules()],
            "hooks": [
                {key: len(value) for key, value in m.__dict__.items() if "hook" in key and value is not None}
                for m in model.modules()
            ]
            + [len(p._backward_hooks or ()) for p in model.parameters()],
            "random": torch.get_rng_state(),
            "python": random.getstate(),
            "grad mode": torch.is_grad_enabled(),
        }

    def check(self):
        after = self.take()
        assert list(after["state"]) == list(self.before["state"])
        for key, value in self.before["state"].items():
            assert torch.equal(value, after["state"][key]), key
        for old, new in zip(self.before["grads"], after["grads"], strict=True):
            assert (old is None and new is None) or torch.equal(old, new)
        assert torch.equal(self.before["random"], after["random"])
        for key in ("tensors", "requires", "modes", "attributes", "hooks", "python", "grad mode"):
            assert self.before[key] == after[key], key


@pytest.mark.parametrize("case", SCORED, ids=lambda case: case.name)
@pytest.mark.parametrize("method", METHODS)
def test_after_scoring(case, method):
    model, batches = case.model(), case.batches(4)
    kept = copy.deepcopy(batches)
    snapshot = Snapshot(model)
    prospr.score(model, batches, method=method, **case.settings)
    snapshot.check()
    for a, b in zip(batches, kept, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("case", SCORED, ids=lambda case: case.name)
@pytest.mark.parametrize("when", [1, 2, 6])
def test_after_a_loss_that_fails(case, when):
    """At the first evaluation, while the learning rate is sought, and in the middle of the steps or on the way back."""
    calls = []

    def failing(model, batch):
        calls.append(1)
        torch.rand(3)
        if len(calls) == when:
            raise ZeroDivisionError("in the middle")
        return (case.loss or prospr.meta.loss.cross_entropy)(model, batch)

    snapshot = Snapshot(case.model())
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        prospr.score(snapshot.model, case.batches(4), loss=failing)
    assert len(calls) == when
    snapshot.check()


class Writing(nn.Module):
    """Every kind of buffer that a forward pass writes to."""

    class OwnNorm(nn.BatchNorm1d):
        def forward(self, x):
            self.running_mean.add_(1)
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norms = nn.Sequential(self.OwnNorm(6), nn.BatchNorm1d(6, momentum=None), nn.BatchNorm1d(6, affine=False))
        self.instance = nn.InstanceNorm1d(2, track_running_stats=True)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.out = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("hidden", torch.zeros(6), persistent=False)

    def forward(self, x):
        self.calls += 1
        x = self.spectral(self.norms(self.first(x)))
        self.hidden = x.detach().mean(0)
        return self.out(self.instance(x.unflatten(1, (2, 3))).flatten(1))


@pytest.mark.parametrize("method", ["prospr", "snip"])
def test_buffers_that_a_forward_pass_writes_to(method):
    model = Writing().double()
    hidden = model.hidden
    snapshot = Snapshot(model)
    prospr.score(model, CASES[0].batches(4), method=method)
    snapshot.check()
    assert model.hidden is hidden
    prospr.prune(model, CASES[0].batches(4), 0.5, method=method)
    assert model.calls == 0
    assert not model.hidden.any()
    assert all(norm.num_batches_tracked == 0 for norm in model.norms)
    assert not model.instance.running_mean.any()


def test_after_batches_that_fail():
    case = CASES[0]

    def batches():
        yield from case.batches(2)
        torch.rand(7)
        raise OSError("the disk is gone")

    snapshot = Snapshot(case.model())
    with pytest.raises(OSError, match="the disk is gone"):
        prospr.score(snapshot.model, batches())
    snapshot.check()


@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("conv-batchnorm-maxpool", "dropout", "residual")])
def test_an_eval_model_is_scored_in_train_mode(case):
    batches = case.batches(4)
    train = prospr.score(case.model(), batches)
    snapshot = Snapshot(case.model().eval())
    scores = prospr.score(snapshot.model, batches)
    snapshot.check()
    assert not any(m.training for m in snapshot.model.modules())
    assert all(torch.equal(train[name], scores[name]) for name in train)


def test_a_norm_frozen_by_the_user_stays_frozen():
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    batches = CASES[0].batches(4)
    trained = prospr.score(model, batches)
    model[1].eval()
    snapshot = Snapshot(model)
    frozen = prospr.score(model, batches)
    snapshot.check()
    assert not torch.allclose(trained["0.weight"], frozen["0.weight"], rtol=1e-3)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_where_gradients_are_off(guard):
    case = CASES[0]
    snapshot = Snapshot(case.model())
    expected, model = prospr.score(snapshot.model, case.batches(4)), case.model()

    def batches():  # made while they are read
        yield from case.batches(4)

    with guard():
        found = prospr.score(snapshot.model, batches())
        masks = prospr.prune(model, batches(), 0.5, method="prospr-one-shot")
    assert not any(t.is_inference() for t in model.state_dict().values())
    snapshot.check()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert masks == prospr.select(expected, 0.5)


@pytest.mark.parametrize("verb", ["score", "prune"])
def test_a_loader_that_shuffles(verb):
    inputs, targets = torch.randn(40, 4), torch.randint(0, 3, (40,))
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=5, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))
    before, start = copy.deepcopy(model), torch.get_rng_state()
    results = []
    for net in (model, before):
        if verb == "score":
            results.append(prospr.score(net, loader))
        else:
            results.append(prospr.prune(net, loader, 0.5))
        assert torch.equal(torch.get_rng_state(), start)
    # the loader drew the same order twice, since the generator came back to where it was
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    torch.rand(1)
    other = prospr.score(copy.deepcopy(before), loader) if verb == "score" else None
    assert other is None or not torch.equal(other["0.weight"], results[0]["0.weight"])


def test_a_masked_model_can_be_scored():
    case = CASES[0]
    model = case.model()
    masks = prospr.prune(model, case.batches(4), 0.5)
    snapshot = Snapshot(model)
    scores = prospr.score(model, case.batches(4))
    snapshot.check()
    for name, mask in masks.items():
        assert bool((scores[name][~mask] == 0).all())
