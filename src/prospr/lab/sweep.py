"""Many experiments in several processes on this machine. Processes may die: what they were at is taken up by others.

Each process takes the next runs that nobody is at, so that sweeps of several terminals or machines can share a folder.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Sequence
from multiprocessing import connection, get_all_start_methods, get_context
from typing import Any

import torch

from prospr.errors import SettingError
from prospr.lab.experiment import Experiment
from prospr.lab.progress import Report
from prospr.lab.run import Options, choose_device, describe, groups_of, reason, run_many, side_by_side
from prospr.lab.runs.environment import environment, now
from prospr.lab.runs.files import is_locked
from prospr.lab.runs.folder import FOLDER, RunFolder, RunResult
from prospr.lab.runs.making import Loader, check

__all__ = ["sweep"]

ATTEMPTS = 2  # processes that may die over a run before it is given up


def sweep(
    experiments: Sequence[Experiment],
    folder: str | os.PathLike[str] = FOLDER,
    device: torch.device | str | None = None,
    progress: Report | None = None,
    *,
    processes: int = 1,
    together: int = 4,
    options: Options | None = None,
) -> list[RunResult]:
    """Run `experiments` in so many processes; one result each. With one process it is `run_many`.

    together: on a GPU, the runs each process trains side by side.
    progress: `progress(runs_done, runs, text)` after every epoch; a fraction is of runs that are under way.

    A run that fails has a result with its `error`, and the others go on. A process that dies (killed, out of memory) is
    replaced, and its runs go on from their checkpoints; over which two have died, a run is given up as failed.

    On a CPU the threads are shared out among the processes. New processes import the main script: guard what it does
    with `if __name__ == "__main__":`.

    >>> import tempfile
    >>> from prospr.lab.experiment import Training
    >>> from prospr.lab.grid import grid
    >>> base = Experiment(training=Training(epochs=1, batch_size=256))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     results = sweep(grid(base, method=["dense", "snip"]), folder, "cpu")
    >>> [result.error for result in results]
    [None, None]
    """
    if processes < 1:
        raise SettingError(f"processes={processes}: use at least 1")
    options = options or Options()
    if processes == 1:
        return run_many(experiments, folder, device, progress, together=together, options=options)
    for experiment in experiments:
        check(experiment)
    where = choose_device(device)
    wanted = list({one.identity: one for one in experiments}.values())
    crew = _Crew(processes, (folder, str(where), together, options), progress, len(wanted))
    pending = []
    for one in wanted:
        place = RunFolder(one, folder)
        if place.done:
            crew.take(place.result())
        else:
            pending.append(one)
    crew.run(groups_of(pending, side_by_side(together, where, options)))
    return [crew.results[one.identity] for one in experiments]


class _Worker:
    """A process, the pipe to it, and what it is at."""

    def __init__(self, settings: tuple, threads: int) -> None:
        context = _context(settings[1])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, threads, *settings), daemon=False)
        self.process.start()
        theirs.close()  # so that a death is the end of the pipe
        self.group: list[Experiment] = []
        self.share = 0.0  # of its group that is done

    def give(self, group: list[Experiment]) -> None:
        self.group, self.share = group, 0.0
        self.pipe.send(group)


class _Crew:
    def __init__(self, processes: int, settings: tuple, progress: Report | None, total: int) -> None:
        self.results: dict[str, RunResult] = {}
        self._processes, self._settings, self._progress, self._total = processes, settings, progress, total
        self._folder, self._device = settings[0], torch.device(settings[1])
        self._threads = max(1, torch.get_num_threads() // processes)
        self._deaths: Counter[str] = Counter()
        self._workers: list[_Worker] = []
        self._waiting: list[list[Experiment]] = []

    def take(self, result: RunResult) -> None:
        self.results[result.experiment.identity] = result
        self._tell(0.0, describe(result))

    def _tell(self, fraction: float, text: str) -> None:
        if self._progress is not None:
            self._progress(len(self.results) + fraction, self._total, text)

    def run(self, groups: list[list[Experiment]]) -> None:
        self._waiting = list(groups)
        try:
            while self._waiting or any(worker.group for worker in self._workers):
                self._hand_out()
                busy: dict[Any, _Worker] = {worker.pipe: worker for worker in self._workers if worker.group}
                for pipe in connection.wait(list(busy)):
                    self._hear(busy[pipe])
        finally:
            for worker in self._workers:
                worker.pipe.close()  # one that has nothing to do ends by itself
                if worker.group:
                    worker.process.terminate()
            for worker in self._workers:
                worker.process.join()

    def _hand_out(self) -> None:
        idle = [worker for worker in self._workers if not worker.group]
        while self._waiting and (idle or len(self._workers) < self._processes):
            if idle:
                worker = idle.pop()
            else:
                worker = _Worker(self._settings, self._threads)
                self._workers.append(worker)
            try:
                worker.give(self._next())
            except BrokenPipeError:  # it died while it had nothing to do; the end of its pipe is heard next
                continue

    def _next(self) -> list[Experiment]:
        """The first group that nobody is at; where there is none, the first, which is then waited for."""
        for index, group in enumerate(self._waiting):
            if not any(is_locked(RunFolder(one, self._folder).lock) for one in group):
                return self._waiting.pop(index)
        return self._waiting.pop(0)

    def _hear(self, worker: _Worker) -> None:
        try:
            heard: tuple[float, str] | dict[str, str | None] = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._bury(worker)
            return
        if isinstance(heard, tuple):
            worker.share, text = heard
            under_way = sum(one.share for one in self._workers if one.group)
            self._tell(min(under_way, 0.99), text)  # a whole number is of runs that are done
            return
        errors = heard
        group, worker.group = worker.group, []
        for one in group:
            place, error = RunFolder(one, self._folder), errors[one.identity]
            self.take(place.result() if error is None else place.failure(error))

    def _bury(self, worker: _Worker) -> None:
        """Put what a dead process was at back in the queue, each run by itself, or give it up."""
        self._workers.remove(worker)
        worker.pipe.close()
        worker.process.join()
        again = []
        for one in worker.group:
            place = RunFolder(one, self._folder)
            if place.done:
                self.take(place.result())
                continue
            self._deaths[one.identity] += 1
            if self._deaths[one.identity] < ATTEMPTS:
                again.append([one])
                continue
            error = f"{ATTEMPTS} processes died at it, the last with exit code {worker.process.exitcode}"
            place.path.mkdir(parents=True, exist_ok=True)
            place.fail({"error": error, "traceback": "", "when": now(), "environment": environment(self._device)})
            self.take(place.failure(error))
        self._waiting[:0] = again


def _context(device: str) -> Any:
    """How processes are made: anew for a GPU, else where the system can as copies of one that imported torch."""
    if device != "cpu" or "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(["prospr.lab.sweep", "torch._dynamo"])  # the second is what SGD imports when made
    return context


def _work(pipe: Any, threads: int, folder: str, device: str, together: int, options: Options) -> None:
    """In a process of its own: run the groups that come through `pipe`, and say how each run goes and how it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the first of them ends the others
    if device == "cpu":
        torch.set_num_threads(threads)
    loader = Loader(torch.device(device), options.root, options.download)

    def tell(done: float, total: int, text: str) -> None:
        if done < total:
            try:
                pipe.send((done, text))
            except OSError:  # the process that asked is gone; what is saved stays
                raise SystemExit(1) from None

    while True:
        try:
            group: list[Experiment] = pipe.recv()
        except EOFError:
            return
        try:
            found = run_many(group, folder, device, tell, together=together, options=options, loader=loader)
            errors = {one.experiment.identity: one.error for one in found}
        except Exception as error:  # noqa: BLE001  whatever it was, the other runs go on
            errors = {one.identity: None if RunFolder(one, folder).done else reason(error) for one in group}
        pipe.send(errors)
