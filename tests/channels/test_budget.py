"""The network that results meets the budget, within one channel, in each of three units."""

import itertools
import math
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cases import BY_NAME as CASES
from channels.networks import BY_NAME, NETWORKS
from channels.twins import find
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import prospr
from prospr import Iterative, ProsPr, Score, Snip, SynFlow
from prospr.channels.trial import plan_for
from prospr.counting import flops
from prospr.errors import CollapseError, KeptWholeWarning, ModelError, ScoreError, SettingError
from prospr.meta.loss import one_sample

pytestmark = pytest.mark.filterwarnings("ignore::prospr.errors.KeptWholeWarning")
UNITS = ["parameters", "channels", "flops"]


def select_if_reached(found, scores, sparsity: float, **how: Any) -> prospr.Masks | None:
    try:
        return found.select(scores, sparsity, **how)
    except SettingError as error:
        if "cannot be reached" not in str(error):
            raise
        ends = float(re.search(r"it ends at (\S+);", str(error))[1])
    assert ends < sparsity + 1e-4
    return None


def allowed_of(sparsity: float, total: int) -> float:
    return (1 - sparsity) * total + 1e-6


def counted(model: nn.Module, call: Any) -> dict[str, int]:
    """The size of a network, by looking at it."""
    weights = {}
    for m in model.modules():
        if isinstance(m, nn.Linear):
            weights[id(m.weight)] = m.out_features
        elif isinstance(m, nn.modules.conv._ConvNd):
            weights[id(m.weight)] = m.out_channels
        elif isinstance(m, nn.MultiheadAttention):
            weights[id(m.in_proj_weight)] = 3 * m.embed_dim
        elif isinstance(m, nn.RNNBase):
            weights |= {id(p): len(p) for p in m.parameters() if p.dim() > 1}
    args, kwargs = one_sample(call)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "channels": sum(weights.values()),
        "flops": flops(model, kwargs or args),
    }


@pytest.mark.parametrize(
    "network", [n for n in NETWORKS if n.name not in ("weight-norm", "spectral-norm")], ids=lambda n: n.name
)
def test_sizes_are_those_of_the_network_that_results(network):
    model, call = network.model(), network.call()
    found = find(model, network.example())
    assert vars(found.size()) == counted(model, call)
    if not len(found):
        return
    generator = torch.Generator().manual_seed(2)
    scores = {name: torch.rand(len(ids), generator=generator) for name, ids in found.sets.items()}
    for unit, sparsity in itertools.product(UNITS, (0.1, 0.3)):
        masks = select_if_reached(found, scores, sparsity, budget=unit)
        if masks is None:
            continue
        plan = plan_for(found, model, found.removed(masks))
        small = counted(plan.shrink(model), call)
        assert vars(plan.after) == vars(found.size(masks)) == small
        assert vars(plan.before) == counted(model, call)
        assert small[unit] <= allowed_of(sparsity, vars(plan.before)[unit])


def last_removed(found, scores, masks) -> int:
    gone = found.removed(masks)
    values = {g: s for name, ids in found.sets.items() for g, s in zip(ids, scores[name].tolist(), strict=True)}
    return max(gone, key=lambda g: values[g])


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", ["vgg19", "resnet18", "unet", "mobilenet"])
def test_within_one_channel(name, unit):
    network = BY_NAME[name]
    model = network.model()
    found = find(model, network.example())
    generator = torch.Generator().manual_seed(3)
    scores = {n: torch.rand(len(ids), generator=generator) for n, ids in found.sets.items()}
    for sparsity in (0.2, 0.6, 0.8):
        masks = found.select(scores, sparsity, budget=unit)
        costs = found.costs()
        costs.remove(list(found.removed(masks)))
        allowed = allowed_of(sparsity, costs.total[unit])
        assert costs.now[unit] <= allowed
        costs.remove([last_removed(found, scores, masks)], sign=-1)
        assert costs.now[unit] > allowed


