"""How good a network is, on images it was not trained on."""

from __future__ import annotations

import torch
from torch import nn

from prospr.lab.data import Split
from prospr.lab.tasks import Task, classification
from prospr.lab.training.pixels import normalise, statistics

__all__ = ["evaluate"]

PIXELS = 1 << 20  # in a batch: a thousand images of CIFAR


@torch.no_grad()
def evaluate(model: nn.Module, split: Split, task: Task | None = None) -> dict[str, float]:
    """The mean "loss" of `model` in eval mode and the task's figures, by name; the model is left as it was.

    The device is waited for once, at the end.

    >>> from prospr.lab.data import digits
    >>> from prospr.lab.models import build
    >>> sorted(evaluate(build("small_convnet", seed=0), digits().test))
    ['accuracy', 'loss', 'top5']
    """
    task = task or classification()
    weight = next(model.parameters())
    mean, std = (None if value is None else value.to(weight.device) for value in statistics(split))
    size = max(1, min(1000, PIXELS // split.images[0, 0].numel()))
    loss = torch.zeros((), dtype=torch.float64, device=weight.device)
    counts = torch.zeros(task.size, dtype=torch.float64, device=weight.device)
    was_training = model.training
    model.eval()
    try:
        for images, labels in zip(split.images.split(size), split.labels.split(size), strict=True):
            inputs = normalise(images.to(weight.device), mean, std, weight.dtype)
            batch_loss, seen = task.measure(model, (inputs, labels.to(weight.device)))
            loss += batch_loss * len(labels)
            counts += seen
    finally:
        model.train(was_training)
    return {"loss": loss.item() / len(split), **task.figures(counts.cpu())}
