"""SynFlow: numbers by hand, its conservation law, and no layer that empties."""

import copy
import itertools

import pytest
import torch
from cases import BY_NAME, CASES
from torch import nn

import prospr
from prospr import Iterative, SynFlow
from prospr.lab.models import build

LABELS = torch.zeros(1, dtype=torch.long)


def chain(*widths, seed=0):
    torch.manual_seed(seed)
    layers = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b, bias=False), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def test_by_hand():
    """R = sum |B| |A| 1. With A = ((1, -2), (0, 3)), B = (1, -1): |A| 1 = (3, 3), R = 6."""
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[1.0, -2.0], [0.0, 3.0]]))
        net[2].weight.copy_(torch.tensor([[1.0, -1.0]]))
    scores = prospr.score(net, [(torch.randn(4, 2), LABELS)], method=SynFlow())
    # each |weight| times what flows through it, over the sum of both layers (12)
    assert torch.allclose(scores["0.weight"], torch.tensor([[1.0, 2.0], [0.0, 3.0]]).double() / 12)
    assert torch.allclose(scores["2.weight"], torch.tensor([[3.0, 3.0]]).double() / 12)


def test_layers_of_a_network_without_biases_score_the_same_in_all():
    net = chain(7, 20, 13, 30, 4)
    scores = prospr.score(net, [(torch.randn(2, 7), LABELS)], method=SynFlow())
    sums = [s.sum().item() for s in scores.values()]
    assert sums == pytest.approx([0.25] * 4, rel=1e-12)


def straightforward(model, example):
    """The published code's way, in float64: every parameter made positive in a copy, ones in, sum out."""
    twin = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        for p in twin.parameters():
            p.abs_()
    twin(torch.ones_like(example[:1])).sum().backward()
    return {n: (p * p.grad).abs() for n, p in twin.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["mlp", "residual", "conv-batchnorm-maxpool", "depthwise", "unet"])
def test_equals_a_straightforward_implementation(name):
    case = BY_NAME[name]
    model, batches = case.model(), case.batches(1)
    scores = prospr.score(model, batches, method=SynFlow())
    want = straightforward(model, batches[0][0])
    total = sum(want[n].sum() for n in scores)
    for n, s in scores.items():
        assert s.dtype == torch.float64
        assert torch.allclose(s, want[n] / total, rtol=1e-10, atol=1e-15), n


@pytest.mark.parametrize("widths", [(6, 30, 30, 30, 3), (4, 50, 8, 50, 2)])
def test_no_layer_empties_up_to_the_last_weight_of_each(widths):
    net = chain(*widths)
    total = sum(p.numel() for p in net.parameters())
    layers = len(widths) - 1
    for kept in (total // 10, 5 * layers, 2 * layers, layers):
        masks = prospr.prune(
            copy.deepcopy(net), [(torch.randn(1, widths[0]), LABELS)], 1 - kept / total, method="synflow"
        )
        assert masks.kept == kept
        assert not masks.empty()
    assert [int(m.sum()) for m in masks.values()] == [1] * layers  # one path from input to output


def test_one_shot_empties_layers_where_many_rounds_do_not():
    net = chain(4, 200, 200, 2)
    batches = [(torch.randn(1, 4), LABELS)]
    share = 1 - 12 / sum(p.numel() for p in net.parameters())
    once = prospr.prune(copy.deepcopy(net), batches, share, method=SynFlow(), collapse="ignore")
    many = prospr.prune(copy.deepcopy(net), batches, share, method="synflow")
    assert once.empty()
    assert not many.empty()


def test_data_are_not_looked_at():
    case = BY_NAME["residual"]
    images, labels = case.batches(1)[0]
    one = prospr.score(case.model(), [(images, labels)], method=SynFlow())
    other = prospr.score(case.model(), [(images * 100 - 7, labels)], method=SynFlow())
    assert all(torch.equal(one[n], other[n]) for n in one)


def test_an_input_must_be_known():
    model = BY_NAME["mlp"].model()
    with pytest.raises(prospr.errors.BatchError, match="shape of an input"):
        prospr.score(model, None, method=SynFlow())
    with pytest.raises(prospr.errors.BatchError, match="a loss that calls the model"):
        prospr.score(model, [1.0], method=SynFlow(), loss=lambda m, b: m[0].weight.sum() * b)


@pytest.mark.parametrize("case", [c for c in CASES if c.name != "weight-norm"], ids=lambda c: c.name)
def test_runs_on_every_network(case):
    masks = prospr.prune(
        case.model(), case.batches(1), 0.5, method=Iterative(SynFlow(), rounds=3), collapse="ignore", **case.settings
    )
    assert masks.kept == round(0.5 * masks.total)


def test_a_small_scale_keeps_saturating_activations_linear():
    def net(activation):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 20, bias=False), activation, nn.Linear(20, 20, bias=False), activation,
                             nn.Linear(20, 3, bias=False)).double()  # fmt: skip

    batches = [(torch.ones(1, 6, dtype=torch.float64), torch.tensor([0]))]
    wanted = prospr.score(net(nn.ReLU()), batches, method=prospr.SynFlow())
    low = prospr.score(net(nn.ReLU6()), batches, method=prospr.SynFlow(scale=1e-9))
    assert all(torch.allclose(low[name], wanted[name], rtol=1e-10, atol=0) for name in wanted)
    with torch.no_grad():
        loud = net(nn.ReLU6())
        loud[0].weight.mul_(1e3)
    silent = prospr.score(loud, batches, method=prospr.SynFlow())
    assert (silent["0.weight"] == 0).all()  # every unit is at its limit
    with pytest.raises(prospr.errors.SettingError, match="scale=0"):
        prospr.SynFlow(scale=0)


def test_mobilenet_with_relu6():
    model = build("mobilenet", seed=0, width=8)
    batches = [(torch.ones(1, 3, 32, 32), torch.tensor([0]))]
    method = prospr.Iterative(prospr.SynFlow(scale=1e-20), rounds=5)
    masks = prospr.prune(model, batches, 0.9, method=method)
    assert not masks.empty()


def test_a_network_that_casts_its_input():
    class Casting(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))

        def forward(self, x):
            return self.net(x.float() / 255)

    model, batches = Casting(), [(torch.randn(4, 5), torch.randint(0, 3, (4,)))]
    found = prospr.score(model, batches, method=prospr.SynFlow(scale=255.0))
    wanted = prospr.score(model.net, batches, method=prospr.SynFlow())
    assert all(torch.allclose(found[f"net.{name}"], s, rtol=1e-5) for name, s in wanted.items())


def test_a_graph_of_which_one_sample_is_no_graph():
    class Passing(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(5, 3)

        def forward(self, x, edges):
            h = self.net(x)
            return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])

    batch = torch.randn(7, 5), torch.tensor([[0, 1, 2, 3, 6], [1, 2, 3, 4, 0]])
    loss = lambda model, batch: model(*batch).square().mean()  # noqa: E731
    scores = prospr.score(Passing(), [batch], method=prospr.SynFlow(), loss=loss)
    assert scores["net.weight"].sum().item() == pytest.approx(1)
