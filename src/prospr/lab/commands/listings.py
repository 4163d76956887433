"""The commands of `prospr` that list what there is by name. None imports torch to be read."""

from __future__ import annotations

import json
from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import Any

from prospr.lab.commands.base import Command

__all__ = ["Datasets", "Methods", "Networks", "Recipes"]


@dataclass(frozen=True)
class Listing(Command):
    """A table of what there is by name."""

    json: bool = False
    """Print the table as JSON."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]: ...

    def __call__(self) -> None:
        from prospr.lab.show import show_table

        print(json.dumps(self.rows(), indent=1) if self.json else show_table(self.rows()))


@dataclass(frozen=True)
class Methods(Listing):
    """List the pruning methods."""

    def rows(self) -> list[dict[str, Any]]:
        from prospr.registry import methods

        return [
            {
                "method": name,
                "rounds": method.rule.rounds,
                "scope": method.scope,
                "granularity": method.granularity,
                "cost in training steps": method.cost,
                "reference": method.reference,
            }
            for name, method in methods().items()
        ]


@dataclass(frozen=True)
class Networks(Listing):
    """List the networks."""

    def rows(self) -> list[dict[str, Any]]:
        import inspect

        from prospr.lab.models import networks

        def settings(make: Any) -> str:
            given = inspect.signature(make).parameters.values()
            return ", ".join(f"{one.name}={one.default}" for one in given)

        return [
            {
                "network": name,
                "settings": settings(make),
                "about": (inspect.getdoc(make) or "").partition("\n\n")[0].replace("\n", " "),
            }
            for name, make in networks().items()
        ]


@dataclass(frozen=True)
class Datasets(Listing):
    """List the data sets."""

    def rows(self) -> list[dict[str, Any]]:
        from prospr.lab.data import datasets
        from prospr.lab.experiment import USUAL

        return [
            {
                "data set": name,
                "task": entry.task,
                "images": entry.shape,
                "to train + to test on": entry.counts,
                "download": entry.download or ("by hand" if entry.files else "none"),
                "network": USUAL[name].network,
                "recipe": USUAL[name].recipe,
                "about": entry.about,
            }
            for name, entry in datasets().items()
        ]


@dataclass(frozen=True)
class Recipes(Listing):
    """List the recipes networks are trained by."""

    def rows(self) -> list[dict[str, Any]]:
        from prospr.lab.recipes import recipes

        return [
            {
                "recipe": name,
                **{one.name: getattr(recipe, one.name) for one in fields(recipe)},
            }
            for name, recipe in recipes().items()
        ]
