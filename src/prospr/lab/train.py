"""Train networks, dense or masked, and test them once, at the end."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from prospr.lab.data import Batches, Files, Split, Stream
from prospr.lab.recipes import Recipe
from prospr.lab.tasks import Task, classification
from prospr.lab.training import CaptureError, EagerTrainer, Epoch, GraphTrainer, Result, Run, Trainer, evaluate
from prospr.lab.training.eager import Norms
from prospr.lab.training.store import drawn_ahead
from prospr.meta.ranks import Team

__all__ = ["Engine", "Epoch", "Result", "Run", "evaluate", "train", "train_together", "trainer_for", "uses_graph"]

Engine = Literal["auto", "eager", "graph"]
PAYS_FROM = 300  # steps; to warm up and capture one costs as much as some two hundred eager ones


def train(
    model: nn.Module,
    train_batches: Batches | Stream,
    test: Split | Files | None,
    recipe: Recipe,
    masks: Mapping[str, Tensor] | None = None,
    progress: Callable[[int, float], None] | None = None,
    *,
    task: Task | None = None,
    validation: Split | Files | None = None,
    evaluate_every: int = 0,
    checkpoint: Callable[[dict[str, Tensor]], None] | None = None,
    state: Mapping[str, Tensor] | None = None,
    engine: Engine = "auto",
    compile: bool = False,
) -> Result:
    """Train `model` in place by `recipe`, on the device its parameters are on.

    `masks` maps names of `model.named_parameters()` to boolean tensors, True where a weight is kept; pruned weights are
    set to zero at the start and after every step. `progress(epochs_done, train_loss)` is called after every epoch.

    task: what it is trained for, see `prospr.lab.tasks`; by default classification.
    validation: further images to look at after every epoch, or every `evaluate_every`-th.
    evaluate_every: look at the test images too after so many epochs; otherwise they are seen once, after the last.
    checkpoint: called with the state of the training, a dict of tensors, after every epoch.
    state: such a state to go on from.
    engine: "graph" makes the whole step one CUDA graph, "eager" is plain PyTorch. "auto" is "graph" on a GPU, and
        "eager" on a CPU, for a few hundred steps, for augmentation other than CropFlip, and for networks that cannot be
        captured.
    compile: with "graph", use torch.compile as well: quicker after most of a minute.

    >>> from prospr.lab.data import digits
    >>> from prospr.lab.models import build
    >>> data, recipe = digits(), Recipe(epochs=1, batch_size=128, lr=0.1)
    >>> batches = Batches(data.train.images, data.train.labels, recipe.batch_size, seed=0)
    >>> result = train(build("small_convnet", seed=0), batches, data.test, recipe)
    >>> len(result.train_losses)
    1
    """
    trainer = trainer_for([Run(model, train_batches, recipe, masks, task or classification())], engine, compile)
    if state is not None:
        trainer.load_states([state])
    (result,) = trainer.train(
        test,
        validation,
        evaluate_every,
        None if checkpoint is None else lambda states: checkpoint(states[0]),
        None if progress is None else lambda done, epochs: progress(done, epochs[0].loss),
    )
    return result


def train_together(
    runs: Sequence[Run],
    test: Split | Files | None = None,
    *,
    together: int = 4,
    validation: Split | Files | None = None,
    evaluate_every: int = 0,
    progress: Callable[[int, int, Sequence[Epoch]], None] | None = None,
    engine: Engine = "auto",
    compile: bool = False,
) -> list[Result]:
    """Train `runs`, on a GPU `together` at a time; one result each, as `train` would give.

    `progress(first, epochs_done, epochs)` is called after every epoch of a group that begins at run `first`.

    >>> from prospr.lab.data import digits
    >>> from prospr.lab.models import build
    >>> data, recipe = digits(), Recipe(epochs=1, batch_size=256, lr=0.1)
    >>> batches = [Batches(data.train.images, data.train.labels, recipe.batch_size, seed) for seed in range(2)]
    >>> runs = [Run(build("small_convnet", seed=seed), batches[seed], recipe) for seed in range(2)]
    >>> len(train_together(runs, data.test))
    2
    """
    if together < 1:
        raise ValueError(f"together is {together}; use at least 1")
    results: list[Result] = []
    size = together if runs and uses_graph(runs[0], engine) else 1
    for first in range(0, len(runs), size):
        trainer = trainer_for(runs[first : first + size], engine, compile)
        tell = None if progress is None else lambda done, epochs, first=first: progress(first, done, epochs)
        results += trainer.train(test, validation, evaluate_every, progress=tell)
        del trainer  # its graph and memory, before the next is made
    return results


def uses_graph(run: Run, engine: Engine) -> bool:
    """Whether `engine` means a CUDA graph for this run, which others can then share."""
    if engine not in ("auto", "eager", "graph"):
        raise ValueError(f"unknown engine {engine!r}; known: auto, eager, graph")
    if engine == "auto":
        pays = run.device.type == "cuda" and run.recipe.epochs * run.steps >= PAYS_FROM
        return pays and drawn_ahead(run.batches)
    return engine == "graph"


def trainer_for(
    runs: Sequence[Run],
    engine: Engine = "auto",
    compile: bool = False,
    team: Team | None = None,
    norms: Norms = "all",
) -> Trainer:
    """What trains `runs` side by side; several only where `uses_graph` says so, and one where ranks train it."""
    if team is not None:
        return EagerTrainer(runs[0], team, norms)
    if not uses_graph(runs[0], engine):
        return EagerTrainer(runs[0])
    try:
        return GraphTrainer(runs, compile=compile)
    except CaptureError as error:
        if engine == "graph" or len(runs) > 1:
            raise
        torch.cuda.synchronize()
        warnings.warn(f"{error}; training in plain PyTorch", stacklevel=3)
        return EagerTrainer(runs[0])
