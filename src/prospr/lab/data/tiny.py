"""Tiny-ImageNet: 64 x 64 images of 200 classes, decoded once and kept in one file."""

from __future__ import annotations

import warnings
from pathlib import Path

from prospr.atomic import write
from prospr.lab.data.dataset import Dataset
from prospr.lab.data.errors import DataError
from prospr.lab.data.folders import Files, class_names, files_dataset, in_memory, list_files
from prospr.lab.data.memory import Split
from prospr.lab.progress import Report

SIZE = 64
FORMAT = "prospr-images-1"


def cache_of(folder: Path) -> Path:
    """The file beside `folder` that holds its decoded images."""
    return folder.parent / f"{folder.name}.safetensors"


def missing(folder: Path) -> list[str]:
    if cache_of(folder).is_file():
        return []
    present = {
        "train/<class>/images/*.JPEG": (folder / "train").is_dir(),
        "val/images/*.JPEG": (folder / "val" / "images").is_dir(),
        "val/val_annotations.txt": (folder / "val" / "val_annotations.txt").is_file(),
    }
    return [name for name, there in present.items() if not there]


def read(folder: Path, report: Report | None = None) -> Dataset[Split]:
    """Both parts in memory. Its val/ is the part to test on: the labels of its test/ were never published."""
    cache = cache_of(folder)
    if cache.is_file():
        return _load(cache)
    data = in_memory(list_all(folder), SIZE, report)
    try:
        _save(data, cache)
    except OSError as error:  # a folder that only others may write to is as good, but slower
        warnings.warn(f"{cache}: the decoded images could not be kept ({error})", stacklevel=2)
    return data


def list_all(folder: Path) -> Dataset[Files]:
    """The files of both parts; the classes of val/ are in val_annotations.txt."""
    classes = class_names(folder / "train")
    label_of = {name: label for label, name in enumerate(classes)}
    annotations = folder / "val" / "val_annotations.txt"
    paths: list[str] = []
    labels: list[int] = []
    for number, line in enumerate(annotations.read_text(encoding="utf-8").splitlines(), 1):
        file, _, rest = line.partition("\t")
        name = rest.partition("\t")[0]
        if name not in label_of:
            raise DataError(
                f"{annotations}, line {number}: {name!r} is not a class of train/; unpack the archive again"
            )
        paths.append(str(folder / "val" / "images" / Path(file).name))
        labels.append(label_of[name])
    return files_dataset("tiny-imagenet", list_files(folder / "train", classes), (paths, labels), classes)


def _save(data: Dataset[Split], path: Path) -> None:
    from safetensors.torch import save_file

    assert data.mean is not None
    assert data.std is not None
    tensors = {
        "train_images": data.train.images,
        "train_labels": data.train.labels,
        "test_images": data.test.images,
        "test_labels": data.test.labels,
        "mean": data.mean,
        "std": data.std,
    }
    write(path, lambda part: save_file(tensors, part, {"format": FORMAT, "classes": " ".join(data.classes)}))


def _load(path: Path) -> Dataset[Split]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            notes = file.metadata() or {}
            if notes.get("format") != FORMAT:
                raise DataError(f"{path}: not a file of decoded images; delete it, and it is made again")
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise DataError(f"{path}: damaged ({error}); delete it, and it is made again") from error
    mean, std = found["mean"], found["std"]
    train = Split(found["train_images"], found["train_labels"], mean, std)
    test = Split(found["test_images"], found["test_labels"], mean, std)
    classes = tuple(notes["classes"].split())
    return Dataset("tiny-imagenet", train, test, len(classes), classes=classes)