@st.composite
def networks(draw):
    """A chain of small layers, some with a norm, some with groups, some with a shortcut."""
    widths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    layers: list[nn.Module] = []
    before = 2
    for width in widths:
        kind = draw(st.sampled_from(["plain", "norm", "grouped", "residual"]))
        if kind == "grouped" and before > 1:
            layers.append(nn.Conv2d(before, before * draw(st.integers(1, 2)), 1, groups=before))
            before = layers[-1].out_channels
        layers.append(nn.Conv2d(before, width, 1, bias=draw(st.booleans())))
        if kind == "norm":
            layers.append(nn.BatchNorm2d(width))
        if kind == "residual":
            layers.append(Residual(width))
        before = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before * 4, 2))


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + torch.relu(self.conv(x))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    model=networks(),
    sparsity=st.floats(0, 0.9),
    unit=st.sampled_from(UNITS),
    scope=st.sampled_from(["global", "balanced", "layer"]),
    least=st.integers(1, 3),
    round_to=st.sampled_from([1, 2, 4]),
    per_flop=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_network_and_any_setting(model, sparsity, unit, scope, least, round_to, per_flop, seed):
    example = torch.randn(2, 2, 2, 2, generator=torch.Generator().manual_seed(seed))
    found = find(model, example)
    if len(found) < 2:
        return
    generator = torch.Generator().manual_seed(seed)
    scores = {name: torch.rand(len(ids), generator=generator) for name, ids in found.sets.items()}
    how = {"budget": unit, "scope": scope, "keep_per_layer": least, "round_to": round_to, "per_flop": per_flop}
    masks = select_if_reached(found, scores, sparsity, **how)
    if masks is None:
        return
    assert masks == found.select(scores, sparsity, **how)
    removed = found.removed(masks)
    for ids in found.sets.values():
        left = sum(g not in removed for g in ids)
        assert left == len(ids) or left % round_to == 0
        assert left >= min(1, len(ids))
    for (name, d), ids in found.axes.items():
        left = sum(g not in removed for g in ids)
        assert left >= min(least, len(ids)), (name, d)
    masks.apply(model)
    small = prospr.shrink(model, masks, example)
    call = (example,), {}
    assert counted(small, call)[unit] <= allowed_of(sparsity, counted(model, call)[unit])
    assert torch.allclose(model.eval()(example), small.eval()(example), atol=1e-5)
    assert small[0].in_channels == 2
    assert small[-1].out_features == 2


# Settings one by one


def wide() -> tuple[nn.Sequential, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 20, 3), nn.ReLU(), nn.Conv2d(20, 40, 3),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 5),
        )  # fmt: skip
    return model, torch.zeros(1, 3, 8, 8)


def kept(model: nn.Module, example: Any, sparsity: float, **how: Any) -> list[int]:
    masks = prospr.prune(model, None, sparsity, granularity="channel", example=example, **{"method": "random", **how})
    small = prospr.shrink(model, masks, example)
    return [m.out_channels for m in small.modules() if isinstance(m, nn.Conv2d)]


@pytest.mark.parametrize("sparsity", [0.1, 0.5, 0.8])
def test_rounded_to_eight(sparsity):
    for seed in range(3):
        for n, whole in zip(kept(*wide(), sparsity, round_to=8, seed=seed), (24, 20, 40), strict=True):
            assert n % 8 == 0 or n == whole


def test_so_many_stay_in_every_layer():
    assert min(kept(*wide(), 0.9, method="magnitude", keep_per_layer=4)) >= 4
    model, example = wide()
    with torch.no_grad():
        model[3].weight.mul_(1e-3)
        model[3].bias.zero_()
        model[5].weight.mul_(1e-3)
    assert kept(model, example, 0.7, method="magnitude", keep_per_layer=6)[1] == 6


def test_the_same_share_of_every_layer():
    for n, whole in zip(kept(*wide(), 0.5, scope="layer", budget="channels"), (24, 20, 40), strict=True):
        assert n / whole == pytest.approx(0.45, abs=0.08)  # half of all 89 channels, and 5 of them must stay


def test_saliency_per_flop():
    """Channel for channel the same scores: those that save most go first."""
    model, example = wide()
    found = find(model, example)
    scores = {name: torch.linspace(1, 1.001, len(ids)) for name, ids in found.sets.items()}
    plain, per_flop = (found.select(scores, 0.3, budget="flops", per_flop=p) for p in (False, True))
    assert len(found.removed(per_flop)) < len(found.removed(plain))
    saved = {name: found.costs().saved(ids[0], "flops") for name, ids in found.sets.items()}
    assert saved["3.weight"] == max(saved.values())
    assert found.removed(per_flop) <= set(found.sets["3.weight"])


