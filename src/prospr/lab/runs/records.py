"""Runs as they lie in folders, finished, failed or under way: what was run and how far it came. No torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from prospr.errors import FolderError, PruningError
from prospr.lab.experiment import Experiment
from prospr.lab.runs.folder import RunFolder, find_run

__all__ = ["Gathered", "Record", "gather", "homes", "read"]

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
    memory: Mapping[str, int] = field(default_factory=dict)
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
    for home in {path.resolve(): path for path in homes(runs)}.values():
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
            one, path, "done", r.headline, r.figures, r.epochs, r.sizes, r.seconds, r.memory, r.environment, r.notes
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


def homes(runs: Iterable[str | os.PathLike[str]]) -> Iterator[Path]:
    """The folders of single runs in `runs`, which are folders of runs or of one run each."""
    for run in map(Path, runs):
        here = [run] if (run / "experiment.json").is_file() else [p.parent for p in run.glob("*/experiment.json")]
        if not here:
            raise FolderError(f"{run}: there is no run in it; give a folder that `prospr run` wrote to")
        yield from sorted(here)
