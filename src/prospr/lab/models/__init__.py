"""The networks of the experiments, by name.

>>> sorted(networks())
['resnet18', 'resnet20', 'resnet50', 'small_convnet', 'vgg16', 'vgg19']
>>> model = build("resnet20", seed=0, shortcut="B")
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from prospr.lab.models.resnet import resnet18, resnet20, resnet50
from prospr.lab.models.small import small_convnet
from prospr.lab.models.vgg import vgg16, vgg19
from prospr.lab.seeds import derive

__all__ = ["build", "networks", "resnet18", "resnet20", "resnet50", "small_convnet", "vgg16", "vgg19"]


def networks() -> dict[str, Callable[..., nn.Module]]:
    """Every network's name and the function that makes it."""
    return {make.__name__: make for make in (small_convnet, resnet20, vgg16, vgg19, resnet18, resnet50)}


def build(name: str, *, seed: int | None = None, **settings) -> nn.Module:
    """Make the network called `name`; `settings` go to its function.

    With a `seed` its initial weights depend on that seed alone and the global random state is left as it was;
    without one they are drawn from the global random state, as PyTorch does.

    >>> a, b = build("small_convnet", seed=1), build("small_convnet", seed=1)
    >>> all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))
    True
    """
    known = networks()
    if name not in known:
        raise ValueError(f"unknown network {name!r}; known names: {', '.join(known)}")
    if seed is None:
        return known[name](**settings)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive("init", seed))
        return known[name](**settings)
