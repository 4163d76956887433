"""Run experiments, each in a folder of its own: what is finished is not run again, what was killed goes on.

>>> import tempfile
>>> from prospr.lab.experiment import Experiment, Training
>>> with tempfile.TemporaryDirectory() as folder:
...     result = run(Experiment(method="snip", sparsity=0.9, training=Training(epochs=1)), folder)
>>> result.headline, result.sizes["kept"], len(result.epochs)
('accuracy', 1659, 1)
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import cast

import torch
from torch import Tensor, nn

from prospr.channels import Plan
from prospr.errors import PruningError, SettingError
from prospr.lab.experiment import Experiment
from prospr.lab.progress import Report
from prospr.lab.runs.checkpoints import Checkpoints
from prospr.lab.runs.files import BusyError, locked
from prospr.lab.runs.folder import FOLDER, RunFolder, RunResult
from prospr.lab.runs.making import Loader, check, network
from prospr.lab.runs.memory import Peak
from prospr.lab.runs.work import Options, Work, mark_of, reason
from prospr.lab.train import Epoch, Result, trainer_for, uses_graph
from prospr.meta.ranks import Team, joined

__all__ = ["Options", "RunResult", "choose_device", "run", "run_many", "trained"]

FAILURES = (Exception,)  # what one run of many may fail with while the others go on: also a user's own code


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
        place.describe()
        return place.result()
    where = choose_device(device)
    facts = {"the experiment": experiment.identity, "norms": options.norms}
    with joined(options.ranks, "prospr.lab.run.run", where, facts) as team, ExitStack() as held:
        leads = team is None or team.rank == 0
        found = place.result() if leads and (place.done or not _claim(place, held, wait)) else None
        found = found if team is None else team.first(found)
        if found is not None:
            return found
        work = Work(place, Loader(where, options.root, options.download), options, team)
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
            try:
                place.describe()
                take(place.result())
            except PruningError as error:
                take(place.failure(reason(error)))
    for group in groups_of(pending, size):
        with ExitStack() as held:
            works = []
            for experiment in group:
                place = RunFolder(experiment, folder)
                try:
                    if _claim(place, held, wait=False):
                        works.append(Work(place, loader, options))
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
    points = Checkpoints(result.folder, mark_of(experiment, masks))
    state = points.read(points.latest)
    model.load_state_dict({n.removeprefix("model."): value for n, value in state.items() if n.startswith("model.")})
    return model


def _claim(place: RunFolder, held: ExitStack, wait: bool) -> bool:
    """Take the lock of a run into `held`; False where it is finished by now."""
    place.path.mkdir(parents=True, exist_ok=True)
    held.enter_context(locked(place.lock, wait))
    return not place.done


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
    works: Sequence[Work],
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
    works: Sequence[Work],
    options: Options,
    tell: Callable[[float, str], None],
    take: Callable[[RunResult], None],
) -> None:
    """Run what is locked, side by side as far as it fits together; what fails is recorded and the rest goes on."""
    ready: dict[tuple, list[Work]] = {}
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
    works: Sequence[Work],
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


def _by_epochs(progress: Report | None, work: Work) -> Callable[[int, Sequence[Epoch]], None]:
    """Tell of the epochs that were left when this process began: those have its speed."""
    total = work.run.recipe.epochs

    def told(done: int, epochs: Sequence[Epoch]) -> None:
        if progress is not None:
            progress(done - work.done, total - work.done, f"epoch {done}: {_epoch(epochs[0])}")

    return told


def _epoch(epoch: Epoch) -> str:
    text = f"loss {epoch.loss:.4f}, train {100 * epoch.train:.2f} %"
    return text + (f", validation {100 * epoch.validation:.2f} %" if epoch.validation == epoch.validation else "")
