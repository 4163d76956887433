"""3x3 convolutions of few channels, for networks such as ResNet-20 on a GPU in bfloat16.

cuDNN's kernels work in tiles of 32 and more channels: of a layer with 16 they waste most, and take several times as
long as memory needs. These work on small blocks of neighbouring pixels, such as 2 x 2, whose filters see the same
4 x 4 inputs: each row of those lies in one piece in memory and is multiplied with all weights it meets, those of the
block's other pixels included. Triton comes with PyTorch's GPU builds.
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
    return images.dim() == 4 and images[0].numel() <= LARGEST and images.shape[3] <= 64 and images.numel() < 2**31


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
    outputs, rows = grad.shape[1], batch * height
    how = dict(WEIGHT[inputs])
    each, wide = how.pop("each"), _dividing(width, how.pop("wide"))
    lines = max(1, how["tile"] // _power(width // wide))  # rows of pixels a tile
    parts = _parts(x)
    found = torch.empty(parts, outputs, 3, 3, inputs, dtype=torch.float32, device=x.device)
    tiles, span = -(-rows // (parts * lines)), _power((wide + 2) * inputs)
    how |= {"each": each, "wide": wide, "across": how["tile"] // lines}
    _weight_kernel[(parts, 3 // each)](x, grad, found, rows, tiles, height, width, inputs, outputs, span, **how)
    return found


@conv3x3.register_kernel("cpu")
def _(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight, padding=1).contiguous(memory_format=torch.channels_last)


@conv3x3_input.register_kernel("cpu")
def _(grad: Tensor, weight: Tensor) -> Tensor:
    return F.conv_transpose2d(grad, weight, padding=1).contiguous(memory_format=torch.channels_last)


@conv3x3_weight.register_kernel("cpu")
def _(grad: Tensor, x: Tensor) -> Tensor:
    found = torch.zeros(_parts(x), grad.shape[1], 3, 3, x.shape[1])
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
    return x.new_empty(_parts(x), grad.shape[1], 3, 3, x.shape[1], dtype=torch.float32)


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
    how = dict(CONV[inputs])
    high, wide = _dividing(height, how.pop("high")), _dividing(width, how.pop("wide"))
    blocks, span = batch * height * width // (high * wide), _power((wide + 2) * inputs)
    grid = (-(-blocks // how["tile"]),)
    _conv_kernel[grid](x, weight, y, blocks, height, width, inputs, outputs, span, flipped, high, wide, **how)
    return y


def _like(x: Tensor, channels: int) -> Tensor:
    """Room for a result, channels last."""
    batch, _, height, width = x.shape
    return x.new_empty(batch, height, width, channels).permute(0, 3, 1, 2)


def _last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _dividing(side: int, wanted: int) -> int:
    """As many pixels of a side to a block as are wanted, where that divides it."""
    return wanted if side % wanted == 0 else 1


def _parts(x: Tensor) -> int:
    return max(1, min(PARTS[int(x.shape[1])], x.shape[0] * x.shape[2] // 8))


# -------------------------------------------------------------------------------------------------------- kernels

# By channels of the input: pixels to a block, blocks to a program, and how Triton builds it. The quickest on an H200 of
# those that `benchmarks/convolutions.py --tune` tries, eight streams side by side.
CONV = {
    3: {"high": 2, "wide": 2, "tile": 128, "num_warps": 4, "num_stages": 1},
    16: {"high": 4, "wide": 2, "tile": 128, "num_warps": 4, "num_stages": 1},
    32: {"high": 1, "wide": 2, "tile": 128, "num_warps": 4, "num_stages": 1},
    64: {"high": 1, "wide": 2, "tile": 128, "num_warps": 8, "num_stages": 1},
}
# And how many of the filter's three rows a program sees to.
WEIGHT = {
    3: {"each": 3, "wide": 2, "tile": 64, "num_warps": 4, "num_stages": 2},
    16: {"each": 3, "wide": 2, "tile": 64, "num_warps": 4, "num_stages": 2},
    32: {"each": 3, "wide": 2, "tile": 64, "num_warps": 4, "num_stages": 2},
    64: {"each": 1, "wide": 1, "tile": 64, "num_warps": 4, "num_stages": 2},
}
# Groups of pixels, whose shares of a weight's gradient are added up at the end.
PARTS = {3: 128, 16: 128, 32: 64, 64: 22}

if triton is not None:

    @triton.jit
    def _conv_kernel(
        x,
        weight,
        y,
        blocks,
        height: tl.constexpr,
        width: tl.constexpr,
        inputs: tl.constexpr,
        outputs: tl.constexpr,
        span: tl.constexpr,  # a power of two, at least (wide + 2) * inputs
        flipped: tl.constexpr,  # weight is (inputs, 3, 3, outputs), and turned round
        high: tl.constexpr,
        wide: tl.constexpr,
        tile: tl.constexpr,
    ):
        block = tl.program_id(0) * tile + tl.arange(0, tile)
        across: tl.constexpr = width // wide
        row, column = block // across % (height // high) * high, block % across * wide
        pixel = block // across * (high * width) + column  # the block's first
        j, out = tl.arange(0, span), tl.arange(0, high * wide * outputs)
        p, c = j // inputs, j % inputs  # a column of the block's inputs, and a channel
        down, right, o = out // (wide * outputs), out // outputs % wide, out % outputs  # a pixel of it, and a channel
        left = p[:, None] - right[None, :]  # the column of the filter that input p meets for that pixel
        inside = ((p > 0)[None, :] | (column > 0)[:, None]) & ((p <= wide)[None, :] | (column + wide < width)[:, None])
        inside = inside & (p < wide + 2)[None, :] & (block < blocks)[:, None]
        from_x = x + (pixel[:, None] * inputs + (j - (width + 1) * inputs)[None, :])
        total = tl.zeros([tile, high * wide * outputs], dtype=tl.float32)
        for r in tl.static_range(high + 2):
            above = row + (r - 1)
            there = inside & ((above >= 0) & (above < height))[:, None]
            a = tl.load(from_x + r * (width * inputs), mask=there, other=0.0)
            up = r - down
            tap = up[None, :] * 3 + left
            met = (left >= 0) & (left < 3) & ((up >= 0) & (up < 3))[None, :]
            if flipped:
                at = (c[:, None] * 9 + 8 - tap) * outputs + o[None, :]
            else:
                at = (o[None, :] * 9 + tap) * inputs + c[:, None]
            total = tl.dot(a, tl.load(weight + at, mask=met, other=0.0), total)
        at = (pixel[:, None] + (down * width + right)[None, :]) * outputs + o[None, :]
        tl.store(y + at, total.to(y.dtype.element_ty), mask=(block < blocks)[:, None])

    @triton.jit
    def _weight_kernel(
        x,
        grad,
        found,
        rows,
        tiles: tl.constexpr,
        height: tl.constexpr,
        width: tl.constexpr,
        inputs: tl.constexpr,
        outputs: tl.constexpr,
        span: tl.constexpr,
        each: tl.constexpr,
        wide: tl.constexpr,
        across: tl.constexpr,  # a power of two, at least width // wide
        tile: tl.constexpr,
    ):
        part, k = tl.program_id(0), tl.program_id(1)
        j, out, block = tl.arange(0, span), tl.arange(0, wide * outputs), tl.arange(0, tile)
        p, column, row = j // inputs, block % across * wide, part * tiles * (tile // across) + block // across
        inside = ((p > 0)[None, :] | (column > 0)[:, None]) & ((p <= wide)[None, :] | (column + wide < width)[:, None])
        inside = inside & (p < wide + 2)[None, :]
        pixel = row * width + column
        middle = k - 1 + each // 3  # which row of inputs: all three from the middle one, or row k of the filter's
        from_x = x + (pixel[:, None] * inputs + (j + (middle * width - 1) * inputs)[None, :])
        from_grad = grad + (pixel[:, None] * outputs + out[None, :])
        first = tl.zeros([span, wide * outputs], dtype=tl.float32)
        second, third = first, first
        for _ in range(tiles):
            y, there = row % height, (row < rows) & (column < width)
            g = tl.load(from_grad, mask=there[:, None], other=0.0)
            if each == 3:
                a = tl.load(from_x - width * inputs, mask=inside & (there & (y > 0))[:, None], other=0.0)
                b = tl.load(from_x, mask=inside & there[:, None], other=0.0)
                c = tl.load(from_x + width * inputs, mask=inside & (there & (y < height - 1))[:, None], other=0.0)
                first = tl.dot(tl.trans(a), g, first)
                second = tl.dot(tl.trans(b), g, second)
                third = tl.dot(tl.trans(c), g, third)
            else:
                there = there & (y + k > 0) & (y + k <= height)
                first = tl.dot(tl.trans(tl.load(from_x, mask=inside & there[:, None], other=0.0)), g, first)
            row += tile // across
            from_x += tile // across * (width * inputs)
            from_grad += tile // across * (width * outputs)
        to = found + part * (outputs * 9 * inputs)
        _keep(to, first, k, p, j % inputs, out, inputs, outputs, wide)
        if each == 3:
            _keep(to, second, 1, p, j % inputs, out, inputs, outputs, wide)
            _keep(to, third, 2, p, j % inputs, out, inputs, outputs, wide)

    @triton.jit
    def _keep(to, total, k, p, c, out, inputs: tl.constexpr, outputs: tl.constexpr, wide: tl.constexpr):
        """Row k of the filter, added up over a block's pixels, which each have their own share of it in `total`."""
        right, o = out // outputs, out % outputs
        left = p[:, None] - right[None, :]
        at = to + ((o * 9)[None, :] + k * 3 + left) * inputs + c[:, None]
        met = (left >= 0) & (left < 3)
        tl.store(at, total, mask=met & (right == 0)[None, :])
        for one in tl.static_range(1, wide):
            tl.debug_barrier()
            mine = met & (right == one)[None, :]
            tl.store(at, tl.load(at, mask=mine, other=0.0) + total, mask=mine)
