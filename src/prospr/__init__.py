"""Prune neural networks before they are trained.

>>> import torch, prospr
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
>>> batches = [(torch.randn(16, 8), torch.randint(0, 2, (16,))) for _ in range(4)]
>>> masks = prospr.prune(model, batches, sparsity=0.9)      # in place; stays sparse while it trains
>>> round(masks.sparsity, 2)
0.9
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prospr import channels, errors, masks, meta, sanity
    from prospr.channels import shrink
    from prospr.errors import PruningError
    from prospr.gradual import GradualMagnitude
    from prospr.masks import Masks, inspect, select
    from prospr.meta.ranks import Ranks
    from prospr.pruning import prune, score
    from prospr.registry import Method, methods
    from prospr.retraining import retrain
    from prospr.schedules import Iterative
    from prospr.scores import Grasp, Magnitude, NtkSap, Phew, ProsPr, Random, Score, Snip, SynFlow, prunable

__version__ = "0.1.0"

__all__ = [
    "GradualMagnitude",
    "Grasp",
    "Iterative",
    "Magnitude",
    "Masks",
    "Method",
    "NtkSap",
    "Phew",
    "ProsPr",
    "PruningError",
    "Random",
    "Ranks",
    "Score",
    "Snip",
    "SynFlow",
    "channels",
    "errors",
    "inspect",
    "masks",
    "meta",
    "methods",
    "prunable",
    "prune",
    "retrain",
    "sanity",
    "score",
    "select",
    "shrink",
]

# Where each name lives. They are looked up when first used: a command's --help need not wait for torch.
_HOMES = {
    "prospr": ("channels", "errors", "masks", "meta", "sanity"),
    "prospr.channels": ("shrink",),
    "prospr.errors": ("PruningError",),
    "prospr.gradual": ("GradualMagnitude",),
    "prospr.masks": ("Masks", "inspect", "select"),
    "prospr.meta.ranks": ("Ranks",),
    "prospr.pruning": ("prune", "score"),
    "prospr.registry": ("Method", "methods"),
    "prospr.retraining": ("retrain",),
    "prospr.schedules": ("Iterative",),
    "prospr.scores": (
        "Grasp",
        "Magnitude",
        "NtkSap",
        "Phew",
        "ProsPr",
        "Random",
        "Score",
        "Snip",
        "SynFlow",
        "prunable",
    ),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            value = import_module(f"prospr.{name}") if home == "prospr" else getattr(import_module(home), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'prospr' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
