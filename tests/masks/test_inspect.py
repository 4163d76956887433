"""Inspection: FLOPs, dead channels, the table, thresholds and histograms by hand; the model is left alone."""

import copy
import math

import pytest
import torch
from torch import nn

import prospr
from prospr.errors import MaskError
from prospr.masks import histogram, threshold


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(self.drop(self.norm(self.conv(x)).relu()).mean((2, 3)))


@pytest.fixture
def masks():
    conv = torch.ones(4, 2, 3, 3, dtype=torch.bool)
    conv[0] = False  # a dead channel
    conv[1, 1] = False
    fc = torch.ones(3, 4, dtype=torch.bool)
    fc[2] = False
    return prospr.Masks({"conv.weight": conv, "fc.weight": fc})  # 45 of 72, 8 of 12


def test_by_hand(masks):
    found = prospr.inspect(Small(), masks, torch.ones(1, 2, 5, 6))
    conv, fc = found.layers
    assert (conv.name, conv.shape, conv.kept, conv.total, conv.effective) == ("conv.weight", (4, 2, 3, 3), 45, 72, 45)
    assert (fc.name, fc.shape, fc.kept, fc.total, fc.effective) == ("fc.weight", (3, 4), 8, 12, 6)
    assert (conv.dead_channels, fc.dead_channels) == (1, 1)
    # a multiplication and an addition a weight and position: 72 weights at 30 positions, 12 weights at one
    assert (conv.flops, fc.flops) == (2 * 72 * 30, 2 * 12)
    assert (conv.sparse_flops, fc.sparse_flops) == (2 * 45 * 30, 2 * 8)
    assert (found.flops, found.sparse_flops) == (4344, 2716)
    assert found.density == pytest.approx(53 / 84)
    assert found.effective_density == pytest.approx(51 / 84)
    assert found.connected is True
    assert found.empty == []


def test_flops_are_those_of_the_example(masks):
    assert prospr.inspect(Small(), masks, torch.ones(4, 2, 5, 6)).flops == 4 * 4344


def test_a_single_layer():
    found = prospr.inspect(nn.Linear(3, 2), {"weight": torch.tensor([[True] * 3, [False] * 3])}, torch.ones(1, 3))
    assert (found.layers[0].flops, found.layers[0].sparse_flops) == (12, 6)
    assert (found.flops, found.sparse_flops) == (12, 6)


def test_a_layer_called_twice():
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    found = prospr.inspect(model, {"0.weight": torch.eye(3, dtype=torch.bool)}, torch.ones(1, 3))
    assert (found.flops, found.sparse_flops) == (36, 12)


def test_the_fused_transformer_is_counted():
    """In eval mode torch runs an encoder layer as one kernel, whose operations its counter does not know."""
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    masks = {name: torch.ones_like(p, dtype=torch.bool) for name, p in prospr.prunable(model).items()}
    found = prospr.inspect(model, masks, torch.ones(1, 3, 8))
    # three tokens: projections 3 x 2 x (192 + 64 + 128 + 128); attention 2 heads x 2 products of 3 x 3 x 4
    assert found.flops == 3 * 2 * 512 + 2 * 2 * (2 * 3 * 3 * 4)
    assert torch.backends.mha.get_fastpath_enabled()


def test_printing(masks):
    assert str(prospr.inspect(Small(), masks, torch.ones(1, 2, 5, 6))).splitlines() == [
        "layer        shape    kept  of  density  effective  dead           MFLOPs",
        "conv.weight  4x2x3x3    45  72   62.50%     62.50%   1/4   0.0027/0.00432",
        "fc.weight    3x4         8  12   66.67%     50.00%   1/3  1.6e-05/2.4e-05",
        "total                   53  84   63.10%     60.71%        0.00272/0.00434",
    ]


def test_printing_of_what_is_not_known():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    masks = {"0.weight": torch.eye(2, dtype=torch.bool), "1.weight": torch.tensor([True, False])}
    found = prospr.inspect(model, masks, torch.ones(1, 2))
    assert found.layers[0].effective == 2
    assert found.layers[1].effective is found.layers[1].dead_channels is None
    assert found.effective_density == 0.5  # of the weights that are edges
    assert found.connected is True  # known all the same
    assert str(found).splitlines()[2].split() == ["1.weight", "2", "1", "2", "50.00%", "?", "?", "0/0"]
    assert str(found).splitlines()[3].split()[-2:] == ["50.00%", "4e-06/8e-06"]


