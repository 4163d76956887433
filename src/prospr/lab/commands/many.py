"""The commands of `prospr` about many runs: the paper, sweeps, results, figures. None imports torch to be read."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from prospr.errors import SettingError
from prospr.lab.commands.base import Asked, Command
from prospr.lab.executors import Executor, Processes, Ray, Slurm
from prospr.lab.experiment import Experiment
from prospr.lab.figures.write import Format, Kind
from prospr.lab.grid import grid
from prospr.lab.runs.folder import FOLDER

if TYPE_CHECKING:
    from prospr.lab.runs.folder import RunResult

__all__ = ["Figures", "Paper", "Results", "Sweep"]


@dataclass(frozen=True)
class Workplace:
    """Where runs are run. What is not given is as in `prospr.lab.executors`."""

    executor: Literal["processes", "slurm", "ray"] = "processes"
    """Processes of this machine, a Slurm cluster, or a Ray cluster."""
    processes: int | None = None
    """So many processes of this machine. One that dies is replaced, and its runs go on."""
    cpus: float | None = None
    """Slurm, Ray: of each job or task."""
    gpus: float | None = None
    """Slurm, Ray: of each job or task; for Ray also a part of one."""
    partition: str | None = None
    """Slurm: by default the cluster's."""
    minutes: int | None = None
    """Slurm: after which a job goes back into the queue, and on from its checkpoints."""
    memory: float | None = None
    """Slurm: GiB of each job."""
    runs_per_job: int | None = None
    """Slurm: runs that a job takes."""
    at_once: int | None = None
    """Slurm: jobs of an array that run at the same time."""
    sbatch: tuple[str, ...] = ()
    """Slurm: further options of sbatch, without dashes, such as account=vision exclusive."""
    address: str | None = None
    """Ray: of the cluster, or "auto"; by default one is started on this machine."""

    def make(self) -> Executor:
        given = {name: value for name, value in vars(self).items() if name != "executor" and value not in (None, ())}
        make, takes = _EXECUTORS[self.executor]
        foreign = [name for name in given if name not in takes]
        if foreign:
            option, here = foreign[0].replace("_", "-"), ", ".join(name.replace("_", "-") for name in takes)
            raise SettingError(f"--{option} is not for --executor {self.executor}, which takes {here}")
        return make(**{takes[name]: value for name, value in given.items()})


_EXECUTORS: dict[str, tuple[type[Executor], dict[str, str]]] = {
    "processes": (Processes, {"processes": "count"}),
    "slurm": (Slurm, {one.name: one.name for one in fields(Slurm) if one.name != "poll"}),
    "ray": (Ray, {one.name: one.name for one in fields(Ray)}),
}


@dataclass(frozen=True)
class Many(Command):
    """How many runs are run."""

    folder: str = FOLDER
    """Where runs lie."""
    workplace: Workplace = field(default_factory=Workplace)
    """Where they are run."""
    together: int = 4
    """On a GPU: the runs a worker trains side by side."""
    device: str | None = None
    """"cpu", "cuda", "cuda:1"; by default a GPU where there is one."""
    root: str | None = None
    """Where data sets lie; by default PROSPR_DATA, else ~/.cache/prospr."""
    workers: int = 0
    """Processes that decode images which are streamed."""
    save_every: float = 30.0
    """Seconds between checkpoints."""
    compile: bool = False
    """On a GPU: use torch.compile as well, which takes a minute and then makes steps quicker."""
    dry_run: bool = False
    """Say how many runs there are, how many are done and how long the others would take, and run nothing."""
    json: bool = False
    """Print the table as JSON."""

    after_interrupt = "The same command goes on from the last checkpoints."

    def _run(self, experiments: Sequence[Experiment]) -> list[RunResult]:
        from prospr.lab.launch import refuse_torchrun
        from prospr.lab.live import live_table
        from prospr.lab.run import Options
        from prospr.lab.sweep import sweep

        refuse_torchrun()
        executor = self.workplace.make()
        options = Options(self.root, True, self.workers, self.save_every, compile=self.compile)
        with live_table(experiments, self.folder, sys.stderr if self.json else None) as progress:
            return sweep(
                experiments,
                self.folder,
                self.device,
                progress,
                together=self.together,
                options=options,
                executor=executor,
            )

    def _left(self, experiments: Sequence[Experiment]) -> str:
        from prospr.lab.estimate import estimate_all
        from prospr.lab.run import choose_device
        from prospr.lab.runs.making import check
        from prospr.lab.show import show_total

        self.workplace.make()
        for one in experiments:
            check(one)
        device = choose_device(self.device)
        total = estimate_all(experiments, self.folder, device, self.root)
        processes = self.workplace.processes or 1
        return json.dumps(vars(total), indent=1) if self.json else show_total(total, str(device), processes)


