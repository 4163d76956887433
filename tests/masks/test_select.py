"""Selection: exact counts, ties, scopes, floors, and scores that rank nothing."""

import math
import warnings
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import prospr
from prospr.errors import ScoreError, SettingError, ZeroScoreWarning
from prospr.masks.select import _evening, select_among

select = prospr.select
shapes = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple), min_size=1, max_size=5)
sparsities = st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0, 0.5, 0.9, 0.95, 0.99, 0.999999]))
# few distinct values, so that there are ties
values = st.sampled_from([torch.tensor([0.5, 1.0, 2.0]), torch.linspace(0.1, 1, 97), -torch.linspace(0, 1, 11)])


def make_scores(shapes, values, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = {f"layer{i}": values[torch.randint(len(values), s, generator=generator)] for i, s in enumerate(shapes)}
    scores["layer0"].view(-1)[0] = 3.0  # not all equal
    return scores


def by_sorting(scores, count, floor=0):
    """The rule in plain Python: floors first, then the highest scores, ties by (layer, position)."""
    kept = set()
    for name, s in scores.items():
        order = sorted(range(s.numel()), key=lambda i, s=s: (-s.flatten()[i].item(), i))
        kept |= {(name, i) for i in order[:floor]}
    every = [(-x, layer, i) for layer, s in enumerate(scores.values()) for i, x in enumerate(s.flatten().tolist())]
    names = list(scores)
    for _, layer, i in sorted(every):
        if len(kept) == count:
            break
        kept.add((names[layer], i))
    return {n: [(n, i) in kept for i in range(s.numel())] for n, s in scores.items()}


@settings(max_examples=80, deadline=None)
@given(shapes, sparsities, values, st.integers(0, 99))
def test_global_equals_sorting(shapes, sparsity, values, seed):
    scores = make_scores(shapes, values, seed)
    total = sum(math.prod(s) for s in shapes)
    masks = select(scores, sparsity)
    count = max(1, round((1 - sparsity) * total))
    assert masks.kept == count
    assert list(masks) == list(scores)
    assert {n: m.flatten().tolist() for n, m in masks.items()} == by_sorting(scores, count)
    assert select(scores, sparsity) == masks
    assert all(m.dtype == torch.bool and m.shape == scores[n].shape for n, m in masks.items())


@settings(max_examples=80, deadline=None)
@given(shapes, sparsities, values, st.integers(0, 99), st.sampled_from(["global", "layer", "erk"]), st.integers(0, 9))
def test_counts_and_floors_of_every_scope(shapes, sparsity, values, seed, scope, floor):
    scores = make_scores(shapes, values, seed)
    sizes = [math.prod(s) for s in shapes]
    count = max(1, round((1 - sparsity) * sum(sizes)))
    least = [min(floor, n) for n in sizes]
    if sum(least) > count:
        with pytest.raises(SettingError, match=f"keep_per_layer={floor} needs {sum(least)} .* keeps {count}; lower"):
            select(scores, sparsity, scope=scope, keep_per_layer=floor)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ZeroScoreWarning)
        masks = select(scores, sparsity, scope=scope, keep_per_layer=floor)
    assert masks.kept == count
    for (name, mask), low in zip(masks.items(), least, strict=True):
        assert mask.sum() >= low
        if scope == "global":
            continue
        # inside a layer the rule is the same
        assert mask.flatten().tolist() == by_sorting({name: scores[name]}, int(mask.sum()))[name]
    if scope == "global":
        assert {n: m.flatten().tolist() for n, m in masks.items()} == by_sorting(scores, count, floor)


@settings(max_examples=50, deadline=None)
@given(shapes, sparsities)
def test_the_same_density_in_every_layer(shapes, sparsity):
    scores = make_scores(shapes, torch.linspace(0.1, 1, 97), 0)
    total = sum(math.prod(s) for s in shapes)
    density = max(1, round((1 - sparsity) * total)) / total
    for name, mask in select(scores, sparsity, scope="layer").items():
        assert abs(mask.sum().item() - density * mask.numel()) < 1 + 1e-6, name


