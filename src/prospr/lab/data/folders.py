"""Image files in a folder a class, decoded when they are needed."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from prospr.lab.data.dataset import Dataset
from prospr.lab.data.errors import DataError, MissingDataError
from prospr.lab.data.memory import Split, normalise, statistics
from prospr.lab.data.pictures import SUFFIXES, decode, pillow, square, to_tensor
from prospr.lab.progress import Report
from prospr.lab.seeds import generator

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SCALE = (0.08, 1.0)  # RandomResizedCrop: the share of the image's area
RATIO = (3 / 4, 4 / 3)  # and the crop's width over its height
TRIES = 10


@dataclass(frozen=True)
class Files:
    """Image files and their labels (n,). `mean` and `std` are those of each channel, 0 to 255."""

    paths: tuple[str, ...]
    labels: Tensor
    mean: Tensor
    std: Tensor
    size: int = 224
    resize: int = 256
    """For testing the shorter side becomes `resize`, and the central square of `size` is taken."""

    def __len__(self) -> int:
        return len(self.paths)

    def to(self, device: torch.device | str) -> Files:
        """The same files; the batches of a `Stream` are made on `device`."""
        return replace(self, labels=self.labels.to(device), mean=self.mean.to(device), std=self.std.to(device))

    def select(self, chosen: Tensor) -> Files:
        """The files at the positions `chosen`, in that order."""
        paths = tuple(self.paths[index] for index in chosen.tolist())
        return replace(self, paths=paths, labels=self.labels[chosen.to(self.labels.device)])

    def batches(
        self, batch_size: int, seed: int, *, augment: bool = True, workers: int = 0, drop_last: bool = False
    ) -> Stream:
        """Shuffled batches: random crops of any size and shape brought to `size`, half of them mirrored."""
        return Stream(self, batch_size, seed, augment=augment, shuffle=True, workers=workers, drop_last=drop_last)

    def in_order(self, batch_size: int, *, workers: int = 0) -> Stream:
        """The files in their order, resized and cropped in the centre: what a network is tested on."""
        return Stream(self, batch_size, seed=0, augment=False, shuffle=False, workers=workers)

    def in_memory(self, size: int, report: Report | None = None) -> Split:
        """Every image resized, cropped to its central square of `size` and kept as uint8; statistics are its own."""
        images = torch.empty(len(self), 3, size, size, dtype=torch.uint8)
        for index, path in enumerate(self.paths):
            images[index] = decode(path, lambda image: to_tensor(square(image.convert("RGB"), size)))
            if report is not None:
                report(index + 1, len(self), "images decoded")
        return Split(images, self.labels.cpu(), *statistics(images))


@dataclass(frozen=True)
class Stream:
    """Batches of decoded files, normalised on the files' device.

    The order and the crops of an epoch depend on (seed, epoch) alone, whatever the number of `workers`: every image's
    crop has a random generator of its own.
    """

    files: Files
    batch_size: int
    seed: int
    augment: bool = True
    shuffle: bool = True
    workers: int = 0
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be at least 1")
        if self.workers < 0:
            raise ValueError(f"workers is {self.workers}; it must be at least 0")
        if len(self) == 0:
            raise ValueError(
                f"{len(self.files)} images make no batch of {self.batch_size}; "
                "give more images, a smaller batch_size or drop_last=False"
            )

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        whole, rest = divmod(len(self.files), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.epoch(0)

    def epoch(self, epoch: int, part: tuple[int, int] = (0, 1)) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of epoch `epoch`, counted from 0. `part` (i, n): of each the i-th of n parts, which may be empty;
        nothing else is decoded."""
        mean, std = self.files.mean, self.files.std
        for images, chosen in self._loader(epoch, part):
            images = images.to(mean.device, non_blocking=True)
            yield normalise(images, mean, std), self.files.labels[chosen.to(self.files.labels.device)]

    def order(self, epoch: int) -> Tensor:
        """The positions of the images that epoch `epoch` visits, in their order."""
        n = len(self.files)
        order = torch.randperm(n, generator=generator("batches", self.seed, epoch)) if self.shuffle else torch.arange(n)
        return order[: len(self) * self.batch_size]

    def _loader(self, epoch: int, part: tuple[int, int] = (0, 1)) -> DataLoader:
        which, parts = part
        whole = self.order(epoch).split(self.batch_size)
        return DataLoader(
            _Decoded(
                self.files.paths, self.files.size, self.files.resize, (self.seed, epoch) if self.augment else None
            ),
            batch_sampler=[places.tensor_split(parts)[which].tolist() for places in whole],
            collate_fn=partial(_stacked, self.files.size),
            num_workers=self.workers,
            pin_memory=self.files.mean.is_cuda,
            generator=generator("workers", self.seed, epoch),  # without one it would draw from the global state
        )


@dataclass(frozen=True)
class _Decoded(torch.utils.data.Dataset):
    """What a worker holds: paths in, (uint8 image, position) out."""

    paths: tuple[str, ...]
    size: int
    resize: int
    draw: tuple[int, int] | None

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.draw is None:
            return decode(
                self.paths[index], lambda im: to_tensor(square(im.convert("RGB"), self.size, self.resize))
            ), index
        rng = generator("crop", *self.draw, index)
        return decode(self.paths[index], lambda im: to_tensor(random_crop(im.convert("RGB"), self.size, rng))), index

    def __len__(self) -> int:
        return len(self.paths)


