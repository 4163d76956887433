"""Patterns that hardware can use: N of every M weights, and whole blocks."""

import re
import warnings
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from prospr.errors import InexactWarning, SettingError

__all__ = ["Granularity", "block_scores", "n_of_m", "parse", "spread"]

Granularity = Literal["weight"] | str | tuple[int, int]


def parse(granularity: Granularity) -> tuple[str, int, int]:
    """("weight", 1, 1), ("n:m", n, m) or ("block", rows, columns)."""
    if granularity == "weight":
        return "weight", 1, 1
    if isinstance(granularity, str) and (found := re.fullmatch(r"(\d+):(\d+)", granularity)):
        n, m = int(found[1]), int(found[2])
        if 0 < n < m:
            return "n:m", n, m
    if (
        isinstance(granularity, tuple)
        and len(granularity) == 2
        and all(isinstance(k, int) and k > 0 for k in granularity)
    ):
        return "block", *granularity
    if granularity == "channel":
        raise SettingError(
            "granularity='channel' needs to know which channels go together: use prospr.prune, or "
            "prospr.channels.groups(model, example).select(scores, sparsity)"
        )
    raise SettingError(
        f"granularity={granularity!r}: use 'weight', 'channel', a pattern such as '2:4', or a block such as (4, 4)"
    )


def n_of_m(scores: Mapping[str, Tensor], n: int, m: int) -> dict[str, Tensor]:
    """In every group of m neighbours along a weight's inputs keep the n of highest score, of equals the earlier.

    Neighbours are input features of a Linear layer and input channels of a convolution (the order in which
    channels-last kernels read them). A layer whose inputs are no multiple of m is kept whole, and named in a warning.
    """
    whole = [name for name, s in scores.items() if s.dim() < 2 or s.shape[1] % m]
    if whole:
        warnings.warn(
            f"{', '.join(whole)}: the number of inputs is no multiple of {m}, so {n}:{m} does not fit; kept whole",
            InexactWarning,
            stacklevel=4,
        )
    masks = {}
    for name, s in scores.items():
        if name in whole:
            masks[name] = torch.ones_like(s, dtype=torch.bool)
            continue
        groups = s.movedim(1, -1).unflatten(-1, (-1, m))
        order = groups.argsort(dim=-1, descending=True, stable=True)
        kept = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, order[..., :n], True)
        masks[name] = kept.flatten(-2).movedim(-1, 1).contiguous()
    return masks


def block_scores(scores: Mapping[str, Tensor], rows: int, columns: int) -> dict[str, Tensor]:
    """The mean of each block of outputs x inputs; a convolution's kernel positions are blocks of their own.

    Blocks at the edge are smaller where a layer is no multiple of the block; a mean keeps them comparable.
    """
    found = {}
    for name, s in scores.items():
        if s.dim() < 2:
            found[name] = s
            continue
        matrix = s.movedim((0, 1), (-2, -1))
        padded = torch.nn.functional.pad(matrix, (0, -matrix.shape[-1] % columns, 0, -matrix.shape[-2] % rows))
        count = torch.nn.functional.pad(
            torch.ones_like(matrix), (0, -matrix.shape[-1] % columns, 0, -matrix.shape[-2] % rows)
        )
        tiles = lambda t: t.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))  # noqa: E731
        means = tiles(padded).sum((-3, -1)) / tiles(count).sum((-3, -1))
        found[name] = means.movedim((-2, -1), (0, 1)).contiguous()
    return found


def spread(mask: Tensor, shape: torch.Size, rows: int, columns: int) -> Tensor:
    """A mask of blocks as a mask of weights of this shape."""
    if len(shape) < 2:
        return mask
    weights = mask.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return weights[: shape[0], : shape[1]].contiguous()
