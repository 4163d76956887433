"""What is kept or pruned whole: a weight (or a pattern of weights), or a channel with all that belongs to it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from prospr.channels.costs import Unit
from prospr.channels.focus import focused, thin
from prospr.channels.groups import Groups
from prospr.errors import SettingError
from prospr.masks.largest import largest
from prospr.masks.maps import mapped_shares
from prospr.masks.masks import Masks
from prospr.masks.outputs import Rows, evened
from prospr.masks.patterns import Granularity, parse
from prospr.masks.select import Scope, select, select_among, shares_of_layers
from prospr.scores.base import Problem, Score, Scores

__all__ = ["Channels", "Focused", "Kind", "Mapped", "Weights"]


class Kind(Protocol):
    """How scores are taken and masks are made of them."""

    @property
    def in_rounds(self) -> bool: ...

    def score(self, score: Score, problem: Problem) -> Scores: ...

    def select(self, scores: Scores, sparsity: float, among: Mapping[str, Tensor] | None) -> Masks: ...


@dataclass(frozen=True)
class Weights:
    """One by one, N of every M, or in blocks; see `prospr.select`."""

    scope: Scope = "global"
    keep_per_layer: int = 0
    granularity: Granularity = "weight"

    @property
    def in_rounds(self) -> bool:
        return parse(self.granularity)[0] != "n:m"  # which fixes the sparsity

    def score(self, score: Score, problem: Problem) -> Scores:
        return score.score(problem)

    def select(self, scores: Scores, sparsity: float, among: Mapping[str, Tensor] | None = None) -> Masks:
        if among is None:
            return select(scores, sparsity, **vars(self))
        return select_among(scores, among, sparsity, **vars(self))


class _OneByOne:
    """Single weights that are chosen by more than their scores."""

    in_rounds = True

    def score(self, score: Score, problem: Problem) -> Scores:
        return score.score(problem)


@dataclass(frozen=True)
class Focused(_OneByOne):
    """One by one, in as many of the channels between two layers as there are weights for; see prospr.channels.focus.

    groups: finds the network's channels; it is asked only where a layer keeps so few weights that they matter.
    """

    groups: Callable[[], Groups]
    keep_per_layer: int = 0

    def select(self, scores: Scores, sparsity: float, among: Mapping[str, Tensor] | None = None) -> Masks:
        chosen = Weights("balanced", self.keep_per_layer).select(scores, sparsity, among)
        if not any(thin(mask) for mask in chosen.values()):
            return chosen
        among = {name: torch.ones_like(s, dtype=torch.bool) for name, s in scores.items()} if among is None else among
        shares = shares_of_layers({name: s * among[name].to(s.device) for name, s in scores.items()})
        return Masks(focused(self.groups(), shares, chosen, among))


@dataclass(frozen=True)
class Mapped(_OneByOne):
    """One by one, by what the layers make: less for small feature maps, and something for every output of the network.

    factors: what a layer's share counts for; see prospr.masks.maps. But a layer of small maps keeps two weights for
        each of its outputs, or of its inputs where those are more; or half of an even part of what all layers keep,
        where that is fewer.
    rows: those of the network's outputs and of embeddings; see prospr.masks.outputs.
    """

    factors: Mapping[str, float]
    keep_per_layer: int = 0
    rows: Rows = field(default_factory=dict)

    def select(self, scores: Scores, sparsity: float, among: Mapping[str, Tensor] | None = None) -> Masks:
        weights = Weights("global", self.keep_per_layer)
        left = scores if among is None else {name: s * among[name].to(s.device) for name, s in scores.items()}
        shares = mapped_shares(evened(left, self.rows), self.factors)
        chosen = weights.select(shares, sparsity, among)
        half, small = math.ceil(chosen.kept // len(chosen) / 2), [n for n, factor in self.factors.items() if factor < 1]
        least = {name: min(half, 2 * max(scores[name].shape[:2])) for name in small}
        if all(chosen[name].sum() >= count for name, count in least.items()):
            return chosen
        first = 2 * max(share.abs().max().item() for share in shares.values())
        for name, count in least.items():  # of all, for what one gets is taken from the others
            here = torch.ones_like(chosen[name]) if among is None else among[name].to(chosen[name].device)
            secured = largest([shares[name]], min(count, int(here.sum())), without=[~here])[0]
            shares[name] = torch.where(secured, first, shares[name])
        return weights.select(shares, sparsity, among)


@dataclass(frozen=True)
class Channels:
    """Groups of channels; see `prospr.channels.Groups.select`."""

    groups: Groups
    scope: Scope = "global"
    keep_per_layer: int = 1
    budget: Unit = "parameters"
    round_to: int = 1
    per_flop: bool = False

    def __post_init__(self) -> None:
        if self.scope in ("mapped", "tapered", "spread", "focused", "erk"):
            raise SettingError(
                f"scope={self.scope!r} is for single weights; for channels use 'global', 'balanced' or 'layer'"
            )
        self.groups.require()  # before the scoring, not after it

    @property
    def in_rounds(self) -> bool:
        return True

    def score(self, score: Score, problem: Problem) -> Scores:
        return score.score_groups(problem, self.groups.sum)

    def select(self, scores: Scores, sparsity: float, among: Mapping[str, Tensor] | None = None) -> Masks:
        how = {key: value for key, value in vars(self).items() if key != "groups"}
        return self.groups.select(scores, sparsity, among=among, **how)
