"""Grids of experiments: every combination of some values. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from itertools import product
from typing import Any

from prospr.errors import SettingError
from prospr.lab.experiment import Data, Experiment, Pruning, Training

__all__ = ["changed", "grid"]

_PARTS = {"data": Data, "pruning": Pruning, "training": Training}
_PART_OF = {one.name: part for part, kind in _PARTS.items() for one in fields(kind)}
_OWN = [one.name for one in fields(Experiment)]


def grid(base: Experiment, **axes: Iterable[Any]) -> list[Experiment]:
    """`base` with every combination of the values given; the last name turns fastest.

    A name is that of any field of `Experiment`, `Data`, `Pruning` or `Training`, as on the command line. What comes to
    the same experiment, such as a dense network at two sparsities, is there once.

    >>> runs = grid(Experiment(), method=["dense", "snip"], sparsity=[0.9, 0.95], lr=[0.1, 0.05])
    >>> len(runs), runs[-1].label, runs[-1].training.lr
    (6, 'small_convnet, digits, snip 95 %, seed 0', 0.05)
    """
    values = {name: [axis] if isinstance(axis, str) else list(axis) for name, axis in axes.items()}
    empty = [name for name, axis in values.items() if not axis]
    if empty:
        raise SettingError(f"{empty[0]}: there are no values to go through; leave it out to keep the base's own")
    combined = (changed(base, **dict(zip(values, chosen, strict=True))) for chosen in product(*values.values()))
    return list({one.identity: one for one in combined}.values())


def changed(base: Experiment, **values: Any) -> Experiment:
    """`base` with other values of its fields, or of those of its parts.

    >>> changed(Experiment(), seed=3, epochs=2, granularity="channel").pruning.granularity
    'channel'
    """
    own: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name in _OWN:
            own[name] = value
        elif name in _PART_OF:
            parts.setdefault(_PART_OF[name], {})[name] = value
        else:
            raise SettingError(f"an experiment has no field {name!r}; it has {', '.join([*_OWN, *_PART_OF])}")
    base = replace(base, **own)
    return replace(base, **{part: replace(getattr(base, part), **inner) for part, inner in parts.items()})
