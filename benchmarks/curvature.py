"""What `lr="auto"` spends, and how well it knows the curvature: products taken, lambda beside what it should be.

    python benchmarks/curvature.py --root DIR --out results/curvature_cpu.json

DIR holds cifar-10-batches-bin; without --root the images are noise. A line a network and seed, at its initial weights:
the Hessian-vector products that were taken, how far the lambda they gave is from the eigenvalue (both ends looked for
until they stand still), and how far three other batches' lambdas are from it. For networks of `--rounds`, also what
each of the default's twenty rounds at 98.2 % took and found.
"""

import argparse
import json
import time
from pathlib import Path
from unittest.mock import patch

import torch
from harness import cifar_batches, machine

import prospr
from prospr.lab.models import build
from prospr.meta.curvature import Extremes, extreme_eigenvalues

NETWORKS = ("resnet20", "vgg16", "vgg19", "resnet18")


def main() -> None:
    args = _arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"torch {torch.__version__}, {machine(device.type)}, batches of {args.batch}\n")
    print(f"{'network':<10}{'seed':>5}{'products':>10}{'lambda':>9}{'off':>9}{'seconds':>9}   other batches off")
    rows = []
    for network in args.networks:
        for seed in args.seeds:
            row = {"network": network, "seed": seed, "batch": args.batch, **measure(network, seed, args, device)}
            rows.append(row)
            seen = f"{row['products']:>10}{row['lambda']:>9.1f}{100 * row['off']:>+7.1f} %{row['seconds']:>9.1f}"
            others = " ".join(f"{100 * off:>+6.1f} %" for off in row["others_off"])
            print(f"{network:<10}{seed:>5}{seen}  {others}", flush=True)
            if row["rounds"]:
                taken = ", ".join(f"{one['lambda']:.0f} ({one['products']})" for one in row["rounds"])
                print(f"    lambda of each round (products): {taken}", flush=True)
            if args.out:
                Path(args.out).write_text(json.dumps({"machine": machine(device.type), "rows": rows}, indent=1) + "\n")


def measure(network: str, seed: int, args: argparse.Namespace, device: torch.device) -> dict:
    model = build(network, seed=seed).to(device)
    loss = prospr.meta.pure_loss(model)
    batches = [(x.to(device), y.to(device)) for x, y in cifar_batches(args.root, 80, args.batch, seed)]
    start = time.perf_counter()
    found = extreme_eigenvalues(loss, loss.params(), batches[0], both=False, seed=seed)  # as `lr="auto"` does
    seconds = time.perf_counter() - start
    exact = extreme_eigenvalues(loss, loss.params(), batches[0], most=40, tolerance=1e-4, seed=seed).magnitude
    others = [extreme_eigenvalues(loss, loss.params(), batch, both=False, seed=seed) for batch in batches[1:4]]
    return {
        "products": found.products,
        "lambda": found.magnitude,
        "off": found.magnitude / exact - 1,
        "others_off": [other.magnitude / found.magnitude - 1 for other in others],
        "rounds": by_round(model, batches, seed) if network in args.rounds else [],
        "seconds": seconds,
    }


def by_round(model: torch.nn.Module, batches: list, seed: int) -> list[dict[str, float]]:
    """What each round of the default found at its weights and batch."""
    found: list[Extremes] = []

    def watched(*given, **named) -> Extremes:
        found.append(extreme_eigenvalues(*given, **named))
        return found[-1]

    with patch("prospr.meta.curvature.extreme_eigenvalues", watched):
        prospr.prune(model, batches, 0.982, collapse="ignore", seed=seed)
    return [{"products": one.products, "lambda": one.magnitude} for one in found]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=NETWORKS, choices=NETWORKS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", nargs="*", default=["resnet20"], choices=NETWORKS)
    parser.add_argument("--batch", type=int, default=512 if torch.cuda.is_available() else 64)
    parser.add_argument("--root", help="where data sets lie")
    parser.add_argument("--out", help="write the rows as JSON to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
