"""Every run of the page: its settings, the command that runs it again, where it was made, and how it failed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from prospr.lab.experiment import DENSE, Experiment
from prospr.lab.report.markup import Markup, join, tag
from prospr.lab.report.setups import changed, words
from prospr.lab.report.tables import table
from prospr.lab.report.words import NONE, percent, sparsity
from prospr.lab.runs.folder import FOLDER
from prospr.lab.runs.records import Record

ALWAYS = ("dataset", "network", "method", "sparsity", "seed")


def command_of(experiment: Experiment, folder: str = FOLDER) -> str:
    """The command line that runs `experiment`, or shows it where it is done.

    >>> command_of(Experiment(method="snip", sparsity=0.95))
    'prospr run --dataset digits --network small_convnet --method snip --sparsity 0.95 --seed 0'
    """
    line = ["prospr", "run"]
    for part in (experiment, experiment.data, experiment.pruning, experiment.training):
        default = type(part)()
        for one in fields(part):
            value, usual = getattr(part, one.name), getattr(default, one.name)
            told = part is experiment and one.name in ALWAYS
            if not is_dataclass(value) and (told or value != usual):
                value = experiment.network_name if one.name == "network" else value
                line += _option(one.name, value, flag=usual is False)
    if experiment.method == DENSE:
        at = line.index("--sparsity")
        del line[at : at + 2]
    return shlex.join(line if folder == FOLDER else [*line, "--folder", folder])


def settings_table(records: Sequence[Record]) -> Markup:
    """A row a run; a box above it chooses rows by what they say, where the page's script runs."""
    body = [_line(record) for record in records]
    head = ["run", "data, network", "method", "sparsity", "seed", "state", "figure %", "other settings", "command",
            "made"]  # fmt: skip
    box = tag("input", type="search", autocomplete="off", spellcheck="false", placeholder="snip, 95 %, seed 1")
    hint = "Only runs with all of these, between commas: "
    chooser = tag("p", tag("label", hint, box), " ", tag("output"), class_="filter", hidden="")
    return tag("div", chooser, table("Every run", head, {"": body}, "runs"), class_="filtered")


def failed_list(records: Sequence[Record], unread: Mapping[Path, str]) -> Markup:
    """The errors, each with where it came from folded away."""
    entries = []
    for record in records:
        if record.error is not None:
            where = [tag("details", tag("summary", "Where"), tag("pre", record.traceback))] if record.traceback else []
            name = tag("strong", record.experiment.label)
            entries.append(tag("li", name, tag("p", record.error, class_="error"), *where))
    for path, reason in unread.items():
        entries.append(tag("li", tag("strong", path), tag("p", f"not read: {reason}", class_="error")))
    return tag("ul", *entries, class_="failures")


def _line(record: Record) -> Markup:
    one = record.experiment
    dense = one.method == DENSE
    far = "" if record.state == "done" else f", {len(record.epochs)} of {one.trained_by.epochs} epochs"
    figure = NONE if record.figure is None else f"{record.headline} {percent(record.figure)}"
    cells = [
        f"{one.dataset}, {one.network_name}",
        one.method,
        NONE if dense else sparsity(one.sparsity),
        f"seed {one.seed}",
        f"{record.state}{far}",
        figure,
    ]
    return tag(
        "tr",
        tag("th", tag("code", record.folder.name), scope="row"),
        *(tag("td", text) for text in cells),
        tag("td", _settings(one), class_="long"),
        tag("td", tag("code", command_of(one, str(record.folder.parent))), class_="long"),
        tag("td", _made(record)),
    )


def _settings(one: Experiment) -> str:
    recipe = one.trained_by
    told = [f"recipe {one.recipe_name}, {recipe.epochs} epochs, batches of {recipe.batch_size}, lr {recipe.lr:g}"]
    told += [f"{key} {value}" for key, value in one.settings.items()]
    parts = (one.data, one.training) if one.method == DENSE else (one.data, one.pruning, one.training)
    for part in parts:
        told += [words(k, v) for k, v in changed(part).items() if k not in ("epochs", "batch_size", "lr")]
    return "; ".join(told)


def _made(record: Record) -> Markup:
    """When, on what and by which command; folded, because it is long and mostly the same."""
    env = record.environment
    if not env:
        return join(NONE)
    versions = ", ".join(f"{name} {version}" for name, version in env.get("versions", {}).items())
    device = env.get("device_name") or env.get("device")
    facts = [device, env.get("machine"), versions, f"revision {env.get('git') or 'of an installed package'}"]
    lines = [tag("p", fact) for fact in facts if fact]
    lines += [tag("p", "typed: ", tag("code", env["command"]))] if env.get("command") else []
    lines += [tag("p", f"note: {note}") for note in record.notes]
    return tag("details", tag("summary", env.get("when", "made")), *lines)


def _option(name: str, value: Any, flag: bool) -> list[str]:
    option = f"--{name.replace('_', '-')}"
    if flag:
        return [option]
    if isinstance(value, Mapping):
        return [option, *(str(word) for pair in value.items() for word in pair)]
    if isinstance(value, (tuple, list)):
        return [option, *map(str, value)]
    return [option, str(value)]
