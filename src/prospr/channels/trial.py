"""Tries what tracing found: a network that loses channels must give the same numbers as one that masks them."""

import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from prospr.channels.plan import Plan
from prospr.channels.size import Size
from prospr.masks import enforce
from prospr.meta.batches import map_tensors, tensors
from prospr.meta.loss import Call, devices_of, replay, replay_python
from prospr.tracing.trace import FAILURES, pretend_training

if TYPE_CHECKING:
    from prospr.channels.groups import Groups

__all__ = ["differs", "plan_for", "without_masks", "works"]


def plan_for(found: "Groups", model: nn.Module, removed: Iterable[int]) -> Plan:
    """The plan that takes these groups out of `model`."""
    removed = set(removed)
    keep: dict[str, dict[int, list[int]]] = {}
    for (name, dim), ids in found.axes.items():
        indices = [i for i, g in enumerate(ids) if g not in removed]
        if len(indices) < len(ids):
            keep.setdefault(name, {})[dim] = indices
    attributes: dict[str, dict[str, object]] = {}
    for attribute, ids in found.attributes:
        count = sum(g not in removed for g in ids)
        if count == len(ids):
            continue
        values = attributes.setdefault(attribute.module, {})
        if attribute.position is None:
            values[attribute.name] = count
        else:
            now = values.setdefault(
                attribute.name, list(getattr(model.get_submodule(attribute.module), attribute.name))
            )
            now[attribute.position] = count  # ty: ignore[invalid-assignment]
    costs = found.costs()
    before = Size(**costs.now)
    costs.remove(list(removed))
    shapes = {name: list(t.shape) for name, t in (*model.named_parameters(), *model.named_buffers())}
    return Plan(keep, {n: s for n, s in shapes.items() if n in found.tensors}, attributes, before, Size(**costs.now))


def without_masks(model: nn.Module) -> nn.Module:
    """The model, or a copy without the masks that are on it: their buffers are no part of the network."""
    if not enforce.held(model):
        return model
    model = copy.deepcopy(model)
    enforce.remove(model, enforce.held(model))
    return model


def works(model: nn.Module, call: Call, found: "Groups", names: Iterable[str]) -> str | None:
    """Whether the channels of these sets can go; None, or what went wrong without some of them.

    Every other one goes first. Then the first ones, of sets that share a tensor different numbers: halves that forward
    cuts (chunk, split, slices) stay halves without every other channel, and not without these.
    """
    names = list(names)
    counts = _unequal(found, names)
    some = [found.sets[n][::2] for n in names], [found.sets[n][: counts[n]] for n in names]
    choices = [removed for groups in some if (removed := _what_fits(found, itertools.chain(*groups)))]
    for precise in (True, False):
        twin = _random_twin(model, precise)
        given = _precise(call) if precise else call
        with suppress(*FAILURES):
            tried = (_compare(copy.deepcopy(twin), given, found, removed) for removed in choices)
            return next((why for why in tried if why is not None), None)
    return "the network does not run with random weights"


def differs(model: nn.Module, masks: Mapping[str, Tensor], how: Plan, call: Call) -> str | None:
    """How the network of this plan differs from the masked one on these inputs; None if it does not, or cannot run."""
    for precise in (True, False):
        masked = copy.deepcopy(model).eval()
        masked = masked.double() if precise else masked
        _mask(masked, masks)
        with suppress(*FAILURES):
            return _differ(masked, how.shrink(masked), _precise(call) if precise else call)
    return None


@torch.no_grad()
def _mask(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    named = dict(model.named_parameters())
    for name, mask in masks.items():
        named[name].mul_(mask.to(named[name].device))


def _precise(call: Call) -> Call:
    return map_tensors(call, lambda t: t.double() if t.is_floating_point() else t)


def _unequal(found: "Groups", names: Sequence[str]) -> dict[str, int]:
    """{set: how many channels go}, of sets in one dimension of a tensor the more the earlier: chunk rounds up."""
    of_group = {g: name for name in names for g in found.sets[name]}
    beside: dict[str, set[str]] = {name: set() for name in names}
    for ids in found.axes.values():
        here = {of_group[g] for g in ids if g in of_group}
        for name in here:
            beside[name] |= here - {name}
    counts: dict[str, int] = {}
    for name in reversed(names):
        taken = {counts[other] for other in beside[name] if other in counts}
        count = next(k for k in itertools.count(1, 2) if k not in taken)
        counts[name] = count if count < len(found.sets[name]) else 0
    return counts


def _what_fits(found: "Groups", groups: Iterable[int]) -> list[int]:
    """These groups, but those without which nothing would be left somewhere."""
    costs, removed = found.costs(), []
    for g in groups:
        if costs.fits([g], 1):
            costs.remove([g])
            removed.append(g)
    return removed


def _compare(masked: nn.Module, call: Call, found: "Groups", removed: list[int]) -> str | None:
    """None, or how the network without these groups differs from `masked`; raises what that one raises."""
    _mask(masked, found.masks(set(removed)))
    small = plan_for(found, masked, removed).shrink(masked)
    why = _differ(masked, small, call)
    if why is None and found.in_training:
        for twin in (masked, small):
            pretend_training(twin)
        if _repeats(masked, call):
            why = _differ(masked, small, call)
    return why


def _repeats(model: nn.Module, call: Call) -> bool:
    """Whether it gives the same numbers twice; with noise of its own, as functional dropout has, nothing is told."""
    one, other = (_run(model, call, seed) for seed in (0, 1))
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _differ(masked: nn.Module, small: nn.Module, call: Call) -> str | None:
    wanted = _run(masked, call)
    try:
        got = _run(small, call)
    except FAILURES as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return f"the network does not run without some of them: {first}"
    if [t.shape for t in got] != [t.shape for t in wanted]:
        return "without some of them the network's output has another shape"
    exact = all(t.dtype == torch.float64 for t in wanted if t.is_floating_point())
    if not all(_close(a, b, 1e-8 if exact else 1e-3) for a, b in zip(got, wanted, strict=True)):
        return "without some of them the network gives other numbers than with them masked"
    return None


def _random_twin(model: nn.Module, precise: bool) -> nn.Module:
    """A copy in eval mode with weights none of which is zero or equal to another; if `precise` in float64."""
    twin = copy.deepcopy(model).eval()
    with replay(0, devices_of(model.parameters())), torch.no_grad():
        for p in twin.parameters():
            if p.is_floating_point():
                fan_in = max(1, p[0].numel()) if p.dim() > 1 else 1
                p.copy_(torch.randn_like(p) * (2 / fan_in) ** 0.5 if p.dim() > 1 else torch.rand_like(p) + 0.5)
        for name, buffer in twin.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    return twin.double() if precise else twin


def _run(model: nn.Module, call: Call, seed: int = 0) -> list[Tensor]:
    args, kwargs = call
    searching = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False  # to search for the fastest kernels takes longer than one run gains
    try:
        with replay(seed, devices_of(model.parameters())), replay_python(seed), torch.no_grad():
            return list(tensors(model(*args, **kwargs)))
    finally:
        torch.backends.cudnn.benchmark = searching


def _close(got: Tensor, wanted: Tensor, tolerance: float) -> bool:
    if not wanted.is_floating_point():
        return torch.equal(got, wanted)
    finite = torch.isfinite(wanted)
    if not torch.equal(finite, torch.isfinite(got)):
        return False
    scale = wanted[finite].abs().max().item() if finite.any() else 0.0
    return bool((got[finite] - wanted[finite]).abs().le(tolerance * max(scale, 1e-30)).all())
