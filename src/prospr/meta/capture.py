"""One evaluation recorded as a CUDA graph and replayed on other numbers.

A small network leaves the GPU waiting for the next kernel to be launched; a graph launches them all at once.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from prospr.meta.batches import map_tensors, tensors
from prospr.meta.loss import replay

__all__ = ["Recorder"]

# A recording costs some five evaluations. Where launching kernels is what takes the time, it saves half of each; where
# the GPU is busy throughout, a few percent.
PAYS_WHERE_LAUNCHING = 8
PAYS_ANYWHERE = 100


class Recorder:
    """Evaluates directly or by replaying a recording, whichever is quicker in all.

    `expected` says how often each evaluation will be asked for.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.expected = 1
        self.watching = False  # whether this evaluation says if a recording would pay
        self.recording = False  # whether a recording is being made just now
        self._recordings: dict[Any, _Recording | None] = {}  # None: looked at, and it would not pay
        self._pool: Any = None

    def __call__(self, name: str, function: Callable[..., Any], inputs: tuple[Any, ...], seed: int) -> Any:
        """`function(*inputs)`; the random numbers it draws are those of `seed`."""
        device = next((t.device for t in tensors(inputs[0])), torch.device("cpu"))
        if not self.enabled or device.type != "cuda" or self.expected < PAYS_WHERE_LAUNCHING:
            return function(*inputs)
        key = (name, signature(inputs))
        recording = self._recordings.get(key)
        if recording is not None:
            with replay(seed, [device]):
                return recording(*inputs)
        if key[1] is None or key in self._recordings or len(self._recordings) >= 4:
            return function(*inputs)
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        self.watching = True
        try:
            result = function(*inputs)
        finally:
            self.watching = False
        launched = time.perf_counter()
        torch.cuda.synchronize(device)
        waiting = (launched - start) > 0.85 * (time.perf_counter() - start)  # the GPU was done almost when Python was
        self._recordings[key] = None
        if self.enabled and (waiting or self.expected >= PAYS_ANYWHERE):
            self._recordings[key] = self._record(function, inputs, device, seed, result)
        return result

    def _record(self, function, inputs, device: torch.device, seed: int, result: Any) -> "_Recording | None":
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        self.recording = True
        try:
            recording = _Recording(function, inputs, device, self._pool)
            with replay(seed, [device]):
                again = recording(*inputs)
        except RuntimeError:  # the loss waits for the GPU (.item()), or there is no memory for it: go on as before
            torch.cuda.synchronize(device)
            self.enabled = False
            return None
        finally:
            self.recording = False
        pairs = list(zip(tensors(again), tensors(result), strict=True))
        error = torch.stack([(a - b).double().square().sum() for a, b in pairs]).sum()
        size = torch.stack([b.double().square().sum() for _, b in pairs]).sum()
        self.enabled = bool(error <= 1e-4 * size)  # a recording must say what the evaluation itself said
        return recording if self.enabled else None


class _Recording:
    """`function(*inputs)` on fixed memory; call it with inputs of the same signature."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...], device: torch.device, pool: Any) -> None:
        fixed = map_tensors(inputs, lambda t: t.detach().to(device, copy=True))
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # the graph has memory of its own; what the direct run freed would lie idle
        with torch.cuda.graph(self._graph, pool=pool):
            self._outputs = function(*fixed)
        self._fixed, self._results = tensors(fixed), tensors(self._outputs)

    @torch.no_grad()
    def __call__(self, *inputs: Any) -> Any:
        torch._foreach_copy_(self._fixed, tensors(inputs), non_blocking=True)
        self._graph.replay()
        results = [torch.empty_like(t) for t in self._results]
        torch._foreach_copy_(results, self._results)
        copies = iter(results)
        return map_tensors(self._outputs, lambda _: next(copies))


def signature(tree: Any) -> tuple | None:
    """What must stay the same for a recording to fit; None where there is something in it that cannot be recorded."""
    if isinstance(tree, Tensor):
        return (tuple(tree.shape), tree.dtype)
    if isinstance(tree, Mapping):
        parts = [(key, signature(value)) for key, value in tree.items()]
        return None if any(part is None for _, part in parts) else (type(tree), *parts)
    if isinstance(tree, (tuple, list)):
        parts = [signature(item) for item in tree]
        return None if any(part is None for part in parts) else (type(tree), *parts)
    return (type(tree), tree) if tree is None or isinstance(tree, (bool, int, float, str)) else None
