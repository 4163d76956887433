"""What README and docs say of a file of results/ is what is in it.

A comment above such a table names the file: `<!-- results/fair_resnet20.jsonl -->`. Its columns are sparsities, its
rows methods; a cell is a mean, with a deviation, the number of runs or the seeds' own figures where they are given.
`seed=0,1` or another field: of runs that have one of these there. Losses stand as they are, and the lowest is best.
`minus=ARM`: ARM's accuracy minus the row's, paired by seed, bold where the pairs tell it from zero (Student's t).
`over=ARM`: the row's accuracy minus ARM's, likewise. In ARM a space is written "_".
`best=bold`: the best of a column is bold, and nothing else.
`as=NAME`: a table with a layout of its own; a function of that name in doc_tables.py says what its cells should be.

Running text of the README and docs/comparison.md with a measured number ends with such a comment too,
`<!-- results/gpt_cpu.jsonl says=gpt -->`; a function of that name in doc_prose.py says what its numbers should be.
"""

import json
import math
import re
from pathlib import Path
from statistics import fmean, stdev

import doc_prose
import doc_tables
import pytest

ROOT = Path(__file__).parent.parent
MARKED = re.compile(r"^<!-- (results/\S+)((?: \w+=\S+)*) -->\n\n((?:\|.*\n)+)", re.M)
EVERY = [
    pytest.param(*match.groups(), id=f"{page.name}-{match[1].removeprefix('results/')}-{number}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for number, match in enumerate(MARKED.finditer(page.read_text()))
]
FOUND = [one for one in EVERY if " as=" not in one.values[1]]
OTHERS = [one for one in EVERY if " as=" in one.values[1]]
BAR = re.compile(r"(?<!\\)\|")
NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)?)")
NO_PROSE = re.compile(r"^```.*?^```|^\|.*?$|^#.*?$|^    .*?$", re.M | re.S)
PARAGRAPHS = [
    text
    for page in (ROOT / "README.md", ROOT / "docs" / "comparison.md")
    for text in re.split(r"\n\s*\n|^\* ", NO_PROSE.sub("", page.read_text()), flags=re.M)
    if text
]
SAID = re.compile(r"<!-- ((?:results/\S+ )+)says=(\w+) -->\s*$")
NO_MEASUREMENT = re.compile(r"`[^`]*`|<!--.*?-->|\]\(.*?\)|\b(?:Python|PyTorch|Version) [\d.]+\b", re.S)
ALONE = re.compile(rf"(?<![\w.^-]){NUMBER.pattern}(?!\w)")
STUDENT = {3: 4.303, 5: 2.776, 10: 2.262, 25: 2.064}  # pairs: how many standard errors are told from zero, at 95 %
NAMES = {  # what a row is called in a table -> in the file, where it is not that in small letters or after "prospr, "
    "": {
        "ProsPr (default)": "prospr",
        "ProsPr, 20 rounds, balanced (default)": "prospr",
        "random, ERK's layers": "erk",
    },
    "choice_resnet20": {
        "ProsPr, 20 rounds, balanced, redrawn": "prospr",
        "ProsPr, 20 rounds, spread, redrawn": "prospr, spread",
    },
    "fair_resnet20b": {"ProsPr (default), here": "prospr", "NTK-SAP, here": "ntk-sap"},
    "fair_structured": {
        "ProsPr": "prospr, channels",
        "ProsPr (default)": "prospr, channels",
        "random": "random, channels",
    },
    "fair_vgg16": {
        "ProsPr (default: 20 rounds, mapped, redrawn)": "prospr",
        "ProsPr (the default until section 11: 20 rounds, balanced, redrawn)": "prospr, balanced",
        "ProsPr, 20 rounds, balanced": "prospr, balanced",
        "ProsPr, 20 rounds, balanced (default)": "prospr, balanced",
    },
    "focus_digits": {
        "ProsPr (default: balanced)": "prospr",
        "SNIP in 60 rounds, balanced, redrawn": "snip, balanced, redrawn",
        "M = 3, balanced": "prospr",
        "M = 10, balanced": "prospr, M=10",
    },
    "screening_resnet20_h200": {
        "random, layers balanced": "random-balanced",
        "NTK-SAP, 20 rounds": "ntk-sap",
        "Iter-SNIP, 60 rounds": "iter-snip",
        "Iter-SNIP, 60 rounds, balanced": "iter-snip-balanced",
        "Iter-SNIP, 60 rounds, balanced, redrawn": "iter-snip-balanced-redrawn",
        "Iter-SNIP, 60 rounds, spread": "iter-snip-spread",
        "ProsPr, 20 rounds": "it20",
        "ProsPr, 20 rounds, balanced": "it20-balanced",
        "ProsPr, 20 rounds, balanced, M = 10": "it20-balanced-m10",
        "ProsPr, 20 rounds, balanced, recover": "it20-balanced-recover",
        "ProsPr, 20 rounds, balanced, redrawn": "it20-balanced-redrawn",
        "ProsPr, 20 rounds, M = 10": "it20-m10",
        "ProsPr, 20 rounds, recover": "it20-recover",
        "ProsPr, 20 rounds, redrawn": "it20-redrawn",
        "ProsPr, 20 rounds, spread": "it20-spread",
        "ProsPr, 20 rounds, spread, redrawn": "it20-spread-redrawn",
        "ProsPr, 60 rounds, M = 1, lr 0.01": "it60-m1",
        "ProsPr, one shot (M = 3, lr from curvature)": "prospr",
        "ProsPr, one shot, ERK densities": "prospr-erk",
        "random, ERK densities": "erk",
        "random, every layer the same number of weights (at most half of it)": "drawn",
        "more in early layers (n^-0.3)": "drawn-early",
        "more in late layers (n^0.25)": "drawn-late",
        "half of the channels within blocks": "drawn-mid50",
        "a quarter of them": "drawn-mid25",
        "no corners of kernels": "drawn-cross",
        "ProsPr's default (M = 3; section 1, weights drawn)": "it20-balanced-redrawn",
        "M = 10": "default-m10",
        "M = 30": "default-m30",
    },
    "gpt_cpu": {
        "prospr (the default from now on)": "prospr",
        "M = 3 (the default)": "prospr",
        "prospr (the default)": "prospr",
        "prospr, balanced (the default until section 14)": "prospr, balanced",
    },
    "small_mlp_cpu": {
        "its mask, shuffled within layers": "prospr: shuffled",
        "M = 0 (SNIP in 20 rounds, balanced, redrawn)": "prospr, M = 0",
        "not redrawn (M = 3)": "prospr, not redrawn",
        "ProsPr (default: M = 3, lr from curvature, kappa 1, batches of 128)": "prospr",
        "momentum 0.9": "prospr, momentum",
        "the same batch in all steps": "prospr, same batch",
        "mean over four trajectories": "prospr, four trajectories",
        "mean over four draws of the weights": "prospr, four draws",
        "mean over sixteen draws": "prospr, sixteen draws",
        "M = 0, mean over sixteen draws": "prospr, M = 0, sixteen draws",
        "norm statistics warmed up": "prospr, warmed up",
        "pruned weights may come back": "prospr, recover",
        "they may, and one threshold for all layers": "prospr, recover, global",
        "one threshold, in 60 rounds": "prospr, recover, global, 60 rounds",
        "redrawn, and they may come back": "prospr, redrawn, recover",
        "FORCE in 20 rounds": "force, 20 rounds",
    },
    "small_mlp_cifar_cpu": {
        "its mask, shuffled within layers": "prospr: shuffled",
        "not redrawn (M = 3)": "prospr, not redrawn",
        "pruned weights may come back": "prospr, recover",
        "they may, and one threshold for all layers": "prospr, recover, global",
        "that in 60 rounds": "prospr, recover, global, 60 rounds",
        "redrawn, and they may come back": "prospr, redrawn, recover",
        "FORCE in 20 rounds": "force, 20 rounds",
    },
}
CELL = re.compile(
    r"(?:(?P<each>[\d., ]+): )?(?P<mean>[+-]?\d[\d.]*)(?: \((?P<about>[\d.]+)\))?(?: \(seed 0\)|, one cut)?"
)


