"""Which kept weights are on a path from input to output: small networks, by hand."""

import pytest
import torch
import torch.nn.functional as F
from masks.graphs import ALL, Net, cut, look
from torch import nn

import prospr


def test_a_unit_without_inputs():
    model = Net(lambda m, x: m.b(F.relu(m.a(x))), a=nn.Linear(3, 2), b=nn.Linear(2, 2))
    assert look(model, cut(model), torch.ones(1, 3)) == ({"a": 6, "b": 4}, True)
    assert look(model, cut(model, a__weight=1), torch.ones(1, 3)) == ({"a": 3, "b": 2}, True)


def test_a_unit_without_outputs():
    model = Net(lambda m, x: m.b(F.relu(m.a(x))), a=nn.Linear(3, 2), b=nn.Linear(2, 2))
    assert look(model, cut(model, b__weight=(..., 0)), torch.ones(1, 3)) == ({"a": 3, "b": 2}, True)


def test_nothing_left():
    model = Net(lambda m, x: m.b(F.relu(m.a(x))), a=nn.Linear(3, 2), b=nn.Linear(2, 2))
    masks = cut(model, a__weight=1, b__weight=(..., 0))  # unit 0 is not read, unit 1 has no input
    assert look(model, masks, torch.ones(1, 3)) == ({"a": 0, "b": 0}, False)
    masks = cut(model, a__weight=ALL)
    assert look(model, masks, torch.ones(1, 3)) == ({"a": 0, "b": 0}, False)


def test_a_dead_channel_kills_its_consumers_slice():
    model = nn.Sequential(
        *(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)),
        *(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2)),
    )
    masks = prospr.Masks({**cut(model)})
    masks["0.weight"][1] = False
    found, connected = look(model, masks, torch.ones(1, 1, 6, 6))
    assert (found, connected) == ({"0": 18, "3": 36, "7": 4}, True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 2, 1)
        self.one, self.two = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)
        self.out = nn.Linear(2, 2)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.norm(self.two(F.relu(self.one(x))))
        return self.out(F.relu(x).mean((2, 3)))


def test_an_empty_branch_leaves_the_skip_connection():
    model = Block()
    x = torch.ones(1, 1, 4, 4)
    assert look(model, cut(model), x) == ({"stem": 2, "one": 36, "two": 36, "out": 4}, True)
    assert look(model, cut(model, two__weight=ALL), x) == ({"stem": 2, "one": 0, "two": 0, "out": 4}, True)
    assert look(model, cut(model, stem__weight=ALL), x) == ({"stem": 0, "one": 0, "two": 0, "out": 0}, False)
    # the skip connection feeds one.weight[:, 1] only where the stem does
    assert look(model, cut(model, stem__weight=1), x) == ({"stem": 1, "one": 18, "two": 36, "out": 4}, True)