def erk_by_bisection(shapes, density):
    """min(1, e (sum of dims) / (product of dims)), e such that the mean is right."""
    sizes = [math.prod(s) for s in shapes]
    raw = [sum(s) / n for s, n in zip(shapes, sizes, strict=True)]
    low, high = 0.0, 1.0 / min(raw)
    for _ in range(200):
        e = (low + high) / 2
        if sum(n * min(1.0, e * r) for n, r in zip(sizes, raw, strict=True)) < density * sum(sizes):
            low = e
        else:
            high = e
    return [min(1.0, high * r) for r in raw]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 64), min_size=1, max_size=4).map(tuple), min_size=1, max_size=6), st.floats(0, 1)
)
def test_erk_densities_against_bisection(shapes, density):
    named = {str(i): s for i, s in enumerate(shapes)}
    got = prospr.masks.erk_densities(named, density)
    assert list(got) == list(named)
    assert all(0 <= d <= 1 for d in got.values())
    assert list(got.values()) == pytest.approx(erk_by_bisection(shapes, density), rel=1e-9, abs=1e-9)
    sizes = {n: math.prod(s) for n, s in named.items()}
    assert sum(got[n] * sizes[n] for n in got) == pytest.approx(density * sum(sizes.values()))


def test_erk_by_hand():
    # raw densities (2+2)/4 = 1 and (6+6)/36 = 1/3; e (4 + 12) = 0.4 * 40: e = 1, so the small layer is just full
    got = prospr.masks.erk_densities({"a": (2, 2), "b": (6, 6)}, 0.4)
    assert got == pytest.approx({"a": 1.0, "b": 1 / 3})
    # at 0.85 the small layer is full and b has the other 30 of 36
    got = prospr.masks.erk_densities({"a": (2, 2), "b": (6, 6)}, 0.85)
    assert got == pytest.approx({"a": 1.0, "b": 30 / 36})
    masks = select({"a": torch.rand(2, 2), "b": torch.rand(6, 6)}, 0.8, scope="erk")
    assert {n: int(m.sum()) for n, m in masks.items()} == {"a": 2, "b": 6}


@pytest.mark.parametrize(
    ("sparsity", "kept"), [(0, 200), (0.5, 100), (0.95, 10), (0.999, 1), (0.99999, 1), (0.992, 2), (1 / 3, 133)]
)
def test_counts_by_hand(sparsity, kept):
    assert select({"w": torch.rand(10, 20)}, sparsity).kept == kept
    if isinstance(sparsity, float):
        assert select({"w": torch.rand(10, 20)}, Fraction(sparsity)).kept == kept


def test_a_sparsity_of_numpy():
    numpy = pytest.importorskip("numpy")
    for sparsity in numpy.array([0.5, 0.95], dtype=numpy.float32):
        assert select({"w": torch.rand(10, 20)}, sparsity).kept == round(200 * (1 - float(sparsity)))
    with pytest.raises(SettingError, match="use a number from 0"):
        select({"w": torch.rand(10, 20)}, numpy.float32(1.5))


def test_ties_by_layer_and_position():
    ones = {"b": torch.ones(2, 2), "a": torch.ones(3)}
    ones["a"][2] = 2.0
    masks = select(ones, 3 / 7)  # keeps 4: the two, then the first three ones; "b" comes first
    assert masks["b"].tolist() == [[True, True], [True, False]]
    assert masks["a"].tolist() == [False, False, True]
    masks = select(ones, 3 / 7, keep_per_layer=2)
    assert masks["b"].tolist() == [[True, True], [False, False]]
    assert masks["a"].tolist() == [True, False, True]


def test_a_tie_of_many_is_deterministic():
    score = (torch.arange(100_000) % 3).float()
    masks = [select({"w": score}, 0.5) for _ in range(3)]
    assert masks[0] == masks[1] == masks[2]
    twos, ones = score == 2, torch.nonzero(score == 1).flatten()
    assert torch.equal(masks[0]["w"] & twos, twos)
    assert torch.equal(torch.nonzero(masks[0]["w"] & ~twos).flatten(), ones[: 50_000 - int(twos.sum())])


HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("scores", "order"),
    [
        # 1e5 overflows float16 and 1e-9 vanishes in it
        ({"a": ([1e5, 1e-9, 2e-9], BRAIN), "b": ([1.0, 6e4], HALF)}, "a0 b1 b0 a2 a1"),
        # 1 + 2^-10 is 1 in bfloat16
        ({"a": ([1.0, 1.0009765625], HALF), "b": ([1.0, 2.0], BRAIN)}, "b1 a1 a0 b0"),
        ({"a": ([1.0, 0.5], SINGLE), "b": ([1.0 + 1e-12, 0.5], DOUBLE)}, "b0 a0 a1 b1"),
        ({"a": ([1.0, 0.5], DOUBLE), "b": ([0.75, 1.0], HALF), "c": ([1.0], BRAIN)}, "a0 b1 c0 b0 a1"),
    ],
)
def test_mixed_dtypes(scores, order):
    scores = {n: torch.tensor(values, dtype=dtype) for n, (values, dtype) in scores.items()}
    order = order.split()
    for count in range(1, len(order)):
        masks = select(scores, 1 - count / len(order))
        assert sorted(f"{n}{i}" for n, m in masks.items() for i in m.nonzero().flatten()) == sorted(order[:count])


def test_balanced_ranks_shares_of_layers():
    """By hand: the layers' totals are 10 and 100, so the shares are .4 .3 .2 .1 and .5 .35 .15."""
    scores = {"a": torch.tensor([4.0, 3.0, 2.0, 1.0]), "b": torch.tensor([50.0, 35.0, 15.0])}
    masks = select(scores, 4 / 7, scope="balanced")
    assert masks["a"].tolist() == [True, False, False, False]
    assert masks["b"].tolist() == [True, True, False]
    assert select(scores, 4 / 7)["b"].all()  # with one threshold for all, the other layer would be empty
    # What is pruned has no part in the total: without the 4 the shares of `a` are 1/2, 1/3 and 1/6.
    left = {"a": torch.tensor([False, True, True, True]), "b": torch.ones(3, dtype=torch.bool)}
    masks = select_among(scores, left, 5 / 7, scope="balanced")
    assert masks["a"].tolist() == [False, True, False, False]
    assert masks["b"].tolist() == [True, False, False]


@pytest.mark.parametrize(("second", "kept"), [(0.30, False), (0.33, True)])
def test_tapered_takes_from_large_layers(second, kept):
    """By hand: 1024 weights and 32, so shares of the first count 32^0.3 = 2.83 times less; its 0.9 counts as 0.318."""
    large, small = torch.zeros(1024), torch.zeros(32)
    large[:2], small[:2] = torch.tensor([0.9, 0.1]), torch.tensor([1 - second, second])
    scores = {"large": 7 * large, "small": small}
    masks = select(scores, 1 - 2 / 1056, scope="tapered")
    assert masks["small"][:2].tolist() == [True, kept]
    assert masks["large"][:2].tolist() == [not kept, False]
    assert select(scores, 1 - 2 / 1056, scope="balanced")["large"][0]


def test_spread_gives_every_channel_its_share():
    """By hand: scaling rows and columns to equal totals, (9 1 | 1 1) becomes (3 1 | 1 3) / 8, all times a constant."""
    scores = {"w": torch.tensor([[9.0, 1.0], [1.0, 1.0]])}
    assert select(scores, 0.5, scope="balanced")["w"].tolist() == [[True, True], [False, False]]
    assert select(scores, 0.5, scope="spread")["w"].tolist() == [[True, False], [False, True]]


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 3, 3)])
def test_spread_scores_have_equal_totals(shape):
    scores = torch.rand(shape, dtype=torch.float64) ** 4 * torch.rand(shape[0], *[1] * (len(shape) - 1)) ** 4
    even = (scores * _evening(scores, sweeps=500)).reshape(6, 5, -1).sum(2)
    for dim in (0, 1):
        totals = even.sum(dim)
        torch.testing.assert_close(totals, totals.mean().expand_as(totals))


def test_spread_in_rounds_leaves_no_channel_without_weights():
    """Scores of one loud output: as shares of the layer it takes all that is kept, spread it takes its part."""
    scores = torch.rand(8, 8, generator=torch.Generator().manual_seed(0))
    scores[0] += 10
    kept = {scope: select({"w": scores}, 0.75, scope=scope)["w"] for scope in ("balanced", "spread")}
    assert kept["balanced"].any(1).sum() < 8
    assert kept["spread"].any(1).all()


