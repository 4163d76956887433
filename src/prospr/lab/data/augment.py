"""Crops and mirror images, as pure functions of numbers drawn beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Augment = Callable[[Tensor, torch.Generator], Tensor]


def crop_flip(images: Tensor, top: Tensor, left: Tensor, mirrored: Tensor, pad: int, fill: float = 0) -> Tensor:
    """Each image (n, channels, height, width) padded by `pad` on all sides, cropped to its size at (top, left), and
    mirrored where asked.

    `top`, `left` (0 to 2 pad) and `mirrored` have one entry an image and are on the images' device. Any dtype; shapes
    depend on shapes alone and nothing waits for the device, so that a CUDA graph can hold it.

    >>> image = torch.arange(4).view(1, 1, 2, 2)
    >>> crop_flip(image, torch.tensor([1]), torch.tensor([1]), torch.tensor([True]), pad=1).view(2, 2)
    tensor([[1, 0],
            [3, 2]])
    """
    n, _, height, width = images.shape
    device = images.device
    columns = torch.arange(width, device=device)
    columns = left.view(n, 1) + torch.where(mirrored.view(n, 1), columns.flip(0), columns)
    rows = top.view(n, 1) + torch.arange(height, device=device)
    padded = F.pad(images, (pad,) * 4, value=fill).permute(0, 2, 3, 1)
    moved = padded[torch.arange(n, device=device).view(n, 1, 1), rows.view(n, height, 1), columns.view(n, 1, width)]
    return moved.permute(0, 3, 1, 2).contiguous()


@dataclass(frozen=True)
class CropFlip:
    """Augmentation: move each image by up to `pad` pixels, zeros moving in, and mirror half of them if `flip`.

    >>> moved = CropFlip(pad=1)(torch.ones(4, 1, 8, 8), torch.Generator().manual_seed(0))
    >>> moved.shape
    torch.Size([4, 1, 8, 8])
    """

    pad: int = 4
    flip: bool = False

    def __post_init__(self) -> None:
        if self.pad < 0:
            raise ValueError(f"pad is {self.pad}; it must be at least 0")

    def draw(self, n: int, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """`top`, `left` and `mirrored` for `n` images, on the CPU."""
        top, left = torch.randint(2 * self.pad + 1, (2, n), generator=rng)
        mirrored = torch.rand(n, generator=rng) < (0.5 if self.flip else 0.0)
        return top, left, mirrored

    def __call__(self, images: Tensor, rng: torch.Generator) -> Tensor:
        top, left, mirrored = (drawn.to(images.device) for drawn in self.draw(len(images), rng))
        return crop_flip(images, top, left, mirrored, self.pad)
