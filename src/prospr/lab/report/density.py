"""Direct against effective density: the weights kept, and those of them that can change the result."""

from __future__ import annotations

import math
from collections.abc import Sequence

from prospr.lab.report.markup import Markup, tag
from prospr.lab.report.plot import SERIES, mark, swatch
from prospr.lab.report.tables import table
from prospr.lab.report.words import NONE, sparsity
from prospr.lab.results import Row, cell, methods_of, sparsities_of
from prospr.lab.stats import summarise

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 390.0, 330.0, 44.0, 30.0, 12.0, 48.0


def effective_densities(rows: Sequence[Row]) -> dict[tuple[str, float], tuple[float, float]]:
    """{(method, sparsity): (direct, effective)}, means over the seeds for which both are known.

    >>> effective_densities([Row("snip", 0.9, 0, kept=10, total=100, effective=0.08), Row("random", 0.9, 0)])
    {('snip', 0.9): (0.1, 0.08)}
    """
    found = {}
    for share in sparsities_of(rows):
        for method in methods_of(rows):
            pairs = [
                (row.kept / row.total, row.effective)
                for row in cell(rows, method, share)
                if row.kept is not None and row.total and row.effective is not None
            ]
            if pairs:
                direct, effective = (summarise(values).mean for values in zip(*pairs, strict=True))
                found[method, share] = (direct, effective)
    return found


def density_plot(rows: Sequence[Row], prefix: str = "") -> Markup:
    """Effective over direct density on logarithmic scales; what has no path left lies on the floor."""
    found = effective_densities(rows)
    methods = methods_of(rows)
    above = [value for pair in found.values() for value in pair if value > 0]
    low = min(-1, math.floor(math.log10(min(above, default=0.1)) + 1e-9))

    def place(value: float) -> float:
        return 0.0 if value <= 0 else max(0.0, 1 - math.log10(value) / low)

    def x(value: float) -> float:
        return LEFT + place(value) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - place(value) * (HEIGHT - TOP - BOTTOM)

    floor, end = HEIGHT - BOTTOM, WIDTH - RIGHT
    axes = [tag("text", "effective density, %", x=0, y=14)]
    for power in range(low, 1):
        value = 10.0**power
        shown = f"{100 * value:g}"
        axes.append(tag("line", x1=LEFT, y1=y(value), x2=end, y2=y(value), class_="grid"))
        axes.append(tag("text", shown, x=LEFT - 8, y=y(value) + 4, text_anchor="end"))
        axes.append(tag("line", x1=x(value), y1=floor, x2=x(value), y2=floor + 5, class_="tick"))
        axes.append(tag("text", shown, x=x(value), y=floor + 19, text_anchor="middle"))
    axes.append(tag("text", "direct density, % (log scales)", x=(LEFT + end) / 2, y=floor + 40, text_anchor="middle"))
    marks = []
    for (method, share), (direct, effective) in found.items():
        index = methods.index(method)
        told = f"{method} at {sparsity(share)}: {_share(direct)} % kept, {_share(effective)} % effective"
        marks.append(tag("g", mark(x(direct), y(effective), index, told), class_=f"series-{index % SERIES}"))
    return tag(
        "svg",
        tag("title", "Effective against direct density", id=f"{prefix}density-title"),
        tag("desc", "The numbers are in the table below.", id=f"{prefix}density-desc"),
        tag("g", *axes, class_="axes"),
        tag("line", x1=LEFT, y1=floor, x2=end, y2=TOP, class_="dashed"),
        *marks,
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        role="img",
        aria_labelledby=f"{prefix}density-title {prefix}density-desc",
        class_="plot small",
    )


def density_table(rows: Sequence[Row]) -> Markup:
    """The plot's numbers."""
    found = effective_densities(rows)
    groups: dict[str, list[Markup]] = {}
    for share in sparsities_of(rows):
        for index, method in enumerate(methods_of(rows)):
            if (method, share) in found:
                direct, effective = found[method, share]
                vain = f"{100 * max(0.0, 1 - effective / direct):.1f}" if direct else NONE
                cells = [tag("td", text) for text in (_share(direct), _share(effective), vain)]
                line = tag("tr", tag("th", swatch(index), method, scope="row"), *cells)
                groups.setdefault(f"{sparsity(share)} sparsity", []).append(line)
    head = ["method", "direct %", "effective %", "kept in vain, %"]
    return table(
        "Weights kept, and those on a path from input to output: means over the seeds", head, groups, "numbers"
    )


def _share(value: float) -> str:
    return f"{100 * value:.3g}"
