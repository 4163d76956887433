"""Following channels through operations, one by one."""

import pytest
import torch
import torch.nn.functional as F
from channels.networks import Forward
from channels.twins import find, run, some_groups
from torch import nn

import prospr
from prospr.tracing.labels import Forest

FREE = [
    nn.ELU(), nn.Hardshrink(), nn.Hardsigmoid(), nn.Hardtanh(), nn.Hardswish(), nn.LeakyReLU(), nn.LogSigmoid(),
    nn.PReLU(), nn.PReLU(8), nn.ReLU(), nn.ReLU6(), nn.RReLU(), nn.SELU(), nn.CELU(), nn.GELU(), nn.GELU("tanh"),
    nn.Sigmoid(), nn.SiLU(), nn.Mish(), nn.Softplus(), nn.Softshrink(), nn.Softsign(), nn.Tanh(), nn.Tanhshrink(),
    nn.Threshold(0.1, 0.2), nn.Dropout2d(), nn.AlphaDropout(), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.LPPool2d(2, 2),
    nn.AdaptiveMaxPool2d(2), nn.AdaptiveAvgPool2d(3), nn.Upsample(scale_factor=2), nn.Identity(),
    nn.Upsample(scale_factor=2, mode="bilinear"), nn.Upsample(scale_factor=2, mode="bicubic"), nn.ZeroPad2d(1),
    nn.ReplicationPad2d(1), nn.ReflectionPad2d(1), nn.BatchNorm2d(8, track_running_stats=False),
    nn.BatchNorm2d(8, affine=False), nn.InstanceNorm2d(8), nn.LayerNorm(6), nn.RMSNorm([6, 6]),
]  # fmt: skip
WHOLE = {
    "Softmax2d": nn.Softmax2d(), "Softmin": nn.Softmin(1), "LocalResponseNorm": nn.LocalResponseNorm(3),
    "LayerNorm": nn.LayerNorm([8, 6, 6]), "CircularPad2d": nn.CircularPad2d(1),
}  # fmt: skip


@pytest.mark.parametrize("layer", FREE, ids=str)
def test_layers_that_leave_channels_apart(layer):
    model = nn.Sequential(nn.Conv2d(3, 8, 1), layer, nn.Conv2d(8, 4, 1)).double().eval()
    example = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    found = find(model, example)
    assert {name: len(ids) for name, ids in found.sets.items()} == {"0.weight": 8}
    masks = found.masks({1, 4, 6})
    small = prospr.shrink(model, masks, example)
    masks.apply(model)
    assert small[0].out_channels == 5
    assert torch.allclose(model(example), small(example), rtol=1e-11)


@pytest.mark.parametrize("name", WHOLE)
def test_layers_that_mix_channels(name):
    model = nn.Sequential(nn.Conv2d(3, 8, 1), WHOLE[name], nn.Conv2d(8, 4, 1))
    found = find(model, torch.randn(2, 3, 6, 6))
    assert len(found) == 0
    assert list(found.kept_whole) == ["0.weight"]
    assert f"in 1 ({name})" in found.kept_whole["0.weight"]


