"""What every command of `prospr` has, and an experiment as the command line asks for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields

from prospr.lab.experiment import Experiment

__all__ = ["Asked", "Command"]


@dataclass(frozen=True)
class Asked(Experiment):
    """An experiment as it was asked for; its values are looked at when it is made, not while options are read."""

    def __post_init__(self) -> None:
        pass

    def make(self) -> Experiment:
        return Experiment(**{one.name: getattr(self, one.name) for one in fields(self)})


@dataclass(frozen=True)
class Command(ABC):
    """What every command has."""

    debug: bool = False
    """Show where an error came from."""

    after_interrupt = ""  # a hint

    @abstractmethod
    def __call__(self) -> None: ...
