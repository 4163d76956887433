"""What every trainer does around its steps: epochs, records, looks at other data, states to resume from."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from prospr.lab.data import Files, Split
from prospr.lab.training.evaluation import evaluate
from prospr.lab.training.numerics import Numerics
from prospr.lab.training.runs import Epoch, Result, Run
from prospr.meta.ranks import Team

__all__ = ["Trainer"]

State = dict[str, Tensor]
Checkpoint = Callable[[Sequence[State]], None]
Progress = Callable[[int, Sequence[Epoch]], None]


class Trainer(ABC):
    """Trains runs side by side, step by step; all have as many epochs, and as many steps in each.

    epoch, step: how far they are; `step` counts within the epoch.
    history: of each run, how its epochs went.
    team: the ranks that train together, each with its part of every batch and all with the same weights.
    """

    team: Team | None = None

    def __init__(self, runs: Sequence[Run]) -> None:
        if not runs:
            raise ValueError("there are no runs to train; give at least one")
        self.runs = tuple(runs)
        self.epochs, self.steps = runs[0].recipe.epochs, runs[0].steps
        for run in runs:
            if (run.recipe.epochs, run.steps) != (self.epochs, self.steps):
                raise ValueError(
                    f"runs of {self.epochs} epochs of {self.steps} steps and of {run.recipe.epochs} of {run.steps} "
                    "cannot be trained together; train them apart"
                )
        self.device = runs[0].device
        self.numerics = [Numerics.of(run.recipe, run.device) for run in runs]
        self.epoch = self.step = 0
        self.history: list[list[Epoch]] = [[] for _ in runs]
        self._spent = 0.0  # seconds on the epoch under way
        # Of each run, over the epoch under way: the sum of the batches' losses, then the task's counts.
        self._sums = [torch.zeros(1 + run.task.size, dtype=torch.float64, device=self.device) for run in runs]

    def train(
        self,
        test: Split | Files | None = None,
        validation: Split | Files | None = None,
        evaluate_every: int = 0,
        checkpoint: Checkpoint | None = None,
        progress: Progress | None = None,
        due: Callable[[int], bool] | None = None,
    ) -> list[Result]:
        """Train all epochs that are left; one result a run.

        test: looked at after the last epoch; with `evaluate_every=k` also after every k-th, which changes nothing else.
        validation: looked at after every epoch, or every k-th.
        checkpoint: called with `states()` after every epoch, or after those for which `due(epochs_done)` is true.
        progress: called with the number of epochs done and how the last went, run by run, after every epoch.
        """
        while self.epoch < self.epochs:
            self.train_epoch()
            looked = evaluate_every > 0 and self.epoch % evaluate_every == 0
            if validation is not None and (looked or not evaluate_every):
                self._look("validation", validation)
            if test is not None and looked and self.epoch < self.epochs:
                self._look("test", test)
            if progress is not None:
                progress(self.epoch, [epochs[-1] for epochs in self.history])
            if checkpoint is not None and (due is None or due(self.epoch)):
                checkpoint(self.states())
        figures = [{} for _ in self.runs] if test is None else self._look("test", test)
        self.write_back()
        return [
            Result(seen, tuple(epochs), sum(epoch.seconds for epoch in epochs))
            for seen, epochs in zip(figures, self.history, strict=True)
        ]

    def train_epoch(self) -> None:
        """Train what is left of the epoch under way, and record how it went."""
        self.train_steps(self.steps - self.step)
        start = time.perf_counter()
        sums = [values.cpu() for values in self._sums]  # the one wait for the device in an epoch
        seconds = self._spent + time.perf_counter() - start
        for run, values, epochs in zip(self.runs, sums, self.history, strict=True):
            figure = run.task.figures(values[1:])[run.task.headline]
            epochs.append(Epoch(values[0].item() / self.steps, figure, run.rates(self.epoch)[-1], seconds))
        for values in self._sums:
            values.zero_()
        self.epoch, self.step, self._spent = self.epoch + 1, 0, 0.0

    def train_steps(self, count: int) -> None:
        """Take the next `count` steps of the epoch under way."""
        if not 0 <= count <= self.steps - self.step:
            raise ValueError(f"{count} steps asked for, and {self.steps - self.step} are left in this epoch")
        start = time.perf_counter()
        if count:
            self._take(self.step, self.step + count)
        self.step += count
        self._spent += time.perf_counter() - start

    def states(self) -> list[State]:
        """Of each run all that a resumed one needs: tensors on the CPU by name, to be saved in any way.

        `model.*` is the model's state_dict and `momentum.*` SGD's buffers; `epoch`, `step`, `sums`, `spent` and
        `history` say how far it is and how it went.
        """
        self.write_back()
        states = []
        for index, run in enumerate(self.runs):
            state = {f"model.{name}": value for name, value in run.model.state_dict().items()}
            state |= {f"momentum.{name}": value for name, value in self._momentum(index).items()}
            state |= {"epoch": torch.tensor(self.epoch), "step": torch.tensor(self.step)}
            state |= {"sums": self._sums[index], "spent": torch.tensor(self._spent, dtype=torch.float64)}
            rows = torch.tensor(self.history[index], dtype=torch.float64)
            state["history"] = rows.reshape(len(rows), len(Epoch._fields))
            states.append(
                {
                    name: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                    for name, value in state.items()
                }
            )
        return states

    def load_states(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Go on from where `states` was called, with the same runs."""
        if len(states) != len(self.runs):
            raise ValueError(f"{len(states)} states for {len(self.runs)} runs; give one each")
        where = {(int(state["epoch"]), int(state["step"])) for state in states}
        if len(where) > 1:
            raise ValueError(f"the states are of different moments (epoch, step): {sorted(where)}")
        ((self.epoch, self.step),) = where
        self._spent = float(states[0]["spent"])
        for index, (run, state) in enumerate(zip(self.runs, states, strict=True)):
            run.model.load_state_dict(_under("model.", state))
            self._sums[index].copy_(state["sums"])
            self.history[index] = [Epoch(*row) for row in state["history"].tolist()]
            self._load(index, _under("momentum.", state))

    def _look(self, part: str, split: Split | Files) -> list[dict[str, float]]:
        self.write_back()
        seen = []
        for run, numerics, epochs in zip(self.runs, self.numerics, self.history, strict=True):
            with numerics.flags():
                seen.append(evaluate(run.model, split, run.task, self.team))
            epochs[-1] = epochs[-1]._replace(**{part: seen[-1][run.task.headline]})
        return seen

    @abstractmethod
    def _take(self, start: int, stop: int) -> None:
        """Take the steps from `start` to `stop` of epoch `self.epoch`, adding to `self._sums`."""

    @abstractmethod
    def _momentum(self, index: int) -> dict[str, Tensor]:
        """SGD's buffers of a run, by parameter name."""

    @abstractmethod
    def _load(self, index: int, momentum: dict[str, Tensor]) -> None:
        """Take over a run's model, which has just changed, and SGD's buffers."""

    @abstractmethod
    def write_back(self) -> None:
        """Bring the runs' models up to date, where training does not work on them directly."""


def _under(prefix: str, state: Mapping[str, Tensor]) -> State:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
