"""Images in memory, and batches of them in an order that depends on the seed and the epoch alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prospr.lab.data.augment import Augment, CropFlip, crop_flip
from prospr.lab.seeds import generator

IGNORE = -100  # the label of a pixel that a crop moved in: the one F.cross_entropy leaves out


@dataclass(frozen=True)
class Split:
    """Images (n, channels, height, width) and their labels: (n,) for classes, (n, height, width) for segmentation.

    Images are either uint8, with the `mean` and `std` of each channel in the same units (0 to 255), or floating point
    and ready for a network, without them. `inputs` and `batches` give what a network takes in both cases.
    """

    images: Tensor
    labels: Tensor
    mean: Tensor | None = None
    std: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> Split:
        mean, std = (None if value is None else value.to(device) for value in (self.mean, self.std))
        return Split(self.images.to(device), self.labels.to(device), mean, std)

    def select(self, chosen: Tensor) -> Split:
        """The images at the positions `chosen`, in that order."""
        return replace(self, images=self.images[chosen], labels=self.labels[chosen])

    def inputs(self, start: int = 0, stop: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The images from `start` to `stop` as a network takes them.

        >>> images = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
        >>> split = Split(images, torch.tensor([0, 1]), mean=torch.tensor([127.5]), std=torch.tensor([127.5]))
        >>> split.inputs().flatten()
        tensor([-1.,  1.])
        """
        return normalise(self.images[start:stop], self.mean, self.std, dtype)

    def batches(self, batch_size: int, seed: int, augment: Augment | None = None, drop_last: bool = False) -> Batches:
        """Shuffled batches, normalised after augmentation."""
        return Batches(self.images, self.labels, batch_size, seed, augment, drop_last, self.mean, self.std)


