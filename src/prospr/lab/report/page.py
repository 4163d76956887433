"""What pages are made of: a self-contained document, and the sections that compare methods."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from prospr.atomic import write_text
from prospr.errors import SettingError
from prospr.lab.report.density import density_plot, density_table, effective_densities
from prospr.lab.report.markup import Markup, Place, join, tag
from prospr.lab.report.plot import accuracy_plot, paper_swatch, swatch
from prospr.lab.report.published import NOTHING, Behind, paper_note, paper_table
from prospr.lab.report.tables import accuracy_table, check_table, heat_scale, layer_table
from prospr.lab.results import DENSE, Row, accuracy, cell, checks_of, methods_of

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)


def save(page: Markup, path: str | Path) -> Path:
    """Write a page; the file appears whole or not at all."""
    path = Path(path)
    write_text(path, page)
    return path


def document(title: str, *body: Markup, live: str | None = None) -> Markup:
    """A whole page. Its policy forbids every request: what it needs is in it.

    live: for a page that is served, what it was made of; it may ask its own server whether that has changed.
    """
    policy = POLICY if live is None else f"{POLICY}; connect-src 'self'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(resource("page.css"))),
    )
    return join(Markup("<!doctype html>\n"), tag("html", head, tag("body", *body), lang="en", data_live=live), "\n")


def resource(name: str) -> str:
    """A file of this package."""
    return (resources.files("prospr.lab.report") / name).read_text(encoding="utf-8")


def compared(rows: Sequence[Row], baseline: str, place: Place, behind: Behind = NOTHING) -> list[Markup]:
    """What the rows of one setting say about the methods, a section each, where there is something to say. `behind` are
    the paper's numbers."""
    methods = methods_of(rows)
    if baseline not in methods:
        raise SettingError(f"baseline {baseline!r} is not among the compared methods; choose from {', '.join(methods)}")
    return [
        _plot_section(rows, place, behind),
        place.section("Differences", "differences", accuracy_table(rows, baseline), _differences_note(baseline)),
        _check_section(rows, place),
        _layer_section(rows, place),
        _density_section(rows, place),
    ]


def _plot_section(rows: Sequence[Row], place: Place, behind: Behind) -> Markup:
    legend = [tag("li", swatch(index), method) for index, method in enumerate(methods_of(rows))]
    if accuracy(cell(rows, DENSE)).n:
        legend.append(tag("li", tag("span", class_="swatch dense-swatch"), DENSE))
    told = (
        "Test accuracy in per cent after the last epoch. Marks are means over the seeds, bars one standard deviation, "
        "dots single seeds. The dashed line is the dense network, its band one standard deviation."
    )
    switch, after = join(), join()
    if behind.curves:
        legend.append(tag("li", paper_swatch(), f"the paper's: {', '.join(behind.curves)}", class_="paper"))
        told += " Thin, dashed and hollow, in the same colours, are the paper's means and deviations."
        box = tag("input", type="checkbox", checked="", data_by="paper", value="paper")
        switch = tag("p", tag("label", box, " the paper's numbers"), class_="switch", hidden="")
        after = join(paper_note(behind), paper_table(rows, behind))
    sizes = {"wide": (800, 400), "narrow": (390, 360)}
    plots = [
        accuracy_plot(rows, width=width, height=height, name=name, prefix=place.prefix, behind=behind)
        for name, (width, height) in sizes.items()
    ]
    figure = tag(
        "figure",
        tag("ul", *legend, class_="legend", aria_label="Legend"),
        switch,
        *plots,
        tag("figcaption", told),
    )
    return place.section("Accuracy against sparsity", "accuracy", figure, after)


def _differences_note(baseline: str) -> Markup:
    return tag(
        "p",
        f"For one seed all methods start from the same weights and see the same batches, so differences to {baseline} "
        "are taken seed by seed. Intervals are Student's t, one comparison at a time; they are drawn "
        "to one scale within a sparsity, and a filled dot marks one that excludes zero.",
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


def made(command: str) -> Markup:
    """The line that makes the page again."""
    return tag("pre", tag("code", command))
