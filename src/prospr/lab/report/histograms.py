"""The scores a method went by: how many weights of which score it kept and removed, a panel a method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prospr.errors import FolderError
from prospr.lab.report.curves import share_ticks
from prospr.lab.report.markup import Markup, join, tag
from prospr.lab.report.plot import SERIES, swatch
from prospr.lab.report.setups import Setup
from prospr.lab.report.tables import table
from prospr.lab.report.words import NONE, percent, sparsity
from prospr.lab.runs.files import read_json

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 400.0, 224.0, 40.0, 48.0, 12.0, 44.0
FILE = "scores.json"
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Histogram:
    """The scores of one run, all layers together.

    Bins go from the lowest score to the highest: those below zero, by falling size, then those above. Scores of exactly
    zero have no place on a logarithmic scale and are in no bin.
    """

    method: str
    unit: str
    rounds: int
    low: float
    high: float
    """Powers of ten: the sizes at which the bins end."""
    kept: Sequence[int]
    removed: Sequence[int]
    zeros: tuple[int, int]
    signed: bool
    smallest_kept: float
    largest_removed: float | None
    close: float

    @property
    def total(self) -> int:
        """What there was to choose from."""
        return sum(self.kept) + sum(self.removed) + sum(self.zeros)

    @property
    def clean(self) -> bool:
        """Whether one threshold parts what is kept from what is removed."""
        return self.largest_removed is not None and self.largest_removed <= self.smallest_kept

    def place(self, score: float) -> float:
        """Where a score is among the bins, 0 to 1."""
        size = math.log10(abs(score)) if score else self.low
        at = min(1.0, max(0.0, (size - self.low) / (self.high - self.low)))
        if not self.signed:
            return at
        return (1 + at) / 2 if score > 0 else (1 - at) / 2


@dataclass(frozen=True)
class Found:
    """Histograms at one sparsity and seed; `unread` says why of each that is missing."""

    sparsity: float
    seed: int
    histograms: Sequence[Histogram]
    unread: Mapping[str, str]


def histograms(setup: Setup) -> Found | None:
    """Those of one sparsity and seed, see `Setup.one_place`; None where no run has any."""
    runs = setup.one_place(FILE)
    if not runs:
        return None
    found, unread = [], {}
    for method, record in runs:
        try:
            found.append(read_histogram(method, read_json(record.folder / FILE)))
        except (FolderError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            unread[method] = f"its scores cannot be read ({error})"
    one = runs[0][1].experiment
    for method, record in setup.one_place("masks.safetensors"):
        same = (record.experiment.sparsity, record.experiment.seed) == (one.sparsity, one.seed)
        if same and method not in dict(runs):
            unread[method] = "its scores were not written down: it was scored by an older release"
    return Found(float(one.sparsity), one.seed, found, unread)


def read_histogram(method: str, stored: Mapping[str, Any]) -> Histogram:
    """What `prospr.lab.runs.scores` counted, its layers added up."""
    layers = list(stored["layers"].values())
    signed = any("negative" in layer for layer in layers)
    bins = len(stored["edges"]) - 1

    def added(part: str) -> list[int]:
        above = [sum(layer[part][i] for layer in layers) for i in range(bins)]
        if not signed:
            return above
        below = [sum(layer["negative"][part][i] for layer in layers if "negative" in layer) for i in range(bins)]
        return below[::-1] + above

    return Histogram(
        method=method,
        unit=stored["unit"],
        rounds=int(stored["rounds"]),
        low=float(stored["edges"][0]),
        high=float(stored["edges"][-1]),
        kept=added("kept"),
        removed=added("removed"),
        zeros=(sum(layer["zeros"][0] for layer in layers), sum(layer["zeros"][1] for layer in layers)),
        signed=signed,
        smallest_kept=float(stored["smallest_kept"]),
        largest_removed=None if stored["largest_removed"] is None else float(stored["largest_removed"]),
        close=float(stored["close"]),
    )


def histogram_section(found: Found, methods: Sequence[str], prefix: str = "") -> Markup:
    """A panel a method, and the numbers beside the threshold as a table."""
    panels = [_panel(one, methods.index(one.method), f"{prefix}scores-{i}") for i, one in enumerate(found.histograms)]
    caption = (
        f"At {sparsity(found.sparsity)} sparsity with seed {found.seed}: how many weights have which score, on a "
        "logarithmic scale; the first bar stands for all smaller ones too. Grey is removed, coloured is kept; the "
        "dashed line is the threshold, where there is one for the whole network. A method that works in rounds is "
        "shown in its last, with what was left by then."
    )
    figure = tag("figure", tag("div", *panels, class_="panels"), tag("figcaption", caption))
    missing = [tag("p", f"{method}: {why}.", class_="note") for method, why in found.unread.items()]
    return join(figure, _table(found, methods), *missing)


def power(exponent: int) -> str:
    """
    >>> power(-12)
    '10⁻¹²'
    """
    return f"10{str(exponent).translate(RAISED)}"


def ticks(one: Histogram, most: int = 6) -> list[float]:
    """Scores that are powers of ten, a few, within the bins."""
    most = most // 2 if one.signed else most
    first, last = math.ceil(one.low - 1e-9), math.floor(one.high + 1e-9)
    step = max(1, math.ceil((last - first + 1) / most))
    above = [10.0**at for at in range(last, first - 1, -step)]
    return [*(-tick for tick in above), *above] if one.signed else above


def _panel(one: Histogram, index: int, name: str) -> Markup:
    floor, end = HEIGHT - BOTTOM, WIDTH - RIGHT
    heights = [(k + r) / max(1, one.total) for k, r in zip(one.kept, one.removed, strict=True)]
    marks = share_ticks(0.0, max([*heights, 0.01]))
    wide = (end - LEFT) / len(one.kept)

    def x(share: float) -> float:
        return LEFT + share * (end - LEFT)

    def y(share: float) -> float:
        return floor - share / marks[-1] * (floor - TOP)

    title = f"{one.method}: {_cut(one)}"
    parts = [tag("text", one.method, x=0, y=14, class_="name"), tag("text", f"share of the {one.unit}, %", x=0, y=30)]
    for tick in marks:
        parts.append(tag("line", x1=LEFT, y1=y(tick), x2=end, y2=y(tick), class_="grid"))
        parts.append(tag("text", f"{100 * tick:g}", x=LEFT - 8, y=y(tick) + 4, text_anchor="end"))
    for tick in ticks(one):
        at, sign = x(one.place(tick)), "\N{MINUS SIGN}" if tick < 0 else ""
        parts.append(tag("line", x1=at, y1=floor, x2=at, y2=floor + 5, class_="tick"))
        told = sign + power(round(math.log10(abs(tick))))
        parts.append(tag("text", told, x=at, y=floor + 18, text_anchor="middle"))
    parts.append(tag("text", "score", x=(LEFT + end) / 2, y=floor + 37, text_anchor="middle"))
    removed, kept = [], []
    for i, (k, r) in enumerate(zip(one.kept, one.removed, strict=True)):
        below = r / max(1, one.total)
        if r:
            removed.append(_bar(LEFT + i * wide, wide, y(0.0), y(below)))
        if k:
            kept.append(_bar(LEFT + i * wide, wide, y(below), y(below + k / max(1, one.total))))
    drawn = [tag("path", d="".join(removed), class_="removed"), tag("path", d="".join(kept), class_="kept")]
    if one.clean:
        at = x(one.place(one.smallest_kept))
        drawn.append(tag("line", tag("title", title), x1=at, y1=TOP - 6, x2=at, y2=floor, class_="threshold"))
    return tag(
        "svg",
        tag("title", f"Scores of {title}; the numbers are in the table below", id=name),
        tag("g", *parts, class_="axes"),
        *drawn,
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        role="img",
        aria_labelledby=name,
        class_=f"plot histogram series-{index % SERIES}",
    )


def _bar(x: float, width: float, low: float, high: float) -> str:
    return f"M{x:.1f} {low:.1f}h{width - 0.6:.1f}V{high:.1f}h{0.6 - width:.1f}z"


def _cut(one: Histogram) -> str:
    if one.largest_removed is None:
        return "nothing removed"
    return f"kept from {_number(one.smallest_kept)}" if one.clean else "no one threshold"


def _table(found: Found, methods: Sequence[str]) -> Markup:
    rounds, zeros = any(one.rounds > 1 for one in found.histograms), any(any(one.zeros) for one in found.histograms)
    body = []
    for one in found.histograms:
        cells = [f"{sum(one.kept) + one.zeros[0]:,} of {one.total:,} {one.unit}"]
        cells += [NONE if one.largest_removed is None else _number(one.largest_removed), _number(one.smallest_kept)]
        cells += ["yes" if one.clean else "no", percent(one.close)]
        cells += [str(one.rounds)] if rounds else []
        cells += [f"{sum(one.zeros):,}"] if zeros else []
        name = tag("th", swatch(methods.index(one.method)), one.method, scope="row")
        body.append(tag("tr", name, *(tag("td", text) for text in cells)))
    head = ["method", "kept", "largest removed", "smallest kept", "one threshold", "close, %"]
    head += ["rounds"] if rounds else []
    head += ["exactly zero"] if zeros else []
    caption = "The scores beside the threshold; close is the share of the kept within one per cent of the smallest kept"
    return table(caption, head, {"": body}, "numbers")


def _number(value: float) -> str:
    """
    >>> _number(-0.0002149)
    '−2.149 · 10⁻⁴'
    """
    if not value:
        return "0"
    digits, _, exponent = f"{value:.3e}".partition("e")
    return f"{digits} \N{MIDDLE DOT} {power(int(exponent))}".replace("-", "\N{MINUS SIGN}")