def normalise(images: Tensor, mean: Tensor | None, std: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """`(images - mean) / std`, channel by channel, in float32, given as `dtype`.

    Without a mean the images are ready and only their type may change. Nothing waits for the device: `mean` and `std`
    are on it already.

    >>> normalise(torch.full((1, 1, 1, 2), 3, dtype=torch.uint8), torch.tensor([1.0]), torch.tensor([2.0])).tolist()
    [[[[1.0, 1.0]]]]
    """
    if mean is None or std is None:
        return images if dtype is None else images.to(dtype)
    # In bfloat16 a difference of two pixels near the mean would have a digit and a half left.
    ready = (images.float() - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)
    return ready if dtype is None else ready.to(dtype)


def statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel of uint8 images, from counts of whole numbers: exact whatever the order.

    A channel of one value has deviation 1, so that it is centred and no more.

    >>> statistics(torch.tensor([0, 0, 2, 2], dtype=torch.uint8).view(4, 1, 1, 1))
    (tensor([1.]), tensor([1.]))
    """
    levels = torch.arange(256, dtype=torch.float64)
    counts = torch.stack(
        [images[:, channel].flatten().bincount(minlength=256).cpu() for channel in range(images.shape[1])]
    ).double()
    counts /= counts.sum(1, keepdim=True)
    mean = counts @ levels
    variance = (counts * (levels - mean.unsqueeze(1)) ** 2).sum(1)
    std = torch.where(variance > 0, variance.sqrt(), torch.ones_like(variance))
    return mean.float(), std.float()


@dataclass(frozen=True)
class Draws:
    """Everything random about an epoch: the order of the images, and for each place in it the crop and the mirroring.

    With `drop_last` there are as many entries as images the epoch uses.
    """

    order: Tensor
    top: Tensor
    left: Tensor
    mirrored: Tensor

    def to(self, device: torch.device | str) -> Draws:
        order, top, left, mirrored = (
            drawn.to(device, non_blocking=True) for drawn in (self.order, self.top, self.left, self.mirrored)
        )
        return Draws(order, top, left, mirrored)

    def __getitem__(self, places: slice) -> Draws:
        return Draws(self.order[places], self.top[places], self.left[places], self.mirrored[places])

    def part(self, which: int, parts: int) -> Draws:
        """One of so many parts, in order; the first are the longer ones."""
        cut = (drawn.tensor_split(parts)[which] for drawn in (self.order, self.top, self.left, self.mirrored))
        return Draws(*cut)


@dataclass(frozen=True)
class Batches:
    """Shuffled batches of (images, labels); the order and augmentation of an epoch depend on (seed, epoch) alone.

    Iterating gives epoch 0, each time the same: an iterator that remembered how often it was used would make one
    method's training depend on whether another method looked at the data before. Training asks for `epoch(k)`.

    Label maps (n, height, width) move with their images; the pixels that move in are labelled -100, which
    cross-entropy leaves out. With `mean` and `std` the images are normalised after augmentation.

    >>> from prospr.lab.data import digits
    >>> batches = digits().train.batches(batch_size=128, seed=0, augment=CropFlip(pad=1))
    >>> len(batches), sum(len(labels) for _, labels in batches)
    (12, 1437)
    """

    images: Tensor
    labels: Tensor
    batch_size: int
    seed: int
    augment: Augment | None = None
    drop_last: bool = False
    mean: Tensor | None = None
    std: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise ValueError(f"{len(self.images)} images but {len(self.labels)} labels; give one label an image")
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be at least 1")
        if len(self) == 0:
            raise ValueError(
                f"{len(self.labels)} images make no batch of {self.batch_size}; "
                "give more images, a smaller batch_size or drop_last=False"
            )
        if self.labels.dim() > 1 and not self._ahead:
            raise ValueError(f"{self.augment!r} moves images but not their label maps; use CropFlip or None")

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        whole, rest = divmod(len(self.labels), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.epoch(0)

    @property
    def pad(self) -> int:
        """What `crop_flip` takes as its `pad` beside the draws."""
        return self.augment.pad if isinstance(self.augment, CropFlip) else 0

    def epoch(self, epoch: int, part: tuple[int, int] = (0, 1)) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of epoch `epoch`, counted from 0. `part` (i, n): of each the i-th of n parts, which may be empty.

        >>> batches = Batches(torch.zeros(5, 1, 2, 2), torch.arange(5), batch_size=3, seed=0)
        >>> [[len(labels) for _, labels in batches.epoch(0, (i, 2))] for i in range(2)]
        [[2, 1], [1, 1]]
        """
        which, parts = part
        if not self._ahead:
            for images, labels in self._augmented_by_call(epoch):
                yield images.tensor_split(parts)[which], labels.tensor_split(parts)[which]
            return
        draws = self.draws(epoch).to(self.images.device)
        for index in range(len(self)):
            yield self._take(draws[self._places(index)].part(which, parts))

    def draws(self, epoch: int) -> Draws:
        """What `epoch(epoch)` draws, on the CPU, for a trainer that makes the batches on the device itself.

        Batch `i` is `crop_flip(images[order], top, left, mirrored, pad)` of the entries `i * batch_size` onwards,
        normalised. Without augmentation nothing is moved.

        >>> batches = Batches(torch.zeros(5, 1, 2, 2), torch.arange(5), batch_size=2, seed=0)
        >>> draws = batches.draws(0)
        >>> draws.order.tolist() == torch.cat([labels for _, labels in batches]).tolist()
        True
        """
        if not self._ahead:
            raise ValueError(
                f"{self.augment!r} draws while it augments, so nothing is known ahead; use CropFlip or None"
            )
        rng = generator("batches", self.seed, epoch)
        order = torch.randperm(len(self.labels), generator=rng)[: len(self) * self.batch_size]
        if not isinstance(self.augment, CropFlip):
            nothing = torch.zeros_like(order)
            return Draws(order, nothing, nothing, nothing.bool())
        sizes = [len(order[self._places(index)]) for index in range(len(self))]
        top, left, mirrored = zip(*(self.augment.draw(size, rng) for size in sizes), strict=True)
        return Draws(order, torch.cat(top), torch.cat(left), torch.cat(mirrored))

    @property
    def _ahead(self) -> bool:
        return self.augment is None or isinstance(self.augment, CropFlip)

    def _places(self, index: int) -> slice:
        return slice(index * self.batch_size, (index + 1) * self.batch_size)

    def _take(self, draws: Draws) -> tuple[Tensor, Tensor]:
        images, labels = self.images[draws.order], self.labels[draws.order.to(self.labels.device)]
        if self.augment is not None:
            moves = draws.top, draws.left, draws.mirrored
            images = crop_flip(images, *moves, self.pad)
            if labels.dim() > 1:
                labels = crop_flip(labels.unsqueeze(1), *moves, self.pad, fill=IGNORE).squeeze(1)
        return normalise(images, self.mean, self.std), labels

    def _augmented_by_call(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        assert self.augment is not None
        rng = generator("batches", self.seed, epoch)
        order = torch.randperm(len(self.labels), generator=rng).to(self.labels.device)
        for index in range(len(self)):
            chosen = order[self._places(index)]
            yield normalise(self.augment(self.images[chosen], rng), self.mean, self.std), self.labels[chosen]
