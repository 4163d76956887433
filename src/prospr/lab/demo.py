"""A comparison small enough to watch: prune a network for handwritten digits four ways, train, and write the page.

    python -m prospr.lab.demo --out demo

Nothing is downloaded. What is finished is not run again. torch is imported only once the arguments are understood.
"""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prospr.lab.experiment import Experiment
    from prospr.lab.results import Row

METHODS = ("prospr", "snip", "magnitude", "random")
BASELINE = "random"
SPARSITIES = (0.8, 0.9, 0.95)  # the methods agree below and collapse above


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo as the command line asks."""
    options = parser().parse_args(arguments)
    import torch

    from prospr.lab.progress import progress_bar
    from prospr.lab.report import report_runs
    from prospr.lab.results import load, write_csv
    from prospr.lab.sweep import sweep

    # So small a network trains faster on one core than on several, and gives the same numbers on every machine.
    torch.set_num_threads(1)
    wanted = experiments(range(options.seeds), quick=options.quick)
    start = time.perf_counter()
    with progress_bar("training") as progress:
        results = sweep(wanted, options.out / "runs", "cpu", progress, processes=min(2, os.cpu_count() or 1))
    seconds = time.perf_counter() - start
    mine = {one.identity for one in wanted}
    rows = [row for row in load(options.out / "runs") if row.run in mine]
    print_table(rows)
    table = write_csv(rows, options.out / "results.csv")
    page = report_runs(
        [result.folder for result in results],
        options.out / "report.html",
        baseline=BASELINE,
        title="Handwritten digits, pruned before training",
        command=command(options),
    )
    print(f"\n{len(rows)} networks in {seconds:.0f} s. Every run: {table}\nOpen the report: {page}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m prospr.lab.demo",
        description="Compare pruning methods on handwritten digits, in a minute or two and without a download.",
    )
    result.add_argument("--out", type=Path, default=Path("demo"), help="folder for the report (default: %(default)s)")
    result.add_argument("--seeds", type=_positive, default=3, help="networks per cell (default: %(default)s)")
    result.add_argument(
        "--quick", action="store_true", help="train for two epochs only: a look at the report in seconds"
    )
    return result


def experiments(seeds: Sequence[int], quick: bool = False) -> list[Experiment]:
    """What the demo compares: dense networks, every method at every sparsity, and the sanity checks of the first."""
    from prospr.lab.experiment import CHECKS, DENSE, Experiment, Training
    from prospr.lab.grid import grid

    base = Experiment(training=Training(epochs=2 if quick else None))
    dense = grid(base, method=[DENSE], seed=seeds)
    pruned = grid(base, seed=seeds, method=METHODS, sparsity=SPARSITIES)
    checks = [check for check in CHECKS if check != "inverted"]  # which is of one score, not of rounds
    checked = grid(base, method=METHODS[:1], sparsity=SPARSITIES[-1:], check=checks, seed=seeds)
    return [*dense, *pruned, *checked]


def print_table(rows: Sequence[Row]) -> None:
    """Print mean and deviation of every method at every sparsity."""
    from prospr.lab.report.words import percent, sparsity
    from prospr.lab.results import DENSE, accuracy, cell, methods_of, sparsities_of

    def shown(cells: Sequence[Row]) -> str:
        spread = accuracy(cells)
        return f"{percent(spread.mean)} (sd {percent(spread.sd)})" if spread.n > 1 else percent(spread.mean)

    shares = sparsities_of(rows)
    lines = [["test accuracy, %", *map(sparsity, shares)]]
    lines += [[method, *(shown(cell(rows, method, share)) for share in shares)] for method in methods_of(rows)]
    lines.append([f"{DENSE}: {shown(cell(rows, DENSE))}"])
    print()
    for line in lines:
        print("  ".join(text.ljust(16 if column == 0 else 15) for column, text in enumerate(line)).rstrip())


def command(options: argparse.Namespace) -> str:
    """The line that runs the same demo again."""
    words = ["python", "-m", "prospr.lab.demo", "--out", str(options.out), "--seeds", str(options.seeds)]
    return shlex.join([*words, *(["--quick"] if options.quick else [])])


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too few; give at least 1")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
