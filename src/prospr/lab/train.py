"""Train one network, dense or masked, and test it once, at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prospr.lab.data import Batches, Split
from prospr.lab.recipes import Recipe

Progress = Callable[[int, float], None]
TEST_BATCH = 1000


@dataclass(frozen=True)
class Result:
    """What a training gave. The test set is seen once, after the last epoch, so there is no best epoch to report."""

    accuracy: float
    """Share of the test images classified rightly after the last epoch, 0 to 1."""
    loss: float
    """Mean cross-entropy on the test images after the last epoch."""
    train_losses: tuple[float, ...]
    """Mean training loss of every epoch."""
    seconds: float
    """Time spent training, the test not included."""


def train(
    model: nn.Module,
    train_batches: Batches,
    test: Split,
    recipe: Recipe,
    masks: Mapping[str, Tensor] | None = None,
    progress: Progress | None = None,
) -> Result:
    """Train `model` in place by `recipe`, on the device its parameters are on.

    `masks` maps names of `model.named_parameters()` to boolean tensors, True where a weight is kept; pruned weights are
    set to zero at the start and after every step. `progress(epochs_done, train_loss)` is called after every epoch.

    >>> from prospr.lab.data import digits
    >>> from prospr.lab.models import build
    >>> data, recipe = digits(), Recipe(epochs=1, batch_size=128, lr=0.1)
    >>> batches = Batches(data.train.images, data.train.labels, recipe.batch_size, seed=0)
    >>> result = train(build("small_convnet", seed=0), batches, data.test, recipe)
    >>> len(result.train_losses)
    1
    """
    if train_batches.batch_size != recipe.batch_size:
        raise ValueError(
            f"the recipe asks for batches of {recipe.batch_size}, train_batches has {train_batches.batch_size}; "
            "make them equal"
        )
    device = next(model.parameters()).device
    enforce = _enforcer(model, masks or {})
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=recipe.lr,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        nesterov=recipe.nesterov,
    )
    losses: list[float] = []
    model.train()
    enforce()
    start = time.perf_counter()
    for epoch in range(recipe.epochs):
        total = torch.zeros((), device=device)
        for index, (images, labels) in enumerate(train_batches.epoch(epoch)):
            _set_lr(optimizer, recipe.lr_at(epoch + index / len(train_batches)))
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            enforce()
            total += loss.detach()
        losses.append(total.item() / len(train_batches))
        if progress is not None:
            progress(epoch + 1, losses[-1])
    seconds = time.perf_counter() - start
    accuracy, test_loss = evaluate(model, test)
    return Result(accuracy, test_loss, tuple(losses), seconds)


@torch.no_grad()
def evaluate(model: nn.Module, test: Split) -> tuple[float, float]:
    """The accuracy (0 to 1) and mean cross-entropy of `model` in eval mode, which it leaves as it was."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    right = torch.zeros((), device=device)
    loss = torch.zeros((), device=device)
    for start in range(0, len(test), TEST_BATCH):
        labels = test.labels[start : start + TEST_BATCH].to(device)
        logits = model(test.inputs(start, start + TEST_BATCH).to(device))
        right += (logits.argmax(1) == labels).sum()
        loss += F.cross_entropy(logits, labels, reduction="sum")
    model.train(was_training)
    return right.item() / len(test), loss.item() / len(test)


def _enforcer(model: nn.Module, masks: Mapping[str, Tensor]) -> Callable[[], None]:
    """A function that sets every pruned weight of `model` to zero."""
    parameters = dict(model.named_parameters())
    weights: list[Tensor] = []
    kept: list[Tensor] = []
    for name, mask in masks.items():
        if name not in parameters:
            raise ValueError(
                f"masks has {name!r}, which is not a parameter of the model; its parameters are "
                f"{', '.join(parameters)}. If masks.apply(model) was called, train without masks"
            )
        weight = parameters[name]
        if mask.shape != weight.shape:
            raise ValueError(
                f"{name}: the mask's shape is {tuple(mask.shape)}, the weight's {tuple(weight.shape)}; "
                "make the masks for this model"
            )
        weights.append(weight)
        kept.append(mask.to(weight))  # a factor of the weight's own type multiplies twice as fast as a boolean

    @torch.no_grad()
    def enforce() -> None:
        for weight, factor in zip(weights, kept, strict=True):
            weight.mul_(factor)

    return enforce


def _set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
