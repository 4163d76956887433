"""Images in memory, and batches of them in an order that depends on the seed and the epoch alone."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources

import torch
from torch import Tensor
from torch.nn import functional as F

from prospr.lab.seeds import generator

DIGITS_SHA256 = "e1d88a0854e29e01d16358d2cd026aa8fc20dfc4cdb3fce004300857ea82aa70"
DIGITS_COUNT = 1797

Augment = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class Split:
    """Images (n, channels, height, width) and their labels (n,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> Split:
        return Split(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Dataset:
    """A named data set: a part to train on and a part to test on."""

    name: str
    train: Split
    test: Split
    num_classes: int

    def to(self, device: torch.device | str) -> Dataset:
        return Dataset(self.name, self.train.to(device), self.test.to(device), self.num_classes)


def digits() -> Dataset:
    """1,797 handwritten digits of 8x8 pixels (Alpaydin and Kaynak, UCI, CC BY 4.0), shipped with the package.

    The split is fixed: of the digits sorted by class every fifth is for testing, so that each class gives a fifth of
    its images to within one. Pixels are normalised by the training part's mean and deviation.

    >>> data = digits()
    >>> len(data.train), len(data.test), tuple(data.train.images.shape[1:])
    (1437, 360, (1, 8, 8))
    """
    packed = (resources.files("prospr.lab") / "data_files" / "digits.gz").read_bytes()
    labels, pixels = _unpack_digits(gzip.decompress(packed))
    by_class = labels.argsort(stable=True)
    is_test = torch.arange(DIGITS_COUNT) % 5 == 0
    train, test = by_class[~is_test], by_class[is_test]
    images = pixels.float().view(-1, 1, 8, 8)
    mean, deviation = images[train].mean(), images[train].std()
    images = (images - mean) / deviation
    return Dataset("digits", Split(images[train], labels[train]), Split(images[test], labels[test]), 10)


def _unpack_digits(raw: bytes) -> tuple[Tensor, Tensor]:
    """The labels and the pixels, 0 to 16, of the shipped file's content."""
    checksum = hashlib.sha256(raw).hexdigest()
    if checksum != DIGITS_SHA256:
        raise ValueError(
            f"prospr/lab/data_files/digits.gz: SHA-256 is {checksum}, expected {DIGITS_SHA256}; "
            "the file is damaged: install prospect-pruning again"
        )
    values = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return values[:DIGITS_COUNT].long(), values[DIGITS_COUNT:].view(DIGITS_COUNT, 64)


@dataclass(frozen=True)
class CropFlip:
    """Augmentation: move each image by up to `pad` pixels, zeros moving in, and mirror half of them if `flip`.

    >>> moved = CropFlip(pad=1)(torch.ones(4, 1, 8, 8), torch.Generator().manual_seed(0))
    >>> moved.shape
    torch.Size([4, 1, 8, 8])
    """

    pad: int = 4
    flip: bool = False

    def __call__(self, images: Tensor, rng: torch.Generator) -> Tensor:
        n, _, height, width = images.shape
        top, left = torch.randint(2 * self.pad + 1, (2, n, 1), generator=rng)
        mirrored = torch.rand(n, 1, generator=rng) < (0.5 if self.flip else 0.0)
        columns = torch.arange(width)
        rows = top + torch.arange(height)
        columns = left + torch.where(mirrored, columns.flip(0), columns)
        padded = F.pad(images, (self.pad,) * 4)
        pick = torch.arange(n).view(n, 1, 1), rows.view(n, height, 1), columns.view(n, 1, width)
        pick = [index.to(images.device) for index in pick]
        return padded.permute(0, 2, 3, 1)[pick[0], pick[1], pick[2]].permute(0, 3, 1, 2).contiguous()


@dataclass(frozen=True)
class Batches:
    """Shuffled batches of (images, labels); the order and augmentation of an epoch depend on (seed, epoch) alone.

    Iterating gives epoch 0, each time the same: an iterator that remembered how often it was used would make one
    method's training depend on whether another method looked at the data before. Training asks for `epoch(k)`.

    >>> data = digits().train
    >>> batches = Batches(data.images, data.labels, batch_size=128, seed=0, augment=CropFlip(pad=1))
    >>> len(batches), sum(len(labels) for _, labels in batches)
    (12, 1437)
    """

    images: Tensor
    labels: Tensor
    batch_size: int
    seed: int
    augment: Augment | None = None
    drop_last: bool = False

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

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        whole, rest = divmod(len(self.labels), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.epoch(0)

    def epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of epoch `epoch`, counted from 0."""
        rng = generator("batches", self.seed, epoch)
        order = torch.randperm(len(self.labels), generator=rng).to(self.labels.device)
        for index in range(len(self)):
            chosen = order[index * self.batch_size : (index + 1) * self.batch_size]
            images = self.images[chosen]
            yield (images if self.augment is None else self.augment(images, rng)), self.labels[chosen]
