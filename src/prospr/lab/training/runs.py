"""What is to be trained, and what a training gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from prospr.lab.data import Batches, Stream
from prospr.lab.recipes import Recipe
from prospr.lab.tasks import Task, classification

__all__ = ["Epoch", "Result", "Run"]


@dataclass(frozen=True)
class Run:
    """One network to train in place, on the device its parameters are on.

    `masks` maps names of `model.named_parameters()` to boolean tensors, True where a weight is kept; pruned weights are
    set to zero at the start and after every step, which is the training that `masks.apply(model)` gives, but faster.
    """

    model: nn.Module
    batches: Batches | Stream
    recipe: Recipe
    masks: Mapping[str, Tensor] | None = None
    task: Task = field(default_factory=classification)

    def __post_init__(self) -> None:
        if self.batches.batch_size != self.recipe.batch_size:
            raise ValueError(
                f"the recipe asks for batches of {self.recipe.batch_size}, train_batches has "
                f"{self.batches.batch_size}; make them equal"
            )
        self._check_masks()

    def _check_masks(self) -> None:
        parameters = dict(self.model.named_parameters())
        for name, mask in (self.masks or {}).items():
            if name not in parameters:
                raise ValueError(
                    f"masks has {name!r}, which is not a parameter of the model; its parameters are "
                    f"{', '.join(parameters)}. If masks.apply(model) was called, train without masks"
                )
            if mask.shape != parameters[name].shape:
                raise ValueError(
                    f"{name}: the mask's shape is {tuple(mask.shape)}, the weight's "
                    f"{tuple(parameters[name].shape)}; make the masks for this model"
                )

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def steps(self) -> int:
        """The number of steps in an epoch."""
        return len(self.batches)

    def rates(self, epoch: int) -> list[float]:
        """The learning rate of every step of an epoch."""
        return [self.recipe.lr_at(epoch + step / self.steps) for step in range(self.steps)]


class Epoch(NamedTuple):
    """How one epoch went. Figures are the task's headline, 0 to 1; NaN where that part of the data was not seen."""

    loss: float
    """Mean training loss."""
    train: float
    """On the training images as they were trained on."""
    lr: float
    """Learning rate of the last step."""
    seconds: float
    """Time spent training, tests not included."""
    validation: float = float("nan")
    test: float = float("nan")


@dataclass(frozen=True)
class Result:
    """What a training gave. `test` is after the last epoch, never of the best one."""

    test: dict[str, float]
    """The figures of the test images by name, and their mean "loss"; empty where there were none."""
    epochs: tuple[Epoch, ...]
    seconds: float
    """Time spent training, tests not included."""

    @property
    def accuracy(self) -> float:
        """Share of the test images classified rightly, 0 to 1."""
        return self.test["accuracy"]

    @property
    def loss(self) -> float:
        """Mean loss on the test images."""
        return self.test["loss"]

    @property
    def train_losses(self) -> tuple[float, ...]:
        """Mean training loss of every epoch."""
        return tuple(epoch.loss for epoch in self.epochs)
