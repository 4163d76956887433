"""From scores to masks: exact counts, and the same masks every time.

One rule serves every method: exactly round(density x n) weights are kept, at least one; of equal scores the earlier is
kept, by layer and then by position in it.
"""

import math
import warnings
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Literal, get_args

import torch
from torch import Tensor

from prospr.errors import InexactWarning, ScoreError, SettingError, ZeroScoreWarning
from prospr.masks.largest import largest, pieces
from prospr.masks.masks import Masks
from prospr.masks.patterns import Granularity, block_scores, n_of_m, parse, spread
from prospr.meta.ranks import Ranks, Team, joined

__all__ = [
    "Scope",
    "check_floor",
    "check_scope",
    "check_sparsity",
    "erk_densities",
    "select",
    "select_among",
    "select_shards",
    "shares_of_layers",
]

Scope = Literal["global", "balanced", "mapped", "tapered", "spread", "focused", "layer", "erk"]
TAPER = 0.3


def select(
    scores: Mapping[str, Tensor],
    sparsity: float,
    *,
    scope: Scope = "global",
    keep_per_layer: int = 0,
    granularity: Granularity = "weight",
) -> Masks:
    """Keep the weights of the highest score.

    scope: "global" (one threshold for the network), "balanced" (one threshold for scores as shares of their layer's
        total: in rounds, layers come to keep about as many weights each), "tapered" (the same, with the shares divided
        by the 0.3rd power of the layer's size: large layers keep fewer), "spread" (balanced, with the scores of a
        layer scaled so that each of its inputs and each of its outputs has the same total too: no channel takes all),
        "layer" (the same density in every layer) or "erk" (layer densities by the Erdos-Renyi-Kernel rule: small
        layers denser). The total is exact in each. `prospr.prune` has two more, which look at the network: "mapped"
        (balanced, with less for convolutions that make maps of fewer than 64 pixels, and no output of the network or
        entry of an embedding left out for being rare) and "focused" (balanced, and where a layer keeps few weights they
        go to fewer of the channels between two layers, so that each has enough).
    keep_per_layer: at least so many weights (of blocks, blocks) stay in every layer, taken from the others' budget.
    granularity: "weight"; "2:4" and the like (the best n of every m neighbours along a weight's inputs, which fixes the
        sparsity at 1 - n/m); or a block such as (4, 4) of outputs x inputs, kept or pruned whole by its mean score.

    >>> import torch, prospr
    >>> scores = {"a": torch.tensor([3.0, 1.0, 1.0]), "b": torch.tensor([1.0, 2.0, 0.5])}
    >>> masks = prospr.select(scores, sparsity=0.5)
    >>> masks["a"].tolist(), masks["b"].tolist()                # of the three ones, the first stays
    ([True, True, False], [False, True, False])
    """
    check_sparsity(sparsity)
    check_scope(scope)
    _check_floor(keep_per_layer)
    kind, first, second = parse(granularity)
    _check(scores)
    if kind == "n:m":
        if abs(sparsity - (1 - first / second)) > 1e-6:
            raise SettingError(f"granularity={granularity!r} prunes exactly {1 - first / second:g}, not {sparsity:g}")
        if scope != "global" or keep_per_layer:
            raise SettingError(f"granularity={granularity!r} fixes every layer's density; leave scope and floors out")
        return Masks(n_of_m(scores, first, second))
    if kind == "block":
        blocks = select(block_scores(scores, first, second), sparsity, scope=scope, keep_per_layer=keep_per_layer)
        return _of_blocks(blocks, scores, sparsity, first, second)
    if scope in ("balanced", "tapered", "spread"):
        scores, scope = _shares(scores, scope), "global"
    sizes = {name: s.numel() for name, s in scores.items()}
    total = sum(sizes.values())
    kept = max(1, round((1 - sparsity) * total))
    if scope == "global":
        masks = _global(scores, sizes, kept, keep_per_layer)
    else:
        shapes = {name: tuple(s.shape) for name, s in scores.items()}
        density = kept / total
        wanted = erk_densities(shapes, density) if scope == "erk" else dict.fromkeys(sizes, density)
        counts = _whole(wanted, sizes, kept, keep_per_layer)
        masks = {name: largest([s], counts[name])[0] for name, s in scores.items()}
    _warn_of_zeros(scores, masks)
    return Masks(masks)


