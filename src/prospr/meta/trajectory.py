"""Where the steps of the inner training are kept until the adjoint walks back through them."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from prospr.errors import SettingError
from prospr.meta.loss import Params
from prospr.meta.optimizers import State

__all__ = ["Moment", "Store", "Trajectory", "trajectory"]

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
    """Page-locked copies, made and read back on the device's own stream: no waiting, and the order is kept."""

    def __init__(self) -> None:
        self._moments: dict[int, tuple[Moment, Moment]] = {}

    def push(self, step: int, moment: Moment, state: State) -> None:
        devices = _map(moment, lambda t: torch.empty(0, dtype=t.dtype, device=t.device))
        self._moments[step] = _map(moment, _to_cpu), devices

    def pop(self, step: int) -> Moment:
        moment, devices = self._moments.pop(step)
        return Moment(
            {n: t.to(devices.params[n].device, non_blocking=True) for n, t in moment.params.items()},
            {n: t.to(devices.grads[n].device, non_blocking=True) for n, t in moment.grads.items()},
            {
                n: tuple(t.to(d.device, non_blocking=True) for t, d in zip(s, devices.state[n], strict=True))
                for n, s in moment.state.items()
            },
        )


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


def _to_cpu(t: Tensor) -> Tensor:
    if t.device.type == "cpu":
        return t
    copy = torch.empty_like(t, device="cpu", pin_memory=t.device.type == "cuda")
    return copy.copy_(t, non_blocking=True)


def _map(moment: Moment, f: Callable[[Tensor], Tensor]) -> Moment:
    return Moment(
        {n: f(t) for n, t in moment.params.items()},
        {n: f(t) for n, t in moment.grads.items()},
        {n: tuple(f(t) for t in s) for n, s in moment.state.items()},
    )
