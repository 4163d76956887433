"""Image files as tensors. The one place that imports Pillow, and only when an image is decoded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from prospr.lab.data.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


def pillow() -> Any:
    """The module PIL.Image."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "decoding images takes Pillow, which is not installed: pip install 'prospect-pruning[lab]'"
        ) from error
    return Image


def decode(path: str | Path, use: Callable[[Image], Any]) -> Any:
    """What `use` makes of the image in a file; a file that cannot be decoded is named."""
    module = pillow()
    try:
        with module.open(path) as image:
            return use(image)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, SyntaxError, module.DecompressionBombError) as error:
        raise DataError(f"{path}: not an image that can be decoded ({error}); replace or remove it") from error


def to_tensor(image: Image) -> Tensor:
    """An 8-bit image as uint8 (channels, height, width)."""
    channels = len(image.getbands())
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, channels).permute(2, 0, 1).contiguous()


def square(image: Image, size: int, resize: int | None = None) -> Image:
    """The shorter side resized to `resize` (or `size`), then the central square of `size`."""
    resize = size if resize is None else resize
    shorter = min(image.size)
    width, height = (resize * side // shorter for side in image.size)
    if (width, height) != image.size:
        image = image.resize((width, height), pillow().Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))
