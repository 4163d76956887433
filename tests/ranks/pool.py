"""Four gloo processes that run functions of `ranks.jobs`, together or the first two of them."""

import importlib
import os
import socket
import sys
import traceback
from datetime import timedelta
from multiprocessing import forkserver

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from coverage import Coverage

SIZE = 4


class Pool:
    def __init__(self, size: int = SIZE) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = _context()
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, theirs, _covered()), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def start(self, job: str, *args, size: int | None = None) -> None:
        for pipe in self.pipes[:size]:
            pipe.send((job, args, size or len(self.pipes)))

    def result(self, rank: int, wait: float = 120):
        """("done", what the job returned) or ("raised", kind, message)."""
        if not self.pipes[rank].poll(wait):
            raise TimeoutError(f"rank {rank} has not answered in {wait} s")
        return self.pipes[rank].recv()

    def __call__(self, job: str, *args, size: int | None = None) -> list:
        """What the job returns on each rank; an error where it raises on one."""
        self.start(job, *args, size=size)
        results = [self.result(rank) for rank in range(size or len(self.pipes))]
        for rank, result in enumerate(results):
            assert result[0] == "done", f"rank {rank}: {result[1]}: {result[2]}"
        return [result[1] for result in results]

    def raised(self, job: str, *args, size: int | None = None) -> list[tuple[str, str]]:
        """(kind, message) of the error on each rank; it must raise on all of them."""
        self.start(job, *args, size=size)
        results = [self.result(rank) for rank in range(size or len(self.pipes))]
        assert all(result[0] == "raised" for result in results), results
        return [(result[1], result[2]) for result in results]

    def close(self) -> None:
        for pipe in self.pipes:
            try:
                pipe.send(None)
            except OSError:
                continue
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()


def _context():
    """Processes are forked from one that has imported everything, and has no threads yet: importing takes seconds."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ranks.preload"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))  # the server looks nowhere else
        forkserver.ensure_running()
    return context


def _covered() -> tuple[str, str | bool] | None:
    """Where this process's coverage is written, if it is measured: that of the ranks belongs to it."""
    found = Coverage.current()
    if found is None:
        return None
    return os.path.abspath(found.config.data_file), found.config.config_file or False


def _serve(rank: int, size: int, port: int, pipe, covered: tuple[str, str | bool] | None) -> None:
    if covered is None:
        _answer(rank, size, port, pipe)
        return
    measured = Coverage(covered[0], data_suffix=True, config_file=covered[1])
    measured.start()
    try:
        _answer(rank, size, port, pipe)
    finally:
        measured.stop()
        measured.save()


def _answer(rank: int, size: int, port: int, pipe) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    groups = {size: None, 2: dist.new_group([0, 1])}
    jobs = importlib.import_module("ranks.jobs")
    while True:
        asked = pipe.recv()
        if asked is None:
            break
        job, args, count = asked
        try:
            with torch.random.fork_rng():
                torch.manual_seed(rank)  # what must be equal must not be so by chance
                pipe.send(("done", getattr(jobs, job)(rank, count, groups[count], *args)))
        except Exception as error:  # noqa: BLE001  the test looks at it
            traceback.print_exc()
            pipe.send(("raised", type(error).__name__, str(error)))
    dist.barrier()
    dist.destroy_process_group()
