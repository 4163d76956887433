"""Microscope images and maps of their pixels' classes: the Cell Tracking Challenge's layout, and ISBI 2012.

Neither publishes the labels of a test part, so three in ten of the labelled images are held out for testing. The images
are taken in order (sequence 01 before 02, frames ascending), and which of them are held out depends on `SPLIT_SEED` and
their number alone. Neighbouring frames look alike: the figure says how well the labels of these recordings are
completed, not how well another recording would be labelled.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from prospr.lab.data.dataset import Dataset, hold_out
from prospr.lab.data.errors import DataError, MissingDataError
from prospr.lab.data.memory import Split, statistics
from prospr.lab.data.pictures import decode, pillow

if TYPE_CHECKING:
    import numpy as np

HELD_OUT = 0.3
SPLIT_SEED = 0
CELL_SIZE = 256


def missing_cells(folder: Path) -> list[str]:
    if any(_truth(folder, sequence) for sequence in _sequences(folder)):
        return []
    return ["01/t000.tif ...", "01_ST/SEG/man_seg000.tif ... (or 01_GT/SEG/)", "02/ and 02_ST/ likewise"]


def read_cells(name: str, folder: Path, size: int = CELL_SIZE) -> Dataset[Split]:
    """Every frame that has a mask, at `size` x `size`: images of one channel, labels 0 background and 1 cell.

    The masks number the cells; here a pixel is of some cell or of none. The silver truth (`_ST`, all frames) is used
    where it is, else the gold truth (`_GT`, some of them). Images of 16 bits are spread over 0 to 255 by the darkest
    and the brightest pixel of the whole set.
    """
    frames: list[np.ndarray] = []
    masks: list[Tensor] = []
    wide = False
    for sequence in _sequences(folder):
        for number, mask in _truth(folder, sequence):
            image = folder / sequence / f"t{number}.tif"
            if not image.is_file():
                raise MissingDataError(
                    f"{image}: there is no such file, but {mask} is its mask; unpack the archive again"
                )
            frame, bits = decode(image, lambda opened: _grey(opened, size))
            wide = wide or bits > 8
            frames.append(frame)
            masks.append(decode(mask, lambda opened: _foreground(opened, size)))
    return _two_classes(name, _to_bytes(frames, wide), torch.stack(masks), ("background", "cell"))


def missing_isbi(folder: Path) -> list[str]:
    return [f"{part}/0.png ..." for part in ("image", "label") if not any((folder / part).glob("*.png"))]


def read_isbi(folder: Path, size: int | None = None) -> Dataset[Split]:
    """Sections of a fly's nerve cord under the electron microscope: 0 inside a cell, 1 membrane (drawn black)."""
    images, maps = [], []
    for path in sorted((folder / "image").glob("*.png"), key=_number):
        label = folder / "label" / path.name
        if not label.is_file():
            raise MissingDataError(f"{label}: there is no such file, and {path} needs it")
        frame, _ = decode(path, lambda opened: _grey(opened, size))
        images.append(frame)
        maps.append(decode(label, lambda opened: _membrane(opened, size)))
        if frame.shape != maps[-1].shape:
            raise DataError(
                f"{label}: {tuple(maps[-1].shape)} pixels, and its image has {frame.shape}; make them equal"
            )
    return _two_classes("isbi2012", _to_bytes(images, wide=False), torch.stack(maps), ("cell", "membrane"))


def _sequences(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if re.fullmatch(r"\d\d", path.name) and path.is_dir())


def _truth(folder: Path, sequence: str) -> list[tuple[str, Path]]:
    """The frames' numbers, as their files spell them, and their masks."""
    for kind in ("ST", "GT"):
        found = [
            (match[1], path)
            for path in (folder / f"{sequence}_{kind}" / "SEG").glob("man_seg*.tif")
            if (match := re.fullmatch(r"man_seg(\d+)\.tif", path.name))
        ]
        if found:
            return sorted(found, key=lambda pair: int(pair[0]))
    return []


def _number(path: Path) -> tuple[int, str]:
    return (int(path.stem), "") if path.stem.isdigit() else (1 << 62, path.stem)


def _grey(image: Any, size: int | None) -> tuple[np.ndarray, int]:
    """An image of one channel as float32, and the bits a pixel had."""
    import numpy as np

    if getattr(image, "n_frames", 1) > 1:
        raise DataError(f"{image.filename}: {image.n_frames} images in one file; only flat images are read")
    bits = 16 if image.mode.startswith(("I", "F")) else 8
    pixels = np.asarray(image if bits == 16 else image.convert("L")).astype(np.float32)
    if size is not None:
        module = pillow()
        pixels = np.asarray(module.fromarray(pixels).resize((size, size), module.Resampling.BILINEAR))
    return pixels, bits


def _foreground(image: Any, size: int) -> Tensor:
    import numpy as np

    return _nearest((np.asarray(image) > 0).astype(np.uint8), size)


def _membrane(image: Any, size: int | None) -> Tensor:
    import numpy as np

    return _nearest((np.asarray(image.convert("L")) < 128).astype(np.uint8), size)


def _nearest(labels: np.ndarray, size: int | None) -> Tensor:
    import numpy as np

    if size is not None:
        module = pillow()
        labels = np.asarray(module.fromarray(labels).resize((size, size), module.Resampling.NEAREST))
    return torch.from_numpy(labels.astype(np.int64))


def _to_bytes(frames: list[np.ndarray], wide: bool) -> Tensor:
    import numpy as np

    if len({frame.shape for frame in frames}) > 1:
        raise DataError(f"the images have several sizes: {sorted({frame.shape for frame in frames})}; give size=256")
    pixels = np.stack(frames)
    if wide:
        low, high = pixels.min(), pixels.max()
        pixels = (pixels - low) * (255 / max(high - low, 1))
    return torch.from_numpy(pixels.round().clip(0, 255).astype(np.uint8)).unsqueeze(1)


def _two_classes(name: str, images: Tensor, labels: Tensor, classes: tuple[str, str]) -> Dataset[Split]:
    if len(images) < 2:
        raise DataError(f"{name}: {len(images)} labelled image; two are needed, one to train and one to test on")
    count = max(1, round(HELD_OUT * len(images)))
    train, test = hold_out(labels, count, SPLIT_SEED)
    mean, std = statistics(images[train])
    whole = Split(images, labels, mean, std)
    return Dataset(name, whole.select(train), whole.select(test), 2, classes=classes)
