"""What was measured behind the tables of README and docs that have a layout of their own: a function a table.

The comment above such a table, `<!-- results/metagrad_h200.json as=metagrad -->`, names the file and the function. It
is called for every cell and gives the numbers the cell should have, in their order; None where it tells no measurement,
such as a goal or the paper's figure.
"""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, stdev

import prospr
from prospr.lab.models import build

ROOT = Path(__file__).parent.parent
NETWORKS = {f"{name}-{size}": f"{name}{size}".lower() for name in ("ResNet", "VGG") for size in (16, 18, 19, 20, 50)}


@dataclass(frozen=True)
class Cell:
    """A cell of a table: the labels of its row and column, its text, the labels of the rows above its own, and the
    other cells of its row by their columns; the table's first word is in `corner`."""

    row: str
    column: str
    text: str
    above: Sequence[str]
    beside: Mapping[str, str]
    corner: str

    @property
    def network(self) -> str:
        """The one that the row names, or the last row above that names one."""
        return next(NETWORKS[name] for label in (self.row, *reversed(self.above)) for name in NETWORKS if name in label)

    def seeds(self, found: Sequence[float]) -> list[float]:
        """The first seeds, as many as the cell tells, and their mean where one follows behind a colon."""
        each, _, mean = self.text.partition(":")
        first = list(found[: each.count(",") + 1])
        return [*first, fmean(first)] if mean else first


@cache
def load(path: str) -> list[dict]:
    """The rows of a file of results/, each with what is said of all that were measured with it."""
    text = (ROOT / path).read_text()
    if path.endswith(".csv"):
        return [{key: _value(value) for key, value in row.items()} for row in csv.DictReader(text.splitlines())]
    if path.endswith(".jsonl"):
        return [json.loads(line) for line in text.splitlines()]
    found = json.loads(text)
    return [
        {**{key: value for key, value in run.items() if isinstance(value, (str, float))}, **row}
        for run in found.get("runs") or found.get("speed") or [found]
        for row in run["rows"]
    ]


def _value(text: str) -> float | str | None:
    try:
        return float(text)
    except ValueError:
        return text or None


def having(rows: Sequence[dict], **fields) -> list[dict]:
    """Rows with these fields, in the order of seeds."""
    return sorted((row for row in rows if fields.items() <= row.items()), key=lambda row: row.get("seed", 0))


def shares(rows: Sequence[dict], **fields) -> list[float]:
    """Accuracies in percent."""
    return [100 * row["accuracy"] for row in having(rows, **fields)]


def first_number(label: str) -> float:
    found = re.search(r"\d[\d.]*", label)
    assert found, label
    return float(found[0])


# ------------------------------------------------------------------------------------------------------ findings


def thinnest(rows, cell: Cell):
    (found,) = having(rows, network=cell.network, sparsity=first_number(cell.column) / 100)
    assert found["empty"] == 0
    assert found["layer"] in ("conv1.weight", "features.0.weight")
    return [found["fewest"]]


def narrower(rows, cell: Cell):
    heading = next(label for label in (cell.row, *reversed(cell.above)) if "sparse" in label)
    found = having(rows, sparsity=first_number(heading) / 100, channels=first_number(cell.column) / 100)
    assert len(found) == 10
    return [fmean(shares(found))] if cell.row != heading else [fmean(row["weights_each"] for row in found)]


SMALL = {
    "SNIP": ("snip", "global"),
    "SNIP in 20 rounds, spread, 128 images a round": ("snip-20", "spread"),
    "SNIP in 20 rounds, spread, 10,240 images a round": ("snip-20-mb", "spread"),
    "random, balanced": ("random", "balanced"),
    "random, as many weights in every layer": ("drawn", "global"),
    "random, fewer in large layers (n^-0.3)": ("drawn-early", "global"),
    "random, more in large layers (n^0.3)": ("drawn-late", "global"),
    "ProsPr (default)": ("prospr", "balanced"),
    "ProsPr (default: balanced)": ("prospr", "balanced"),
    "ProsPr, focused": ("prospr", "focused"),
    "ProsPr, 20 rounds, balanced (default)": ("prospr", "balanced"),
    "ProsPr, 20 rounds, tapered": ("prospr", "tapered"),
    "ProsPr, 20 rounds, spread": ("prospr", "spread"),
    "ProsPr, not redrawn, pruned weights may come back": ("prospr-recover", "balanced"),
    "ProsPr, redrawn, pruned weights may come back": ("prospr-redrawn-recover", "balanced"),
    "ProsPr, 4 rounds, balanced": ("prospr-4", "balanced"),
    "ProsPr, 4 rounds, tapered": ("prospr-4", "tapered"),
    "ProsPr, 20 rounds, balanced, its mask shuffled within layers": ("prospr-shuffled", "balanced"),
    "its mask shuffled within layers": ("prospr-shuffled", "balanced"),
}


