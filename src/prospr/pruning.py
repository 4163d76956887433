"""The two verbs: `score` a model, `prune` a model."""

import itertools
import warnings
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from prospr.errors import CollapseError, CollapseWarning, SettingError
from prospr.masks.masks import Masks
from prospr.masks.reach import Call, reach
from prospr.masks.select import Scope, check_sparsity, select
from prospr.meta.batches import iterate
from prospr.meta.loss import ModelLoss, PureLoss, cross_entropy, devices_of, replay, unwrap
from prospr.registry import Method, find
from prospr.scores.base import Problem, Score, Scores, Which
from prospr.scores.base import prunable as find_prunable

__all__ = ["prune", "score"]


def score(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    *,
    method: str | Score | Method = "prospr",
    loss: ModelLoss = cross_entropy,
    prunable: Which = None,
    seed: int = 0,
) -> Scores:
    """What every prunable weight is worth, as {parameter name: tensor of its shape}. The model is not changed.

    batches: any iterable of batches, such as a DataLoader; as many are read as the method needs.
    loss: `loss(model, batch) -> scalar tensor`; cross-entropy of (inputs, targets) by default.
    prunable: which parameters; see `prospr.prunable`.

    A model in eval mode is scored in train mode, as it will be trained; one in train mode exactly as it is.
    """
    model = unwrap(model)
    names = tuple(find_prunable(model, prunable))
    with torch.inference_mode(False), replay(None, devices_of(model.parameters())):
        return find(method).score.score(Problem(model, names, batches, loss, seed))


def prune(
    model: nn.Module,
    batches: Iterable[Any] | None,
    sparsity: float,
    *,
    method: str | Score | Method = "prospr",
    loss: ModelLoss = cross_entropy,
    prunable: Which = None,
    scope: Scope | None = None,
    keep_per_layer: int = 0,
    seed: int = 0,
    collapse: Literal["error", "warn", "ignore"] = "error",
) -> Masks:
    """Prune `model` in place before it is trained; it stays sparse while it trains. Returns the masks.

    sparsity: the share of prunable weights that go, 0.95 for 95 %.
    scope, keep_per_layer: see `prospr.select`; the method says which scope by default.
    collapse: what to do where pruning cuts every path from input to output. A layer that empties beside a skip
        connection is a warning. After an error the model is as it was.

    >>> import torch, prospr
    >>> model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Linear(50, 3))
    >>> batches = [(torch.randn(32, 20), torch.randint(0, 3, (32,))) for _ in range(4)]
    >>> masks = prospr.prune(model, batches, sparsity=0.9)
    >>> masks
    Masks(2 layers, 115 of 1150 kept, sparsity 0.9000)
    """
    if collapse not in ("error", "warn", "ignore"):
        raise SettingError(f"collapse={collapse!r}: use 'error', 'warn' or 'ignore'")
    check_sparsity(sparsity)  # before the scoring, not after it
    plain = unwrap(model)
    chosen = find(method)
    with torch.inference_mode(False), replay(None, devices_of(plain.parameters())):
        call = None
        if batches is not None and collapse != "ignore":
            rest = iterate(batches)
            first = list(itertools.islice(rest, 1))
            call = _call_of(plain, loss, first[0]) if first else None
            batches = itertools.chain(first, rest)
        scores = score(plain, batches, method=chosen, loss=loss, prunable=prunable, seed=seed)
        masks = select(scores, sparsity, scope=scope or chosen.scope, keep_per_layer=keep_per_layer)
        if collapse != "ignore":
            _check_collapse(plain, masks, call, collapse)
        masks.apply(plain)
    return masks


class _Seen(Exception):
    """Carries what the model was called with out of the loss, before anything is computed."""


def _call_of(model: nn.Module, loss: ModelLoss, batch: Any) -> Call | None:
    """The arguments `loss` calls the model with; None where it does not call the model itself."""

    def look(_, args, kwargs):
        raise _Seen(args, kwargs)

    pure = PureLoss(model, loss)
    handle = model.register_forward_pre_hook(look, with_kwargs=True, prepend=True)
    try:
        with replay(0, devices_of(model.parameters())):
            pure(pure.params(), batch)
    except _Seen as seen:
        return seen.args
    finally:
        handle.remove()
    return None


def _one_sample(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value[:1] if value.dim() > 1 else value
    if isinstance(value, dict):
        return {key: _one_sample(item) for key, item in value.items()}
    return type(value)(_one_sample(item) for item in value) if type(value) in (tuple, list) else value


def _connected(model: nn.Module, masks: Masks, call: Call) -> bool | None:
    for part in ((_one_sample(call[0]), _one_sample(call[1])), call):  # some models cannot take one sample of a batch
        reached = reach(model, masks, part)
        if reached is not None:
            return reached.connected
    return None


def _check_collapse(model: nn.Module, masks: Masks, call: Call | None, collapse: str) -> None:
    empty = masks.empty()
    connected = _connected(model, masks, call) if call is not None else None
    what = ", ".join(f"{name}: 0 of {masks[name].numel()} weights kept" for name in empty) or "no layer is empty"
    remedy = "lower the sparsity, pass keep_per_layer=1 (or more), or use another method or scope"
    if connected is False and collapse == "error":
        raise CollapseError(f"no path is left from the network's input to its output ({what}); {remedy}")
    if connected is False:
        warnings.warn(f"no path is left from input to output ({what}); {remedy}", CollapseWarning, stacklevel=3)
    elif empty:
        around = "another path from input to output is left" if connected else "unknown whether a path is left"
        warnings.warn(f"{what} ({around}); {remedy}", CollapseWarning, stacklevel=3)
