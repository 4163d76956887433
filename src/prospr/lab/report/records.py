"""Run folders as the page needs them: what was run, how far it came, and which runs can be compared. No torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from prospr.errors import FolderError, PruningError
from prospr.lab.experiment import Experiment
from prospr.lab.results import DENSE, Row, methods_of
from prospr.lab.runfolder import RunFolder, find_run

# What a folder that is damaged, or of another release, may fail with.
UNREADABLE = (PruningError, ValueError, TypeError, KeyError, AttributeError, OSError)

State = Literal["done", "failed", "unfinished"]


@dataclass(frozen=True)
class Record:
    """A run as far as it has come. What is not there yet is empty."""

    experiment: Experiment
    folder: Path
    state: State
    headline: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    epochs: Sequence[Mapping[str, float]] = ()
    sizes: Mapping[str, Any] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    error: str | None = None
    traceback: str = ""

    @property
    def figure(self) -> float | None:
        """The figure to quote; None where there is none, or it is no number."""
        value = self.figures.get(self.headline, math.nan)
        return None if math.isnan(value) else value


@dataclass(frozen=True)
class Gathered:
    """The runs that were found. `unread` says why of each that could not be read; `copies` were left out."""

    records: Sequence[Record]
    unread: Mapping[Path, str]
    copies: Sequence[Path] = ()


@dataclass(frozen=True)
class Setup:
    """Runs that differ in method, sparsity and seed only: the same network, data and training.

    labels: the name of each record's method here, with the settings of pruning in which the runs differ.
    common: the settings of pruning in which they agree and are not as by default.
    """

    records: Sequence[Record]
    labels: Sequence[str]
    common: Mapping[str, Any]

    @property
    def title(self) -> str:
        one = self.records[0].experiment
        settings = "".join(f", {key} {value}" for key, value in one.settings.items())
        changes = {**changed(one.data), **{k: v for k, v in changed(one.training).items() if k != "epochs"}}
        more = "".join(f", {words(key, value)}" for key, value in {**changes, **self.common}.items())
        epochs = f"{one.trained_by.epochs} epochs by {one.recipe_name}"
        return f"{one.network_name}{settings} on {one.dataset}, {epochs}{more}"

    @property
    def methods(self) -> list[str]:
        """The methods in the order of the rows, which gives them their colours; those with no run that ended last."""
        return list(dict.fromkeys([*methods_of(self.rows), *(label for label in self.labels if label != DENSE)]))

    @property
    def rows(self) -> list[Row]:
        """The runs that ended, well or not, as rows of a comparison."""
        pairs = zip(self.records, self.labels, strict=True)
        return [_row(record, label) for record, label in pairs if record.state != "unfinished"]


def gather(runs: Iterable[str | os.PathLike[str]]) -> Gathered:
    """Every run in `runs`, folders of runs or of one run each. An experiment that is there twice is taken once, done if
    one of them is.

    >>> gather(["no such folder"])
    Traceback (most recent call last):
    prospr.errors.FolderError: no such folder: there is no run in it; give a folder that `prospr run` wrote to
    """
    found: dict[str, Record] = {}
    unread: dict[Path, str] = {}
    copies: list[Path] = []
    for home in {path.resolve(): path for path in _homes(runs)}.values():
        try:
            record = read(find_run(str(home)))
        except UNREADABLE as error:
            unread[home] = f"{type(error).__name__}: {error}"
            continue
        identity = record.experiment.identity
        before = found.get(identity)
        if before is None:
            found[identity] = record
            continue
        better = record if record.state == "done" != before.state else before
        found[identity] = better
        copies.append(before.folder if better is record else record.folder)
    return Gathered(list(found.values()), unread, copies)


def read(place: RunFolder) -> Record:
    """What lies in the folder of a run."""
    one, path = place.experiment, place.path
    if place.done:
        r = place.result()
        return Record(
            one, path, "done", r.headline, r.figures, r.epochs, r.sizes, r.seconds, r.environment, r.notes
        )  # fmt: skip
    failed, epochs = place.error(), place.metrics()
    if failed is None:
        return Record(one, path, "unfinished", epochs=epochs)
    return Record(
        one,
        path,
        "failed",
        epochs=epochs,
        environment=failed.get("environment", {}),
        error=str(failed.get("error", "an error that was not written down")),
        traceback=str(failed.get("traceback", "")),
    )


def setups(records: Sequence[Record]) -> list[Setup]:
    """The records that can be compared with each other, most first; of each setup the dense ones first, then by method,
    sparsity and seed."""
    groups: dict[str, list[Record]] = {}
    for record in sorted(records, key=_order):
        key = replace(record.experiment, method=DENSE, seed=0).identity  # a dense run has no settings of pruning
        groups.setdefault(key, []).append(record)
    return [_setup(group) for group in sorted(groups.values(), key=len, reverse=True)]


def changed(part: Any) -> dict[str, Any]:
    """The fields of a group of settings that are not as by default."""
    return {one.name: v for one in fields(part) if (v := getattr(part, one.name)) != getattr(type(part)(), one.name)}


def words(name: str, value: Any) -> str:
    """
    >>> words("round_to", 8), words("shrink", True), words("drops", (3, 7))
    ('round to 8', 'shrink', 'drops 3 7')
    """
    name = name.replace("_", " ")
    if value is True:
        return name
    return f"{name} {' '.join(map(str, value)) if isinstance(value, (tuple, list)) else value}"


def _homes(runs: Iterable[str | os.PathLike[str]]) -> Iterable[Path]:
    for run in map(Path, runs):
        here = [run] if (run / "experiment.json").is_file() else [p.parent for p in run.glob("*/experiment.json")]
        if not here:
            raise FolderError(f"{run}: there is no run in it; give a folder that `prospr run` wrote to")
        yield from sorted(here)


def _setup(records: Sequence[Record]) -> Setup:
    pruned = [changed(record.experiment.pruning) for record in records if record.experiment.method != DENSE]
    common = {key: v for key, v in pruned[0].items() if all(key in o and o[key] == v for o in pruned)} if pruned else {}
    labels = []
    for record in records:
        own = {k: v for k, v in changed(record.experiment.pruning).items() if k not in common}
        dense = record.experiment.method == DENSE
        labels.append(DENSE if dense else ", ".join([record.experiment.method, *(words(k, v) for k, v in own.items())]))
    return Setup(records, labels, common)


def _order(record: Record) -> tuple[Any, ...]:
    one = record.experiment
    return (one.dataset, one.network_name, one.method != DENSE, one.method, str(one.pruning), one.sparsity, one.seed)


def _row(record: Record, label: str) -> Row:
    one, sizes = record.experiment, record.sizes
    dense = one.method == DENSE
    loss = record.figures.get("loss")
    return Row(
        method=label,
        sparsity=0.0 if dense else float(one.sparsity),
        seed=one.seed,
        accuracy=record.figure,
        loss=loss,
        kept=sizes.get("kept"),
        total=sizes.get("total"),
        score_seconds=None if dense else record.seconds.get("score"),
        train_seconds=record.seconds.get("train"),
        error=record.error,
        layers=dict(sizes.get("layers", {})),
        effective=sizes.get("effective_density"),
    )
