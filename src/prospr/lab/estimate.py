"""What an experiment would cost, without running it: steps, and seconds from runs before or from a few steps now."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from prospr.errors import FolderError
from prospr.lab.data import MissingDataError, datasets
from prospr.lab.experiment import DENSE, Experiment
from prospr.lab.runs.folder import FOLDER, RunFolder, finished
from prospr.lab.runs.making import Loader, Parts, method_of
from prospr.lab.train import Run
from prospr.lab.training import EagerTrainer

__all__ = ["Estimate", "Total", "estimate", "estimate_all"]

PATIENCE = 2.0  # seconds that trying a few steps may take
MOST = 20  # steps tried


@dataclass(frozen=True)
class Estimate:
    """epochs of `steps` steps, at `step_seconds` each where that is known; `basis` says from where.

    Where it is pruned after training, the epochs of both trainings."""

    epochs: int
    steps: int
    step_seconds: float | None
    basis: str
    scoring: str
    """What scoring costs with the method's own settings, in words."""

    @property
    def seconds(self) -> float | None:
        return None if self.step_seconds is None else self.epochs * self.steps * self.step_seconds


def estimate(
    experiment: Experiment,
    folder: str | os.PathLike[str] = FOLDER,
    device: torch.device | str = "cpu",
    root: str | os.PathLike[str] | None = None,
) -> Estimate:
    """The cost of training. Nothing is downloaded, and nothing is written.

    Seconds are those of finished runs in `folder` of the same network, data and batches on such a device; without any,
    a few steps are tried in plain PyTorch, which on a GPU is slower than the training will be.

    >>> cost = estimate(Experiment(), "no such folder")
    >>> cost.epochs, cost.steps
    (12, 23)
    """
    device, recipe = torch.device(device), experiment.trained_by
    epochs = recipe.epochs * (2 if _twice(experiment) else 1)
    scoring = "none" if experiment.method == DENSE else _scoring(experiment)
    try:
        data = Loader(torch.device("cpu"), root, download=False)(experiment)
    except MissingDataError:
        train = datasets()[experiment.dataset].counts.partition(" ")[0].replace(",", "")
        count = round(int(train) * (1 - experiment.data.validation)) if train.isdigit() else 0
        steps = -(-count // recipe.batch_size)
        return Estimate(epochs, steps, None, f"{experiment.dataset} is not here", scoring)
    parts = Parts(experiment, data.to(device), device)
    steps = len(parts.batches(recipe.batch_size))
    if experiment.training.byol:
        before = f"{experiment.training.byol} epochs of BYOL come first, whose time is not known"
        return Estimate(epochs, steps, None, before, scoring)
    before = _recorded(experiment, folder, device)
    if before is not None:
        return Estimate(epochs, steps, before, "as runs before took", scoring)
    basis = "a few steps were tried in plain PyTorch" + (", before shrinking" if experiment.pruning.shrink else "")
    return Estimate(epochs, steps, _tried(parts, steps), basis, scoring)


def _scoring(experiment: Experiment) -> str:
    cost = method_of(experiment).cost or "unknown"
    changed = [
        name for name in ("rounds", "steps", "inner_lr", "order") if getattr(experiment.pruning, name) is not None
    ]
    return f"in training steps: {cost}{', before its ' + ' and '.join(changed) + ' were changed' if changed else ''}"


@dataclass(frozen=True)
class Total:
    """Runs, those that are finished and those that are begun, and the training that is left, one after another.

    unknown: runs that are left and have no estimate; `seconds` is without them.
    """

    runs: int
    done: int
    begun: int
    steps: int
    seconds: float
    unknown: int
    bases: tuple[str, ...]


def estimate_all(
    experiments: Sequence[Experiment],
    folder: str | os.PathLike[str] = FOLDER,
    device: torch.device | str = "cpu",
    root: str | os.PathLike[str] | None = None,
) -> Total:
    """What is left of many experiments. Those that train alike are estimated once.

    >>> total = estimate_all([Experiment(method="snip", seed=seed) for seed in range(3)], "no such folder")
    >>> total.runs, total.done, total.steps
    (3, 0, 828)
    """
    costs: dict[str, Estimate] = {}
    done = begun = steps = unknown = 0
    seconds = 0.0
    wanted = list({one.identity: one for one in experiments}.values())
    for one in wanted:
        place = RunFolder(one, folder)
        if place.done:
            done += 1
            continue
        key = repr((_kind(one), one.data, one.trained_by, one.training.byol, _twice(one)))
        if key not in costs:
            costs[key] = estimate(one, folder, device, root)
        cost, epochs = costs[key], len(place.metrics())
        if _twice(one) and place.masks.exists():
            epochs += one.trained_by.epochs
        begun += epochs > 0
        left = (cost.epochs - epochs) * cost.steps
        steps += left
        if cost.step_seconds is None:
            unknown += 1
        else:
            seconds += left * cost.step_seconds
    return Total(
        len(wanted), done, begun, steps, seconds, unknown, tuple(dict.fromkeys(one.basis for one in costs.values()))
    )


def _recorded(experiment: Experiment, folder: str | os.PathLike[str], device: torch.device) -> float | None:
    """Seconds a step of the latest run that is like it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    found: list[tuple[str, float]] = []
    try:
        for result in finished(folder):
            one, made = result.experiment, result.environment
            alike = _kind(one) == _kind(experiment) and made.get("device") == device.type
            if alike and name in (None, made.get("device_name")):
                found.append((made["when"], result.seconds["train"] / result.steps))
    except (FolderError, KeyError, ValueError, TypeError):  # a folder that is not in order is no reason not to answer
        pass
    return max(found)[1] if found else None


def _twice(one: Experiment) -> bool:
    return one.method != DENSE and one.pruning.after_training


def _kind(one: Experiment) -> tuple:
    shrunk = (one.method, one.sparsity, one.pruning) if one.pruning.shrink and one.method != DENSE else None
    recipe = one.trained_by
    return one.network_name, one.settings, one.dataset, one.data.size, recipe.batch_size, recipe.precision, shrunk


def _tried(parts: Parts, steps: int) -> float:
    recipe = parts.experiment.trained_by
    trainer = EagerTrainer(Run(parts.network(), parts.batches(recipe.batch_size), recipe, None, parts.task))
    taken, spent = 0, 0.0
    for size in (1, MOST):  # the first is slower than the rest, and tells how many more there is time for
        count = min(size, steps - taken if taken else size, max(1, int(PATIENCE / spent)) if spent else size)
        if count < 1:
            break
        start = time.perf_counter()
        trainer.train_steps(count)
        if parts.device.type == "cuda":
            torch.cuda.synchronize(parts.device)
        taken, spent = taken + count, (time.perf_counter() - start) / count
    return spent