def select_among(
    scores: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    sparsity: float,
    *,
    scope: Scope = "global",
    keep_per_layer: int = 0,
    granularity: Granularity = "weight",
) -> Masks:
    """`prospr.select` among the weights that `masks` still keeps, whatever the others score. The total is exact.

    >>> import torch
    >>> from prospr.masks.select import select_among
    >>> masks = {"w": torch.tensor([True, True, False, True])}
    >>> select_among({"w": torch.tensor([1.0, 3.0, 9.0, 2.0])}, masks, sparsity=0.5)["w"].tolist()
    [False, True, False, True]
    """
    _check(scores)
    kind, rows, columns = parse(granularity)
    if kind == "block":  # they went whole before, too
        left = {name: mask.to(scores[name].device, scores[name].dtype) for name, mask in masks.items()}
        there = {name: share > 0 for name, share in block_scores(left, rows, columns).items()}
        blocks = block_scores(scores, rows, columns)
        chosen = select_among(blocks, there, sparsity, scope=scope, keep_per_layer=keep_per_layer)
        return _of_blocks(chosen, scores, sparsity, rows, columns)
    if scope in ("balanced", "tapered", "spread"):
        left = {name: s * masks[name].to(s.device) for name, s in scores.items()}
        scores, scope = _shares(left, scope), "global"
    among = [s[masks[name].to(s.device)] for name, s in scores.items()]
    ends = {end.item() for part in among if part.numel() for end in (part.min(), part.max())}
    wanted = max(1, round((1 - sparsity) * sum(s.numel() for s in scores.values())))
    if len(ends) == 1 and wanted < sum(part.numel() for part in among):
        raise ScoreError(f"all weights that are left score {ends.pop():g}, so the scores rank nothing")
    low = min(s.min().item() for s in scores.values())
    ranked = {name: torch.where(masks[name].to(s.device), s, low - abs(low) - 1) for name, s in scores.items()}
    chosen = select(ranked, sparsity, scope=scope, keep_per_layer=keep_per_layer, granularity=granularity)
    kept = {name: mask & masks[name].to(mask.device) for name, mask in chosen.items()}
    if all(torch.equal(kept[name], chosen[name]) for name in kept):
        return chosen
    # Layer densities in whole weights: a smaller total can round up to one more in some layer, which has none to give.
    # The best of the other layers fills the place.
    high = max(s.max().item() for s in scores.values())
    first = {name: torch.where(kept[name], high + abs(high) + 1, s) for name, s in ranked.items()}
    return select(first, sparsity, granularity=granularity)


def _of_blocks(blocks: Masks, scores: Mapping[str, Tensor], sparsity: float, rows: int, columns: int) -> Masks:
    """Masks of blocks as masks of weights; a warning where blocks cut short at the edge make another sparsity of it."""
    masks = Masks({name: spread(blocks[name], s.shape, rows, columns) for name, s in scores.items()})
    if abs(masks.sparsity - sparsity) > 0.01:
        cut = [n for n, s in scores.items() if s.dim() > 1 and (s.shape[0] % rows or s.shape[1] % columns)]
        why = f"{', '.join(cut[:4])}{', ...' if len(cut) > 4 else ''} end in smaller ones" if cut else "they are few"
        warnings.warn(
            f"in whole blocks of {rows} x {columns} the sparsity is {masks.sparsity:.4f}, not {sparsity:g}: {why}; use "
            "smaller blocks, or leave such layers out of prunable=",
            InexactWarning,
            stacklevel=3,
        )
    return masks


