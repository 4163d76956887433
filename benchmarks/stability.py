"""How firm are scores? Which weights come first, and what is left of a mask, when a rounding or the images change.

    python benchmarks/stability.py --root DIR --out results/stability_cpu.json       # half an hour on one core

DIR holds cifar-10-batches-bin; without --root the images are noise. ResNet-20. First, of the best 5 % of every layer's
weights by a score in float64, the share that is among the best 5 % too by the score in float32, by that of weights
rounded to 10 bits (as TF32 rounds what it multiplies), and by that of other images. Chance would give 5 %. Then, of
masks at 95.6 % sparsity, the share of weights that is kept also where the images are 1.000001 times as bright. Chance
is what two masks share that keep as many weights of every layer, anywhere.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from harness import cifar_batches, machine
from torch import Tensor

import prospr
from prospr.lab.models import build

SCORES: dict[str, tuple[prospr.Score, int]] = {  # and how many batches one score reads
    "snip": (prospr.Snip(), 1),
    "snip, mean of ten batches": (prospr.Snip(batches=10), 10),
    "prospr, one shot, M = 1": (prospr.ProsPr(steps=1), 2),
    "prospr, one shot, M = 3": (prospr.ProsPr(), 4),
}
METHODS = ("snip", "prospr-one-shot", "iter-snip", "prospr")
TOP, SPARSITY, BRIGHTER = 0.05, 0.956, 1 + 1e-6


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    rows: list[dict] = []
    print(f"torch {torch.__version__}, {machine('cpu')}, seed {args.seed}\n")
    print(f"{'score':<28}{'batch':>6}{'float32':>9}{'10 bits':>9}{'other images':>14}")
    for batch in args.batches:
        for name, (method, reads) in SCORES.items():
            batches = cifar_batches(args.root, 2 * reads, batch, args.seed)
            row = {"score": name, "batch": batch, **firmness(method, batches, args.seed)}
            rows.append(row)
            figures = f"{row['float32']:>9.3f}{row['ten bits']:>9.3f}{row['other images']:>14.3f}"
            print(f"{name:<28}{batch:>6}{figures}", flush=True)
    print(f"\n{'mask':<28}{'batch':>6}{'kept too':>10}{'chance':>9}")
    batch = args.batches[0]
    for method in METHODS:
        batches = cifar_batches(args.root, 80, batch, args.seed)
        masks = [
            prospr.prune(
                build("resnet20", seed=args.seed),
                [(images * by, labels) for images, labels in batches],
                SPARSITY,
                method=method,
                seed=args.seed,
                collapse="ignore",
            )
            for by in (1.0, BRIGHTER)
        ]
        chance = sum(int(mask.sum()) ** 2 / mask.numel() for mask in masks[0].values()) / masks[0].kept
        row = {"mask": method, "batch": batch, "kept too": overlap(*masks), "chance": chance}
        rows.append(row)
        print(f"{method:<28}{batch:>6}{row['kept too']:>10.3f}{chance:>9.3f}", flush=True)
        if args.out:
            found = {"machine": machine("cpu"), "torch": torch.__version__, "seed": args.seed, "rows": rows}
            Path(args.out).write_text(json.dumps(found, indent=1) + "\n")


def firmness(method: prospr.Score, batches: list[tuple[Tensor, Tensor]], seed: int) -> dict[str, float]:
    """What the score of the first half of `batches` shares with others, by what is different about them."""
    half = len(batches) // 2
    model, rounded = build("resnet20", seed=seed), build("resnet20", seed=seed)
    with torch.no_grad():
        for weight in rounded.parameters():
            weight.copy_(ten_bits(weight))
    exact = [(images.double(), labels) for images, labels in batches[:half]]
    best = first(prospr.score(build("resnet20", seed=seed).double(), exact, method=method))
    others = {
        "float32": (model, batches[:half]),
        "ten bits": (rounded, batches[:half]),
        "other images": (model, batches[half:]),
    }
    return {what: overlap(best, first(prospr.score(net, on, method=method))) for what, (net, on) in others.items()}


def first(scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of every layer that score highest."""
    found = {}
    for name, values in scores.items():
        mask = torch.zeros(values.numel(), dtype=torch.bool)
        mask[values.flatten().topk(max(1, int(TOP * values.numel()))).indices] = True
        found[name] = mask
    return found


def overlap(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The share of what `a` keeps that `b` keeps too."""
    return sum(int((a[name] & b[name]).sum()) for name in a) / sum(int(mask.sum()) for mask in a.values())


def ten_bits(values: Tensor) -> Tensor:
    """Rounded to the mantissa of TF32."""
    return ((values.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="where data sets lie")
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256], metavar="SIZE", help="sizes of a batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="write the rows as JSON to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