def test_there_are_some():
    assert len(FOUND) >= 15
    assert [sum(page in one.id for one in FOUND) for page in ("README", "comparison")] == [1, 3]
    assert len(OTHERS) >= 20


@pytest.mark.parametrize(("path", "options", "table"), FOUND)
def test_a_table_says_what_was_measured(path, options, table):
    asked = dict(option.split("=", 1) for option in options.split())
    runs = [json.loads(line) for line in (ROOT / path).read_text().splitlines()]
    for key, values in asked.items():
        if key not in ("minus", "over", "best"):
            runs = [run for run in runs if str(run[key]).lower() in values.split(",")]
    header, _, *lines = ([cell.strip() for cell in line.strip("|\n ").split("|")] for line in table.splitlines())
    shares = [float(share) / 100 for share in re.findall(r"([\d.]+) %", " ".join(header[1:]))]
    assert len(shares) == len(header) - 1
    arms = {run.get("arm") or run["variant"] for run in runs}
    means: dict[float, dict[str, float]] = {}
    other = asked.get("minus", asked.get("over"))
    other = None if other is None else other.replace("_", " ")
    for label, *cells in lines:
        if label.startswith(("*literature*", "FLOPs")):
            continue
        name = label.replace("**", "").removeprefix("- ")
        known = f"prospr, {name}" if f"prospr, {name}" in arms else name.lower()
        arm = (NAMES[""] | NAMES.get(Path(path).stem, {})).get(name, known)
        for share, cell in zip(shares, cells, strict=True):
            found = _figures(runs, arm, share, other)
            found = [-gap for gap in found] if "over" in asked else found
            text = cell.replace("**", "")
            assert bool(text.strip("- ")) <= bool(found), f"{label}, {share}: {cell!r}, and no run of {arm!r}"
            if text.strip("- "):
                _check(f"{label}, {share}: {cell}", text, found)
                means.setdefault(share, {})[cell] = fmean(found)
                if other is not None and len(found) > 2:
                    told = abs(fmean(found)) > STUDENT[len(found)] * stdev(found) / math.sqrt(len(found))
                    assert told == ("**" in cell), f"{label}, {share}: {cell}"
    assert means
    if asked.get("best") == "bold":
        for share, cells in means.items():
            best = (min if "accuracy" not in runs[0] else max)(cells, key=cells.__getitem__)
            assert [cell for cell in cells if "**" in cell] == [best], share


