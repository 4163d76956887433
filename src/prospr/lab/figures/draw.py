"""The figures: each function draws one of a setup, or gives None where the runs have nothing for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from prospr.lab.experiment import DENSE
from prospr.lab.figures.style import COLUMN, GREY, Look, canvas, legend
from prospr.lab.names import printed
from prospr.lab.optional import optional
from prospr.lab.recipes import recipes
from prospr.lab.report.density import effective_densities
from prospr.lab.report.published import Behind, behind
from prospr.lab.report.setups import Setup
from prospr.lab.results import Row, accuracy, cell, sparsities_of, verdict
from prospr.lab.stats import LEAST, Summary, summarise

WATCHED = {"loss": "training loss", "train": "training {}, %", "validation": "validation {}, %", "test": "test {}, %"}


@dataclass(frozen=True)
class Scene:
    """What a figure is drawn of: the runs of a setup, how each method looks, and how wide it is in inches."""

    setup: Setup
    looks: Mapping[str, Look]
    width: float = COLUMN

    @cached_property
    def rows(self) -> list[Row]:
        return self.setup.rows

    @cached_property
    def methods(self) -> list[str]:
        return [method for method in self.looks if method in self.setup.methods]

    @property
    def sparsities(self) -> list[float]:
        return sparsities_of(self.rows)

    @property
    def metric(self) -> str:
        return next((row.metric for row in self.rows if row.accuracy is not None), "accuracy").replace("_", " ")


def draw_accuracy(scene: Scene, paper: bool = True) -> Any:
    """Mean accuracy against sparsity with bands of one deviation, and the paper's numbers behind them, dotted."""
    found = {(m, s): accuracy(cell(scene.rows, m, s)) for m in scene.methods for s in scene.sparsities}
    if not any(spread.n for spread in found.values()):
        return None
    figure, axes = canvas(scene.width)
    extra = []
    published = behind(scene.setup)
    if paper and published.curves:
        if published.dense is not None:
            axes.axhline(100 * published.dense, color=GREY, linestyle=":", linewidth=0.8, zorder=1)
        for method, curve in published.pruned.items():
            look, points = scene.looks[method], [p for p in curve if _within(p.sparsity, scene.sparsities)]
            style = {"color": look.colour, "linestyle": ":", "linewidth": 0.9, "marker": look.mark, "markersize": 2}
            places, means = [_place(p.sparsity) for p in points], [100 * p.mean for p in points]
            axes.plot(places, means, alpha=0.75, zorder=1.5, **style)
        extra.append(_line(color=GREY, linestyle=":", linewidth=0.9, label=_called(published)))
    _dense(axes, scene)
    broken = False
    for method in scene.methods:
        look = scene.looks[method]
        shares = [share for share in scene.sparsities if found[method, share].n]
        if not shares:
            continue
        spreads = [found[method, share] for share in shares]
        places, means = [_place(share) for share in shares], [100 * one.mean for one in spreads]
        _band(axes, places, spreads, look.colour)
        axes.plot(places, means, zorder=3, **look.line)
        hollow = [i for i, s in enumerate(shares) if any(row.error for row in cell(scene.rows, method, s))]
        broken = broken or bool(hollow)
        for i in hollow:
            style = {"color": look.colour, "markersize": look.size, "markerfacecolor": "white"}
            axes.plot(places[i], means[i], look.mark, zorder=4, **style)
    if broken:
        style = {"color": GREY, "markerfacecolor": "white"}
        extra.append(_line(linestyle="", marker="o", label="runs failed", **style))
    _sparsity_axis(axes, scene.sparsities)
    axes.set_ylabel(f"test {scene.metric}, %")
    legend(figure, axes, scene.width, extra)
    return figure


def draw_difference(scene: Scene, baseline: str) -> Any:
    """Differences to a method, paired by seed, with their 95 % intervals; a hollow mark was not shown to differ. It
    takes the seeds that a verdict takes."""
    others = [method for method in scene.methods if method != baseline]
    told = {}
    for method in others:
        for share in scene.sparsities:
            pair = [cell(scene.rows, one, None if one == DENSE else share) for one in (method, baseline)]
            if all(accuracy(one).n for one in pair):
                found = verdict(scene.rows, method, baseline, share)
                if found.difference.n >= LEAST:
                    told[method, share] = found
    if not told:
        return None
    figure, axes = canvas(scene.width)
    axes.axhline(0, color=GREY, linewidth=0.8, zorder=1)
    shares = sorted({share for _, share in told})
    room = 0.72 / max(1, len(others))
    for index, method in enumerate(others):
        look = scene.looks[method]
        axes.plot([], [], look.mark, color=look.colour, markersize=look.size, label=look.name)
        for share in shares:
            if (method, share) not in told:
                continue
            found = told[method, share]
            versus = found.difference
            at = shares.index(share) + room * (index - (len(others) - 1) / 2)
            axes.plot([at, at], [100 * versus.low, 100 * versus.high], color=look.colour, linewidth=1.1, zorder=2)
            fill = "white" if found.says == "not shown" else look.colour
            style = {"color": look.colour, "markersize": look.size, "markerfacecolor": fill}
            axes.plot(at, 100 * versus.mean, look.mark, zorder=3, **style)
    for edge in range(len(shares) - 1):
        axes.axvline(edge + 0.5, color="#DDDDDD", linewidth=0.5, zorder=0)
    axes.set_xlim(-0.5, len(shares) - 0.5)
    axes.set_xticks(range(len(shares)), [f"{100 * share:.4g}" for share in shares])
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("sparsity, %")
    axes.set_ylabel(f"{scene.metric} minus {printed(baseline)},\npoints")
    hollow = _line(linestyle="", marker="o", color=GREY, markerfacecolor="white", label="not shown")
    legend(figure, axes, scene.width, [hollow])
    return figure


