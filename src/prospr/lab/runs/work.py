"""A run under way: its data, masks, network and last checkpoint brought together, and what it gave written down."""

from __future__ import annotations

import math
import os
import platform
import time
import traceback
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor

import prospr
from prospr.atomic import write
from prospr.channels import Plan
from prospr.counting import flops
from prospr.errors import MaskFileError, PlanError
from prospr.lab.data import Dataset
from prospr.lab.experiment import DENSE, Experiment
from prospr.lab.progress import Report
from prospr.lab.runs.checkpoints import Checkpoints, DamagedWarning
from prospr.lab.runs.environment import environment, now
from prospr.lab.runs.files import sweep_up
from prospr.lab.runs.first import FirstTraining
from prospr.lab.runs.folder import RunFolder, RunResult
from prospr.lab.runs.loggers import Logger, MakeLogger
from prospr.lab.runs.making import Loader, Parts
from prospr.lab.runs.memory import Peak
from prospr.lab.runs.pretrained import pretrained
from prospr.lab.train import Engine, Epoch, Result, Run, trainer_for
from prospr.lab.training.eager import Norms
from prospr.lab.training.loop import Trainer
from prospr.masks import store
from prospr.meta.ranks import Ranks, Team

__all__ = ["Options", "Work", "mark_of", "reason"]


@dataclass(frozen=True)
class Options:
    """How experiments are run; nothing here changes what they give.

    root: where data sets lie and are downloaded to; see `prospr.lab.data.load`.
    workers: processes that decode images which are streamed.
    save_every: seconds between checkpoints; 0 writes one after every epoch. The last epoch always has one.
    loggers: see `prospr.lab.runs.loggers`.
    engine, compile: see `prospr.lab.train.train`.
    ranks: the processes that run it together, each with its part of every batch; `run` is then called on all of them,
        and the first alone reads and writes the folder. Their number may be another each time.
    norms: with ranks, see `prospr.lab.training.EagerTrainer`. "own" gives another training for every number of ranks;
        it is noted in the result.
    """

    root: str | os.PathLike[str] | None = None
    download: bool = True
    workers: int = 0
    save_every: float = 30.0
    loggers: Sequence[MakeLogger] = ()
    engine: Engine = "auto"
    compile: bool = False
    ranks: Ranks | None = None
    norms: Norms = "all"


