"""Masks on disk: a safetensors file with a format version, written whole or not at all."""

import ctypes
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from prospr.atomic import write
from prospr.errors import MaskFileError

__all__ = ["load", "raw_bytes", "save"]

FORMAT = "prospr-masks"
VERSION = 1


def save(masks: Mapping[str, Tensor], path: str | os.PathLike[str], notes: Mapping[str, str]) -> None:
    path = Path(path)
    tensors = {name: m.detach().cpu().contiguous() for name, m in masks.items()}
    shapes = {name: list(m.shape) for name, m in tensors.items()}  # in order: safetensors sorts the names
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "shapes": json.dumps(shapes),
        "notes": json.dumps({key: str(value) for key, value in notes.items()}),
    }
    write(path, lambda temporary: _write(tensors, temporary, metadata))


def _write(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """The safetensors format, which is simple: safetensors' own writer needs NumPy, and the core does without."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in sorted(tensors):
        start, end = end, end + tensors[name].nbytes
        header[name] = {"dtype": "BOOL", "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for name in sorted(tensors):
            file.write(raw_bytes(tensors[name]))


def raw_bytes(mask: Tensor) -> bytes:
    """The memory of a mask, one byte an entry."""
    mask = mask.detach().cpu().contiguous()
    return ctypes.string_at(mask.data_ptr(), mask.nbytes) if mask.nbytes else b""


def load(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The masks and the notes saved with them."""
    if not Path(path).is_file():
        raise MaskFileError(f"{path}: there is no such file")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise MaskFileError(f"{path}: this is a safetensors file, but not one that Masks.save wrote")
            if metadata.get("version") != str(VERSION):
                raise MaskFileError(
                    f"{path}: masks of format version {metadata.get('version')!r}, and this release reads "
                    f"{VERSION}; upgrade prospect-pruning"
                )
            shapes = json.loads(metadata.get("shapes", "null"))
            notes = json.loads(metadata.get("notes", "{}"))
            if not shapes or not isinstance(shapes, dict) or not isinstance(notes, dict):
                raise MaskFileError(f"{path}: it announces no masks, or no notes; the file is damaged")
            if sorted(shapes) != sorted(file.keys()):
                raise MaskFileError(f"{path}: its table of shapes does not match its tensors; the file is damaged")
            masks = {name: file.get_tensor(name) for name in shapes}
    except MaskFileError:
        raise
    except (SafetensorError, ValueError, RecursionError, OSError) as error:  # JSON's and Unicode's are ValueErrors
        raise MaskFileError(f"{path}: not a readable mask file ({error}); save the masks again") from error
    for name, mask in masks.items():
        if mask.dtype != torch.bool or list(mask.shape) != shapes[name] or mask.numel() == 0:
            raise MaskFileError(
                f"{path}: {name} is {mask.dtype} of shape {list(mask.shape)}, and a bool mask of shape "
                f"{shapes[name]} was announced; the file is damaged"
            )
        if mask.view(torch.uint8).max() > 1:
            raise MaskFileError(f"{path}: {name} holds bytes that are neither true nor false; the file is damaged")
    return masks, {str(key): str(value) for key, value in notes.items()}
