"""Every method under one recipe, paired by seed, on CIFAR-10 at full length. `--table` says of which network:

resnet20    single weights of ResNet-20, five sparsities
resnet20b   as resnet20, but the network and recipe that NTK-SAP's figures are of: 1x1 shortcuts; 160 epochs, batch 128
vgg16       single weights of VGG-16, three sparsities
structured  whole channels of VGG-19, taken out before the training: 80, 90 and 95 % of the parameters

    python benchmarks/fair.py --root DIR --out results/fair_resnet20.jsonl --minutes 9 --compile
    python benchmarks/fair.py --out results/fair_resnet20.jsonl --show            # the table; --baseline prospr
    python benchmarks/fair.py --out results/fair_resnet20.jsonl --show --densities --arms snip erk
    python benchmarks/fair.py --out results/fair_resnet20.jsonl --show --figure docs/images/fair_resnet20.png
    python benchmarks/fair.py --root DIR --out tried.jsonl --split validation --epochs 30     # to choose settings by
    python benchmarks/fair.py --root DIR --plan FILE --minutes 25 --scorers 12 --compile      # one session, many wishes
    python benchmarks/fair.py --plan benchmarks/fair.plan --show                  # what is left of the whole benchmark

DIR holds cifar-10-batches-bin. A line a run is added to the file, and a run that has a line is not run again, so that
many short sessions on a borrowed GPU make one table. The most wanted runs come first: seed by seed, high sparsities
before low ones. No group of runs is begun that would not end within `--minutes`, by what such runs in the file took,
and one that turns out to end later is called off, for the sake of those behind it. A plan has such wishes in a line
each, `--table vgg16 --arms snip --seeds 1 --out vgg.jsonl`, words added to those of the command; all are scored first,
then trained in that order. Runs are `prospr run`'s own; the line has the experiment, so `prospr run` makes any of them
anew. The structured table's networks have a shape each, and to compile nine takes minutes: with `--compile` and several
`--scorers` that is done in processes of their own while other groups train, and without them not at all. Without a GPU
it is a small version on the embedded digits, unless `--full` says otherwise.
"""

import argparse
import contextlib
import json
import math
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from fair_show import densities, draw, smaller, table
from harness import machine
from torch import multiprocessing

from prospr.lab.experiment import DENSE, Data, Experiment, Training
from prospr.lab.grid import changed
from prospr.lab.results import Row, load
from prospr.lab.run import FAILURES, Options, RunResult, choose_device, run_many
from prospr.lab.runs.files import locked
from prospr.lab.runs.folder import RunFolder
from prospr.lab.runs.making import Loader
from prospr.lab.runs.work import Work
from prospr.lab.show import show_table
from prospr.lab.train import trainer_for

BALANCED = {"scope": "balanced", "rounds": 20, "redraw": True}
ARMS: dict[str, tuple[str, dict]] = {
    "dense": (DENSE, {}),
    "prospr": ("prospr", {**BALANCED, "scope": "mapped"}),  # its defaults, said
    "prospr, balanced": ("prospr", BALANCED),
    "snip": ("snip", {}),
    "ntk-sap": ("ntk-sap", {}),
    "synflow": ("synflow", {}),
    "grasp": ("grasp", {}),
    "force": ("force", {}),
    "random, balanced": ("random", {**BALANCED, "rounds": 100}),
    "prospr, one shot": ("prospr-one-shot", {}),
    "snip, balanced, redrawn": ("snip", {**BALANCED, "rounds": 60}),
    "prospr, M=10": ("prospr", {**BALANCED, "steps": 10}),
    "erk": ("erk", {}),
    "iter-snip": ("iter-snip", {}),
    "prospr-iterative": ("prospr-iterative", {}),
    "prospr, one shot, lr 0.1": ("prospr-one-shot", {"inner_lr": 0.1}),
    "prospr-published": ("prospr-published", {}),
    "magnitude": ("magnitude", {}),
    "random": ("random", {}),
    "prospr: shuffled": ("prospr", {**BALANCED, "check": "shuffled"}),
    "prospr: other weights": ("prospr", {**BALANCED, "check": "redrawn"}),
    "prospr, focused": ("prospr", {**BALANCED, "scope": "focused"}),
    "prospr, focused, not redrawn": ("prospr", {**BALANCED, "scope": "focused", "redraw": False}),
    "random, focused": ("random", {**BALANCED, "scope": "focused", "rounds": 100}),
    "prospr, spread": ("prospr", {**BALANCED, "scope": "spread"}),
    "random, spread": ("random", {**BALANCED, "scope": "spread", "rounds": 100}),
    "prospr, 4 rounds, mapped": ("prospr", {**BALANCED, "rounds": 4, "scope": "mapped"}),
    "prospr, tapered": ("prospr", {**BALANCED, "scope": "tapered"}),
    "prospr, global": ("prospr", {**BALANCED, "scope": "global"}),
    "prospr, 4 rounds": ("prospr", {**BALANCED, "rounds": 4}),
    "prospr, 4 rounds, tapered": ("prospr", {**BALANCED, "rounds": 4, "scope": "tapered"}),
}

