"""From masks to a network that is really smaller."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from prospr.channels.groups import Groups, find_groups
from prospr.channels.plan import Plan
from prospr.channels.trial import differs, plan_for, without_masks
from prospr.errors import PlanError, SettingError
from prospr.layers import inputs_first
from prospr.masks.masks import Masks
from prospr.meta.loss import call_of, unwrap
from prospr.meta.redraw import Init, draw_anew

__all__ = ["Weights", "fit_weights", "plan", "shrink"]

Weights = Literal["keep", "rescale", "redraw"]


def plan(model: nn.Module, masks: Mapping[str, Tensor], example: Any) -> Plan:
    """How `masks` make `model` smaller: every channel goes that no weight which is left reads. See `Plan`.

    example: an input, a tuple of arguments, a dict of keyword arguments, or the `Groups` found with one.
    """
    model = unwrap(model)
    with torch.inference_mode(False):
        found = example if isinstance(example, Groups) else find_groups(model, call_of(example))
        plain = without_masks(model)
        how = plan_for(found, plain, found.removed(Masks(masks)))
        if how.keep and not isinstance(example, Groups) and (why := differs(plain, masks, how, call_of(example))):
            raise PlanError(
                f"the smaller network would not be what the masked one is: {why}. Its forward pass may decide by sizes "
                "that pruning changes (a shortcut taken where shapes differ, parts cut by their number); leave such "
                "layers out with prunable=, or let other channels go (another sparsity or round_to)"
            )
    return how


def shrink(
    model: nn.Module,
    masks: Mapping[str, Tensor],
    example: Any,
    *,
    weights: Weights = "keep",
    init: Init | None = None,
    seed: int = 0,
) -> nn.Module:
    """A plain, smaller nn.Module of the same classes, which computes what `model` computes under `masks`.

    example: an input, a tuple of arguments or a dict of keyword arguments. One sample of it is run to find the
        channels, and all of it to try the smaller network beside the masked one; a difference is a PlanError. Or the
        `Groups` that `prospr.channels.groups` found with one: then nothing is run.
    weights: "keep" the initial ones; "rescale" them by sqrt(inputs before / inputs left), so that their variance fits
        the new number of inputs (3SP + rescale); or "redraw" them from `seed`, by `init(model)` or the layers' own
        reset_parameters (3SP + reinit).

    The model is not changed. Weights that `masks` prune inside the channels that stay are pruned in the smaller network
    too, and stay so.

    >>> import torch, prospr
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    >>> batches = [(torch.randn(32, 8), torch.randint(0, 3, (32,))) for _ in range(4)]
    >>> masks = prospr.prune(net, batches, sparsity=0.5, granularity="channel")
    >>> small = prospr.shrink(net, masks, torch.zeros(1, 8))
    >>> x = torch.randn(5, 8)
    >>> small[0].out_features, torch.allclose(small(x), net(x), atol=1e-6)
    (7, True)
    """
    if weights not in ("keep", "rescale", "redraw"):
        raise SettingError(f"weights={weights!r}: use 'keep', 'rescale' or 'redraw'")
    if weights != "redraw" and init is not None:
        raise SettingError("init= draws weights anew; pass weights='redraw' with it")
    model = unwrap(model)
    how = plan(model, masks, example)
    small = how.shrink(model)
    fit_weights(small, model, weights, init, seed)
    with torch.inference_mode(False), torch.no_grad():
        left = how.masks(masks)
        named = dict(small.named_parameters())
        for name, mask in left.items():
            named[name].masked_fill_(~mask.to(named[name].device), 0.0)
        if left.kept < left.total:
            left.apply(small)
    return small


def fit_weights(
    small: nn.Module, model: nn.Module, weights: Weights = "keep", init: Init | None = None, seed: int = 0
) -> None:
    """Give `small`, which was made of `model`, the weights that `shrink` would, in place."""
    with torch.inference_mode(False), torch.no_grad():
        if weights == "redraw":
            draw_anew(small, init, seed)
        elif weights == "rescale":
            _rescale(model, small)


def _rescale(model: nn.Module, small: nn.Module) -> None:
    """Keep the variance that every layer was initialised for: 1 / (number of inputs)."""
    done: set[int] = set()
    for before, after in zip(model.modules(), small.modules(), strict=True):
        if not isinstance(after, (nn.Linear, nn.modules.conv._ConvNd)) and not inputs_first(after):
            continue
        ratio, weight = _inputs(before) / _inputs(after), after._parameters.get("weight")
        if weight is not None and ratio != 1 and id(weight) not in done:  # one that is computed scales itself
            done.add(id(weight))  # tied layers share theirs
            weight.mul_(ratio**0.5)


def _inputs(layer: Any) -> float:
    """How many numbers a weight sums for one output."""
    if isinstance(layer, nn.Linear):
        return layer.in_features
    if inputs_first(layer):
        return len(layer.weight)
    return layer.in_channels / layer.groups
