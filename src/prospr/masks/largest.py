"""The largest of any number of scores, exactly: also of more than fit one tensor or one process.

Nothing is sorted and nothing is put together. Floating-point numbers are in the order of their bits, so the threshold
is found sixteen bits at a time: how many scores begin with which bits is counted in pieces, and the counts are what
ranks send each other (half a megabyte each time, whatever the number of scores).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from prospr.meta.ranks import Team

__all__ = ["largest", "pieces"]

PIECE = 2**22  # scores looked at at once
DIGIT = 16  # bits found at once
BINS = 2**DIGIT


def largest(
    parts: Sequence[Tensor], count: int, team: Team | None = None, without: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """The `count` largest of all parts together, as masks; of equals the first, by part and then by position in it.

    team: every rank has a piece of each part, one behind the other in the order of ranks; `count` is for all of them.
    without: masks of what is left out.

    >>> import torch
    >>> [m.tolist() for m in largest([torch.tensor([3.0, 1.0]), torch.tensor([1.0, 2.0])], 3)]
    [[True, True], [False, True]]
    """
    flat = [t.detach().reshape(-1) for t in parts]
    out = [None if without is None else m.reshape(-1) for m in without or flat]
    masks = [torch.zeros(t.shape, dtype=torch.bool, device=t.device) for t in parts]
    if count <= 0:
        return masks
    wide = any(t.dtype == torch.float64 for t in parts)  # the same on all ranks
    threshold, equals = _threshold(flat, out, count, wide, team)
    room = _room(flat, out, threshold, equals, wide, team)
    for t, left_out, mask, most in zip(flat, out, masks, room, strict=True):
        taken = 0
        for start, keys in _keys(t, wide):
            piece = mask.view(-1)[start : start + keys.numel()]
            torch.gt(keys, threshold, out=piece)
            if left_out is not None:
                piece &= ~left_out[start : start + keys.numel()]
            if taken < most:
                ties = keys == threshold
                if left_out is not None:
                    ties &= ~left_out[start : start + keys.numel()]
                first = torch.nonzero(ties).flatten()[: most - taken]
                piece[first] = True
                taken += first.numel()
    return masks


def pieces(t: Tensor) -> Iterator[Tensor]:
    """A flat tensor in pieces that are small beside it."""
    for start in range(0, t.numel(), PIECE):
        yield t[start : start + PIECE]


def _keys(t: Tensor, wide: bool) -> Iterator[tuple[int, Tensor]]:
    """(start, whole numbers in the order of the scores), piece by piece. Both zeros are one number."""
    start = 0
    for piece in pieces(t):
        bits = (piece.to(torch.float64 if wide else torch.float32) + 0.0).view(torch.int64 if wide else torch.int32)
        most = torch.iinfo(bits.dtype).max
        yield start, bits ^ ((bits >> (63 if wide else 31)) & most)  # below zero, larger bits are smaller numbers
        start += piece.numel()


def _threshold(
    flat: list[Tensor], out: list[Tensor | None], count: int, wide: bool, team: Team | None
) -> tuple[int, int]:
    """The key of the last score that is kept, and how many of the scores equal to it are."""
    width = 64 if wide else 32
    prefix, left = 0, count
    for shift in range(width - DIGIT, -1, -DIGIT):
        counts = torch.zeros(BINS, dtype=torch.int64, device="cpu")
        for t, left_out in zip(flat, out, strict=True):
            here = torch.zeros(BINS, dtype=torch.int64, device=t.device)
            for start, keys in _keys(t, wide):
                top = shift == width - DIGIT
                wanted = None if top else (keys >> (shift + DIGIT)) == prefix
                if left_out is not None:
                    rest = ~left_out[start : start + keys.numel()]
                    wanted = rest if wanted is None else wanted & rest
                chosen = keys if wanted is None else keys[wanted]
                digits = (chosen >> shift) + BINS // 2 if top else (chosen >> shift) & (BINS - 1)
                here += torch.bincount(digits, minlength=BINS)
            counts += here.cpu()
        if team is not None:
            counts = team.sum(counts)
        from_above = counts.flip(0).cumsum(0)
        place = int(torch.searchsorted(from_above, left))
        if place == BINS:
            raise ValueError(f"{count} of {int(counts.sum())} scores cannot be kept")
        digit = BINS - 1 - place
        left -= int(from_above[place - 1]) if place else 0
        prefix = digit - BINS // 2 if shift == width - DIGIT else (prefix << DIGIT) + digit
    return prefix, left


def _room(
    flat: list[Tensor], out: list[Tensor | None], threshold: int, equals: int, wide: bool, team: Team | None
) -> list[int]:
    """How many of the scores equal to the threshold each part keeps here: the first ones, by part, then by rank."""
    ties = []
    for t, left_out in zip(flat, out, strict=True):
        total = 0
        for start, keys in _keys(t, wide):
            same = keys == threshold
            total += int((same if left_out is None else same & ~left_out[start : start + keys.numel()]).sum())
        ties.append(total)
    everyone = [ties] if team is None else team.gather(ties)
    mine = 0 if team is None else team.rank
    room, left = [], equals
    for i in range(len(flat)):
        for rank, counts in enumerate(everyone):
            if rank == mine:
                room.append(min(counts[i], left))
            left -= min(counts[i], left)
    return room
