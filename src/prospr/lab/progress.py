"""A progress bar with the time left: rich's in a terminal, plain lines elsewhere or where rich is missing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TextIO

Report = Callable[[float, int, str], None]


@contextmanager
def progress_bar(title: str, out: TextIO | None = None) -> Generator[Report, None, None]:
    """Give a function `report(done, total, text)`; `done` may be a fraction. `out` is by default sys.stdout.

    >>> with progress_bar("training") as report:
    ...     report(1, 2, "first run")
    [1/2] first run (... left)
    """
    out = out or sys.stdout
    if out.isatty() and find_spec("rich") is not None:
        with _rich_bar(title, out) as report:
            yield report
    else:
        yield plain_lines(out)


@contextmanager
def _rich_bar(title: str, out: TextIO) -> Generator[Report, None, None]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[text]}", markup=False),
    )
    with Progress(*columns, console=Console(file=out)) as bar:
        task = bar.add_task(title, total=None, text="")

        def report(done: float, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total, text=text)

        yield report


def plain_lines(out: TextIO | None = None) -> Report:
    """Print one line for each whole step done, with the time left."""
    start = time.perf_counter()
    printed = 0

    def report(done: float, total: int, text: str) -> None:
        nonlocal printed
        if int(done) <= printed:
            return
        printed = int(done)
        left = (time.perf_counter() - start) / done * (total - done)
        print(f"[{printed}/{total}] {text} ({left:.0f} s left)", file=out, flush=True)

    return report
