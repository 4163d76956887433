"""The scores of a run: watched while a method prunes, and what is written down of them.

Scores themselves are as large as the network. What a run keeps of them is counts: for every layer, how many weights of
which score were kept and removed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from prospr.masks.inspect import threshold
from prospr.sanity import invert
from prospr.scores.base import Problem, Score, Scores

__all__ = ["BINS", "Inverted", "Watched", "summarise_scores"]

BINS = 48
TAIL = 0.002
"""The share of the scores, the nearest to zero, that are counted in the first bin whatever they are: they can lie ten
powers of ten below the rest."""


@dataclass(frozen=True)
class Inverted(Score):
    """A score that ranks the other way round: what the method would prune first is kept."""

    of: Score

    def score(self, problem: Problem) -> Scores:
        return invert(self.of.score(problem))

    def score_groups(self, problem: Problem, total: Callable[[Scores], Scores]) -> Scores:
        return invert(self.of.score_groups(problem, total))


@dataclass(frozen=True)
class Watched(Score):
    """A score that remembers what it gave last: of a method in rounds, the last round's."""

    of: Score
    _seen: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def score(self, problem: Problem) -> Scores:
        self._seen.pop("scores", None)  # so that no two rounds' are held at once
        return self._remember(self.of.score(problem), problem, None)

    def score_groups(self, problem: Problem, total: Callable[[Scores], Scores]) -> Scores:
        self._seen.pop("scores", None)
        return self._remember(self.of.score_groups(problem, total), problem, total)

    def _remember(self, scores: Scores, problem: Problem, total: Callable[[Scores], Scores] | None) -> Scores:
        left = None if problem.recover else problem.masks
        self._seen.update(scores=scores, names=problem.names, left=left, total=total)
        self._seen["rounds"] = self._seen.get("rounds", 0) + 1
        return scores

    def summary(self, masks: Mapping[str, Tensor]) -> dict[str, Any]:
        """See `summarise_scores`; of channels where those were scored. `rounds` counts how often it was asked."""
        seen = self._seen
        everything = {name: torch.ones_like(s, dtype=torch.bool) for name, s in seen["scores"].items()}
        left = everything if seen["left"] is None else self._units(seen["left"])
        told = summarise_scores(seen["scores"], self._units(masks), left)
        return {"unit": "weights" if seen["total"] is None else "channels", "rounds": seen["rounds"], **told}

    def _units(self, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is kept of that which is scored: a channel is there where any of its weights is."""
        total = self._seen["total"]
        if total is None:
            return dict(masks)
        counts = total({name: masks[name].double() for name in self._seen["names"] if name in masks})
        return {name: count > 0 for name, count in counts.items()}


def summarise_scores(
    scores: Mapping[str, Tensor], kept: Mapping[str, Tensor], left: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Counts of the scores of what was `left` to choose from, as plain values.

    edges: powers of ten of |score|, equally far apart; the smallest score kept is one, so that no bin has both sides of
        a threshold. Smaller scores than the first are in the first bin.
    layers: {name: {"kept": counts, "removed": counts, "zeros": [kept, removed]}}, and of scores below zero the same
        under "negative", in the same bins of |score|.
    smallest_kept, largest_removed: None where there is none.
    close: of what is kept, the share within one percent of the smallest kept.

    >>> scores, everything = {"w": torch.tensor([0.0, 0.25, 1.0, 4.0])}, {"w": torch.ones(4, dtype=torch.bool)}
    >>> told = summarise_scores(scores, {"w": scores["w"] > 0.5}, everything)
    >>> told["smallest_kept"], told["largest_removed"], sum(told["layers"]["w"]["kept"]), told["layers"]["w"]["zeros"]
    (1.0, 0.25, 2, [0, 1])
    """
    flat = {name: s.detach().flatten().double().cpu() for name, s in scores.items()}
    stays = {name: kept[name].flatten().cpu() for name in scores}
    here = {name: left[name].flatten().cpu() for name in scores}
    chosen = {name: s[here[name]] for name, s in flat.items()}
    cut = threshold(chosen, {name: stays[name][here[name]] for name in flat})
    edges = _edges(torch.cat(list(chosen.values())).abs(), abs(cut.smallest_kept))
    layers: dict[str, Any] = {}
    for name, s in flat.items():
        parts = {"kept": s[here[name] & stays[name]], "removed": s[here[name] & ~stays[name]]}
        told: dict[str, Any] = {part: _counts(values[values > 0], edges) for part, values in parts.items()}
        told["zeros"] = [int((values == 0).sum()) for values in parts.values()]
        if any(bool((values < 0).any()) for values in parts.values()):
            told["negative"] = {part: _counts(-values[values < 0], edges) for part, values in parts.items()}
        layers[name] = told
    removed = any(bool((here[name] & ~stays[name]).any()) for name in flat)
    return {
        "edges": [round(edge, 6) for edge in edges.tolist()],
        "layers": layers,
        "smallest_kept": cut.smallest_kept,
        "largest_removed": cut.largest_pruned if removed else None,
        "close": cut.close,
    }


def _edges(sizes: Tensor, cut: float) -> Tensor:
    """Edges of bins for these sizes, `cut` among them."""
    sizes = sizes[sizes > 0]
    if not sizes.numel():
        return torch.linspace(-1, 0, BINS + 1, dtype=torch.float64)
    high = sizes.max().log10().item()
    low = sizes.kthvalue(1 + int(TAIL * sizes.numel())).values.log10().item()
    width = (high - low) / BINS if high > low else 1 / BINS
    start = low if not cut else math.log10(cut) - width * math.ceil((math.log10(cut) - low) / width - 1e-9)
    count = max(1, math.ceil((high - start) / width - 1e-9))
    return start + width * torch.arange(count + 1, dtype=torch.float64)


def _counts(sizes: Tensor, edges: Tensor) -> list[int]:
    bins = torch.bucketize(sizes.log10(), edges[1:-1].contiguous() - 1e-12, right=True)
    return torch.bincount(bins, minlength=len(edges) - 1).tolist()
