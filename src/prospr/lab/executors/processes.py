"""Processes of this machine. One that dies is replaced."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, get_all_start_methods, get_context, parent_process
from typing import Any

from prospr.errors import SettingError
from prospr.lab.executors.front import Ended, Group, Task

__all__ = ["Processes"]


@dataclass(frozen=True)
class Processes:
    """So many processes. On a CPU they share its threads; on a GPU they share the GPU."""

    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise SettingError(f"processes={self.count}: use at least 1")

    def device(self, asked: str | None) -> str:
        from prospr.lab.run import choose_device

        return str(choose_device(asked))

    def size(self, side_by_side: int) -> int:
        return side_by_side

    def threads(self) -> int:
        import torch

        return max(1, torch.get_num_threads() // self.count)

    def crew(self, task: Task) -> _Crew:
        return _Crew(self.count, task)


class _Worker:
    """A process, the pipe to it, and what it is at."""

    def __init__(self, task: Task) -> None:
        context = _context(task.device)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, task), daemon=False)
        self.process.start()
        theirs.close()  # so that a death is the end of the pipe
        self.group: Group = ()

    def give(self, group: Group) -> None:
        self.pipe.send(group)
        self.group = group


class _Crew:
    def __init__(self, count: int, task: Task) -> None:
        self._count, self._task = count, task
        self._workers: list[_Worker] = []

    @property
    def room(self) -> int:
        return self._count - self.under_way

    @property
    def under_way(self) -> int:
        return sum(bool(worker.group) for worker in self._workers)

    def adopt(self, groups: Sequence[Group]) -> list[Group]:
        return list(groups)  # processes end with their front

    def start(self, groups: Sequence[Group]) -> None:
        for group in groups:
            while not self._given(group):
                pass

    def _given(self, group: Group) -> bool:
        """Whether an idle worker, or a new one, has got `group`."""
        idle = [worker for worker in self._workers if not worker.group]
        if not idle:
            idle = [_Worker(self._task)]
            self._workers += idle
        try:
            idle[0].give(group)
        except OSError:  # it died while it had nothing to do, and nobody is to blame
            self._bury(idle[0])
            return False
        return True

    def ended(self, patience: float) -> list[Ended]:
        busy: dict[Any, _Worker] = {worker.pipe: worker for worker in self._workers if worker.group}
        if not busy:
            time.sleep(patience)
        return [self._end(busy[pipe]) for pipe in connection.wait(list(busy), patience)]

    def _end(self, worker: _Worker) -> Ended:
        group = worker.group
        try:
            outcomes: dict[str, str] = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._bury(worker)
            return Ended(group, None, f"process {worker.process.pid}, exit code {worker.process.exitcode}")
        worker.group = ()
        return Ended(group, outcomes)

    def _bury(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.pipe.close()
        worker.process.join()

    def __enter__(self) -> _Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for worker in self._workers:
            worker.pipe.close()  # one that has nothing to do ends by itself
            if worker.group:
                worker.process.terminate()
        for worker in self._workers:
            worker.process.join()


def _context(device: str) -> Any:
    """How processes are made: anew for a GPU, else where the system can as copies of one that imported torch."""
    if device != "cpu" or "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(["prospr.lab.run", __name__, "torch._dynamo"])  # the last is what SGD imports
    return context


def _work(pipe: Any, task: Task) -> None:
    """In a process of its own: run the groups that come through `pipe`, and say how they ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the first of them ends the others
    front = parent_process()

    def stay(done: float, total: int, text: str) -> None:
        if front is not None and not front.is_alive():
            raise SystemExit(1)  # the process that asked is gone; what is saved stays

    with suppress(EOFError, BrokenPipeError):  # until the front has nothing more, or is gone
        while True:
            pipe.send(task.run(pipe.recv(), stay))
