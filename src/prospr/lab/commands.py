"""The commands of `prospr`, as frozen dataclasses that tyro fills from the command line. None imports torch to be read.

`prospr run` takes every value of an `Experiment` under its own name, with its own default.
"""

from __future__ import annotations

import json
import shlex
import sys
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import tyro

from prospr.lab.command import Asked, Command
from prospr.lab.commands_many import Paper, Results, Sweep
from prospr.lab.experiment import Experiment
from prospr.lab.runfolder import FOLDER

__all__ = ["COMMANDS", "parse"]


@dataclass(frozen=True)
class Run(Command):
    """Prune and train a network, in a folder of its own; go on where it was killed, or show what it gave."""

    experiment: Asked = field(default_factory=Asked)
    """What is run."""
    folder: str = FOLDER
    """Where runs lie."""
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
    wait: bool = False
    """Where another process is at work on this run, wait for it."""
    tensorboard: bool = False
    """Write curves for TensorBoard into the run's folder."""
    wandb: bool = False
    """Send curves to Weights & Biases."""
    dry_run: bool = False
    """Say what would run, whether it is done and what it would cost, and run nothing."""
    json: bool = False
    """Print the result as JSON."""

    after_interrupt = "The same command goes on where it stood."

    def __call__(self) -> None:
        experiment = self.experiment.make()
        if self.dry_run:
            self._say(experiment)
            return
        from prospr.lab import loggers
        from prospr.lab.progress import progress_bar
        from prospr.lab.run import Options, run
        from prospr.lab.runfolder import find_run
        from prospr.lab.show import show_run

        makers = [loggers.tensorboard()] if self.tensorboard else []
        makers += [loggers.wandb()] if self.wandb else []
        options = Options(self.root, True, self.workers, self.save_every, makers, compile=self.compile)
        with progress_bar("training", sys.stderr if self.json else None) as progress:
            result = run(experiment, self.folder, self.device, progress, wait=self.wait, options=options)
        print(show_run(find_run(str(result.folder)), self.json))

    def _say(self, experiment: Experiment) -> None:
        from prospr.lab.estimate import estimate
        from prospr.lab.making import check
        from prospr.lab.run import choose_device
        from prospr.lab.runfolder import RunFolder
        from prospr.lab.show import show_plan

        check(experiment)
        device = choose_device(self.device)
        place = RunFolder(experiment, self.folder)
        print(show_plan(place, estimate(experiment, self.folder, device, self.root), str(device), self.json))


@dataclass(frozen=True)
class Prune(Command):
    """Score a network and choose what is kept, without training: the masks that `prospr run` would train with."""

    experiment: Asked = field(default_factory=Asked)
    """What is pruned; the same options as `prospr run`."""
    out: Path = Path("masks.safetensors")
    """Where the masks are written."""
    device: str | None = None
    """"cpu", "cuda", "cuda:1"; by default a GPU where there is one."""
    root: str | None = None
    """Where data sets lie; by default PROSPR_DATA, else ~/.cache/prospr."""
    workers: int = 0
    """Processes that decode images which are streamed."""

    def __call__(self) -> None:
        experiment = self.experiment.make()
        from prospr.errors import SettingError
        from prospr.lab.experiment import DENSE
        from prospr.lab.making import Loader, Parts, check
        from prospr.lab.run import choose_device

        if experiment.method == DENSE:
            raise SettingError("method='dense' keeps everything; name a pruning method (`prospr methods`)")
        check(experiment)
        device = choose_device(self.device)
        masks = Parts(experiment, Loader(device, self.root)(experiment), device, self.workers).score()
        notes = {"method": experiment.method, "sparsity": f"{experiment.sparsity:g}", "seed": str(experiment.seed)}
        masks.save(self.out, **notes, network=experiment.network_name, dataset=experiment.dataset)
        print(f"{experiment.label}\n\n{masks}\n\nwritten to {self.out}")


