"""How a network is trained, as plain settings, and the recipes of the papers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

PRECISIONS = ("auto", "float32", "tf32", "bf16")
SCHEDULES = ("drops", "cosine")


@dataclass(frozen=True)
class Recipe:
    """SGD with momentum, and a learning rate that changes as `schedule` says. Change any field with `replace`.

    schedule: "drops" multiplies the learning rate by `drop_factor` at the start of each epoch in `drops`; "cosine"
        lowers it to 0 along half a cosine. Epochs are counted from 0, so `drops=(100, 150)` trains 100 epochs at `lr`,
        as the papers' tables mean it.
    warmup: so many epochs raise the learning rate step by step from 0.
    weight_decay: on every parameter.
    precision: "float32"; "tf32", which shortens what a GPU multiplies to 10 bits; "bf16", which computes in bfloat16
        and keeps the weights in float32. "auto" is bf16 on a GPU that has it and float32 on a CPU.
    channels_last: the memory layout of images and convolutions; "auto" is True on a GPU.

    >>> round(Recipe(epochs=200, batch_size=256, lr=0.1, drops=(100, 150)).lr_at(120), 6)
    0.01
    >>> round(Recipe(epochs=200, batch_size=256, lr=0.1, schedule="cosine").lr_at(100), 6)
    0.05
    """

    epochs: int
    batch_size: int
    lr: float
    momentum: float = 0.9
    weight_decay: float = 5e-4
    nesterov: bool = False
    drops: tuple[int, ...] = ()
    drop_factor: float = 0.1
    warmup: int = 0
    schedule: Literal["drops", "cosine"] = "drops"
    precision: Literal["auto", "float32", "tf32", "bf16"] = "auto"
    channels_last: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}; it must be at least 1")
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be at least 1")
        for name, value, most in (("momentum", self.momentum, 1.0), ("weight_decay", self.weight_decay, math.inf)):
            if not 0 <= value < most:
                raise ValueError(f"{name} is {value}; use a number from 0{' up to, not including, 1' * (most == 1)}")
        for name, value in (("lr", self.lr), ("drop_factor", self.drop_factor)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; use a number above 0")
        late = [drop for drop in self.drops if not 0 < drop < self.epochs]
        if late:
            raise ValueError(f"drops at epochs {late} lie outside the training; use epochs 1 to {self.epochs - 1}")
        if not 0 <= self.warmup < self.epochs:
            raise ValueError(f"warmup is {self.warmup} epochs; use 0 to {self.epochs - 1}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"unknown schedule {self.schedule!r}; known: {', '.join(SCHEDULES)}")
        if self.schedule == "cosine" and self.drops:
            raise ValueError(f"schedule='cosine' has no drops, and drops is {self.drops}; leave one of the two out")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov=True needs a momentum above 0")
        if self.precision not in PRECISIONS:
            raise ValueError(f"unknown precision {self.precision!r}; known: {', '.join(PRECISIONS)}")
        if self.channels_last not in (True, False, "auto"):
            raise ValueError(f"channels_last is {self.channels_last!r}; use True, False or 'auto'")

    def lr_at(self, epoch: float) -> float:
        """The learning rate at a moment of the training, in epochs: 2.5 is half way through the third."""
        if epoch < self.warmup:
            return self.lr * self._fall(epoch) * (epoch / self.warmup)
        return self.lr * self._fall(epoch)

    def _fall(self, epoch: float) -> float:
        if self.schedule == "cosine":
            share = max(0.0, epoch - self.warmup) / (self.epochs - self.warmup)
            return (1 + math.cos(math.pi * share)) / 2
        return self.drop_factor ** sum(epoch >= drop for drop in self.drops)

    def scaled(self, epochs: int) -> Recipe:
        """The same recipe in another number of epochs, its drops and warm-up where they were in proportion.

        >>> Recipe(epochs=200, batch_size=256, lr=0.1, drops=(100, 150)).scaled(20).drops
        (10, 15)
        """
        share = epochs / self.epochs
        drops = {round(drop * share) for drop in self.drops}
        return replace(
            self,
            epochs=epochs,
            drops=tuple(sorted(drop for drop in drops if 0 < drop < epochs)),
            warmup=min(round(self.warmup * share), epochs - 1),
        )


def recipes() -> dict[str, Recipe]:
    """The recipes of the papers, by name.

    >>> recipes()["prospr-cifar"].epochs
    200
    """
    return {
        "prospr-cifar": Recipe(200, 256, 0.1, weight_decay=5e-4, drops=(100, 150)),
        "prospr-imagenet": Recipe(100, 256, 0.1, weight_decay=1e-4, drops=(30, 60, 90)),
        "missing-the-mark-cifar": Recipe(160, 128, 0.1, weight_decay=1e-4, drops=(80, 120)),
        "missing-the-mark-tiny": Recipe(200, 256, 0.2, weight_decay=1e-4, drops=(100, 150), warmup=5),
        # The paper gives the epochs of its U-Nets and no more; the other settings are ours.
        "unet-cells": Recipe(50, 4, 0.05, weight_decay=1e-4, schedule="cosine", warmup=1),
        # Ours: what `make run` trains by.
        "digits": Recipe(12, 64, 0.1, drops=(8, 11)),
    }


def recipe(name: str, **changes: Any) -> Recipe:
    """The recipe called `name`, with any of its fields changed.

    >>> recipe("prospr-cifar", batch_size=128, nesterov=True).drops
    (100, 150)
    """
    known = recipes()
    if name not in known:
        raise ValueError(f"unknown recipe {name!r}; known names: {', '.join(known)}")
    return replace(known[name], **changes)
