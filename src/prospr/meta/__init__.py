"""Exact gradients through training steps. Useful on its own; knows nothing of pruning."""

from prospr.meta import curvature
from prospr.meta.loss import cross_entropy, pure_loss
from prospr.meta.metagrad import Trace, metagrad
from prospr.meta.optimizers import SGD, Adam, AdamW, Optimizer
from prospr.meta.products import gradient, hvp
from prospr.meta.ranks import Ranks

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Optimizer",
    "Ranks",
    "Trace",
    "cross_entropy",
    "curvature",
    "gradient",
    "hvp",
    "metagrad",
    "pure_loss",
]
