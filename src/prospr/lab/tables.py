"""Tables of means for a paper or a page: methods by sparsities, in LaTeX (booktabs) or Markdown. No torch.

A number is bold only where its method was shown to be better than every other at that sparsity, by `verdict`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prospr.lab.names import printed
from prospr.lab.results import DENSE, Row, accuracy, cell, methods_of, setups_of, sparsities_of, verdict

__all__ = ["escape_latex", "escape_markdown", "latex", "markdown"]

BOLD = "Bold: better than every other method at that sparsity, by the 95 % intervals of differences paired by seed."
MOST = 8
"""Columns of sparsities; of more, each is a line, if methods are fewer."""
SETTLED = "Bold: the interval does not hold zero."


@dataclass(frozen=True)
class Cell:
    """What stands in a cell: a number and its spread as they are printed, and words after them."""

    value: str = ""
    spread: str = ""
    words: str = ""
    bold: bool = False


@dataclass(frozen=True)
class Grid:
    """A table before it is written: a line a method, a column a sparsity, or the other way round where there would be
    many columns; `dense` is the network not pruned."""

    title: str
    what: str
    corner: str
    columns: Sequence[str]
    lines: Mapping[str, Sequence[Cell]]
    dense: Cell | None
    note: str


def markdown(rows: Sequence[Row], baseline: str | None = None) -> str:
    """A table a setup: mean and deviation in per cent, the number of runs, and those that failed.

    baseline: a second table has the paired differences to this method in points, with their 95 % intervals.

    >>> rows = [Row("snip", 0.9, s, 0.8 + s / 100) for s in range(3)] + [Row("random", 0.9, s, 0.7) for s in range(3)]
    >>> print(markdown(rows))
    accuracy, %: mean ± standard deviation (runs)
    <BLANKLINE>
    | method | 90 % |
    |---|---:|
    | SNIP | **81.00 ± 1.00** (3) |
    | Random | 70.00 ± 0.00 (3) |
    <BLANKLINE>
    Bold: better than ...
    """
    return "\n\n".join(_in_markdown(grid) for grid in _grids(rows, baseline))


def latex(rows: Sequence[Row], baseline: str | None = None) -> str:
    """The tables of `markdown` for LaTeX.

    >>> rows = [Row("snip", 0.9, s, 0.8 + s / 100) for s in range(3)] + [Row("random", 0.9, s, 0.7) for s in range(3)]
    >>> print(latex(rows))
    % \\usepackage{booktabs}
    ...
    SNIP & $\\mathbf{81.00} \\pm 1.00$ (3) \\\\
    Random & $70.00 \\pm 0.00$ (3) \\\\
    ...
    """
    return "\n\n".join(["% \\usepackage{booktabs}", *(_in_latex(grid) for grid in _grids(rows, baseline))])


def escape_latex(text: str) -> str:
    """
    >>> escape_latex("resnet_18 & 95 %")
    'resnet\\\\_18 \\\\& 95 \\\\%'
    """
    return "".join(_LATEX.get(letter, letter) for letter in " ".join(text.split()))


def escape_markdown(text: str) -> str:
    """
    >>> escape_markdown("a|b *c*")
    'a\\\\|b \\\\*c\\\\*'
    """
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>|~$&#" else letter for letter in " ".join(text.split()))


_LATEX = {letter: f"\\{letter}" for letter in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
}


def _grids(rows: Sequence[Row], baseline: str | None) -> Iterator[Grid]:
    for (dataset, network, setup), here in setups_of(rows).items():
        title = ", ".join(part for part in (f"{network} on {dataset}" if network else dataset, setup) if part)
        metric = next((row.metric for row in here if row.accuracy is not None), here[0].metric).replace("_", " ")
        methods, shares, dense = methods_of(here), sparsities_of(here), cell(here, DENSE)
        means = {(method, share): _mean(here, method, share) for method in methods for share in shares}
        what = f"{metric}, %: mean ± standard deviation (runs)"
        yield _grid(title, what, means, BOLD, _spread(dense) if dense else None)
        if baseline is not None and cell(here, baseline):
            pairs = {
                (m, share): _versus(here, m, baseline, share) for m in methods if m != baseline for share in shares
            }
            name = f"{metric} minus that of {printed(baseline)}, points"
            yield _grid(title, f"{name}: mean of differences paired by seed, 95 % interval", pairs, SETTLED)


def _grid(title: str, what: str, cells: Mapping[tuple[str, float], Cell], note: str, dense: Cell | None = None) -> Grid:
    methods, shares = list(dict.fromkeys(m for m, _ in cells)), list(dict.fromkeys(s for _, s in cells))
    names, places = {m: printed(m) for m in methods}, _percentages(shares)
    note = note if any(one.bold for one in cells.values()) else ""
    if len(shares) > max(MOST, len(methods)):
        lines = {places[share]: [cells[method, share] for method in methods] for share in shares}
        return Grid(title, what, "sparsity", list(names.values()), lines, dense, note)
    lines = {names[method]: [cells[method, share] for share in shares] for method in methods}
    return Grid(title, what, "method", list(places.values()), lines, dense, note)


def _percentages(shares: Sequence[float]) -> dict[float, str]:
    """Sparsities as they are printed, with as many digits as tell them from each other, and from all."""
    for digits in range(4, 17):
        found = {share: f"{100 * share:.{digits}g} %" for share in shares}
        if len(set(found.values())) == len(found) and all(
            share == 1 or text != "100 %" for share, text in found.items()
        ):
            break
    return found


def _mean(rows: Sequence[Row], method: str, share: float) -> Cell:
    return _spread(cell(rows, method, share), _is_best(rows, method, share))


def _spread(here: Sequence[Row], bold: bool = False) -> Cell:
    seen, failed = accuracy(here), sum(row.error is not None for row in here)
    lost = f"{failed} failed" if failed else ""
    if not seen.n:
        return Cell(words=lost)
    spread = "" if math.isnan(seen.sd) else f"{100 * seen.sd:.2f}"
    words = ", ".join(part for part in (f"{seen.n}", lost) if part)
    return Cell(f"{100 * seen.mean:.2f}", spread, f"({words})", bold)


def _is_best(rows: Sequence[Row], method: str, share: float) -> bool:
    """Whether a method was shown to be better than every other that has a mean there; none of its runs failed."""
    mine = cell(rows, method, share)
    others = [one for one in methods_of(rows) if one != method and accuracy(cell(rows, one, share)).n]
    if not mine or any(row.error is not None for row in mine) or not others:
        return False
    return all(verdict(rows, method, other, share).says == "better" for other in others)


def _versus(rows: Sequence[Row], method: str, baseline: str, share: float) -> Cell:
    if not cell(rows, method, share) or not cell(rows, baseline, None if baseline == DENSE else share):
        return Cell()
    told = verdict(rows, method, baseline, share)
    versus = told.difference
    if not versus.n:
        return Cell()
    interval = "" if math.isnan(versus.low) else f"({100 * versus.low:+.2f} to {100 * versus.high:+.2f})"
    return Cell(f"{100 * versus.mean:+.2f}", "", interval, told.says != "not shown")


def _in_markdown(grid: Grid) -> str:
    def write(one: Cell) -> str:
        number = f"{one.value} ± {one.spread}" if one.spread else one.value
        number = f"**{number}**" if one.bold else number
        return f"{number} {one.words}".strip() or "–"

    lines = [f"**{escape_markdown(grid.title)}**", ""] if grid.title else []
    lines += [escape_markdown(grid.what), "", _joined([grid.corner, *map(escape_markdown, grid.columns)])]
    lines.append("|".join(["", "---", *["---:"] * len(grid.columns), ""]))
    lines += [_joined([escape_markdown(name), *map(write, line)]) for name, line in grid.lines.items()]
    lines += ["", f"Not pruned: {write(grid.dense)}."] if grid.dense is not None else []
    return "\n".join([*lines, *(["", grid.note] if grid.note else [])])


def _joined(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _in_latex(grid: Grid) -> str:
    def write(one: Cell) -> str:
        value = f"\\mathbf{{{one.value}}}" if one.bold else one.value
        number = f"${value} \\pm {one.spread}$" if one.spread else f"${value}$" if one.value else ""
        words = re.sub(r"([+-][\d.]+)", r"$\1$", escape_latex(one.words))
        return f"{number} {words}".strip() or "--"

    caption = ". ".join(part for part in (escape_latex(grid.title), _said(grid.what), _said(grid.note)) if part)
    count = max(1, len(grid.columns))
    lines = ["\\begin{table}", "\\centering", f"\\caption{{{caption.rstrip('.')}.}}"]
    lines += [f"\\begin{{tabular}}{{l{'r' * count}}}", "\\toprule"]
    lines += [" & ".join([grid.corner, *map(escape_latex, grid.columns or [""])]) + " \\\\", "\\midrule"]
    if grid.dense is not None:
        lines += [f"{printed(DENSE)} & \\multicolumn{{{count}}}{{c}}{{{write(grid.dense)}}} \\\\"]
        lines += ["\\midrule"] if grid.lines else []
    for name, line in grid.lines.items():
        lines.append(" & ".join([escape_latex(name), *map(write, line)]) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", "\\end{table}"])


def _said(text: str) -> str:
    """A sentence for a caption, without its full stop."""
    return escape_latex(text[:1].upper() + text[1:].rstrip(".")).replace("±", "$\\pm$")
