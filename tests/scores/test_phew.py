"""PHEW: where walks go, how often, and that what they visit are paths."""

import copy
import itertools
import random
from collections import Counter

import pytest
import torch
from cases import BY_NAME
from torch import nn

import prospr
from prospr.errors import SettingError
from prospr.lab.models import build
from prospr.schedules import reordered


def chain(*sizes: int, seed: int = 0) -> nn.Sequential:
    layers: list[nn.Module] = []
    generator = torch.Generator().manual_seed(seed)
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b, bias=False), nn.ReLU()]
        with torch.no_grad():
            layers[-2].weight.copy_(torch.randn(b, a, generator=generator))
    return nn.Sequential(*layers[:-1])


def batches(model: nn.Module, shape: tuple[int, ...] = ()):
    first = next(model.parameters())
    return [(torch.zeros(1, *(shape or first.shape[1:])), torch.zeros(1, dtype=torch.long))]


def published(weights: list[torch.Tensor], walks: int, rng: random.Random) -> set[tuple[int, int, int]]:
    """The published rule for a chain, one walk after the other: the weights visited, as (layer, output, input)."""
    seen = set()
    for i in range(walks):
        forward = i % 2 == 0
        unit = i // 2 % (weights[0].shape[1] if forward else weights[-1].shape[0])
        for k in range(len(weights)) if forward else reversed(range(len(weights))):
            line = (weights[k][:, unit] if forward else weights[k][unit]).abs().tolist()
            other = rng.choices(range(len(line)), line)[0]
            seen.add((k, other, unit) if forward else (k, unit, other))
            unit = other
    return seen


def visited(model: nn.Module, walks: int, seed: int) -> set[tuple[int, int, int]]:
    """The weights that our first `walks` walks visit."""
    from prospr.scores.base import Problem
    from prospr.scores.phew import _Network
    from prospr.tracing.trace import trace

    names = tuple(prospr.prunable(model))
    network = _Network(Problem(model, names, seed=seed), trace(model, ((batches(model)[0][0],), {})))
    first = network.walk(1, seed)
    found = set()
    for k, name in enumerate(names):
        columns = dict(model.named_parameters())[name].shape[1]
        steps = first[name]
        for entry in torch.nonzero(steps < walks * len(names)).flatten().tolist():
            found.add((k, entry // columns, entry % columns))
    return found


def test_a_walk_takes_a_weight_in_proportion_to_its_size():
    net = chain(1, 2, 1)
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[1.0], [-3.0]]))
        net[2].weight.copy_(torch.tensor([[5.0, 1.0]]))
    taken = Counter()
    for seed in range(400):
        taken.update(visited(net, 1, seed))
    # forward from the one input: 1 : 3, whatever comes behind
    assert taken[0, 1, 0] / 400 == pytest.approx(0.75, abs=0.07)
    # and then the one weight there is from that unit
    assert taken[0, 1, 0] == taken[1, 0, 1]
    assert taken[0, 0, 0] + taken[0, 1, 0] == 400


def test_as_often_as_the_published_rule_visits():
    net = chain(3, 4, 5, 2)
    weights = [p.detach() for p in net.parameters()]
    ours, theirs = Counter(), Counter()
    rng = random.Random(0)
    for seed in range(400):
        ours.update(visited(net, 6, seed))
        theirs.update(published(weights, 6, rng))
    every = {(k, o, i) for k, w in enumerate(weights) for o in range(w.shape[0]) for i in range(w.shape[1])}
    # deviations of a difference of two shares of 400 are 0.035 at most
    assert max(abs(ours[e] - theirs[e]) / 400 for e in every) < 0.13
    assert sum(abs(ours[e] - theirs[e]) / 400 for e in every) / len(every) < 0.035


@pytest.mark.parametrize("name", ["small_convnet", "resnet20", "vgg16"])
def test_what_is_kept_are_paths(name):
    model = build(name, seed=0, width=4)
    channels = next(model.parameters()).shape[1]
    example = torch.zeros(1, channels, 32, 32) if name != "small_convnet" else torch.zeros(1, 1, 8, 8)
    masks = prospr.prune(model, [(example, torch.zeros(1, dtype=torch.long))], 0.9, method="phew")
    seen = prospr.inspect(model, masks, example)
    # the last walk may be cut short by the count
    assert seen.connected
    assert masks.kept - seen.effective_density * masks.total < 3 * len(masks)


def test_no_layer_of_a_residual_network_is_empty():
    for shortcut in "AB":
        model = build("resnet20", seed=0, shortcut=shortcut)
        example = torch.zeros(1, 3, 32, 32)
        masks = prospr.prune(model, [(example, torch.zeros(1, dtype=torch.long))], 0.98, method="phew")
        assert not masks.empty()


def test_the_order_is_that_of_the_walks():
    net = chain(3, 4, 2)
    scores = prospr.score(net, batches(net), method=prospr.Phew(density=1.0), seed=3)
    few = prospr.select(scores, 1 - 4 / 20)
    more = prospr.select(scores, 1 - 12 / 20)
    assert all((few[name] <= more[name]).all() for name in few)
    again = prospr.score(net, batches(net), method=prospr.Phew(density=1.0), seed=3)
    assert all(torch.equal(scores[name], again[name]) for name in scores)
    other = prospr.score(net, batches(net), method=prospr.Phew(density=1.0), seed=4)
    assert any(not torch.equal(scores[name], other[name]) for name in scores)


def test_weights_that_no_walk_reaches_come_last_by_size():
    net = chain(2, 3, 2)
    with torch.no_grad():
        net[0].weight[2] = 0  # no walk comes to the third unit from the front
        net[2].weight[:, 2] = 0  # nor from the back
    scores = prospr.score(net, batches(net), method=prospr.Phew(density=1.0))
    reached = torch.cat([scores["0.weight"][:2].flatten(), scores["2.weight"][:, :2].flatten()])
    assert (reached > 1).all()
    assert (scores["0.weight"][2] == 0).all()
    assert (scores["2.weight"][:, 2] == 0).all()


def test_grouped_transposed_and_concatenated_layers():
    for name in ("depthwise", "unet", "attention", "shared-layer"):
        case = BY_NAME[name]
        model = case.model()
        masks = prospr.prune(model, case.batches(1), 0.5, method="phew", collapse="ignore", **case.settings)
        assert masks.kept == round(0.5 * masks.total)


def test_bad_settings():
    with pytest.raises(SettingError, match=r"density=1\.5"):
        prospr.Phew(density=1.5)
    with pytest.raises(prospr.errors.BatchError, match="PHEW must know the shape"):
        prospr.prune(chain(3, 2), None, 0.5, method="phew")


def test_walks_go_over_redrawn_weights():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 40, bias=False), nn.ReLU(), nn.Linear(40, 2, bias=False))
    batches = [(torch.randn(2, 3), torch.zeros(2).long())]
    pruned = lambda n, m: prospr.prune(copy.deepcopy(n), batches, 0.9, method=m, seed=3, collapse="ignore")  # noqa: E731
    other = copy.deepcopy(net)
    with torch.no_grad():
        for name, w in reordered({name: p.detach() for name, p in net.named_parameters()}, 3).items():
            other.get_parameter(name).copy_(w)
    redrawn = pruned(net, prospr.Iterative(prospr.Phew(), rounds=1, redraw=True))
    assert redrawn == pruned(other, "phew")
    assert redrawn != pruned(net, "phew")
