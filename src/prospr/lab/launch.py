"""Processes that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from prospr.errors import SettingError
from prospr.lab.run import choose_device
from prospr.meta.ranks import Ranks

__all__ = ["Place", "launched", "refuse_torchrun"]


@dataclass(frozen=True)
class Place:
    """Where this process works, and with whom."""

    device: torch.device
    ranks: Ranks | None = None  # None: it is the only one

    @property
    def first(self) -> bool:
        """Whether it is the one that prints and writes."""
        return self.ranks is None or dist.get_rank() == 0

    @contextmanager
    def in_turn(self) -> Generator[None]:
        """The first process of each machine does it alone, so that a download happens once; then the others."""
        leads = int(os.environ.get("LOCAL_RANK", "0")) == 0
        if self.ranks is not None and not leads:
            dist.barrier()
        yield
        if self.ranks is not None and leads:
            dist.barrier()


def refuse_torchrun() -> None:
    """An error where torchrun started several processes, for what shares work out itself."""
    if _processes() > 1:
        raise SettingError(
            f"torchrun started {_processes()} processes for one run, and this command starts its own for many; call it "
            "without torchrun (--processes), or use torchrun with `prospr run` or `prospr prune`"
        )


def _processes() -> int:
    there = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ)
    return int(os.environ["WORLD_SIZE"]) if there else 1


@contextmanager
def launched(device: str | None = None) -> Generator[Place]:
    """This process's place: alone, or one of those that torchrun started, each with a GPU of its own where it can."""
    if _processes() == 1:
        yield Place(choose_device(device))
        return
    chosen = choose_device(device)
    backend = "gloo"
    if chosen.type == "cuda":
        local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= count:  # NCCL wants a GPU for each process
            backend = "nccl"
        chosen = torch.device("cuda", local % count)
        torch.cuda.set_device(chosen)
    dist.init_process_group(backend)
    try:
        yield Place(chosen, Ranks())
    finally:
        dist.destroy_process_group()
