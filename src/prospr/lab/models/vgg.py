"""VGG-16 and VGG-19 for small images: batch norm after each convolution, global pooling, one Linear layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from prospr.lab.models.init import kaiming_


class VGG(nn.Module):
    """Stages of 3x3 convolutions, each stage but the last halved by max-pooling."""

    def __init__(self, depths: Sequence[int], num_classes: int, in_channels: int = 3, width: int = 64):
        super().__init__()
        widths = (width, 2 * width, 4 * width, 8 * width, 8 * width)
        layers: list[nn.Module] = []
        channels = in_channels
        for stage, (depth, wide) in enumerate(zip(depths, widths, strict=True)):
            if stage > 0:
                layers.append(nn.MaxPool2d(2))
            for _ in range(depth):
                layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU(inplace=True)]
                channels = wide
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, num_classes)
        kaiming_(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.avgpool(self.features(images)).flatten(1))


def vgg16(num_classes: int = 10, in_channels: int = 3, width: int = 64) -> VGG:
    """Thirteen convolutions and one Linear layer; 14,728,266 parameters, 14,715,584 of them prunable.

    The first stage is `width` channels wide, the others 2, 4, 8 and 8 times that.

    >>> vgg16()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    return VGG((2, 2, 3, 3, 3), num_classes, in_channels, width)


def vgg19(num_classes: int = 10, in_channels: int = 3, width: int = 64) -> VGG:
    """Sixteen convolutions and one Linear layer; 20,040,522 parameters, 20,024,000 of them prunable.

    The first stage is `width` channels wide, the others 2, 4, 8 and 8 times that.
    """
    return VGG((2, 2, 4, 4, 4), num_classes, in_channels, width)
