"""What runs cost: the size of what is trained, and the time to score and to train it."""

from __future__ import annotations

from collections.abc import Sequence

from prospr.lab.report.markup import Markup, tag
from prospr.lab.report.plot import swatch
from prospr.lab.report.setups import Setup
from prospr.lab.report.tables import table
from prospr.lab.report.words import NONE, duration, sparsity
from prospr.lab.results import DENSE
from prospr.lab.runs.records import Record
from prospr.lab.stats import summarise


def cost_table(setup: Setup) -> Markup:
    """Means over the finished runs of every method at every sparsity; memory where a run knows it."""
    remembered = any(record.memory for record in setup.records)
    methods = setup.methods
    places: dict[tuple[float, str], list[Record]] = {}
    for record, label in zip(setup.records, setup.labels, strict=True):
        if record.state == "done":
            share = -1.0 if label == DENSE else float(record.experiment.sparsity)
            places.setdefault((share, label), []).append(record)
    groups: dict[str, list[Markup]] = {}
    for (share, label), here in sorted(places.items(), key=lambda item: item[0][0]):
        drawing = [] if label == DENSE else [swatch(methods.index(label))]
        cells = [
            _mean([r.sizes.get("kept") for r in here]),
            _trained(here, "parameters"),
            _trained(here, "flops"),
            _time([r.seconds.get("score") for r in here]) if label != DENSE else NONE,
            _time([r.seconds.get("train") for r in here]),
        ]
        if remembered:
            cells += [_memory([r.memory.get("score") for r in here]), _trained_in(here)]
        line = tag("tr", tag("th", *drawing, label, scope="row"), *(tag("td", text) for text in cells))
        groups.setdefault("not pruned" if label == DENSE else f"{sparsity(share)} sparsity", []).append(line)
    head = ["method", "weights kept", "parameters trained", "FLOPs an image", "scoring", "training"]
    head += ["scoring memory", "training memory"] if remembered else []
    caption = "Sizes, times and memory" if remembered else "Sizes and times"
    caption += ", means over the seeds; in brackets the share of the whole network's"
    return table(caption, head, groups, "numbers")


def cost_note(setup: Setup) -> str:
    """What the table's times and memory are of."""
    told = "Each run is scored and trained on its own; a masked network computes with its zeros."
    if not any(record.memory for record in setup.records):
        return f"{told} Memory is measured on a GPU only."
    return (
        f"{told} Memory is the GPU's at its peak: what scoring added, and all that the process held while it trained, "
        "its data and the runs trained side by side included."
    )


def size(number: float) -> str:
    """Bytes with a unit that suits them.

    >>> size(950_000), size(41_000_000), size(8.2e9)
    ('950 kB', '41 MB', '8.2 GB')
    """
    return f"{count(max(1000.0, number))}B"


def count(number: float) -> str:
    """
    >>> count(999), count(16592), count(41_000_000), count(8.2e9)
    ('999', '16.6 k', '41 M', '8.2 G')
    """
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            value = number / size
            return f"{value:.3g}{unit}" if value < 100 else f"{value:.0f}{unit}"
    return f"{number:.0f}"


def _trained(records: Sequence[Record], name: str) -> str:
    before = [record.sizes.get(name) for record in records]
    after = [record.sizes.get(f"trained_{name}") for record in records]
    text, whole = _mean(after), summarise([value for value in before if value])
    part = summarise([value for value in after if value])
    smaller = whole.n and part.n and part.mean < whole.mean
    return f"{text} ({100 * part.mean / whole.mean:.1f} %)" if smaller else text


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return count(summarise(known).mean) if known else NONE


def _memory(values: Sequence[int | None]) -> str:
    known = [value for value in values if value is not None]
    return size(summarise(known).mean) if known else NONE


def _trained_in(records: Sequence[Record]) -> str:
    together = {record.memory["together"] for record in records if record.memory.get("together", 1) > 1}
    beside = f" ({' or '.join(map(str, sorted(together)))} together)" if together else ""
    return _memory([record.memory.get("train") for record in records]) + beside


def _time(values: Sequence[float | None]) -> str:
    return duration(summarise([value for value in values if value is not None]).mean)