def test_an_empty_layer():
    masks = {"conv.weight": torch.zeros(4, 2, 3, 3, dtype=torch.bool)}
    found = prospr.inspect(Small(), masks, torch.ones(1, 2, 5, 6))
    assert found.empty == ["conv.weight"]
    assert found.connected is False
    assert found.effective_density == 0.0
    assert found.layers[0].dead_channels == 4


def test_several_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(3, 2)

        def forward(self, x, y):
            return self.a(x) * self.b(y)

    masks = {"a.weight": torch.ones(2, 2, dtype=torch.bool), "b.weight": torch.eye(2, 3, dtype=torch.bool)}
    found = prospr.inspect(Two(), masks, (torch.ones(1, 2), torch.ones(1, 3)))
    assert [layer.effective for layer in found.layers] == [4, 2]


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_left_alone(masks, applied, training):
    model = Small().train(training)
    model.norm.train(not training)
    if applied:
        masks.apply(model)
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    model.fc.bias.requires_grad_(False)
    x = torch.ones(3, 2, 5, 6)
    state, flags = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    identities = [id(t) for t in (*model.parameters(), *model.buffers())]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()]
    random = torch.get_rng_state()
    prospr.inspect(model, masks, x)
    assert torch.equal(torch.get_rng_state(), random)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert [id(t) for t in (*model.parameters(), *model.buffers())] == identities
    assert [m.training for m in model.modules()] == flags
    assert all(bool((p.grad == 2).all()) for p in model.parameters())
    assert [p.requires_grad for p in model.parameters()] == [True] * 5 + [False]
    assert [
        (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()
    ] == hooks
    assert bool((x == 1).all())
    assert x.grad is None


@pytest.mark.parametrize("name", ["fc.weight", "head.weight"])
def test_masks_of_another_network(name):
    with pytest.raises(MaskError, match=f"{name}: this mask does not fit Small"):
        prospr.inspect(Small(), {name: torch.ones(3, 5, dtype=torch.bool)}, torch.ones(1, 2, 5, 6))


def test_threshold():
    scores = {"a": torch.tensor([8.0, 4.0, 1.0]), "b": torch.tensor([[4.03, 3.0], [2.0, 4.0]])}
    found = threshold(scores, prospr.select(scores, 3 / 7))  # keeps 8, 4.03 and both 4
    assert (found.smallest_kept, found.largest_pruned) == (4.0, 3.0)
    assert found.margin == pytest.approx(0.25)
    assert found.close == pytest.approx(2 / 4)  # 4.03 and the other 4 are within one percent of the last 4


def test_threshold_of_a_tie():
    scores = {"a": torch.tensor([1.0, 1.0, 1.0, 2.0])}
    found = threshold(scores, prospr.select(scores, 0.5))
    assert (found.smallest_kept, found.largest_pruned, found.margin, found.close) == (1.0, 1.0, 0.0, 0.0)


def test_threshold_where_nothing_is_pruned():
    scores = {"a": torch.tensor([1.0, 3.0])}
    found = threshold(scores, prospr.select(scores, 0.0))
    assert (found.smallest_kept, found.largest_pruned, found.margin) == (1.0, -math.inf, math.inf)


def test_histogram():
    scores = {"a": torch.tensor([1e-4, 2e-4, 0.5, 0.0]), "b": torch.tensor([[1.0, -3e-3]]), "c": torch.zeros(2)}
    edges, counts = histogram(scores, bins=4)
    assert edges.tolist() == pytest.approx([-4.0, -3.0, -2.0, -1.0, 0.0])
    assert {name: c.tolist() for name, c in counts.items()} == {
        "a": [2, 0, 0, 1],
        "b": [0, 1, 0, 1],
        "c": [0, 0, 0, 0],
    }


def test_a_score_on_an_edge_is_in_the_upper_bin():
    assert histogram({"a": torch.tensor([1.0, 10.0, 100.0])}, bins=2)[1]["a"].tolist() == [1, 2]


def test_histogram_of_one_value():
    edges, counts = histogram({"a": torch.full((3,), 10.0)}, bins=2)
    assert edges.tolist() == [1.0, 1.5, 2.0]
    assert counts["a"].tolist() == [3, 0]


def test_biases_and_norms_are_no_edges_and_no_flops():
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    example = torch.ones(1, 4)
    masks = prospr.prune(net, None, 0.5, method="magnitude", granularity="channel", example=example)
    assert {"0.bias", "0.weight", "2.weight"} == set(masks)
    seen = prospr.inspect(net, masks, example)
    kept = int(masks["0.bias"].sum())
    assert seen.effective_density == (4 * kept + 2 * kept) / (4 * 6 + 2 * 6)
    assert seen.sparse_flops == 2 * (4 * kept + 2 * kept)
