"""3x3 convolutions of few channels, for networks such as ResNet-20 on a GPU in bfloat16.

cuDNN's kernels work in tiles of 32 and more channels: of a layer with 16 they waste most, and take several times as
long as memory needs. These take a tile of pixels and, for each of the three rows of the filter, multiply the three
neighbours of every pixel, which lie side by side in memory, with the row's weights. On an H200 a training step of
ResNet-20 takes two thirds of the time (docs/measurements.md). Triton comes with PyTorch's GPU builds.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

try:
    import triton
    import triton.language as tl
except ImportError:  # the CPU builds of PyTorch are without it
    triton = None

__all__ = ["NarrowConv2d", "narrowed"]

LARGEST = 16 * 32 * 32  # values an image; larger ones, such as VGG's, are left to cuDNN


def narrowed(model: nn.Module) -> nn.Module:
    """`model`, with those of its convolutions that the kernels are for turned into `NarrowConv2d`."""
    for module in model.modules():
        if type(module) is nn.Conv2d and _suits(module):
            module.__class__ = NarrowConv2d
    return model


def _suits(conv: nn.Conv2d) -> bool:
    shape = conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode
    widths = {conv.in_channels, conv.out_channels}
    known = widths <= {16, 32, 64} or (conv.in_channels == 3 and conv.out_channels == 16)
    return known and conv.bias is None and shape == ((3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros")


class NarrowConv2d(nn.Conv2d):
    """A convolution that takes the kernels of this file for what they can do, and PyTorch's for the rest."""

    def forward(self, input: Tensor) -> Tensor:
        if triton is not None and input.device.type == "cuda" and _low(input, self.weight) and _small(input):
            return conv3x3(input, self.weight)
        return super().forward(input)


def _low(*tensors: Tensor) -> bool:
    return all(t.dtype == torch.bfloat16 for t in tensors)


def _small(images: Tensor) -> bool:
    return images.dim() == 4 and images[0].numel() <= LARGEST and images.numel() < 2**31


# ------------------------------------------------------------------------------------------------------ operators


@torch.library.custom_op("prospr::conv3x3", mutates_args=(), device_types="cuda")
def conv3x3(x: Tensor, weight: Tensor) -> Tensor:
    """`F.conv2d(x, weight, padding=1)`."""
    return _convolved(x, weight, flipped=False)


