"""Which weights methods agree on: the overlap of their masks at one sparsity and with one seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prospr.errors import MaskError
from prospr.lab.report.markup import Markup, join, tag
from prospr.lab.report.setups import Setup
from prospr.lab.report.tables import table
from prospr.lab.report.words import sparsity
from prospr.lab.runs.records import Record


@dataclass(frozen=True)
class Overlaps:
    """`shares[a, b]`: of the weights that a keeps, the share that b keeps too. `unread` says why a mask is missing."""

    sparsity: float
    seed: int
    densities: Mapping[str, float]
    shares: Mapping[tuple[str, str], float]
    unread: Mapping[str, str]


def chosen(setup: Setup) -> list[tuple[str, Record]]:
    """The runs whose masks are compared, see `Setup.one_place`. Empty where no place has two."""
    found = setup.one_place("masks.safetensors")
    return found if len(found) > 1 else []


def overlaps(runs: Sequence[tuple[str, Record]]) -> Overlaps | None:
    """Read the masks of `runs`, which are of one network, sparsity and seed; None where fewer than two can be read."""
    from prospr import Masks  # with torch: only a page that shows masks waits for it

    found, unread = {}, {}
    for label, record in runs:
        try:
            found[label] = Masks.load(record.folder / "masks.safetensors")
        except MaskError as error:
            unread[label] = str(error)
    if len(found) < 2:
        return None
    first = next(iter(found.values()))
    for label in [label for label, masks in found.items() if set(masks) != set(first)]:
        del found[label]
        unread[label] = "its masks are of other parameters: whole channels beside single weights"
    if len(found) < 2:
        return None
    shares = {(a, b): found[a].overlap(found[b]) for a in found for b in found if a != b}
    one = runs[0][1].experiment
    densities = {label: masks.density for label, masks in found.items()}
    return Overlaps(float(one.sparsity), one.seed, densities, shares, unread)


def overlap_table(found: Overlaps) -> Markup:
    """The overlaps as a heat map, and beside them what chance would give."""
    methods = list(found.densities)
    body = []
    for a in methods:
        cells = [tag("td", "same") if a == b else _cell(found.shares[a, b]) for b in methods]
        body.append(tag("tr", tag("th", a, scope="row"), *cells))
    chance = [tag("td", f"{100 * found.densities[b]:.1f}") for b in methods]
    body.append(tag("tr", tag("th", "by chance", scope="row"), *chance))
    caption = (
        f"Of the weights the method on the left keeps, the share in per cent that the one above keeps too, at "
        f"{sparsity(found.sparsity)} sparsity with seed {found.seed}"
    )
    missing = [tag("p", f"{label}: {reason}", class_="note") for label, reason in found.unread.items()]
    return join(table(caption, ["method", *methods], {"": body}, "heat"), *missing)


def _cell(share: float) -> Markup:
    return tag("td", f"{100 * share:.1f}", style=f"--level:{6 + 94 * share:.0f}%")
