import csv
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from prospr.errors import SettingError
from prospr.lab.report.markup import Place, tag
from prospr.lab.report.page import compared, document
from prospr.lab.report.plot import accuracy_plot, spread_out, y_ticks
from prospr.lab.report.words import headline, percent, points
from prospr.lab.results import Row, accuracy, cell, difference, write_csv

LAYERS = {"conv1.weight": 0.5, "fc.weight": 0.0}
BASE = {"prospr": 0.91, "snip <x>": 0.88, "random": 0.6}


@pytest.fixture
def rows():
    dense = [Row("dense", 0.0, seed, 0.97 + seed / 1000, train_seconds=2.0) for seed in range(3)]
    pruned = [
        Row(method, sparsity, seed, base - sparsity / 10 + seed**2 / 100, 0.3, 10, 100, 0.25, 1.5, None, LAYERS)
        for method, base in BASE.items()
        for sparsity in (0.8, 0.95)
        for seed in range(3)
    ]
    return [*dense, *pruned, Row("prospr", 0.98, 0, error="CollapseError: fc.weight & all is empty")]


def page_of(rows, baseline):
    return document("A <b> page", tag("main", tag("h1", "Compared"), *compared(rows, baseline, Place())))


@pytest.fixture
def html(rows):
    return page_of(rows, "random")


