"""Run experiments, each in a folder of its own: what is finished is not run again, what was killed goes on.

>>> import tempfile
>>> from prospr.lab.experiment import Experiment, Training
>>> with tempfile.TemporaryDirectory() as folder:
...     result = run(Experiment(method="snip", sparsity=0.9, training=Training(epochs=1)), folder)
>>> result.headline, result.sizes["kept"], len(result.epochs)
('accuracy', 1659, 1)
"""

from __future__ import annotations

import math
import os
import platform
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

import prospr
from prospr.atomic import write
from prospr.channels import Plan
from prospr.counting import flops
from prospr.errors import MaskFileError, PlanError, PruningError, SettingError
from prospr.lab.data import Dataset
from prospr.lab.experiment import DENSE, Experiment
from prospr.lab.progress import Report
from prospr.lab.runs.checkpoints import Checkpoints, DamagedWarning
from prospr.lab.runs.environment import environment, now
from prospr.lab.runs.files import BusyError, locked, sweep_up
from prospr.lab.runs.first import FirstTraining
from prospr.lab.runs.folder import FOLDER, RunFolder, RunResult
from prospr.lab.runs.loggers import Logger, MakeLogger
from prospr.lab.runs.making import Loader, Parts, check, network
from prospr.lab.runs.memory import Peak
from prospr.lab.runs.pretrained import pretrained
from prospr.lab.train import Engine, Epoch, Result, Run, trainer_for, uses_graph
from prospr.lab.training.eager import Norms
from prospr.lab.training.loop import Trainer
from prospr.masks import store
from prospr.meta.ranks import Ranks, Team, joined

__all__ = ["Options", "RunResult", "choose_device", "run", "run_many", "trained"]

# What one run of many may fail with while the others go on.
FAILURES = (PruningError, ValueError, TypeError, ArithmeticError, RuntimeError, ImportError)


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


def run(
    experiment: Experiment,
    folder: str | os.PathLike[str] = FOLDER,
    device: torch.device | str | None = None,
    progress: Report | None = None,
    *,
    wait: bool = False,
    options: Options | None = None,
) -> RunResult:
    """Run `experiment` in `folder/<identity>/`, or go on with it, or give its result where it is finished.

    device: by default a GPU where there is one.
    progress: `progress(epochs_done, epochs, text)` is called after every epoch, of those that were left to train.
    wait: where another process is at work on this run, wait for its result; otherwise that is an error.

    An error is written to error.json and raised; the run can be run again.
    """
    options = options or Options()
    check(experiment)
    place = RunFolder(experiment, folder)
    if options.ranks is not None:
        _check_ranks(experiment, options, wait)
    elif place.done:
        return place.result()
    where = choose_device(device)
    facts = {"the experiment": experiment.identity, "norms": options.norms}
    with joined(options.ranks, "prospr.lab.run.run", where, facts) as team, ExitStack() as held:
        leads = team is None or team.rank == 0
        found = place.result() if leads and (place.done or not _claim(place, held, wait)) else None
        found = found if team is None else team.first(found)
        if found is not None:
            return found
        work = _Work(place, Loader(where, options.root, options.download), options, team)
        with work.recording():
            work.prepare(progress)
            (result,) = _train([work], options, _by_epochs(progress if leads else None, work), team)
            done = work.finish(result) if leads else None
            return cast(RunResult, done if team is None else team.first(done))


def run_many(
    experiments: Sequence[Experiment],
    folder: str | os.PathLike[str] = FOLDER,
    device: torch.device | str | None = None,
    progress: Report | None = None,
    *,
    together: int = 4,
    options: Options | None = None,
    loader: Loader | None = None,
    wait: bool = True,
) -> list[RunResult]:
    """Run `experiments`, on a GPU `together` at a time; one result each. Data sets are loaded once.

    progress: `progress(runs_done, runs, text)`, with fractions of runs, after every epoch.
    loader: has the data sets of calls before; its device must be this one.
    wait: at the end, for what other processes are at work on; otherwise it has a result with a `BusyError`.

    A run that fails has a result with its `error`, and the others go on. What another process is at work on is left to
    it, so that several processes can share one list.

    >>> import tempfile
    >>> from prospr.lab.experiment import Experiment, Training
    >>> short = Training(epochs=1, batch_size=256)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     results = run_many([Experiment(method=m, training=short) for m in ("dense", "snip")], folder)
    >>> [result.error for result in results]
    [None, None]
    """
    options = options or Options()
    for experiment in experiments:
        check(experiment)
    where = choose_device(device)
    size = side_by_side(together, where, options)
    loader = loader or Loader(where, options.root, options.download)
    pending = list({one.identity: one for one in experiments}.values())
    total = len(pending)
    results: dict[str, RunResult] = {}
    busy: list[Experiment] = []

    def tell(fraction: float, text: str) -> None:
        if progress is not None:
            progress(len(results) + fraction, total, text)

    def take(found: RunResult) -> None:
        results[found.experiment.identity] = found
        tell(0.0, describe(found))

    for experiment in list(pending):
        place = RunFolder(experiment, folder)
        if place.done:
            pending.remove(experiment)
            take(place.result())
    for group in groups_of(pending, size):
        with ExitStack() as held:
            works = []
            for experiment in group:
                place = RunFolder(experiment, folder)
                try:
                    if _claim(place, held, wait=False):
                        works.append(_Work(place, loader, options))
                    else:
                        take(place.result())
                except BusyError:
                    busy.append(experiment)
            _run_group(works, options, tell, take)
    for experiment in busy:
        try:
            take(run(experiment, folder, where, wait=wait, options=options))
        except FAILURES as error:
            take(RunFolder(experiment, folder).failure(reason(error)))
    return [results[one.identity] for one in experiments]


