"""The page of any number of run folders: what the methods gave, how they got there, and every run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from prospr.errors import FolderError, SettingError
from prospr.lab.report.cost import cost_note, cost_table
from prospr.lab.report.curves import curves, lines_of
from prospr.lab.report.every import failed_list, settings_table
from prospr.lab.report.histograms import histogram_section, histograms
from prospr.lab.report.markup import Markup, Place, join, tag
from prospr.lab.report.overlap import chosen, overlap_table, overlaps
from prospr.lab.report.page import compared, document, made, resource, save
from prospr.lab.report.published import behind
from prospr.lab.report.setups import Setup, setups
from prospr.lab.report.words import headline, percent
from prospr.lab.results import DENSE, accuracy, cell, methods_of
from prospr.lab.runs.records import Gathered, gather

USUAL_BASELINE = "random"
TITLE = "Pruning before training, run by run"


def report_runs(
    runs: Iterable[str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    baseline: str | None = None,
    title: str | None = None,
    command: str | None = None,
) -> Path:
    """Write the page of `runs`, folders of runs or of one run each, to `path`; the file appears whole or not at all.

    baseline: the method the others' paired differences are taken to; by default "random", else the first by name.
    command: the line that makes the page again.

    Runs are compared where they differ in method, sparsity and seed only; each other network, data set or training has
    a part of the page of its own. Masks are read, and torch imported, only where two methods have some at one sparsity
    and seed.

    >>> import tempfile
    >>> from prospr.lab.experiment import Experiment, Training
    >>> from prospr.lab.run import run_many
    >>> short = Training(epochs=1, batch_size=256)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     results = run_many([Experiment(method=m, training=short) for m in ("dense", "snip")], folder)
    ...     page = report_runs([folder], Path(folder) / "report.html").read_text(encoding="utf-8")
    >>> page.count("<h2"), "snip" in page
    (7, True)
    """
    return save(runs_page(gather(runs), baseline, title or TITLE, command), Path(path))


def runs_page(
    found: Gathered, baseline: str | None, title: str, command: str | None, live: str | None = None
) -> Markup:
    """The page's HTML. `live`: see `document`; the page then asks its server for news."""
    if not found.records:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in found.unread.items())
        raise FolderError(f"no run could be read ({reasons})")
    parts = setups(found.records)
    names = {method for part in parts for method in methods_of(part.rows)}
    if baseline is not None and baseline not in names:
        raise SettingError(f"baseline {baseline!r} is not among the methods; choose from {', '.join(sorted(names))}")
    alone = len(parts) == 1
    if alone:
        claim, evidence = told(parts[0])
        shown = _sections(parts[0], baseline, Place())
        evidence = f"{parts[0].title}. {evidence}"
    else:
        claim = f"{len(found.records)} runs of {len(parts)} settings"
        evidence = "Runs are compared where they differ in method, sparsity and seed only."
        shown = [_contents(parts), *(_part(part, baseline, number) for number, part in enumerate(parts, 1))]
    place = Place()
    records = [record for part in parts for record in part.records]
    failed = any(record.error is not None for record in records) or found.unread
    return document(
        title,
        tag("header", tag("p", title, class_="kicker"), tag("h1", claim), tag("p", evidence.strip(), class_="lead")),
        tag(
            "main",
            *shown,
            place.section("Failed runs", "failed", failed_list(records, found.unread)) if failed else join(),
            place.section("Every run", "runs", tag("p", _counted(found), class_="note"), settings_table(records)),
            place.section("How this page was made", "made", made(command)) if command else join(),
        ),
        *scripts(live),
        live=live,
    )


def scripts(live: str | None) -> list[Markup]:
    """The page's script, and for a page that is served what asks for news and says that it does."""
    shown = [] if live is None else [tag("p", class_="live", role="status")]
    names = ["page.js"] if live is None else ["page.js", "live.js"]
    return [*shown, *(tag("script", Markup(resource(name))) for name in names)]


def told(part: Setup) -> tuple[str, str]:
    """A claim the runs of a setup allow, and the numbers behind it."""
    rows = part.rows
    if methods_of(rows):
        return headline(rows)
    dense = accuracy(cell(rows, DENSE))
    claim = f"The dense network reaches {percent(dense.mean)}\N{NO-BREAK SPACE}%." if dense.n else "No run is finished."
    return claim, ""


def _part(part: Setup, baseline: str | None, number: int) -> Markup:
    claim, evidence = told(part)
    name = f"part-{number}"
    head = [tag("h2", part.title, id=name), tag("p", f"{claim} {evidence}".strip(), class_="lead")]
    return tag("article", *head, *_sections(part, baseline, Place(3, f"{name}-")), aria_labelledby=name)


def _contents(parts: Iterable[Setup]) -> Markup:
    links = [tag("li", tag("a", part.title, href=f"#part-{number}")) for number, part in enumerate(parts, 1)]
    links += [tag("li", tag("a", "Every run", href="#runs"))]
    return tag("nav", tag("ul", *links), aria_label="Parts of the page")


def _sections(part: Setup, baseline: str | None, place: Place) -> list[Markup]:
    rows = part.rows
    methods = methods_of(rows)
    shown = []
    if methods:
        usual = USUAL_BASELINE if USUAL_BASELINE in methods else methods[0]
        shown = compared(rows, baseline if baseline in methods else usual, place, behind(part))
        shown += _named(part)
    scores = histograms(part)
    if scores is not None:
        inner = histogram_section(scores, part.methods, place.prefix)
        shown.append(place.section("The scores behind the masks", "scores", inner))
    masks = chosen(part)
    overlap = overlaps(masks) if masks else None
    if overlap is not None:
        shown.append(place.section("Where methods agree", "overlap", overlap_table(overlap)))
    if lines_of(part):
        shown.append(place.section("Training curves", "curves", curves(part, place.prefix)))
    if any(record.state == "done" for record in part.records):
        note = tag("p", cost_note(part), class_="note")
        shown.append(place.section("Time, memory and size", "cost", cost_table(part), note))
    return shown


def _named(part: Setup) -> list[Markup]:
    """What is called accuracy, where it is something else."""
    figures = sorted({record.headline for record in part.records if record.headline not in ("", "accuracy")})
    return [tag("p", f"Accuracy stands for {', '.join(figures)} here.", class_="note")] if figures else []


def _counted(found: Gathered) -> str:
    states = Counter(record.state for record in found.records)
    counts = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
    copies = f"; left out, because the same experiment is there twice: {len(found.copies)}" if found.copies else ""
    total = len(found.records)
    return f"{total} {'run' if total == 1 else 'runs'}: {counts}{copies}."
