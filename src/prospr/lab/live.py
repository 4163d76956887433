"""How a sweep goes, while it does: a table of methods and sparsities in a terminal, plain lines elsewhere.

It is read from the folders of the runs, so that it is the same wherever they are run, and whoever runs them.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TextIO

from prospr.errors import FolderError
from prospr.lab.experiment import DENSE, Experiment
from prospr.lab.progress import Report, plain_lines
from prospr.lab.results import method_name
from prospr.lab.runs.files import is_locked
from prospr.lab.runs.folder import FOLDER, RunFolder

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Seen", "States", "live_table"]

State = Literal["done", "failed", "under way", "waiting"]
EVERY = 1.0  # seconds between looks at the folders
SHARE = 0.02  # of the time that looking may take, where folders are slow


@dataclass(frozen=True)
class Seen:
    """Where a run stands: the share of its epochs that is done, and its figure when it is finished."""

    state: State
    share: float = 0.0
    figure: float | None = None


class States:
    """Where runs stand, by their folders. What is finished is read once.

    A run that failed before is waiting: a sweep tries it again.
    """

    def __init__(self, experiments: Sequence[Experiment], folder: str | os.PathLike[str] = FOLDER) -> None:
        self._places = {one.identity: RunFolder(one, folder) for one in experiments}
        self._old_errors = {key: _stamp(place) for key, place in self._places.items()}
        self._final: dict[str, Seen] = {}

    def look(self) -> dict[str, Seen]:
        """{identity: where it stands}"""
        return {key: self._final.get(key) or self._look(key, place) for key, place in self._places.items()}

    def _look(self, key: str, place: RunFolder) -> Seen:
        if place.done:
            self._final[key] = Seen("done", 1.0, _figure(place))
            return self._final[key]
        if is_locked(place.lock):
            return Seen("under way", self._share(place))
        if _stamp(place) not in (None, self._old_errors[key]):
            return Seen("failed", self._share(place))
        return Seen("waiting", self._share(place))

    def _share(self, place: RunFolder) -> float:
        try:
            return min(1.0, len(place.metrics()) / max(1, place.experiment.trained_by.epochs))
        except (ValueError, OSError):  # damaged, or gone
            return 0.0


def _figure(place: RunFolder) -> float | None:
    try:
        return place.result().figure
    except (FolderError, KeyError):  # the sweep will say so
        return None


def _stamp(place: RunFolder) -> int | None:
    """Of the record of a failure: it tells an old one from a new one."""
    try:
        return (place.path / "error.json").stat().st_mtime_ns
    except FileNotFoundError:
        return None


@contextmanager
def live_table(
    experiments: Sequence[Experiment], folder: str | os.PathLike[str] = FOLDER, out: TextIO | None = None
) -> Generator[Report, None, None]:
    """Show how `experiments` go until the context ends; give a function for `sweep` to tell what ended.

    >>> with live_table([Experiment()]) as progress:
    ...     progress(1, 1, "prospr: accuracy 90.00 %")
    [1/1] prospr: accuracy 90.00 % (... left)
    """
    out = out or sys.stdout
    if not out.isatty() or find_spec("rich") is None:
        yield plain_lines(out)
        return
    from rich.console import Console
    from rich.live import Live

    table = _Table(experiments, folder)

    def report(done: float, total: int, text: str) -> None:
        table.last = text

    console = Console(file=out)
    live = Live(console=console, get_renderable=lambda: table.show(console.height), refresh_per_second=2)
    with live:
        yield report
        table.look(at_once=True)


class _Table:
    def __init__(self, experiments: Sequence[Experiment], folder: str | os.PathLike[str]) -> None:
        wanted = list({one.identity: one for one in experiments}.values())
        self._states = States(wanted, folder)
        self._cells: dict[tuple[str, str], list[str]] = {}
        places = {(one.dataset, one.network_name) for one in wanted}
        for one in wanted:
            where = f"{one.dataset} {one.network_name} " if len(places) > 1 else ""
            sparsity = "-" if one.method == DENSE else f"{100 * one.sparsity:g} %"
            self._cells.setdefault((sparsity, where + method_name(one)), []).append(one.identity)
        self._began = time.monotonic()
        self._next = 0.0
        self.last = ""
        self.look(at_once=True)
        self._first = self._work()

    def look(self, at_once: bool = False) -> None:
        """Read the folders, not too often."""
        start = time.monotonic()
        if start < self._next and not at_once:
            return
        self._seen = self._states.look()
        end = time.monotonic()
        self._next = end + max(EVERY, (end - start) / SHARE)

    def _work(self) -> float:
        """Runs that are over, with the parts of the others."""
        return sum(1.0 if one.state == "failed" else one.share for one in self._seen.values())

    def show(self, height: int) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        self.look()
        counts = Counter(one.state for one in self._seen.values())
        total, work = len(self._seen), self._work()
        told = ", ".join(f"{counts[state]} {state}" for state in ("done", "under way", "failed", "waiting"))
        head = Table.grid(padding=(0, 1))
        head.add_row(f"{total} runs", ProgressBar(total, work, width=40), f"{100 * work / total:.0f} %", self._left())
        methods = list(dict.fromkeys(method for _, method in self._cells))
        rows = list(dict.fromkeys(sparsity for sparsity, _ in self._cells))
        grid = Table("sparsity", *methods, box=None, padding=(0, 2, 0, 0))
        shown = rows if len(rows) + 6 <= height else [row for row in rows if self._moves(row)]
        for sparsity in shown[: max(1, height - 6)]:
            grid.add_row(sparsity, *(self._cell((sparsity, method)) for method in methods))
        key = Text(f"mean % done/all, > under way, ! failed;  {told}", style="dim")
        return Group(head, grid, key, Text(self.last, style="dim", no_wrap=True, overflow="ellipsis"))

    def _moves(self, sparsity: str) -> bool:
        """Whether a row has something to see where not all have room."""
        here = [self._seen[key].state for (row, _), keys in self._cells.items() if row == sparsity for key in keys]
        return "under way" in here or "failed" in here

    def _cell(self, place: tuple[str, str]) -> Any:
        from rich.text import Text

        seen = [self._seen[key] for key in self._cells.get(place, [])]
        if not seen:
            return ""
        counts = Counter(one.state for one in seen)
        figures = [one.figure for one in seen if one.figure is not None]
        words = [f"{100 * sum(figures) / len(figures):.2f}"] if figures else []
        words.append(f"{counts['done']}/{len(seen)}")
        words += [f"{counts[state]}{sign}" for state, sign in (("under way", ">"), ("failed", "!")) if counts[state]]
        style = "red" if counts["failed"] else "yellow" if counts["under way"] else ""
        return Text(" ".join(words), style=style or ("green" if counts["done"] == len(seen) else "dim"))

    def _left(self) -> str:
        """The time left, by what has been done since this table was made."""
        from prospr.lab.show import duration

        done, left = self._work() - self._first, len(self._seen) - self._work()
        spent = time.monotonic() - self._began
        return f"{duration(spent)}" + (f", {duration(spent / done * left)} left" if done > 0 and left > 0 else "")
