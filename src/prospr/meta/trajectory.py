"""Where the steps of the inner training are kept until the adjoint walks back through them."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from prospr.errors import SettingError
from prospr.meta.batches import map_tensors, tensors
from prospr.meta.loss import Params
from prospr.meta.optimizers import State

__all__ = ["KeptBatches", "Moment", "Store", "Trajectory", "trajectory"]

Store = Literal["device", "cpu", "recompute"]


class Moment(NamedTuple):
    """What the pullback of one step reads: weights before it, gradient (where it is needed), optimizer state."""

    params: Params
    grads: Params
    state: State


Advance = Callable[[Params, State, int], tuple[Moment, Params, State]]


class Trajectory(Protocol):
    def push(self, step: int, moment: Moment, state: State) -> None: ...

    def pop(self, step: int) -> Moment:
        """The moment of `step`; steps are asked for once each, last first."""
        ...


def trajectory(store: Store, steps: int, advance: Advance) -> Trajectory:
    """`advance(params, state, step)` runs one step again, for the store that rebuilds what it did not keep."""
    if store == "device":
        return _OnDevice()
    if store == "cpu":
        return _OnCpu()
    if store == "recompute":
        return _Snapshots(steps, advance)
    raise SettingError(f"store={store!r}: use 'device', 'cpu' or 'recompute'")


class _OnDevice:
    def __init__(self) -> None:
        self._moments: dict[int, Moment] = {}

    def push(self, step: int, moment: Moment, state: State) -> None:
        self._moments[step] = moment

    def pop(self, step: int) -> Moment:
        return self._moments.pop(step)


class _OnCpu:
    """Page-locked copies, made and read back on a stream of their own while the GPU computes; one step is read ahead.

    On the CPU nothing is copied.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Moment, Moment]] = {}  # copies, and an empty tensor for the place of each
        self._ahead: dict[int, Moment] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def push(self, step: int, moment: Moment, state: State) -> None:
        places = _map(moment, lambda t: torch.empty(0, dtype=t.dtype, device=t.device))
        for device in _gpus(moment):
            self._stream(device).wait_stream(torch.cuda.current_stream(device))
        self._kept[step] = _map(moment, self._copied), places

    def pop(self, step: int) -> Moment:
        moment = self._ahead.pop(step, None) or self._read(step)
        for device in _gpus(moment):
            torch.cuda.current_stream(device).wait_stream(self._stream(device))
        _map(moment, _used_here)
        if step - 1 in self._kept:
            self._ahead[step - 1] = self._read(step - 1)
        return moment

    def _read(self, step: int) -> Moment:
        moment, places = self._kept.pop(step)
        there = iter(_tensors(places))
        return _map(moment, lambda t: self._back(t, next(there).device))

    def _copied(self, t: Tensor) -> Tensor:
        if t.device.type != "cuda":
            return t
        stream = self._stream(t.device)
        t.record_stream(stream)  # its memory is not given away before the copy is made
        with torch.cuda.stream(stream):
            return _on_cpu(t)

    def _back(self, t: Tensor, device: torch.device) -> Tensor:
        if device.type != "cuda":
            return t
        with torch.cuda.stream(self._stream(device)):
            return t.to(device, non_blocking=True)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class _Snapshots:
    """Every k-th step, k = ceil(sqrt(steps)); the steps in between are run again, one stretch at a time."""

    def __init__(self, steps: int, advance: Advance) -> None:
        self._stride = max(1, math.isqrt(max(0, steps - 1)) + 1)
        self._advance = advance
        self._snapshots: dict[int, tuple[Params, State]] = {}
        self._stretch: dict[int, Moment] = {}

    def push(self, step: int, moment: Moment, state: State) -> None:
        if step % self._stride == 0:
            self._snapshots[step] = moment.params, state

    def pop(self, step: int) -> Moment:
        if step not in self._stretch:
            first = step - step % self._stride
            params, state = self._snapshots.pop(first)
            for s in range(first, step + 1):
                self._stretch[s], params, state = self._advance(params, state, s)
        return self._stretch.pop(step)


class KeptBatches(Sequence[Any]):
    """The batches of all steps. Where weights are not kept on the GPU batches are not either: they take more room."""

    def __init__(self, batches: Iterable[Any], store: Store) -> None:
        self._batches: list[Any] = []
        self._places: list[list[torch.device]] = []
        for batch in batches:
            places = [t.device for t in tensors(batch)] if store != "device" else []
            moved = any(place.type == "cuda" for place in places)
            self._batches.append(map_tensors(batch, _on_cpu) if moved else batch)
            self._places.append(places if moved else [])

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, step: int) -> Any:
        batch, places = self._batches[step], iter(self._places[step])
        if not self._places[step]:
            return batch
        return map_tensors(batch, lambda t: t.to(next(places), non_blocking=True))


def _on_cpu(t: Tensor) -> Tensor:
    """The tensor, or of one on a GPU a page-locked copy that is being made on the current stream."""
    if t.device.type == "cpu":
        return t
    copy = torch.empty_like(t, device="cpu", pin_memory=t.device.type == "cuda")
    return copy.copy_(t, non_blocking=True)


def _used_here(t: Tensor) -> Tensor:
    if t.device.type == "cuda":
        t.record_stream(torch.cuda.current_stream(t.device))
    return t


def _tensors(moment: Moment) -> list[Tensor]:
    return [*moment.params.values(), *moment.grads.values(), *(t for parts in moment.state.values() for t in parts)]


def _gpus(moment: Moment) -> set[torch.device]:
    return {t.device for t in _tensors(moment) if t.device.type == "cuda"}


def _map(moment: Moment, f: Callable[[Tensor], Tensor]) -> Moment:
    return Moment(
        {n: f(t) for n, t in moment.params.items()},
        {n: f(t) for n, t in moment.grads.items()},
        {n: tuple(f(t) for t in s) for n, s in moment.state.items()},
    )