@pytest.mark.parametrize("scope", ["balanced", "tapered", "spread"])
def test_shares_with_a_layer_that_scores_nothing(scope):
    scores = {"a": torch.zeros(3), "b": torch.tensor([1.0, 2.0]), "c": torch.zeros(2, 2)}
    assert select(scores, 7 / 9, scope=scope)["b"].all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("scope", ["global", "balanced", "tapered", "spread", "layer", "erk"])
def test_scores_that_are_not_finite(bad, scope):
    scores = {"conv1.weight": torch.rand(3, 3), "conv2.weight": torch.rand(4)}
    scores["conv2.weight"][1:3] = bad
    with pytest.raises(ScoreError, match=r"conv2\.weight: 2 of 4 scores are NaN or infinite"):
        select(scores, 0.5, scope=scope)


@pytest.mark.parametrize("value", [0.0, 0.25])
def test_scores_that_are_all_equal(value):
    with pytest.raises(ScoreError, match=f"all scores are {value:g}, so they rank nothing"):
        select({"a": torch.full((3,), value), "b": torch.full((2, 2), value)}, 0.5)


def test_a_single_weight_is_kept():
    assert select({"w": torch.zeros(1)}, 0.99).kept == 1


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ({}, "there are no scores"),
        ({"w": torch.ones(3, dtype=torch.int64)}, "w: a score must be a non-empty tensor of floating-point"),
        ({"w": torch.ones(0)}, "w: a score must be a non-empty tensor"),
        ({"w": [1.0, 2.0]}, "w: a score must be a non-empty tensor"),
    ],
)
def test_what_is_not_a_score(scores, message):
    with pytest.raises(ScoreError, match=message):
        select(scores, 0.5)


def test_zero_scores_that_are_kept():
    scores = {"a": torch.tensor([0.0, 0.0, 1.0]), "b": torch.tensor([0.0, 2.0, 0.0])}
    with pytest.warns(ZeroScoreWarning, match="1 of the 3 weights kept have a score of exactly 0"):
        masks = select(scores, 0.5)
    assert masks["a"].tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("scores", "sparsity"),
    [
        ({"a": torch.tensor([0.0, 0.0, 1.0]), "b": torch.tensor([0.0, 2.0])}, 0.6),  # no zero is kept
        ({"a": torch.tensor([0.0, 0.0, 1.0])}, 0.0),  # nothing is pruned
        ({"a": torch.tensor([-1.0, 0.0]), "b": torch.tensor([1.0, 2.0])}, 0.25),  # 0 is a rank like another
    ],
)
def test_no_warning_where_the_choice_is_clear(scores, sparsity):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select(scores, sparsity)


@pytest.mark.parametrize("sparsity", [1, 1.0, -0.1, 2, float("nan"), float("inf"), "0.5", None])
def test_sparsity_out_of_range(sparsity):
    with pytest.raises(SettingError, match=r"sparsity=.*: use a number from 0 up to, not including, 1"):
        select({"w": torch.rand(4)}, sparsity)


@pytest.mark.parametrize("floor", [-1, 1.5, "2"])
def test_a_floor_that_is_not_a_count(floor):
    with pytest.raises(SettingError, match=r"keep_per_layer=.*: use a whole number"):
        select({"w": torch.rand(4)}, 0.5, keep_per_layer=floor)


def test_an_unknown_scope():
    with pytest.raises(
        SettingError,
        match=r"scope='uniform': use 'global', 'balanced', 'mapped', 'tapered', 'spread', 'focused', 'layer' or 'erk'",
    ):
        select({"w": torch.rand(4)}, 0.5, scope="uniform")


def test_the_scores_are_left_alone():
    scores = {"a": torch.rand(5), "b": torch.rand(2, 2)}
    before = {n: s.clone() for n, s in scores.items()}
    select(scores, 0.5, keep_per_layer=1)
    assert all(torch.equal(scores[n], before[n]) for n in before)
