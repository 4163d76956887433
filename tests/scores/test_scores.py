"""The scores' numbers: by hand where that can be done, and against one another."""

import pytest
import torch
import torch.nn.functional as F
from cases import BY_NAME
from torch import nn

import prospr
from prospr import Magnitude, ProsPr, Random, Score, Snip
from prospr.errors import BatchError, ModelError, ScoreError, SettingError
from prospr.meta import SGD, AdamW


def line(*weights):
    """A linear layer of one output without bias."""
    model = nn.Linear(len(weights), 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([weights]))
    return model


def bowl(model, curvature):
    """0.5 sum(a w^2): one step of SGD multiplies each weight by 1 - lr a."""
    return 0.5 * (curvature * model.weight**2).sum()


def shares(*values):
    return pytest.approx([v / sum(values) for v in values])


def test_snip_by_hand():
    """L = (w1 x1 + w2 x2 - y)^2 / 2 at w = (3, -1), x = (1, 2), y = 4: dL/dw = (1 - 4) x, so |w g| = |9|, |6|."""
    batch = torch.tensor([[1.0, 2.0]]).double(), torch.tensor([[4.0]]).double()
    loss = lambda m, b: 0.5 * (m(b[0]) - b[1]).square().sum()  # noqa: E731
    scores = prospr.score(line(3.0, -1.0), [batch], method="snip", loss=loss)
    assert list(scores) == ["weight"]
    assert scores["weight"].tolist()[0] == shares(9.0, 6.0)


def test_magnitude_by_hand():
    scores = prospr.score(line(3.0, -1.0, 0.0), method="magnitude")
    assert scores["weight"].tolist()[0] == shares(3.0, 1.0, 0.0)


A = torch.tensor([[4.0, -1.0, 0.5]], dtype=torch.float64)
W = (1.0, 2.0, -3.0)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_prospr_by_hand(steps):
    """On the bowl dL(w_M)/dw_0 = a (1 - lr a)^2M w_0."""
    scores = prospr.score(line(*W), [A] * (steps + 1), method=ProsPr(steps=steps, lr=0.1), loss=bowl)
    expected = [abs(a * (1 - 0.1 * a) ** (2 * steps) * w**2) for a, w in zip(A[0].tolist(), W, strict=True)]
    assert scores["weight"].tolist()[0] == shares(*expected)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_first_order_by_hand(steps):
    """Without curvature it is the gradient at w_M = (1 - lr a)^M w_0 alone."""
    method = ProsPr(steps=steps, lr=0.1, order="first")
    scores = prospr.score(line(*W), [A] * (steps + 1), method=method, loss=bowl)
    expected = [abs(a * (1 - 0.1 * a) ** steps * w**2) for a, w in zip(A[0].tolist(), W, strict=True)]
    assert scores["weight"].tolist()[0] == shares(*expected)


@pytest.mark.parametrize("kappa", [1.0, 0.5])
def test_the_learning_rate_by_itself(kappa):
    """lambda is -8 here, the largest in size though negative."""
    a = torch.tensor([[4.0, -8.0, 0.5]], dtype=torch.float64)
    auto = prospr.score(line(*W), [a] * 3, method=ProsPr(steps=2, kappa=kappa), loss=bowl)
    given = prospr.score(line(*W), [a] * 3, method=ProsPr(steps=2, lr=kappa / 8), loss=bowl)
    assert auto["weight"].tolist()[0] == pytest.approx(given["weight"].tolist()[0], rel=1e-5)


def test_the_same_batch():
    other = torch.full((1, 3), 7.0, dtype=torch.float64)
    once = prospr.score(line(*W), [A, other], method=ProsPr(steps=2, lr=0.1, same_batch=True), loss=bowl)
    thrice = prospr.score(line(*W), [A, A, A], method=ProsPr(steps=2, lr=0.1), loss=bowl)
    assert torch.equal(once["weight"], thrice["weight"])


def test_another_optimizer():
    case = BY_NAME["mlp"]
    by_settings = ProsPr(steps=2, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
    by_object = ProsPr(steps=2, optimizer=SGD(0.1, momentum=0.9, weight_decay=0.01, nesterov=True))
    a, b, c = (
        prospr.score(case.model(), case.batches(3), method=method)
        for method in (by_settings, by_object, ProsPr(steps=2, optimizer=AdamW(lr=0.01)))
    )
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.allclose(a["0.weight"], c["0.weight"], rtol=1e-3)


@pytest.mark.parametrize("name", ["mlp", "conv-batchnorm-maxpool", "dropout", "attention", "tied"])
def test_snip_is_prospr_without_steps(name):
    case = BY_NAME[name]
    batches = case.batches(3)
    a = prospr.score(case.model(), batches, method="snip", **case.settings)
    b = prospr.score(case.model(), batches, method=ProsPr(steps=0, lr=0.3, momentum=0.9), **case.settings)
    c = prospr.score(case.model(), batches[:1], method=Snip(), **case.settings)  # looks at the first batch alone
    assert list(a) == list(b) == list(c)
    for key in a:
        assert torch.equal(a[key], b[key])
        assert torch.equal(a[key], c[key])


@pytest.mark.parametrize("name", ["mlp", "conv-batchnorm-maxpool", "residual", "lstm"])
def test_snip_against_backward(name):
    case = BY_NAME[name]
    model, (batch,) = case.model(), case.batches(1)
    scores = prospr.score(model, [batch], method="snip")
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    named = dict(model.named_parameters())
    raw = {key: (named[key] * named[key].grad).abs() for key in scores}
    total = sum(r.sum() for r in raw.values())
    for key, score in scores.items():
        assert torch.allclose(score, raw[key] / total, rtol=1e-9, atol=1e-14)


def test_snip_in_pieces():
    case = BY_NAME["mlp"]
    whole = prospr.score(case.model(), case.batches(1), method="snip")
    pieces = prospr.score(case.model(), case.batches(1), method=Snip(micro_batch=4))
    for key in whole:
        assert torch.allclose(whole[key], pieces[key], rtol=1e-9)


def test_random_depends_on_the_seed_alone():
    model = BY_NAME["mlp"].model()
    first = prospr.score(model, method="random", seed=3)
    torch.rand(5)
    again = prospr.score(BY_NAME["mlp"].model(seed=9), method=Random(), seed=3)
    other = prospr.score(model, method="random", seed=4)
    assert {n: s.shape for n, s in first.items()} == {n: p.shape for n, p in prospr.prunable(model).items()}
    for name in first:
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])
    values = torch.cat([s.flatten() for s in first.values()])
    assert values.unique().numel() == values.numel()


