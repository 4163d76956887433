"""The training before a pruning after training: where it is kept, and what the training after it starts from.

With `rewind`, the steps up to it are a training of their own: SGD's momentum begins anew there, as it does when what is
left goes back to it. `prospr.retrain` and the published code do the same.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from prospr.channels.plan import Plan
from prospr.errors import SettingError
from prospr.lab.progress import Report
from prospr.lab.runs.checkpoints import Checkpoints
from prospr.lab.runs.files import sweep_up
from prospr.lab.runs.making import Parts
from prospr.lab.training.loop import Trainer
from prospr.lab.training.runs import Epoch, Run

__all__ = ["FirstTraining"]

State = dict[str, Tensor]


class FirstTraining:
    """The training of the whole network in `folder/first/`, and its state at the step of `rewind` in `folder/rewind/`.

    It is trained when it is first asked for, or goes on where it was killed.

    make: makes the trainer.
    save_every: seconds between checkpoints.
    note: called with what was damaged, in words.
    """

    def __init__(
        self,
        folder: Path,
        parts: Parts,
        make: Callable[[Run], Trainer],
        save_every: float,
        note: Callable[[str], None],
        progress: Report | None = None,
    ) -> None:
        self._parts, self._make, self._save_every = parts, make, save_every
        self._note, self._progress = note, progress
        self._step = parts.experiment.pruning.rewind
        self._homes = folder / "first", folder / "rewind"
        mark = f"{parts.experiment.identity} before pruning"
        self._latest, self._kept = (Checkpoints(home, mark) for home in self._homes)
        self._done: tuple[nn.Module, State, float] | None = None

    @property
    def model(self) -> nn.Module:
        """The trained network."""
        return self._finished()[0]

    @property
    def seconds(self) -> float:
        """Spent training, in all sessions; without the steps up to `rewind`, which count to the training after it."""
        return self._finished()[2]

    def start(self, plan: Plan | None = None) -> State:
        """A trainer's state to train what is left from, without momentum: that of the step of `rewind`, or the trained
        weights at the first step. `plan` makes it that of the smaller network."""
        state = self._finished()[1]
        if plan is None:
            return state
        return {n: plan.cut(n.removeprefix("model."), v) if n.startswith("model.") else v for n, v in state.items()}

    def remove(self) -> None:
        """Forget it: the training after it is finished."""
        for home in self._homes:
            shutil.rmtree(home, ignore_errors=True)

    def _finished(self) -> tuple[nn.Module, State, float]:
        if self._done is None:
            self._done = self._train()
        return self._done

    def _train(self) -> tuple[nn.Module, State, float]:
        recipe, step = self._parts.experiment.trained_by, self._step
        run = Run(self._parts.network(), self._parts.batches(recipe.batch_size), recipe, None, self._parts.task)
        if step is not None and step >= recipe.epochs * run.steps:
            raise SettingError(f"pruning.rewind={step}: the training has {recipe.epochs * run.steps} steps; use fewer")
        for home in self._homes:
            home.mkdir(exist_ok=True)
            sweep_up(home)
        trainer = self._make(run)
        blank = _without_momentum(trainer)
        latest, kept = self._read(self._latest), self._read(self._kept) if step else blank
        saver = _Saver(trainer, self._latest, self._save_every, self._progress)
        if latest is not None and (kept is not None or _position(latest, run.steps) <= (step or 0)):
            trainer.load_states([latest])  # a later one is of no use where the step's own was lost
        if step:
            if kept is None:
                saver.train_until(step)
                kept = _without_momentum(trainer)
                self._kept.save(kept)
            if trainer.epoch * run.steps + trainer.step <= step:
                trainer.load_states([kept])
        (result,) = trainer.train(checkpoint=saver.save, progress=saver.tell, due=saver.due)
        if step is None:
            (end,) = trainer.states()
            kept = {**blank, **{name: value for name, value in end.items() if name.startswith("model.")}}
        assert kept is not None
        seconds = Epoch._fields.index("seconds")
        return run.model, kept, result.seconds - float(kept["history"][:, seconds].sum() + kept["spent"])

    def _read(self, points: Checkpoints) -> State | None:
        state, note = points.load()
        if note is not None:
            self._note(f"before pruning: {note}")
        return state


class _Saver:
    """Trains, tells of it, and writes checkpoints every so many seconds."""

    def __init__(self, trainer: Trainer, points: Checkpoints, every: float, progress: Report | None) -> None:
        self._trainer, self._points, self._every, self._progress = trainer, points, every, progress
        self._saved = time.perf_counter()

    def train_until(self, step: int) -> None:
        trainer = self._trainer
        while (left := step - trainer.epoch * trainer.steps - trainer.step) > 0:
            if trainer.step + left < trainer.steps:
                trainer.train_steps(left)
                continue
            trainer.train_epoch()
            self.tell(trainer.epoch, [history[-1] for history in trainer.history])
            if self.due(trainer.epoch):
                self.save(trainer.states())

    def due(self, epoch: int) -> bool:
        return epoch == self._trainer.epochs or time.perf_counter() - self._saved >= self._every

    def save(self, states: Sequence[State]) -> None:
        self._points.save(states[0])
        self._saved = time.perf_counter()

    def tell(self, done: int, epochs: Sequence[Epoch]) -> None:
        if self._progress is not None:
            self._progress(done, self._trainer.epochs, f"before pruning, epoch {done}: loss {epochs[0].loss:.4f}")


def _position(state: Mapping[str, Tensor], steps: int) -> int:
    return int(state["epoch"]) * steps + int(state["step"])


def _without_momentum(trainer: Trainer) -> State:
    (state,) = trainer.states()
    return {name: value for name, value in state.items() if not name.startswith("momentum.")}
