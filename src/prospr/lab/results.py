"""The rows that folders of runs give, and what is asked of them: cells, paired differences, CSV and Parquet files.

Nothing here imports torch.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from prospr.atomic import write, write_text
from prospr.errors import FolderError, SettingError
from prospr.lab.experiment import DENSE, Experiment
from prospr.lab.optional import optional
from prospr.lab.runs.records import Record, gather
from prospr.lab.stats import LEAST, Summary, summarise

COLUMNS = (
    "method", "check", "sparsity", "seed", "accuracy", "loss", "kept", "total", "effective", "score_seconds",
    "train_seconds", "error",
)  # fmt: skip
PLACE = ("dataset", "network", "setup", "metric", "run", "folder")


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
    dataset: str = ""
    network: str = ""
    setup: str = ""
    """What else the run was, apart from method, sparsity and seed; rows are compared where this is the same."""
    metric: str = "accuracy"
    """What `accuracy` holds: "accuracy", or "mean_iou" for segmentation."""
    run: str = ""
    """The run's identity."""
    folder: str = ""


@dataclass(frozen=True)
class Verdict:
    """Whether method `a` was shown to be better than `b`, by differences paired by seed."""

    a: str
    b: str
    sparsity: float
    difference: Summary
    says: Literal["better", "worse", "not shown"]

    def __str__(self) -> str:
        versus, where = self.difference, f"at {100 * self.sparsity:g} %"
        if versus.n < LEAST:
            return f"{self.a} against {self.b} {where}: not shown; {versus.n} seeds both have, and it takes {LEAST}"
        low, high = f"{100 * versus.low:+.2f}", f"{100 * versus.high:+.2f}"
        told = f"{100 * versus.mean:+.2f} points (95 % interval {low} to {high}, {versus.n} seeds)"
        word = {"better": "is better than", "worse": "is worse than", "not shown": "not shown to differ from"}
        return f"{self.a} {word[self.says]} {self.b} {where}: {told}"


