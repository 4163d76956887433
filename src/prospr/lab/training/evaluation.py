"""How good a network is, on images it was not trained on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from prospr.lab.data import Files, Split
from prospr.lab.tasks import Task, classification
from prospr.meta.ranks import Team

__all__ = ["evaluate"]

PIXELS = 1 << 20  # in a batch: a thousand images of CIFAR


@torch.no_grad()
def evaluate(
    model: nn.Module, split: Split | Files, task: Task | None = None, team: Team | None = None
) -> dict[str, float]:
    """The mean "loss" of `model` in eval mode and the task's figures, by name; the model is left as it was.

    The device is waited for once, at the end. The ranks of a team, whose models are equal, look at a part each.

    >>> from prospr.lab.data import digits
    >>> from prospr.lab.models import build
    >>> sorted(evaluate(build("small_convnet", seed=0), digits().test))
    ['accuracy', 'loss', 'top5']
    """
    task = task or classification()
    weight = next(model.parameters())
    loss = torch.zeros((), dtype=torch.float64, device=weight.device)
    counts = torch.zeros(task.size, dtype=torch.float64, device=weight.device)
    was_training = model.training
    model.eval()
    try:
        own = split if team is None else split.select(torch.arange(len(split)).tensor_split(team.size)[team.rank])
        for inputs, labels in _parts(own.to(weight.device), weight.dtype):
            batch_loss, seen = task.measure(model, (inputs, labels))
            loss += batch_loss * len(labels)
            counts += seen
    finally:
        model.train(was_training)
    if team is not None:
        loss, counts = team.sum(loss), team.sum(counts)
    return {"loss": loss.item() / len(split), **task.figures(counts.cpu())}


def _parts(split: Split | Files, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    if not len(split):
        return
    if isinstance(split, Files):
        yield from ((images.to(dtype), labels) for images, labels in split.in_order(PIXELS // split.size**2))
        return
    size = max(1, min(1000, PIXELS // split.images[0, 0].numel()))
    for start in range(0, len(split), size):
        yield split.inputs(start, start + size, dtype), split.labels[start : start + size]
