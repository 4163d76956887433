"""One page that shows a comparison: self-contained, offline, light and dark, wide and narrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from prospr.atomic import write_text
from prospr.lab.report.density import density_plot, density_table, effective_densities
from prospr.lab.report.markup import Markup, Place, join, tag
from prospr.lab.report.plot import accuracy_plot, swatch
from prospr.lab.report.tables import accuracy_table, check_table, heat_scale, layer_table, run_table, time_table
from prospr.lab.report.words import headline
from prospr.lab.results import DENSE, Row, accuracy, cell, checks_of, methods_of

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)


def write_report(
    rows: Sequence[Row],
    path: str | Path,
    *,
    baseline: str,
    title: str = "Pruning at initialization, compared",
    settings: Mapping[str, object] | None = None,
    command: str | None = None,
) -> Path:
    """Write the page for `rows` to `path`; the file appears whole or not at all.

    `baseline` is the method the others' paired differences are taken to. `settings` are shown as they are: what was
    run, with which versions; `command` is the line that makes the page again.

    >>> import tempfile
    >>> rows = [Row("snip", 0.9, seed, 0.9 + seed / 100) for seed in range(3)]
    >>> page = write_report(rows, Path(tempfile.mkdtemp()) / "report.html", baseline="snip")
    >>> page.read_text(encoding="utf-8")[:15]
    '<!doctype html>'
    """
    return save(page(rows, baseline, title, settings or {}, command), path)


def save(page: Markup, path: str | Path) -> Path:
    """Write a page; the file appears whole or not at all."""
    path = Path(path)
    write_text(path, page)
    return path


def page(rows: Sequence[Row], baseline: str, title: str, settings: Mapping[str, object], command: str | None) -> Markup:
    """The page's HTML."""
    claim, evidence = headline(rows)
    place = Place()
    return document(
        title,
        tag("header", tag("p", title, class_="kicker"), tag("h1", claim), tag("p", evidence, class_="lead")),
        tag(
            "main",
            *compared(rows, baseline, place),
            place.section("Time", "time", time_table(rows), _time_note()),
            _run_section(rows, place),
            place.section("How this was made", "made", made(settings, command)),
        ),
    )


def document(title: str, *body: Markup) -> Markup:
    """A whole page. Its policy forbids every request: what it needs is in it."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(resource("page.css"))),
    )
    return join(Markup("<!doctype html>\n"), tag("html", head, tag("body", *body), lang="en"), "\n")


def resource(name: str) -> str:
    """A file of this package."""
    return (resources.files("prospr.lab.report") / name).read_text(encoding="utf-8")


def compared(rows: Sequence[Row], baseline: str, place: Place) -> list[Markup]:
    """What the rows of one setting say about the methods, a section each, where there is something to say."""
    methods = methods_of(rows)
    if baseline not in methods:
        raise ValueError(f"baseline {baseline!r} is not among the compared methods; choose from {', '.join(methods)}")
    return [
        _plot_section(rows, place),
        place.section("Differences", "differences", accuracy_table(rows, baseline), _differences_note(baseline)),
        _check_section(rows, place),
        _layer_section(rows, place),
        _density_section(rows, place),
    ]


def _plot_section(rows: Sequence[Row], place: Place) -> Markup:
    legend = [tag("li", swatch(index), method) for index, method in enumerate(methods_of(rows))]
    if accuracy(cell(rows, DENSE)).n:
        legend.append(tag("li", tag("span", class_="swatch dense-swatch"), DENSE))
    figure = tag(
        "figure",
        tag("ul", *legend, class_="legend", aria_label="Legend"),
        accuracy_plot(rows, width=800, height=400, name="wide", prefix=place.prefix),
        accuracy_plot(rows, width=390, height=360, name="narrow", prefix=place.prefix),
        tag(
            "figcaption",
            "Test accuracy in per cent after the last epoch. Marks are means over the seeds, bars one standard "
            "deviation, dots single seeds. The dashed line is the dense network, its band one standard deviation.",
        ),
    )
    return place.section("Accuracy against sparsity", "accuracy", figure)


def _differences_note(baseline: str) -> Markup:
    return tag(
        "p",
        f"For one seed all methods start from the same weights and see the same batches, so differences to {baseline} "
        "are taken seed by seed. Intervals are Student's t, one comparison at a time; a filled dot marks one that "
        "excludes zero.",
        class_="note",
    )


def _check_section(rows: Sequence[Row], place: Place) -> Markup:
    if not checks_of(rows):
        return join()
    note = (
        "Shuffled: the same number of weights in every layer, elsewhere. Redrawn: the mask on other initial weights. "
        "Inverted: what the method would prune first. A check that does as well as the mask says that the method did "
        "not find what it claims to."
    )
    return place.section("Sanity checks", "checks", check_table(rows), tag("p", note, class_="note"))


def _layer_section(rows: Sequence[Row], place: Place) -> Markup:
    if not any(row.layers for row in rows):
        return join()
    return place.section("Where the weights are kept", "layers", layer_table(rows), heat_scale())


def _density_section(rows: Sequence[Row], place: Place) -> Markup:
    if not effective_densities(rows):
        return join()
    note = (
        "Direct: the share of weights kept. Effective: those of them on a path from input to output, which are all "
        "that can change the result. On the dashed line nothing is kept in vain."
    )
    figure = tag("figure", density_plot(rows, prefix=place.prefix), tag("figcaption", note))
    return place.section("Direct and effective density", "density", figure, density_table(rows))


def _time_note() -> Markup:
    note = "Wall-clock time, one run after another; a network is scored once for all sparsities."
    return tag("p", note, class_="note")


def _run_section(rows: Sequence[Row], place: Place) -> Markup:
    """Every run, folded away unless one failed."""
    failed = sum(row.error is not None for row in rows)
    summary = tag("summary", f"{len(rows)} runs, {failed} failed" if failed else f"{len(rows)} runs")
    return place.section("Every run", "runs", tag("details", summary, run_table(rows), open="" if failed else None))


def made(settings: Mapping[str, object], command: str | None) -> Markup:
    """What was run, with which versions, and the line that makes the page again."""
    pairs = [tag("div", tag("dt", name), tag("dd", value)) for name, value in settings.items()]
    again = [] if command is None else [tag("pre", tag("code", command))]
    return join(*again, tag("dl", *pairs)) if pairs else join(*again)
