"""What each process of the data-parallel tests does; imported by name in the processes."""

import gc
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from masks.training import OPTIMIZERS, batch, mlp, random_masks
from torch.nn.parallel import DistributedDataParallel

RANKS = 2


def run(rank: int, folder: str, steps: int) -> None:
    """Train two networks, one masked before it is wrapped and one after; write the weights both end with."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    ends = {when: trained(rank, when, steps) for when in ("before", "after")}
    gc.collect()  # a network that still holds the group would end its threads only as the process ends, and abort it
    torch.save(ends, Path(folder) / f"{rank}.pt")
    store.add("done", 1)
    while store.add("done", 0) < RANKS:  # a connection closed while the other end still reads is an error there
        time.sleep(0.01)
    dist.destroy_process_group()


def trained(rank: int, when: str, steps: int) -> dict[str, torch.Tensor]:
    model = mlp(seed=rank)  # DDP gives all ranks the weights of the first
    del model[1]  # batch statistics are each rank's own
    masks = random_masks(model)
    if when == "before":
        masks.apply(model)
    wrapped = DistributedDataParallel(model)
    if when == "after":
        masks.apply(wrapped)
    optimizer = OPTIMIZERS["sgd"](wrapped.parameters())
    for step in range(steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(wrapped(inputs[rank::RANKS]), targets[rank::RANKS]).backward()
        optimizer.step()
    return {name: t.clone() for name, t in model.state_dict().items()}
