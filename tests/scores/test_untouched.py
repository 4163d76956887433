"""Scoring leaves the model, and torch's random numbers, exactly as they were."""

import copy
import random

import pytest
import torch
from cases import CASES
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import prospr

try:
    import numpy
except ImportError:
    numpy = None

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
            "numpy": str(numpy.random.get_state()) if numpy else None,
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
        for key in ("tensors", "requires", "modes", "attributes", "hooks", "python", "numpy", "grad mode"):
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


class Chance(nn.Module):
    """Leaves out its second layer by chance, and cuts its inputs at a random place."""

    def __init__(self, chance, cut):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.chance, self.cut = chance, cut

    def forward(self, x):
        x = torch.tanh(self.first(x * (torch.arange(4) != self.cut(4))))
        return self.out(torch.tanh(self.second(x)) if self.chance() < 0.5 else x)


CHANCES = {"random": (random.random, random.randrange)}
if numpy:
    CHANCES["numpy"] = (numpy.random.random, numpy.random.randint)
    CHANCES["both"] = (random.random, numpy.random.randint)


@pytest.mark.parametrize("chances", CHANCES)
@pytest.mark.parametrize("method", ["prospr", "snip", "grasp"])
def test_the_random_numbers_of_python_and_numpy(method, chances):
    """They are drawn from the seed, the same on the way back as on the way there, and come back to where they were."""
    torch.manual_seed(0)
    snapshot = Snapshot(Chance(*CHANCES[chances]).double())
    found = []
    for seed in (0, 0, 1, 2, 3):
        found.append(prospr.score(snapshot.model, CASES[0].batches(4), method=method, seed=seed))
        snapshot.check()
        random.random()
        if numpy:
            numpy.random.random()
        snapshot.before = snapshot.take()
    same = [all(torch.equal(found[0][name], other[name]) for name in found[0]) for other in found[1:]]
    assert same[0]
    assert not all(same)


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


class Short(nn.Module):
    """Embeddings that cut their rows short as they look them up."""

    def __init__(self, kind):
        super().__init__()
        self.words, self.out = kind(9, 6, max_norm=0.5), nn.Linear(6, 3)

    def forward(self, x):
        found = self.words((4 * x).abs().long().clamp_max(8))
        return self.out(torch.tanh(found if found.dim() == 2 else found.mean(1)))


class Followed(nn.Module):
    """A frozen network that follows the one that is trained, as in MoCo and BYOL."""

    def __init__(self):
        super().__init__()
        self.online, self.head = nn.Sequential(nn.Linear(4, 6), nn.Tanh()), nn.Linear(6, 3)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.lerp_(fast, 0.25)
        return self.head(self.online(x) - 0.5 * self.target(x))


