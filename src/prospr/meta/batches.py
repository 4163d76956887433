"""Batches of any form: whatever nesting of tensors a loss understands."""

import copy
import itertools
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from prospr.errors import BatchError, SettingError

__all__ = ["Stream", "iterate", "map_tensors", "micro_batches", "samples", "take", "tensors", "to_device"]


def iterate(batches: Iterable[Any]) -> Iterator[Any]:
    """`iter`, with an error that says what was expected."""
    try:
        return iter(batches)
    except TypeError:
        raise BatchError(
            f"batches must be an iterable of batches, such as a DataLoader or a list; got {type(batches).__name__}"
        ) from None


def take(batches: Iterable[Any], steps: int | None) -> Iterator[Any]:
    """steps + 1 batches from any iterable, or all of them; an error where there are too few."""
    if steps is not None and (not isinstance(steps, int) or steps < 0):
        raise SettingError(f"steps={steps!r}: use a whole number, 0 or more")
    count = 0
    for batch in itertools.islice(iterate(batches), None if steps is None else steps + 1):
        count += 1
        yield batch
    if count == 0:
        raise BatchError("batches is empty; pass at least one batch (was it an iterator that is used up?)")
    if steps is not None and count < steps + 1:
        raise BatchError(
            f"batches holds {count}, and {steps} steps need {steps + 1} (one a step and one for the final loss); "
            "pass more batches, or lower steps"
        )


class Stream(Iterator[Any]):
    """Batches one after another, over several rounds of reading.

    A round reads on where the last one stopped. Where the iterable ends it is begun again, if it can be; but one round
    never sees a batch twice.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self._iterator = iterate(batches)
        self._anew = self._iterator is not batches  # a list or a loader, not a generator
        self._ahead: list[Any] = []
        self._in_pass = self._in_round = 0  # how many were read
        self._whole: int | None = None  # how many there are, once that is known

    def next_round(self) -> None:
        self._in_round = 0

    def peek(self) -> list[Any]:
        """The next batch without reading it, or nothing where there is none."""
        if not self._ahead:
            self._ahead = list(itertools.islice(self._iterator, 1))
        return self._ahead

    def more(self) -> bool:
        """Whether this round has another batch."""
        if not self.peek():
            self._whole = self._in_pass
            if self._anew and self._in_round < self._whole:
                self._iterator, self._in_pass = iterate(self._batches), 0
        return bool(self.peek()) and self._in_round != self._whole

    def __next__(self) -> Any:
        if not self.more():
            raise StopIteration
        self._in_pass += 1
        self._in_round += 1
        return self._ahead.pop()


def map_tensors(tree: Any, f: Callable[[Tensor], Tensor], other: Callable[[Any], Any] | None = None) -> Any:
    """`f` of every tensor inside tuples, lists, mappings and dataclasses; `other` of what has a `.to` of its own.

    What comes back is of the same class (a BatchEncoding stays one, a ModelOutput too), or a dict for other mappings.
    """
    if isinstance(tree, Tensor):
        return f(tree)
    if isinstance(tree, UserDict):
        same = copy.copy(tree)  # its `.to`, where it has one, would change the tree that was given
        same.data = map_tensors(tree.data, f, other)
        return same
    if isinstance(tree, dict) and not is_dataclass(tree):
        mapped = {key: map_tensors(value, f, other) for key, value in tree.items()}
        if type(tree) is dict:
            return mapped
        same = copy.copy(tree)  # its attributes too
        dict.update(same, mapped)
        return same
    if isinstance(tree, (tuple, list)):
        mapped = [map_tensors(item, f, other) for item in tree]
        return type(tree)(*mapped) if hasattr(tree, "_fields") else type(tree)(mapped)
    if other is not None and hasattr(tree, "to"):
        return other(tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        mapped = {f_.name: map_tensors(getattr(tree, f_.name), f, other) for f_ in fields(tree)}
        same = replace(tree, **{f_.name: mapped[f_.name] for f_ in fields(tree) if f_.init})
        for f_ in fields(tree):
            if not f_.init:
                object.__setattr__(same, f_.name, mapped[f_.name])
        return same
    if isinstance(tree, Mapping):
        return {key: map_tensors(value, f, other) for key, value in tree.items()}
    return tree


def tensors(tree: Any) -> list[Tensor]:
    """The tensors inside, in order."""
    found: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        found.append(t)
        return t

    map_tensors(tree, keep)
    return found


def samples(batch: Any) -> int:
    """The number of samples: the first dimension of the first tensor that has one."""
    for t in tensors(dict(batch) if isinstance(batch, Mapping) else batch):
        if t.dim() > 0:
            return t.shape[0]
    raise BatchError(
        "the number of samples of a batch without tensors is not known; pass ranks=prospr.Ranks(weight=...), a "
        "function of the batch"
    )


def to_device(batch: Any, device: torch.device, copy: bool = False) -> Any:
    """Move every tensor inside a batch, and anything with a `.to`; `copy` those that are there already too."""
    return map_tensors(batch, lambda t: t.to(device, non_blocking=True, copy=copy), lambda other: other.to(device))


def micro_batches(batch: Any, size: int) -> Iterator[tuple[float, int, Any]]:
    """(share of the batch, first sample, piece): pieces of `size` samples along the tensors' first dimension."""
    parts = [t for t in tensors(batch) if t.dim() > 0]
    if not parts:
        raise BatchError("micro_batch needs batches that hold tensors with a first dimension to split")
    total = parts[0].shape[0]
    for t in parts:
        if t.shape[0] != total:
            raise BatchError(
                f"micro_batch cannot split a batch whose tensors differ in their first dimension "
                f"({total} and {t.shape[0]}); leave micro_batch out"
            )
    for start in range(0, total, size):
        stop = min(start + size, total)
        cut = lambda t, start=start, stop=stop: t[start:stop] if t.dim() > 0 else t  # noqa: E731
        yield (stop - start) / total, start, map_tensors(batch, cut)
