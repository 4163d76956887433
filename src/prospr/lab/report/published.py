"""The paper's numbers behind ours: what of its tables belongs to a setup, and how they come to stand beside ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prospr.lab.experiment import Experiment
from prospr.lab.paper import FIGURES, PaperTable, published
from prospr.lab.recipes import recipes
from prospr.lab.report.markup import Markup, tag
from prospr.lab.report.setups import Setup
from prospr.lab.report.tables import table
from prospr.lab.report.words import NONE, percent, points, sparsity
from prospr.lab.results import DENSE, Row, accuracy, cell

NEAR = math.log(1.3)
"""How far beyond our sparsities, in the logarithm of the density, the paper's curve is drawn: one of its steps."""
SAME = 6e-4  # of sparsities; the paper prints three digits


@dataclass(frozen=True)
class Point:
    """A number of the paper as a share; `sd` is None where it prints none."""

    sparsity: float
    mean: float
    sd: float | None


@dataclass(frozen=True)
class Behind:
    """The paper's curves of a setup's methods, as far as our sparsities go, and the tables they are of."""

    curves: Mapping[str, Sequence[Point]]
    tables: Sequence[PaperTable]
    experiment: Experiment

    @property
    def dense(self) -> float | None:
        return self.curves[DENSE][0].mean if DENSE in self.curves else None

    @property
    def pruned(self) -> dict[str, Sequence[Point]]:
        return {method: here for method, here in self.curves.items() if method != DENSE}


NOTHING = Behind({}, (), Experiment())


def behind(setup: Setup) -> Behind:
    """What the paper has of the methods of `setup`."""
    ours = [float(r.experiment.sparsity) for r in setup.records if r.experiment.method != DENSE]
    curves: dict[str, list[Point]] = {}
    tables: dict[str, PaperTable] = {}
    for record, name in zip(setup.records, setup.names, strict=True):
        found = published(record.experiment)
        if name in curves or found is None:
            continue
        scale = FIGURES[found.rows[0].metric][1]
        every = [
            Point(row.sparsity, row.mean / scale, None if row.sd is None else row.sd / scale) for row in found.rows
        ]
        here = every if name == DENSE else [point for point in every if _near(point.sparsity, ours)]
        if here:
            curves[name] = here
            tables[found.table.name] = found.table
    return Behind(curves, tuple(tables.values()), setup.records[0].experiment)


def paper_table(rows: Sequence[Row], found: Behind) -> Markup:
    """The paper's numbers, and ours where they are of the same sparsity."""
    groups: dict[str, list[Markup]] = {}
    for method, here in found.curves.items():
        for point in here:
            ours = accuracy(_same(rows, method, point.sparsity))
            versus = points(ours.mean - point.mean) if ours.n else NONE
            told = f"{percent(ours.mean)} ({ours.n})" if ours.n else NONE
            cells = [percent(point.mean), percent(point.sd), told, versus]
            name = "not pruned" if method == DENSE else sparsity(point.sparsity)
            line = tag("tr", tag("th", name, scope="row"), *(tag("td", text) for text in cells))
            groups.setdefault(method, []).append(line)
    head = ["sparsity", "the paper's mean %", "sd", "ours % (runs)", "ours minus the paper's"]
    inner = table("The paper's numbers beside ours", head, groups, "numbers")
    return tag("details", tag("summary", "The paper's numbers as a table"), inner)


def paper_note(found: Behind) -> Markup:
    """Where the numbers are from, and in what the two trainings differ."""
    one, told = found.experiment, []
    for of in found.tables:
        told.append(f"The paper's numbers are those of its {of.source}.")
        theirs = recipes().get(of.recipe)
        if theirs is not None and one.trained_by == theirs:
            told.append(f"Ours are trained by the recipe the paper gives ({of.recipe}, {theirs.epochs} epochs).")
        elif theirs is not None:
            ours = f"{one.trained_by.epochs} epochs by {one.recipe_name}"
            told.append(
                f"The recipes differ: ours are trained for {ours}, the paper's for {theirs.epochs} by {of.recipe}."
            )
        told += of.differs
    return tag("p", " ".join(dict.fromkeys(told)), class_="note paper")


def _near(share: float, ours: Sequence[float]) -> bool:
    """Whether a sparsity is within ours, or at most a step of the paper's beyond."""
    at, low, high = (math.log(1 - one) for one in (share, max(ours), min(ours)))
    return share > 0 and low - NEAR <= at <= high + NEAR


def _same(rows: Sequence[Row], method: str, share: float) -> list[Row]:
    return cell(rows, DENSE) if method == DENSE else [r for r in cell(rows, method) if abs(r.sparsity - share) < SAME]
