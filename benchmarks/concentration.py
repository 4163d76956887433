"""How many channels of ResNet-20 keep any weight, beside the same masks shuffled within each layer.

    python benchmarks/concentration.py --root DIR --out results/concentration_cpu.jsonl
    python benchmarks/concentration.py --root DIR --methods snip --sparsity 0.982 --seed 1
    python benchmarks/concentration.py --root DIR --methods prospr --rounds 4 --scope tapered --batch 64

DIR holds cifar-10-batches-bin. On a CPU the first takes half a minute, rounds of ProsPr in batches of 64 some eight
seconds each. A share of 100 % says that every output (or input) of every layer of a stage still has a weight. `within`
are the channels between the two convolutions of the last stage's blocks that have weights on both sides, of 64. A line
of JSON a mask is added to the file of `--out`.
"""

import argparse
import json
import warnings
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

import prospr
from prospr.lab.experiment import Data, Experiment
from prospr.lab.grid import changed
from prospr.lab.run import choose_device
from prospr.lab.runs.making import Loader, Parts, method_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--root", help="where data sets lie")
    parser.add_argument("--methods", nargs="+", default=["snip", "synflow", "prospr-one-shot"])
    parser.add_argument("--sparsity", type=float, default=0.956)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=512, help="images to a batch to score by")
    parser.add_argument("--rounds", type=int, help="by default the method's own")
    parser.add_argument("--scope", help="by default the method's own")
    parser.add_argument("--out", help="add the rows to this file, a line of JSON each")
    args = parser.parse_args()
    one, device = Experiment("cifar10", "resnet20", seed=args.seed, data=Data(validation=0.1)), choose_device(None)
    parts = Parts(one, Loader(device, args.root)(one), device)
    print(f"{'outputs, inputs with any weight, %':<36}{'stage 1':>14}{'stage 2':>14}{'stage 3':>14}{'within':>8}")
    for method in args.methods:
        changes = {"method": method, "sparsity": args.sparsity, "rounds": args.rounds, "scope": args.scope}
        rule = method_of(changed(one, **{name: value for name, value in changes.items() if value is not None}))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", prospr.errors.CollapseWarning)
            masks = prospr.prune(
                parts.network(), parts.batches(args.batch), args.sparsity, method=rule, seed=args.seed, collapse="warn"
            )
        for name, those in ((method, masks), (f"{method}, shuffled", prospr.sanity.shuffle(masks, args.seed))):
            stages, between = [alive(those, stage) for stage in (1, 2, 3)], within(those)
            shown = "".join(f"{outputs:>7.1f}{inputs:>7.1f}" for outputs, inputs in stages)
            print(f"{name:<36}{shown}{between:>8.1f}", flush=True)
            if args.out:
                row = {"mask": name, "sparsity": args.sparsity, "seed": args.seed, "batch": args.batch}
                row |= {"rounds": rule.rule.rounds, "scope": rule.scope, "stages": stages, "within": between}
                with Path(args.out).open("a") as file:
                    file.write(json.dumps(row) + "\n")


def alive(masks: Mapping[str, Tensor], stage: int) -> tuple[float, float]:
    """The percentages of outputs and of inputs of a stage's layers that have a weight."""
    kept = [mask.flatten(2).any(2) for name, mask in masks.items() if name.startswith(f"layer{stage}.")]
    outputs = sum(int(k.any(1).sum()) for k in kept) / sum(k.shape[0] for k in kept)
    inputs = sum(int(k.any(0).sum()) for k in kept) / sum(k.shape[1] for k in kept)
    return 100 * outputs, 100 * inputs


def within(masks: Mapping[str, Tensor]) -> float:
    """How many channels between the two convolutions of a block of the last stage have weights on both sides."""
    first, second = ([masks[f"layer3.{block}.conv{k}.weight"] for block in range(3)] for k in (1, 2))
    both = [a.flatten(1).any(1) & b.transpose(0, 1).flatten(1).any(1) for a, b in zip(first, second, strict=True)]
    return sum(int(k.sum()) for k in both) / len(both)


if __name__ == "__main__":
    main()
