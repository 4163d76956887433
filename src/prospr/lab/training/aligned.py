"""Convolutions whose channels are no multiple of eight, as networks without some of their channels have them.

Tensor cores take eight numbers at a time, and cuDNN's kernels for other counts are several times as slow. Here zeros
fill the channels up, and what they make is left out of the result, so it is the same convolution. Compiled, the zeros
are written together with what comes before; uncompiled they would cost a pass over memory each way.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["AlignedConv2d", "aligned"]

EIGHT = 8


def aligned(model: nn.Module) -> nn.Module:
    """`model`, with its convolutions of other counts turned into `AlignedConv2d`."""
    for module in model.modules():
        if type(module) is nn.Conv2d and _suits(module):
            module.__class__ = AlignedConv2d
    return model


def _suits(conv: nn.Conv2d) -> bool:
    odd = conv.in_channels % EIGHT or conv.out_channels % EIGHT
    only_images = conv.in_channels < EIGHT and conv.out_channels % EIGHT == 0  # cuDNN has kernels for a network's first
    return bool(odd) and not only_images and conv.groups == 1 and conv.padding_mode == "zeros"


class AlignedConv2d(nn.Conv2d):
    """A convolution that is computed with its channels filled up to multiples of eight."""

    def forward(self, input: Tensor) -> Tensor:
        inputs, outputs = -self.in_channels % EIGHT, -self.out_channels % EIGHT
        weight = F.pad(self.weight, (0, 0, 0, 0, 0, inputs, 0, outputs))
        bias = None if self.bias is None else F.pad(self.bias, (0, outputs))
        found = F.conv2d(F.pad(input, (0, 0, 0, 0, 0, inputs)), weight, bias, self.stride, self.padding, self.dilation)
        return found[:, : self.out_channels]
