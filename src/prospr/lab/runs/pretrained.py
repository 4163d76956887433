"""A run's first weights learned by BYOL, in its folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from prospr.lab.byol import SMALL_VIEWS, Pretraining, pretrain
from prospr.lab.progress import Report
from prospr.lab.runs.making import Parts, network

__all__ = ["pretrained", "settings_of"]


def settings_of(parts: Parts) -> Pretraining:
    """`Pretraining`'s own settings in as many epochs as asked for; views are mirrored where the training's images are.

    On a GPU it computes in bfloat16.
    """
    _, flip = parts.experiment.augmentation
    first, second = SMALL_VIEWS
    if not flip:  # a mirrored digit is another one, and so may be a small piece of it
        first, second = (replace(view, flip=0.0, area=(0.5, 1.0)) for view in SMALL_VIEWS)
    views = first, second
    return Pretraining(parts.experiment.training.byol, views=views, bf16=parts.device.type == "cuda")


def pretrained(parts: Parts, checkpoint: Path, progress: Report | None = None) -> dict[str, Tensor]:
    """The weights to start from, learned now or read from `checkpoint`; one that was killed goes on."""
    one, settings = parts.experiment, settings_of(parts)
    model = network(one, parts.data.num_classes, parts.example.shape[1]).to(parts.device)

    def told(done: int, loss: float) -> None:
        if progress is not None:
            progress(done, settings.epochs, f"BYOL, epoch {done}: loss {loss:.4f}")

    return pretrain(
        model, parts.data, settings, seed=one.seed, progress=told, checkpoint=checkpoint
    ).network.state_dict()
