"""A small network of inverted residual blocks, after MobileNetV2 (Sandler et al. 2018), for 32x32 images."""

from __future__ import annotations

import torch
from torch import nn

from prospr.lab.models.init import kaiming_

# expansion, width in multiples of the stem's, blocks, stride of the first
STAGES = ((1, 1, 1, 1), (6, 1, 2, 1), (6, 2, 3, 2), (6, 3, 3, 2), (6, 5, 2, 2))
LAST = 10  # width of the last convolution, in the same multiples


def _conv(fan_in: int, fan_out: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(fan_in, fan_out, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(fan_out)]


class InvertedResidual(nn.Module):
    """1x1 to `expansion` times the channels, 3x3 a channel, 1x1 back, beside the input where the shapes agree."""

    def __init__(self, fan_in: int, fan_out: int, expansion: int, stride: int):
        super().__init__()
        inner = fan_in * expansion
        layers = [*_conv(fan_in, inner, 1), nn.ReLU6(inplace=True)] if expansion > 1 else []
        layers += [*_conv(inner, inner, 3, stride, groups=inner), nn.ReLU6(inplace=True), *_conv(inner, fan_out, 1)]
        self.layers = nn.Sequential(*layers)
        self.residual = stride == 1 and fan_in == fan_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.residual else self.layers(x)


class MobileNet(nn.Module):
    """A stem, stages of inverted residual blocks, a 1x1 convolution, a pool and a Linear layer."""

    def __init__(self, num_classes: int, width: int, in_channels: int):
        super().__init__()
        self.stem = nn.Sequential(*_conv(in_channels, width, 3), nn.ReLU6(inplace=True))
        blocks: list[nn.Module] = []
        channels = width
        for expansion, multiple, count, stride in STAGES:
            for position in range(count):
                blocks.append(InvertedResidual(channels, width * multiple, expansion, stride if position == 0 else 1))
                channels = width * multiple
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Sequential(*_conv(channels, width * LAST, 1), nn.ReLU6(inplace=True))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width * LAST, num_classes)
        kaiming_(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(self.avgpool(self.last(self.blocks(self.stem(images)))).flatten(1))


def mobilenet(num_classes: int = 10, width: int = 32, in_channels: int = 3) -> MobileNet:
    """Eleven inverted residual blocks, from `width` to 5 times `width` channels; 995,146 parameters, 974,912 of them
    prunable.

    >>> mobilenet(width=4)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    return MobileNet(num_classes, width, in_channels)
