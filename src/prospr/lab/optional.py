"""Packages that only some of the lab needs, imported where they are asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from prospr.errors import PackageError

__all__ = ["optional"]


def optional(module: str, install: str) -> Any:
    """The module, or an error that says what to install: a package, or an extra of this one.

    >>> optional("no_such_package", "prospect-pruning[figures]")
    Traceback (most recent call last):
    prospr.errors.PackageError: no_such_package was asked for and is not installed; pip install
    'prospect-pruning[figures]', or leave it out
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        name = module.partition(".")[0] if "[" in install else install
        what = f"{install!r}" if "[" in install else install
        raise PackageError(
            f"{name} was asked for and is not installed; pip install {what}, or leave it out", name=error.name
        ) from None