def shares_of_layers(scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each layer's scores as shares of their total size."""
    return _shares(scores, "balanced")


def _shares(scores: Mapping[str, Tensor], scope: Scope) -> dict[str, Tensor]:
    """Each layer's scores as shares of their total size, spread over its channels before or tapered by its number of
    weights after, as `scope` says; one of zeros stays as is."""
    found = {}
    for name, s in scores.items():
        s = s.to(torch.promote_types(s.dtype, torch.float32))  # half precision has too few numbers for shares
        s = s * _evening(s) if scope == "spread" and s.dim() > 1 else s
        total = s.abs().sum(dtype=torch.float64) * (s.numel() ** TAPER if scope == "tapered" else 1)
        found[name] = s / total.to(s.dtype) if total > 0 else s
    return found


def _evening(s: Tensor, sweeps: int = 8) -> Tensor:
    """A factor for each output and input of a layer, by which their totals become equal; Sinkhorn's iteration."""
    table = s.abs().double().reshape(s.shape[0], s.shape[1], -1).sum(2)
    factors = torch.ones_like(table)
    for _ in range(sweeps):
        for dim in (0, 1):
            total = (table * factors).sum(dim, keepdim=True)
            factors /= torch.where(total > 0, total, 1.0)
    return (factors / factors.max()).to(s.dtype).reshape(*table.shape, *[1] * (s.dim() - 2))


def check_sparsity(sparsity: float) -> None:
    if not isinstance(sparsity, Real) or not 0 <= sparsity < 1:  # NumPy's numbers are
        raise SettingError(f"sparsity={sparsity!r}: use a number from 0 up to, not including, 1 (0.95 prunes 95 %)")


def check_scope(scope: Scope) -> None:
    """An error where this is no scope, or none that scores alone are enough for."""
    if scope not in get_args(Scope):
        raise SettingError(
            f"scope={scope!r}: use 'global', 'balanced', 'mapped', 'tapered', 'spread', 'focused', 'layer' or 'erk'"
        )
    if scope in ("mapped", "focused"):
        raise SettingError(f"scope={scope!r} looks at the network, and scores alone do not tell; prospr.prune has it")


def erk_densities(shapes: Mapping[str, tuple[int, ...]], density: float) -> dict[str, float]:
    """Layer densities in proportion to (sum of the dimensions) / (their product), none above 1, of the mean asked for.

    >>> d = erk_densities({"small": (4, 4), "large": (40, 40)}, 0.1)
    >>> round(d["small"], 3), round(d["large"], 3)
    (0.918, 0.092)
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    raw = {name: sum(shape) / math.prod(shape) for name, shape in shapes.items()}
    full: set[str] = set()
    while True:
        budget = density * sum(sizes.values()) - sum(sizes[name] for name in full)
        rest = sum(raw[name] * sizes[name] for name in raw if name not in full)
        factor = budget / rest if rest else 0.0
        over = {name for name in raw if name not in full and raw[name] * factor > 1}
        if not over:
            return {name: 1.0 if name in full else raw[name] * factor for name in raw}
        full |= over


def _global(
    scores: Mapping[str, Tensor], sizes: Mapping[str, int], kept: int, floor: int, team: Team | None = None
) -> dict[str, Tensor]:
    """The best of all layers; with a floor, the best of each layer first. `sizes` are those of whole layers."""
    parts = list(scores.values())
    if not floor:
        return dict(zip(scores, largest(parts, kept, team), strict=True))
    least = _least(sizes, kept, floor)
    total = sum(least.values())
    secured = [largest([s], least[name], team)[0] for name, s in scores.items()]
    rest = largest(parts, kept - total, team, without=secured)
    return {name: a | b for name, a, b in zip(scores, secured, rest, strict=True)}


def _whole(wanted: Mapping[str, float], sizes: Mapping[str, int], kept: int, floor: int) -> dict[str, int]:
    """Layer densities as whole numbers of weights that add up: largest remainder first, layer order among equals."""
    least = _least(sizes, kept, floor)
    exact = {name: wanted[name] * n for name, n in sizes.items()}
    counts = {name: min(sizes[name], max(least[name], math.floor(exact[name] + 1e-9))) for name in sizes}
    while (missing := kept - sum(counts.values())) != 0:
        step = 1 if missing > 0 else -1
        open_ = [name for name in sizes if (counts[name] < sizes[name] if step > 0 else counts[name] > least[name])]
        open_.sort(key=lambda name: step * (counts[name] - exact[name]))  # stable: layer order among equals
        for name in open_[: abs(missing)]:
            counts[name] += step
    return counts


def _check(scores: Mapping[str, Tensor]) -> None:
    if not scores:
        raise ScoreError("there are no scores; score a model first, with prospr.score(model, batches)")
    for name, s in scores.items():
        if isinstance(s, Tensor) and s.is_floating_point() and s.numel() == 0:
            raise ScoreError(f"{name}: a score must be a non-empty tensor of floating-point numbers")
    _check_range([_range(name, s) for name, s in scores.items()], sum(s.numel() for s in scores.values()))


def _range(name: str, s: Tensor) -> tuple[float, float]:
    """The smallest and the largest score of a layer, in one look at it; an error where one is not a number."""
    if not isinstance(s, Tensor) or not s.is_floating_point():
        raise ScoreError(f"{name}: a score must be a non-empty tensor of floating-point numbers")
    if s.numel() == 0:
        return math.inf, -math.inf
    low, high = (end.item() for end in torch.aminmax(s.detach()))  # NaN where there is one
    if not (math.isfinite(low) and math.isfinite(high)):
        bad = sum(int((~torch.isfinite(piece)).sum()) for piece in pieces(s.detach().reshape(-1)))
        raise ScoreError(f"{name}: {bad} of {s.numel()} scores are NaN or infinite; check the loss and the data")
    return low, high


def _check_range(ranges: Iterable[tuple[float, float]], count: int) -> None:
    lows, highs = zip(*ranges, strict=True)
    if min(lows) == max(highs) and count > 1:
        raise ScoreError(
            f"all scores are {min(lows):g}, so they rank nothing: does the loss depend on the weights, or are the "
            "gradients zero? Use another batch, loss or method"
        )


def _warn_of_zeros(scores: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
    if any(s.min() < 0 for s in scores.values()):
        return
    zero = kept = total = 0
    for name, s in scores.items():
        for piece, mask in zip(pieces(s.reshape(-1)), pieces(masks[name].reshape(-1)), strict=True):
            zero += int(((piece == 0) & mask).sum())
            kept += int(mask.sum())
        total += s.numel()
    if zero and kept < total:
        warnings.warn(
            f"{zero} of the {kept} weights kept have a score of exactly 0: beyond the others the choice among them "
            "is by position. Use more data or a higher sparsity",
            ZeroScoreWarning,
            stacklevel=3,
        )


def select_shards(
    scores: Mapping[str, Tensor],
    sparsity: float,
    ranks: Ranks,
    *,
    scope: Literal["global", "layer"] = "global",
    keep_per_layer: int = 0,
) -> dict[str, Tensor]:
    """`prospr.select` of scores that no process has whole: each rank has a piece of every layer, and gets its mask.

    scores: the same names on every rank. A layer's pieces are in the order of ranks, one behind the other, as the
        rows of a sharded weight are; a rank may have none of it (a tensor without entries).
    scope, keep_per_layer: as in `prospr.select`, for whole layers.

    The masks are those of one process that has everything: exact counts, the same ties. Only counts are sent.
    """
    check_sparsity(sparsity)
    if scope not in ("global", "layer"):
        raise SettingError(f"scope={scope!r}: shards are selected by 'global' or 'layer'")
    _check_floor(keep_per_layer)
    if not scores:
        raise ScoreError("there are no scores; score a model first, with prospr.score(model, batches)")
    device = next(iter(scores.values())).device
    facts = {"the list of names": list(scores), "sparsity": sparsity, "scope": scope, "keep_per_layer": keep_per_layer}
    facts |= {"the kind of numbers": [str(s.dtype) for s in scores.values()]}
    with joined(ranks, "select_shards", device, facts) as team:
        ranges = [_range(name, s) for name, s in scores.items()]
        own = [s.numel() for s in scores.values()]
        said = [(own, ranges)] if team is None else team.gather((own, ranges))
        sizes = {name: sum(counts[i] for counts, _ in said) for i, name in enumerate(scores)}
        total = sum(sizes.values())
        _check_range([one for _, ranges in said for one in ranges], total)
        kept = max(1, round((1 - sparsity) * total))
        if scope == "global":
            return _global(scores, sizes, kept, keep_per_layer, team)
        counts = _whole(dict.fromkeys(sizes, kept / total), sizes, kept, keep_per_layer)
        return {name: largest([s], counts[name], team)[0] for name, s in scores.items()}


def _check_floor(keep_per_layer: int) -> None:
    if not isinstance(keep_per_layer, int) or keep_per_layer < 0:
        raise SettingError(f"keep_per_layer={keep_per_layer!r}: use a whole number, 0 or more")


def check_floor(sizes: Mapping[str, int], sparsity: float, keep_per_layer: int) -> None:
    """An error where so many weights in every layer are more than the sparsity leaves."""
    _check_floor(keep_per_layer)
    _least(sizes, max(1, round((1 - sparsity) * sum(sizes.values()))), keep_per_layer)


def _least(sizes: Mapping[str, int], kept: int, floor: int) -> dict[str, int]:
    """How many weights stay in each layer at least."""
    least = {name: min(floor, n) for name, n in sizes.items()}
    total = sum(least.values())
    if total > kept:
        raise SettingError(
            f"keep_per_layer={floor} needs {total} weights, and this sparsity keeps {kept}; lower one of them"
        )
    return least