@dataclass(frozen=True)
class Show(Command):
    """Show a run: what it is, how it went, what it gave."""

    run: tyro.conf.Positional[str] = ""
    """Its folder, or the first digits of its identity."""
    folder: str = FOLDER
    """Where runs lie."""
    json: bool = False
    """Print everything as JSON."""

    def __call__(self) -> None:
        from prospr.lab.runfolder import find_run
        from prospr.lab.show import show_run, show_runs

        print(show_run(find_run(self.run, self.folder), self.json) if self.run else show_runs(self.folder, self.json))


@dataclass(frozen=True)
class Report(Command):
    """Write one page of any number of runs: accuracies, differences, layers, curves, masks, costs, every setting."""

    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[RUNS ...]")] = (FOLDER,)
    """Folders of runs, or of one run each."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html")
    """Where the page is written."""
    baseline: str | None = None
    """The method the others are compared with; by default random where it was run, else the first by name."""
    title: str | None = None
    """What stands above the page."""

    def __call__(self) -> None:
        from prospr.lab.report import report_runs

        words = ["prospr", "report", *self.runs, "--out", str(self.out)]
        words += ["--baseline", self.baseline] if self.baseline is not None else []
        words += ["--title", self.title] if self.title is not None else []
        line = shlex.join(words)
        path = report_runs(self.runs, self.out, baseline=self.baseline, title=self.title, command=line)
        print(f"written to {path}")


@dataclass(frozen=True)
class Listing(Command):
    """A table of what there is by name."""

    json: bool = False
    """Print the table as JSON."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]: ...

    def __call__(self) -> None:
        from prospr.lab.show import show_table

        print(json.dumps(self.rows(), indent=1) if self.json else show_table(self.rows()))


@dataclass(frozen=True)
class Methods(Listing):
    """List the pruning methods."""

    def rows(self) -> list[dict[str, Any]]:
        from prospr.registry import methods

        return [
            {
                "method": name,
                "rounds": method.rule.rounds,
                "scope": method.scope,
                "granularity": method.granularity,
                "cost in training steps": method.cost,
                "reference": method.reference,
            }
            for name, method in methods().items()
        ]


@dataclass(frozen=True)
class Networks(Listing):
    """List the networks."""

    def rows(self) -> list[dict[str, Any]]:
        import inspect

        from prospr.lab.models import networks

        def settings(make: Any) -> str:
            given = inspect.signature(make).parameters.values()
            return ", ".join(f"{one.name}={one.default}" for one in given)

        return [
            {
                "network": name,
                "settings": settings(make),
                "about": (inspect.getdoc(make) or "").partition("\n\n")[0].replace("\n", " "),
            }
            for name, make in networks().items()
        ]


@dataclass(frozen=True)
class Datasets(Listing):
    """List the data sets."""

    def rows(self) -> list[dict[str, Any]]:
        from prospr.lab.data import datasets
        from prospr.lab.experiment import USUAL

        return [
            {
                "data set": name,
                "task": entry.task,
                "images": entry.shape,
                "to train + to test on": entry.counts,
                "download": entry.download or ("by hand" if entry.files else "none"),
                "network": USUAL[name].network,
                "recipe": USUAL[name].recipe,
                "about": entry.about,
            }
            for name, entry in datasets().items()
        ]


@dataclass(frozen=True)
class Recipes(Listing):
    """List the recipes networks are trained by."""

    def rows(self) -> list[dict[str, Any]]:
        from prospr.lab.recipes import recipes

        return [
            {
                "recipe": name,
                **{one.name: getattr(recipe, one.name) for one in fields(recipe)},
            }
            for name, recipe in recipes().items()
        ]


COMMANDS = Run | Prune | Show | Report | Paper | Sweep | Results | Methods | Networks | Datasets | Recipes


def parse(words: Sequence[str]) -> Command:
    """The command that `words` are; ends the program with 2 where they are none, and with 0 after --help.

    >>> parse(["run", "--method", "snip", "--epochs", "3"]).experiment.training.epochs
    3
    """
    return tyro.cli(
        COMMANDS,
        prog="prospr",
        description="Prune neural networks before they are trained. `prospr COMMAND --help` tells more.",
        args=list(words),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