@torch.library.custom_op("prospr::conv3x3_input", mutates_args=(), device_types="cuda")
def conv3x3_input(grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the input."""
    return _convolved(grad, weight, flipped=True)


@torch.library.custom_op("prospr::conv3x3_weight", mutates_args=(), device_types="cuda")
def conv3x3_weight(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of the weight in float32, one part a group of pixels: (parts, outputs, 3, 3, inputs)."""
    grad, x = _last(grad), _last(x)
    batch, inputs, height, width = x.shape
    outputs, pixels = grad.shape[1], batch * height * width
    parts = _parts(pixels)
    found = torch.empty(parts, outputs, 3, 3, inputs, dtype=torch.float32, device=x.device)
    how = WEIGHT[inputs]
    tiles = -(-pixels // (parts * how["tile"]))
    _weight_kernel[(parts, 3)](x, grad, found, pixels, tiles, height, width, inputs, outputs, _power(3 * inputs), **how)
    return found


@conv3x3.register_kernel("cpu")
def _(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight, padding=1).contiguous(memory_format=torch.channels_last)


@conv3x3_input.register_kernel("cpu")
def _(grad: Tensor, weight: Tensor) -> Tensor:
    return F.conv_transpose2d(grad, weight, padding=1).contiguous(memory_format=torch.channels_last)


@conv3x3_weight.register_kernel("cpu")
def _(grad: Tensor, x: Tensor) -> Tensor:
    parts = _parts(x.shape[0] * x.shape[2] * x.shape[3])
    found = torch.zeros(parts, grad.shape[1], 3, 3, x.shape[1])
    found[0] = conv2d_weight(x.float(), (grad.shape[1], x.shape[1], 3, 3), grad.float(), padding=1).permute(0, 2, 3, 1)
    return found


@conv3x3.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return _like(x, weight.shape[0])


@conv3x3_input.register_fake
def _(grad: Tensor, weight: Tensor) -> Tensor:
    return _like(grad, weight.shape[1])


@conv3x3_weight.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    parts = _parts(x.shape[0] * x.shape[2] * x.shape[3])
    return x.new_empty(parts, grad.shape[1], 3, 3, x.shape[1], dtype=torch.float32)


def _remember(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    to_x = conv3x3_input(grad, weight) if ctx.needs_input_grad[0] else None
    to_weight = None
    if ctx.needs_input_grad[1]:
        to_weight = conv3x3_weight(grad, x).sum(0).to(weight.dtype).permute(0, 3, 1, 2)
    return to_x, to_weight


conv3x3.register_autograd(_backward, setup_context=_remember)


def _convolved(x: Tensor, weight: Tensor, flipped: bool) -> Tensor:
    x, weight = _last(x), _last(weight)
    batch, inputs, height, width = x.shape
    outputs = weight.shape[1 if flipped else 0]
    y = _like(x, outputs)
    pixels = batch * height * width
    how = CONV[inputs]
    grid = (-(-pixels // how["tile"]),)
    _conv_kernel[grid](x, weight, y, pixels, height, width, inputs, outputs, _power(3 * inputs), flipped, **how)
    return y


def _like(x: Tensor, channels: int) -> Tensor:
    """Room for a result, channels last."""
    batch, _, height, width = x.shape
    return x.new_empty(batch, height, width, channels).permute(0, 3, 1, 2)


def _last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def _parts(pixels: int) -> int:
    return max(1, min(PARTS, pixels // 64))


# -------------------------------------------------------------------------------------------------------- kernels

# Pixels a program and how Triton builds it, by channels of the input: the fastest on an H200 for ResNet-20's layers,
# eight networks side by side.
CONV = {
    3: {"tile": 128, "num_warps": 4, "num_stages": 3},
    16: {"tile": 256, "num_warps": 2, "num_stages": 2},
    32: {"tile": 128, "num_warps": 2, "num_stages": 2},
    64: {"tile": 128, "num_warps": 4, "num_stages": 1},
}
WEIGHT = {
    3: {"tile": 128, "num_warps": 2, "num_stages": 2},
    16: {"tile": 128, "num_warps": 4, "num_stages": 3},
    32: {"tile": 64, "num_warps": 4, "num_stages": 2},
    64: {"tile": 64, "num_warps": 4, "num_stages": 2},
}
PARTS = 88  # groups of pixels whose shares of a weight's gradient are added up at the end

if triton is not None:

    @triton.jit
    def _conv_kernel(
        x,
        weight,
        y,
        pixels,
        height: tl.constexpr,
        width: tl.constexpr,
        inputs: tl.constexpr,
        outputs: tl.constexpr,
        span: tl.constexpr,  # a power of two, at least 3 * inputs
        flipped: tl.constexpr,  # weight is (inputs, 3, 3, outputs), and turned round
        tile: tl.constexpr,
    ):
        pixel = tl.program_id(0) * tile + tl.arange(0, tile)
        row, column = (pixel // width) % height, pixel % width
        j, out = tl.arange(0, span), tl.arange(0, outputs)
        beside = column[:, None] + (j // inputs - 1)[None, :]
        here = (pixel < pixels)[:, None] & (beside >= 0) & (beside < width) & (j < 3 * inputs)[None, :]
        total = tl.zeros([tile, outputs], dtype=tl.float32)
        for k in range(3):
            above = row + (k - 1)
            there = here & ((above >= 0) & (above < height))[:, None]
            a = tl.load(x + (pixel + (k - 1) * width - 1)[:, None] * inputs + j[None, :], mask=there, other=0.0)
            if flipped:
                tap = 8 - (3 * k + j // inputs)
                at = ((j % inputs) * 9 + tap)[:, None] * outputs + out[None, :]
            else:
                at = out[None, :] * (9 * inputs) + k * 3 * inputs + j[:, None]
            b = tl.load(weight + at, mask=(j < 3 * inputs)[:, None], other=0.0)
            total = tl.dot(a, b, total)
        tl.store(
            y + pixel[:, None] * outputs + out[None, :], total.to(y.dtype.element_ty), mask=(pixel < pixels)[:, None]
        )

    @triton.jit
    def _weight_kernel(
        x,
        grad,
        found,
        pixels,
        tiles: tl.constexpr,
        height: tl.constexpr,
        width: tl.constexpr,
        inputs: tl.constexpr,
        outputs: tl.constexpr,
        span: tl.constexpr,
        tile: tl.constexpr,
    ):
        part, k = tl.program_id(0), tl.program_id(1)
        j, out = tl.arange(0, span), tl.arange(0, outputs)
        total = tl.zeros([span, outputs], dtype=tl.float32)
        for t in range(tiles):
            pixel = (part * tiles + t) * tile + tl.arange(0, tile)
            inside = pixel < pixels
            above, beside = (pixel // width) % height + (k - 1), (pixel % width)[:, None] + (j // inputs - 1)[None, :]
            there = (inside & (above >= 0) & (above < height))[:, None] & (beside >= 0) & (beside < width)
            there = there & (j < 3 * inputs)[None, :]
            a = tl.load(x + (pixel + (k - 1) * width - 1)[:, None] * inputs + j[None, :], mask=there, other=0.0)
            g = tl.load(grad + pixel[:, None] * outputs + out[None, :], mask=inside[:, None], other=0.0)
            total = tl.dot(tl.trans(a), g, total)
        at = (part * outputs + out)[None, :] * (9 * inputs) + k * 3 * inputs + j[:, None]
        tl.store(found + at, total, mask=(j < 3 * inputs)[:, None])
