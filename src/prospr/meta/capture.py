"""One evaluation recorded as a CUDA graph and replayed on other numbers.

A small network leaves the GPU waiting for the next kernel to be launched; a graph launches them all at once.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from prospr.meta.loss import map_tensors

__all__ = ["Recording", "signature"]


def signature(tree: Any) -> tuple | None:
    """What must stay the same for a recording to fit; None where the values hold something that cannot be recorded."""
    if isinstance(tree, Tensor):
        return (tuple(tree.shape), tree.dtype)
    if isinstance(tree, Mapping):
        parts = [(key, signature(value)) for key, value in tree.items()]
        return None if any(part is None for _, part in parts) else (type(tree), *parts)
    if isinstance(tree, (tuple, list)):
        parts = [signature(item) for item in tree]
        return None if any(part is None for part in parts) else (type(tree), *parts)
    return (type(tree), tree) if tree is None or isinstance(tree, (bool, int, float, str)) else None


class Recording:
    """`function(*inputs)` on fixed memory; call it with inputs of the same signature."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...], device: torch.device, pool: Any) -> None:
        self._inputs = map_tensors(inputs, lambda t: t.detach().to(device, copy=True))
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # the graph has memory of its own; what the eager run freed would lie idle
        with torch.cuda.graph(self._graph, pool=pool):
            self._outputs = function(*self._inputs)
        self._fixed, self._results = tensors(self._inputs), tensors(self._outputs)

    @torch.no_grad()
    def __call__(self, *inputs: Any) -> Any:
        torch._foreach_copy_(self._fixed, tensors(inputs), non_blocking=True)
        self._graph.replay()
        results = [torch.empty_like(t) for t in self._results]
        torch._foreach_copy_(results, self._results)
        copies = iter(results)
        return map_tensors(self._outputs, lambda _: next(copies))


def tensors(tree: Any) -> list[Tensor]:
    """The tensors inside tuples, lists and dicts, in order."""
    found: list[Tensor] = []
    map_tensors(tree, lambda t: found.append(t) or t)
    return found
