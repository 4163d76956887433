"""Which channels go: the lowest first, until the network that is left meets the budget."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from prospr.channels.costs import UNITS, Costs, Unit
from prospr.errors import ScoreError, SettingError
from prospr.masks.select import check_sparsity

__all__ = ["Scope", "choose"]

Scope = Literal["global", "balanced", "layer"]


def choose(
    costs: Costs,
    sets: Mapping[str, Sequence[int]],
    scores: Mapping[str, Tensor],
    sparsity: float,
    unit: Unit,
    round_to: int,
    per_flop: bool,
    scope: Scope,
    least: int,
    places: Mapping[str, int],
    gone: Sequence[int] = (),
) -> set[int]:
    """The groups to remove; `gone` are removed already. Counts `costs` down to what is left.

    places: in how many weights a set's channels are, as their inputs or outputs.
    """
    _check(scores, sparsity, unit, round_to, scope, least)
    values = {g: s for name, ids in sets.items() for g, s in zip(ids, scores[name].tolist(), strict=True)}
    if scope == "balanced":
        values = _balanced(sets, values, set(gone), places)
    if per_flop:
        values = {g: s / max(1, costs.saved(g, "flops")) for g, s in values.items()}
    removed = set(gone)
    costs.remove(list(removed))
    allowed = math.floor((1 - sparsity) * costs.total[unit] + 1e-6)  # 1 - 0.8 is a little less than 0.2
    for unit_of_channels in _in_order(sets, values, removed, round_to, scope):
        if costs.now[unit] <= allowed:
            break
        if costs.fits(unit_of_channels, least):
            costs.remove(unit_of_channels)
            removed.update(unit_of_channels)
    if costs.now[unit] > allowed:
        reached = 1 - costs.now[unit] / costs.total[unit]
        raise SettingError(
            f"sparsity={sparsity:g} of {unit} cannot be reached: with the channels that must stay (keep_per_layer="
            f"{least}, round_to={round_to}, and what is kept whole) it ends at {reached:.4f}; lower it"
        )
    return removed


def _balanced(
    sets: Mapping[str, Sequence[int]], values: Mapping[int, float], gone: set[int], places: Mapping[str, int]
) -> dict[int, float]:
    """Each value as a share of its set's total, of what is left, for every weight that the set is in."""
    found = dict(values)
    for name, ids in sets.items():
        total = math.fsum(abs(values[g]) for g in ids if g not in gone)
        if total > 0:
            found |= {g: values[g] * places[name] / total for g in ids}
    return found


def _in_order(
    sets: Mapping[str, Sequence[int]], values: Mapping[int, float], removed: set[int], round_to: int, scope: Scope
) -> list[list[int]]:
    """What is removed together, in the order in which it is; of equal scores the later channel goes first."""
    units: list[tuple[float, int, list[int]]] = []
    for ids in sets.values():
        left = sorted((g for g in ids if g not in removed), key=lambda g: (values[g], -g))
        start = 0
        while start < len(left):
            size = (len(left) - start) % round_to or round_to
            unit = left[start : start + size]
            if scope == "layer":  # the share of the set that has gone before it
                score = start / len(left)
            else:
                score = sum(values[g] for g in unit) / len(unit)
            units.append((score, -min(unit), unit))
            start += size
    return [unit for _, _, unit in sorted(units)]


def _check(scores: Mapping[str, Tensor], sparsity: float, unit: str, round_to: int, scope: str, least: int) -> None:
    check_sparsity(sparsity)
    if unit not in UNITS:
        raise SettingError(f"budget={unit!r}: use 'parameters', 'channels' or 'flops'")
    if not isinstance(round_to, int) or round_to < 1:
        raise SettingError(f"round_to={round_to!r}: use a whole number, 1 or more")
    if scope not in ("global", "balanced", "layer"):
        raise SettingError(f"scope={scope!r}: for channels use 'global', 'balanced' or 'layer'")
    if not isinstance(least, int) or least < 1:
        raise SettingError(f"keep_per_layer={least!r}: for channels use a whole number, 1 or more")
    for name, s in scores.items():
        if not torch.isfinite(s).all():
            bad = int((~torch.isfinite(s)).sum())
            raise ScoreError(f"{name}: {bad} of {s.numel()} scores are NaN or infinite; check the loss and the data")
    ends = {end.item() for s in scores.values() for end in (s.min(), s.max())}
    if len(ends) == 1 and sum(s.numel() for s in scores.values()) > 1:
        raise ScoreError(
            f"all scores are {ends.pop():g}, so they rank nothing: does the loss depend on the weights? Use another "
            "batch, loss or method"
        )