class Checker(HTMLParser):
    """Checks that every tag is closed in order, and gathers tags, ids, attributes and text."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.ids, self.attributes, self.words = [], [], [], [], []
        self.table_rows = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]
        if tag == "tr":
            self.table_rows.append([])
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
        if "tr" in self.open and "svg" not in self.open:
            self.table_rows[-1].append(data)


@pytest.fixture
def parsed(html):
    checker = Checker()
    checker.feed(html)
    checker.close()
    return checker


def test_the_page_is_well_formed_and_says_what_it_is(html, parsed):
    assert html.startswith("<!doctype html>")
    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids))
    for name in ("title", "h1", "main", "section", "figure", "figcaption", "caption"):
        assert name in parsed.tags
    assert ("lang", "en") in parsed.attributes
    assert ("name", "viewport") in parsed.attributes


def test_every_plot_has_a_title_a_screen_reader_finds(html, parsed):
    references = [value for name, value in parsed.attributes if name == "aria-labelledby"]
    assert all(part in parsed.ids for value in references for part in value.split())
    for svg in re.findall(r"<svg[^>]*>", html):
        assert "aria-labelledby" in svg or "aria-label" in svg or 'aria-hidden="true"' in svg


def test_the_page_asks_for_nothing_from_outside(html, parsed):
    assert not re.search(r"https?://|//[a-z]|@import|url\(", html)
    assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
    assert not {"src", "href", "srcset"} & {name for name, _ in parsed.attributes}


def test_the_page_holds_every_method_and_the_rows_own_numbers(rows, parsed):
    for method in BASE:
        for sparsity in (0.8, 0.95):
            here = cell(rows, method, sparsity)
            spread, versus = accuracy(here), difference(here, cell(rows, "random", sparsity))
            wanted = [method, "3", percent(spread.mean), percent(spread.sd)]
            wanted.append("baseline" if method == "random" else points(versus.mean))
            assert wanted in [line[:5] for line in parsed.table_rows]
    assert "A <b> page" in "".join(parsed.words)


def test_layer_densities_are_a_table_and_empty_layers_stand_out(html, parsed):
    assert ["method", "conv1", "fc"] in parsed.table_rows
    assert ["prospr", "50", "0"] in parsed.table_rows
    assert 'class="empty"' in html


def test_the_plot_draws_each_seed_each_mean_and_each_bar(html, rows):
    runs = sum(row.accuracy is not None and row.method != "dense" for row in rows)
    for name in ("wide", "narrow"):
        drawing = re.search(rf'<svg[^>]*class="plot {name}">.*?</svg>', html, re.S).group()
        assert drawing.count('class="dot"') == runs
        assert drawing.count('class="mark"') == len(BASE) * 2
        assert drawing.count("<polyline") == len(BASE)
        bars = re.findall(r'class="bars">(.*?)</g>', drawing)
        assert sum(bar.count("<path") for bar in bars) == len(BASE) * 2
        assert 'class="band"' in drawing


def test_accuracies_are_drawn_where_they_belong():
    """Equal steps of accuracy are equal steps down the page."""
    rows = [Row("a", 0.9, 0, 0.2), Row("b", 0.9, 0, 0.4), Row("c", 0.9, 0, 0.8)]
    drawing = accuracy_plot(rows, width=400, height=300, name="x")
    a, b, c = (float(y) for y in re.findall(r'cy="([\d.]+)" r="2\.4"', drawing))
    assert a - c == pytest.approx(3 * (a - b), abs=0.2)
    assert a > b > c


def test_the_headline_claims_a_lead_only_where_the_seeds_show_one():
    def rows_of(first, second):
        runs = {"a": first, "b": second}
        return [Row(m, 0.9, seed, value) for m, values in runs.items() for seed, value in enumerate(values)]

    claim, evidence = headline(rows_of([0.90, 0.91, 0.92], [0.70, 0.715, 0.72]))
    assert claim.replace("\xa0", " ") == "At 90 % sparsity a leads with 91.0 %, 19.8 points ahead of b."
    assert "3 seeds" in evidence
    claim, _ = headline(rows_of([0.90, 0.80, 0.70], [0.70, 0.80, 0.85]))
    assert "too close to call" in claim
    claim, evidence = headline(rows_of([0.9], [0.5]))
    assert "leads" not in claim
    assert "cannot settle" in evidence
    claim, _ = headline([Row("a", 0.9, 0, error="x")])
    assert claim == "No pruned network could be trained."


def test_a_page_where_everything_failed_is_still_a_page():
    assert "1 failed" in page_of([Row("a", 0.9, 0, error="broken")], "a")


def test_an_unknown_baseline_is_refused(rows):
    with pytest.raises(SettingError, match=r"baseline 'magnitude'.*choose from prospr, snip"):
        page_of(rows, "magnitude")


def test_intervals_are_drawn_to_the_scale_of_their_sparsity():
    spread = {0.8: 0.01, 0.95: 0.2}
    rows = [Row("a", share, seed, 0.5 + seed * wide) for share, wide in spread.items() for seed in range(3)]
    rows += [Row("b", share, seed, 0.5) for share in spread for seed in range(3)]
    rows += [Row("c", share, 0, 0.6) for share in spread]  # one seed: no interval, and no scale either
    whiskers = re.findall(r'<line x1="([\d.]+)" y1="8" x2="([\d.]+)" y2="8" class="range">', page_of(rows, "b"))
    assert len(whiskers) == 2
    assert [float(high) for _, high in whiskers] == pytest.approx([116, 116])


def test_sanity_checks_are_told_apart_from_their_method(rows):
    shuffled = [Row("prospr", 0.95, seed, 0.5 + seed / 100, check="shuffled") for seed in range(3)]
    checker = Checker()
    checker.feed(page_of([*rows, *shuffled], "random"))
    found, moved = accuracy(cell(rows, "prospr", 0.95)), accuracy(shuffled)
    assert ["mask as found", "3", percent(found.mean), percent(found.sd), "as found", "–"] in checker.table_rows
    versus = difference(shuffled, cell(rows, "prospr", 0.95))
    assert ["shuffled", "3", percent(moved.mean), percent(moved.sd), points(versus.mean)] in [
        line[:5] for line in checker.table_rows
    ]
    assert "checks" in checker.ids


def test_differences_are_paired_by_seed():
    ours = [Row("a", 0.9, seed, value) for seed, value in [(0, 0.5), (1, 0.7), (2, 0.9), (3, None)]]
    theirs = [Row("b", 0.9, seed, value) for seed, value in [(2, 0.8), (1, 0.6), (3, 0.1)]]
    found = difference(ours, theirs)
    assert found.n == 2
    assert found.mean == pytest.approx(0.1)
    assert found.sd == pytest.approx(0, abs=1e-12)


def test_ticks_hold_every_value_and_labels_keep_apart():
    ticks = y_ticks([Row("a", 0.9, 0, 0.31), Row("a", 0.9, 1, 0.93)])
    assert ticks[0] <= 0.31
    assert ticks[-1] >= 0.93
    assert y_ticks([Row("a", 0.9, 0, 1.0)])[-1] == 1.0
    places = spread_out([50, 50, 50, 99], gap=15, low=0, high=100)
    assert sorted(places) == places
    assert all(b - a >= 15 for a, b in pairwise(places))
    assert places[-1] <= 100


def test_the_csv_holds_the_rows(rows, tmp_path):
    path = write_csv(rows, tmp_path / "new" / "results.csv")
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(rows)
    assert [float(line["accuracy"]) for line in lines if line["accuracy"]] == [
        row.accuracy for row in rows if row.accuracy is not None
    ]
    assert lines[5]["density:conv1.weight"] == "0.5"
    assert lines[-1]["error"] == rows[-1].error


def test_the_headline_goes_by_what_both_have():
    ahead = [Row("a", 0.9, s, value) for s, value in enumerate([0.80, 0.81, 0.80, 0.95, 0.95])]
    claim, evidence = headline([*ahead, *(Row("b", 0.9, s, value) for s, value in enumerate([0.82, 0.83, 0.825]))])
    assert "b leads with 82.5" in claim  # though the mean of all that a has is higher
    assert "2.2 points ahead of a" in claim
    assert "b minus a" in evidence


@pytest.mark.parametrize("pairs", [1, 2])
def test_two_seeds_settle_nothing(pairs):
    rows = [Row(method, 0.9, s, value) for method, value in (("a", 0.9), ("b", 0.7)) for s in range(pairs)]
    claim, evidence = headline(rows)
    assert "leads" not in claim
    assert "cannot settle which is better" in evidence
