"""Benchmarks are scripts beside the package; here they are imported as modules, for a test."""

import importlib
import sys
from pathlib import Path

__all__ = ["BENCHMARKS", "imported"]

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
HERE = ("channels", "fair", "narrower", "stability", "stepping", "torch_pruning_rival", "harness", "scale")
HERE += ("fair_show", "small_cifar", "small_channels", "small_mlp", "gpt", "screening", "totals", "concentration")


def imported(name, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    for other in HERE:
        monkeypatch.delitem(sys.modules, other, raising=False)
    yield importlib.import_module(name)
    for other in HERE:
        sys.modules.pop(other, None)
