"""Exact gradients through training steps. Useful on its own; knows nothing of pruning."""

from prospr.meta import curvature
from prospr.meta.loss import cross_entropy, pure_loss
from prospr.meta.metagrad import Trace, metagrad
from prospr.meta.optimizers import SGD, Adam, AdamW, Optimizer
from prospr.meta.products import gradient, hvp

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Optimizer",
    "Trace",
    "cross_entropy",
    "curvature",
    "gradient",
    "hvp",
    "metagrad",
    "pure_loss",
]
