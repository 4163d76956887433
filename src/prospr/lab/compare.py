"""Methods x sparsities x seeds, paired: for one seed all methods start from the same weights and see the same data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

import prospr
from prospr.errors import PruningError
from prospr.lab.data import Augment, Batches, Dataset
from prospr.lab.recipes import Recipe
from prospr.lab.results import DENSE, Row
from prospr.lab.train import train
from prospr.registry import find

Progress = Callable[[float, int, str], None]
Tick = Callable[[float, str], None]
CHECKS = ("shuffled", "redrawn", "inverted")
OTHER_WEIGHTS = 1_000_003  # added to a seed: the redrawn network's


@dataclass(frozen=True)
class Comparison:
    """What is compared, under one recipe.

    `checks` are sanity checks of the first method at the highest sparsity: its mask shuffled within layers, its mask on
    redrawn weights, the mask of its inverted scores.

    `network(seed)` makes a network whose weights depend on the seed alone. `methods` maps a label to what
    `prospr.score` takes as its method: a name or an object. Scores are taken on batches of `score_batch_size`.
    On a GPU, `network` gives a network that is there and `data` is moved with `data.to("cuda")`.
    """

    network: Callable[[int], nn.Module]
    data: Dataset
    recipe: Recipe
    methods: Mapping[str, Any]
    sparsities: Sequence[float]
    seeds: Sequence[int]
    score_batch_size: int = 256
    augment: Augment | None = None
    checks: Sequence[str] = CHECKS

    def __post_init__(self) -> None:
        unknown = [check for check in self.checks if check not in CHECKS]
        if unknown:
            raise ValueError(f"unknown check {unknown[0]!r}; known checks: {', '.join(CHECKS)}")

    @property
    def runs(self) -> int:
        """How many networks are trained, the dense ones and the sanity checks included."""
        checks = len(self.checks) if self.methods and self.sparsities else 0
        return len(self.seeds) * (1 + len(self.methods) * len(self.sparsities) + checks)

    def batches(self, seed: int, batch_size: int) -> Batches:
        train_on = self.data.train
        return Batches(train_on.images, train_on.labels, batch_size, seed, self.augment)


def compare(comparison: Comparison, progress: Progress | None = None) -> list[Row]:
    """Train every network of `comparison`; one row each, seed by seed, the dense network first.

    `progress(runs_done, runs, text)` is called after every epoch (with a fraction of a run) and after every run. A
    method that raises `prospr.PruningError` gives rows with that error, and the comparison goes on.

    >>> from prospr.lab.data import digits
    >>> from prospr.lab.models import build
    >>> one = Comparison(
    ...     network=lambda seed: build("small_convnet", seed=seed), data=digits(),
    ...     recipe=Recipe(epochs=1, batch_size=256, lr=0.1), methods={"snip": "snip"}, sparsities=[0.9], seeds=[0],
    ...     checks=(),
    ... )
    >>> [(row.method, row.kept, row.total) for row in compare(one)]
    [('dense', None, None), ('snip', 1659, 16592)]
    """
    report = progress or (lambda done, total, text: None)
    rows: list[Row] = []
    for row in _rows(comparison, lambda fraction, text: report(len(rows) + fraction, comparison.runs, text)):
        rows.append(row)
        report(len(rows), comparison.runs, describe(row))
    return rows


def describe(row: Row) -> str:
    """A run and its outcome in one line.

    >>> describe(Row("snip", 0.95, 1, accuracy=0.875))
    'snip 95 % seed 1: 87.5 %'
    """
    outcome = f"{100 * row.accuracy:.1f} %" if row.accuracy is not None else f"failed: {row.error}"
    return f"{_label(row)}: {outcome}"


def _label(row: Row) -> str:
    if row.method == DENSE:
        return f"{DENSE} seed {row.seed}"
    check = f", {row.check}," if row.check else ""
    return f"{row.method}{check} {100 * row.sparsity:g} % seed {row.seed}"


def _rows(comparison: Comparison, tick: Tick) -> Iterator[Row]:
    """Every run in turn; `tick(fraction, text)` tells how far the one under way has come."""
    for seed in comparison.seeds:
        yield _train(comparison, Row(DENSE, 0.0, seed), None, tick)
        for label, method in comparison.methods.items():
            tick(0.0, f"{label} seed {seed}: scoring")
            start = time.perf_counter()
            try:
                scores = _score(comparison, method, seed)
            except PruningError as error:
                for sparsity in comparison.sparsities:
                    yield Row(label, sparsity, seed, error=_reason(error))
                continue
            seconds = time.perf_counter() - start
            for sparsity in comparison.sparsities:
                row = Row(label, sparsity, seed, score_seconds=seconds)
                scope = find(method).scope
                yield _run(comparison, row, lambda s=scores, p=sparsity, o=scope: prospr.select(s, p, scope=o), tick)
                if label == next(iter(comparison.methods)) and sparsity == max(comparison.sparsities):
                    yield from _checks(comparison, row, scores, scope, tick)


def _checks(comparison: Comparison, row: Row, scores: dict[str, Tensor], scope: Any, tick: Tick) -> Iterator[Row]:
    """The sanity checks of one run; see prospr.sanity."""
    chosen = lambda s: prospr.select(s, row.sparsity, scope=scope)  # noqa: E731
    ways = {
        "shuffled": lambda: prospr.sanity.shuffle(chosen(scores), row.seed),
        "redrawn": lambda: chosen(scores),
        "inverted": lambda: chosen(prospr.sanity.invert(scores)),
    }
    for check in comparison.checks:
        yield _run(comparison, replace(row, check=check, score_seconds=None), ways[check], tick)


def _run(comparison: Comparison, row: Row, choose: Callable[[], prospr.Masks], tick: Tick) -> Row:
    try:
        masks = choose()
    except PruningError as error:
        return replace(row, error=_reason(error))
    row = _masked(comparison, row, masks)
    return row if row.error else _train(comparison, row, masks, tick)


def _score(comparison: Comparison, method: Any, seed: int) -> dict[str, Tensor]:
    model = comparison.network(seed)
    batches = comparison.batches(seed, comparison.score_batch_size)
    return prospr.score(model, batches, method=method, seed=seed)


def _masked(comparison: Comparison, row: Row, masks: prospr.Masks) -> Row:
    """`row` with what the masks leave of the network; with an error where they cut it."""
    seen = prospr.inspect(comparison.network(row.seed), masks, comparison.data.train.images[:1])
    row = replace(row, kept=masks.kept, total=masks.total, effective=seen.effective_density, layers=masks.densities())
    if seen.connected is False:
        empty = ", ".join(seen.empty) or "no layer is empty"
        return replace(row, error=f"CollapseError: no path is left from input to output ({empty})")
    return row


def _train(comparison: Comparison, row: Row, masks: Mapping[str, Tensor] | None, tick: Tick) -> Row:
    """`row` with what training a fresh network under `masks` gave."""
    recipe = comparison.recipe
    text = _label(row)
    result = train(
        comparison.network(row.seed + (OTHER_WEIGHTS if row.check == "redrawn" else 0)),
        comparison.batches(row.seed, recipe.batch_size),
        comparison.data.test,
        recipe,
        masks,
        progress=lambda epochs, _: tick(epochs / recipe.epochs, text) if epochs < recipe.epochs else None,
    )
    return replace(row, accuracy=result.accuracy, loss=result.loss, train_seconds=result.seconds)


def _reason(error: PruningError) -> str:
    return f"{type(error).__name__}: {error}"
