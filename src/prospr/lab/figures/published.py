"""The paper's own curves for a setup, where it has any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from prospr.lab.experiment import DENSE, Experiment, Training
from prospr.lab.paper import BENCHMARK, PAPER, tables
from prospr.lab.recipes import recipes
from prospr.lab.report.setups import Setup

__all__ = ["Published", "published"]


@dataclass(frozen=True)
class Published:
    """{method: {sparsity: share}} under the labels of a setup, and what the curves are called."""

    curves: Mapping[str, Mapping[float, float]]
    label: str


def published(setup: Setup) -> Published | None:
    """What the paper prints of the same network, data and methods; its recipe may be another, which the label says."""
    known, curves, epochs = _known(), {}, 0
    for record, label in zip(setup.records, setup.labels, strict=True):
        if (found := known.get(_kind(record.experiment))) and record.experiment.method != DENSE:
            curves[label], epochs = found
            if dense := known.get(_kind(replace(record.experiment, method=DENSE))):
                curves[DENSE] = dense[0]
    if not curves:
        return None
    ours = setup.records[0].experiment.trained_by.epochs
    return Published(curves, "the paper's" if ours == epochs else f"the paper's, {epochs} epochs")


@cache
def _known() -> dict[str, tuple[dict[float, float], int]]:
    """{what was run: ({sparsity: share}, epochs)} of every number of the paper that an experiment measures."""
    found: dict[str, tuple[dict[float, float], int]] = {}
    for table in tables().values():
        for recipe in (PAPER, BENCHMARK) if table.benchmark is not None else (PAPER,):
            for cell in table.cells(seeds=[0], recipe=recipe):
                row = cell.row
                if not cell.experiments or row.metric not in ("top1", "mean_iou"):
                    continue
                curve, _ = found.setdefault(_kind(cell.experiments[0]), ({}, recipes()[table.recipe].epochs))
                curve.setdefault(row.sparsity, row.mean / 100 if row.metric == "top1" else row.mean)
    return found


def _kind(one: Experiment) -> str:
    """The identity without sparsity, seed and training; a start by BYOL is part of it."""
    return replace(one, sparsity=0.9, seed=0, recipe="auto", training=Training(byol=one.training.byol)).identity