def test_a_sparsity_of_zero_removes_nothing():
    model, example = wide()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    masks = prospr.prune(model, None, 0.0, method="magnitude", granularity="channel", example=example)
    assert masks.sparsity == 0
    masks.remove(model)
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in before.items())


def test_more_than_there_is_names_how_far_it_gets():
    model, example = wide()
    whole = sum(p.numel() for p in model.parameters())
    with pytest.raises(SettingError, match=r"sparsity=0.9999 of parameters cannot be reached.*keep_per_layer=1") as e:
        prospr.prune(model, None, 0.9999, method="magnitude", granularity="channel", example=example)
    least = sum(p.numel() for p in nn.Sequential(nn.Conv2d(3, 1, 3), nn.BatchNorm2d(1), nn.Conv2d(1, 1, 3),
                                                 nn.Conv2d(1, 1, 3), nn.Linear(1, 5)).parameters())  # fmt: skip
    assert f"it ends at {1 - least / whole:.4f}; lower it" in str(e.value)
    assert kept(model, example, math.floor((1 - least / whole) * 1e4) / 1e4) == [1, 1, 1]


def test_a_share_that_is_a_whole_number_is_reached_in_spite_of_rounding():
    """1 - 0.8 is a little less than 0.2, and two of ten channels are all that can stay."""
    model = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 1))
    assert (1 - 0.8) * 10 < 2
    masks = prospr.prune(
        model, None, 0.8, method="magnitude", granularity="channel", budget="channels", example=torch.zeros(1, 4)
    )
    assert prospr.shrink(model, masks, torch.zeros(1, 4))[0].out_features == 1


def test_of_equal_scores_the_later_channel_goes():
    model, example = wide()
    found = find(model, example)
    scores = {name: torch.ones(len(ids)) for name, ids in found.sets.items()}
    scores["0.weight"][0] = 2.0
    one, two = (found.select(scores, 0.4, budget="channels") for _ in range(2))
    assert one == two
    removed = found.removed(one)
    assert removed == set(range(len(found) - len(removed), len(found)))


def test_inputs_and_outputs_stay():
    for name in ("vgg19", "unet", "two-inputs", "dict-output"):
        network = BY_NAME[name]
        model = network.model()
        found = find(model, network.example())
        last = [n for n, p in model.named_parameters() if p.dim() > 1][-1]
        assert set(found.axes[last, 0]) == {-1}
        first = next(n for n, p in model.named_parameters() if p.dim() > 1)
        assert (first, 1) not in found.axes or set(found.axes[first, 1]) == {-1}


def test_only_what_is_prunable_loses_channels():
    model, example = wide()
    with pytest.warns(KeptWholeWarning, match=r"0\.weight \(0\.weight is not among prunable=\)"):
        masks = prospr.prune(
            model, None, 0.2, method="random", granularity="channel", example=example,
            prunable=["3.weight", "5.weight", "8.weight"],
        )  # fmt: skip
    small = prospr.shrink(model, masks, example)
    assert small[0].out_channels == 24
    assert (small[3].out_channels, small[5].out_channels) < (20, 40)


# In rounds


@dataclass(frozen=True)
class Watched(Score):
    """Keeps the masks it was asked with."""

    inner: Score = field(default_factory=Snip)
    seen: list = field(default_factory=list)

    def score_groups(self, problem, total):
        self.seen.append(problem.masks)
        return self.inner.score_groups(problem, total)


def rounds(inner: Score, case, sparsity: float, count: int, recover: bool = False, **how: Any) -> list:
    watched = Watched(inner)
    last = prospr.prune(
        case.model(), case.batches(6), sparsity, method=Iterative(watched, count, recover=recover),
        granularity="channel", **how,
    )  # fmt: skip
    assert watched.seen[0] is None
    return [*watched.seen[1:], last]