# what happens to h, of 8 channels, before a layer reads it; how many sets of how many groups are found
OPERATIONS = {
    "masked_fill": (lambda h: h.masked_fill(h > 0, 0.5), {8}),
    "where": (lambda h: torch.where(h > 0, h, -h), {8}),
    "clamp and scalars": (lambda h: (2 * h - 1).clamp(-1, 1) / 3, {8}),
    "maximum": (lambda h: torch.maximum(h, h * 2), {8}),
    "flip": (lambda h: h + h.flip(1), {4}),
    "roll": (lambda h: h.roll(1, 1), set()),
    "transposed twice": (lambda h: h.permute(0, 2, 3, 1).transpose(1, 3).transpose(2, 3), None),
    "cat with itself": (lambda h: torch.cat([h, h], 1)[:, : h.shape[1]], {8}),
    "chunks added": (lambda h: torch.cat([sum(h.chunk(2, 1)), h.chunk(2, 1)[0]], 1), {4}),
    "repeat": (lambda h: h.repeat(1, 2, 1, 1)[:, ::2] + 0 * h, None),
    "expand": (lambda h: h * h.mean(1, keepdim=True).expand_as(h), set()),
    "gate of one value": (lambda h: h * h[:, :, :1, :1].sigmoid(), {8}),
    "in place": (lambda h: h.add_(1).mul_(2).relu_(), {8}),
    "amax of pixels": (lambda h: h - h.amax((2, 3), keepdim=True), {8}),
    "cumsum of channels": (lambda h: h.cumsum(1), set()),
    "cumsum of pixels": (lambda h: h.cumsum(2), {8}),
    "sort of channels": (lambda h: h.sort(1).values, set()),
    "index of channels": (lambda h: h[:, torch.arange(7, -1, -1)], set()),
    "stack of two": (lambda h: torch.stack([h, 2 * h]).sum(0), {8}),
    "unbind of pixels": (lambda h: sum(h.unbind(2)).unsqueeze(2), {8}),
    "unbind of channels": (lambda h: torch.stack(h.unbind(1), 1), set()),
    "einsum over pixels": (lambda h: torch.einsum("bchw,bcHw->bchH", h, h), {8}),
    "gram of channels": (lambda h: (h.flatten(2) @ h.flatten(2).mT).unsqueeze(-1), None),
    "norm of channels": (lambda h: F.normalize(h, dim=1), set()),
    "norm of pixels": (lambda h: F.normalize(h, dim=2), {8}),
    "pad of pixels": (lambda h: F.pad(h, (1, 1)), {8}),
    "crop by a negative pad": (lambda h: F.pad(h, (0, 0, 0, 0, -1, 1)), None),
    "grid sample": (lambda h: F.grid_sample(h, torch.zeros(len(h), 2, 2, 2, dtype=h.dtype), align_corners=False), {8}),
    "interpolate": (lambda h: F.interpolate(h, size=3), {8}),
    "squeeze": (lambda h: h.unsqueeze(1).squeeze(1), {8}),
    "groups of pixels": (lambda h: h.unflatten(2, (2, 3)).flatten(2, 3), {8}),
    "two rows of channels": (lambda h: h.unflatten(1, (2, -1)).flip(1).flatten(1, 2), {4}),
    "to another type": (lambda h: h.float().to(h.dtype), {8}),
    "a new tensor of its size": (lambda h: h + torch.zeros_like(h) + torch.ones(h.shape, dtype=h.dtype), set()),
    "std": (lambda h: h / (1 + h.std((2, 3), keepdim=True)), {8}),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name):
    """What is found is as expected, and right in any case: the smaller network gives the same numbers."""
    operation, wanted = OPERATIONS[name]
    model = Forward(
        lambda m, x: m.head(operation(m.body(x)).flatten(2).mean(2)), body=nn.Conv2d(3, 8, 1), head=nn.Linear(8, 3)
    ).double()
    example = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    found = find(model, example)
    if wanted is not None:
        assert {len(ids) for ids in found.sets.values()} == wanted, str(found)
    if not found.sets:
        assert list(found.kept_whole) == ["body.weight"]
        return
    removed = some_groups(found)
    masks = found.masks(removed)
    assert found.removed(masks) == removed
    small = prospr.shrink(model, masks, example)
    masks.apply(model)
    call = (example,), {}
    assert torch.allclose(run(model, call)["output 0"], run(small, call)["output 0"], rtol=1e-10)


def test_functions_with_sizes_of_their_own_are_kept_whole():
    model = Forward(
        lambda m, x: m.head(F.group_norm(F.conv2d(m.body(x), m.depth.weight, groups=8), 4).mean((2, 3))),
        body=nn.Conv2d(3, 8, 1), depth=nn.Conv2d(8, 8, 1, groups=8, bias=False), head=nn.Linear(8, 3),
    )  # fmt: skip
    found = find(model, torch.randn(2, 3, 6, 6))
    assert not found.sets
    assert set(found.kept_whole) == {"body.weight", "depth.weight"}


def test_weights_that_are_computed():
    """A weight times a scale, and low-rank updates: the parts go with the whole."""

    class Computed(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.scale = nn.Linear(5, 8), nn.Parameter(torch.rand(8, 1) + 0.5)
            self.a, self.b = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 5))
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            return self.head(F.linear(x, self.scale * (self.base.weight + self.a @ self.b), self.base.bias).relu())

    model = Computed().double()
    example = torch.randn(4, 5, dtype=torch.float64)
    found = find(model, example)
    masks = found.masks(some_groups(found))
    small = prospr.shrink(model, masks, example)
    masks.apply(model)
    assert small.base.weight.shape == (4, 5)
    assert (small.a.shape, small.b.shape) == ((4, 1), (1, 5))  # the rank, too
    assert torch.allclose(model(example), small(example), rtol=1e-10)


def test_the_fast_path_of_transformers_is_not_taken():
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True).eval()
    model = nn.Sequential(layer, nn.Linear(8, 3)).eval()
    found = find(model, torch.randn(2, 4, 8))
    assert list(found.sets) == ["0.linear1.weight"]


def test_recurrent_layers_of_float32():
    """Another kernel on the CPU, of one operation."""
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        model = Forward(lambda m, x: m.head(m.rnn(m.body(x))[0][:, -1]), body=nn.Linear(5, 6),
                        rnn=kind(6, 4, batch_first=True), head=nn.Linear(4, 3))  # fmt: skip
        found = find(model, torch.randn(2, 3, 5))
        assert not found.sets
        assert {"body.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0"} <= set(found.kept_whole)


def test_a_forest():
    forest = Forest()
    a, b = forest.new(3), forest.new(3)
    assert (a, b) == ([0, 1, 2], [3, 4, 5])
    forest.join(a, b)
    assert forest.roots(b) == a
    forest.fix([b[1]], "first")
    forest.fix([a[1]], "second")
    assert [forest.why_fixed(label) for label in a] == [None, "first", None]
    forest.join_all([a[0], a[1]])
    assert forest.why_fixed(b[0]) == "first"
    with pytest.raises(ValueError, match="zip"):
        forest.join(a, b[:2])
