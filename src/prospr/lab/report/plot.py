"""Accuracy against sparsity, as an SVG drawn by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from prospr.lab.report.markup import Markup, join, tag
from prospr.lab.report.words import percent, sparsity
from prospr.lab.results import DENSE, Row, accuracies, accuracy, cell, methods_of, sparsities_of

if TYPE_CHECKING:
    from prospr.lab.report.published import Behind, Point

SERIES = 8
"""Colours and marks in page.css and here; a ninth method starts over."""


@dataclass(frozen=True)
class Frame:
    """The plot's size and scales: sparsity to x (log of the density) and accuracy to y."""

    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    right: float
    left: float = 36.0
    top: float = 34.0
    bottom: float = 50.0
    inset: float = 34.0

    def x(self, share: float) -> float:
        low, high = (-math.log10(1 - edge) for edge in self.x_range)
        at = (-math.log10(1 - share) - low) / (high - low) if high > low else 0.5
        return self.left + self.inset + at * (self.width - self.left - self.right - 2 * self.inset)

    def y(self, share: float) -> float:
        low, high = self.y_range
        return self.height - self.bottom - (share - low) / (high - low) * (self.height - self.top - self.bottom)


def accuracy_plot(
    rows: Sequence[Row], *, width: float, height: float, name: str, prefix: str = "", behind: Behind | None = None
) -> Markup:
    """The plot at one size, "wide" or "narrow"; `prefix` and `name` make its ids unique on the page. `behind` are the
    paper's curves."""
    methods, sparsities = methods_of(rows), sparsities_of(rows)
    theirs = [] if behind is None else [point for points in behind.curves.values() for point in points]
    ticks = y_ticks(rows, theirs)
    room = 52 + 7.5 * max(len(name) for name in [*methods, DENSE])  # for the names at the lines' ends
    shares = [*sparsities, *(point.sparsity for point in theirs if point.sparsity)]
    frame = Frame(width, height, (min(shares), max(shares)), (ticks[0], ticks[-1]), room)
    summary = f"Test accuracy of {', '.join(methods)} at {', '.join(map(sparsity, sparsities))} sparsity"
    parts = [
        tag("title", "Test accuracy against sparsity", id=f"{prefix}{name}-title"),
        tag("desc", f"{summary}. The numbers are in the table below.", id=f"{prefix}{name}-desc"),
        _axes(frame, sparsities, ticks),
        *(_paper(frame, rows, behind) if behind is not None else ()),
        _dense(frame, rows),
        *(_series(frame, rows, index) for index in range(len(methods))),
        _labels(frame, rows),
    ]
    return tag(
        "svg",
        *parts,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_labelledby=f"{prefix}{name}-title {prefix}{name}-desc",
        class_=f"plot {name}",
    )


def y_ticks(rows: Sequence[Row], theirs: Sequence[Point] = ()) -> list[float]:
    """Four to eight round values that hold every accuracy and every bar, and the paper's.

    >>> y_ticks([Row("snip", 0.9, 0, 0.61), Row("dense", 0.0, 0, 0.98)])
    [0.6, 0.7, 0.8, 0.9, 1.0]
    """
    edges = []
    for method in [*methods_of(rows), DENSE]:
        for share in {row.sparsity for row in cell(rows, method)}:
            here = cell(rows, method, share)
            spread = accuracy(here)
            edges += accuracies(here).values()
            edges += [spread.mean - spread.sd, spread.mean + spread.sd] if spread.n > 1 else []
    edges += [edge for point in theirs for edge in (point.mean - (point.sd or 0.0), point.mean + (point.sd or 0.0))]
    low, high = max(0.0, min(edges, default=0.0)), min(1.0, max(edges, default=1.0))
    if low >= high:
        low, high = max(0.0, low - 0.05), min(1.0, high + 0.05)
    step = next(s for s in (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2) if (high - low) / s <= 6)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * index, 4) for index in range(first, last + 1)]


def paper_swatch() -> Markup:
    """The mark and line of the paper's numbers, in no method's colour."""
    parts = [tag("line", x1=1, y1=7, x2=25, y2=7, class_="line"), mark(13, 7, 0)]
    drawing = tag("svg", *parts, viewBox="0 0 26 14", class_="swatch", aria_hidden="true")
    return tag("span", drawing, class_="paper unnamed")


