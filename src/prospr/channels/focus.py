"""scope="focused": at high sparsity, enough weights for each of fewer channels rather than a few for every one."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from prospr.channels.groups import Axis, Groups
from prospr.masks.largest import largest

__all__ = ["ENOUGH", "focused", "inner_channels", "thin"]

ENOUGH = 16  # weights to a channel; with more, it is none the better for having fewer neighbours


class Inner(NamedTuple):
    """Channels that one layer makes and others read: which group each index of these dimensions is of."""

    groups: Sequence[int]
    made: Axis
    read: Sequence[Axis]


def inner_channels(found: Groups, names: Sequence[str]) -> list[Inner]:
    """The sets of channels with one layer among `names` that makes them, and one or more that read them.

    Channels that several layers add to, the stream of a residual network, are not: each layer there has them all.
    """
    inner = []
    for ids in found.sets.values():
        mine = set(ids)
        axes = [axis for axis, of in found.axes.items() if axis[0] in names and not mine.isdisjoint(of)]
        made, read = ([axis for axis in axes if (axis in found.read) is is_read] for is_read in (False, True))
        if len(made) == 1 and read:
            inner.append(Inner(ids, made[0], read))
    return inner


def thin(mask: Tensor) -> bool:
    """Whether a layer keeps fewer weights than all of its channels should have."""
    return mask.dim() > 1 and int(mask.sum()) < ENOUGH * max(mask.shape[:2])


def focused(
    found: Groups, shares: Mapping[str, Tensor], chosen: Mapping[str, Tensor], among: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """As many weights of each layer as `chosen` has, of those in `among` whose channels stay, by their `shares`.

    Where a layer has less room than that, the best of the others take its place.
    """
    left = _without_channels(found, shares, chosen, among)
    lowest = {name: torch.where(left[name].to(s.device), s, -2.0) for name, s in shares.items()}
    counts = {name: min(int(chosen[name].sum()), int(m.sum())) for name, m in left.items()}
    masks = {name: largest([s], counts[name])[0] for name, s in lowest.items()}
    missing = sum(int(mask.sum()) for mask in chosen.values()) - sum(counts.values())
    room = sum(int(m.sum()) for m in left.values()) - sum(counts.values())
    if missing > room:  # so few channels have no place for so many weights
        return {name: mask.clone() for name, mask in chosen.items()}
    if missing:
        more = largest([*lowest.values()], missing, without=[*masks.values()])
        masks = {name: mask | extra for (name, mask), extra in zip(masks.items(), more, strict=True)}
    return masks


def _without_channels(
    found: Groups, shares: Mapping[str, Tensor], chosen: Mapping[str, Tensor], among: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """`among` without the channels that are too many for the weights that `chosen` would keep.

    Of a set whose layers keep B weights, B / k channels stay, with k = sqrt(B) weights each or `ENOUGH`, whichever is
    less: as many channels as each has weights. Those stay whose weights, coming in and going out, have the largest
    `shares`. A channel that nothing comes into or goes out of is no use, and goes too.
    """
    removed: set[int] = set()
    for one in inner_channels(found, list(shares)):
        left, worth, kept = (
            torch.stack([_by_group(found, axis, one.groups, values[axis[0]]) for axis in (one.made, *one.read)])
            for values in (among, shares, chosen)
        )
        coming, *going = kept.sum(1).tolist()
        weights = math.sqrt(coming * sum(going) / len(going))
        room = math.ceil(weights / max(1.0, min(math.sqrt(weights), ENOUGH)))
        useful = (left[0] > 0) & (left[1:].sum(0) > 0)
        order = torch.where(useful, worth.sum(0), -math.inf).argsort(descending=True, stable=True).tolist()
        stay = set(order[: max(1, min(room, int(useful.sum())))])
        removed |= {group for i, group in enumerate(one.groups) if i not in stay}
    masks = found.masks(removed)
    return {name: m & masks[name].to(m.device) if name in masks else m for name, m in among.items()}


def _by_group(found: Groups, axis: Axis, groups: Sequence[int], values: Tensor) -> Tensor:
    """The sum of `values` over all that belongs to each of `groups` along one dimension."""
    lines = values.double().movedim(axis[1], 0).flatten(1).sum(1).cpu()
    place = {group: i for i, group in enumerate(groups)}
    index = torch.tensor([place.get(group, -1) for group in found.axes[axis]], device="cpu")
    total = torch.zeros(len(groups), dtype=torch.float64, device="cpu")
    return total.index_add_(0, index[index >= 0], lines[index >= 0])