# ResNet-20's maps have 64 pixels or more, and CIFAR-10's classes are equal: "mapped" makes the masks of "balanced", as
# which its lines were measured
EVEN = {**ARMS, "prospr": ARMS["prospr, balanced"], "prospr, mapped": ARMS["prospr"]}
del EVEN["prospr, balanced"]
CHECKS = [arm for arm, (_, settings) in ARMS.items() if "check" in settings]
CHANNELS = {"granularity": "channel", "shrink": True}
STRUCTURED: dict[str, tuple[str, dict]] = {
    "dense": (DENSE, {}),
    "3sp": ("3sp", CHANNELS),
    "prospr, channels": ("prospr", {**CHANNELS, "scope": "balanced"}),  # its default, said
    "random, channels": ("random", CHANNELS),
    "3sp + rescale": ("3sp", {**CHANNELS, "weights": "rescale"}),
    "3sp + reinit": ("3sp", {**CHANNELS, "weights": "redraw"}),
    "prospr, channels + rescale": ("prospr", {**CHANNELS, "scope": "balanced", "weights": "rescale"}),
    "prospr, channels, global": ("prospr", {**CHANNELS, "scope": "global"}),
    "prospr, channels, global + rescale": ("prospr", {**CHANNELS, "scope": "global", "weights": "rescale"}),
}


@dataclass(frozen=True)
class Table:
    """What is compared; the most wanted first."""

    network: str
    sparsities: tuple[float, ...]
    arms: dict[str, tuple[str, dict]]
    baseline: str
    recipe: str = "auto"
    epochs: int = 200
    settings: dict[str, Any] = field(default_factory=dict)  # of the network
    alike: bool = True  # whether its networks have one shape, so that they are compiled once


FIVE = (0.982, 0.956, 0.893, 0.972, 0.738)
TABLES = {
    "resnet20": Table("resnet20", FIVE, EVEN, "snip"),
    "resnet20b": Table("resnet20", FIVE, EVEN, "snip", "missing-the-mark-cifar", 160, {"shortcut": "B"}),
    "vgg16": Table("vgg16", (0.982, 0.956, 0.893), {k: v for k, v in ARMS.items() if k not in CHECKS}, "snip"),
    "structured": Table("vgg19", (0.95, 0.9, 0.8), STRUCTURED, "3sp", alike=False),
}
SIZES = ("parameters", "trained_parameters", "flops", "trained_flops", "image", "num_classes")


def main(words: list[str] | None = None) -> None:
    words = sys.argv[1:] if words is None else words
    args = _arguments(words)
    if args.plan:
        planned = [shlex.split(line, comments=True) for line in Path(args.plan).read_text().splitlines()]
        whole = ["--full"] if args.show else []
        wishes = [_arguments([*words, *whole, *line]) for line in planned if line]
        print(show_table(progress(wishes))) if args.show else measure(args, wishes)
        return
    if not args.show:
        measure(args, [args])
    lines = measured(args)
    if args.figure:
        draw(lines, args.baseline, Path(args.figure), args.arms)
    if args.densities:
        print(densities(lines, args.arms, args.sparsities))
    else:
        print(table(lines, args.baseline))


