"""Runs and lists as text for a terminal, or as JSON. Nothing here imports torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prospr.errors import PruningError
from prospr.lab.experiment import Experiment
from prospr.lab.runs.files import read_json
from prospr.lab.runs.folder import RunFolder, RunResult, find_run

if TYPE_CHECKING:
    from prospr.lab.estimate import Estimate, Total

__all__ = ["show_plan", "show_run", "show_runs", "show_table", "show_total"]

WIDTH = 60  # of a curve
BLOCKS, PLAIN = "▁▂▃▄▅▆▇█", "_.-=+*%#"


def show_run(place: RunFolder, as_json: bool = False) -> str:
    """Settings, figures, curve and layer densities of a run, as far as it has come."""
    if as_json:
        return json.dumps(_everything(place), indent=1)
    experiment = place.experiment
    lines = [f"{experiment.label}", f"{place.path}", ""]
    lines += _settings(experiment)
    if place.done:
        result = place.result()
        lines += ["", *_figures(result), "", *_curve(result.epochs), "", *_layers(result.sizes)]
        lines += [f"note: {note}" for note in result.notes]
        return "\n".join(lines).rstrip()
    failed, epochs = place.error(), place.metrics()
    total = experiment.trained_by.epochs
    lines.append("")
    if failed is not None:
        lines.append(f"failed at {failed.get('when')}: {failed.get('error')}")
    lines.append(f"not finished: {len(epochs)} of {total} epochs; `prospr run` with the same options goes on")
    return "\n".join([*lines, "", *_curve(epochs)]).rstrip()


def show_runs(folder: str, as_json: bool = False) -> str:
    """Every run in a folder, a line each."""
    rows = []
    for path in sorted(Path(folder).glob("*/experiment.json")):
        try:
            rows.append(_line(find_run(str(path.parent))))
        except PruningError as error:  # the others are shown
            why = (str(error).splitlines() or [type(error).__name__])[0]
            rows.append({"run": path.parent.name, "experiment": "", "state": f"cannot be read: {why}", "figure": ""})
    if as_json:
        return json.dumps(rows, indent=1)
    return show_table(rows) if rows else f"there are no runs in {folder}/"


def _line(place: RunFolder) -> dict[str, str]:
    row = {"run": place.path.name, "experiment": place.experiment.label}
    if place.done:
        result = place.result()
        return row | {"state": "done", "figure": f"{result.headline} {100 * result.figure:.2f} %"}
    state = "failed" if place.error() is not None else "not finished"
    return row | {"state": f"{state}, {len(place.metrics())} epochs", "figure": ""}


def show_plan(place: RunFolder, cost: Estimate, device: str, as_json: bool = False) -> str:
    """What would run and what it would cost."""
    experiment = place.experiment
    if place.done:
        state = "done: its result would be shown"
    elif place.path.exists():
        state = f"begun: it would go on after epoch {len(place.metrics())}"
    else:
        state = "not begun"
    steps = cost.epochs * cost.steps
    if as_json:
        content: dict[str, Any] = {
            "identity": experiment.identity,
            "folder": str(place.path),
            "label": experiment.label,
        }
        content |= {"done": place.done, "experiment": experiment.to_dict(), "device": device, "epochs": cost.epochs}
        content |= {"steps": steps, "seconds": cost.seconds, "basis": cost.basis, "scoring": cost.scoring}
        return json.dumps(content, indent=1)
    took = "unknown" if cost.seconds is None else f"about {duration(cost.seconds)}"
    if cost.step_seconds is not None:
        took += f" ({1000 * cost.step_seconds:.3g} ms a step)"
    rows = [
        ("would run", experiment.label),
        ("folder", f"{place.path} ({state})"),
        *_pairs(experiment),
        ("device", device),
        ("scoring", cost.scoring),
        ("training", f"{cost.epochs} epochs of {cost.steps} steps: {steps:,} steps" if steps else "unknown"),
        ("time", f"{took}; {cost.basis}" + ("" if cost.scoring == "none" else "; scoring comes to it")),
    ]
    return _columns(rows)


def show_total(total: Total, device: str, processes: int = 1) -> str:
    """How much is left of many runs."""
    left = total.runs - total.done
    rows = [("runs", f"{total.runs}: {total.done} done, {total.begun} begun, {left - total.begun} not begun")]
    if left:
        took = "unknown" if total.unknown == left else f"about {duration(total.seconds)}, one run after another"
        if 0 < total.unknown < left:
            took += f", without {total.unknown} runs whose time is unknown"
        rows += [("device", f"{device}, {processes} processes" if processes > 1 else device)]
        rows += [("training", f"{total.steps:,} steps are left")]
        rows += [("time", f"{took}; {', '.join(total.bases)}; scoring comes to it")]
    return _columns(rows)


def show_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of the same keys as columns.

    >>> print(show_table([{"name": "snip", "cost": 1}, {"name": "force", "cost": 60}]))
    name   cost
    snip   1
    force  60
    """
    table = [list(rows[0]), *([_word(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table
    )


def duration(seconds: float) -> str:
    """
    >>> duration(0.5), duration(75), duration(7260)
    ('0.5 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def spark(values: Sequence[float], width: int = WIDTH, marks: str = PLAIN) -> str:
    """A curve in one line, lowest to highest; values that are no numbers are question marks.

    >>> spark([0.0, 1.0, 2.0, float("nan"), 7.0])
    '_.-?#'
    """
    if len(values) > width:  # of every stretch the last
        values = [values[(i + 1) * len(values) // width - 1] for i in range(width)]
    known = [value for value in values if value == value]
    if not known:
        return "?" * len(values)
    low, span = min(known), (max(known) - min(known)) or 1.0
    top = len(marks) - 1
    return "".join(marks[round((value - low) / span * top)] if value == value else "?" for value in values)


def _settings(experiment: Experiment) -> list[str]:
    return _columns(_pairs(experiment)).splitlines()


def _pairs(experiment: Experiment) -> list[tuple[str, str]]:
    recipe = experiment.trained_by
    pad, flip = experiment.augmentation
    drops = f"times {recipe.drop_factor:g} at {', '.join(map(str, recipe.drops))}" if recipe.drops else recipe.schedule
    rows = [
        ("recipe", f"{experiment.recipe_name}: {recipe.epochs} epochs, batches of {recipe.batch_size}"),
        ("SGD", f"lr {recipe.lr:g} ({drops}), momentum {recipe.momentum:g}, weight decay {recipe.weight_decay:g}"),
        ("images", f"moved by up to {pad} px" + (", half of them mirrored" if flip else "")),
    ]
    if experiment.settings:
        rows.append(("settings", ", ".join(f"{key}={value}" for key, value in experiment.settings.items())))
    for name in ("data", "pruning", "training"):
        part = getattr(experiment, name)
        changed = {key: v for key, v in vars(part).items() if v != getattr(type(part)(), key)}
        if changed:
            rows.append((name, ", ".join(f"{key}={value}" for key, value in changed.items())))
    return rows


def _figures(result: RunResult) -> list[str]:
    sizes, seconds, made = result.sizes, result.seconds, result.environment
    rows = [("test", ", ".join(_figure(name, value) for name, value in result.figures.items()))]
    if "kept" in sizes:
        kept = f"{sizes['kept']:,} of {sizes['total']:,} weights ({100 * sizes['density']:.2f} %)"
        effective = sizes.get("effective_density")
        rows.append(("kept", kept + (f", effective {100 * effective:.2f} %" if effective is not None else "")))
    rows.append(("parameters", _change(sizes["parameters"], sizes["trained_parameters"])))
    rows.append(("FLOPs", _change(sizes["flops"], sizes["trained_flops"])))
    scoring = f"scoring {duration(seconds['score'])}, " if "kept" in sizes else ""
    rows.append(("time", f"{scoring}training {duration(seconds['train'])}"))
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    rows.append(("made", f"{made['when']} on {made['device_name']}, {versions}"))
    rows.append(("revision", made["git"] or "of an installed package"))
    return _columns(rows).splitlines()


def _change(before: int, after: int) -> str:
    return f"{before:,}" if before == after else f"{before:,} before, {after:,} trained ({100 * after / before:.2f} %)"


def _figure(name: str, value: float) -> str:
    return f"loss {value:.4f}" if name == "loss" else f"{name} {100 * value:.2f} %"


def _curve(epochs: Sequence[Mapping[str, float]]) -> list[str]:
    marks = _marks()
    rows = []
    for name in ("loss", "train", "validation", "test"):
        values = [epoch.get(name, float("nan")) for epoch in epochs]
        seen = [value for value in values if value == value]
        if len(seen) > 1:
            shown = values if name == "loss" else [100 * value for value in values]
            first, last = (100 * one if name != "loss" else one for one in (seen[0], seen[-1]))
            rows.append((name, f"{spark(shown, marks=marks)}  {first:.4g} to {last:.4g}"))
    return _columns(rows).splitlines()


def _layers(sizes: Mapping[str, Any]) -> list[str]:
    layers = sizes.get("layers", {})
    full = _marks()[-1]
    return _columns([(name, f"{100 * d:6.2f} %  {full * round(40 * d)}") for name, d in layers.items()]).splitlines()


def _marks() -> str:
    """Blocks where the terminal can show them."""
    try:
        BLOCKS.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return PLAIN
    return BLOCKS


def _columns(rows: Sequence[tuple[str, str]]) -> str:
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in rows)


def _word(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _everything(place: RunFolder) -> dict[str, Any]:
    content: dict[str, Any] = {"folder": str(place.path), "done": place.done}
    for name in ("experiment", "result", "error"):
        path = place.path / f"{name}.json"
        if path.exists():
            content[name] = read_json(path)
    content["epochs"] = [{key: v if v == v else None for key, v in epoch.items()} for epoch in place.metrics()]
    return content