@pytest.mark.parametrize("inner", [Snip(), ProsPr(steps=2, lr=0.1), SynFlow()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("name", ["residual", "unet"])
def test_rounds_are_nested_and_end_at_the_budget(name, inner):
    case = CASES[name]
    masks = rounds(inner, case, 0.5, 5)
    assert len(masks) == 5
    for before, after in itertools.pairwise(masks):
        assert all(bool((after[n] <= before[n]).all()) for n in after)
    model = case.model()
    small = prospr.shrink(model, masks[-1], case.batches(1)[0][0])
    assert sum(p.numel() for p in small.parameters()) <= 0.5 * sum(p.numel() for p in model.parameters())


@dataclass(frozen=True)
class Wide:
    """A network with enough channels for some to come back."""

    activation: type[nn.Module]

    def model(self) -> nn.Module:
        act = self.activation
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(4, 32), act(), nn.Linear(32, 32), act(), nn.Linear(32, 3)).double()

    def batches(self, count: int) -> list:
        return CASES["mlp"].batches(count)


def test_channels_can_return_in_force_where_what_they_add_is_not_zero():
    """All of a channel is masked, what comes in and what goes out: where its activation is zero at zero, so is every
    derivative of it, and it stays away."""

    def returned(activation: type[nn.Module], recover: bool) -> int:
        masks = rounds(Snip(), Wide(activation), 0.9, 12, recover=recover)
        return sum(int((b[n] & ~a[n]).sum()) for a, b in itertools.pairwise(masks) for n in b)

    assert returned(nn.Sigmoid, False) == 0
    assert returned(nn.Sigmoid, True) > 0
    assert returned(nn.ReLU, True) == 0


def test_a_hundred_rounds_of_synflow_and_force_by_name():
    case = CASES["residual"]
    whole = sum(p.numel() for p in case.model().parameters())
    for method in ("synflow", "force", "iter-snip", "prospr-iterative"):
        model = case.model()
        masks = prospr.prune(model, case.batches(6), 0.6, method=method, granularity="channel")
        small = prospr.shrink(model, masks, case.batches(1)[0][0])
        assert sum(p.numel() for p in small.parameters()) <= 0.4 * whole


def chain_of_three() -> tuple[nn.Sequential, torch.Tensor]:
    """Channels that can go: two of the first layer, three of the second."""
    return nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.zeros(1, 4)


@pytest.mark.parametrize(
    ("scope", "removed"),  # in that order, one channel after another
    [("global", [(1, 2), (1, 1), (0, 1)]), ("balanced", [(1, 2), (0, 1), (1, 1)])],
)
def test_balanced_compares_shares_by_hand(scope, removed):
    model, example = chain_of_three()
    found = find(model, example)
    first, second = found.sets.values()
    scores = dict(zip(found.sets, [torch.tensor([30.0, 10.0]), torch.tensor([5.0, 3.0, 2.0])], strict=True))
    # as shares: 3/4, 1/4 and 1/2, 3/10, 2/10
    groups = [(first, second)[layer][channel] for layer, channel in removed]
    for gone in (1, 2, 3):
        masks = found.select(scores, gone / 6, budget="channels", scope=scope)  # six outputs, the last is the network's
        assert found.removed(masks) == set(groups[:gone])


def test_balanced_counts_the_weights_that_a_channel_is_in():
    """A stream's channels are in four weights here and the inner ones in two, so shares of the stream count twice."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.start, self.inner, self.back, self.end = (nn.Linear(a, b) for a, b in ((3, 4), (4, 4), (4, 4), (4, 2)))

        def forward(self, x):
            stream = self.start(x)
            return self.end(stream + self.back(torch.relu(self.inner(stream))))

    model, example = Block(), torch.zeros(1, 3)
    found = find(model, example)
    assert {name: sorted({n for (n, _), ids in found.axes.items() if ids[0] in of and n.endswith("weight")})
            for name, of in found.sets.items()} == {
        "start.weight": ["back.weight", "end.weight", "inner.weight", "start.weight"],
        "inner.weight": ["back.weight", "inner.weight"],
    }  # fmt: skip
    scores = {"start.weight": torch.tensor([4.0, 3.0, 2.0, 1.0]), "inner.weight": torch.tensor([5.0, 2.5, 1.5, 1.0])}
    # shares, four weights and two: 1.6, 1.2, 0.8, 0.4 and 1.0, 0.5, 0.3, 0.2
    order = [("inner.weight", 3), ("inner.weight", 2), ("start.weight", 3), ("inner.weight", 1), ("start.weight", 2)]
    gone, total = set(), found.size().channels
    for name, channel in order:
        gone.add(found.sets[name][channel])
        left = found.size(found.masks(gone)).channels
        masks = found.select(scores, 1 - left / total, budget="channels", scope="balanced")
        assert found.removed(masks) == gone


def test_balanced_shares_are_of_what_is_left():
    model, example = chain_of_three()
    found = find(model, example)
    first, second = found.sets.values()
    before = found.masks({second[0]})  # an earlier round took the second layer's first channel
    scores = dict(zip(found.sets, [torch.tensor([70.0, 30.0]), torch.tensor([9.0, 3.0, 2.0])], strict=True))
    masks = found.select(scores, 2 / 6, budget="channels", scope="balanced", among=before)
    assert found.removed(masks) == {second[0], first[1]}  # 0.3 is less than 2 / (3 + 2), and more than 2 / 14


def test_a_round_in_which_nothing_differs_is_a_collapse():
    class Alike(Score):
        def score_groups(self, problem, total):
            scores = total({name: w.abs() for name, w in problem.weights().items()})
            return scores if problem.masks is None else {n: torch.zeros_like(s) for n, s in scores.items()}

    case = CASES["residual"]
    with pytest.raises(CollapseError, match=r"round 2 of 3.*all scores are 0"):
        prospr.prune(case.model(), case.batches(1), 0.5, method=Iterative(Alike(), 3), granularity="channel")


# What cannot be


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"budget": "weights"}, r"budget='weights': use 'parameters', 'channels' or 'flops'"),
        ({"round_to": 0}, r"round_to=0: use a whole number, 1 or more"),
        ({"round_to": 2.5}, r"round_to=2.5"),
        ({"scope": "erk"}, r"scope='erk' is for single weights; for channels use 'global', 'balanced' or 'layer'"),
        ({"scope": "all"}, r"scope='all': for channels use 'global', 'balanced' or 'layer'"),
        ({"keep_per_layer": 1.5}, r"keep_per_layer=1.5: for channels use a whole number"),
        ({"sparsity": 1.2}, r"sparsity=1.2"),
        ({"granularity": "filter"}, r"filter"),
        ({"granularity": "weight", "round_to": 8}, r"budget, round_to and per_flop are for granularity='channel'"),
        ({"granularity": "weight", "per_flop": True}, r"are for granularity='channel'"),
        ({"granularity": "weight", "budget": "flops"}, r"are for granularity='channel'"),
    ],
)
def test_settings_that_cannot_be(how, says):
    model, example = wide()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    how = {"sparsity": 0.5, "granularity": "channel", "example": example, "method": "random", **how}
    with pytest.raises(SettingError, match=says):
        prospr.prune(model, None, **how)
    assert list(before) == list(model.state_dict())


def test_scores_that_rank_nothing():
    model, example = wide()
    found = find(model, example)
    ones = {name: torch.ones(len(ids)) for name, ids in found.sets.items()}
    with pytest.raises(ScoreError, match=r"all scores are 1, so they rank nothing.*Use another batch, loss or method"):
        found.select(ones, 0.5)
    bad = {**ones, "3.weight": torch.full((20,), math.nan)}
    with pytest.raises(ScoreError, match=r"3\.weight: 20 of 20 scores are NaN or infinite; check the loss"):
        found.select(bad, 0.5)
    with pytest.raises(ScoreError, match=r"scores are for 0\.weight, and the sets here are 0\.weight, 3\.weight"):
        found.select({"0.weight": ones["0.weight"]}, 0.5)
    with pytest.raises(ScoreError, match=r"3\.weight: scores of shape \(7,\) for 20 channels; one each"):
        found.select({**ones, "3.weight": torch.rand(7)}, 0.5)


@pytest.mark.parametrize("method", ["random", "magnitude", "snip"])
def test_a_network_of_which_nothing_can_go(method):
    network = BY_NAME["one-group-norm"]
    model, x = network.model(), network.example()[0]
    batches = [(x, torch.zeros(len(x), dtype=torch.long))]
    with pytest.raises(ModelError, match=r"no channel of this network can go: 0\.weight \(all its channels are tied"):
        prospr.prune(model, batches, 0.5, method=method, granularity="channel")


def test_nothing_to_run_the_model_on():
    model, _ = wide()
    with pytest.raises(prospr.errors.BatchError, match=r"pass batches and a loss that calls it, or example="):
        prospr.prune(model, None, 0.5, method="magnitude", granularity="channel")