class InPlace(nn.Module):
    """Writes to its inputs."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        x.sub_(x.mean(0)).mul_(0.5)
        return self.out(torch.tanh(self.hidden(x)))


WRITERS = {
    "short embedding": lambda: Short(nn.Embedding),
    "follower": Followed,
    "inputs": InPlace,
}
WEIGHTS = [name for name, method in prospr.methods().items() if method.granularity == "weight"]


@pytest.mark.parametrize("method", WEIGHTS)
@pytest.mark.parametrize("writer", WRITERS)
def test_pruning_keeps_what_a_forward_pass_writes_to(writer, method):
    torch.manual_seed(0)
    model, batches = WRITERS[writer]().double(), CASES[0].batches(10)
    twin, kept, found = copy.deepcopy(model), copy.deepcopy(batches), []
    for net in (model, copy.deepcopy(model)):
        found.append(prospr.prune(net, batches, 0.3, method=method))
        for name, p in twin.named_parameters():
            assert torch.equal(net.get_parameter(name), p * found[0][name] if name in found[0] else p), name
        assert all(torch.equal(x, y) for a, b in zip(batches, kept, strict=True) for x, y in zip(a, b, strict=True))
    assert found[0] == found[1]


@pytest.mark.parametrize("writer", [*WRITERS, "short embedding bag"])
def test_scoring_keeps_what_a_forward_pass_writes_to(writer):
    torch.manual_seed(0)
    bags = writer == "short embedding bag"  # have no second derivative
    snapshot = Snapshot((Short(nn.EmbeddingBag) if bags else WRITERS[writer]()).double())
    for method in [prospr.Snip(), prospr.ProsPr(order="first", lr=0.1)] + ([] if bags else [prospr.ProsPr()]):
        prospr.score(snapshot.model, CASES[0].batches(4), method=method)
        snapshot.check()


def test_channels_of_a_network_that_writes_to_its_inputs():
    batches = CASES[0].batches(4)
    kept, model = copy.deepcopy(batches), InPlace().double()
    prospr.prune(model, batches, 0.3, method="3sp")
    assert all(torch.equal(x, y) for a, b in zip(batches, kept, strict=True) for x, y in zip(a, b, strict=True))


def test_every_step_sees_what_the_user_sees():
    """What a batch and a follower are at the first step they are at the second."""
    seen = []

    class Watched(Followed):
        def forward(self, x):
            seen.append((x.clone(), [p.clone() for p in self.target.parameters()]))
            x.zero_()
            return super().forward(x)

    model, batch = Watched().double(), CASES[0].batches(1)[0]
    prospr.score(model, [batch], method=prospr.ProsPr(steps=3, same_batch=True))
    assert len(seen) > 3
    for inputs, target in seen:
        assert torch.equal(inputs, batch[0])
        assert all(torch.equal(p, q) for p, q in zip(target, model.target.parameters(), strict=True))


class Caching(nn.Module):
    """Makes a table, a buffer and a flag when it first needs them, and keeps what it last gave."""

    def __init__(self):
        super().__init__()
        self.inner, self.out, self.table, self.seen, self.last = nn.Linear(6, 8), nn.Linear(8, 3), None, 0, None
        self.register_buffer("frequencies", torch.arange(1.0, 9.0))

    def forward(self, x):
        if self.table is None or len(self.table) < x.shape[1]:
            self.table = torch.outer(torch.arange(x.shape[1]).type_as(self.frequencies), self.frequencies).cos()
        if x.shape[1] > self.seen:
            self.seen = x.shape[1]
            self.register_buffer("places", torch.arange(1.0, 1.0 + self.seen), persistent=False)
        self.last = (self.inner(x) * self.table[: x.shape[1]] / self.places[:, None]).relu()
        return self.out(self.last.mean(1))


@pytest.mark.parametrize("method", ["prospr", "snip", "synflow", "magnitude"])
def test_what_forward_keeps_is_put_back(method):
    model = Caching()
    batches = [(torch.randn(8, 5, 6), torch.randint(0, 3, (8,))) for _ in range(80)]
    prospr.prune(model, batches, 0.5, method=method)
    assert (model.table, model.seen, model.last) == (None, 0, None)
    assert not hasattr(model, "places")
    assert model(batches[0][0]).shape == (8, 3)  # and it makes them anew


class Clamping(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("method", ["prospr-one-shot", "snip", "grasp"])
def test_weights_that_forward_writes_to(method):
    model = Clamping(4, 3)
    before = model.weight.detach().clone()
    prospr.score(model, [(torch.randn(5, 4), torch.randint(0, 3, (5,))) for _ in range(4)], method=method)
    assert torch.equal(model.weight, before)
    prospr.inspect(model, {"weight": torch.ones(3, 4, dtype=torch.bool)}, torch.randn(1, 4))
    assert torch.equal(model.weight, before)


def test_sparse_inputs_are_no_obstacle():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x, edges):
            return torch.sparse.mm(edges, self.b(torch.sparse.mm(edges, self.a(x)).relu()))

    batches = [(torch.randn(10, 6), torch.eye(10).to_sparse(), torch.randint(0, 3, (10,)))] * 4
    loss = lambda model, batch: nn.functional.cross_entropy(model(batch[0], batch[1]), batch[2])  # noqa: E731
    assert prospr.prune(Graph(), batches, 0.5, method="snip", loss=loss).kept == 36


@pytest.mark.parametrize("method", ["synflow", "ntk-sap", "phew"])
def test_an_example_in_place_of_batches(method):
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 3))
    masks = prospr.prune(model, None, 0.9, method=method, example=torch.zeros(1, 20))
    assert masks.kept == 69