def wanted(args) -> list[tuple[str, Experiment]]:
    """What is to be run, the most wanted first."""
    whole = TABLES[args.table]
    sparsities = args.sparsities or (whole.sparsities if args.full else [0.8])
    arms = args.arms or (whole.arms if args.full else [DENSE, whole.baseline])
    data = Data(validation=0.1 if args.split == "validation" else 0.0)
    training = Training(epochs=args.epochs)
    like = {"recipe": whole.recipe, "settings": whole.settings} if args.network == whole.network else {}
    found: dict[str, tuple[str, Experiment]] = {}
    for seed in args.seeds:
        base = Experiment(args.dataset, args.network, seed=seed, data=data, training=training, **like)
        for sparsity in sparsities:
            for arm in arms:
                method, settings = whole.arms[arm]
                given = {"method": method, "sparsity": sparsity, "score_batch_size": args.score_batch, **settings}
                one = changed(base, **given)
                found.setdefault(one.identity, (arm, one))
    return list(found.values())


def measured(args) -> list[dict]:
    """The lines of the table that are in the file."""
    out = Path(args.out)
    every = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return [line for line in every if line.get("table", "resnet20") == args.table]


def missing(wishes: Sequence[argparse.Namespace]) -> Iterator[tuple[argparse.Namespace, str, Experiment]]:
    """The runs that have no line yet, each once, in the order of the wishes."""
    known: set[str] = set()
    for wish in wishes:
        known |= {line["run"] for line in measured(wish)}
        for arm, one in wanted(wish):
            if one.identity not in known:
                known.add(one.identity)
                yield wish, arm, one


def progress(wishes: Sequence[argparse.Namespace]) -> list[dict[str, str]]:
    """How many runs of each wish have no line yet, and about how long they take side by side, scoring left out."""
    left, rows = Counter(id(wish) for wish, _, _ in missing(wishes)), []
    for wish in wishes:
        each, arms = seconds_a_run(wish), shlex.join(wish.arms or ["all arms"])
        minutes = f"{left[id(wish)] * each / 60:.0f}" if each else "?"
        named = f"{wish.table}, {wish.split}, {wish.epochs} epochs: {arms}"
        rows.append({"left": f"{left[id(wish)]}", "of": f"{len(wanted(wish))}", "minutes": minutes, "": named})
    every = {one.identity for wish in wishes for _, one in wanted(wish)}
    return [*rows, {"left": f"{left.total()}", "of": f"{len(every)}", "minutes": "", "": "all"}]


def seconds_a_run(wish) -> float:
    """What a run of this kind took, by the last line of one; 0 where there is none. Runs side by side share a time."""
    alike = [
        line["train_seconds"]
        for line in measured(wish)
        if line["train_seconds"]
        and line["split"] == wish.split
        and line["network"] == wish.network
        and line["dataset"] == wish.dataset
        and line["experiment"]["training"]["epochs"] == wish.epochs
    ]
    return alike[-1] / alike.count(alike[-1]) if alike else 0.0


