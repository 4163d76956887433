"""Numbers as the page writes them, and the sentence at its head."""

from __future__ import annotations

import math
from collections.abc import Sequence

from prospr.lab.results import DENSE, Row, accuracy, cell, difference, methods_of, sparsities_of
from prospr.lab.stats import LEAST, Summary

NONE = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"


def percent(share: float | None) -> str:
    """A share of 1 as a percentage with one decimal.

    >>> percent(0.8754)
    '87.5'
    """
    return NONE if share is None or math.isnan(share) else f"{100 * share:.1f}"


def points(share: float) -> str:
    """A difference of shares in percentage points, always with its sign.

    >>> points(0.0312), points(-0.2)
    ('+3.1', '−20.0')
    """
    return NONE if math.isnan(share) else f"{100 * share:+.1f}".replace("-", MINUS)


def interval(summary: Summary) -> str:
    """A difference's interval in percentage points.

    >>> interval(Summary(3, 0.02, 0.01, -0.0048, 0.0448))
    '−0.5 to +4.5'
    """
    return NONE if math.isnan(summary.low) else f"{points(summary.low)} to {points(summary.high)}"


def density(share: float) -> str:
    """The share of weights kept in a layer, as a percentage short enough for a cell.

    >>> density(0.5), density(0.0612), density(0.00042), density(0.0)
    ('50', '6.1', '0.04', '0')
    """
    value = 100 * share
    if value == 0:
        return "0"
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"


def duration(seconds: float) -> str:
    """A time with a unit that suits it.

    >>> duration(0.0123), duration(1.25), duration(200)
    ('12 ms', '1.2 s', '3.3 min')
    """
    if math.isnan(seconds):
        return NONE
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def sparsity(share: float) -> str:
    """A sparsity as a percentage, with more decimals where little is left.

    >>> sparsity(0.95), sparsity(0.9824), sparsity(0.9995)
    ('95 %', '98.2 %', '99.95 %')
    """
    return f"{round(100 * share, 1 if share < 0.999 else 3):g} %"


def headline(rows: Sequence[Row]) -> tuple[str, str]:
    """What the rows say at the highest sparsity: a claim these seeds allow, and the numbers behind it.

    >>> rows = [Row(m, 0.9, seed, base + seed / 100) for m, base in [("snip", 0.9), ("random", 0.7)] for seed in (0, 1)]
    >>> headline(rows)[0]
    'At 90\xa0% sparsity snip reaches 90.5\xa0% and random 70.5\xa0%.'
    """
    found = {(m, s): cell(rows, m, s) for s in sparsities_of(rows) for m in methods_of(rows)}
    found = {place: here for place, here in found.items() if accuracy(here).n}
    if not found:
        return "No pruned network could be trained.", "The errors are listed with the runs below."
    highest = max(share for _, share in found)
    ranked = sorted(
        (method for method, share in found if share == highest),
        key=lambda method: accuracy(found[method, highest]).mean,
        reverse=True,
    )
    means = {method: f"{percent(accuracy(found[method, highest]).mean)} %" for method in ranked}
    dense = accuracy(cell(rows, DENSE))
    evidence = f"The dense network reaches {percent(dense.mean)} %." if dense.n else ""
    opening = f"At {sparsity(highest)} sparsity"
    if len(ranked) == 1:
        return _bound(f"{opening} {ranked[0]} reaches {means[ranked[0]]}."), _bound(evidence)
    first, second = ranked[:2]
    lead = difference(found[first, highest], found[second, highest])
    if lead.n and lead.mean < 0:  # means of all seeds are of other seeds than those that both have
        first, second = second, first
        lead = difference(found[first, highest], found[second, highest])
    if lead.settled:
        claim = f"{opening} {first} leads with {means[first]}, {points(lead.mean)[1:]} points ahead of {second}."
    elif lead.n >= LEAST:
        claim = f"{opening} {first} ({means[first]}) and {second} ({means[second]}) are too close to call."
    else:
        claim = f"{opening} {first} reaches {means[first]} and {second} {means[second]}."
        few = {0: "No paired seed", 1: "One paired seed"}.get(lead.n, "Two paired seeds")
        verb = "settles" if lead.n == 0 else "cannot settle"
        return _bound(claim), _bound(f"{few} {verb} which is better. {evidence}")
    paired = f"Paired over {lead.n} seeds, {first} minus {second} is {interval(lead)} points (95 % interval)."
    return _bound(claim), _bound(f"{paired} {evidence}")


def _bound(text: str) -> str:
    """`text` with no line break between a number and its per cent sign."""
    return text.strip().replace(" %", "\N{NO-BREAK SPACE}%")
