"""How strong gradients and meta-gradients are, layer by layer: the figure of the ProsPr paper's appendix E."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from prospr.lab.report.markup import Markup, tag
from prospr.lab.report.plot import mark
from prospr.meta import SGD, gradient, metagrad, pure_loss
from prospr.meta.batches import take
from prospr.meta.curvature import stable_lr
from prospr.meta.loss import ModelLoss, cross_entropy, training_mode
from prospr.scores.base import prunable


class Norms(NamedTuple):
    """The L2 norms of one layer's weights' derivatives."""

    gradient: float
    metagradient: float


def layer_norms(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    steps: int = 3,
    lr: float | Literal["auto"] = "auto",
    loss: ModelLoss = cross_entropy,
    seed: int = 0,
) -> dict[str, Norms]:
    """The norm of dL(w_0, D)/dw_0 and of dL(w_M, D)/dw_0 for every prunable weight, w_M coming from M `steps` of SGD.

    D is the last of the M + 1 batches for both, so that they differ in the steps between alone. `lr="auto"` is the
    step that ProsPr takes by default. The model is scored as it is trained, in train mode, and is not changed.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> batches = [(torch.randn(16, 4), torch.randint(0, 2, (16,))) for _ in range(4)]
    >>> norms = layer_norms(net, batches, steps=3, lr=0.1)
    >>> list(norms), all(norm > 0 for pair in norms.values() for norm in pair)
    (['0.weight', '2.weight'], True)
    """
    pure = pure_loss(model, loss)
    params, names = pure.params(), list(prunable(model))
    read = list(take(batches, steps))
    with training_mode(pure.model):
        if lr == "auto":
            lr = stable_lr(pure, params, read[0], seed=seed)
        plain = gradient(pure, params, read[-1], seed=seed)[1]
        meta = metagrad(pure, params, read, SGD(lr), steps=steps, seed=seed)
    pairs = zip(names, _sizes(plain, names), _sizes(meta, names), strict=True)
    return {name: Norms(one, other) for name, one, other in pairs}


def _sizes(tensors: Mapping[str, Tensor], names: Sequence[str]) -> list[float]:
    return torch.stack([torch.linalg.vector_norm(tensors[name]) for name in names]).tolist()


_STYLE = """
svg { --ink: #1b1f24; --soft: #59636e; --rule: #dde2e8; --page: #ffffff; --c0: #0072b2; --c1: #d55e00;
  background: var(--page); font: 13px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; }
@media (prefers-color-scheme: dark) { svg { --ink: #e7eaee; --soft: #9ba6b2; --rule: #2f373f; --page: #13161a;
  --c0: #56b4e9; --c1: #ff8a3c; } }
text { fill: var(--ink); } .axes text { fill: var(--soft); } .layer { font-size: 11px; }
.heading { font-size: 15px; font-weight: 650; }
.grid { stroke: var(--rule); } .series-0 { --c: var(--c0); } .series-1 { --c: var(--c1); }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
.mark { fill: var(--c); stroke: var(--page); stroke-width: 1.25; }
"""
_SERIES = ("gradient", "meta-gradient")
_LEFT, _TOP, _PLOT, _ROOM = 64.0, 76.0, 260.0, 128.0


def norms_figure(norms: Mapping[str, Norms], title: str = "L2 norm of each layer's gradient and meta-gradient") -> str:
    """The norms as a drawing (SVG) on a logarithmic scale, one place a layer, in the network's order.

    >>> figure = norms_figure({"conv.weight": Norms(0.01, 0.2), "fc.weight": Norms(0.1, 0.3)})
    >>> figure.startswith("<svg"), figure.count("<circle"), figure.count("<rect")
    (True, 3, 3)
    """
    sizes = [size for pair in norms.values() for size in pair if size > 0 and math.isfinite(size)]
    if not sizes:
        raise ValueError("no layer has a gradient above zero: there is nothing to draw; check the batches and the loss")
    low, high = math.floor(math.log10(min(sizes))), math.ceil(math.log10(max(sizes)))
    high = max(high, low + 1)
    gap = max(16.0, min(60.0, 640.0 / len(norms)))
    width = max(420.0, _LEFT + gap * len(norms) + 24)

    def x(index: int) -> float:
        return _LEFT + gap * (index + 0.5)

    def y(size: float) -> float:
        return _TOP + _PLOT * (high - math.log10(size)) / (high - low)

    parts = [
        tag("title", title),
        tag("style", Markup(_STYLE)),
        tag("text", title, x=12, y=24, class_="heading"),
        _axes(list(norms), x, low, high, width),
        *(_series(norms, index, x, y) for index in range(len(_SERIES))),
    ]
    height = _TOP + _PLOT + _ROOM
    box = f"0 0 {width:g} {height:g}"
    size = {"width": f"{width:g}", "height": f"{height:g}"}
    return tag("svg", *parts, xmlns="http://www.w3.org/2000/svg", viewBox=box, role="img", **size)


def write_norms(norms: Mapping[str, Norms], path: str | os.PathLike[str], title: str | None = None) -> Path:
    """Write the figure to `path` and the numbers beside it, in a file that ends in .csv; gives the figure's path."""
    figure = norms_figure(norms) if title is None else norms_figure(norms, title)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(figure, encoding="utf-8")
    lines = ["layer,gradient,metagradient", *(f"{name},{a!r},{b!r}" for name, (a, b) in norms.items())]
    path.with_suffix(".csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _axes(layers: Sequence[str], x, low: int, high: int, width: float) -> Markup:
    parts = []
    every = math.ceil((high - low) / 8)
    for power in range(low, high + 1, every):
        y = _TOP + _PLOT * (high - power) / (high - low)
        parts.append(tag("line", x1=_LEFT, y1=y, x2=width - 24, y2=y, class_="grid"))
        parts.append(tag("text", f"1e{power}", x=_LEFT - 8, y=y + 4, text_anchor="end"))
    for index, layer in enumerate(layers):
        at = f"translate({x(index) + 4:.1f} {_TOP + _PLOT + 14:.1f}) rotate(-55)"
        parts.append(tag("text", layer.removesuffix(".weight"), transform=at, text_anchor="end", class_="layer"))
    return tag("g", *parts, class_="axes")


def _series(norms: Mapping[str, Norms], index: int, x, y) -> Markup:
    """One line with a mark a layer, and its name above the plot. A norm of zero has no place on the scale."""
    path, marks = [], []
    for place, (layer, pair) in enumerate(norms.items()):
        size = pair[index]
        if size > 0 and math.isfinite(size):
            path.append(f"{x(place):.1f},{y(size):.1f}")
            marks.append(mark(x(place), y(size), index, f"{layer}, {_SERIES[index]}: {size:.3g}"))
    start = _LEFT + 130.0 * index
    legend = (mark(start + 6, 46, index), tag("text", _SERIES[index], x=start + 18, y=50))
    line = tag("polyline", points=" ".join(path), class_="line")
    return tag("g", line, *marks, *legend, class_=f"series-{index}")
