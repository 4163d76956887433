"""Images as bytes, and what the trainers ask of batches: the one place where training meets `prospr.lab.data`.

`draws` gives the random numbers of an epoch, `crop_flip` and `normalise` what is done to images with them. Eager
training iterates over `batches.epoch(k)`; the captured step does the same work on the device from the same draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from prospr.lab.data import Batches, CropFlip, Split
from prospr.lab.seeds import generator

__all__ = ["ByteBatches", "ByteSplit", "Draws", "crop_flip", "draws", "normalise", "padding", "statistics"]

IGNORE = -100  # the label of a pixel that a crop moved in: the one F.cross_entropy leaves out


class Draws(NamedTuple):
    """An epoch's random numbers, one of each an image in the order of visit."""

    order: Tensor
    top: Tensor
    left: Tensor
    mirrored: Tensor


@dataclass(frozen=True)
class ByteSplit(Split):
    """Images of uint8, to be normalised by each channel's `mean` and `std`, of pixels 0 to 255, when they are used."""

    mean: Tensor | None = None
    std: Tensor | None = None

    def to(self, device: torch.device | str) -> ByteSplit:
        mean, std = (None if value is None else value.to(device) for value in (self.mean, self.std))
        return ByteSplit(self.images.to(device), self.labels.to(device), mean, std)


@dataclass(frozen=True)
class ByteBatches(Batches):
    """Batches of uint8 images, augmented as bytes and then normalised; label maps move with their images."""

    mean: Tensor | None = None
    std: Tensor | None = None

    def epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        device = self.images.device
        drawn = [values.to(device).split(self.batch_size) for values in draws(self, epoch)]
        for index in range(len(self)):
            chosen, *moves = (values[index] for values in drawn)
            images, labels = self.images[chosen], self.labels[chosen]
            if self.augment is not None:
                images = crop_flip(images, *moves, padding(self))
                if labels.dim() > 1:
                    labels = crop_flip(labels.unsqueeze(1), *moves, padding(self), fill=IGNORE).squeeze(1)
            yield normalise(images, self.mean, self.std), labels


def draws(batches: Batches, epoch: int) -> Draws:
    """The random numbers that `batches.epoch(epoch)` draws.

    >>> from prospr.lab.data import digits
    >>> data = digits().train
    >>> drawn = draws(Batches(data.images, data.labels, 64, seed=0, augment=CropFlip(pad=1)), epoch=3)
    >>> len(drawn.order), int(drawn.top.max())
    (1437, 2)
    """
    padding(batches)  # refuses an augmentation whose draws are not known
    count, augment = len(batches.labels), batches.augment
    rng = generator("batches", batches.seed, epoch)
    order = torch.randperm(count, generator=rng)
    if not isinstance(augment, CropFlip):
        nothing = torch.zeros(count, dtype=torch.long)
        return Draws(order, nothing, nothing, nothing.bool())
    places, mirrored = [], []
    for chosen in order.split(batches.batch_size):  # in the order in which Batches draws them
        places.append(torch.randint(2 * augment.pad + 1, (2, len(chosen), 1), generator=rng).squeeze(2))
        mirrored.append(torch.rand(len(chosen), 1, generator=rng).squeeze(1) < (0.5 if augment.flip else 0.0))
    top, left = torch.cat(places, dim=1)
    return Draws(order, top, left, torch.cat(mirrored))


def padding(batches: Batches) -> int:
    """How far images are moved."""
    if batches.augment is None:
        return 0
    if not isinstance(batches.augment, CropFlip):
        raise ValueError(
            f"augment is {batches.augment!r}, and on the device only CropFlip is known; use it, or engine='eager'"
        )
    return batches.augment.pad


def statistics(data: Split | Batches) -> tuple[Tensor | None, Tensor | None]:
    """Each channel's mean and deviation, where images are still bytes; None where they are normalised already."""
    return (data.mean, data.std) if isinstance(data, (ByteSplit, ByteBatches)) else (None, None)


def crop_flip(images: Tensor, top: Tensor, left: Tensor, mirrored: Tensor, pad: int, fill: float = 0) -> Tensor:
    """Each image padded by `pad` on all sides, cropped to its size at (top, left), and mirrored where asked.

    >>> image = torch.arange(4).view(1, 1, 2, 2)
    >>> crop_flip(image, torch.tensor([1]), torch.tensor([1]), torch.tensor([True]), pad=1).view(2, 2)
    tensor([[1, 0],
            [3, 2]])
    """
    n, _, height, width = images.shape
    columns = torch.arange(width, device=images.device)
    columns = left.view(n, 1) + torch.where(mirrored.view(n, 1), columns.flip(0), columns)
    rows = top.view(n, 1) + torch.arange(height, device=images.device)
    padded = F.pad(images, (pad,) * 4, value=fill).permute(0, 2, 3, 1)
    each = torch.arange(n, device=images.device).view(n, 1, 1)
    return padded[each, rows.view(n, height, 1), columns.view(n, 1, width)].permute(0, 3, 1, 2).contiguous()


def normalise(images: Tensor, mean: Tensor | None, std: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """(images - mean) / std, channel by channel; images that are normalised already only change their type."""
    if mean is None or std is None:
        return images if dtype is None else images.to(dtype)
    ready = (images.float() - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)
    return ready if dtype is None else ready.to(dtype)
