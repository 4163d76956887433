"""The networks of the experiments, by name.

>>> sorted(networks())
['gpt', 'mobilenet', 'resnet18', 'resnet20', 'resnet50', 'small_convnet', 'unet', 'vgg16', 'vgg19', 'vit']
>>> model = build("resnet20", seed=0, shortcut="B")
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from prospr.lab.models.gpt import gpt, initial_
from prospr.lab.models.init import kaiming_, truncated_
from prospr.lab.models.mobile import mobilenet
from prospr.lab.models.packages import from_package
from prospr.lab.models.resnet import resnet18, resnet20, resnet50
from prospr.lab.models.small import small_convnet
from prospr.lab.models.unet import unet
from prospr.lab.models.vgg import vgg16, vgg19
from prospr.lab.models.vit import vit
from prospr.lab.seeds import derive

__all__ = [
    "build",
    "gpt",
    "initialise",
    "mobilenet",
    "networks",
    "resnet18",
    "resnet20",
    "resnet50",
    "small_convnet",
    "unet",
    "vgg16",
    "vgg19",
    "vit",
]

_OWN = (small_convnet, resnet20, vgg16, vgg19, resnet18, resnet50, unet, mobilenet, vit, gpt)


def networks() -> dict[str, Callable[..., nn.Module]]:
    """Every network's name and the function that makes it. Each takes a `width`, for a narrower one."""
    return {make.__name__: make for make in _OWN}


def build(name: str, *, seed: int | None = None, **settings) -> nn.Module:
    """Make the network called `name`; `settings` go to its function.

    A name with a colon is a network of an installed package: "timm:NAME", "torchvision:NAME", or
    "package.module:function" for a function or class that returns a module.

    With a `seed` its initial weights depend on that seed alone and the global random state is left as it was;
    without one they are drawn from the global random state, as PyTorch does.

    >>> a, b = build("small_convnet", seed=1), build("small_convnet", seed=1)
    >>> all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))
    True
    >>> build("torch.nn:Linear", in_features=3, out_features=2)
    Linear(in_features=3, out_features=2, bias=True)
    """
    make = _find(name)
    if seed is None:
        model = make(**settings)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive("init", seed))
            model = make(**settings)
    if not isinstance(model, nn.Module):
        raise TypeError(f"network {name!r}: it made a {type(model).__name__}, not a torch.nn.Module")
    return model


def initialise(name: str, model: nn.Module) -> None:
    """Draw the weights of `model`, a network called `name` or a smaller one made of it, as `build` does, in place.

    From the global random state. A network of a package is drawn by its layers' own `reset_parameters`.

    >>> model = build("small_convnet", seed=0)
    >>> initialise("small_convnet", model)
    """
    for module in model.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    if ":" not in name:
        {"vit": truncated_, "gpt": initial_}.get(name, kaiming_)(model)


def _find(name: str) -> Callable[..., nn.Module]:
    if ":" in name:
        return from_package(name)
    known = networks()
    if name not in known:
        raise ValueError(
            f"unknown network {name!r}; known names: {', '.join(known)}, and 'package.module:function' for any other"
        )
    return known[name]
