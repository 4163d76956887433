"""Which weights stay: selection, masks that hold while training, and what they do to the network."""

from prospr.masks.inspect import Inspection, Layer, Threshold, histogram, inspect, threshold
from prospr.masks.masks import Masks
from prospr.masks.select import Scope, erk_densities, select, select_shards

__all__ = [
    "Inspection",
    "Layer",
    "Masks",
    "Scope",
    "Threshold",
    "erk_densities",
    "histogram",
    "inspect",
    "select",
    "select_shards",
    "threshold",
]
