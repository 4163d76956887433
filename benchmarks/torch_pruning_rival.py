"""Magnitude pruning by torch-pruning (MIT, installed by the user), brought to the FLOPs that are asked for."""

import copy
import importlib.util

import torch
from torch import nn

from prospr.counting import flops


def available() -> bool:
    return importlib.util.find_spec("torch_pruning") is not None


def pruned(model: nn.Module, example: torch.Tensor, wanted: int, tries: int = 12) -> nn.Module:
    """The network pruned globally by magnitude in one step, of the FLOPs nearest to `wanted`: by halving the ratio."""
    low, high = 0.0, 1.0
    best: tuple[float, nn.Module] | None = None
    for _ in range(tries):
        ratio = (low + high) / 2
        small = _at(model, example, ratio)
        found = flops(small, example)
        if best is None or abs(found - wanted) < best[0]:
            best = abs(found - wanted), small
        low, high = (ratio, high) if found > wanted else (low, ratio)
    assert best is not None
    return best[1]


def _at(model: nn.Module, example: torch.Tensor, ratio: float) -> nn.Module:
    import torch_pruning

    small = copy.deepcopy(model).eval()
    last = [m for m in small.modules() if isinstance(m, (nn.Linear, nn.Conv2d))][-1]  # its outputs are the classes
    torch_pruning.pruner.BasePruner(
        small,
        example,
        importance=torch_pruning.importance.MagnitudeImportance(),
        global_pruning=True,
        pruning_ratio=ratio,
        max_pruning_ratio=0.99,  # without a bound it may empty a layer
        ignored_layers=[last],
    ).step()
    return small.train()
