"""A Slurm cluster, through submitit: arrays of jobs, each of which takes a group of runs.

A job that is preempted or near its time limit puts itself back into the queue and goes on from the checkpoints of its
runs. One that is killed outright is noticed by its absence from the queue, and its runs are sent again. Before jobs are
sent, a file says which runs they will take; so a front that is started after another was killed finds them in the queue
and waits for them, and sends the rest.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prospr.errors import FolderError, PruningError, SettingError
from prospr.lab.executors.front import ATTEMPTS, Ended, Group, Task
from prospr.lab.runs.files import read_json, write_json
from prospr.lab.runs.folder import RunFolder

__all__ = ["Slurm"]

MOST = 1000  # jobs of an array; Slurm's own limit is as a rule 1001
ABSENCES = 2  # looks at the queue that miss a job before it counts as ended
FAILURES = 20  # looks at the queue in a row that fail before the front gives up; the jobs go on
FORGOTTEN = 3600  # seconds after which a file about jobs that are not in the queue is of no use
WARNING = 90  # seconds before the time limit at which a job puts itself back into the queue
REMEDY = "start this on a machine of the cluster that has it, or take another executor"


@dataclass(frozen=True)
class Slurm:
    """What a job asks for. What is None is left to the cluster.

    minutes: after which a job goes back into the queue.
    memory: GiB.
    gpus: for each job; with none the runs are trained on the CPU.
    runs_per_job: taken one after another, on a GPU `together` side by side; by default as many as are side by side.
    at_once: jobs of an array that may run at the same time.
    sbatch: further options of sbatch, without dashes: "account=vision", "exclusive".
    poll: seconds between looks at the queue.

    The folder of runs must lie where this machine and all nodes have it.
    """

    partition: str | None = None
    minutes: int = 240
    cpus: int = 1
    gpus: int = 0
    memory: float | None = None
    runs_per_job: int | None = None
    at_once: int = 100
    sbatch: tuple[str, ...] = ()
    poll: float = 10.0

    def __post_init__(self) -> None:
        for name, least in {"minutes": 1, "cpus": 1, "gpus": 0, "runs_per_job": 1, "at_once": 1}.items():
            value = getattr(self, name)
            if value is not None and (value < least or value != int(value)):
                raise SettingError(f"{name}={value}: Slurm takes a whole number, at least {least}")
            if value is not None:
                object.__setattr__(self, name, int(value))

    def device(self, asked: str | None) -> str:
        return asked or ("cuda" if self.gpus else "cpu")

    def size(self, side_by_side: int) -> int:
        return self.runs_per_job or side_by_side

    def threads(self) -> int:
        return self.cpus

    def crew(self, task: Task) -> _Jobs:
        return _Jobs(self, task.elsewhere())

    def parameters(self, name: str) -> dict[str, Any]:
        """What submitit is told."""
        memory = None if self.memory is None else f"{round(self.memory * 1024)}MB"
        given = {"partition": self.partition, "mem": memory, "gpus_per_node": self.gpus or None}
        extra = dict(_option(text) for text in self.sbatch)
        return {
            "job_name": name,
            "time": self.minutes,
            "cpus_per_task": self.cpus,
            "signal_delay_s": min(WARNING, 15 * self.minutes),
            "array_parallelism": self.at_once,
            "srun_args": [f"--cpus-per-task={self.cpus}"],  # Slurm 22.05 and later do not take it from sbatch
            "additional_parameters": {"requeue": True, **extra},
            **{key: value for key, value in given.items() if value is not None},
        }


def _option(text: str) -> tuple[str, str | bool]:
    """
    >>> _option("account=vision"), _option("--exclusive")
    (('account', 'vision'), ('exclusive', True))
    """
    name, found, value = text.lstrip("-").partition("=")
    return name, value if found else True


@dataclass
class Element:
    """One job of an array: submitit calls it, and calls `checkpoint` when the job is to end before it is done."""

    task: Task
    group: Group
    stalls: int = 0  # times in a row that the job ended with nothing new to go on from
    _begun_with: int = field(default=0, init=False)

    def __call__(self) -> dict[str, str]:
        self._begun_with = self._epochs()
        _die_of_failed_requeues()
        return self.task.run(self.group)

    def checkpoint(self) -> Any:
        """What is put back into the queue; None where that has not helped so far."""
        from submitit.helpers import DelayedSubmission

        stalls = self.stalls + 1 if self._epochs() == self._begun_with else 0
        return DelayedSubmission(Element(self.task, self.group, stalls)) if stalls < ATTEMPTS else None

    def _epochs(self) -> int:
        return sum(len(RunFolder(one, self.task.folder).metrics()) for one in self.group)


def _die_of_failed_requeues() -> None:
    """An error in submitit's handler would come up inside a run and be taken for its own; let it end the process."""
    from submitit.core.job_environment import JobEnvironment

    number = JobEnvironment._usr_sig()
    handle: Any = signal.getsignal(number)

    def handler(signum: int, frame: Any) -> None:
        try:
            handle(signum, frame)
        except Exception as error:
            raise SystemExit(f"prospr: the job could not be put back into the queue: {error}") from error

    signal.signal(number, handler)


