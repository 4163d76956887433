"""Training curves: loss and accuracy by epoch, a line a run, to be chosen from by method and sparsity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prospr.lab.report.markup import Markup, join, tag
from prospr.lab.report.plot import SERIES, swatch
from prospr.lab.report.setups import Setup
from prospr.lab.report.tables import table
from prospr.lab.report.words import NONE, percent, sparsity
from prospr.lab.results import DENSE
from prospr.lab.runs.records import Record
from prospr.lab.stats import summarise

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 400.0, 260.0, 44.0, 28.0, 10.0, 44.0
POINTS = 200
"""At most so many points a line; of a longer training the last epoch of every stretch is drawn."""

PANELS = {"loss": "training loss (log scale)", "train": "training {}, %", "validation": "validation {}, %",
          "test": "test {}, %"}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A run with at least two epochs."""

    record: Record
    label: str
    index: int
    """Of the method, for its colour; -1 for the dense network."""

    @property
    def share(self) -> float | None:
        return None if self.index < 0 else float(self.record.experiment.sparsity)

    def points(self, name: str) -> list[tuple[int, float]]:
        """(epoch, value) wherever the value was seen and is a finite number; a loss is above zero too."""
        pairs = [(int(epoch["epoch"]), epoch.get(name, math.nan)) for epoch in self.record.epochs]
        return [(at, value) for at, value in pairs if math.isfinite(value) and (name != "loss" or value > 0)]


def lines_of(setup: Setup) -> list[Line]:
    """The runs of a setup that have a curve."""
    methods = setup.methods
    return [
        Line(record, label, -1 if label == DENSE else methods.index(label))
        for record, label in zip(setup.records, setup.labels, strict=True)
        if len(record.epochs) > 1
    ]


def curves(setup: Setup, prefix: str = "") -> Markup:
    """A panel for each figure that was followed, what to choose the runs by, and a table of the ends; all runs are
    drawn where the page's script does not run."""
    lines = lines_of(setup)
    figure = next((line.record.headline for line in lines if line.record.headline), "accuracy")
    panels = [
        _panel(lines, name, text.format(figure), prefix)
        for name, text in PANELS.items()
        if any(len(line.points(name)) > 1 for line in lines)
    ]
    caption = "A line a run; what is not finished or failed is drawn as far as it came."
    drawn = tag("div", *panels, class_="panels")
    inner = tag("figure", drawn, tag("figcaption", caption))
    return join(tag("div", _chooser(lines, prefix), inner, class_="curves"), _ends(lines, figure))


