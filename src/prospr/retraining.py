"""Pruning after training: train, prune, train again; lottery tickets with rewinding, and magnitude after training."""

import hashlib
import json
import os
import pickle
import re
import uuid
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prospr.errors import CollapseWarning, MaskError, MaskFileError, PruningError, SettingError
from prospr.gradual import select_among
from prospr.masks import store
from prospr.masks.masks import Masks
from prospr.masks.select import Scope, check_sparsity, select
from prospr.meta.batches import Stream
from prospr.meta.loss import ModelLoss, cross_entropy, devices_of, replay, unwrap
from prospr.registry import Method, find
from prospr.schedules import Iterative
from prospr.scores import Score
from prospr.scores.base import Problem, Which
from prospr.scores.base import prunable as find_prunable

__all__ = ["FolderError", "Train", "retrain"]

Train = Callable[[nn.Module, int, int | None], object]
State = dict[str, Any]  # a state_dict, on the CPU


class FolderError(PruningError):
    """A folder of stages that belongs to another run, or a file in it that is damaged."""


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
    plain = unwrap(model)
    names = tuple(find_prunable(plain, prunable))
    _refuse_masks(plain)
    problem = Problem(plain, names, None, loss, seed)
    scope = scope or chosen.scope
    start = _state(plain)
    settings = {
        "sparsity": sparsity,
        "rewind": rewind,
        "levels": levels,
        "method": re.sub(r" at 0x[0-9a-f]+", "", repr(chosen.rule.score)),  # an address says nothing
        "scope": scope,
        "keep_per_layer": keep_per_layer,
        "seed": seed,
        "prunable": list(names),
        "shapes": {name: list(value.shape) for name, value in start.items() if isinstance(value, Tensor)},
        "start": _digest(start),
    }
    stages = _Stages(plain, Path(folder), settings) if folder is not None else _Unstored(plain)

    def pruned(level: int, target: float, masks: Masks | None) -> Masks:
        with torch.inference_mode(False), replay(None, devices_of(plain.parameters())):
            data = None if batches is None else Stream(batches)
            scores = chosen.rule.score.score(Problem(plain, names, data, loss, problem.seed + level - 1, masks))
            if masks is None:
                return select(scores, target, scope=scope, keep_per_layer=keep_per_layer)
            return select_among(scores, masks, target, scope=scope, keep_per_layer=keep_per_layer)

    masks: Masks | None = None
    try:
        stages.trained("start", lambda: None)
        origin, begin = start, 0
        if rewind:
            stages.trained(f"step-{rewind}", lambda: train(model, 0, rewind))
            origin, begin = _state(plain), rewind
        stages.trained("level-0", lambda: train(model, begin, None))
        for level, target in enumerate(Iterative(chosen.rule.score, rounds=levels).sparsities(sparsity), 1):
            masks = stages.masks(f"level-{level}", lambda: pruned(level, target, masks))  # noqa: B023 - called at once
            _warn_of_empty_layers(masks, level)
            if rewind is not None:
                plain.load_state_dict(origin)
            masks.apply(plain)
            stages.trained(f"level-{level}", lambda: train(model, begin, None))
    except BaseException:
        if masks is not None:
            _let_go(plain)
        plain.load_state_dict(start)
        raise
    assert masks is not None
    return masks
