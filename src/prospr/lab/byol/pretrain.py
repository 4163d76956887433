"""Train a network on images without their labels."""

from __future__ import annotations

import math
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prospr.atomic import write
from prospr.errors import LossError
from prospr.lab.byol.network import Byol, loss
from prospr.lab.byol.views import SMALL_VIEWS, View, as_bytes, two_views
from prospr.lab.data import Dataset, Split
from prospr.lab.seeds import generator
from prospr.stages import digest, state

Progress = Callable[[int, float], None]


@dataclass(frozen=True)
class Pretraining:
    """How BYOL is trained: SGD with momentum, a learning rate that rises over the share `warmup` of the training and
    falls to 0 by a cosine. Weight decay is on matrices and kernels only.

    `epochs` and `embedding` are the ProsPr paper's (appendix E); of the rest it says nothing.

    >>> settings = Pretraining(epochs=10, lr=0.2, warmup=0.1)
    >>> [round(settings.lr_at(done), 3) for done in (0, 0.05, 0.1, 0.55, 1)]
    [0.0, 0.1, 0.2, 0.1, 0.0]
    """

    epochs: int = 1000
    batch_size: int = 256
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4
    warmup: float = 0.01
    embedding: int = 64
    hidden: int = 512
    target_momentum: float = 0.99
    views: tuple[View, View] = SMALL_VIEWS
    bf16: bool = False
    """Compute the networks in bfloat16, channels last: for a GPU."""

    def __post_init__(self) -> None:
        for name in ("epochs", "embedding", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.batch_size < 2:
            raise ValueError(f"batch_size is {self.batch_size}; batch norm needs at least 2")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup is {self.warmup}; it is a share of the training, from 0 to below 1")

    def lr_at(self, done: float) -> float:
        """The learning rate when the share `done` of the training is over."""
        if done < self.warmup:
            return self.lr * done / self.warmup
        return self.lr * (math.cos(math.pi * (done - self.warmup) / (1 - self.warmup)) + 1) / 2


@dataclass(frozen=True)
class Pretrained:
    """What a pretraining gave."""

    network: nn.Module
    """The starting point: the network given, with the weights learned and a classifier drawn anew."""
    byol: Byol = field(repr=False)
    """What was trained, for scoring by its own loss."""
    losses: tuple[float, ...]
    """Mean loss of every epoch."""
    seconds: float
    """Time spent in this call."""


def pretrain(
    network: nn.Module,
    data: Dataset[Split],
    settings: Pretraining | None = None,
    *,
    epochs: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Pretrained:
    """Train a copy of `network` by BYOL on the training images of `data`, without labels, on the network's device.

    epochs: in place of the settings'.
    progress: called as `progress(epochs_done, loss)` after every epoch.
    checkpoint: a file that is written after every epoch, whole or not at all; where it exists the training goes on
        from it. On a CPU the result is then that of an unbroken run, bit for bit.

    Every random number depends on the seed, the epoch and the step, and is drawn on the CPU.

    >>> from prospr.lab.data import digits
    >>> from prospr.lab.models import build
    >>> done = pretrain(build("small_convnet", seed=0, width=4), digits(), Pretraining(epochs=1, hidden=32))
    >>> len(done.losses), done.network.fc
    (1, Linear(in_features=8, out_features=10, bias=True))
    """
    settings = settings or Pretraining()
    if epochs is not None:
        settings = replace(settings, epochs=epochs)
    device = next(network.parameters()).device
    if not isinstance(data.train, Split):
        raise TypeError(f"{data.name}: its images are streamed; hold them in memory with load(name, root, size=64)")
    part = as_bytes(data.train).to(device)
    steps = len(part.images) // settings.batch_size
    if steps == 0:
        raise ValueError(
            f"{data.name}: {len(part.images)} images make no batch of {settings.batch_size}; give a smaller batch_size"
        )
    start = time.perf_counter()
    byol = Byol(network, part.inputs(0, 2), settings.embedding, settings.hidden, settings.target_momentum, seed)
    if settings.bf16:
        byol.to(memory_format=torch.channels_last)  # ty: ignore[no-matching-overload]
    optimizer = _optimizer(byol, settings)
    saved = None
    if checkpoint is not None:
        what = f"{settings} seed={seed} data={data.name}/{len(part)} start={digest(state(network))}"
        saved = _Checkpoint(Path(checkpoint), what, byol, optimizer)
    losses = saved.load() if saved is not None else []
    byol.train()
    for epoch in range(len(losses), settings.epochs):
        total = _epoch(byol, optimizer, part, settings, seed, epoch, steps)
        losses.append(total.item() / steps)
        if not math.isfinite(losses[-1]):
            raise LossError(f"the loss is {losses[-1]} in epoch {epoch + 1}; lower the learning rate {settings.lr}")
        if saved is not None:
            saved.save(losses)
        if progress is not None:
            progress(epoch + 1, losses[-1])
    result = byol.network(network, seed)
    return Pretrained(result, byol, tuple(losses), time.perf_counter() - start)


def _epoch(
    byol: Byol,
    optimizer: torch.optim.Optimizer,
    part: Split,
    settings: Pretraining,
    seed: int,
    epoch: int,
    steps: int,
) -> Tensor:
    """One epoch; the sum of its losses, still on the device: nothing in here waits for it."""
    device = part.images.device
    order = torch.randperm(len(part.images), generator=generator("byol order", seed, epoch)).to(device)
    total = torch.zeros((), device=device)
    for step in range(steps):
        done = (epoch * steps + step) / (settings.epochs * steps)
        for group in optimizer.param_groups:
            group["lr"] = settings.lr_at(done)
        chosen = order[step * settings.batch_size : (step + 1) * settings.batch_size]
        rng = generator("byol views", seed, epoch, step)
        views = two_views(part.images[chosen], part, settings.views, rng)
        if settings.bf16:
            views = tuple(view.contiguous(memory_format=torch.channels_last) for view in views)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.bf16):
            value = loss(byol, views)
        value.backward()
        optimizer.step()
        byol.follow(byol.momentum_at(done))
        total += value.detach()
    return total


def _optimizer(byol: Byol, settings: Pretraining) -> torch.optim.SGD:
    trained = [p for p in byol.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)


class _Checkpoint:
    """What a training needs to go on, in one file, and `what` it is a training of."""

    def __init__(self, path: Path, what: str, byol: Byol, optimizer: torch.optim.Optimizer) -> None:
        self.path, self.what, self.byol, self.optimizer = path, what, byol, optimizer

    def load(self) -> list[float]:
        """The losses of the epochs that are done, their state being put back."""
        if not self.path.exists():
            return []
        try:
            found: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True)
            what, losses = found["what"], list(found["losses"])
        except (RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
            raise ValueError(f"{self.path}: not a checkpoint, or a damaged one ({error}); delete it") from error
        if what != self.what:
            raise ValueError(
                f"{self.path}: a checkpoint of another pretraining ({what}); this one is {self.what}. "
                "Give another file, or delete it"
            )
        self.byol.load_state_dict(found["byol"])
        self.optimizer.load_state_dict(found["optimizer"])
        return losses

    def save(self, losses: list[float]) -> None:
        parts = {"byol": self.byol.state_dict(), "optimizer": self.optimizer.state_dict()}
        write(self.path, lambda part: torch.save({"what": self.what, "losses": losses, **parts}, part))
