"""The rows a comparison gives, and what is asked of them: cells, paired differences, a CSV file."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prospr.lab.stats import Summary, summarise

DENSE = "dense"

COLUMNS = (
    "method", "check", "sparsity", "seed", "accuracy", "loss", "kept", "total", "effective", "score_seconds",
    "train_seconds", "error",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One run: one method at one sparsity with one seed. A run that failed has an `error` and no accuracy."""

    method: str
    sparsity: float
    seed: int
    accuracy: float | None = None
    loss: float | None = None
    kept: int | None = None
    total: int | None = None
    score_seconds: float | None = None
    train_seconds: float | None = None
    error: str | None = None
    layers: dict[str, float] = field(default_factory=dict)
    """The share of weights kept in each prunable parameter."""
    effective: float | None = None
    """The share of weights that are kept and on a path from input to output; None where that is not known."""
    check: str = ""
    """Empty, or the sanity check this run is: "shuffled", "redrawn" or "inverted"."""


def methods_of(rows: Sequence[Row]) -> list[str]:
    """The pruning methods, in the order of the rows; the dense network is not one of them."""
    return [method for method in dict.fromkeys(row.method for row in rows) if method != DENSE]


def sparsities_of(rows: Sequence[Row]) -> list[float]:
    """The sparsities of the pruned networks, rising."""
    return sorted({row.sparsity for row in rows if row.method != DENSE})


def cell(rows: Sequence[Row], method: str, sparsity: float | None = None, check: str = "") -> list[Row]:
    """The rows of one method at one sparsity, or at all of them; sanity checks only where one is asked for."""
    return [r for r in rows if (r.method, r.check) == (method, check) and sparsity in (None, r.sparsity)]


def checks_of(rows: Sequence[Row]) -> list[tuple[str, float, str]]:
    """Every (method, sparsity, check) there is, in the order of the rows."""
    return list(dict.fromkeys((row.method, row.sparsity, row.check) for row in rows if row.check))


def accuracies(rows: Sequence[Row]) -> dict[int, float]:
    """{seed: accuracy} of the runs that did not fail."""
    return {row.seed: row.accuracy for row in rows if row.accuracy is not None}


def accuracy(rows: Sequence[Row]) -> Summary:
    """Mean, deviation and interval of the accuracies, 0 to 1.

    >>> accuracy([Row("snip", 0.9, 0, 0.5), Row("snip", 0.9, 1, 0.75), Row("snip", 0.9, 2, error="collapsed")]).mean
    0.625
    """
    return summarise(list(accuracies(rows).values()))


def difference(ours: Sequence[Row], theirs: Sequence[Row]) -> Summary:
    """Our accuracy minus theirs, seed by seed, over the seeds both have.

    >>> ours = [Row("snip", 0.9, 0, 0.5), Row("snip", 0.9, 1, 0.75)]
    >>> difference(ours, [Row("random", 0.9, 1, 0.5), Row("random", 0.9, 0, 0.25)]).mean
    0.25
    """
    left, right = accuracies(ours), accuracies(theirs)
    return summarise([left[seed] - right[seed] for seed in left if seed in right])


def write_csv(rows: Sequence[Row], path: str | Path) -> Path:
    """Write one line a run, one column a field and one a layer's density; the file appears whole or not at all."""
    path = Path(path)
    layers = list(dict.fromkeys(layer for row in rows for layer in row.layers))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    with unfinished.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*COLUMNS, *(f"density:{layer}" for layer in layers)])
        for row in rows:
            fields = [getattr(row, column) for column in COLUMNS]
            writer.writerow([*fields, *(row.layers.get(layer) for layer in layers)])
    os.replace(unfinished, path)
    return path
