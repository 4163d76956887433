"""The digits that are shipped with the package."""

from __future__ import annotations

import gzip
import hashlib
from importlib import resources

import torch
from torch import Tensor

from prospr.lab.data.dataset import Dataset
from prospr.lab.data.errors import DataError
from prospr.lab.data.memory import Split

DIGITS_SHA256 = "e1d88a0854e29e01d16358d2cd026aa8fc20dfc4cdb3fce004300857ea82aa70"
DIGITS_COUNT = 1797


def digits() -> Dataset[Split]:
    """1,797 handwritten digits of 8x8 pixels (Alpaydin and Kaynak, UCI, CC BY 4.0), shipped with the package.

    The split is fixed: of the digits sorted by class every fifth is for testing, so that each class gives a fifth of
    its images to within one. Pixels are floats, normalised by the training part's mean and deviation: what a crop moves
    in is then the mean, not ink.

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
        raise DataError(
            f"prospr/lab/data_files/digits.gz: SHA-256 is {checksum}, expected {DIGITS_SHA256}; "
            "the file is damaged: install prospect-pruning again"
        )
    values = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return values[:DIGITS_COUNT].long(), values[DIGITS_COUNT:].view(DIGITS_COUNT, 64)
