"""U-Net for segmentation as it is made today: padded convolutions and batch norm, the output as large as the input."""

from __future__ import annotations

import torch
from torch import nn

from prospr.lab.models.init import kaiming_


def _double(fan_in: int, fan_out: int, norm: bool) -> nn.Sequential:
    """Twice a 3x3 convolution, a norm and a ReLU."""
    layers: list[nn.Module] = []
    for channels in (fan_in, fan_out):
        layers.append(nn.Conv2d(channels, fan_out, 3, padding=1, bias=not norm))
        if norm:
            layers.append(nn.BatchNorm2d(fan_out))
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


@torch.fx.wrap  # one step to torch.fx, which cannot follow a branch on a size
def _check_size(height: int, width: int, depth: int) -> None:
    side = 2**depth
    if height % side or width % side:
        up = [size + -size % side for size in (height, width)]
        raise ValueError(
            f"images of {height}x{width} cannot be halved {depth} times; pad them to {up[0]}x{up[1]} (multiples of "
            f"{side}), or build the network with a smaller depth"
        )


class UNet(nn.Module):
    """Down `depth` times by max-pooling, up by transposed convolutions, each joined to its twin on the way down."""

    def __init__(self, num_classes: int, in_channels: int, width: int, depth: int, norm: bool):
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            _double(fan_in, fan_out, norm) for fan_in, fan_out in zip([in_channels, *widths], widths, strict=False)
        )
        self.pool = nn.MaxPool2d(2)
        upward = widths[:-1][::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * wide, wide, 2, stride=2) for wide in upward)
        self.join = nn.ModuleList(_double(2 * wide, wide, norm) for wide in upward)
        self.head = nn.Conv2d(width, num_classes, 1)
        kaiming_(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        _check_size(images.shape[-2], images.shape[-1], len(self.up))
        x = self.down[0](images)
        skips = []
        for down in self.down[1:]:
            skips.append(x)
            x = down(self.pool(x))
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


def unet(num_classes: int = 2, in_channels: int = 1, width: int = 64, depth: int = 4, norm: bool = True) -> UNet:
    """Ronneberger's U-Net with padding, for one-channel cells of 256x256: a score a class and pixel.

    `width` channels at full size, twice as many each time the image is halved, `depth` times. 31,036,546 parameters,
    31,023,808 of them prunable; without batch norm (`norm=False`) 31,030,658, with biases in its place.

    >>> unet(width=4)(torch.zeros(2, 1, 32, 48)).shape
    torch.Size([2, 2, 32, 48])
    """
    return UNet(num_classes, in_channels, width, depth, norm)
