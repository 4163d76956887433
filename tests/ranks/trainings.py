"""Trainings that the processes of the pool do together, and that one process does alone."""

import dataclasses
from functools import partial

import torch
from torch import Tensor, nn

from prospr import Masks, prunable
from prospr.lab.data import CropFlip, Split, digits
from prospr.lab.experiment import Experiment, Pruning, Training
from prospr.lab.models import build
from prospr.lab.recipes import Recipe
from prospr.lab.run import Options, run
from prospr.lab.runs.folder import RunResult
from prospr.lab.tasks import segmentation
from prospr.lab.training import EagerTrainer, Run

BATCH = 40
EXPERIMENT = Experiment(
    network="ranks.trainings:Double",
    method="snip",
    sparsity=0.5,
    training=Training(epochs=4, batch_size=256, evaluate_every=2),
)
CHANNELS = dataclasses.replace(EXPERIMENT, pruning=Pruning(granularity="channel", shrink=True))


class Double(nn.Module):
    """In float64: in float32 a rounding that moves one activation across zero changes a gradient by percents."""

    def __init__(self, num_classes: int = 10, in_channels: int = 1) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(in_channels, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 12, 3, 2, 1, bias=False), nn.BatchNorm2d(12)
        self.fc = nn.Linear(12, num_classes)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv1(x.double())).relu()
        return self.fc(self.norm2(self.conv2(x)).relu().mean((2, 3)))


class Interrupted(Exception):
    """Stands for what ends a run from outside."""


def data() -> tuple[Split, Split]:
    """Of the last batch there are 2 images left: with four ranks, two have none."""
    whole = digits()
    train = Split(whole.train.images[: 3 * BATCH + 2].double(), whole.train.labels[: 3 * BATCH + 2])
    return train, Split(whole.test.images[:51].double(), whole.test.labels[:51])


def trainer(team=None, norms="all", dropout: float = 0.0) -> EagerTrainer:
    """Masks, batch norm, augmentation, Nesterov's momentum and weight decay, in float64."""
    model = build("small_convnet", seed=0, width=4)
    if dropout:
        model = nn.Sequential(model, nn.Dropout(dropout))
    model = model.double()
    masks = {
        name: torch.rand(p.shape, generator=torch.Generator().manual_seed(1)) < 0.6
        for name, p in model.named_parameters()
        if p.dim() > 1
    }
    recipe = Recipe(epochs=2, batch_size=BATCH, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
    return EagerTrainer(Run(model, data()[0].batches(BATCH, 3, CropFlip(1, True)), recipe, masks), team, norms)


def maps(team=None, loss: str = "cross-entropy") -> EagerTrainer:
    """A label a pixel, many of which do not count, and not as many in each part."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(12, 1, 6, 6, generator=generator, dtype=torch.float64)
    labels = (images[:, 0] > 0).long()
    labels[torch.rand(labels.shape, generator=generator) < torch.linspace(0, 0.95, 12).view(-1, 1, 1)] = -100
    torch.manual_seed(0)
    model = nn.Conv2d(1, 2, 3, padding=1).double()
    recipe = Recipe(epochs=2, batch_size=6, lr=0.1)
    return EagerTrainer(Run(model, Split(images, labels).batches(6, 0), recipe, None, segmentation(2, loss)), team)


def small(experiment: Experiment = EXPERIMENT, stop_after: int | None = None, folder=None, **options) -> RunResult:
    """A run, which ends with an error after so many epochs."""

    def progress(done: float, total: int, text: str) -> None:
        if done and stop_after is not None and done >= stop_after:
            raise Interrupted(text)

    return run(experiment, folder, "cpu", progress, options=Options(save_every=0, **options))


def random_masks(model: nn.Module) -> Masks:
    generator = torch.Generator().manual_seed(2)
    return Masks({name: torch.rand(p.shape, generator=generator) < 0.5 for name, p in prunable(model).items()})


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
}


__all__ = ["CHANNELS", "EXPERIMENT", "OPTIMIZERS", "Interrupted", "data", "maps", "random_masks", "small", "trainer"]
