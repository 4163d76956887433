"""The score of a channel is the derivative with respect to one mask entry that all of its weights share."""

import pytest
import torch
from cases import BY_NAME
from channels.twins import find
from oracle import cross_entropy, loss_of
from torch import Tensor, nn

import prospr
from prospr import Grasp, Magnitude, ProsPr, Random, Score, Snip, SynFlow

NAMES = [
    "mlp", "conv-batchnorm-maxpool", "residual", "depthwise", "unet", "frozen-unused-mixed-modes", "shared-layer",
    "one-and-three-dimensions", "dropout", "view",
]  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore::prospr.errors.KeptWholeWarning")


def channel_masks(found: prospr.channels.Groups, params: dict[str, Tensor], c: Tensor) -> dict[str, Tensor]:
    """Every tensor times c, along each of its dimensions that has channels."""
    masked = {}
    for name, p in params.items():
        for d in range(p.dim()):
            ids = torch.tensor(found.axes.get((name, d), [-1] * p.shape[d]))
            line = torch.where(ids >= 0, c[ids], 1.0)
            p = p * line.reshape([-1 if e == d else 1 for e in range(p.dim())])
        masked[name] = p
    return masked


def by_hand(case, found, batches, steps: int, first_order: bool, lr=0.1, momentum=0.9) -> Tensor:
    """dL(w_M)/dc by one graph through all the steps; c enters at the initial weights alone."""
    model = case.model()
    for module in model.modules():
        if hasattr(module, "checkpointing"):
            module.checkpointing = False
    start = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    c = torch.ones(len(found), dtype=torch.float64, requires_grad=True)
    w = channel_masks(found, start, c)
    rest = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    speed = {}
    for t, batch in enumerate(batches[:steps]):
        here = {n: p.detach().requires_grad_() for n, p in w.items()} if first_order else w
        value = loss_of(model, {**here, **rest}, batch, case.loss, seed=t)
        grads = torch.autograd.grad(
            value, list(here.values()), create_graph=not first_order, allow_unused=True, materialize_grads=True
        )
        for name, g in zip(here, grads, strict=True):
            speed[name] = momentum * speed[name] + g if name in speed else g
        w = {name: p - lr * speed[name] for name, p in w.items()}
    final = loss_of(model, {**w, **rest}, batches[steps], case.loss, seed=steps)
    return torch.autograd.grad(final, c)[0]


def assert_scores(found, scores: dict[str, Tensor], derivative: Tensor, tolerance=1e-10) -> None:
    assert list(scores) == list(found.sets)
    flat = torch.cat([s.double() for s in scores.values()])
    want = torch.cat([derivative[torch.tensor(ids)] for ids in found.sets.values()])
    assert (flat - want).norm() <= tolerance * want.norm()


def share(derivative: Tensor) -> Tensor:
    return derivative.abs() / derivative.abs().sum()


@pytest.mark.parametrize("order", ["exact", "first"])
@pytest.mark.parametrize("name", NAMES)
def test_prospr_and_snip(name, order):
    case = BY_NAME[name]
    batches = case.batches(3)
    model = case.model()
    found = find(model, prospr.meta.loss.called_with(model, case.loss or cross_entropy, batches[0])[0])
    assert len(found) > 1
    for steps in (0, 1, 2):
        derivative = by_hand(case, found, batches, steps, order == "first")
        method = ProsPr(steps=steps, lr=0.1, momentum=0.9, order=order)
        scores = prospr.score(model, batches, method=method, granularity="channel", **case.settings)
        assert_scores(found, scores, share(derivative), 1e-9)
        if steps == 0:
            snip = prospr.score(model, batches, method=Snip(), granularity="channel", **case.settings)
            assert_scores(found, snip, share(derivative))
            assert all(torch.equal(snip[key], scores[key]) for key in snip)
            three = prospr.score(model, batches, method="3sp", **case.settings)
            assert all(torch.equal(snip[key], three[key]) for key in snip)


@pytest.mark.parametrize("name", ["mlp", "conv-batchnorm-maxpool", "residual", "unet"])
def test_synflow(name):
    case = BY_NAME[name]
    model, batch = case.model(), case.batches(1)[0]
    found = find(model, batch[0])
    c = torch.ones(len(found), dtype=torch.float64, requires_grad=True)
    params = {n: p.detach().abs() for n, p in model.named_parameters()}
    out = torch.func.functional_call(
        case.model().eval(), channel_masks(found, params, c), (torch.ones_like(batch[0][:1]),)
    )
    derivative = torch.autograd.grad(out.sum(), c)[0]
    scores = prospr.score(model, [batch], method=SynFlow(), granularity="channel")
    assert_scores(found, scores, share(derivative))


@pytest.mark.parametrize("name", ["mlp", "conv-batchnorm-maxpool", "residual", "unet"])
def test_grasp(name):
    """d/dc of the gradient's product with itself held still; signed."""
    case = BY_NAME[name]
    model, batch = case.model(), case.batches(1)[0]
    found = find(model, batch[0])
    start = {n: p.detach() for n, p in model.named_parameters()}
    cooled = lambda m, b: torch.nn.functional.cross_entropy(m(b[0]) / 200, b[1])  # noqa: E731
    c = torch.ones(len(found), dtype=torch.float64, requires_grad=True)
    w = channel_masks(found, start, c)
    grads = torch.autograd.grad(loss_of(model, w, batch, cooled), list(w.values()), create_graph=True)
    flow = sum((g * g.detach()).sum() for g in grads)
    derivative = torch.autograd.grad(flow, c)[0]
    scores = prospr.score(model, [batch], method=Grasp(), granularity="channel")
    assert_scores(found, scores, derivative)
    assert name != "residual" or derivative.min() < 0 < derivative.max()


