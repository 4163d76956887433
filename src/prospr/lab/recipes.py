"""How a network is trained, as plain settings, and the recipes of the papers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """SGD with momentum; the learning rate is multiplied by `drop_factor` at the start of each epoch in `drops`.

    Epochs are counted from 0, so `drops=(100, 150)` trains 100 epochs at `lr`, as the papers' tables mean it.
    Weight decay is on every parameter. `warmup` epochs raise the learning rate step by step from 0.

    >>> round(Recipe(epochs=200, batch_size=256, lr=0.1, drops=(100, 150)).lr_at(120), 6)
    0.01
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

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}; it must be at least 1")
        late = [drop for drop in self.drops if not 0 < drop < self.epochs]
        if late:
            raise ValueError(f"drops at epochs {late} lie outside the training; use epochs 1 to {self.epochs - 1}")

    def lr_at(self, epoch: float) -> float:
        """The learning rate at a moment of the training, in epochs: 2.5 is half way through the third."""
        dropped = sum(epoch >= drop for drop in self.drops)
        warm = 1.0 if epoch >= self.warmup else epoch / self.warmup
        return self.lr * self.drop_factor**dropped * warm


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
    }
