"""A comparison small enough to watch: prune a network for handwritten digits four ways, train, and write a report.

    python -m prospr.lab.demo --out demo

Nothing is downloaded. torch is imported only once the arguments are understood.
"""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prospr.lab.compare import Comparison
    from prospr.lab.results import Row

METHODS = ("prospr", "snip", "magnitude", "random")
BASELINE = "random"
SPARSITIES = (0.8, 0.9, 0.95)  # the methods agree below and collapse above


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo as the command line asks."""
    options = parser().parse_args(arguments)
    import torch

    from prospr.lab.compare import compare
    from prospr.lab.progress import progress_bar
    from prospr.lab.report import write_report
    from prospr.lab.results import write_csv

    # So small a network trains faster on one core than on several, and gives the same numbers on every machine.
    torch.set_num_threads(1)
    comparison = make(range(options.seeds), quick=options.quick)
    start = time.perf_counter()
    with progress_bar("training") as progress:
        rows = compare(comparison, progress)
    seconds = time.perf_counter() - start
    print_table(rows)
    table = write_csv(rows, options.out / "results.csv")
    page = write_report(
        rows,
        options.out / "report.html",
        baseline=BASELINE,
        title="Handwritten digits, pruned before training",
        settings=settings(comparison, seconds),
        command=command(options),
    )
    print(f"\n{len(rows)} networks in {seconds:.0f} s. Every run: {table}\nOpen the report: {page}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m prospr.lab.demo",
        description="Compare pruning methods on handwritten digits, in about a minute and without a download.",
    )
    result.add_argument("--out", type=Path, default=Path("demo"), help="folder for the report (default: %(default)s)")
    result.add_argument("--seeds", type=_positive, default=3, help="networks per cell (default: %(default)s)")
    result.add_argument(
        "--quick", action="store_true", help="train for two epochs only: a look at the report in seconds"
    )
    return result


def make(seeds: Sequence[int], quick: bool = False) -> Comparison:
    """What the demo compares."""
    from prospr.lab.compare import Comparison
    from prospr.lab.data import CropFlip, digits
    from prospr.lab.models import build
    from prospr.lab.recipes import Recipe

    recipe = Recipe(epochs=12, batch_size=64, lr=0.1, drops=(8, 11))
    if quick:
        recipe = Recipe(epochs=2, batch_size=64, lr=0.1, drops=(1,))
    return Comparison(
        network=lambda seed: build("small_convnet", seed=seed),
        data=digits(),
        recipe=recipe,
        methods={name: name for name in METHODS},
        sparsities=SPARSITIES,
        seeds=seeds,
        augment=CropFlip(pad=1),
    )


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


def settings(comparison: Comparison, seconds: float) -> dict[str, str]:
    """What ran, with which versions and on what, for the report."""
    import os
    import platform
    from importlib import metadata

    import torch

    recipe, data = comparison.recipe, comparison.data
    weights = sum(parameter.numel() for parameter in comparison.network(0).parameters())
    drops = ", ".join(map(str, recipe.drops))
    return {
        "Network": f"small_convnet, {weights:,} parameters",
        "Data": f"{data.name}: {len(data.train):,} to train on, {len(data.test)} to test on",
        "Augmentation": str(comparison.augment),
        "Epochs and batch": f"{recipe.epochs} epochs of batches of {recipe.batch_size}",
        "Optimizer": f"SGD, momentum {recipe.momentum:g}, weight decay {recipe.weight_decay:g}",
        "Learning rate": f"{recipe.lr:g}, times {recipe.drop_factor:g} at epoch {drops}",
        "Scored on": f"training batches of {comparison.score_batch_size}, each method as many as it asks for",
        "Seeds": ", ".join(map(str, comparison.seeds)),
        "Versions": f"prospr {metadata.version('prospect-pruning')}, torch {torch.__version__}, "
        f"Python {platform.python_version()}",
        "Machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, 1 used",
        "Made": f"{time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())} in {seconds:.0f} s",
    }


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
