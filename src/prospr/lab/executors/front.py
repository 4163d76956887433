"""The front of a sweep: it hands groups of runs to workers and sees what becomes of them, wherever the workers are.

What counts is what lies in the folders. A worker says how its runs ended, or dies; either way the front looks whether
there is a result. A run that is neither finished nor failed is handed out again, and given up when `ATTEMPTS` workers
have died at it. What somebody else is at work on, which its lock tells, is left to them and looked at again.
"""

from __future__ import annotations

import os
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from prospr.errors import FolderError, PruningError
from prospr.lab.experiment import Experiment
from prospr.lab.runs.files import BusyError, is_locked, locked
from prospr.lab.runs.folder import RunFolder, RunResult

if TYPE_CHECKING:
    from prospr.lab.progress import Report
    from prospr.lab.runs.work import Options

__all__ = ["BUSY", "DONE", "Crew", "Ended", "Executor", "Front", "Task"]

ATTEMPTS = 2  # workers that may die over a run before it is given up
PATIENCE = 0.5  # seconds between looks at what others are at
GRACE = 60.0  # seconds that a network file system may take to show a result
DONE, BUSY = "done", "busy"  # outcomes of a run; any other is its error

Group = Sequence[Experiment]


@dataclass(frozen=True)
class Task:
    """What a worker has to know to run groups of experiments. It is pickled."""

    folder: str
    device: str
    together: int
    options: Options
    threads: int

    def run(self, group: Group, progress: Report | None = None) -> dict[str, str]:
        """In the worker: run what nobody else is at; {identity: outcome}."""
        import torch

        if self.device == "cpu":
            torch.set_num_threads(self.threads)
        return self._outcomes(group, progress)

    def _outcomes(self, group: Group, progress: Report | None) -> dict[str, str]:
        from prospr.lab.run import run_many
        from prospr.lab.runs.work import reason

        options, root = self.options, self.options.root
        how: dict[str, Any] = {"together": self.together, "options": options, "wait": False}
        try:
            loader = _loader(self.device, None if root is None else os.fspath(root), options.download)
            found = run_many(group, self.folder, self.device, progress, loader=loader, **how)
        except Exception as error:  # noqa: BLE001  whatever it was, the other runs go on
            if len(group) > 1:
                return {key: value for one in group for key, value in self._outcomes([one], progress).items()}
            _record(RunFolder(group[0], self.folder), reason(error), "".join(traceback.format_exception(error)))
            return {group[0].identity: reason(error)}
        return {one.experiment.identity: self._outcome(one) for one in found}

    def _outcome(self, result: RunResult) -> str:
        if result.error is None:
            return DONE
        return BUSY if result.error.startswith(BusyError.__name__) else result.error

    def elsewhere(self) -> Task:
        """The same for a worker that may stand in another folder: with whole paths."""
        root = self.options.root
        options = self.options if root is None else replace(self.options, root=os.path.abspath(root))
        return replace(self, folder=os.path.abspath(self.folder), options=options)


@dataclass(frozen=True)
class Ended:
    """A worker's group has ended: the outcomes, or None where the worker died, and who that was."""

    group: Group
    outcomes: Mapping[str, str] | None
    who: str = ""


class Crew(Protocol):
    """Workers. As a context, its end stops them where it must."""

    @property
    def room(self) -> int:
        """How many groups it takes now."""
        ...

    @property
    def under_way(self) -> int:
        """How many groups it has and has not told the end of."""
        ...

    def adopt(self, groups: Sequence[Group]) -> list[Group]:
        """Take what workers of an earlier front still have; the groups that are left."""
        ...

    def start(self, groups: Sequence[Group]) -> None: ...

    def ended(self, patience: float) -> list[Ended]:
        """The groups that have ended, after waiting for one for so many seconds."""
        ...

    def __enter__(self) -> Crew: ...
    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None: ...


class Executor(Protocol):
    """Where runs are run."""

    def device(self, asked: str | None) -> str:
        """The device of the workers, which may be other machines."""
        ...

    def size(self, side_by_side: int) -> int:
        """How many runs a worker is handed at a time, which trains so many side by side."""
        ...

    def threads(self) -> int:
        """The threads of a worker on a CPU."""
        ...

    def crew(self, task: Task) -> Crew: ...


