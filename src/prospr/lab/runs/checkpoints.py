"""Checkpoints: safetensors files with a checksum, the latest and the one before it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from prospr.atomic import write
from prospr.stages import digest

__all__ = ["Checkpoints", "DamagedWarning"]

LATEST, PREVIOUS = "checkpoint.safetensors", "checkpoint.previous.safetensors"


class DamagedWarning(UserWarning):
    """A file of a run is damaged, and this says what was used in its place."""


class Checkpoints:
    """The checkpoints in `folder` of the run that `mark` is the mark of; those of another are not taken for it."""

    def __init__(self, folder: Path, mark: str) -> None:
        self.mark = mark
        self.latest, self.previous = folder / LATEST, folder / PREVIOUS

    def save(self, state: Mapping[str, Tensor]) -> None:
        """Write `state` as the latest checkpoint; the latest so far becomes the previous one.

        At every moment one of the two is whole.
        """
        tensors = {name: value.contiguous() for name, value in state.items()}
        notes = {"mark": self.mark, "checksum": _checksum(tensors)}

        def fill(path: Path) -> None:
            save_file(tensors, path, notes)
            if self.latest.exists():
                os.replace(self.latest, self.previous)

        write(self.latest, fill)

    def load(self) -> tuple[dict[str, Tensor] | None, str | None]:
        """The latest checkpoint that is whole, and what was damaged, in words.

        The one that is whole takes the place of a damaged one, so that `save` does not push it out.
        """
        damaged: list[str] = []
        for path in (self.latest, self.previous):
            if not path.exists():
                continue
            try:
                state = self.read(path)
            except (SafetensorError, ValueError, KeyError, OSError) as error:
                damaged.append(f"{path.name}: {error}")
                continue
            if not damaged:
                return state, None
            os.replace(path, self.latest)
            return state, f"{damaged[0]}; went on from the previous checkpoint"
        return None, f"{'; '.join(damaged)}; began again" if damaged else None

    def finish(self) -> None:
        """Remove the previous checkpoint; the latest holds the trained network."""
        self.previous.unlink(missing_ok=True)

    def read(self, path: Path) -> dict[str, Tensor]:
        """A checkpoint, or an error where it is not whole or of another run."""
        with safe_open(path, framework="pt", device="cpu") as file:
            notes = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
        if notes.get("checksum") != _checksum(state):
            raise ValueError("its checksum is another")
        if notes.get("mark") != self.mark:
            raise ValueError("it is of another run, or of other masks")
        return state


def _checksum(state: Mapping[str, Tensor]) -> str:
    return digest(dict(sorted(state.items())))
