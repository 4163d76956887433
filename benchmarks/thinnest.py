"""The layer that pruning leaves thinnest: networks, sparsities, methods; does any layer end up empty?

    python benchmarks/thinnest.py --root DIR --out thinnest.json                # rows are added to those of the file
    python benchmarks/thinnest.py --networks resnet20 --sparsities 0.982 --methods prospr prospr-one-shot snip

DIR holds cifar-10-batches-bin; without --root the images are noise. A line a network, method and sparsity: how many
layers are empty, and the fewest weights that a layer has left, with its name.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from harness import cifar_batches, machine

import prospr
from prospr.lab.models import build

NETWORKS = ("resnet20", "vgg16", "vgg19", "resnet18")
SPARSITIES = (
    0.2,
    0.36,
    0.488,
    0.59,
    0.672,
    0.738,
    0.79,
    0.832,
    0.866,
    0.893,
    0.914,
    0.931,
    0.945,
    0.956,
    0.965,
    0.972,
    0.977,
    0.982,
)


def main() -> None:
    args = _arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"torch {torch.__version__}, {machine(device.type)}, batches of {args.batch}\n")
    print(f"{'network':<12}{'method':<20}{'sparsity':>9}{'empty':>7}{'fewest':>8}  {'layer':<30}{'seconds':>8}")
    rows = json.loads(Path(args.out).read_text())["rows"] if args.out and Path(args.out).exists() else []
    for network in args.networks:
        for method in args.methods:
            for sparsity in args.sparsities:
                row = {"network": network, "method": method, "scope": prospr.methods()[method].scope}
                row |= {"sparsity": sparsity, "batch": args.batch}
                row |= measure(network, method, sparsity, args, device)
                rows.append(row)
                print(
                    f"{network:<12}{method:<20}{100 * sparsity:>7.1f} %{row['empty']:>7}{row['fewest']:>8}  "
                    f"{row['layer']:<30}{row['seconds']:>8.1f}",
                    flush=True,
                )
                if args.out:
                    Path(args.out).write_text(
                        json.dumps({"machine": machine(device.type), "rows": rows}, indent=1) + "\n"
                    )


def measure(network: str, method: str, sparsity: float, args, device: torch.device) -> dict:
    model = build(network, seed=args.seed).to(device)
    read = cifar_batches(args.root, 80, args.batch, args.seed)  # as many as twenty rounds of M = 3 read
    batches = [(images.to(device), labels.to(device)) for images, labels in read]
    start = time.perf_counter()
    masks = prospr.prune(model, batches, sparsity, method=method, collapse="ignore", seed=args.seed)
    counts = {name: int(mask.sum()) for name, mask in masks.items()}
    layer = min(counts, key=lambda name: counts[name])
    empty = sum(count == 0 for count in counts.values())
    return {"empty": empty, "fewest": counts[layer], "layer": layer, "seconds": time.perf_counter() - start}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=NETWORKS, choices=NETWORKS)
    parser.add_argument("--methods", nargs="+", default=["prospr"], choices=prospr.methods())
    parser.add_argument("--sparsities", nargs="+", type=float, default=SPARSITIES)
    parser.add_argument("--batch", type=int, default=128 if torch.cuda.is_available() else 16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", help="where data sets lie")
    parser.add_argument("--out", help="write the rows as JSON to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
