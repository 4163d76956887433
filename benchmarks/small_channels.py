"""VGG-19 at a quarter of its width on CIFAR-10, small enough for a CPU: which channels should go, and what do the rest
start from? Judged on training images.

    python benchmarks/small_channels.py --root DIR --out results/small_channels_cpu.jsonl   # two minutes a run and core
    python benchmarks/small_channels.py --root DIR --out FILE --methods prospr 3sp --scopes global --weights keep
    python benchmarks/small_channels.py --root DIR --out FILE --methods prospr --scopes mapped-0.25
    python benchmarks/small_channels.py --out results/small_channels_cpu.jsonl --show

DIR holds cifar-10-batches-bin. Channels are taken out until `--sparsities` of the parameters are gone; what is left is
trained on 20,000 images for eight epochs of SGD with one cycle of the learning rate, mirrored at random; accuracy on
5,000 other training images. Seed by seed, all start from the same weights and see the same images. A line a run is
added to the file, and a run that has a line is not run again. Scopes are the library's, and one that was tried and not
taken: "mapped-0.25", balanced, with the shares of channels of small maps times (pixels / 64)^0.25 and eight channels
left in each layer.
"""

import argparse
import time
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from unittest.mock import patch

import torch
from small_cifar import BATCH, TRAINED, full_size, judge, measured, train
from torch import Tensor, nn

import prospr
from prospr.channels import groups
from prospr.lab.models import build
from prospr.masks.maps import map_factors

EPOCHS, SCORED = 8, 20  # SCORED: batches there are to score by
METHODS = {"prospr": "prospr-one-shot", "3sp": "3sp", "synflow": "synflow", "random": "random"}
KEY = ("method", "scope", "weights", "sparsity")


def main() -> None:
    args = _arguments()
    grid = product(args.seeds, args.methods, args.scopes, args.weights, args.sparsities)
    keys = [{**dict(zip(KEY, one, strict=True)), "seed": seed} for seed, *one in grid]
    show(measured(Path(args.out), [] if args.show else keys, lambda: full_size(args.root), measure))


def measure(images: Tensor, labels: Tensor, method: str, scope: str, weights: str, sparsity: float, seed: int) -> dict:
    model, rng = build("vgg19", seed=seed, width=16), torch.Generator().manual_seed(seed)
    index = torch.randperm(TRAINED, generator=rng)[: SCORED * BATCH]
    batches = [(images[i], labels[i]) for i in index.split(BATCH)]
    start = time.perf_counter()
    how: dict[str, Any] = {"method": METHODS[method], "granularity": "channel", "seed": seed}
    if scope.startswith("mapped-"):
        with mapped(model, images[:1], float(scope.removeprefix("mapped-"))):
            masks = prospr.prune(model, batches, sparsity, scope="balanced", keep_per_layer=8, **how)
    else:
        masks = prospr.prune(model, batches, sparsity, scope=scope, **how)
    small = prospr.shrink(model, masks, images[:1], weights=weights)
    scored = time.perf_counter()
    train(small, images[:TRAINED], labels[:TRAINED], rng, EPOCHS)
    accuracy = judge(small, images[TRAINED:], labels[TRAINED:])
    seconds = {"score_seconds": scored - start, "train_seconds": time.perf_counter() - scored}
    widths = [layer.out_channels for layer in small.modules() if isinstance(layer, nn.Conv2d)]
    parameters = sum(p.numel() for p in small.parameters())
    return {"accuracy": accuracy, "widths": widths, "parameters": parameters, **seconds}


@contextmanager
def mapped(model: nn.Module, example: Tensor, power: float) -> Generator[None]:
    """Balanced shares of channels times a power of what their layer's maps count for, for the time of the block."""
    budget = import_module("prospr.channels.budget")
    plain, found = budget._balanced, groups(model, example)
    factors = map_factors(model, ((example,), {}), list(prospr.prunable(model)))
    made = {name: factors[weight] for name, ids in found.sets.items() for (weight, dim), of in found.axes.items()
            if weight in factors and dim == 0 and list(of) == list(ids)}  # fmt: skip

    def balanced(sets, values, *rest):
        shares = plain(sets, values, *rest)
        return {g: shares[g] * made[name] ** power for name, ids in sets.items() for g in ids}

    with patch.object(budget, "_balanced", balanced):
        yield


def show(rows: list[dict]) -> None:
    print(f"{'method':<10}{'scope':<12}{'weights':<9}{'sparsity':>9}{'mean %':>9}{'sd':>7}{'n':>4}  widths, mean")
    for one in dict.fromkeys(tuple(row[name] for name in KEY) for row in rows):
        found = [row for row in rows if tuple(row[name] for name in KEY) == one]
        reached = [100 * row["accuracy"] for row in found]
        spread = f"{stdev(reached):.2f}" if len(reached) > 1 else ""
        widths = " ".join(f"{fmean(layer):.0f}" for layer in zip(*(row["widths"] for row in found), strict=True))
        method, scope, weights, sparsity = one
        said = f"{method:<10}{scope:<12}{weights:<9}{100 * sparsity:>7.1f} %"
        print(f"{said}{fmean(reached):>9.2f}{spread:>7}{len(reached):>4}  {widths}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="where data sets lie")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--scopes", nargs="+", default=["balanced", "global"])
    parser.add_argument("--weights", nargs="+", default=["rescale"], choices=("keep", "rescale", "redraw"))
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.95])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", default="small_channels.jsonl", help="a line of JSON a run is added to this file")
    parser.add_argument("--show", action="store_true", help="print the table of the file and run nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
