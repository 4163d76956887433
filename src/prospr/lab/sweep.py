"""Many experiments: in processes of this machine, on a Slurm cluster, on a Ray cluster. Any of them may be killed.

Workers take runs that nobody is at, so that sweeps of several terminals or machines can share a folder.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from prospr.errors import SettingError
from prospr.lab.executors import Executor, Processes
from prospr.lab.executors.front import Front, Task
from prospr.lab.experiment import Experiment
from prospr.lab.progress import Report
from prospr.lab.run import Options, groups_of, run_many, side_by_side
from prospr.lab.runs.folder import FOLDER, RunResult
from prospr.lab.runs.making import check

__all__ = ["sweep"]


def sweep(
    experiments: Sequence[Experiment],
    folder: str | os.PathLike[str] = FOLDER,
    device: torch.device | str | None = None,
    progress: Report | None = None,
    *,
    processes: int = 1,
    together: int = 4,
    options: Options | None = None,
    executor: Executor | None = None,
) -> list[RunResult]:
    """Run `experiments`; one result each.

    processes: so many on this machine. With one it is `run_many`.
    together: on a GPU, the runs a worker trains side by side.
    progress: `progress(runs_done, runs, text)` when a run has ended; with one process after every epoch.
    executor: `Slurm(...)` or `Ray(...)` of `prospr.lab.executors`, in place of processes on this machine.

    A run that fails has a result with its `error`, and the others go on. A worker that dies (killed, out of memory) is
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
    if executor is not None and processes != 1:
        raise SettingError(f"processes={processes}: an executor is given, which has workers of its own; leave one out")
    chosen: Executor = executor or Processes(processes)
    options = options or Options()
    if chosen == Processes(1):
        return run_many(experiments, folder, device, progress, together=together, options=options)
    for experiment in experiments:
        check(experiment)
    where = chosen.device(None if device is None else str(device))
    size = chosen.size(side_by_side(together, torch.device(where), options))
    task = Task(os.fspath(folder), where, together, options, chosen.threads())
    front = Front(list({one.identity: one for one in experiments}.values()), folder, progress)
    if front.left:
        front.run(groups_of(front.left, size), chosen.crew(task))
    return [front.results[one.identity] for one in experiments]
