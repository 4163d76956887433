"""Scoring and pruning a model that FSDP2 has sharded: no rank ever has a whole layer's scores or masks."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from prospr.errors import SettingError
from prospr.masks.masks import Masks
from prospr.masks.select import select_shards
from prospr.meta.loss import Params, PureLoss
from prospr.meta.ranks import Ranks, joined
from prospr.meta.shards import ShardedProducts, local, mesh_of, shard_of
from prospr.registry import Method
from prospr.scores.base import Problem, Scores, shares
from prospr.scores.magnitude import Magnitude
from prospr.scores.prospr import ProsPr, Snip
from prospr.scores.random import Random

__all__ = ["prune_shards", "score_shards"]

KNOWN = "'snip', 'magnitude', 'random' or prospr.ProsPr(order='first', lr=0.1)"


@dataclass(frozen=True)
class ShardedProblem(Problem):
    """A problem whose weights, gradients and scores are this rank's rows."""

    def weights(self) -> Scores:
        named = dict(self.model.named_parameters())
        return {name: local(named[name].detach()) for name in self.names}

    def start(self, loss: PureLoss) -> Params:
        super().start(loss)  # frozen parameters are an error
        return {name: local(p.detach()) for name, p in self.model.named_parameters() if p.requires_grad}

    def products(self, loss: PureLoss, **settings: Any) -> Any:
        if settings.get("micro_batch") is not None:
            raise SettingError("micro_batch is not for sharded models; use smaller batches, or Snip(batches=...)")
        assert self.team is not None
        return ShardedProducts(self.model, loss.loss, self.team, self.seed)

    def shape(self, name: str) -> torch.Size:
        return self.model.get_parameter(name).shape

    def own(self, name: str, whole: Tensor) -> Tensor:
        assert self.team is not None
        rows = [whole[:0]] * self.team.size
        cut = whole.chunk(self.team.size)  # as FSDP cuts: the last ranks may have fewer rows, or none
        return [*cut, *rows[len(cut) :]][self.team.rank]


def score_shards(problem: Problem, chosen: Method, granularity: Any, ranks: Any) -> Scores:
    """`prospr.score` of a sharded model: shards in the form of the parameters."""
    with _scored(problem, "prospr.score", chosen, granularity, ranks, {}) as (scores, _):
        named = dict(problem.model.named_parameters())
        return {name: shard_of(s, named[name]) for name, s in scores.items()}


def prune_shards(
    problem: Problem,
    sparsity: float,
    chosen: Method,
    scope: Any,
    keep_per_layer: int,
    granularity: Any,
    ranks: Any,
) -> Masks:
    """`prospr.prune` of a sharded model, but for putting the masks on it."""
    if scope not in ("global", "layer"):
        raise SettingError(f"scope={scope!r}: of a sharded model weights are selected by 'global' or 'layer'")
    facts = {"sparsity": sparsity, "scope": scope, "keep_per_layer": keep_per_layer}
    with _scored(problem, "prospr.prune", chosen, granularity, ranks, facts) as (scores, together):
        masks = select_shards(scores, sparsity, together, scope=scope, keep_per_layer=keep_per_layer)
        named = dict(problem.model.named_parameters())
        return Masks({name: shard_of(mask, named[name]) for name, mask in masks.items()})


@contextmanager
def _scored(
    problem: Problem, what: str, chosen: Method, granularity: Any, ranks: Any, facts: dict[str, Any]
) -> Generator[tuple[Scores, Ranks]]:
    """This rank's rows of the scores, and the ranks that have the others."""
    _check(chosen, granularity)
    together = _ranks(problem.model, ranks)
    said = {"method": chosen.rule, "seed": problem.seed, "prunable": problem.names, **facts}
    said = {key: re.sub(r" at 0x[0-9a-f]+", "", repr(value)) for key, value in said.items()}
    device = next(problem.model.parameters()).device
    with joined(together, what, device, said) as team:
        if team is None:
            raise SettingError("the model is sharded over one rank; start more, or prune before fully_shard")
        given = problem.model, problem.names, problem.batches, problem.loss, problem.seed
        own = ShardedProblem(*given, team=team)
        yield shares(chosen.rule.score.saliency(own), team), together


def _check(chosen: Method, granularity: Any) -> None:
    score = chosen.rule.score
    if granularity != "weight":
        raise SettingError(
            f"granularity={granularity!r}: of a sharded model single weights are pruned; prune others "
            "before fully_shard, then masks.apply(model) after it"
        )
    if chosen.rule.rounds > 1 or chosen.rule.redraw or type(score) not in (ProsPr, Snip, Magnitude, Random):
        raise SettingError(
            f"a sharded model is scored in one round by {KNOWN}; for others prune before fully_shard, "
            "then masks.apply(model) after it"
        )
    if isinstance(score, ProsPr) and score.steps > 0:
        if score.order == "exact":
            raise SettingError(
                "exact ProsPr needs Hessian products, and FSDP2's backward pass cannot be differentiated; use "
                f"{KNOWN}, or prune before fully_shard, then masks.apply(model) after it"
            )
        if score.lr == "auto" and score.optimizer is None:
            raise SettingError(
                f'lr="auto" measures curvature, which a sharded model has none of; give a number: {KNOWN}'
            )


def _ranks(model: nn.Module, ranks: Ranks | Literal["auto"] | None) -> Ranks:
    group = mesh_of(model).get_group()
    if ranks == "auto":
        return Ranks(group)
    if not isinstance(ranks, Ranks):
        raise SettingError(
            f"ranks={ranks!r}: all ranks that hold a sharded model score it; use 'auto' or prospr.Ranks()"
        )
    return replace(ranks, group=group)