def test_a_path_around_all_masked_weights():
    """No kept weight is of use, and yet the network is connected."""
    model = Net(lambda m, x: x + m.b(F.relu(m.a(x))), a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    assert look(model, cut(model, b__weight=ALL), torch.ones(1, 3)) == ({"a": 0, "b": 0}, True)


def test_concatenation():
    model = Net(
        lambda m, x: m.out(torch.cat([m.a(x), m.b(x)], 1)), a=nn.Linear(2, 2), b=nn.Linear(2, 3), out=nn.Linear(5, 1)
    )
    assert look(model, cut(model, a__weight=ALL), torch.ones(1, 2)) == ({"a": 0, "b": 6, "out": 3}, True)


def test_depthwise_convolution():
    model = Net(
        lambda m, x: m.out(m.depth(m.a(x)).mean((2, 3))),
        a=nn.Conv2d(1, 4, 1),
        depth=nn.Conv2d(4, 8, 3, padding=1, groups=4),
        out=nn.Linear(8, 1),
    )
    found, _ = look(model, cut(model, a__weight=2), torch.ones(1, 1, 5, 5))
    assert found == {"a": 3, "depth": 6 * 9, "out": 6}
    found, _ = look(model, cut(model, depth__weight=(slice(4, 6), ...)), torch.ones(1, 1, 5, 5))
    assert found == {"a": 3, "depth": 6 * 9, "out": 6}


def test_transposed_convolution():
    """Its weight is (inputs, outputs, ...)."""
    model = Net(
        lambda m, x: m.out(m.up(m.a(x)).mean((2, 3))),
        a=nn.Conv2d(1, 3, 1),
        up=nn.ConvTranspose2d(3, 4, 2, stride=2),
        out=nn.Linear(4, 1),
    )
    masks = cut(model, a__weight=0, up__weight=(slice(None), slice(2, 4)))
    found = prospr.inspect(model, masks, torch.ones(1, 1, 3, 3))
    assert [layer.effective for layer in found.layers] == [2, 2 * 2 * 4, 2]
    assert [layer.dead_channels for layer in found.layers] == [1, 2, 0]
    assert [layer.channels for layer in found.layers] == [3, 4, 1]


def test_transposed_convolution_in_groups():
    """Inputs 0 and 1 feed outputs 0 to 2, inputs 2 and 3 the outputs 3 to 5; the weight is (4, 3, 1)."""
    model = Net(lambda m, x: m.up(x), up=nn.ConvTranspose1d(4, 6, 1, groups=2))
    masks = cut(model, up__weight=(slice(0, 2), 1))
    found = prospr.inspect(model, masks, torch.ones(1, 4, 5))
    assert (found.layers[0].channels, found.layers[0].dead_channels, found.layers[0].effective) == (6, 1, 10)
    assert str(found).splitlines()[1].split()[6] == "1/6"


@pytest.mark.parametrize(
    "norm",
    [
        *(nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False), nn.InstanceNorm1d(4, affine=True)),
        *(nn.LayerNorm((4, 5)), nn.GroupNorm(2, 4), nn.RMSNorm([4, 5]), nn.LocalResponseNorm(2)),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_the_shift_of_a_norm_is_no_signal(norm):
    for name, p in norm.named_parameters():
        nn.init.constant_(p, 3.0 if name == "bias" else 1.0)
    model = Net(
        lambda m, x: m.out(F.relu(m.norm(m.a(x)))), a=nn.Conv1d(2, 4, 1), norm=norm, out=nn.Conv1d(4, 1, 1, bias=True)
    )
    assert look(model, cut(model, a__weight=0), torch.ones(2, 2, 5)) == ({"a": 6, "out": 3}, True)
    assert look(model, cut(model, a__weight=ALL), torch.ones(2, 2, 5)) == ({"a": 0, "out": 0}, False)


POOLS = {
    "max_pool1d": lambda x: F.max_pool1d(x, 2),
    "MaxPool1d": nn.MaxPool1d(2, stride=2),
    "torch.max_pool1d": lambda x: torch.max_pool1d(x, 2),
    "adaptive": lambda x: F.adaptive_max_pool1d(x, 2),
    "max_pool2d": lambda x: F.max_pool2d(x[None], (1, 2))[0],
    "indices": lambda x: F.max_pool1d(x, 2, return_indices=True)[0],
}


@pytest.mark.parametrize("pool", POOLS)
def test_a_maximum_lets_everything_through(pool):
    """At one input one of the two features wins, at another the other: both are on a path."""
    model = Net(lambda m, x: m.out(POOLS[pool](m.a(x)[None])[0]), a=nn.Linear(3, 4), out=nn.Linear(2, 1))
    assert look(model, cut(model), torch.ones(1, 3)) == ({"a": 12, "out": 2}, True)
    assert look(model, cut(model, a__weight=slice(0, 2)), torch.ones(1, 3)) == ({"a": 6, "out": 1}, True)


@pytest.mark.parametrize(
    "function",
    [
        *(F.relu, F.leaky_relu, F.gelu, F.silu, torch.tanh, torch.relu, F.hardswish, lambda x: x.clamp(max=1e-3)),
        *(lambda x: x.relu_(), lambda x: F.relu6(100 * x), nn.PReLU(), nn.SELU(), nn.Hardtanh(), torch.abs),
        *(nn.Dropout(0.9), lambda x: F.dropout(x, 0.9, training=True)),
        lambda x: F.dropout1d(x[None], 0.9, training=True)[0],
        *(nn.Tanhshrink(), nn.Hardshrink(99), nn.Softshrink(99), lambda x: x.clip(max=1e-3), lambda x: x.clip_(-2, -1)),
    ],
)
def test_activations_and_dropout_are_open(function):
    model = Net(lambda m, x: m.b(function(m.a(x))), a=nn.Linear(3, 8), b=nn.Linear(8, 2))
    assert look(model, cut(model, a__weight=0), torch.ones(1, 3)) == ({"a": 21, "b": 14}, True)


@pytest.mark.parametrize("gate", [torch.sigmoid, nn.Sigmoid(), F.hardsigmoid, torch.exp, nn.Softmax(1)])
def test_a_gate_without_input_is_not_shut(gate):
    """Squeeze and excitation: its scale is a half where its own layers are empty."""

    def forward(m, x):
        x = m.a(x)
        scale = gate(m.up(F.relu(m.down(x.mean((2, 3))))))
        return m.out((x * scale[..., None, None]).mean((2, 3)))

    model = Net(forward, a=nn.Conv2d(1, 3, 1), down=nn.Linear(3, 2), up=nn.Linear(2, 3), out=nn.Linear(3, 1))
    x = torch.ones(1, 1, 2, 2)
    assert look(model, cut(model), x) == ({"a": 3, "down": 6, "up": 6, "out": 3}, True)
    assert look(model, cut(model, down__weight=ALL), x) == ({"a": 3, "down": 0, "up": 0, "out": 3}, True)
    # a channel that is dead is dead whatever its gate says
    assert look(model, cut(model, a__weight=0), x) == ({"a": 2, "down": 4, "up": 4, "out": 2}, True)


def test_a_dilated_maximum_is_traced():
    model = Net(
        lambda m, x: m.out(F.max_pool1d(m.a(x)[None], 2, dilation=2)[0]), a=nn.Linear(3, 4), out=nn.Linear(1, 1)
    )
    found, connected = look(model, cut(model), torch.ones(1, 3))
    assert connected is True
    assert found["out"] == 1


def test_a_weight_that_only_meets_padding():
    model = Net(lambda m, x: m.a(x), a=nn.Conv2d(1, 2, 3, padding=1))
    assert look(model, cut(model), torch.ones(1, 1, 1, 1)) == ({"a": 2}, True)


def test_tokens():
    model = Net(lambda m, x: m.out(m.embed(x).mean(1)), embed=nn.Embedding(7, 3), out=nn.Linear(3, 2))
    x = torch.tensor([[1, 2]])
    assert look(model, cut(model), x) == ({"out": 6}, True)
    assert look(model, cut(model, out__weight=ALL), x) == ({"out": 0}, False)