class Work:
    """A run under way, its folder locked by this process."""

    def __init__(self, place: RunFolder, loader: Loader, options: Options, team: Team | None = None) -> None:
        self.place, self.experiment, self.options = place, place.experiment, options
        self.team, self.leads = team, team is None or team.rank == 0  # the others never touch the folder
        self._loader = loader
        self._began = time.perf_counter()

    def prepare(self, progress: Report | None = None) -> None:
        """Bring data, masks, network and the last checkpoint together."""
        experiment, place = self.experiment, self.place
        if self.leads:
            sweep_up(place.path)
            place.begin()
        self.notes: list[str] = []
        self.parts = Parts(experiment, self._data(), self._loader.device, self.options.workers)
        if experiment.training.byol:
            self.parts = replace(self.parts, learned=pretrained(self.parts, place.pretrained, progress))
        self.score_seconds = 0.0
        self.first = self._first(progress) if experiment.method != DENSE and experiment.pruning.after_training else None
        self.memory: dict[str, int] = {}
        self.masks = None if experiment.method == DENSE else self._masks(progress)
        self.plan = self._plan() if self.masks is not None and experiment.pruning.shrink else None
        model, masks = self.parts.start(), self.masks
        if masks is not None and self.plan is not None:
            model, masks = self.parts.smaller(model, self.plan), self.plan.masks(masks)
        if masks is not None and masks.kept == masks.total:
            masks = None  # nothing is left to hold at zero
        recipe = experiment.trained_by
        self.run = Run(model, self.parts.batches(recipe.batch_size), recipe, masks, self.parts.task)
        self.points = Checkpoints(place.path, mark_of(experiment, self.masks))
        self.state, note = self.points.load() if self.leads else (None, None)
        if note is not None:
            self._note(note)
        self.state = self.state if self.team is None else self.team.share(self.state)
        self.resumed_at = 0 if self.state is None else len(self.state["history"])
        if self.state is None and self.first is not None:
            self.state = self.first.start(self.plan)
        epochs = [] if self.state is None else [Epoch(*row) for row in self.state["history"].tolist()]
        self.done = len(epochs)
        if self.leads:
            place.write_metrics(epochs)
        makers = self.options.loggers if self.leads else ()
        self._loggers: list[Logger] = [make(experiment, place.path, self.done) for make in makers]

    def _data(self) -> Dataset:
        """The data set. The first process of each machine loads it first, so that a download happens once."""
        if self.team is None:
            return self._loader(self.experiment)
        machines = self.team.gather(platform.node())
        loads_first = machines.index(platform.node()) == self.team.rank
        if loads_first:
            self._loader(self.experiment)
        self.team.gather("loaded")
        return self._loader(self.experiment)

    def _masks(self, progress: Report | None) -> prospr.Masks:
        """Those of the folder, or scored now and stored before anything is trained."""
        masks: Mapping[str, Tensor] | None = (self._stored_masks() or self._checked_masks()) if self.leads else None
        masks = masks if self.team is None else self.team.share(masks)
        if masks is not None:
            return prospr.Masks(masks).to(self.parts.device)
        if progress is not None and self.leads:
            progress(0, self.experiment.trained_by.epochs, "scoring")
        return self._score()

    def _stored_masks(self) -> prospr.Masks | None:
        path = self.place.masks
        try:
            return self._read_masks(path) if path.exists() else None
        except (MaskFileError, KeyError, ValueError) as error:
            self._note(f"{path.name}: {error}; scored again")
            return None

    def _checked_masks(self) -> prospr.Masks | None:
        """A sanity check's, made of those that it checks where that run lies beside it: nothing is scored twice."""
        pruning = self.experiment.pruning
        if pruning.check not in ("shuffled", "redrawn") or self.team is not None:  # a failure is for all ranks or none
            return None
        checked = RunFolder(replace(self.experiment, pruning=replace(pruning, check=None)), self.place.path.parent)
        try:
            found = self._read_masks(checked.masks).to(self.parts.device)
        except (MaskFileError, KeyError, ValueError):
            return None  # not there; or damaged, as the run that it belongs to will say
        return self._store_masks(self.parts.checked(found))

    def _read_masks(self, path: Path) -> prospr.Masks:
        found, notes = store.load(path)
        masks = prospr.Masks(found)
        if notes.get("checksum") != masks.digest():
            raise MaskFileError("its checksum is another")
        self.score_seconds = float(notes["seconds"])
        self.memory |= {"score": int(notes["memory"])} if "memory" in notes else {}
        return masks

    def _store_masks(self, masks: prospr.Masks) -> prospr.Masks:
        notes = {"checksum": masks.digest(), "seconds": repr(self.score_seconds), "run": self.experiment.identity}
        if "score" in self.memory:
            notes["memory"] = str(self.memory["score"])
        write(self.place.masks, lambda temporary: masks.save(temporary, **notes))
        return masks

    def _score(self) -> prospr.Masks:
        trained = None if self.first is None else self.first.model
        start, peak = time.perf_counter(), Peak(self.parts.device)
        scored = self.parts.score(trained, None if self.team is None else self.options.ranks)
        self.score_seconds = time.perf_counter() - start
        if self.first is not None:
            self.score_seconds += self.first.seconds
        if not self.leads:
            return scored.masks
        if peak.added is not None:
            self.memory["score"] = peak.added
        if self.experiment.pruning.check is None:
            self.place.write_scores(scored.summary())  # before the masks: with them, nothing is scored again
        return self._store_masks(scored.masks)

    def _first(self, progress: Report | None) -> FirstTraining:
        options = self.options
        make = partial(_trainer, options)
        return FirstTraining(self.place.path, self.parts, make, options.save_every, self._note, progress)

    def _plan(self) -> Plan:
        assert self.masks is not None
        path = self.place.plan
        plan = None
        if self.leads and path.exists():
            try:
                plan = Plan.load(path)
            except PlanError as error:
                self._note(f"{path.name}: {error}; planned again")
        if self.leads and plan is None:
            plan = prospr.channels.plan(self.parts.network(), self.masks, self.parts.example)
            write(path, plan.save)
        return cast(Plan, plan if self.team is None else self.team.first(plan))

    @property
    def moment(self) -> tuple[int, int] | None:
        """The epoch and step it goes on from; None where it begins."""
        return None if self.state is None else (int(self.state["epoch"]), int(self.state["step"]))

    def _note(self, text: str) -> None:
        self.notes.append(text)
        warnings.warn(f"{self.place.path}: damaged: {text}", DamagedWarning, stacklevel=4)

    def tell(self, epochs: Sequence[Epoch]) -> None:
        """Record how the epochs so far went."""
        if not self.leads:
            return
        self.place.write_metrics(epochs)
        last = {key: value for key, value in epochs[-1]._asdict().items() if value == value}
        for logger in self._loggers:
            logger.epoch(len(epochs), last)

    def finish(self, result: Result) -> RunResult:
        place, parts = self.place, self.parts
        place.write_metrics(result.epochs)
        self.points.finish()
        if self.first is not None:
            self.first.remove()
        for logger in self._loggers:
            logger.end(result.test)
        done = place.finish(
            {
                "headline": parts.task.headline,
                "figures": {name: value if math.isfinite(value) else None for name, value in result.test.items()},
                "sizes": self._sizes(),
                "seconds": {
                    "score": self.score_seconds,
                    "train": result.seconds,
                    "last_session": time.perf_counter() - self._began,
                },
                "memory": self.memory,
                "steps": self.run.steps * len(result.epochs),
                "resumed_at": self.resumed_at,
                "environment": environment(parts.device) | self._together(),
                "notes": self.notes,
            }
        )
        place.pretrained.unlink(missing_ok=True)  # only now: it cost a training
        return done

    def _together(self) -> dict[str, Any]:
        return {} if self.team is None else {"ranks": self.team.size, "norms": self.options.norms}

    def _sizes(self) -> dict[str, Any]:
        parts, masks, example = self.parts, self.masks, self.parts.example
        first = parts.network()
        sizes: dict[str, Any] = {
            "parameters": sum(p.numel() for p in first.parameters()),
            "trained_parameters": sum(p.numel() for p in self.run.model.parameters()),
            "flops": flops(first, example),
            "trained_flops": flops(self.run.model, example),
            "image": list(example.shape[1:]),
            "num_classes": parts.data.num_classes,
        }
        if masks is not None:
            seen = prospr.inspect(first, masks, example)
            sizes |= {
                "kept": masks.kept,
                "total": masks.total,
                "density": masks.density,
                "effective_density": seen.effective_density,
                "layers": masks.densities(),
            }
        return sizes

    @contextmanager
    def recording(self) -> Generator[None, None, None]:
        """Write an error down on its way."""
        try:
            yield
        except Exception as error:
            if not self.leads:
                raise
            self.place.fail(
                {
                    "error": reason(error),
                    "traceback": "".join(traceback.format_exception(error)),
                    "when": now(),
                    "environment": environment(self._loader.device),
                }
            )
            raise


def _trainer(options: Options, run: Run) -> Trainer:
    return trainer_for([run], options.engine, options.compile)


def mark_of(experiment: Experiment, masks: prospr.Masks | None) -> str:
    return f"{experiment.identity} {DENSE if masks is None else masks.digest()}"


def reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"