def _small(rows, label: str, network: str, sparsity: float, epochs: int) -> list[float]:
    method, scope = SMALL[label]
    return shares(rows, network=network, method=method, scope=scope, sparsity=sparsity, epochs=epochs)


def small_by_seed(rows, cell: Cell):
    found = _small(rows, cell.row, "resnet20", 0.982, 10)
    if cell.column.startswith(("mean", "of all")):
        return [fmean(found[:4] if cell.column == "mean of 0 to 3" else found)]
    return [found[int(cell.column.removeprefix("seed "))]]


def small_networks(rows, cell: Cell):
    if cell.column.startswith("VGG-16"):
        return cell.seeds(_small(rows, cell.row, "vgg16", 0.96, 8))
    return cell.seeds(_small(rows, cell.row, "resnet20", 0.982, 10))


def small_longer(rows, cell: Cell):
    return cell.seeds(_small(rows, cell.row, "resnet20", 0.982, 40))


def small_mapped(rows, cell: Cell):
    method = "snip" if cell.row == "SNIP" else {"20 rounds": "prospr", "4 rounds": "prospr-4"}[cell.column]
    scope = next((name for name in ("balanced", "tapered", "mapped") if name in cell.row), "global")
    return cell.seeds(shares(rows, network="vgg16", method=method, scope=scope, sparsity=0.96))


def stability(rows, cell: Cell):
    key = {"in float32": "float32", "weights rounded to 10 bits": "ten bits", "other images": "other images"}
    name, batch = re.sub(r",? (mean of ten )?batch(es)?( of \d+)?", r", \1batches", cell.row), cell.row.split()[-1]
    wanted = {
        "SNIP, batches": "snip",
        "SNIP, mean of ten batches": "snip, mean of ten batches",
        "ProsPr, one shot, M = 1, batches": "prospr, one shot, M = 1",
        "ProsPr, one shot, M = 3, batches": "prospr, one shot, M = 3",
    }
    (found,) = having(rows, score=wanted[name], batch=int(batch))
    return [found[key[cell.column]]]


def brighter(rows, cell: Cell):
    masks = {
        "SNIP": "snip",
        "ProsPr, one shot": "prospr-one-shot",
        "Iter-SNIP, 60 rounds": "iter-snip",
        "ProsPr, default": "prospr",
    }
    (found,) = having(rows, mask=masks[cell.row])
    return [found["kept too" if cell.column == "kept too" else "chance"]]


def concentration(rows, cell: Cell):
    rounds = int(first_number(cell.row))
    scope = "tapered" if "tapered" in cell.row else "mapped"  # of ResNet-20, which is balanced
    mask = "prospr" if cell.column == "as scored" else "prospr, shuffled"
    (found,) = having(rows, mask=mask, sparsity=0.982, rounds=rounds, scope=scope)
    return found["stages"][2]


def structured(rows, cell: Cell):
    if any(label.startswith("*the paper's*") for label in (cell.row, *cell.above)):
        return None
    arm = {"ProsPr, balanced (default)": "prospr, channels", "3SP": "3sp", "random": "random, channels"}[cell.row]
    (found,) = having(rows, arm=arm, sparsity=first_number(cell.column) / 100, seed=0)
    sizes = found["sizes"]
    return [100 * found["accuracy"], 100 * sizes["trained_flops"] / sizes["flops"]]


def scopes_of_channels(rows, cell: Cell):
    if "90 and 95 %" in cell.row:
        arm = "prospr, channels" + (", global" if cell.column == "global" else "")
        arm += " + rescale" if "rescaled" in cell.row else ""
        choice = load("results/choice_structured.jsonl")
        return [share for sparsity in (0.9, 0.95) for share in shares(choice, arm=arm, sparsity=sparsity)]
    method = cell.row.removesuffix(" (100 rounds)").rpartition(" ")[2].lower()
    found = shares(rows, method=method, scope=cell.column, weights="rescale", sparsity=0.95)
    assert len(found) == 3
    return [fmean(found), stdev(found)]