def side_by_side(together: int, device: torch.device, options: Options) -> int:
    """How many runs are trained at a time: `together` on a GPU, one on a CPU."""
    if together < 1:
        raise SettingError(f"together={together}: use at least 1")
    return together if options.engine == "graph" or (options.engine == "auto" and device.type == "cuda") else 1


def describe(result: RunResult) -> str:
    """A run and its outcome in one line."""
    if result.error is not None:
        return f"{result.experiment.label}: failed: {result.error}"
    return f"{result.experiment.label}: {result.headline} {100 * result.figure:.2f} %"


def choose_device(device: torch.device | str | None = None) -> torch.device:
    """`device`, or a GPU where there is one.

    >>> choose_device("cpu")
    device(type='cpu')
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise SettingError(f"device={str(device)!r} is not known; use 'cpu', 'cuda' or 'cuda:1'") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise SettingError(f"device={str(device)!r}: there is no GPU that PyTorch can use; use 'cpu'")
    return chosen


def trained(result: RunResult) -> nn.Module:
    """The network of a finished run, with its last weights, on the CPU."""
    sizes, experiment = result.sizes, result.experiment
    model = network(experiment, sizes["num_classes"], sizes["image"][0])
    plan = result.folder / "plan.json"
    if experiment.pruning.shrink and plan.exists():
        model = Plan.load(plan).shrink(model)
    masks = result.masks
    points = Checkpoints(result.folder, _mark(experiment, masks))
    state = points.read(points.latest)
    model.load_state_dict({n.removeprefix("model."): value for n, value in state.items() if n.startswith("model.")})
    return model


class _Work:
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
        self.points = Checkpoints(place.path, _mark(experiment, self.masks))
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
        masks: Mapping[str, Tensor] | None = self._stored_masks() if self.leads else None
        masks = masks if self.team is None else self.team.share(masks)
        if masks is not None:
            return prospr.Masks(masks).to(self.parts.device)
        if progress is not None and self.leads:
            progress(0, self.experiment.trained_by.epochs, "scoring")
        return self._score()

    def _stored_masks(self) -> prospr.Masks | None:
        path = self.place.masks
        if not path.exists():
            return None
        try:
            found, notes = store.load(path)
            masks = prospr.Masks(found)
            if notes.get("checksum") != masks.digest():
                raise MaskFileError("its checksum is another")
            self.score_seconds = float(notes["seconds"])
            self.memory |= {"score": int(notes["memory"])} if "memory" in notes else {}
            return masks
        except (MaskFileError, KeyError, ValueError) as error:
            self._note(f"{path.name}: {error}; scored again")
            return None

    def _score(self) -> prospr.Masks:
        trained = None if self.first is None else self.first.model
        start, peak = time.perf_counter(), Peak(self.parts.device)
        scored = self.parts.score(trained, None if self.team is None else self.options.ranks)
        masks, self.score_seconds = scored.masks, time.perf_counter() - start
        if self.first is not None:
            self.score_seconds += self.first.seconds
        if not self.leads:
            return masks
        notes = {"checksum": masks.digest(), "seconds": repr(self.score_seconds), "run": self.experiment.identity}
        if peak.added is not None:
            self.memory["score"] = peak.added
            notes["memory"] = str(peak.added)
        if self.experiment.pruning.check is None:
            self.place.write_scores(scored.summary())  # before the masks: with them, nothing is scored again
        write(self.place.masks, lambda temporary: masks.save(temporary, **notes))
        return masks

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


def _claim(place: RunFolder, held: ExitStack, wait: bool) -> bool:
    """Take the lock of a run into `held`; False where it is finished by now."""
    place.path.mkdir(parents=True, exist_ok=True)
    held.enter_context(locked(place.lock, wait))
    return not place.done


def _trainer(options: Options, run: Run) -> Trainer:
    return trainer_for([run], options.engine, options.compile)


def _check_ranks(experiment: Experiment, options: Options, wait: bool) -> None:
    """Raise for what several processes cannot do together in one run."""
    said = {
        "wait": (wait, "start it again when that process is done"),
        "engine='graph'": (options.engine == "graph", "use engine='auto'"),
        "compile": (options.compile, "it is for the graph of a single process; leave it out"),
        "training.byol": (experiment.training.byol, "run it in one process"),
        "pruning.after_training": (experiment.pruning.after_training, "run it in one process"),
    }
    for name, (given, remedy) in said.items():
        if given:
            raise SettingError(f"{name} cannot go together with several processes for one run; {remedy}")


def _train(
    works: Sequence[_Work],
    options: Options,
    tell: Callable[[int, Sequence[Epoch]], None],
    team: Team | None = None,
) -> list[Result]:
    """Train what was prepared, side by side where there are several; they are all at the same epoch."""
    peak = Peak(works[0].parts.device)
    trainer = trainer_for([work.run for work in works], options.engine, options.compile, team, options.norms)
    states: list[dict[str, Tensor]] = [work.state for work in works if work.state is not None]
    if states:
        trainer.load_states(states)
    saved = time.perf_counter()

    def due(epoch: int) -> bool:
        return epoch == trainer.epochs or time.perf_counter() - saved >= options.save_every

    def save(states: Sequence[dict[str, Tensor]]) -> None:
        nonlocal saved
        for work, state in zip(works, states, strict=True):
            work.points.save(state)
        saved = time.perf_counter()

    def told(done: int, epochs: Sequence[Epoch]) -> None:
        for work, history in zip(works, trainer.history, strict=True):
            work.tell(history)
        tell(done, epochs)

    data, every = works[0].parts.data, works[0].experiment.training.evaluate_every
    results = trainer.train(data.test, data.validation, every, save if works[0].leads else None, told, due)
    if peak.total is not None:
        for work in works:
            work.memory |= {"train": peak.total, "together": len(works)}
    return results


def _run_group(
    works: Sequence[_Work],
    options: Options,
    tell: Callable[[float, str], None],
    take: Callable[[RunResult], None],
) -> None:
    """Run what is locked, side by side as far as it fits together; what fails is recorded and the rest goes on."""
    ready: dict[tuple, list[_Work]] = {}
    for work in works:
        try:
            with work.recording():
                work.prepare(lambda done, total, text, work=work: tell(0.0, f"{work.experiment.label}: {text}"))
        except FAILURES as error:
            take(work.place.failure(reason(error)))
            continue
        alone = None if uses_graph(work.run, options.engine) else work.experiment.identity
        ready.setdefault((work.moment, work.run.steps, alone), []).append(work)
    for group in ready.values():
        if len(group) > 1:
            try:
                _finish_all(group, options, tell, take)
                continue
            except FAILURES as error:  # not captured, out of memory: each may still work alone
                warnings.warn(f"{len(group)} runs could not be trained together ({error}); one by one", stacklevel=3)
        for work in group:
            if work.place.done:
                continue
            try:
                with work.recording():
                    if len(group) > 1:
                        work.prepare()
                    _finish_all([work], options, tell, take)
            except FAILURES as error:
                take(work.place.failure(reason(error)))


def _finish_all(
    works: Sequence[_Work],
    options: Options,
    tell: Callable[[float, str], None],
    take: Callable[[RunResult], None],
) -> None:
    def told(done: int, epochs: Sequence[Epoch]) -> None:
        share, last = done / works[0].run.recipe.epochs, works[-1].experiment.label
        beside = f" and {len(works) - 1} beside it" if len(works) > 1 else ""
        if share < 1:
            tell(len(works) * share, f"{last}{beside}: {_epoch(epochs[-1])}")

    for work, result in zip(works, _train(works, options, told), strict=True):
        take(work.finish(result))


def groups_of(experiments: Sequence[Experiment], size: int) -> list[list[Experiment]]:
    """Up to `size` experiments that can share a graph; in the order they were given."""
    alike: dict[tuple, list[list[Experiment]]] = {}
    groups: list[list[Experiment]] = []
    for one in experiments:
        data, recipe = one.data, one.trained_by
        key = (one.dataset, data.images, data.size, data.validation, recipe.epochs, recipe.batch_size)
        key += (one.training.evaluate_every,)
        mine = alike.setdefault(key, [])
        if not mine or len(mine[-1]) == size:
            mine.append([])
            groups.append(mine[-1])
        mine[-1].append(one)
    return groups


def _by_epochs(progress: Report | None, work: _Work) -> Callable[[int, Sequence[Epoch]], None]:
    """Tell of the epochs that were left when this process began: those have its speed."""
    total = work.run.recipe.epochs

    def told(done: int, epochs: Sequence[Epoch]) -> None:
        if progress is not None:
            progress(done - work.done, total - work.done, f"epoch {done}: {_epoch(epochs[0])}")

    return told


def _epoch(epoch: Epoch) -> str:
    text = f"loss {epoch.loss:.4f}, train {100 * epoch.train:.2f} %"
    return text + (f", validation {100 * epoch.validation:.2f} %" if epoch.validation == epoch.validation else "")


def _mark(experiment: Experiment, masks: prospr.Masks | None) -> str:
    return f"{experiment.identity} {DENSE if masks is None else masks.digest()}"


def reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"
