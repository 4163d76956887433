"""Run folders with made-up figures, written by the writers of real ones."""

from functools import cache

import torch

import prospr
from prospr.lab.experiment import DENSE, Experiment, Training
from prospr.lab.runs.environment import environment, now
from prospr.lab.runs.folder import RunFolder
from prospr.lab.runs.scores import summarise_scores
from prospr.lab.train import Epoch

SHAPES = {"conv1.weight": (8, 3, 3, 3), "layer1.0.conv1.weight": (8, 8, 3, 3), "fc.weight": (10, 8)}
METHODS = ("magnitude", "prospr", "random", "snip")


def fake_run(experiment, folder, state="done", mask=True):
    """The folder of `experiment` as it is when it is done, has failed or is under way."""
    draw = torch.Generator().manual_seed(int(experiment.identity[:8], 16))
    place = RunFolder(experiment, folder)
    place.path.mkdir(parents=True)
    place.begin()
    epochs = experiment.trained_by.epochs if state == "done" else experiment.trained_by.epochs // 2
    dense = experiment.method == DENSE
    top = 0.93 if dense else 0.95 - 0.2 * experiment.sparsity**8 - 0.01 * len(experiment.method)
    noise = 0.01 * torch.randn(epochs, 3, generator=draw)
    place.write_metrics([_epoch(i, epochs, top, *noise[i].tolist()) for i in range(epochs)])
    masks = None if dense else fake_masks(experiment, draw)
    if masks is not None and mask:
        if experiment.pruning.check is None:
            place.write_scores({"unit": "weights", "rounds": 1, **fake_scores(masks, draw)})
        masks.save(place.masks)
    if state == "done":
        place.finish(_content(experiment, top + float(noise[-1, 0]), masks))
    elif state == "failed":
        trace = "Traceback (most recent call last):\n  <somewhere>\n"
        error = {"error": "CollapseError: fc.weight & <all>", "traceback": trace, "when": now()}
        place.fail({**error, "environment": here()})
    return place


@cache
def here():
    """This machine; once, because git is asked too."""
    return environment(torch.device("cpu"))


def fake_masks(experiment, draw):
    """Random masks; those of "prospr" and "snip" share what they keep of the first layer."""
    masks = {n: torch.rand(shape, generator=draw) >= experiment.sparsity for n, shape in SHAPES.items()}
    if experiment.method in ("prospr", "snip"):
        masks["conv1.weight"] = torch.arange(216).reshape(8, 3, 3, 3) < 100
    masks["fc.weight"][0, 0] = True  # something is always kept
    return prospr.Masks(masks)


def fake_scores(masks, draw):
    """The summary of scores that lie around 0.01 where a weight is removed and around 1 where it is kept."""
    scores = {
        name: (1.0 * kept + 0.01) * (0.5 + torch.rand(kept.shape, generator=draw)) for name, kept in masks.items()
    }
    return summarise_scores(scores, masks, {name: torch.ones_like(kept) for name, kept in masks.items()})


def grid(methods=METHODS, sparsities=(0.9, 0.98), seeds=(0, 1, 2), **changes):
    """Experiments on CIFAR-10, the dense ones first."""
    found = [Experiment(dataset="cifar10", method=DENSE, seed=seed, **changes) for seed in seeds]
    return found + [
        Experiment(dataset="cifar10", method=method, sparsity=share, seed=seed, **changes)
        for method in methods
        for share in sparsities
        for seed in seeds
    ]


def two_hundred(folder):
    """Two settings, 200 runs of 200 epochs; some failed, one not finished."""
    many = grid((*METHODS, "grasp", "synflow"), (0.8, 0.9, 0.95, 0.98, 0.995), range(6))
    other = grid(METHODS[:2], (0.9, 0.95, 0.98), (0, 1), settings={"width": 8}, training=Training(evaluate_every=5))
    for number, experiment in enumerate([*many, *other]):
        state = "failed" if number % 67 == 50 else "unfinished" if number == 20 else "done"
        fake_run(experiment, folder, state)
    return len(many) + len(other)


def _epoch(i, epochs, top, *noise):
    done = (i + 1) / epochs
    seen = {"test": top * done**0.2 + noise[1]} if i % 5 == 4 else {}
    return Epoch(2.3 * (1 - done) ** 2 + 0.05 + abs(noise[0]), min(1.0, top * done**0.1 + noise[2]), 0.1, 1.5, **seen)


def _content(experiment, figure, masks):
    sizes = {"parameters": 268336, "trained_parameters": 268336, "flops": 81_000_000, "trained_flops": 81_000_000}
    if experiment.pruning.shrink:
        sizes |= {"trained_parameters": 26834, "trained_flops": 8_100_000}
    if masks is not None:
        sizes |= {"kept": masks.kept, "total": masks.total, "density": masks.density}
        sizes |= {"effective_density": 0.9 * masks.density, "layers": masks.densities()}
    return {
        "headline": "accuracy",
        "figures": {"loss": 0.3, "accuracy": figure},
        "sizes": sizes,
        "seconds": {"score": 2.5, "train": 300.0, "last_session": 310.0},
        "memory": {},
        "steps": 39200,
        "environment": here(),
        "notes": [],
    }