@dataclass(frozen=True)
class Paper(Many):
    """List the tables of the ProsPr paper, or run one and print what it gave here beside the paper's numbers."""

    table: tyro.conf.Positional[str] = ""
    """The table's name; without one, all tables are listed."""
    methods: tuple[str, ...] = ()
    """Only these, by their name in the paper or here."""
    sparsities: tuple[float, ...] = ()
    """Only these, as shares: 0.982; that of the network not pruned is 0."""
    datasets: tuple[str, ...] = ()
    """Only these, by their name in the paper or here."""
    networks: tuple[str, ...] = ()
    """Only these, by their name in the paper or here."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """A run for each."""
    recipe: str = "paper"
    """"paper", "missing-the-mark" (the benchmark's own), or one that `prospr recipes` lists."""
    epochs: int | None = None
    """Another number than the recipe's, its drops in proportion."""
    show: bool = False
    """Print the table with what is finished, and run nothing."""

    def __call__(self) -> None:
        from prospr.lab.paper import PAPER, compare, tables
        from prospr.lab.show import show_table

        known = tables()
        if not self.table:
            rows = [_about(name, table) for name, table in known.items()]
            print(json.dumps(rows, indent=1) if self.json else show_table(rows))
            return
        if self.table not in known:
            raise SettingError(f"the paper has no table {self.table!r}; known names: {', '.join(known)}")
        table = known[self.table]
        if table.timed and self.workplace.processes not in (None, 1):
            raise SettingError(f"--processes {self.workplace.processes}: {self.table} takes times, one run at a time")
        part = (self.methods, self.sparsities, self.seeds, self.recipe, self.epochs, self.datasets, self.networks)
        cells = table.cells(*part)
        results: list[RunResult] = []
        if not self.show:
            wanted = table.experiments(*part[:4], epochs=self.epochs, datasets=self.datasets, networks=self.networks)
            if self.dry_run:
                print(self._left(wanted))
                return
            results = (replace(self, together=1) if table.timed else self)._run(wanted)
        rows = compare(cells, self.folder)
        if self.json:
            print(json.dumps(rows, indent=1))
        else:
            recipe = table.recipe if self.recipe == PAPER else self.recipe
            length = "" if self.epochs is None else f", {self.epochs} epochs in place of the recipe's"
            print(f"{table.title}: {table.shows} ({table.source})")
            print("ours: measured, mean +- deviation (runs)" + (f"; recipe {recipe}{length}" if recipe else "") + "\n")
            print(show_table(_without_empty([_beside(row) for row in rows])))
            reasons = [f"{row['method']}: {row['missing']}." for row in rows if row["missing"] is not None]
            for text in dict.fromkeys([*reasons, *table.differs]):
                print(f"\n{text}")
        _end(results)


@dataclass(frozen=True)
class Sweep(Many):
    """Run every combination of methods, sparsities and seeds, and print the table of means."""

    experiment: Asked = field(default_factory=Asked)
    """What is run; the same options as `prospr run`."""
    methods: tuple[str, ...] = ()
    """In place of one --method; "dense" is one."""
    sparsities: tuple[float, ...] = ()
    """In place of one --sparsity."""
    seeds: tuple[int, ...] = ()
    """In place of one --seed."""

    def __call__(self) -> None:
        from prospr.lab.results import load, means

        axes = {"method": self.methods, "sparsity": self.sparsities, "seed": self.seeds}
        wanted = grid(self.experiment.make(), **{name: axis for name, axis in axes.items() if axis})
        if self.dry_run:
            print(self._left(wanted))
            return
        results = self._run(wanted)
        mine = {one.identity for one in wanted}
        rows = means(load([Path(self.folder) / name for name in mine if (Path(self.folder) / name).is_dir()]))
        print(json.dumps(rows, indent=1) if self.json else _table(rows))
        _end(results)


@dataclass(frozen=True)
class Results(Command):
    """Print the table of means of all finished runs in some folders."""

    runs: tyro.conf.Positional[tuple[str, ...]] = (FOLDER,)
    """The folders of runs."""
    baseline: str | None = None
    """A method the others are compared to, seed by seed: better, worse, or not shown?"""
    csv: Path | None = None
    """Write every run to this file, a line each."""
    parquet: Path | None = None
    """The same as a Parquet file, which DuckDB, pandas and others read; needs pyarrow."""
    format: Literal["text", "markdown", "latex"] = "text"
    """The table for a terminal, a page or a paper (booktabs)."""
    json: bool = False
    """Print the table as JSON."""

    def __call__(self) -> None:
        from prospr.lab.results import load, means, write_csv, write_parquet
        from prospr.lab.tables import latex, markdown

        found = load(self.runs)
        if self.csv is not None:
            write_csv(found, self.csv)
        if self.parquet is not None:
            write_parquet(found, self.parquet)
        rows = means(found, self.baseline)
        if self.json:
            print(json.dumps(rows, indent=1))
        elif not rows:
            print(f"there are no finished runs in {', '.join(self.runs)}")
        elif self.format == "text":
            print(_table(rows))
        else:
            print((latex if self.format == "latex" else markdown)(found, self.baseline))


@dataclass(frozen=True)
class Figures(Command):
    """Draw figures of runs for a paper: accuracies, differences, densities, curves; one figure a file."""

    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[RUNS ...]")] = (FOLDER,)
    """Folders of runs, or of one run each."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("figures")
    """The folder they are written to."""
    format: tuple[Format, ...] = ("pdf",)
    """One or more of them."""
    only: tuple[Kind, ...] = ()
    """These figures; by default all of them."""
    baseline: str | None = None
    """The method the others are compared with; by default random where it was run, else the first by name."""
    width: float = 3.35
    """Inches, as on paper; letters have 7 and 8 points at any width."""
    paper: bool = True
    """Whether the paper's numbers are drawn behind the accuracies."""

    def __call__(self) -> None:
        from prospr.lab.figures import write_figures

        options = {"only": self.only, "baseline": self.baseline, "paper": self.paper, "width": self.width}
        written = write_figures(self.runs, self.out, self.format, **options)
        print("\n".join(map(str, written)) if written else f"there is nothing to draw in {', '.join(self.runs)}")


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    from prospr.lab.show import show_table

    return show_table(_without_empty([_mean(row) for row in rows]))


def _mean(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `means` in words."""
    words = {
        "data set": row["dataset"],
        "network": row["network"],
        "setup": row["setup"],
        "method": row["method"],
        "sparsity %": "-" if row["sparsity"] is None else f"{100 * row['sparsity']:g}",
        "metric": row["metric"],
        "mean %": _percent(row["mean"]),
        "sd": _percent(row["sd"]),
        "n": row["n"],
        "failed": row["failed"] or "",
    }
    if "baseline" in row:
        low, high = row["low"], row["high"]
        interval = "" if low is None else f" ({100 * low:+.2f} to {100 * high:+.2f})"
        versus = "" if row["difference"] is None else f": {100 * row['difference']:+.2f}{interval}"
        words[f"against {row['baseline']}"] = f"{row['verdict'] or ''}{versus}"
    return words


def _beside(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `compare` in words."""
    digits = 4 if row["metric"] == "mean_iou" else 2
    ours = "not by a run" if row["missing"] is not None else "not run"
    if row["our_runs"]:
        spread = "" if row["our_sd"] is None else f" +- {row['our_sd']:.{digits}f}"
        ours = f"{row['our_mean']:.{digits}f}{spread} ({row['our_runs']})"
    return {
        "data set": row["dataset"],
        "network": row["network"],
        "method": row["method"],
        "sparsity %": f"{100 * row['sparsity']:g}" if row["sparsity"] else "-",
        "metric": row["metric"],
        "ours": ours,
        "the paper's": f"{row['paper_mean']:g}" + ("" if row["paper_sd"] is None else f" +- {row['paper_sd']:g}"),
        "speed-up, ours": "" if row["our_speedup"] is None else f"{row['our_speedup']:.2f} x",
        "the paper's speed-up": "" if row["paper_speedup"] is None else f"{row['paper_speedup']:.2f} x",
        "note": row["note"],
    }


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"


def _about(name: str, table: Any) -> dict[str, Any]:
    pruned = [share for share in table.sparsities if share]
    return {
        "table": name,
        "title": table.title,
        "shows": table.shows,
        "methods": len(table.methods),
        "sparsities %": f"{100 * pruned[0]:g} to {100 * pruned[-1]:g}" if len(pruned) > 1 else f"{100 * pruned[0]:g}",
        "metric": ", ".join(table.metrics),
        "can be run": table.runs,
        "source": table.source,
    }


def _without_empty(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without the columns that have nothing in them."""
    return [{key: v for key, v in row.items() if any(one[key] != "" for one in rows)} for row in rows]


def _end(results: Sequence[RunResult]) -> None:
    """An error where runs failed, once everything is printed."""
    failed = [result for result in results if result.error is not None]
    if failed:
        from prospr.errors import PruningError

        raise PruningError(
            f"{len(failed)} of {len(results)} runs failed; the first, {failed[0].experiment.label}: {failed[0].error} "
            f"(`prospr show {failed[0].folder}`); the same command tries them again"
        )