def load(folders: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[Row]:
    """One row a run of the folders, finished or failed; a run that lies in several is taken once.

    A method whose settings were changed is a method of its own: "prospr (steps=1)".

    >>> import tempfile
    >>> from prospr.lab.experiment import Training
    >>> from prospr.lab.run import run
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = run(Experiment(method="snip", training=Training(epochs=1)), folder)
    ...     (row,) = load(folder)
    >>> row.method, row.dataset, row.setup, row.accuracy == result.figure
    ('snip', 'digits', 'digits, epochs=1', True)
    """
    several = [folders] if isinstance(folders, (str, os.PathLike)) else list(folders)
    for folder in map(Path, several):
        if not folder.is_dir():
            raise FolderError(f"{folder}: there is no such folder of runs")
    kinds = ("experiment.json", "*/experiment.json")  # of a run, and of a folder of runs
    gathered = gather(folder for folder in several if any(any(Path(folder).glob(kind)) for kind in kinds))
    for path, why in gathered.unread.items():
        raise FolderError(f"{path}: this run cannot be read ({why}); mend it, or take it out of the folder")
    ended = [record for record in gathered.records if record.state != "unfinished"]
    rows = [row_of(record, method_name(record.experiment)) for record in ended]
    order = sorted(rows, key=lambda row: (row.method != DENSE, row.method, row.sparsity, row.check, row.seed))
    return sorted(order, key=lambda row: (row.dataset, row.network, row.setup))


def setups_of(rows: Sequence[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """{(data set, network, setup): rows}: within one of them only methods, sparsities and seeds differ."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.dataset, row.network, row.setup), []).append(row)
    return found


def verdict(rows: Sequence[Row], a: str, b: str, sparsity: float) -> Verdict:
    """Is method `a` better than `b` at `sparsity`? It is where the 95 % interval of the paired differences says so.

    It takes three seeds that both have, and differences that are not all the same. `b` may be "dense". Of twenty
    verdicts on methods that are alike, one is expected to find a difference.

    >>> rows = [Row("snip", 0.9, s, 0.8 + s / 100) for s in range(3)] + [Row("random", 0.9, s, 0.7) for s in range(3)]
    >>> print(verdict(rows, "snip", "random", 0.9))
    snip is better than random at 90 %: +11.00 points (95 % interval +8.52 to +13.48, 3 seeds)
    """
    if len(setups_of(rows)) > 1:
        raise SettingError("these rows are of several data sets, networks or recipes; take one of `setups_of(rows)`")
    pairs = {name: cell(rows, name, None if name == DENSE else sparsity) for name in (a, b)}
    for name, here in pairs.items():
        if not here:
            known = ", ".join(dict.fromkeys(row.method for row in rows))
            raise SettingError(f"there is no run of {name!r} at {sparsity:g}; the methods are {known}")
    versus = difference(pairs[a], pairs[b])
    return Verdict(
        a, b, sparsity, versus, "not shown" if not versus.settled else "better" if versus.mean > 0 else "worse"
    )


def means(rows: Sequence[Row], baseline: str | None = None) -> list[dict[str, Any]]:
    """A row a method and sparsity of every setup: mean, deviation, number of runs, and how many failed. Sanity checks
    come last, as "prospr, shuffled".

    baseline: a method that the others are compared to at their sparsity: the paired difference, its interval, and the
        verdict. What is not known is None.

    >>> rows = [Row("snip", 0.9, s, 0.8 + s / 100) for s in range(3)] + [Row("random", 0.9, s, 0.7) for s in range(3)]
    >>> [(row["method"], row["n"], row["verdict"]) for row in means(rows, "random")]
    [('snip', 3, 'better'), ('random', 3, None)]
    """
    if baseline is not None and baseline not in {row.method for row in rows}:
        known = ", ".join(dict.fromkeys(row.method for row in rows))
        raise SettingError(f"baseline={baseline!r}: there is no such method in these runs; they have {known}")
    found = []
    for (dataset, network, setup), here in setups_of(rows).items():
        wanted = [(method, share) for share in sparsities_of(here) for method in methods_of(here)]
        for method, share, check in [(DENSE, None, ""), *((*one, "") for one in wanted), *checks_of(here)]:
            these = cell(here, method, share, check)
            if not these:
                continue
            seen, name = accuracy(these), f"{method}, {check}" if check else method
            row: dict[str, Any] = {"dataset": dataset, "network": network, "setup": setup, "method": name}
            row |= {"sparsity": share, "metric": these[0].metric, "mean": _known(seen.mean), "sd": _known(seen.sd)}
            row |= {"n": seen.n, "failed": sum(one.error is not None for one in these)}
            found.append(row if baseline is None else {**row, **_against(here, method, baseline, share, check)})
    return found


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
    """Write one line a run, one column a field and one a layer's density; the file appears whole or not at all.

    Where the rows are of folders of runs there are columns for those too.
    """
    path = Path(path)
    columns = COLUMNS + PLACE if any(row.run for row in rows) else COLUMNS
    layers = list(dict.fromkeys(layer for row in rows for layer in row.layers))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*columns, *(f"density:{layer}" for layer in layers)])
    for row in rows:
        fields = [getattr(row, column) for column in columns]
        writer.writerow([*fields, *(row.layers.get(layer) for layer in layers)])
    write_text(path, text.getvalue())
    return path


def write_parquet(rows: Sequence[Row], path: str | Path) -> Path:
    """Write one line a run, one typed column a field, for DuckDB, pandas and others; `layers` is a map.

    The columns are always the same, so that files of several machines can be read as one. It takes pyarrow. The same
    rows give the same bytes, and the file appears whole or not at all.
    """
    arrow = optional("pyarrow", "prospect-pruning[parquet]")
    parquet = optional("pyarrow.parquet", "prospect-pruning[parquet]")
    kinds = {"int": arrow.int64(), "float": arrow.float64(), "str": arrow.string()}
    kinds["dict[str, float]"] = arrow.map_(arrow.string(), arrow.float64())
    types = {one.name: kinds[str(one.type).removesuffix(" | None")] for one in fields(Row)}
    columns = {
        name: arrow.array([_stored(getattr(row, name)) for row in rows], types[name])
        for name in (*COLUMNS, *PLACE, "layers")
    }
    write(Path(path), lambda temporary: parquet.write_table(arrow.table(columns), temporary))
    return Path(path)


def row_of(record: Record, method: str) -> Row:
    """The row of a run that has ended or failed, its method under the name it has here."""
    one, sizes, seconds = record.experiment, record.sizes, record.seconds
    dense = one.method == DENSE
    return Row(
        method=method,
        sparsity=0.0 if dense else float(one.sparsity),
        seed=one.seed,
        accuracy=record.figure,
        metric=record.headline or "accuracy",  # a run that failed has no figures
        loss=record.figures.get("loss"),
        kept=sizes.get("kept"),
        total=sizes.get("total"),
        effective=sizes.get("effective_density"),
        layers=dict(sizes.get("layers", {})),
        score_seconds=None if dense else seconds.get("score"),
        train_seconds=seconds.get("train"),
        error=record.error,
        dataset=one.dataset,
        network=one.network_name,
        setup=_setup(one),
        run=one.identity,
        folder=str(record.folder.parent),
        check="" if dense else one.pruning.check or "",
    )


def method_name(one: Experiment, without: Iterable[str] = ()) -> str:
    """A method with the settings of pruning that were changed, apart from those in `without`.

    >>> from prospr.lab.experiment import Pruning
    >>> method_name(Experiment(pruning=Pruning(steps=1, scope="layer", check="shuffled")), without=["scope"])
    'prospr (steps=1)'
    """
    left_out = {f"pruning.{name}" for name in (*without, "check")}
    changes = [text for name, text in one.differences() if name.startswith("pruning.") and name not in left_out]
    return f"{one.method} ({', '.join(changes)})" if changes else one.method


def _setup(one: Experiment) -> str:
    """The recipe, and whatever differs from the usual and is not the method's."""
    left_out = ("dataset", "network", "method", "sparsity", "seed", "recipe", "pruning.")
    return ", ".join([one.recipe_name, *(text for name, text in one.differences() if not name.startswith(left_out))])


def _against(rows: Sequence[Row], method: str, baseline: str, share: float | None, check: str) -> dict[str, Any]:
    """The columns of `means` that compare a method to the baseline; a sanity check is compared to its method alone."""
    other = cell(rows, baseline, None if baseline == DENSE else share)
    if method == baseline or share is None or check or not other or not cell(rows, method, share):
        return {"baseline": baseline, "verdict": None, "difference": None, "low": None, "high": None}
    told = verdict(rows, method, baseline, share)
    versus = told.difference
    edges = {"low": _known(versus.low), "high": _known(versus.high)}
    return {"baseline": baseline, "verdict": told.says, "difference": _known(versus.mean), **edges}


def _stored(value: Any) -> Any:
    return list(value.items()) if isinstance(value, dict) else value


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
