"""How the figures look: sizes, fonts, colours and marks that differ for the colour-blind and in grey."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prospr.lab.names import printed
from prospr.lab.optional import optional

COLUMN = 3.35
"""Inches; a column of the usual two-column papers."""

# Okabe and Ito's colours without yellow, which is too pale for a line, and two of Paul Tol's.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999933")
MARKS = {"o": 4.0, "s": 3.8, "^": 4.6, "D": 3.7, "v": 4.6, "P": 4.8, "X": 4.8, "*": 6.5}
"""And their sizes, by which they look alike."""
DASHES = ("-", (0, (5, 1.5)), (0, (3, 1, 1, 1)))
GREY = "#555555"

STYLE: Mapping[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same on every machine
    "font.size": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#333333",
    "axes.labelcolor": "#111111",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.unicode_minus": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.5,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "lines.markeredgewidth": 0.8,
    "errorbar.capsize": 0,
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "legend.columnspacing": 1.2,
    "legend.handletextpad": 0.5,
    "legend.labelspacing": 0.3,
    "pdf.fonttype": 42,  # letters, not curves: text that can be searched and edited
    "svg.fonttype": "none",
    "svg.hashsalt": "prospr",
    "savefig.dpi": 300,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.03,
    "figure.constrained_layout.w_pad": 0.03,
}


@dataclass(frozen=True)
class Look:
    """Of a method, in every figure: line, mark and name."""

    name: str
    colour: str
    mark: str
    dash: Any

    @property
    def size(self) -> float:
        return MARKS.get(self.mark, 4.0)

    @property
    def line(self) -> dict[str, Any]:
        own = {"color": self.colour, "linestyle": self.dash, "label": self.name}
        return {**own, "marker": self.mark, "markersize": self.size, "markeredgecolor": "white", "markeredgewidth": 0.4}


def looks(methods: Sequence[str]) -> dict[str, Look]:
    """A look for each method; after eight the marks shift against the colours, and the lines are broken.

    >>> looks(["prospr", "snip"])["snip"].colour
    '#D55E00'
    """
    found = {}
    for index, method in enumerate(methods):
        turn, place = divmod(index, len(COLOURS))
        mark = list(MARKS)[(place + 3 * turn) % len(MARKS)]
        found[method] = Look(printed(method), COLOURS[place], mark, DASHES[turn % len(DASHES)])
    return found


@contextmanager
def styled() -> Generator[None, None, None]:
    """Draw in here: matplotlib's own defaults and `STYLE`, whatever the user's are."""
    style = optional("matplotlib.style", "prospect-pruning[figures]")
    with style.context(["default", dict(STYLE)]):
        yield


def canvas(width: float, height: float = 0.72) -> tuple[Any, Any]:
    """A figure and its axes; the height is a share of the width."""
    figure = optional("matplotlib.figure", "prospect-pruning[figures]").Figure(figsize=(width, height * width))
    return figure, figure.subplots()


def legend(figure: Any, axes: Any, width: float, extra: Sequence[Any] = ()) -> None:
    """Above the axes, each name once, in as many columns as there is room for."""
    handles, names = axes.get_legend_handles_labels()
    handles, names = [*handles, *extra], [*names, *(one.get_label() for one in extra)]
    if not names:
        return
    longest = max(map(len, names))
    columns = max(1, min(len(names), int(width / (0.4 + 0.057 * longest))))
    lines = -(-len(names) // columns)
    figure.legend(handles, names, loc="outside upper center", ncols=-(-len(names) // lines))


def save(figure: Any, kind: str, title: str, path: Path) -> None:
    """Write a figure without the time in it."""
    about: dict[str, Any] = {"Title": title}
    about |= {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind, {})
    figure.savefig(path, format=kind, metadata=about)