class Front:
    """The results of `wanted` in `folder`, as they come."""

    def __init__(self, wanted: Sequence[Experiment], folder: str | os.PathLike[str], progress: Report | None) -> None:
        self.results: dict[str, RunResult] = {}
        self._folder, self._progress, self._total = folder, progress, len(wanted)
        self._deaths: Counter[str] = Counter()
        self._waiting: list[Group] = []
        self.left: list[Experiment] = []
        for one in wanted:
            place = self._place(one)
            if place.done:
                self._take(_result(place))
            else:
                self.left.append(one)

    def run(self, groups: Sequence[Group], crew: Crew) -> None:
        """Until every run has a result."""
        with crew:
            self._waiting = crew.adopt(groups)
            while self._waiting or crew.under_way:
                free = self._free(crew.room)
                if free:
                    crew.start(free)
                for end in crew.ended(PATIENCE):
                    self._settle(end)

    def _free(self, room: int) -> list[Group]:
        """The next groups, as far as nobody else is at them; what is finished by now is taken."""
        chosen: list[Group] = []
        kept: list[Group] = []
        for group in self._waiting:
            if len(chosen) == room:
                kept.append(group)
                continue
            free = []
            for one in group:
                place = self._place(one)
                if place.done:
                    self._take(_result(place))
                elif is_locked(place.lock):
                    kept.append([one])
                else:
                    free.append(one)
            if free:
                chosen.append(free)
        self._waiting = kept
        return chosen

    def _settle(self, end: Ended) -> None:
        for one in end.group:
            place = self._place(one)
            outcome = None if end.outcomes is None else end.outcomes[one.identity]
            if place.done or (outcome == DONE and self._shows(place)):
                self._take(_result(place))
            elif outcome is None:
                self._died(one, end.who)
            elif outcome == BUSY:
                self._waiting.append([one])
            else:
                self._take(place.failure(outcome))

    def _died(self, one: Experiment, who: str) -> None:
        """Hand a run out again, by itself, or give it up."""
        self._deaths[one.identity] += 1
        place = self._place(one)
        if self._deaths[one.identity] < ATTEMPTS:
            self._waiting.insert(0, [one])
            return
        error = f"{ATTEMPTS} workers died at it; the last was {who}"
        if _record(place, error):
            self._take(place.failure(error))
        else:
            self._waiting.append([one])

    def _shows(self, place: RunFolder) -> bool:
        """Wait for the result that a worker says it has written."""
        end = time.monotonic() + GRACE
        while time.monotonic() < end:
            if place.path.is_dir() and "result.json" in os.listdir(place.path):
                return True
            time.sleep(PATIENCE)
        raise FolderError(
            f"{place.path}: a worker says that it finished this run, and there is no result here; the folder of runs "
            "must be on a file system that this machine and the workers share"
        )

    def _take(self, result: RunResult) -> None:
        from prospr.lab.run import describe

        self.results[result.experiment.identity] = result
        if self._progress is not None:
            self._progress(len(self.results), self._total, describe(result))

    def _place(self, one: Experiment) -> RunFolder:
        return RunFolder(one, self._folder)


def _result(place: RunFolder) -> RunResult:
    """Of a run that is done; one whose result cannot be read has failed, and the others go on."""
    try:
        return place.result()
    except PruningError as error:
        return place.failure(str(error))


def _record(place: RunFolder, error: str, trace: str = "") -> bool:
    """Write down that a run failed, where it has not done so itself; False where somebody else is at it, or was."""
    from prospr.lab.runs.environment import now

    try:
        place.path.mkdir(parents=True, exist_ok=True)
        with locked(place.lock):
            if place.done:
                return False
            if (place.error() or {}).get("error") != error:
                with suppress(FolderError):  # which may be the very error
                    place.begin()
                place.fail({"error": error, "traceback": trace, "when": now(), "environment": {}})
    except BusyError:
        return False
    except (FolderError, OSError):  # a disk that is full, a folder that may not be written: the result says it
        pass
    return True


@lru_cache(maxsize=1)
def _loader(device: str, root: str | None, download: bool) -> Any:
    """The data sets of a worker, which are loaded once however many groups it is handed."""
    import torch

    from prospr.lab.runs.making import Loader

    return Loader(torch.device(device), root, download)