CHOSEN = {
    "ProsPr, 20 rounds, balanced (default)": {"vgg16": "prospr, balanced", "resnet20": "prospr"},
    "ProsPr, 20 rounds, balanced (the default so far)": {"vgg16": "prospr, balanced", "resnet20": "prospr"},
    "ProsPr, 20 rounds, mapped": {"vgg16": "prospr"},
    "ProsPr, 4 rounds, balanced": dict.fromkeys(("vgg16", "resnet20"), "prospr, 4 rounds"),
    "ProsPr, 4 rounds, tapered": dict.fromkeys(("vgg16", "resnet20"), "prospr, 4 rounds, tapered"),
    "ProsPr, 4 rounds, mapped (on ResNet-20: balanced)": {
        "vgg16": "prospr, 4 rounds, mapped",
        "resnet20": "prospr, 4 rounds",
    },
    "SNIP": {"vgg16": "snip"},
}


def _chosen(cell: Cell, kind: str):
    if cell.text == "the same masks":
        return None
    network, _, share = cell.column.partition(", ")
    network = NETWORKS[network]
    rows = load(f"results/choice_{kind}_{network}.jsonl")
    return cell.seeds(shares(rows, arm=CHOSEN[cell.row][network], sparsity=first_number(share) / 100))


def choice_of_rounds(_, cell: Cell):
    return _chosen(cell, "rounds")


def choice_of_maps(_, cell: Cell):
    return _chosen(cell, "maps")


ARMS = {
    "ProsPr (default)": "prospr",
    "random, ERK's layers": "erk",
    "ProsPr, 20 plain rounds": "prospr-iterative",
    "ProsPr, one shot, exact, lr from curvature": "prospr, one shot",
    "ProsPr, one shot, exact, lr 0.1 (the training's)": "prospr, one shot, lr 0.1",
    "random, the same share of every layer": "random",
    "ProsPr as its code has it (lr 0.5, momentum 0.9, first step detached)": "prospr-published",
}


@cache
def _sizes() -> dict[str, int]:
    return {name: weight.numel() for name, weight in prospr.prunable(build("resnet20")).items()}


def every_method(rows, cell: Cell):
    runs = having(rows, arm=ARMS.get(cell.row, cell.row.lower()), sparsity=0.982)
    if cell.row == "magnitude":
        assert all("no path" in run["error"] for run in runs)
        return None
    if cell.column.startswith("accuracy"):
        found = shares(runs)
        return [*found, fmean(found)] if ":" in cell.text else found[:1]
    kept = [{name: round(share * _sizes()[name]) for name, share in run["layers"].items()} for run in runs]
    if cell.column.startswith("layers"):
        empty = [sum(count == 0 for count in one.values()) for one in kept]
        return sorted({min(empty), max(empty)}) if "to" in cell.text else empty[:1]
    stages = [[sum(n for name, n in one.items() if name.startswith(f"layer{k}.")) for one in kept] for k in (1, 2, 3)]
    return [counts[0] for counts in stages]


# -------------------------------------------------------------------------------------------------- measurements

ENGINES = {
    "ours, exact": "reverse",
    "the published code": "public",
    "one graph through all steps, with autograd": "unrolled",
}


def metagrad(rows, cell: Cell):
    if cell.row.startswith("goal"):
        return None
    exact = having(rows, network=cell.network, engine="reverse")
    if cell.column == "one step":
        steps = [row["step_ms"] for row in rows if row["network"] == cell.network and row["engine"] == "reverse"]
        return [fmean(steps), exact[0]["step_gib"]]
    if cell.column.startswith("memory"):
        times = sorted((row["peak_gib"] - row["trajectory_gib"]) / row["step_gib"] for row in exact)
        return [times[0], times[-1]] if "to" in cell.text else [times[-1]]
    steps = int(first_number(cell.column))
    if "graph" not in cell.column:
        (found,) = having(exact, steps=steps)
        return [found["steps_time"]]
    (found,) = having(rows, network=cell.network, engine="unrolled", steps=steps)
    if found["error"]:
        assert "out of memory" in cell.text
        (found,) = having(rows, network=cell.network, engine="unrolled", steps=3)
        numbers = [found["steps_time"], found["peak_gib"] / found["step_gib"]]
        return [3, *numbers] if "M = 3" in cell.text else None
    return [found["steps_time"], found["peak_gib"] / found["step_gib"]]


def metagrad_beside(rows, cell: Cell):
    found = having(rows, engine=ENGINES[cell.row], steps=int(first_number(cell.column)))
    return [*(row["steps_time"] for row in found), found[0]["peak_gib"]]


