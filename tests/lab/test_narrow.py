"""Convolutions of few channels: the kernels against PyTorch's, and which layers take them."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from prospr.lab.models import build
from prospr.lab.training import narrow
from prospr.lab.training.narrow import NarrowConv2d, conv3x3, conv3x3_input, conv3x3_weight, narrowed

SHAPES = [  # channels in and out, height, width, images; sides that blocks of 4 and 2 pixels divide, and others
    (3, 16, 9, 10, 2),
    (3, 16, 8, 8, 2),
    (16, 16, 8, 8, 3),
    (16, 16, 32, 32, 2),
    (16, 32, 6, 5, 2),
    (32, 32, 7, 8, 3),
    (32, 32, 8, 12, 3),
    (64, 64, 4, 4, 2),
    (64, 64, 5, 5, 2),
]


def tensors(shape, dtype=torch.float32, device="cpu"):
    inputs, outputs, height, width, batch = shape
    rng = torch.Generator().manual_seed(0)
    sizes = (batch, inputs, height, width), (outputs, inputs, 3, 3), (batch, outputs, height, width)
    found = (torch.randn(size, generator=rng, dtype=torch.float64).to(device, dtype) for size in sizes)
    return [t.contiguous(memory_format=torch.channels_last) for t in found]


def gradients(convolve, x, weight, grad):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = convolve(x, weight)
    return y.detach(), *torch.autograd.grad(y, (x, weight), grad)


def plain(x, weight):
    return F.conv2d(x, weight, padding=1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_operator_is_a_convolution(shape):
    for got, expected in zip(gradients(conv3x3, *tensors(shape)), gradients(plain, *tensors(shape)), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("operator", [conv3x3, conv3x3_input, conv3x3_weight])
def test_the_operators_keep_pytorchs_rules(operator):
    x, weight, grad = tensors(SHAPES[2])
    given = {conv3x3: (x, weight), conv3x3_input: (grad, weight), conv3x3_weight: (grad, x)}[operator]
    torch.library.opcheck(operator, given)


def test_which_layers_are_narrow():
    names = [n for n, m in narrowed(build("resnet20")).named_modules() if isinstance(m, NarrowConv2d)]
    assert len(names) == 17  # all but the two of stride 2
    assert not {"layer2.0.conv1", "layer3.0.conv1"} & set(names)
    others = [
        nn.Conv2d(16, 16, 3, padding=1),  # with a bias
        nn.Conv2d(16, 16, 3, bias=False),
        nn.Conv2d(16, 16, 3, padding=2, dilation=2, bias=False),
        nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
        nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect", bias=False),
        nn.Conv2d(16, 16, 5, padding=1, bias=False),
        nn.Conv2d(16, 24, 3, padding=1, bias=False),
        nn.Conv2d(3, 64, 3, padding=1, bias=False),
    ]
    assert not any(isinstance(narrowed(one), NarrowConv2d) for one in others)


def test_what_the_kernels_are_not_for_is_left_to_pytorch(monkeypatch):
    def refuse(*_):
        raise AssertionError("the kernels were asked")

    monkeypatch.setattr(narrow, "conv3x3", refuse)
    x, weight, _ = tensors(SHAPES[2])
    layer = narrowed(nn.Conv2d(16, 16, 3, padding=1, bias=False))
    with torch.no_grad():
        layer.weight.copy_(weight)
    torch.testing.assert_close(layer(x), plain(x, weight))  # float32, on a CPU


INTERPRETED = """
import torch
from prospr.lab.training import narrow
from test_narrow import SHAPES, gradients, plain, tensors
for shape in SHAPES:
    x, weight, grad = tensors(shape)
    y, to_x, to_weight = gradients(plain, x, weight, grad)
    torch.testing.assert_close(narrow._convolved(x, weight, flipped=False), y, atol=1e-4, rtol=1e-4)
    if shape[0] > 3:
        torch.testing.assert_close(narrow._convolved(grad, weight, flipped=True), to_x, atol=1e-4, rtol=1e-4)
    got = narrow.conv3x3_weight._init_fn(grad, x).sum(0).permute(0, 3, 1, 2)
    torch.testing.assert_close(got, to_weight, atol=1e-4, rtol=1e-4)
"""


def test_the_kernels_interpreted():
    """Triton's interpreter runs them on a CPU, value by value."""
    pytest.importorskip("triton", reason="needs Triton, which comes with PyTorch's GPU builds")
    here = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=os.environ | here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        *SHAPES,
        (3, 16, 32, 32, 256),
        (16, 16, 32, 32, 256),
        (32, 32, 16, 16, 80),
        (32, 32, 16, 16, 256),
        (64, 64, 8, 8, 256),
    ],
    ids=str,
)
def test_the_kernels_on_a_gpu(shape):
    x, weight, grad = tensors(shape, torch.bfloat16, "cuda")
    expected = gradients(plain, x.double(), weight.double(), grad.double())
    layer = narrowed(nn.Conv2d(*shape[:2], 3, padding=1, bias=False).to("cuda", torch.bfloat16))
    layer.weight.data = weight
    leaf = x.clone().requires_grad_(shape[0] > 3)
    y = layer(leaf)
    found = torch.autograd.grad(y, (leaf, layer.weight) if shape[0] > 3 else (layer.weight,), grad)
    wanted = [expected[0], *expected[1:]] if shape[0] > 3 else [expected[0], expected[2]]
    for got, true in zip([y.detach(), *found], wanted, strict=True):
        assert (got.double() - true).abs().max() <= 2**-8 * true.abs().max()  # one rounding to bfloat16


@pytest.mark.gpu
def test_a_large_image_is_left_to_cudnn(monkeypatch):
    calls = []
    monkeypatch.setattr(narrow, "conv3x3", lambda x, w: calls.append(x.shape) or plain(x, w))
    layer = narrowed(nn.Conv2d(16, 16, 3, padding=1, bias=False).to("cuda", torch.bfloat16))
    for side in (32, 33):
        layer(torch.zeros(2, 16, side, side, device="cuda", dtype=torch.bfloat16))
    assert calls == [(2, 16, 32, 32)]
