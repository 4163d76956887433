"""Networks out of installed packages, by a name such as "timm:resnet18"; a package is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType

from torch import nn


def from_package(name: str) -> Callable[..., nn.Module]:
    """The function behind "timm:NAME", "torchvision:NAME" or "package.module:function".

    >>> from_package("torch.nn:Linear")(3, 2)
    Linear(in_features=3, out_features=2, bias=True)
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"network {name!r}: expected 'timm:NAME', 'torchvision:NAME' or 'package.module:function'")
    if module == "timm":
        timm = _load("timm", name)
        if not timm.is_model(function):
            raise ValueError(f"network {name!r}: timm has no {function!r}; timm.list_models() names what it has")
        return partial(timm.create_model, function)
    if module == "torchvision":
        models = _load("torchvision.models", name)
        if function not in models.list_models():
            raise ValueError(
                f"network {name!r}: torchvision has no {function!r}; torchvision.models.list_models() names what it has"
            )
        return partial(models.get_model, function)
    make = getattr(_load(module, name), function, None)
    if not callable(make):
        found = "no" if make is None else f"no function or class, but a {type(make).__name__},"
        raise ValueError(f"network {name!r}: {module} has {found} {function!r}; check the spelling")
    return make


def _load(module: str, name: str) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name == package:
            remedy = f"{package} is not installed; pip install {package}, or put its folder on PYTHONPATH"
        elif error.name is not None and f"{module}.".startswith(f"{error.name}."):
            remedy = f"{package} is installed and has no module {error.name}; check the spelling"
        else:  # the package is there, and something that it needs is not
            raise
        raise ModuleNotFoundError(f"network {name!r}: {remedy}", name=error.name) from None
