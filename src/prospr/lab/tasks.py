"""What a network is trained for: a loss to lower, and counts that add up over batches to the figures reported.

`task.loss` is what `prospr.prune` and `prospr.score` take as their loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Task", "classification", "dice_loss", "segmentation"]


@dataclass(frozen=True)
class Task:
    """A loss and the figures that tell how good a network is at it.

    criterion: (outputs, targets) -> the batch's mean loss.
    count: (outputs, targets) -> a vector of `size` counts; those of all batches are added up where they are made.
    figures: the sum of those vectors -> figures by name, 0 to 1, the higher the better.
    headline: the figure to quote.
    weight: targets -> how many things the loss is a mean over: what a part of a batch counts by. None where the loss is
        no such mean, so that a batch cannot be cut.
    """

    name: str
    criterion: Callable[[Tensor, Tensor], Tensor]
    count: Callable[[Tensor, Tensor], Tensor]
    figures: Callable[[Tensor], dict[str, float]]
    size: int
    headline: str
    weight: Callable[[Tensor], float] | None = len

    def loss(self, model: Callable[..., Tensor], batch: Any) -> Tensor:
        """The mean loss of a batch (inputs, targets)."""
        inputs, targets = batch
        return self.criterion(model(inputs), targets)

    def measure(self, model: Callable[..., Tensor], batch: Any) -> tuple[Tensor, Tensor]:
        """The mean loss of a batch, and its counts."""
        inputs, targets = batch
        outputs = model(inputs)
        return self.criterion(outputs, targets), self.count(outputs.detach(), targets)


def classification() -> Task:
    """One label an image: cross-entropy, and the share of images with the right label first, or among the first five.

    >>> task = classification()
    >>> logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
    >>> task.figures(task.count(logits, torch.tensor([0, 1])))
    {'accuracy': 0.5, 'top5': 1.0}
    """
    return Task("classification", F.cross_entropy, _count_ranks, _rank_figures, size=3, headline="accuracy")


def segmentation(num_classes: int, loss: str = "cross-entropy") -> Task:
    """One label a pixel: cross-entropy or Dice loss; mean intersection over union, and the share of pixels right.

    Outputs are (n, num_classes, height, width), targets (n, height, width); a negative target is no part of the loss or
    the figures. A class that is neither there nor predicted is no part of the mean.

    >>> task = segmentation(2)
    >>> outputs = torch.tensor([[[[1.0, 1.0, 0.0]], [[0.0, 0.0, 1.0]]]])          # says 0 0 1
    >>> task.figures(task.count(outputs, torch.tensor([[[0, 1, 1]]])))
    {'mean_iou': 0.5, 'pixel_accuracy': 0.666...}
    """
    losses: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
        "cross-entropy": _pixel_cross_entropy,
        "dice": dice_loss,
    }
    if loss not in losses:
        raise ValueError(f"unknown loss {loss!r} for segmentation; known: {', '.join(losses)}")
    if num_classes < 2:
        raise ValueError(f"num_classes is {num_classes}; background is a class too, so use at least 2")
    weight = _known_pixels if loss == "cross-entropy" else None
    return Task("segmentation", losses[loss], _confusion, _overlap_figures, num_classes**2, "mean_iou", weight)


def dice_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 - 2 |A B| / (|A| + |B|), softly, averaged over the classes (Milletari et al., 2016, without the squares).

    >>> certain = torch.tensor([[[[50.0, -50.0]], [[-50.0, 50.0]]]])
    >>> dice_loss(certain, torch.tensor([[[0, 1]]])).item()
    0.0
    """
    known = (targets >= 0).unsqueeze(1)
    shares = outputs.float().softmax(1) * known
    truth = _one_hot(targets, outputs.shape[1], dim=1).to(shares.dtype)
    pixels = (0, 2, 3)
    overlap = (shares * truth).sum(pixels)
    return 1 - ((2 * overlap + 1e-6) / (shares.sum(pixels) + truth.sum(pixels) + 1e-6)).mean()


def _known_pixels(targets: Tensor) -> int:
    return int((targets >= 0).sum())


def _pixel_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets.masked_fill(targets < 0, -100), ignore_index=-100)


def _count_ranks(outputs: Tensor, targets: Tensor) -> Tensor:
    """Images, those with the target first, those with it among the first five; equal outputs rank by position.

    Comparisons in place of topk, which is slow on a GPU; `~(a <= b)` so that NaN ranks above everything.
    """
    mine = outputs.gather(1, targets.unsqueeze(1))
    position = torch.arange(outputs.shape[1], device=outputs.device)
    above = ~(outputs <= mine) | ((outputs == mine) & (position < targets.unsqueeze(1)))
    rank = above.sum(1)
    return torch.stack([torch.ones_like(rank), rank < 1, rank < 5]).sum(1)


def _rank_figures(counts: Tensor) -> dict[str, float]:
    images, first, five = counts.tolist()
    return {"accuracy": first / images, "top5": five / images}


def _confusion(outputs: Tensor, targets: Tensor) -> Tensor:
    """How many pixels of each class (rows) were given each class (columns), as one vector.

    A product of indicators: bincount waits for a GPU, and a scatter onto so few places is slow there. One product an
    image, in float32, which counts to 16 million exactly; bfloat16 would not count to 300.
    """
    classes = outputs.shape[1]
    truth = _one_hot(targets.flatten(1), classes, dim=1).float()
    given = _one_hot(outputs.argmax(1).flatten(1), classes, dim=2).float()
    with torch.autocast(outputs.device.type, enabled=False):
        return torch.bmm(truth, given).double().sum(0).flatten()


def _overlap_figures(counts: Tensor) -> dict[str, float]:
    side = round(len(counts) ** 0.5)
    table = counts.double().view(side, side)
    right, union = table.diagonal(), table.sum(0) + table.sum(1) - table.diagonal()
    seen = union > 0
    return {
        "mean_iou": (right[seen] / union[seen]).mean().item(),
        "pixel_accuracy": (right.sum() / table.sum()).item(),
    }


def _one_hot(labels: Tensor, classes: int, dim: int) -> Tensor:
    shape = [1] * (labels.dim() + 1)
    shape[dim] = classes
    return labels.unsqueeze(dim) == torch.arange(classes, device=labels.device).view(shape)