def measure(args, wishes: Sequence[argparse.Namespace]) -> None:
    """Run what has no line yet, as far as the time goes, wish by wish; a line a run is added to the wish's file."""
    device = choose_device(None)
    print(f"torch {torch.__version__}, {machine(device.type)}", flush=True)
    groups = grouped(list(missing(wishes)))
    began, took = time.perf_counter(), {}
    ahead, scored, compiling = len(groups) if args.plan else args.ahead, 0, None
    for place, group in enumerate(groups):
        wish, experiments = group[0][0], [one for _, _, one in group]
        spent, start = time.perf_counter() - began, time.perf_counter()
        takes = len(group) * (took.get(_kind(wish)) or seconds_a_run(wish)) or wish.group_minutes * 60
        if spent + takes > args.minutes * 60:
            print(f"{len(group)} runs are left out; they take {takes:.0f} s, and {spent:.0f} are spent", flush=True)
            continue
        if args.scorers > 1 and place >= scored:
            scored = place + ahead
            score_first([one for here in groups[place:scored] for _, _, one in here], args)
            print(f"  [{time.perf_counter() - start:.0f} s] scored by {args.scorers} processes", flush=True)
            start = time.perf_counter() if args.plan else start
            odd = [one for here in groups[place:scored] for w, _, one in here if not TABLES[w.table].alike]
            compiling = compile_beside(odd, args) if args.compile and odd else None
        alike = TABLES[wish.table].alike
        if not alike and compiling is not None:
            compiling.wait()
            print(f"  [{time.perf_counter() - start:.0f} s] compiled by processes of their own", flush=True)
        told = tell(start, wish.split == "test", began + args.minutes * 60)
        compiled = args.compile and (alike or compiling is not None)
        options = Options(root=args.root, save_every=1e9, compile=compiled)
        try:
            results = run_many(experiments, args.folder, device, told, together=wish.together, options=options)
        except CalledOff as late:
            took[_kind(wish)] = late.seconds / len(group)
            print(f"{len(group)} runs are called off: they would take {late.seconds:.0f} s", flush=True)
            continue
        took[_kind(wish)] = (time.perf_counter() - start) / len(group)  # the first of a kind compiles too, others not
        rows = {row.run: row for row in load(args.folder)}
        for (wish, arm, one), result in zip(group, results, strict=True):
            if one.identity not in rows:
                continue  # another process is at work on it
            line = {"table": wish.table, "split": wish.split, **line_of(arm, rows[one.identity], result)}
            with Path(wish.out).open("a") as file:
                file.write(json.dumps(line) + "\n")
            reached = line["error"] or f"{100 * line['accuracy']:.2f} %{smaller(line['sizes'])}"
            print(f"{arm:<42}{100 * line['sparsity']:>6.1f} %  seed {line['seed']}  {reached}", flush=True)


def grouped(left: Sequence[tuple[argparse.Namespace, str, Experiment]]) -> list[list]:
    """What is trained side by side: runs next to each other that are alike in kind, `--together` of them."""
    groups: list[list] = []
    for run in left:
        wish = run[0]
        if not groups or _kind(groups[-1][0][0]) != _kind(wish) or len(groups[-1]) == wish.together:
            groups.append([])
        groups[-1].append(run)
    return groups


def _kind(wish) -> tuple:
    return wish.table, wish.split, wish.epochs, wish.network, wish.dataset, wish.together


def score_first(group: Sequence[Experiment], args) -> None:
    """Score the group's runs in processes side by side; `run_many` finds their masks, and the errors once more."""
    context = multiprocessing.get_context("spawn")
    todo = [one for one in group if one.method != DENSE and not RunFolder(one, args.folder).masks.exists()]
    if not todo:
        return
    with context.Pool(min(args.scorers, len(todo))) as pool:
        pool.map(partial(_prepare, folder=args.folder, root=args.root), todo, chunksize=1)


def compile_beside(runs: Sequence[Experiment], args) -> AsyncResult:
    """Begin to compile what these runs train, in processes side by side, and return at once. What they leave on the
    disk is found by the process that trains."""
    pool = multiprocessing.get_context("spawn").Pool(min(args.scorers, len(runs)))
    found = pool.map_async(partial(_prepare, folder=args.folder, root=args.root, compile=True), runs, chunksize=1)
    pool.close()
    return found


def _prepare(one: Experiment, folder: str, root: str | None, compile: bool = False) -> None:
    torch.set_num_threads(1)
    place = RunFolder(one, folder)
    place.path.mkdir(parents=True, exist_ok=True)
    with locked(place.lock, wait=True), contextlib.suppress(*FAILURES):
        work = Work(place, Loader(choose_device(None), root), Options(root=root))
        work.prepare()
        if compile:
            with torch._inductor.config.patch(compile_threads=1):  # its own processes would be sixteen times too many
                trainer_for([work.run], "graph", compile=True)


