"""GraSP: numbers by hand, and a straightforward implementation."""

import pytest
import torch
import torch.nn.functional as F
from cases import BY_NAME
from oracle import loss_of
from torch import nn

import prospr
from prospr import Grasp
from prospr.errors import InexactWarning


def test_by_hand():
    """L = w A w / 2 with A = ((1, -2), (-2, 1)), w = (1, 2): H g = A A w = (-3, 6), and w (H g) = (-3, 12)."""
    model = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0]]))
    a = torch.tensor([[1.0, -2.0], [-2.0, 1.0]], dtype=torch.float64)
    loss = lambda m, _: 0.5 * (m.weight @ a @ m.weight.T).squeeze()  # noqa: E731
    scores = prospr.score(model, [None], method=Grasp(), loss=loss)
    assert scores["weight"].tolist() == [[pytest.approx(-3.0), pytest.approx(12.0)]]
    # the highest of -w (H g) goes: the first weight, though it is not the smaller in size of the two scores at 1 : 4
    masks = prospr.prune(model, [None], 0.5, method="grasp", loss=loss, collapse="ignore")
    assert masks["weight"].tolist() == [[False, True]]


def test_the_sign_counts():
    """A weight of large negative w (H g) goes before one of small positive."""
    model = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[10.0, 1.0]]))
    a = torch.tensor([[0.0, -1.0], [-1.0, 3.0]], dtype=torch.float64)
    # A A w = ((1, -3), (-3, 10)) (10, 1) = (7, -20): scores (70, -20)
    loss = lambda m, _: 0.5 * (m.weight @ a @ m.weight.T).squeeze()  # noqa: E731
    scores = prospr.score(model, [None], method=Grasp(), loss=loss)
    assert scores["weight"].tolist() == [[pytest.approx(70.0), pytest.approx(-20.0)]]


def straightforward(model, batches, temperature):
    """As in the paper's algorithm 2: g with a graph, then the gradient of <g, stop(g)>."""
    params = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters() if p.requires_grad}
    cold = lambda m, b: F.cross_entropy(m(b[0]) / temperature, b[1])  # noqa: E731
    total = torch.stack([loss_of(model, params, b, cold, seed=i) for i, b in enumerate(batches)]).mean()
    g = torch.autograd.grad(total, list(params.values()), create_graph=True, allow_unused=True, materialize_grads=True)
    z = sum((a * a.detach()).sum() for a in g)
    h = torch.autograd.grad(z, list(params.values()), allow_unused=True, materialize_grads=True)
    return {n: params[n].detach() * x for n, x in zip(params, h, strict=True)}


@pytest.mark.parametrize("name", ["mlp", "residual", "conv-batchnorm-maxpool", "attention", "lstm", "unet", "dropout"])
@pytest.mark.parametrize(("temperature", "batches"), [(200.0, 1), (1.0, 1), (200.0, 3)])
def test_equals_the_papers_algorithm(name, temperature, batches):
    case = BY_NAME[name]
    model, data = case.model(), case.batches(batches)
    scores = prospr.score(model, data, method=Grasp(temperature, batches=batches))
    want = straightforward(model, data, temperature)
    for n, s in scores.items():
        assert torch.allclose(s, want[n], rtol=1e-8, atol=1e-8 * want[n].abs().max().item()), n


@pytest.mark.parametrize(
    ("make", "says"), [(lambda: Grasp(temperature=0), "temperature=0"), (lambda: Grasp(batches=0), "batches=0")]
)
def test_impossible_settings(make, says):
    with pytest.raises(prospr.PruningError, match=says):
        make()


def test_too_few_batches():
    with pytest.raises(prospr.errors.BatchError, match=r"holds 2, and Grasp\(batches=10\)"):
        prospr.prune(BY_NAME["mlp"].model(), BY_NAME["mlp"].batches(2), 0.5, method="grasp-mb")


def test_a_loss_that_does_not_call_the_model_is_told_of():
    model = nn.Linear(4, 3)
    loss = lambda model, batch: F.cross_entropy(F.linear(batch[0], model.weight), batch[1])  # noqa: E731
    with pytest.warns(InexactWarning, match="does not call the model itself"):
        prospr.score(model, [(torch.randn(6, 4), torch.randint(0, 3, (6,)))], method="grasp", loss=loss)
