"""TensorBoard and Weights & Biases, imported only where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from prospr.lab.experiment import Experiment
from prospr.lab.optional import optional

__all__ = ["Logger", "MakeLogger", "tensorboard", "wandb"]


class Logger(Protocol):
    """Is told how a run goes, from the epoch it goes on from."""

    def epoch(self, number: int, figures: Mapping[str, float]) -> None: ...
    def end(self, figures: Mapping[str, float]) -> None: ...


MakeLogger = Callable[[Experiment, Path, int], Logger]
"""Makes a logger for a run: its experiment, its folder, and the number of epochs done before."""


def tensorboard() -> MakeLogger:
    """Write curves for TensorBoard into the folder of the run, below tensorboard/."""
    module = optional("torch.utils.tensorboard", "tensorboard")
    return lambda experiment, folder, done: _TensorBoard(
        module.SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)
    )


def wandb(project: str = "prospr") -> MakeLogger:
    """Send settings and curves to Weights & Biases; a run that is resumed goes on there too."""
    module = optional("wandb", "wandb")

    def make(experiment: Experiment, folder: Path, done: int) -> Logger:
        return _Wandb(
            module.init(
                project=project,
                id=experiment.identity,
                name=experiment.label,
                config=experiment.to_dict(),
                dir=str(folder),
                resume="allow",
                reinit="create_new",  # runs that are trained together each have theirs
            )
        )

    return make


class _TensorBoard:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def epoch(self, number: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, number)

    def end(self, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(f"final/{name}", value, 0)
        self._writer.close()


class _Wandb:
    def __init__(self, run: Any) -> None:
        self._run = run

    def epoch(self, number: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=number)

    def end(self, figures: Mapping[str, float]) -> None:
        self._run.summary.update({f"final/{name}": value for name, value in figures.items()})
        self._run.finish()
