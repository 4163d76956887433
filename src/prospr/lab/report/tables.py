"""The page's tables: accuracies and paired differences, sanity checks, layer densities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from prospr.lab.report.markup import Markup, tag
from prospr.lab.report.plot import swatch
from prospr.lab.report.words import NONE, density, interval, percent, points, sparsity
from prospr.lab.results import DENSE, Row, accuracy, cell, checks_of, difference, methods_of, sparsities_of
from prospr.lab.stats import Summary

FAINTEST = 1e-3
"""The density that gets the heat map's faintest colour; the scale is logarithmic up to 1."""


def table(caption: str, head: Sequence[str], groups: Mapping[str, Sequence[Markup]], class_: str) -> Markup:
    """A table of groups of rows, each under its heading unless that is empty; it scrolls sideways in its own box."""
    columns = tag("tr", *(tag("th", text, scope="col") for text in head))
    bodies = []
    for heading, lines in groups.items():
        over = [tag("tr", tag("th", heading, colspan=len(head), scope="rowgroup"), class_="over")] if heading else []
        bodies.append(tag("tbody", *over, *lines))
    inner = tag("table", tag("caption", tag("span", caption)), tag("thead", columns), *bodies, class_=class_)
    return tag("div", inner, class_="scroll", tabindex=0, role="region", aria_label=caption)


def accuracy_table(rows: Sequence[Row], baseline: str) -> Markup:
    """n, mean, deviation and the paired difference to `baseline` of every method at every sparsity."""
    differences = {
        (method, share): difference(cell(rows, method, share), cell(rows, baseline, share))
        for share in sparsities_of(rows)
        for method in methods_of(rows)
        if method != baseline
    }
    reach = {
        share: _reach([versus for (_, at), versus in differences.items() if at == share])
        for share in sparsities_of(rows)
    }
    groups = {
        _heading(share): [
            tag(
                "tr",
                tag("th", swatch(index), method, scope="row"),
                *_spread(cell(rows, method, share)),
                *_difference(differences.get((method, share)), reach[share]),
            )
            for index, method in enumerate(methods_of(rows))
        ]
        for share in sparsities_of(rows)
    }
    dense = cell(rows, DENSE)
    if dense:
        blanks = [tag("td", NONE), tag("td", NONE), tag("td", class_="drawn")]
        groups["not pruned"] = [tag("tr", tag("th", DENSE, scope="row"), *_spread(dense), *blanks)]
    head = ["method", "n", "mean %", "sd", f"minus {baseline}", "95 % interval", "drawn"]
    caption = f"Test accuracy, and its difference to {baseline} in percentage points, paired by seed"
    return table(caption, head, groups, "numbers differences")


def check_table(rows: Sequence[Row]) -> Markup:
    """The sanity checks: accuracy, and its paired difference to the mask as it was found."""
    groups: dict[str, list[Markup]] = {}
    for method, share, check in checks_of(rows):
        found = cell(rows, method, share)
        under = f"{method} at {_heading(share)}"
        if under not in groups:
            blanks = [tag("td", "as found"), tag("td", NONE)]
            groups[under] = [tag("tr", tag("th", "mask as found", scope="row"), *_spread(found), *blanks)]
        here = cell(rows, method, share, check)
        versus = difference(here, found)
        cells = [tag("td", points(versus.mean)), tag("td", interval(versus))]
        groups[under].append(tag("tr", tag("th", check, scope="row"), *_spread(here), *cells))
    head = ["mask", "n", "mean %", "sd", "minus as found", "95 % interval"]
    return table("Test accuracy of masks that should do worse, paired by seed", head, groups, "numbers")


def layer_table(rows: Sequence[Row]) -> Markup:
    """Layer densities as a heat map: one row a method and sparsity, one column a layer, means over the seeds."""
    layers = list(dict.fromkeys(layer for row in rows for layer in row.layers))
    shared = ".weight" if all(layer.endswith(".weight") for layer in layers) else ""
    groups: dict[str, list[Markup]] = {}
    for share in sparsities_of(rows):
        for index, method in enumerate(methods_of(rows)):
            here = [row for row in cell(rows, method, share) if row.layers]
            cells = [_heat([row.layers[layer] for row in here if layer in row.layers]) for layer in layers]
            line = tag("tr", tag("th", swatch(index), method, scope="row"), *cells)
            groups.setdefault(_heading(share), []).append(line)
    head = ["method", *(layer.removesuffix(shared) for layer in layers)]
    style = "heat many" if len(layers) > 8 else "heat"
    return table("Share of the weights kept in each layer, in per cent, mean over the seeds", head, groups, style)


def heat_scale() -> Markup:
    """The heat map's legend."""
    steps = [_heat([step], "span") for step in (0.001, 0.01, 0.1, 1.0)]
    empty = tag("b", _heat([0.0], "span"), " empty")
    return tag("p", "colour: ", *steps, " % kept; ", empty, class_="scale")


def _heading(share: float) -> str:
    return f"{sparsity(share)} sparsity"


def _spread(here: Sequence[Row]) -> list[Markup]:
    spread = accuracy(here)
    failed = sum(row.error is not None for row in here)
    n = f"{spread.n} ({failed} failed)" if failed else str(spread.n)
    return [tag("td", n), tag("td", tag("strong", percent(spread.mean))), tag("td", percent(spread.sd))]


def _difference(versus: Summary | None, reach: float) -> list[Markup]:
    if versus is None:
        return [tag("td", "baseline"), tag("td", NONE), tag("td", class_="drawn")]
    return [
        tag("td", points(versus.mean)),
        tag("td", interval(versus)),
        tag("td", _whisker(versus, reach), class_="drawn"),
    ]


def _reach(differences: Sequence[Summary]) -> float:
    """How far from zero any of these intervals goes; those of one seed have none."""
    edges = [abs(edge) for versus in differences for edge in (versus.low, versus.high)]
    return max((edge for edge in edges if edge > 0), default=1.0)


def _whisker(versus: Summary, reach: float) -> Markup | str:
    """The interval as a line beside zero, on one scale for all methods of a sparsity."""
    if math.isnan(versus.low):
        return NONE
    low, mean, high = (60 + 56 * value / reach for value in (versus.low, versus.mean, versus.high))
    parts = [
        tag("line", x1=60, y1=1, x2=60, y2=15, class_="zero"),
        tag("line", x1=low, y1=8, x2=high, y2=8, class_="range"),
        tag("circle", cx=mean, cy=8, r=3.2),
    ]
    style = "whisker settled" if versus.settled else "whisker"
    label = f"{points(versus.mean)}, {interval(versus)}"
    return tag("svg", *parts, viewBox="0 0 120 16", class_=style, role="img", aria_label=label)


def _heat(shares: Sequence[float], name: str = "td") -> Markup:
    if not shares:
        return tag(name, NONE)
    mean = sum(shares) / len(shares)
    if mean == 0:
        return tag(name, "0", class_="empty", title="no weight kept")
    level = min(1.0, max(0.0, 1 - math.log10(mean) / math.log10(FAINTEST)))
    return tag(name, density(mean), style=f"--level:{6 + 94 * level**1.5:.0f}%")