def smaller(rows, cell: Cell):
    """Dense time by shrunk time, `round_to=8`, captured."""
    if cell.column in ("parameters", "paper"):
        return None
    per_flop, precise = "FLOP" in cell.column and cell.column != "FLOPs", cell.column == "float32"
    found = [
        row
        for row in rows
        if row["network"] == cell.network and row["mode"] == "captured" and ("--per-flop" in row["command"]) == per_flop
        if ("float32" in row["machine"]) == precise
    ]
    (dense,) = having(found, variant="dense")
    found = having(found, variant="shrunk", round_to=8)
    gone = re.findall(r"\d+", cell.beside.get("parameters", cell.corner))
    chosen = [having(found, sparsity=int(share) / 100)[0] for share in gone]
    if cell.column == "FLOPs":
        return [dense["flops"] / row["flops"] for row in chosen]
    times = [row["train_ratio"] for row in chosen]
    return [*times, *(dense["flops"] / row["flops"] for row in chosen)] if "/" in cell.text else times


def training(rows, cell: Cell):
    way = {"plain": "plain", "graph": "graph", "graph over compiled": "graph+compile"}
    way = way.get(cell.column) or f"together={int(first_number(cell.column))}+compile"
    found = having(rows, network=cell.network, way=way)[-1]["ms_per_step"]  # the later command has all of them
    return [found] if "goal" not in cell.text else [found, first_number(cell.text.partition("goal")[2])]


def kernels(rows, cell: Cell):
    """Of eight streams: cuDNN's and ours."""
    inputs, outputs, side = map(int, re.findall(r"\d+", cell.row))
    name = {"forward": "forward", "gradient of the input": "input", "of the weight": "weight"}[cell.column]
    (found,) = (row for row in rows if (row["channels"], row["side"], row["pass"]) == ([inputs, outputs], side, name))
    return found["us"][2:]


def costs(rows, cell: Cell):
    (found,) = having(rows, method=cell.row)
    return [found["steps"] if cell.column == "training steps" else found["gib"] / found["step_gib"]]


def costs_in_short(rows, cell: Cell):
    """Of every method that the row names."""
    if "cost" not in cell.column:
        return None
    named = re.findall(r'"([\w-]+)"', cell.row)
    steps = [having(rows, method=name)[0]["steps"] for name in named]
    if "of which" in cell.text:
        return [*steps, steps[0] - 4 * 3]  # 4 training steps for each of 3
    if cell.text == "0":
        assert len({round(each, 1) for each in steps}) == 1
        return steps[:1]
    return steps


def inner_lr(rows, cell: Cell):
    name = re.sub(r" = |=", " ", cell.row.replace("M = ", "M=").removesuffix(" (literal)").removesuffix(" (M = 0)"))
    name = {"0.1": "lr 0.1", "SNIP (M 0)": "snip", "SNIP (M=0)": "snip"}.get(name, name).replace("M 10", "M=10")
    (found,) = having(rows, setting=name, sparsity=0.956 if "95.6" in cell.column else 0.982)
    if cell.column.startswith("validation"):
        return [100 * found["accuracy"]]
    if cell.column.startswith("thinnest"):
        return [100 * found["thinnest"]]
    return [found["lr" if cell.column == "lr" else "growth"]]


def demo(rows, cell: Cell):
    found = shares(rows, method=cell.row.lower(), check=None, sparsity=first_number(cell.column) / 100)
    assert len(found) == 3
    return [fmean(found), stdev(found)]


# --------------------------------------------------------------------------------------------------------- scale


def depth(rows, cell: Cell):
    """Time, peak or trajectory of the way that the row names, or the last row above that names one."""
    label = next(label for label in (cell.row, *reversed(cell.above)) if "=" in label)
    store = re.search(r'store="(\w+)"', label)
    found = having(rows, part="depth", store=store[1] if store else "first")
    (row,) = having(found, steps=int(cell.column))
    if cell.row.startswith("of it"):
        sets = row["steps"] if store and store[1] == "device" else 3 * row["steps"] ** 0.5
        return [sets * row["weights_gib"]]
    key = "peak_gib" if cell.row.startswith("peak") else "steps_time"
    if " s)" in cell.text:
        return [row[key], row["seconds"]]
    if "(" not in cell.text:
        return [row[key]]
    (longer,) = having(found, steps=1024)
    return [row[key], *([1024] if "1024" in cell.text else []), longer[key]]


def ranks(rows, cell: Cell):
    (row,) = having(rows, part="ranks", ranks=int(cell.column))
    return [row["steps_time" if cell.row == "time" else "peak_gib"]]