def swatch(index: int) -> Markup:
    """A method's mark and line, for the legend."""
    line = tag("line", x1=1, y1=7, x2=25, y2=7, class_="line")
    drawing = tag("svg", line, mark(13, 7, index), viewBox="0 0 26 14", class_="swatch", aria_hidden="true")
    return tag("span", drawing, class_=f"series-{index % SERIES}")


def mark(x: float, y: float, index: int, title: str | None = None) -> Markup:
    """A method's mark: circle, square, triangle or diamond, so that colour is never alone."""
    inner = () if title is None else (tag("title", title),)
    shape = index % 4
    if shape == 0:
        return tag("circle", *inner, cx=x, cy=y, r=4.5, class_="mark")
    if shape == 1:
        return tag("rect", *inner, x=x - 4, y=y - 4, width=8, height=8, class_="mark")
    if shape == 2:
        corners = [(x, y - 5.5), (x + 5.2, y + 4), (x - 5.2, y + 4)]
    else:
        corners = [(x, y - 5.8), (x + 5.8, y), (x, y + 5.8), (x - 5.8, y)]
    return tag("polygon", *inner, points=" ".join(f"{a:.1f},{b:.1f}" for a, b in corners), class_="mark")


def spread_out(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions as near to `wanted` as keeps them `gap` apart and within `low` and `high`, in the same order.

    >>> spread_out([10, 12, 50], gap=10, low=0, high=100)
    [10.0, 20.0, 50.0]
    """
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed: list[float] = []
    for index in order:
        placed.append(max(float(wanted[index]), low if not placed else placed[-1] + gap))
    for back in range(len(placed) - 1, -1, -1):
        ceiling = high if back == len(placed) - 1 else placed[back + 1] - gap
        placed[back] = min(placed[back], ceiling)
    result = [0.0] * len(wanted)
    for index, position in zip(order, placed, strict=True):
        result[index] = position
    return result


def _axes(frame: Frame, sparsities: Sequence[float], ticks: Sequence[float]) -> Markup:
    start, end, floor = frame.left, frame.width - frame.right, frame.height - frame.bottom
    parts = [tag("text", "test accuracy, %", x=0, y=14)]
    for tick in ticks:
        y = frame.y(tick)
        parts.append(tag("line", x1=start, y1=y, x2=end, y2=y, class_="grid"))
        parts.append(tag("text", f"{100 * tick:g}", x=start - 8, y=y + 4, text_anchor="end"))
    last = math.inf
    for share in reversed(sparsities):
        x = frame.x(share)
        parts.append(tag("line", x1=x, y1=floor, x2=x, y2=floor + 5, class_="tick"))
        if last - x >= 48:
            parts.append(tag("text", sparsity(share), x=x, y=floor + 19, text_anchor="middle"))
            last = x
    middle = (start + end) / 2
    parts.append(tag("text", "sparsity (log scale of the weights kept)", x=middle, y=floor + 40, text_anchor="middle"))
    return tag("g", *parts, class_="axes")


def _dense(frame: Frame, rows: Sequence[Row]) -> Markup:
    dense = accuracy(cell(rows, DENSE))
    if dense.n == 0:
        return join()
    start, end = frame.left, frame.width - frame.right
    parts = []
    if not math.isnan(dense.sd):
        top, bottom = frame.y(min(dense.mean + dense.sd, frame.y_range[1])), frame.y(dense.mean - dense.sd)
        parts.append(tag("rect", x=start, y=top, width=end - start, height=bottom - top, class_="band"))
    y = frame.y(dense.mean)
    parts.append(tag("line", tag("title", _told(DENSE, rows, 0.0)), x1=start, y1=y, x2=end, y2=y, class_="dashed"))
    return tag("g", *parts, class_="dense")


def _paper(frame: Frame, rows: Sequence[Row], behind: Behind) -> list[Markup]:
    """The paper's curves, each in the colour and at the side of ours."""
    methods, drawn = methods_of(rows), []
    for method, points in behind.pruned.items():
        index = methods.index(method) if method in methods else len(methods)
        shift = _shift(frame, rows, index)
        path, bars, marks = [], [], []
        for point in points:
            x, y = frame.x(point.sparsity) + shift, frame.y(point.mean)
            path.append(f"{x:.1f},{y:.1f}")
            spread = "" if point.sd is None else f" (sd {percent(point.sd)})"
            marks.append(mark(x, y, index, f"{method} at {sparsity(point.sparsity)}, the paper's: "
                                           f"{percent(point.mean)} %{spread}"))  # fmt: skip
            if point.sd:
                low, high = frame.y(point.mean - point.sd), frame.y(point.mean + point.sd)
                bars.append(tag("path", d=f"M{x:.1f} {low:.1f}V{high:.1f}"))
        line = tag("polyline", points=" ".join(path), class_="line")
        style = f"paper series-{index % SERIES}"
        drawn.append(tag("g", line, tag("g", *bars, class_="bars"), *marks, class_=style))
    if behind.dense is not None:
        y, told = frame.y(behind.dense), f"{DENSE}, the paper's: {percent(behind.dense)} %"
        ends = {"x1": frame.left, "x2": frame.width - frame.right, "y1": y, "y2": y}
        drawn.append(tag("g", tag("line", tag("title", told), **ends, class_="line"), class_="paper unnamed"))
    return drawn


def _series(frame: Frame, rows: Sequence[Row], index: int) -> Markup:
    methods = methods_of(rows)
    method = methods[index]
    shift = _shift(frame, rows, index)
    path, dots, bars, marks = [], [], [], []
    for share in sparsities_of(rows):
        here = cell(rows, method, share)
        spread = accuracy(here)
        if spread.n == 0:
            continue
        x, y = frame.x(share) + shift, frame.y(spread.mean)
        path.append(f"{x:.1f},{y:.1f}")
        aside = x + 0.45 * _step(frame, rows)
        dots += [tag("circle", cx=aside, cy=frame.y(value), r=2.4, class_="dot") for value in accuracies(here).values()]
        if not math.isnan(spread.sd):
            low, high = frame.y(spread.mean - spread.sd), frame.y(spread.mean + spread.sd)
            bars.append(
                tag("path", d=f"M{x:.1f} {low:.1f}V{high:.1f}M{x - 4:.1f} {low:.1f}h8M{x - 4:.1f} {high:.1f}h8")
            )
        marks.append(mark(x, y, index, _told(method, rows, share)))
    line = tag("polyline", points=" ".join(path), class_="line")
    return tag("g", line, tag("g", *bars, class_="bars"), *dots, *marks, class_=f"series-{index % SERIES}")


def _shift(frame: Frame, rows: Sequence[Row], index: int) -> float:
    """How far to the side of its sparsity a method stands."""
    return _step(frame, rows) * (index - (len(methods_of(rows)) - 1) / 2)


def _step(frame: Frame, rows: Sequence[Row]) -> float:
    """How far apart methods stand at one sparsity, side by side so that their bars do not hide each other."""
    places = [frame.x(share) for share in sparsities_of(rows)]
    room = min((b - a for a, b in pairwise(places)), default=2 * frame.inset)
    return min(14.0, room / (len(methods_of(rows)) + 1), 2 * frame.inset / len(methods_of(rows)))


def _labels(frame: Frame, rows: Sequence[Row]) -> Markup:
    """Each line's name at its right end, and its last value if the line reaches the highest sparsity."""
    ends: list[tuple[str, str, float, str]] = []
    for index, method in enumerate(methods_of(rows)):
        reached = [share for share in sparsities_of(rows) if accuracy(cell(rows, method, share)).n]
        if reached:
            mean = accuracy(cell(rows, method, reached[-1])).mean
            shown = percent(mean) if reached[-1] == sparsities_of(rows)[-1] else ""
            ends.append((method, f"series-{index % SERIES}", mean, shown))
    dense = accuracy(cell(rows, DENSE))
    if dense.n:
        ends.append((DENSE, "dense", dense.mean, percent(dense.mean)))
    targets = [frame.y(mean) for _, _, mean, _ in ends]
    edge = frame.width - frame.right
    parts = []
    places = spread_out(targets, 15, frame.top, frame.height - frame.bottom)
    for (method, style, _, shown), target, y in zip(ends, targets, places, strict=True):
        leader = tag("path", d=f"M{edge + 2:.1f} {target:.1f}L{edge + 9:.1f} {y:.1f}h3", class_="leader")
        text = tag("text", f"{method} ", tag("tspan", shown, class_="value"), x=edge + 15, y=y + 4)
        parts.append(tag("g", leader, text, class_=style))
    return tag("g", *parts, class_="labels")


def _told(method: str, rows: Sequence[Row], share: float) -> str:
    spread = accuracy(cell(rows, method, share))
    where = "" if method == DENSE else f" at {sparsity(share)}"
    return f"{method}{where}: {percent(spread.mean)} % (sd {percent(spread.sd)}, n = {spread.n})"
