"""ResNet-20, ResNet-18 and ResNet-50. Parameters are named as in torchvision, so state dicts can be exchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from prospr.lab.models.init import kaiming_

Shortcut = Callable[[int, int, int], nn.Module]


def _conv(fan_in: int, fan_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(fan_in, fan_out, kernel, stride, padding=kernel // 2, bias=False)


class PadShortcut(nn.Module):
    """Option A: every stride-th pixel, and zeros for the channels that are missing, half in front and half behind."""

    def __init__(self, fan_in: int, fan_out: int, stride: int):
        super().__init__()
        self.stride = stride
        missing = fan_out - fan_in
        # A module, not F.pad: what prunes channels can see the padding and change it.
        self.pad = nn.ConstantPad3d((0, 0, 0, 0, missing // 2, missing - missing // 2), 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pad(x[:, :, :: self.stride, :: self.stride])


def conv_shortcut(fan_in: int, fan_out: int, stride: int) -> nn.Sequential:
    """Option B: a 1x1 convolution and a norm."""
    return nn.Sequential(_conv(fan_in, fan_out, 1, stride), nn.BatchNorm2d(fan_out))


SHORTCUTS: dict[str, Shortcut] = {"A": PadShortcut, "B": conv_shortcut}


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, fan_in: int, width: int, stride: int, shortcut: nn.Module | None):
        super().__init__()
        self.conv1 = _conv(fan_in, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 beside a shortcut; the stride is on the 3x3 ("v1.5")."""

    expansion = 4

    def __init__(self, fan_in: int, width: int, stride: int, shortcut: nn.Module | None):
        super().__init__()
        self.conv1 = _conv(fan_in, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, width * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.downsample = shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """A stem, stages of blocks (each twice as wide and half as large as the one before), a pool and a Linear layer."""

    def __init__(
        self,
        stem: nn.Conv2d,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        num_classes: int,
        *,
        width: int = 64,
        shortcut: Shortcut = conv_shortcut,
        pool: nn.Module | None = None,
    ):
        super().__init__()
        self.conv1 = stem
        self.bn1 = nn.BatchNorm2d(stem.out_channels)
        self.maxpool = nn.Identity() if pool is None else pool
        channels = stem.out_channels
        self.stages = [f"layer{index + 1}" for index in range(len(depths))]
        for index, (stage, depth) in enumerate(zip(self.stages, depths, strict=True)):
            inner = width * 2**index
            outer = inner * block.expansion
            blocks = []
            for position in range(depth):
                stride = 2 if index > 0 and position == 0 else 1
                same = stride == 1 and channels == outer
                blocks.append(block(channels, inner, stride, None if same else shortcut(channels, outer, stride)))
                channels = outer
            self.add_module(stage, nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)
        kaiming_(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(images))))
        for stage in self.stages:
            x = self.get_submodule(stage)(x)
        return self.fc(self.avgpool(x).flatten(1))


def resnet20(num_classes: int = 10, shortcut: str = "A", width: int = 16, in_channels: int = 3) -> ResNet:
    """The CIFAR ResNet-20: three stages of three blocks, `width`, 2 and 4 times `width` wide.

    `shortcut="A"` (stride and zero padding) is the ProsPr paper's, 269,722 parameters, 268,336 of them prunable;
    `"B"` (1x1 convolution and norm) is open_lth's, 272,474 and 270,896.

    >>> resnet20()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    if shortcut not in SHORTCUTS:
        raise ValueError(f"unknown shortcut {shortcut!r}; known: {', '.join(SHORTCUTS)}")
    stem = _conv(in_channels, width, 3)
    return ResNet(stem, BasicBlock, (3, 3, 3), num_classes, width=width, shortcut=SHORTCUTS[shortcut])


def resnet18(num_classes: int = 10, stem: str = "3x3", in_channels: int = 3, width: int = 64) -> ResNet:
    """ResNet-18: `stem="3x3"` for small images (stride 1, no max-pool), `"7x7"` as for ImageNet (stride 2, max-pool).

    Four stages of two blocks, the first `width` wide, each twice as wide as the one before.
    With 200 classes 11,271,432 parameters, 11,261,632 of them prunable; with the 7x7 stem 11,279,112 and 11,269,312.
    """
    stems = {
        "3x3": lambda: (_conv(in_channels, width, 3), None),
        "7x7": lambda: (_conv(in_channels, width, 7, 2), nn.MaxPool2d(3, 2, padding=1)),
    }
    if stem not in stems:
        raise ValueError(f"unknown stem {stem!r}; known: {', '.join(stems)}")
    conv, pool = stems[stem]()
    return ResNet(conv, BasicBlock, (2, 2, 2, 2), num_classes, width=width, pool=pool)


def resnet50(num_classes: int = 1000, in_channels: int = 3, width: int = 64) -> ResNet:
    """ResNet-50 for ImageNet, torchvision's v1.5; 25,557,032 parameters, 25,502,912 of them prunable.

    `width` is that of the stem and of the first stage's 3x3 convolutions; each stage is twice as wide.
    """
    stem = _conv(in_channels, width, 7, 2)
    return ResNet(stem, Bottleneck, (3, 4, 6, 3), num_classes, width=width, pool=nn.MaxPool2d(3, 2, padding=1))