# Numbers by hand: two channels, y = sum over k of v_k (u_k x + b_k)


def toy() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[2.0], [-1.0]]))
        model[0].bias.copy_(torch.tensor([1.0, 0.5]))
        model[1].weight.copy_(torch.tensor([[3.0, 4.0]]))
    return model


X = torch.tensor([[1.0]], dtype=torch.float64)


def output(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).sum()


def scored(method: Score, **settings) -> list[float]:
    scores = prospr.score(toy(), [X] * 2, method=method, loss=output, granularity="channel", **settings)
    assert list(scores) == ["0.weight"]
    return scores["0.weight"].tolist()


def test_snip_by_hand():
    """Channel 0 has a part of 3 (2 + 1) = 9, twice (into it and out of it): 18; channel 1: 4 (-1 + 0.5) = -2: -4."""
    assert scored(Snip()) == pytest.approx([18 / 22, 4 / 22])
    assert scored(ProsPr(steps=0)) == pytest.approx([18 / 22, 4 / 22])


def test_prospr_by_hand():
    """One step of 0.1 on y itself: u' = u - 0.1 v x, b' = b - 0.1 v, v' = v - 0.1 (u x + b).

    With a = u + b: y' = (v - 0.1 a)(a - 0.2 v), and with all of a channel times c it is c^2 as large; so dy'/dc = 2 y'.
    Channel 0: a = 3, v = 3: 2.7 x 2.4 = 6.48. Channel 1: a = -0.5, v = 4: 4.05 x -1.3 = -5.265.
    """
    total = 6.48 + 5.265
    assert scored(ProsPr(steps=1, lr=0.1)) == pytest.approx([6.48 / total, 5.265 / total])
    # first order: dy'/d(u', b', v') at the moved weights times the initial ones: v' a + (a - 0.2 v) v
    first = [abs(2.7 * 3 + 2.4 * 3), abs(4.05 * -0.5 + -1.3 * 4)]
    assert scored(ProsPr(steps=1, lr=0.1, order="first")) == pytest.approx([f / sum(first) for f in first])


def test_synflow_and_magnitude_by_hand():
    """SynFlow: 2 x 3 (2 + 1) = 18 and 2 x 4 (1 + 0.5) = 12. Magnitude: 2 + 1 + 3 = 6 and 1 + 0.5 + 4 = 5.5."""
    assert scored(SynFlow()) == pytest.approx([18 / 30, 12 / 30])
    assert scored(Magnitude()) == pytest.approx([6 / 11.5, 5.5 / 11.5])


def test_grasp_by_hand():
    """y / 2: g_v = a / 2, g_u = g_b = v / 2; H couples v with u and b by 1/2: Hg = (v / 2, a / 4, a / 4).

    w Hg = v v / 2 + (u + b) a / 4: 4.5 + 2.25 and 8 + 0.0625.
    """
    assert scored(Grasp(temperature=2.0)) == pytest.approx([6.75, 8.0625])


def test_magnitude_is_the_sum_of_sizes():
    case = BY_NAME["residual"]
    model = case.model()
    scores = prospr.score(model, method="magnitude", granularity="channel", example=case.batches(1)[0][0])
    named = dict(model.named_parameters())
    inner = named["conv1.weight"].abs().sum((1, 2, 3)) + named["conv2.weight"].abs().sum((0, 2, 3))
    inner = inner + named["norm1.weight"].abs() + named["norm1.bias"].abs()
    ratio = scores["conv1.weight"] / inner
    assert torch.allclose(ratio, ratio[0].expand(4), rtol=1e-12)


def test_random_is_uniform_whatever_the_size_of_the_group_and_comes_from_the_seed():
    model = nn.Sequential(nn.Linear(2, 400), nn.Linear(400, 400), nn.Linear(400, 2))
    example = torch.zeros(1, 2)
    scores, again, other = (
        prospr.score(model, method=Random(), granularity="channel", example=example, seed=seed) for seed in (1, 1, 2)
    )
    assert all(torch.equal(scores[name], again[name]) for name in scores)
    assert not torch.equal(scores["0.weight"], other["0.weight"])
    flat = torch.cat(list(scores.values()))
    uniform = (flat / flat.max()).sort().values  # 800 of them
    assert (uniform - torch.linspace(0, 1, 800)).abs().max() < 0.07  # 2 / sqrt(800)
    wider = nn.Sequential(nn.Linear(2, 400), nn.Linear(400, 400), nn.Linear(400, 50))
    same = prospr.score(wider, method=Random(), granularity="channel", example=example, seed=1)
    assert torch.equal(same["1.weight"], scores["1.weight"])


def test_a_score_of_ones_own():
    class Least(Score):
        def saliency(self, problem):
            return {name: torch.ones_like(w) for name, w in problem.weights().items()}

    scores = prospr.score(toy(), method=Least(), granularity="channel", example=X)
    assert scores["0.weight"].tolist() == [0.5, 0.5]  # 2 of 0.weight, 0.bias and 1.weight each


def test_what_a_channel_has_no_part_in_is_not_asked_for():
    """A frozen bias has no gradient; the channel goes by its other parts."""
    model = toy()
    model[0].bias.requires_grad_(False)
    scores = prospr.score(model, [X], method="snip", loss=output, granularity="channel")
    assert scores["0.weight"].tolist() == pytest.approx([15 / 21, 6 / 21])  # 2 x 3 + 9, -1 x 4 - 2
