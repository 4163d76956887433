"""Pruning after training: train, prune, train again; lottery tickets with rewinding, and magnitude after training."""

import os
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prospr.errors import CollapseWarning, MaskError, SettingError
from prospr.masks import enforce
from prospr.masks.masks import Masks
from prospr.masks.select import Scope, check_floor, check_scope, check_sparsity, select_among
from prospr.meta.batches import Stream
from prospr.meta.loss import ModelLoss, check_seed, cross_entropy, devices_of, replay, unwrap
from prospr.registry import Method, find
from prospr.schedules import Iterative
from prospr.scores import Score
from prospr.scores.base import Problem, Which
from prospr.scores.base import prunable as find_prunable
from prospr.stages import Stages, digest, shapes, state

__all__ = ["Train", "retrain"]

Train = Callable[[nn.Module, int, int | None], object]


def retrain(
    model: nn.Module,
    train: Train,
    sparsity: float,
    *,
    rewind: int | None = None,
    levels: int = 1,
    method: str | Score | Method = "magnitude",
    batches: Iterable[Any] | None = None,
    loss: ModelLoss = cross_entropy,
    prunable: Which = None,
    scope: Scope | None = None,
    keep_per_layer: int = 0,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
) -> Masks:
    """Train `model`, prune it, and train what is left: the model ends sparse and trained. Returns the masks, still on.

    train: `train(model, start, stop)` trains the model in place from step `start` of your schedule to step `stop`, or
        to its end where that is None. Make the optimizer in it: each call is a new training.
    rewind: k: what is left goes back to its weights, biases and norm statistics of step k, and trains on from there (a
        lottery ticket). None: what is left keeps its trained values, and the whole schedule is run again.
    levels: how many times it is pruned and trained again; after t of T levels the density is d^(t/T).
    method: a score, by name or object; the trained weights' magnitude by default.
    batches, loss, seed: for a score that looks at data or draws noise.
    prunable, scope, keep_per_layer: see `prospr.prune`.
    folder: each finished stage is stored there. A run that was killed is called again in the same way and skips what
        is finished; torch's random state is stored too, so its weights are those of an unbroken run.

    After an error the model is as it was.

    >>> import torch
    >>> from prospr.retraining import retrain
    >>> data, labels = torch.randn(64, 10), torch.randint(0, 2, (64,))
    >>> def train(model, start, stop):
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ...     for step in range(start, 30 if stop is None else stop):
    ...         optimizer.zero_grad()
    ...         torch.nn.functional.cross_entropy(model(data), labels).backward()
    ...         optimizer.step()
    >>> model = torch.nn.Sequential(torch.nn.Linear(10, 30), torch.nn.ReLU(), torch.nn.Linear(30, 2))
    >>> retrain(model, train, sparsity=0.9, rewind=5)
    Masks(2 layers, 36 of 360 kept, sparsity 0.9000)
    """
    check_sparsity(sparsity)
    if not callable(train):
        raise SettingError(f"train={train!r}: pass a function train(model, start, stop)")
    if rewind is not None and (not isinstance(rewind, int) or isinstance(rewind, bool) or rewind < 0):
        raise SettingError(f"rewind={rewind!r}: use a step of the schedule, 0 or more, or None to keep the weights")
    if not isinstance(levels, int) or isinstance(levels, bool) or levels < 1:
        raise SettingError(f"levels={levels!r}: use a whole number, 1 or more")
    chosen = find(method)
    if chosen.rule.rounds > 1:
        raise SettingError(f"method={method!r} has rounds of its own; pass the score inside it, and levels=")
    if chosen.granularity != "weight":
        raise SettingError(f"method={method!r} prunes channels; retrain prunes weights: pass a score, such as 'snip'")
    plain = unwrap(model)
    if enforce.held(plain):
        raise MaskError("there are masks on this model already; masks.remove(model) lets go of them")
    weights = find_prunable(plain, prunable)
    names = tuple(weights)
    check_scope(scope or chosen.scope)  # before the training, not after it
    check_floor({name: w.numel() for name, w in weights.items()}, sparsity, keep_per_layer)
    rule = _Rule(chosen.rule.score, names, scope or chosen.scope, keep_per_layer, batches, loss, check_seed(seed))
    start = state(plain)
    asked = {"sparsity": float(sparsity), "rewind": rewind, "levels": levels}
    settings = {"shapes": shapes(start), **asked, **rule.described(), "start": digest(start)}
    stages = Stages(plain, None if folder is None else Path(folder), settings)
    masks: Masks | None = None
    try:
        stages.trained("start", lambda: None)
        origin, begin = start, 0
        if rewind:
            stages.trained(f"step-{rewind}", train, model, 0, rewind)
            origin, begin = state(plain), rewind
        stages.trained("level-0", train, model, begin, None)
        for level, target in enumerate(Iterative(rule.score, rounds=levels).sparsities(sparsity), start=1):
            masks = stages.masked(f"level-{level}", rule.masks, plain, level, target, masks)
            if rewind is not None:
                plain.load_state_dict(origin)
            masks.apply(plain)
            stages.trained(f"level-{level}", train, model, begin, None)
    except BaseException:
        if held := enforce.held(plain):
            Masks(held).remove(plain)
        plain.load_state_dict(start)
        raise
    assert masks is not None
    return masks


@dataclass(frozen=True)
class _Rule:
    """Which weights of a trained network go."""

    score: Score
    names: tuple[str, ...]
    scope: Scope
    keep_per_layer: int
    batches: Iterable[Any] | None
    loss: ModelLoss
    seed: int

    def masks(self, model: nn.Module, level: int, sparsity: float, before: Masks | None) -> Masks:
        data = None if self.batches is None else Stream(self.batches)
        problem = Problem(model, self.names, data, self.loss, self.seed + level - 1, before)
        with torch.inference_mode(False), replay(None, devices_of(model.parameters())):
            scores = self.score.score(problem)
            if before is None:
                before = Masks({name: torch.ones_like(s, dtype=torch.bool) for name, s in scores.items()})
            masks = select_among(scores, before, sparsity, scope=self.scope, keep_per_layer=self.keep_per_layer)
        if empty := masks.empty():
            what = ", ".join(f"{name}: 0 of {masks[name].numel()} weights kept" for name in empty)
            remedy = "lower the sparsity, or pass keep_per_layer=1 or more"
            warnings.warn(f"level {level}: {what}; {remedy}", CollapseWarning, stacklevel=4)
        return masks

    def described(self) -> dict[str, Any]:
        return {
            "method": re.sub(r" at 0x[0-9a-f]+", "", repr(self.score)),  # an address is another one in the next process
            "prunable": dict.fromkeys(self.names, True),
            "scope": self.scope,
            "keep_per_layer": self.keep_per_layer,
            "seed": self.seed,
        }
