"""Methods x sparsities x seeds, paired: for one seed all methods start from the same weights and see the same data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

import prospr
from prospr.errors import PruningError, SettingError
from prospr.lab.data import Augment, Batches, Dataset, Split
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
    data: Dataset[Split]
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
        return self.data.train.batches(batch_size, seed, self.augment)


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
            try:
                choice = _Choice(comparison, find(method), seed)
            except PruningError as error:
                checks = comparison.checks if label == next(iter(comparison.methods)) else ()
                failed = [Row(label, p, seed, error=_reason(error)) for p in comparison.sparsities]
                yield from failed
                yield from (replace(failed[-1], sparsity=max(comparison.sparsities), check=check) for check in checks)
                continue
            for sparsity in comparison.sparsities:
                row = Row(label, sparsity, seed)
                done = _run(comparison, row, choice.masks, tick)
                yield replace(done, score_seconds=choice.seconds)
                if label == next(iter(comparison.methods)) and sparsity == max(comparison.sparsities):
                    for check in comparison.checks:
                        yield _run(comparison, replace(row, check=check), getattr(choice, check), tick)


class _Choice:
    """What one method keeps for one seed, at any sparsity. A one-shot method scores once for all of them."""

    def __init__(self, comparison: Comparison, method: prospr.Method, seed: int) -> None:
        self.comparison, self.method, self.seed = comparison, method, seed
        self.batches = comparison.batches(seed, comparison.score_batch_size)
        self.scores: dict[str, Tensor] | None = None
        start = time.perf_counter()
        if method.rule.rounds == 1:
            self.scores = prospr.score(comparison.network(seed), self.batches, method=method, seed=seed)
        self.seconds = time.perf_counter() - start
        self._found: dict[float, prospr.Masks] = {}

    def masks(self, sparsity: float) -> prospr.Masks:
        if sparsity not in self._found:
            start = time.perf_counter()
            if self.scores is not None:
                self._found[sparsity] = prospr.select(self.scores, sparsity, scope=self.method.scope)
            else:
                model = self.comparison.network(self.seed)
                self._found[sparsity] = prospr.prune(
                    model, self.batches, sparsity, method=self.method, seed=self.seed, collapse="ignore"
                )
                self.seconds = time.perf_counter() - start
        return self._found[sparsity]

    # The sanity checks; see prospr.sanity.

    def shuffled(self, sparsity: float) -> prospr.Masks:
        return prospr.sanity.shuffle(self.masks(sparsity), self.seed)

    def redrawn(self, sparsity: float) -> prospr.Masks:
        return self.masks(sparsity)  # the weights are other ones

    def inverted(self, sparsity: float) -> prospr.Masks:
        if self.scores is None:
            raise SettingError("a method that works in rounds has no one score to invert")
        return prospr.select(prospr.sanity.invert(self.scores), sparsity, scope=self.method.scope)


def _run(comparison: Comparison, row: Row, choose: Callable[[float], prospr.Masks], tick: Tick) -> Row:
    try:
        masks = choose(row.sparsity)
    except PruningError as error:
        return replace(row, error=_reason(error))
    row = _masked(comparison, row, masks)
    return row if row.error else _train(comparison, row, masks, tick)


def _masked(comparison: Comparison, row: Row, masks: prospr.Masks) -> Row:
    """`row` with what the masks leave of the network; with an error where they cut it."""
    seen = prospr.inspect(comparison.network(row.seed), masks, comparison.data.train.inputs(0, 1))
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
