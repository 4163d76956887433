"""A Ray cluster, or one started on this machine: a task for each group of runs.

Ray is not asked to retry: the front does, so that a worker's death counts for its runs as it does everywhere else.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prospr.errors import PruningError, SettingError
from prospr.lab.executors.front import Ended, Group, Task

__all__ = ["Ray"]

EVERYTHING = 1_000_000  # Ray has a queue of its own


@dataclass(frozen=True)
class Ray:
    """What a task asks for.

    address: of a cluster, "auto" for the one of this machine, "ray://host:10001" for a client; None starts one here
        that ends with the sweep.
    cpus, gpus: of each task, which trains one run, or on a GPU `together` side by side; 0.25 of a GPU lets four share.

    The folder of runs must lie where all machines of the cluster have it.
    """

    address: str | None = None
    cpus: float = 1.0
    gpus: float = 0.0

    def __post_init__(self) -> None:
        if self.cpus <= 0 or self.gpus < 0:
            raise SettingError(f"cpus={self.cpus:g}, gpus={self.gpus:g}: a Ray task takes more than 0, and at least 0")

    def device(self, asked: str | None) -> str:
        return asked or ("cuda" if self.gpus else "cpu")

    def size(self, side_by_side: int) -> int:
        return side_by_side

    def threads(self) -> int:
        return max(1, int(self.cpus))

    def crew(self, task: Task) -> _Tasks:
        return _Tasks(self, task.elsewhere())


class _Tasks:
    def __init__(self, settings: Ray, task: Task) -> None:
        try:
            import ray
            import ray.exceptions
        except ModuleNotFoundError:
            raise SettingError(
                "executor 'ray' needs ray, which is not installed: pip install 'prospect-pruning[ray]'"
            ) from None
        self._ray, self._settings, self._task = ray, settings, task
        self._groups: dict[Any, Group] = {}
        self._ours = False  # whether this sweep connected to Ray

    @property
    def room(self) -> int:
        return EVERYTHING

    @property
    def under_way(self) -> int:
        return len(self._groups)

    def adopt(self, groups: Sequence[Group]) -> list[Group]:
        return list(groups)  # tasks end with their front

    def start(self, groups: Sequence[Group]) -> None:
        work = self._ray.remote(_work).options(
            num_cpus=self._settings.cpus, num_gpus=self._settings.gpus, max_retries=0, name="prospr"
        )
        for group in groups:
            self._groups[work.remote(self._task, os.getcwd(), list(group))] = group

    def ended(self, patience: float) -> list[Ended]:
        if not self._groups:
            time.sleep(patience)
            return []
        ready, _ = self._ray.wait(list(self._groups), num_returns=1, timeout=patience)
        if ready:  # and the others that are ready too
            ready, _ = self._ray.wait(list(self._groups), num_returns=len(self._groups), timeout=0)
        return [self._end(reference) for reference in ready]

    def _end(self, reference: Any) -> Ended:
        group = self._groups.pop(reference)
        try:
            return Ended(group, self._ray.get(reference))
        except self._ray.exceptions.RayTaskError as error:  # it could not be begun there: a module that is missing
            why = error.cause or error
            text = f"{type(why).__name__}: {' '.join(str(why).split())}"
            return Ended(group, dict.fromkeys((one.identity for one in group), text))
        except self._ray.exceptions.RayError as error:
            return Ended(group, None, f"a worker of Ray ({type(error).__name__})")

    def __enter__(self) -> _Tasks:
        ray, address = self._ray, self._settings.address
        if ray.is_initialized():
            return self
        try:
            context = ray.init(address or "local", log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where, why = address or "this machine", " ".join(str(error).split())
            if "AuthenticationError" in f"{error!r} {error.__cause__!r}":
                why += "; it asks for a token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, as Ray's documentation says"
            raise PruningError(f"executor 'ray': there is no connection to {where}: {why}") from error
        self._ours = True
        self._check()
        if context.dashboard_url:
            print(f"Ray's dashboard: http://{context.dashboard_url}", file=sys.stderr)
        return self

    def _check(self) -> None:
        """An error for tasks that no machine of the cluster could ever take; Ray itself would wait."""
        has = self._ray.cluster_resources()
        for name, asked in (("CPU", self._settings.cpus), ("GPU", self._settings.gpus)):
            if asked > has.get(name, 0):
                self._ray.shutdown()
                raise SettingError(
                    f"executor 'ray': a task asks for {asked:g} {name}, and the cluster has {has.get(name, 0):g}"
                )

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for reference in self._groups:
            self._ray.cancel(reference, force=True)
        if self._ours:
            self._ray.shutdown()


def _work(task: Task, home: str, group: Group) -> dict[str, str]:
    """In a worker of the cluster."""
    if os.path.isdir(home):
        os.chdir(home)  # for data that lie there
    return task.run(group)