@pytest.mark.parametrize("method", ["prospr", "prospr-first", "prospr-published", "snip", "magnitude", "random"])
@pytest.mark.parametrize("name", ["mlp", "conv-batchnorm-maxpool", "dropout"])
def test_scores_are_shares_and_repeat(method, name):
    case = BY_NAME[name]
    model, batches = case.model(), case.batches(4)
    first, again = (prospr.score(model, batches, method=method, seed=5) for _ in range(2))
    assert sum(s.sum().item() for s in first.values()) == pytest.approx(1.0)
    named = prospr.prunable(model)
    assert list(first) == list(named)
    for key, score in first.items():
        assert score.shape == named[key].shape
        assert not score.requires_grad
        assert bool((score >= 0).all())
        assert torch.equal(score, again[key])


def test_dropout_is_drawn_from_the_seed():
    case = BY_NAME["dropout"]
    a, b = (prospr.score(case.model(), case.batches(1), method="snip", seed=seed) for seed in (0, 1))
    assert not torch.equal(a["0.weight"], b["0.weight"])


@pytest.mark.parametrize("method", ["prospr", "snip", "ntk-sap", "random"])
def test_a_seed_of_numpy(method):
    numpy = pytest.importorskip("numpy")
    case = BY_NAME["mlp"]
    found = [prospr.prune(case.model(), case.batches(8), 0.5, method=method, seed=s) for s in (7, numpy.uint8(7))]
    assert found[0] == found[1]


def test_half_precision_ranks_as_double_does():
    """Shares of half a million weights are near the smallest number of float16."""
    model = nn.Linear(1000, 500, bias=False)
    with torch.no_grad():
        model.weight.copy_(1 + torch.randperm(model.weight.numel()).reshape(500, 1000) % 1024 / 1024)
    exact = prospr.select({"weight": model.weight.detach().double()}, 0.9)
    masks = prospr.prune(model.half(), None, 0.9, method="magnitude")
    assert masks == exact


def test_a_score_of_ones_own():
    class Late(Score):
        """Keeps the last weights."""

        def saliency(self, problem):
            return {name: torch.arange(w.numel()).reshape(w.shape).float() for name, w in problem.weights().items()}

    model = line(1.0, 1.0, 1.0)
    assert prospr.score(model, method=Late())["weight"].tolist()[0] == shares(0.0, 1.0, 2.0)
    assert prospr.select(prospr.score(model, method=Late()), 0.6)["weight"].tolist() == [[False, False, True]]
    with pytest.raises(NotImplementedError, match=r"Score must define saliency\(problem\) or score\(problem\)"):
        prospr.score(model, method=Score())


def test_a_saliency_that_is_not_finite():
    class Bad(Score):
        def saliency(self, problem):
            return {name: w / 0 for name, w in problem.weights().items()}

    with pytest.raises(ScoreError, match="weight: 2 of 2 scores are NaN or infinite"):
        prospr.score(line(1.0, 0.0), method=Bad())


@pytest.mark.parametrize("method", ["snip", "prospr", ProsPr(same_batch=True), ProsPr(lr=0.1, order="first")])
def test_methods_that_look_at_data(method):
    with pytest.raises(BatchError, match="this method looks at data; pass batches"):
        prospr.score(line(1.0, 2.0), method=method)


@pytest.mark.parametrize("method", [Magnitude(), Random(), "erk"])
def test_methods_that_do_not(method):
    assert prospr.score(line(1.0, 2.0), method=method)["weight"].shape == (1, 2)


def test_a_frozen_parameter_by_name():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)).double()
    model[0].requires_grad_(False)
    batches = BY_NAME["mlp"].batches(1)
    with pytest.raises(ModelError, match=r"0\.weight: this parameter is frozen, .* requires_grad_\(\)"):
        prospr.score(model, batches, method="snip", prunable=["0.weight", "1.weight"])
    assert list(prospr.score(model, method="magnitude", prunable=["0.weight"])) == ["0.weight"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": -1}, r"steps=-1\): use a whole number"),
        ({"steps": 1.5}, r"steps=1\.5\): use a whole number"),
        ({"lr": "fast"}, r"lr='fast'\): use a number or 'auto'"),
        ({"lr": -0.1}, r"lr=-0\.1"),
        ({"momentum": -1.0}, r"momentum=-1"),
        ({"nesterov": True}, "nesterov"),
    ],
)
def test_settings_are_checked_when_they_are_made(settings, message):
    with pytest.raises(SettingError, match=message):
        ProsPr(**settings)


def test_too_few_batches_for_a_mean_of_several():
    batches = [(torch.randn(4, 5), torch.randint(0, 3, (4,)))] * 3
    with pytest.raises(BatchError, match=r"holds 3, and Snip\(batches=10\) reads 10"):
        prospr.prune(torch.nn.Linear(5, 3), batches, 0.5, method="snip-mb")