@contextmanager
def _outside_of_jobs() -> Generator[None, None, None]:
    """Where the front is itself in a job, jobs are not to take that one's settings from the environment."""
    names = [name for name in os.environ if name.startswith("SLURM_") and name != "SLURM_CONF"]
    inherited = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(inherited)


Key = tuple[str, int]  # a job: the name of its array, and its number in it


class _Jobs:
    """The jobs of a sweep. `folder/slurm/` has a file and a folder of logs for every array."""

    def __init__(self, settings: Slurm, task: Task) -> None:
        _submitit()
        for program in ("sbatch", "squeue", "scontrol"):
            if shutil.which(program) is None:
                raise SettingError(f"executor 'slurm': there is no {program} on this machine; {REMEDY}")
        self._settings, self._task = settings, task
        self._home = Path(task.folder) / "slurm"
        self._groups: dict[Key, Group] = {}
        self._ids: dict[Key, str] = {}  # Slurm's
        self._absences: Counter[Key] = Counter()
        self._sent: list[str] = []  # arrays of this front
        self._adopted: list[str] = []  # of fronts before
        self._lost: set[str] = set()  # arrays with a job that died: their logs are kept
        self._failures = 0
        self._looked = -settings.poll

    @property
    def room(self) -> int:
        return MOST - len(self._groups)

    @property
    def under_way(self) -> int:
        return len(self._groups)

    def adopt(self, groups: Sequence[Group]) -> list[Group]:
        queue = self._queue()
        wanted = {one.identity: one for group in groups for one in group}
        for path in sorted(self._home.glob("*.json")):
            name = path.stem
            present = {number for array, number in queue if array == name}
            if not present and time.time() - path.stat().st_mtime > FORGOTTEN:
                path.unlink(missing_ok=True)
            for number, identities in enumerate(self._recorded(path)):
                mine = [wanted.pop(identity) for identity in identities if identity in wanted and number in present]
                if mine:
                    self._groups[name, number] = mine
                    self._adopted.append(name)
        self._ids |= {key: queue[key] for key in self._groups}
        left = [[one for one in group if one.identity in wanted] for group in groups]
        return [group for group in left if group]

    def _recorded(self, path: Path) -> list[list[str]]:
        try:
            return read_json(path).get("groups", [])
        except (FolderError, FileNotFoundError):  # another front has removed it
            return []

    def start(self, groups: Sequence[Group]) -> None:
        submitit = _submitit()
        name = f"prospr-{uuid.uuid4().hex[:12]}"
        self._sent.append(name)
        write_json(self._home / f"{name}.json", {"groups": [[one.identity for one in group] for group in groups]})
        executor = submitit.SlurmExecutor(folder=self._home / name, max_num_timeout=1_000_000)  # `checkpoint` decides
        executor.update_parameters(**self._settings.parameters(name))
        try:
            with _outside_of_jobs():
                jobs = executor.submit_array([Element(self._task, group) for group in groups])
        except (subprocess.CalledProcessError, submitit.core.utils.FailedJobError) as error:
            self._forget(name)
            raise SettingError(f"executor 'slurm': sbatch refused the jobs: {' '.join(str(error).split())}") from error
        for number, (job, group) in enumerate(zip(jobs, groups, strict=True)):
            self._groups[name, number], self._ids[name, number] = group, job.job_id

    def ended(self, patience: float) -> list[Ended]:
        time.sleep(patience)
        if time.monotonic() - self._looked < self._settings.poll:
            return []
        self._looked = time.monotonic()
        try:
            queue = self._queue()
            self._failures = 0
        except PruningError:  # the controller is busy, or being started again
            self._failures += 1
            if self._failures == FAILURES:
                raise
            return []
        found = [self._end(key, key in queue) for key in list(self._groups)]
        return [one for one in found if one is not None]

    def _end(self, key: Key, queued: bool) -> Ended | None:
        """How a job ended; None while it may still be there."""
        name, _ = key
        outcomes = self._outcomes(key)
        if outcomes is None:
            self._absences[key] = 0 if queued else self._absences[key] + 1
            if self._absences[key] < ABSENCES:
                return None
            self._lost.add(name)
        group = self._groups.pop(key)
        return Ended(group, outcomes, f"Slurm job {self._ids[key]}, whose log is in {self._home / name}")

    def _outcomes(self, key: Key) -> Mapping[str, str] | None:
        """What a job that came to its end left; None where it did not."""
        submitit = _submitit()
        path = submitit.core.utils.JobPaths(self._home / key[0], self._ids[key]).result_pickle
        try:
            word, found = submitit.core.utils.pickle_load(path)
        except FileNotFoundError:
            return None
        return found if word == "success" else None

    def _queue(self) -> dict[Key, str]:
        """{job: Slurm's number of it} of this user's jobs that wait, run, or are being ended."""
        command = ["squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%j|%F|%K"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        except subprocess.SubprocessError as error:
            why = (getattr(error, "stderr", None) or str(error)).strip()
            raise PruningError(f"squeue failed: {why}; jobs go on, and the same command finds them again") from error
        found: dict[Key, str] = {}
        for line in done.stdout.splitlines():
            name, job, number = line.rsplit("|", 2)
            single = not number.isdigit()  # not of an array
            found[name, 0 if single else int(number)] = job if single else f"{job}_{number}"
        return found

    def _forget(self, name: str) -> None:
        (self._home / f"{name}.json").unlink(missing_ok=True)
        if name not in self._lost:
            shutil.rmtree(self._home / name, ignore_errors=True)

    def __enter__(self) -> _Jobs:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Ctrl-C ends the jobs of this front. Any other error leaves them and their files to the next front."""
        if kind is not None and not issubclass(kind, KeyboardInterrupt):
            return
        for name in self._sent:
            if kind is not None:
                with suppress(subprocess.TimeoutExpired):  # the controller is away; then they go on
                    subprocess.run(["scancel", f"--name={name}", f"--user={os.getuid()}"], check=False, timeout=60)
            self._forget(name)
        for name in set(self._adopted):
            runs = [run for group in self._recorded(self._home / f"{name}.json") for run in group]
            if all((self._home.parent / run / "result.json").exists() for run in runs):
                self._forget(name)


def _submitit() -> Any:
    try:
        import submitit
        import submitit.core.utils
    except ModuleNotFoundError:
        raise SettingError(
            "executor 'slurm' needs submitit, which is not installed: pip install 'prospect-pruning[slurm]'"
        ) from None
    return submitit
