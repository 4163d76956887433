"""The finished stages of a long run, in a folder: written whole or not at all, and checked when they are read."""

import copy
import hashlib
import json
import pickle
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prospr.atomic import write
from prospr.errors import FolderError, MaskFileError
from prospr.masks import store
from prospr.masks.masks import Masks
from prospr.meta.loss import devices_of

__all__ = ["Stages", "digest", "shapes", "state"]


class Stages:
    """What is finished, in a folder: `settings.json`, `<stage>.pt` after a training, `<stage>.safetensors` for masks.

    Each file is written whole or not at all, and carries a checksum and the identity of the run. Without a folder
    everything is done and nothing is kept.
    """

    def __init__(self, model: nn.Module, folder: Path | None, settings: dict[str, Any]) -> None:
        self.model = model
        self.folder = folder
        if folder is None:
            return
        text = json.dumps(settings, indent=1)
        self.run = hashlib.sha256(text.encode()).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "settings.json"
        if path.exists():
            _refuse_another_run(path, json.loads(text))
        else:
            write(path, lambda temporary: temporary.write_text(text))

    def trained(self, name: str, work: Callable[..., object], *args: Any) -> None:
        """The model after `work`: done now, or loaded."""
        path = self.folder / f"{name}.pt" if self.folder is not None else None
        if path is not None and path.exists():
            stage = self._load(path)
            self.model.load_state_dict(stage["state"])
            _set_random_state(stage["random"])
            return
        work(*args)
        if path is not None:
            stage = {"run": self.run, "state": state(self.model), "random": _random_state(self.model)}
            stage["checksum"] = digest(stage["state"], stage["random"])
            write(path, lambda temporary: torch.save(stage, temporary))

    def masked(self, name: str, work: Callable[..., Masks], *args: Any) -> Masks:
        """The masks that `work` makes: now, or when it was done."""
        if self.folder is None:
            return work(*args)
        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            masks = work(*args)
            masks.save(path, run=self.run, checksum=masks.digest())
            return masks
        try:
            found, notes = store.load(path)
        except MaskFileError as error:
            raise _damaged(path, error) from error
        masks = Masks(found)
        self._check(path, notes, masks.digest())
        return masks

    def _load(self, path: Path) -> dict[str, Any]:
        try:
            stage = torch.load(path, map_location="cpu", weights_only=True)
            checksum = digest(stage["state"], stage["random"])
        except _UNREADABLE as error:
            raise _damaged(path, error) from error
        self._check(path, stage, checksum)
        return stage

    def _check(self, path: Path, notes: Mapping[str, Any], checksum: str) -> None:
        if notes.get("checksum") != checksum:
            raise _damaged(path, "its checksum is another")
        if notes.get("run") != self.run:
            raise FolderError(f"{path}: this file is of another run; delete it, or use another folder")


# What torch.load was seen to raise on files with flipped bytes and on cut ones.
_UNREADABLE = (
    *(OSError, EOFError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError),
    *(OverflowError, pickle.UnpicklingError, struct.error),
)


def _damaged(path: Path, why: object) -> FolderError:
    why = str(why).splitlines()[0] if str(why) else type(why).__name__
    return FolderError(f"{path}: the file is damaged ({why}); delete it, and this stage is done again")


def _refuse_another_run(path: Path, settings: dict[str, Any]) -> None:
    try:
        stored = json.loads(path.read_text())
        if not isinstance(stored, dict):
            raise ValueError("it holds no table")
    except ValueError as error:  # JSON's and Unicode's are ValueErrors
        raise FolderError(
            f"{path}: the file is damaged ({error}); use another folder, or empty this one to begin again"
        ) from error
    for key, now in settings.items():
        then = stored.get(key)
        if then == now:
            continue
        if key == "start":
            raise FolderError(
                f"{path.parent}: the run stored here began with other weights. Seed the model as it was then, or load "
                f"them: model.load_state_dict(torch.load({str(path.parent / 'start.pt')!r})['state']). For a new run "
                "use another folder"
            )
        if isinstance(now, dict) and isinstance(then, dict):  # of all shapes, the first that differs
            name = next(n for n in [*now, *then] if now.get(n) != then.get(n))
            key, now, then = f"{key}[{name!r}]", now.get(name), then.get(name)
        raise FolderError(
            f"{path.parent}: the run stored here has other settings: {key} is {then!r} there and {now!r} now; use "
            "another folder, or the settings it began with"
        )


def state(model: nn.Module) -> dict[str, Any]:
    """A copy of the weights and buffers, on the CPU."""
    found = model.state_dict()
    for name, value in found.items():
        found[name] = value.to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
    return found


def shapes(tensors: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in tensors.items() if isinstance(value, Tensor)}


def digest(*states: Mapping[str, Any]) -> str:
    h = hashlib.sha256()
    for one in states:
        for name, value in one.items():
            if isinstance(value, Tensor):
                h.update(f"{name}{value.dtype}{tuple(value.shape)}".encode())
                h.update(store.raw_bytes(value))
    return h.hexdigest()


def _random_state(model: nn.Module) -> dict[str, Tensor]:
    """Of torch's generators: a training may draw from them."""
    gpus = [device for device in devices_of(model.parameters()) if device.type == "cuda"]
    return {"cpu": torch.get_rng_state(), **{str(device): torch.cuda.get_rng_state(device) for device in gpus}}


def _set_random_state(states: Mapping[str, Tensor]) -> None:
    for device, state in states.items():
        if device == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(state, device)
