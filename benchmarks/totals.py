"""Which share of all scores each layer of a network has, before anything is pruned.

    python benchmarks/totals.py --root DIR --methods snip --out results/totals_cpu.jsonl
    python benchmarks/totals.py --root DIR --width 16 --steps 0 100 --out results/totals_cpu.jsonl     # ProsPr, lr 0.02

DIR holds cifar-10-batches-bin. `--steps` are ProsPr's, with momentum 0.9, in place of `--methods`. A line of JSON a
score is added to the file of `--out`.
"""

import argparse
import json
from pathlib import Path

from harness import cifar_batches

import prospr
from prospr.lab.models import build


def main() -> None:
    args = _arguments()
    scores = {f"M = {steps}": prospr.ProsPr(steps=steps, lr=args.lr, momentum=0.9) for steps in args.steps or ()}
    settings = {} if args.width is None else {"width": args.width}
    for name, score in (scores or {method: method for method in args.methods}).items():
        model = build(args.network, seed=args.seed, **settings)
        batches = cifar_batches(args.root, max(args.steps or [7]) + 1, args.batch, args.seed)
        totals = {layer: float(s.sum()) for layer, s in prospr.score(model, batches, method=score).items()}
        print(
            f"{args.network}, {name}: " + " ".join(f"{100 * total:.1f}" for total in totals.values()) + " %", flush=True
        )
        if args.out:
            row = {"network": args.network, "score": name, "seed": args.seed, "batch": args.batch, **settings}
            with Path(args.out).open("a") as file:
                file.write(json.dumps({**row, "shares": totals}) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="vgg16")
    parser.add_argument("--width", type=int, help="by default the network's own")
    parser.add_argument("--methods", nargs="+", default=["snip"])
    parser.add_argument("--steps", nargs="+", type=int)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--root", help="where data sets lie; without, images are noise")
    parser.add_argument("--out", help="add the rows to this file, a line of JSON each")
    return parser.parse_args()


if __name__ == "__main__":
    main()