def line_of(arm: str, row: Row, result: RunResult) -> dict:
    """A run as it is written down. Where images were held out, its figures are of them and none are of the test."""
    one = result.experiment
    line = {**asdict(row), "arm": arm, "experiment": one.to_dict(), "folder": ""}
    line["sizes"] = {name: result.sizes[name] for name in SIZES if name in result.sizes}
    if one.data.validation:
        line |= {"accuracy": result.epochs[-1]["validation"] if row.error is None else None, "loss": None}
    return line


class CalledOff(BaseException):
    """A group of runs would end too late, after so many seconds. No `Exception`: those are failures of one run."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


def tell(start: float, results: bool = True, end: float = math.inf):
    """Print how a group goes, every twenty seconds, and call it off where it would not be done at `end`; without
    `results`, no accuracy on the test images."""
    last, before = start, 0.0

    def told(done: float, total: int, text: str) -> None:
        nonlocal last, before
        now = time.perf_counter()
        if now - last > 20:
            print(f"  [{now - start:.0f} s] {done:.2f} of {total} runs{f'; {text}' if results else ''}", flush=True)
            if before and done > before:  # from the second time on: to compile and to capture comes before the first
                done_at = now + (total - done) * (now - last) / (done - before)
                if done_at > end:
                    raise CalledOff(done_at - start)
            last, before = now, done

    return told


def _arguments(words: list[str]) -> argparse.Namespace:
    gpu = torch.cuda.is_available() or "--full" in words
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n    python")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", default="resnet20", choices=TABLES)
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="by default all of the table")
    parser.add_argument("--sparsities", nargs="+", type=float, help="by default those of the table")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2] if gpu else [0])
    parser.add_argument("--epochs", type=int, help="by default the table's; 2 without a GPU")
    parser.add_argument(
        "--split",
        default="test",
        choices=("test", "validation"),
        help="judge by the test images, or by a tenth of the training images that is not trained on",
    )
    parser.add_argument("--dataset", default="cifar10" if gpu else "digits")
    parser.add_argument("--network", help="by default the table's")
    parser.add_argument("--score-batch", type=int, default=512 if gpu else 128)
    parser.add_argument("--root", help="where data sets lie")
    parser.add_argument("--folder", default="runs/fair", help="where the runs lie")
    parser.add_argument("--together", type=int, default=8, help="on a GPU, runs trained side by side")
    parser.add_argument("--scorers", type=int, default=1, help="processes that score a group's runs before it trains")
    parser.add_argument("--ahead", type=int, default=1, help="how many groups they score at once")
    parser.add_argument("--plan", help="a file of wishes, a line each")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no group that would end later")
    parser.add_argument(
        "--group-minutes", type=float, default=0.0, help="what a first group takes, where the file has none like it"
    )
    parser.add_argument("--out", default="fair.jsonl", help="a line of JSON a run is added to this file")
    parser.add_argument("--full", action="store_true", default=gpu, help="the whole table; the default on a GPU")
    parser.add_argument(
        "--show", action="store_true", help="print the table of the file, or what is left of --plan, and run nothing"
    )
    parser.add_argument("--baseline", metavar="ARM", help="what the others are compared with; by default the table's")
    parser.add_argument("--figure", help="draw what is above the baseline, and by how much, into this file")
    parser.add_argument(
        "--densities",
        action="store_true",
        help="with --show: how many weights the layers keep, of --arms and --sparsities where given",
    )
    args = parser.parse_args(words)
    args.network = args.network or (TABLES[args.table].network if gpu else "small_convnet")
    args.epochs = args.epochs or (TABLES[args.table].epochs if gpu else 2)
    args.baseline = args.baseline or TABLES[args.table].baseline
    unknown = [arm for arm in (*(args.arms or ()), args.baseline) if arm not in TABLES[args.table].arms]
    if unknown:
        parser.error(
            f"{unknown[0]!r} is no arm: table {args.table} has {', '.join(map(repr, TABLES[args.table].arms))}"
        )
    if args.densities and not args.show:
        parser.error("--densities goes with --show")
    return args


if __name__ == "__main__":
    main()