def draw_layers(scene: Scene, share: float) -> Any:
    """The share of weights kept in each layer, from the first to the last: means over the seeds, with bands."""
    names = list(dict.fromkeys(layer for row in scene.rows for layer in row.layers))
    found: dict[str, list[Summary]] = {}
    for method in scene.methods:
        here = [row for row in cell(scene.rows, method, share) if row.layers]
        if here:
            found[method] = [summarise([row.layers[n] for row in here if n in row.layers]) for n in names]
    if not found or len(names) < 2:
        return None
    short = [name.removesuffix(".weight") for name in names]
    step = -(-len(names) // 22)
    upright = sum(map(len, short[::step])) > 40
    figure, axes = canvas(scene.width, 0.72 + (0.06 * max(map(len, short[::step])) / scene.width if upright else 0))
    axes.set_yscale("log")
    above = [one.mean for line in found.values() for one in line if one.mean > 0]
    floor = _floor(above)
    axes.axhline(100 * (1 - share), color=GREY, linestyle="--", linewidth=0.8, zorder=1, label="uniform")
    places = list(range(len(names)))
    for method, line in found.items():
        look = scene.looks[method]
        low = [100 * max(floor, one.mean - _deviation(one)) for one in line]
        high = [100 * max(floor, one.mean + _deviation(one)) for one in line]
        axes.fill_between(places, low, high, color=look.colour, alpha=0.15, linewidth=0, zorder=2)
        means = [100 * max(floor, one.mean) for one in line]
        axes.plot(places, means, zorder=3, **look.line)
    _log_axis(axes.yaxis, above, floor, any(one.mean == 0 for line in found.values() for one in line))
    axes.set_xticks(places[::step], short[::step], rotation=90 if upright else 0)
    axes.set_ylabel("weights kept, %")
    legend(figure, axes, scene.width)
    return figure


def draw_density(scene: Scene) -> Any:
    """Weights on a path from input to output against weights kept, in per cent; below the diagonal some are in vain."""
    found = effective_densities(scene.rows)
    if not found:
        return None
    figure, axes = canvas(scene.width, 0.85)
    axes.set_xscale("log")
    axes.set_yscale("log")
    above = [value for pair in found.values() for value in pair if value > 0]
    floor = _floor(above)
    kept = [direct for direct, _ in found.values() if direct > 0]
    ends = [90 * min(kept), min(100.0, 110 * max(kept))]
    axes.plot(ends, ends, color=GREY, linestyle="--", linewidth=0.8, zorder=1, label="all on a path")
    for method in scene.methods:
        here = [pair for (one, _), pair in found.items() if one == method]
        if here:
            places, values = zip(*((100 * a, 100 * max(floor, b)) for a, b in here), strict=True)
            axes.plot(places, values, zorder=3, **scene.looks[method].line)
    _log_axis(axes.xaxis, kept, floor, False)
    _log_axis(axes.yaxis, above, floor, any(effective == 0 for _, effective in found.values()))
    axes.grid(axis="x")
    axes.set_xlabel("weights kept, %")
    axes.set_ylabel("weights kept and on a path, %")
    legend(figure, axes, scene.width)
    return figure


def draw_curves(scene: Scene, share: float, what: str) -> Any:
    """A figure of the training by epoch at one sparsity, the dense network with it: means over the seeds, bands of one
    deviation; of finished runs."""
    found = {}
    for method in [DENSE, *scene.methods]:
        curves = [
            {int(epoch["epoch"]): epoch[what] for epoch in record.epochs if math.isfinite(epoch.get(what, math.nan))}
            for record, label in zip(scene.setup.records, scene.setup.labels, strict=True)
            if label == method and record.state == "done" and (method == DENSE or record.experiment.sparsity == share)
        ]
        common = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
        if len(common) > 1:
            found[method] = common, [summarise([curve[at] for curve in curves]) for at in common]
    if not any(method != DENSE for method in found):
        return None
    figure, axes = canvas(scene.width)
    scale = 1 if what == "loss" else 100
    for index, (method, (epochs, spreads)) in enumerate(found.items()):
        look = scene.looks.get(method, Look(printed(DENSE), GREY, "", "--"))
        _band(axes, epochs, spreads, look.colour, scale, lowest=1e-9 if what == "loss" else None)
        every = max(1, len(epochs) // 8)
        line = {**look.line, "markevery": (index * every // max(1, len(found)), every), "linewidth": 1.0}
        axes.plot(epochs, [scale * one.mean for one in spreads], zorder=3, **line)
    if what == "loss":
        axes.set_yscale("log")
        _log_axis(axes.yaxis, [one.mean / 100 for _, spreads in found.values() for one in spreads], 0, False)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.margins(x=0.02)
    axes.set_xlabel("epoch")
    axes.set_ylabel(WATCHED[what].format(scene.metric))
    legend(figure, axes, scene.width)
    return figure


def figures_of(scene: Scene, baseline: str, paper: bool = True) -> dict[str, Callable[[], Any]]:
    """{what it shows: draws it} of every figure a setup may have."""
    found: dict[str, Callable[[], Any]] = {
        "accuracy": lambda: draw_accuracy(scene, paper),
        f"difference-to-{baseline}": lambda: draw_difference(scene, baseline),
        "density": lambda: draw_density(scene),
    }
    for share in scene.sparsities:
        found[f"layers-at-{100 * share:.4g}"] = lambda share=share: draw_layers(scene, share)
        for what in WATCHED:
            found[f"{what}-at-{100 * share:.4g}"] = lambda share=share, what=what: draw_curves(scene, share, what)
    return found


def _dense(axes: Any, scene: Scene) -> None:
    dense = accuracy(cell(scene.rows, DENSE))
    if not dense.n:
        return
    axes.axhline(100 * dense.mean, color=GREY, linestyle="--", linewidth=1.0, zorder=1, label=printed(DENSE))
    if not math.isnan(dense.sd):
        low, high = 100 * (dense.mean - dense.sd), 100 * (dense.mean + dense.sd)
        axes.axhspan(low, high, color=GREY, alpha=0.12, linewidth=0, zorder=0.5)


def _band(
    axes: Any,
    places: Sequence[float],
    spreads: Sequence[Summary],
    colour: str,
    scale: float = 100,
    lowest: float | None = None,
) -> None:
    """One deviation to either side; where there is a single run there is none."""
    low = [scale * (one.mean - _deviation(one)) for one in spreads]
    high = [scale * (one.mean + _deviation(one)) for one in spreads]
    if lowest is not None:
        low = [max(value, lowest) for value in low]
    axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0, zorder=2)


def _deviation(spread: Summary) -> float:
    return 0.0 if math.isnan(spread.sd) else spread.sd


def _place(share: float) -> float:
    """Where a sparsity stands: by the logarithm of the weights kept."""
    return -math.log10(1 - share)


def _within(share: float, ours: Sequence[float]) -> bool:
    """Whether a sparsity of the paper is between ours, which may differ in the last digit printed."""
    return ours[0] - 1e-3 <= share <= ours[-1] + 1e-3


def _called(published: Behind) -> str:
    """The paper's curves in the legend: with their epochs, where ours are others."""
    epochs = {recipes()[one.recipe].epochs for one in published.tables if one.recipe in recipes()}
    if epochs <= {published.experiment.trained_by.epochs}:
        return "the paper's"
    return f"the paper's, {' and '.join(str(number) for number in sorted(epochs))} epochs"


def _sparsity_axis(axes: Any, shares: Sequence[float]) -> None:
    """A label at our sparsities, as many as fit."""
    places = [_place(share) for share in shares]
    span = (places[-1] - places[0]) or 1.0
    shown, last = [], math.inf
    for place, share in zip(reversed(places), reversed(shares), strict=True):
        if last - place >= 0.1 * span:
            shown.append((place, f"{100 * share:.4g}"))
            last = place
    axes.set_xticks([place for place, _ in shown], [text for _, text in shown])
    axes.set_xlim(places[0] - 0.05 * span, places[-1] + 0.05 * span)
    axes.set_xlabel("sparsity, %")


def _floor(values: Sequence[float]) -> float:
    """Where zero is drawn on a logarithmic scale: below everything else."""
    return min(values, default=0.01) / 3


def _log_axis(axis: Any, values: Sequence[float], floor: float, zero: bool) -> None:
    """Labels at round numbers in per cent, as many as there is room for; and 0 at the floor."""
    above = [100 * value for value in values if value > 0]
    low, high = min(above), max(above)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if high / low < 120 else (1, 3) if high / low < 3000 else (1,)
    ticks = [digit * 10.0**power for power in powers for digit in digits]
    ticks = [tick for tick in ticks if 0.8 * low <= tick <= 1.25 * high]
    labels = [f"{tick:g}" for tick in ticks]
    if zero:
        ticks, labels = [100 * floor, *ticks], ["0", *labels]
    axis.set_ticks(ticks, labels)
    axis.set_ticks([], minor=True)


def _line(**style: Any) -> Any:
    return optional("matplotlib.lines", "prospect-pruning[figures]").Line2D([], [], **style)