def thinned(points: Sequence[tuple[int, float]], most: int = POINTS) -> list[tuple[int, float]]:
    """The first point, and of every stretch the last.

    >>> thinned([(epoch, 0.5) for epoch in range(1, 8)], most=4)
    [(1, 0.5), (3, 0.5), (5, 0.5), (7, 0.5)]
    """
    if len(points) <= most:
        return list(points)
    rest = len(points) - 1
    return [points[0], *(points[i * rest // (most - 1)] for i in range(1, most))]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten that hold `low` and `high`; of many, the powers alone.

    >>> log_ticks(0.3, 2.1)
    [0.2, 0.5, 1.0, 2.0, 5.0]
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = [digit * 10.0**power for power in range(first, last + 1) for digit in (1, 2, 5)]
    start = max(i for i, tick in enumerate(every) if tick <= low * (1 + 1e-9))
    end = next((i for i, tick in enumerate(every) if tick >= high * (1 - 1e-9) and i > start), len(every) - 1)
    if end - start <= 6:
        return [float(f"{tick:.1g}") for tick in every[start : end + 1]]
    step = 1 + (last - first) // 7
    return [float(f"1e{power}") for power in range(first, last + step, step)]


def share_ticks(low: float, high: float) -> list[float]:
    """Round shares that hold `low` and `high`.

    >>> share_ticks(0.31, 0.94)
    [0.2, 0.4, 0.6, 0.8, 1.0]
    """
    step = next((s for s in (0.01, 0.02, 0.05, 0.1) if (high - low) / s <= 5), 0.2)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * index, 4) for index in range(first, max(last, first + 1) + 1)]


def epoch_ticks(last: int) -> list[int]:
    """
    >>> epoch_ticks(12), epoch_ticks(200)
    ([1, 5, 10], [1, 50, 100, 150, 200])
    """
    step = next(s * 10**p for p in range(9) for s in (1, 2, 5) if last / (s * 10**p) <= 4)
    return [1, *(at for at in range(step, last + 1, step) if at > 1)]


def _panel(lines: Sequence[Line], name: str, text: str, prefix: str) -> Markup:
    found = [(line, thinned(line.points(name))) for line in lines]
    values = [value for _, points in found for _, value in points]
    last = max(at for _, points in found for at, _ in points)
    logarithmic = name == "loss"
    ticks = log_ticks(min(values), max(values)) if logarithmic else share_ticks(min(values), max(values))
    scale: Callable[[float], float] = math.log10 if logarithmic else float
    low, high = scale(ticks[0]), scale(ticks[-1])
    floor, end = HEIGHT - BOTTOM, WIDTH - RIGHT

    def x(epoch: float) -> float:
        return LEFT + (epoch - 1) / max(1, last - 1) * (end - LEFT)

    def y(value: float) -> float:
        return floor - (scale(value) - low) / (high - low) * (floor - TOP)

    axes = [tag("text", text, x=0, y=14)]
    for tick in ticks:
        shown = f"{tick:g}" if logarithmic else f"{100 * tick:g}"
        axes.append(tag("line", x1=LEFT, y1=y(tick), x2=end, y2=y(tick), class_="grid"))
        axes.append(tag("text", shown, x=LEFT - 8, y=y(tick) + 4, text_anchor="end"))
    for at in epoch_ticks(last):
        axes.append(tag("line", x1=x(at), y1=floor, x2=x(at), y2=floor + 5, class_="tick"))
        axes.append(tag("text", at, x=x(at), y=floor + 18, text_anchor="middle"))
    axes.append(tag("text", "epoch", x=(LEFT + end) / 2, y=floor + 38, text_anchor="middle"))
    drawn = [
        tag(
            "polyline",
            tag("title", line.record.experiment.label),
            points=" ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points),
            class_=f"curve {'dense' if line.index < 0 else f'series-{line.index % SERIES}'}",
            data_method=line.label,
            data_sparsity=None if line.share is None else repr(line.share),
            data_run=line.record.folder.name,
        )
        for line, points in found
        if len(points) > 1
    ]
    title = f"{prefix}curve-{name}-title"
    return tag(
        "svg",
        tag("title", f"{text} by epoch; the last epoch's numbers are in the table below", id=title),
        tag("g", *axes, class_="axes"),
        *drawn,
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        role="img",
        aria_labelledby=title,
        class_="plot",
    )


def _chooser(lines: Sequence[Line], prefix: str) -> Markup:
    """Boxes to tick; hidden until the script takes them up. At first the methods, without sanity checks, and of several
    sparsities the highest are chosen."""
    methods = {line.label: line.index for line in lines}
    shares = sorted({line.share for line in lines if line.share is not None})
    checks = {line.label for line in lines if line.index >= 0 and line.record.experiment.pruning.check is not None}
    marks = [
        _box(prefix, "method", label, label, join() if index < 0 else swatch(index), label not in checks)
        for label, index in methods.items()
    ]
    chosen = [_box(prefix, "sparsity", repr(s), sparsity(s), join(), checked=s == shares[-1]) for s in shares]
    sets = [_set("Methods", marks), *([_set("Sparsities", chosen)] if chosen else [])]
    return tag("div", *sets, tag("output"), class_="chooser", hidden="")


def _set(legend: str, boxes: Iterable[Markup]) -> Markup:
    return tag("fieldset", tag("legend", legend), *boxes)


def _box(prefix: str, name: str, value: str, text: str, drawing: Markup, checked: bool = True) -> Markup:
    ticked = "" if checked else None
    box = tag("input", type="checkbox", name=f"{prefix}{name}", data_by=name, value=value, checked=ticked)
    return tag("label", box, drawing, " ", text)


def _ends(lines: Sequence[Line], figure: str) -> Markup:
    """Means over the seeds after the first and the last epoch, for those who cannot see the lines."""
    groups: dict[str, list[Markup]] = {}
    places: dict[tuple[float, str], list[Line]] = {}
    for line in lines:
        places.setdefault((line.share or 0.0, line.label), []).append(line)
    for (share, label), here in sorted(places.items(), key=lambda item: item[0][0]):
        first, last = ([line.record.epochs[at] for line in here] for at in (0, -1))
        cells = [str(max(int(epoch["epoch"]) for epoch in last)), _mean(first, "loss"), _mean(last, "loss")]
        cells += [_mean(last, name) for name in ("train", "validation", "test")]
        name = tag("th", label, scope="row")
        heading = "not pruned" if label == DENSE else f"{sparsity(share)} sparsity"
        groups.setdefault(heading, []).append(tag("tr", name, *(tag("td", text) for text in cells)))
    head = ["method", "epochs", "first loss", "last loss", f"training {figure} %", "validation %", "test %"]
    inner = table("Where the curves begin and end, means over the seeds", head, groups, "numbers")
    return tag("details", tag("summary", "The curves' ends as a table"), inner)


def _mean(epochs: Sequence[Mapping[str, float]], name: str) -> str:
    values = [value for epoch in epochs if math.isfinite(value := epoch.get(name, math.nan))]
    if not values:
        return NONE
    mean = summarise(values).mean
    return f"{mean:.3g}" if name == "loss" else percent(mean)
