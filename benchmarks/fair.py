"""Every method under one recipe, paired by seed: ResNet-20 on CIFAR-10, 200 epochs, five sparsities.

    python benchmarks/fair.py --root DIR --out results/fair_resnet20.jsonl --minutes 9 --compile
    python benchmarks/fair.py --out results/fair_resnet20.jsonl --show            # the table of what is there

DIR holds cifar-10-batches-bin. A line a run is added to the file, and a run that has a line is not run again, so that
many short sessions on a borrowed GPU make one table. The most wanted runs come first: seed by seed, high sparsities
before low ones. No group of runs is begun that would not end within `--minutes`. Runs are `prospr run`'s own; the line
has the experiment, so `prospr run` makes any of them again. Without a GPU it is a small version on the embedded digits.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path

import torch
from harness import machine

from prospr.lab.experiment import DENSE, Experiment, Training
from prospr.lab.grid import changed
from prospr.lab.results import Row, load, means
from prospr.lab.run import Options, choose_device, run_many
from prospr.lab.show import show_table

BALANCED = {"scope": "balanced", "rounds": 20, "redraw": True}
ARMS: dict[str, tuple[str, dict]] = {
    "dense": (DENSE, {}),
    "snip": ("snip", {}),
    "synflow": ("synflow", {}),
    "ntk-sap": ("ntk-sap", {}),
    "prospr, balanced, redrawn": ("prospr", BALANCED),
    "prospr, balanced, redrawn, M=10": ("prospr", {**BALANCED, "steps": 10}),
    "snip, balanced, redrawn": ("snip", {**BALANCED, "rounds": 60}),
    "random, balanced": ("random", {"scope": "balanced", "rounds": 100, "redraw": True}),
    "erk": ("erk", {}),
    "grasp": ("grasp", {}),
    "force": ("force", {}),
    "prospr": ("prospr", {}),
    "prospr, lr 0.1": ("prospr", {"inner_lr": 0.1}),
    "prospr-published": ("prospr-published", {}),
    "prospr-iterative": ("prospr-iterative", {}),
    "iter-snip": ("iter-snip", {}),
    "magnitude": ("magnitude", {}),
    "random": ("random", {}),
    "prospr, balanced, redrawn: shuffled": ("prospr", {**BALANCED, "check": "shuffled"}),
    "prospr, balanced, redrawn: other weights": ("prospr", {**BALANCED, "check": "redrawn"}),
}


def main(words: list[str] | None = None) -> None:
    args = _arguments(words)
    out = Path(args.out)
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    if not args.show:
        lines += measure(args, {line["run"] for line in lines}, out)
    print(table(lines))


def wanted(args) -> list[tuple[str, Experiment]]:
    """What is to be run, the most wanted first."""
    found: dict[str, tuple[str, Experiment]] = {}
    for seed in args.seeds:
        for sparsity in args.sparsities:
            for arm in args.arms:
                method, settings = ARMS[arm]
                base = Experiment(args.dataset, args.network, seed=seed, training=Training(epochs=args.epochs))
                given = {"method": method, "sparsity": sparsity, "score_batch_size": args.score_batch, **settings}
                one = changed(base, **given)
                found.setdefault(one.identity, (arm, one))
    return list(found.values())


def measure(args, done: set[str], out: Path) -> list[dict]:
    """Run what has no line yet, as far as the time goes; the new lines."""
    device = choose_device(None)
    print(f"torch {torch.__version__}, {machine(device.type)}", flush=True)
    left = [(arm, one) for arm, one in wanted(args) if one.identity not in done]
    began, lines, longest = time.perf_counter(), [], args.group_minutes * 60
    options = Options(root=args.root, save_every=1e9, compile=args.compile)
    for first in range(0, len(left), args.together):
        spent = time.perf_counter() - began
        if spent + longest > args.minutes * 60:
            print(f"{len(left) - first} runs are left; a group takes {longest:.0f} s, and {spent:.0f} are spent")
            break
        group, start = left[first : first + args.together], time.perf_counter()
        run_many([one for _, one in group], args.folder, device, tell(start), together=args.together, options=options)
        longest = max(longest, time.perf_counter() - start) if first else time.perf_counter() - start
        mine = {one.identity: (arm, one) for arm, one in group}
        new = [
            {**asdict(row), "arm": mine[row.run][0], "experiment": mine[row.run][1].to_dict(), "folder": ""}
            for row in load(args.folder)
            if row.run in mine
        ]
        with out.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in new)
        lines += new
        for line in new:
            result = line["error"] or f"{100 * line['accuracy']:.2f} %"
            print(f"{line['arm']:<42}{100 * line['sparsity']:>6.1f} %  seed {line['seed']}  {result}", flush=True)
    return lines


def tell(start: float):
    """Print how a group goes, at most every twenty seconds."""
    last = start

    def told(done: float, total: int, text: str) -> None:
        nonlocal last
        if time.perf_counter() - last > 20:
            last = time.perf_counter()
            print(f"  [{last - start:.0f} s] {done:.2f} of {total} runs; {text}", flush=True)

    return told


def table(lines: list[dict]) -> str:
    """Mean, deviation and number of runs of every arm and sparsity, and the difference to SNIP, paired by seed."""
    names = {one.name for one in fields(Row)}
    known = [{key: value for key, value in line.items() if key in names} for line in lines]
    rows = [
        Row(**{**one, "method": line["arm"], "check": "", "setup": ""}) for one, line in zip(known, lines, strict=True)
    ]
    if not rows:
        return "nothing is measured yet"
    baseline = "snip" if any(row.method == "snip" for row in rows) else None
    shown = []
    for row in means(rows, baseline):
        said = {"arm": row["method"], "sparsity %": "-" if row["sparsity"] is None else f"{100 * row['sparsity']:g}"}
        said |= {"mean %": _percent(row["mean"]), "sd": _percent(row["sd"]), "n": row["n"], "failed": row["failed"]}
        if baseline is not None:
            said["minus snip"] = "" if row["difference"] is None else f"{100 * row['difference']:+.2f}"
            said["verdict"] = row["verdict"] or ""
        shown.append(said)
    return show_table(shown)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"


def _arguments(words: list[str] | None) -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--arms", nargs="+", default=list(ARMS) if gpu else ["dense", "snip"], choices=ARMS)
    shares = [0.982, 0.956, 0.893, 0.972, 0.738] if gpu else [0.8]
    parser.add_argument("--sparsities", nargs="+", type=float, default=shares)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2] if gpu else [0])
    parser.add_argument("--epochs", type=int, default=200 if gpu else 2)
    parser.add_argument("--dataset", default="cifar10" if gpu else "digits")
    parser.add_argument("--network", default="resnet20" if gpu else "small_convnet")
    parser.add_argument("--score-batch", type=int, default=512 if gpu else 128)
    parser.add_argument("--root", help="where data sets lie")
    parser.add_argument("--folder", default="runs/fair", help="where the runs lie")
    parser.add_argument("--together", type=int, default=8, help="on a GPU, runs trained side by side")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no group that would end later")
    parser.add_argument("--group-minutes", type=float, default=0.0, help="what the first group is thought to take")
    parser.add_argument("--out", default="fair.jsonl", help="a line of JSON a run is added to this file")
    parser.add_argument("--show", action="store_true", help="print the table of the file and run nothing")
    return parser.parse_args(sys.argv[1:] if words is None else words)


if __name__ == "__main__":
    main()
