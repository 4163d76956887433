"""The commands of `prospr` about one run, and the page. None imports torch to be read."""

from __future__ import annotations

import shlex
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from prospr.lab.commands.base import Asked, Command
from prospr.lab.experiment import Experiment
from prospr.lab.runs.folder import FOLDER

__all__ = ["Prune", "Report", "Run", "Serve", "Show"]


@dataclass(frozen=True)
class Run(Command):
    """Prune and train a network, in a folder of its own; go on where it was killed, or show what it gave.

    With several processes, each takes its part of every batch: torchrun --nproc-per-node 8 -m prospr run ...
    """

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
    norms: Literal["all", "own"] = "all"
    """Of several processes: batch norm with the statistics of all, as in one process, or of each one's own part."""
    tensorboard: bool = False
    """Write curves for TensorBoard into the run's folder."""
    wandb: bool = False
    """Send curves to Weights & Biases."""
    dry_run: bool = False
    """Say what would run, whether it is done and what it would cost, and run nothing."""
    json: bool = False
    """Print the result as JSON."""

    after_interrupt = "The same command goes on from the last checkpoint."

    def __call__(self) -> None:
        experiment = self.experiment.make()
        if self.dry_run:
            self._say(experiment)
            return
        from prospr.lab.launch import launched
        from prospr.lab.progress import progress_bar
        from prospr.lab.run import Options, run
        from prospr.lab.runs import loggers
        from prospr.lab.runs.folder import find_run
        from prospr.lab.show import show_run

        makers = [loggers.tensorboard()] if self.tensorboard else []
        makers += [loggers.wandb()] if self.wandb else []
        options = Options(self.root, True, self.workers, self.save_every, makers, compile=self.compile)
        with launched(self.device) as place:
            # Loading and testing take their time, and a process that died is noticed all the same.
            ranks = None if place.ranks is None else replace(place.ranks, timeout=3600.0)
            options = replace(options, ranks=ranks, norms=self.norms)
            shown = progress_bar("training", sys.stderr if self.json else None) if place.first else nullcontext()
            with shown as progress:
                result = run(experiment, self.folder, place.device, progress, wait=self.wait, options=options)
            if place.first:
                print(show_run(find_run(str(result.folder)), self.json))

    def _say(self, experiment: Experiment) -> None:
        from prospr.lab.estimate import estimate
        from prospr.lab.run import choose_device
        from prospr.lab.runs.folder import RunFolder
        from prospr.lab.runs.making import check
        from prospr.lab.show import show_plan

        check(experiment)
        device = choose_device(self.device)
        place = RunFolder(experiment, self.folder)
        print(show_plan(place, estimate(experiment, self.folder, device, self.root), str(device), self.json))


@dataclass(frozen=True)
class Prune(Command):
    """Score a network and choose what is kept, without training: the masks that `prospr run` would train with.

    With several processes, each takes its part of every batch: torchrun --nproc-per-node 8 -m prospr prune ...
    """

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
        from prospr.lab.launch import launched
        from prospr.lab.runs.making import Loader, Parts, check

        if experiment.method == DENSE:
            raise SettingError("method='dense' keeps everything; name a pruning method (`prospr methods`)")
        check(experiment)
        if self.out.is_dir():
            raise SettingError(
                f"--out {self.out}: this is a folder; name a file, such as {self.out / 'masks.safetensors'}"
            )
        with launched(self.device) as place:
            with place.in_turn():
                data = Loader(place.device, self.root)(experiment)
            masks = Parts(experiment, data, place.device, self.workers).score(ranks=place.ranks).masks
            if not place.first:
                return
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
        from prospr.lab.runs.folder import find_run
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
class Serve(Command):
    """Show the page of `prospr report` live in a browser while runs are under way; Ctrl-C ends it."""

    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[RUNS ...]")] = (FOLDER,)
    """Folders of runs, or of one run each; they may still be empty."""
    port: int = 8000
    """Where it listens; 0 takes any that is free."""
    host: str = "127.0.0.1"
    """By default for this machine alone; "0.0.0.0" shows the page to everyone who can reach it."""
    baseline: str | None = None
    """The method the others are compared with; by default random where it was run, else the first by name."""
    title: str | None = None
    """What stands above the page."""

    def __call__(self) -> None:
        from prospr.errors import SettingError
        from prospr.lab.report.serve import LivePage, make_server

        try:
            server = make_server(LivePage(self.runs, self.baseline, self.title), self.host, self.port)
        except (OSError, OverflowError) as error:
            raise SettingError(f"cannot listen on {self.host}:{self.port} ({error}); give another --port") from error
        with server:
            print(f"http://{self.host}:{server.server_port}/ shows {', '.join(self.runs)}; Ctrl-C ends it", flush=True)
            server.serve_forever()