@pytest.mark.parametrize(("path", "options", "table"), OTHERS)
def test_a_table_of_another_layout_says_what_was_measured(path, options, table):
    told = getattr(doc_tables, options.partition("as=")[2])
    header, _, *lines = ([cell.strip() for cell in BAR.split(line.strip()[1:-1])] for line in table.splitlines())
    rows, above, checked = doc_tables.load(path), [], 0
    for label, *cells in lines:
        label = re.sub(r"\*\*|`", "", label).removeprefix("- ")
        texts = dict(zip(header[1:], (cell.replace("**", "") for cell in cells), strict=True))
        for column, text in texts.items():
            if not text.strip("- "):
                continue
            expected = told(rows, doc_tables.Cell(label, column, text, tuple(above), texts, header[0]))
            if expected is None:
                continue
            said = NUMBER.findall(text)
            assert len(said) == len(expected), f"{label}, {column}: {text!r} for {expected}"
            for number, value in zip(said, expected, strict=True):
                _near(f"{label}, {column}: {text}", number.replace(",", ""), value)
            checked += 1
        above.append(label)
    assert checked


def test_paragraphs_with_a_measured_number_name_a_file():
    unnamed = [text for text in PARAGRAPHS if re.search(r"\d\.\d", _numbers_in(text)) and not SAID.search(text)]
    assert not unnamed
    assert len(PARAGRAPHS) > 20


@pytest.mark.parametrize("text", [p for p in PARAGRAPHS if SAID.search(p)], ids=lambda text: SAID.search(text)[2])
def test_a_paragraph_says_what_was_measured(text):
    files, name = SAID.search(text).groups()
    assert all((ROOT / file).exists() for file in files.split())
    expected, said = doc_prose.SAID[name](), ALONE.findall(_numbers_in(text))
    assert len(said) == len(expected), f"{said} for {expected}"
    for number, value in zip(said, expected, strict=True):
        if value is not None:
            _near(f"{name}: {number}", number.replace(",", ""), value)


def _numbers_in(text: str) -> str:
    return NO_MEASUREMENT.sub("", text)


def _figures(runs: list[dict], arm: str, share: float, minus: str | None) -> list[float]:
    """Accuracies in percent, losses, or differences of them, in the order of seeds."""
    reached = {
        (run.get("arm") or run["variant"], run["seed"]): _reached(run)
        for run in runs
        if run["error"] is None and abs(run["sparsity"] - share) < 1e-9
    }
    mine = {seed: value for (name, seed), value in sorted(reached.items()) if name == arm}
    if minus is None:
        return list(mine.values())
    return [reached[minus, seed] - value for seed, value in mine.items() if (minus, seed) in reached]


def _reached(run: dict) -> float:
    share = run.get("accuracy", run.get("validation"))
    return run["loss"] if share is None else 100 * share


def _check(where: str, text: str, found: list[float]) -> None:
    said = CELL.fullmatch(text)
    assert said, where
    _near(where, said["mean"], fmean(found))
    if said["each"]:
        each = said["each"].split(", ")
        assert len(each) == len(found), where
        for one, value in zip(each, found, strict=True):
            _near(where, one, value)
    if (about := said["about"]) and "." in about:
        _near(where, about, stdev(found))
    elif about:
        assert int(about) == len(found), where


def _near(where: str, text: str, value: float) -> None:
    digits = len(text.partition(".")[2])
    assert abs(float(text) - value) <= 0.5 * 10**-digits + 1e-6, f"{where}: measured {value:.4f}"
