"""Convolutions of channels that are no multiple of eight: filled up they are the same, and which layers are."""

import pytest
import torch
from torch import nn

from prospr.lab.models import build
from prospr.lab.training.aligned import AlignedConv2d, aligned

CONVOLUTIONS = {
    "both odd": lambda: nn.Conv2d(13, 21, 3, padding=1),
    "inputs odd": lambda: nn.Conv2d(5, 11, 3, padding=1, bias=False),
    "outputs odd": lambda: nn.Conv2d(16, 10, 1),
    "stride and dilation": lambda: nn.Conv2d(9, 8, 3, stride=2, padding=2, dilation=2),
    "padding by name": lambda: nn.Conv2d(8, 3, (3, 5), padding="same"),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_it_is_the_same_convolution(name):
    torch.manual_seed(0)
    plain = CONVOLUTIONS[name]().double()
    filled = CONVOLUTIONS[name]().double()
    filled.load_state_dict(plain.state_dict())
    assert type(aligned(filled)) is AlignedConv2d
    x = torch.randn(3, plain.in_channels, 9, 8, dtype=torch.float64).to(memory_format=torch.channels_last)
    found = []
    for layer in (plain, filled):
        given = x.clone().requires_grad_()
        y = layer(given)
        grad = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        found.append((y, *torch.autograd.grad(y, (given, *layer.parameters()), grad)))
    for got, expected in zip(found[1], found[0], strict=True):
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_what_cudnn_sees_is_a_multiple_of_eight(monkeypatch):
    seen = []
    convolve = nn.functional.conv2d
    monkeypatch.setattr(
        "prospr.lab.training.aligned.F.conv2d", lambda x, w, *rest: seen.append((x, w)) or convolve(x, w, *rest)
    )
    layer = aligned(nn.Conv2d(13, 21, 3, bias=False)).to(memory_format=torch.channels_last)
    layer(torch.randn(2, 13, 6, 6).to(memory_format=torch.channels_last))
    ((x, weight),) = seen
    assert x.shape[1] == 16
    assert weight.shape[:2] == (24, 16)
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in (x, weight))


def test_which_layers_are_filled_up():
    others = [
        nn.Conv2d(16, 24, 3),
        nn.Conv2d(3, 64, 3),  # a network's first
        nn.Conv2d(20, 20, 3, groups=20),
        nn.Conv2d(20, 20, 3, padding=1, padding_mode="reflect"),
        nn.Conv1d(5, 5, 3),
        nn.Linear(5, 5),
    ]
    assert not any(isinstance(aligned(one), AlignedConv2d) for one in others)
    names = [n for n, m in aligned(build("vgg16", width=20)).named_modules() if isinstance(m, AlignedConv2d)]
    assert len(names) == 3  # to 20, of 20, and from 20 to 40; the others have 40, 80 and 160