def _stacked(size: int, decoded: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Images and positions as one tensor each, also of none."""
    images = [image for image, _ in decoded]
    places = torch.tensor([place for _, place in decoded], dtype=torch.long)
    return torch.stack(images) if images else torch.zeros(0, 3, size, size, dtype=torch.uint8), places


def random_crop(image: Image, size: int, rng: torch.Generator) -> Image:
    """A part of the image of random area, shape and place, resized to `size` x `size`, and mirrored half of the time.

    A crop has 8 % to all of the image's area and a width 3/4 to 4/3 of its height (Szegedy et al., 2015).
    """
    left, top, width, height = _random_box(*image.size, rng)
    module: Any = pillow()
    cropped = image.crop((left, top, left + width, top + height)).resize((size, size), module.Resampling.BILINEAR)
    return cropped.transpose(module.Transpose.FLIP_LEFT_RIGHT) if _uniform(0, 1, rng) < 0.5 else cropped


def _random_box(width: int, height: int, rng: torch.Generator) -> tuple[int, int, int, int]:
    for _ in range(TRIES):
        area = width * height * _uniform(*SCALE, rng)
        ratio = math.exp(_uniform(math.log(RATIO[0]), math.log(RATIO[1]), rng))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left = int(torch.randint(width - w + 1, (), generator=rng))
            top = int(torch.randint(height - h + 1, (), generator=rng))
            return left, top, w, h
    # An image too long for such a crop: the central part of the nearest shape that is allowed.
    w = min(width, round(height * RATIO[1]))
    h = min(height, round(width / RATIO[0]))
    return (width - w) // 2, (height - h) // 2, w, h


def _uniform(low: float, high: float, rng: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=rng, dtype=torch.float64))


TEST_FOLDERS = ("test", "val")


def missing(folder: Path) -> list[str]:
    """What a folder lacks to be read by `read_folder`."""
    lacking = [] if (folder / "train").is_dir() else ["train/<class>/*"]
    if not any((folder / name).is_dir() for name in TEST_FOLDERS):
        lacking.append("val/<class>/* (or test/)")
    return lacking


def read_folder(name: str, folder: Path) -> Dataset[Files]:
    """The images of `folder`: train/<class>/... and test/<class>/... or val/<class>/...; classes sorted by name.

    Where there are both, test/ is read if its classes are those of train/ (ImageNet's has no classes), else val/.
    """
    classes = class_names(folder / "train")
    candidates = [folder / part for part in TEST_FOLDERS if (folder / part).is_dir()]
    test = next((part for part in candidates if set(class_names(part)) <= set(classes)), None)
    if test is None:
        raise DataError(
            f"{folder}: the folders in {' and '.join(part.name + '/' for part in candidates)} are not those of train/ "
            f"({len(classes)}: {', '.join(classes[:5])}{' ...' if len(classes) > 5 else ''}); name them as in train/"
        )
    return files_dataset(name, list_files(folder / "train", classes), list_files(test, classes), classes)


def files_dataset(
    name: str, train: tuple[list[str], list[int]], test: tuple[list[str], list[int]], classes: Sequence[str]
) -> Dataset[Files]:
    """A data set of (paths, labels), normalised by ImageNet's statistics."""
    mean, std = torch.tensor(IMAGENET_MEAN) * 255, torch.tensor(IMAGENET_STD) * 255
    train_files, test_files = (Files(tuple(paths), torch.tensor(labels), mean, std) for paths, labels in (train, test))
    return Dataset(name, train_files, test_files, len(classes), classes=tuple(classes))


def in_memory(data: Dataset[Files], size: int, report: Report | None = None) -> Dataset[Split]:
    """The images of `data` decoded at `size` x `size`; both parts normalised by the training part's statistics."""
    train, test = data.train.in_memory(size, report), data.test.in_memory(size, report)
    test = replace(test, mean=train.mean, std=train.std)
    return Dataset(data.name, train, test, data.num_classes, classes=data.classes)


def class_names(folder: Path) -> list[str]:
    """The names of the folders in `folder`, sorted; hidden ones are not classes."""
    if not folder.is_dir():
        raise MissingDataError(f"{folder}: there is no such folder; put the images there, in a folder a class")
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def list_files(folder: Path, classes: Sequence[str]) -> tuple[list[str], list[int]]:
    """The image files below each class's folder, sorted, and their labels."""
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        walk = os.walk(folder / name)  # pathlib is slow for a million files
        found = sorted(os.path.join(place, file) for place, _, files in walk for file in files if _is_image(file))
        paths += found
        labels += [label] * len(found)
        if not found and folder.name == "train":
            raise DataError(f"{folder / name}: no image in it ({', '.join(SUFFIXES)}); add some or remove the folder")
    if not paths:
        raise DataError(f"{folder}: no image below it ({', '.join(SUFFIXES)}); put them into a folder a class")
    return paths, labels


def _is_image(file: str) -> bool:
    return file.lower().endswith(SUFFIXES) and not file.startswith(".")
