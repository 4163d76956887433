"""Prune neural networks before they are trained.

>>> import torch, prospr
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
>>> batches = [(torch.randn(16, 8), torch.randint(0, 2, (16,))) for _ in range(4)]
>>> masks = prospr.prune(model, batches, sparsity=0.9)      # in place; stays sparse while it trains
>>> round(masks.sparsity, 2)
0.9
"""

from prospr import errors, masks, meta
from prospr.errors import PruningError
from prospr.masks import Masks, inspect, select
from prospr.methods import Method, methods
from prospr.pruning import prune, score
from prospr.scores import Magnitude, ProsPr, Random, Score, Snip, prunable

__version__ = "0.1.0"

__all__ = [
    "Magnitude",
    "Masks",
    "Method",
    "ProsPr",
    "PruningError",
    "Random",
    "Score",
    "Snip",
    "errors",
    "inspect",
    "masks",
    "meta",
    "methods",
    "prunable",
    "prune",
    "score",
    "select",
]
