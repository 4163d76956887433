"""Small networks on CIFAR-10, small enough for a CPU: which masks train best? Judged on training images.

resnet20  at 16 x 16 pixels, ten epochs
vgg16     at a quarter of its width, eight epochs

    python benchmarks/small_cifar.py --root DIR --out results/small_cifar_cpu.jsonl      # four minutes a run and core
    python benchmarks/small_cifar.py --root DIR --out FILE --scopes spread --methods snip-20 snip-20-mb
    python benchmarks/small_cifar.py --root DIR --out FILE --network vgg16 --methods snip --scopes global
    python benchmarks/small_cifar.py --root DIR --out FILE --epochs 40 --methods drawn drawn-late --scopes global
    python benchmarks/small_cifar.py --root DIR --out FILE --network vgg16 --scopes tapered-0.5 mapped-0.5 rooted
    python benchmarks/small_cifar.py --out results/small_cifar_cpu.jsonl --show

DIR holds cifar-10-batches-bin. 20,000 training images, SGD with one cycle of the learning rate, mirrored at random;
accuracy on 5,000 other training images. Seed by seed, all start from the same weights and see the same images. A line
a run is added to the file, and a run that has a line is not run again. Scopes are the library's, and three that were
tried and not taken: "tapered-0.5" and "mapped-0.5", with that power of a layer's size or pixels, and "rooted", scores
divided by the root of their layer's total.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from unittest.mock import patch

import torch
from screening import Drawn
from torch import Tensor, nn
from torch.nn import functional as F

import prospr
from prospr.lab.data import load
from prospr.lab.models import build

TRAINED, JUDGED, BATCH, SCORED = 20_000, 5_000, 128, 80  # SCORED: batches there are to score by
NETWORKS: dict[str, dict[str, Any]] = {"resnet20": {}, "vgg16": {"width": 16}}
EPOCHS = {"resnet20": 10, "vgg16": 8}
METHODS: dict[str, Any] = {
    "prospr": "prospr",
    "prospr-shuffled": "prospr",  # its mask, shuffled within each layer
    "prospr-4": prospr.Iterative(prospr.ProsPr(), rounds=4, redraw=True),
    "prospr-recover": prospr.Iterative(prospr.ProsPr(), rounds=20, recover=True),  # pruned weights may come back
    "prospr-redrawn-recover": prospr.Iterative(prospr.ProsPr(), rounds=20, redraw=True, recover=True),
    "snip": "snip",
    "snip-20": prospr.Iterative(prospr.Snip(), rounds=20),
    "snip-20-mb": prospr.Iterative(prospr.Snip(batches=SCORED), rounds=20),  # all 10,240 images in every round
    "random": prospr.Iterative(prospr.Random(), rounds=100, redraw=True),
    "drawn": prospr.Iterative(Drawn(), rounds=1),  # at random, as many weights in every layer
    "drawn-early": prospr.Iterative(Drawn(tilt=-0.3), rounds=1),  # fewer in large layers, which come late
    "drawn-late": prospr.Iterative(Drawn(tilt=0.3), rounds=1),
}


def main() -> None:
    args = _arguments()
    epochs = args.epochs or EPOCHS[args.network]
    keys = [
        {"network": args.network, "method": method, "scope": scope, "sparsity": share, "seed": seed, "epochs": epochs}
        for seed, share, method, scope in product(args.seeds, args.sparsities, args.methods, args.scopes)
    ]
    data = half_size if args.network == "resnet20" else full_size
    show(measured(Path(args.out), [] if args.show else keys, lambda: data(args.root), measure))


def measured(
    out: Path, keys: Sequence[dict], data: Callable[[], tuple[Tensor, Tensor]], measure: Callable[..., dict]
) -> list[dict]:
    """The lines of the file, and one more for each of `keys` that has none yet."""
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    left = [key for key in keys if not any(key.items() <= row.items() for row in rows)]
    if left:
        torch.set_num_threads(1)
        images, labels = data()
    for key in left:
        rows.append(key | measure(images, labels, **key))
        print(rows[-1], flush=True)
        with out.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    return rows


def full_size(root: str) -> tuple[Tensor, Tensor]:
    split = load("cifar10", root=root).train
    images = split.images[: TRAINED + JUDGED].float()
    return (images - split.mean.view(3, 1, 1)) / split.std.view(3, 1, 1), split.labels[: TRAINED + JUDGED]


def half_size(root: str) -> tuple[Tensor, Tensor]:
    split = load("cifar10", root=root).train
    images = F.avg_pool2d(split.images[: TRAINED + JUDGED].float(), 2)
    mean, std = images[:TRAINED].mean((0, 2, 3), keepdim=True), images[:TRAINED].std((0, 2, 3), keepdim=True)
    return (images - mean) / std, split.labels[: TRAINED + JUDGED]


def measure(
    images: Tensor,
    labels: Tensor,
    network: str,
    method: str,
    scope: str,
    sparsity: float,
    seed: int,
    epochs: int,
) -> dict:
    model, rng = build(network, seed=seed, **NETWORKS[network]), torch.Generator().manual_seed(seed)
    index = torch.randperm(TRAINED, generator=rng)[: SCORED * BATCH]
    batches = [(images[i], labels[i]) for i in index.split(BATCH)]
    start = time.perf_counter()
    shuffled = method.endswith("-shuffled")
    pruned = copy.deepcopy(model) if shuffled else model
    with tried(scope) as known:
        masks = prospr.prune(pruned, batches, sparsity, method=METHODS[method], scope=known, seed=seed)
    if shuffled:
        masks = prospr.sanity.shuffle(masks, seed)
        masks.apply(model)
    scored = time.perf_counter()
    train(model, images[:TRAINED], labels[:TRAINED], rng, epochs)
    accuracy = judge(model, images[TRAINED:], labels[TRAINED:])
    seconds = {"score_seconds": scored - start, "train_seconds": time.perf_counter() - scored}
    return {"accuracy": accuracy, "kept": masks.kept, "layers": [int(m.sum()) for m in masks.values()], **seconds}


@contextmanager
def tried(scope: str) -> Generator[Any]:
    """A scope of the library that does what `scope` says, for the time of the block."""
    name, _, power = scope.partition("-")
    select, pruning = import_module("prospr.masks.select"), import_module("prospr.pruning")
    if name == "rooted":
        with patch.object(select, "_shares", rooted):
            yield "balanced"
    elif name == "tapered" and power:
        with patch.object(select, "TAPER", float(power)):
            yield name
    elif name == "mapped" and power:
        counted = pruning.map_factors
        with patch.object(pruning, "map_factors", lambda *of: {n: f ** float(power) for n, f in counted(*of).items()}):
            yield name
    else:
        yield scope


def rooted(scores: dict[str, Tensor], _: str) -> dict[str, Tensor]:
    return {name: s / s.abs().sum().sqrt() if s.any() else s for name, s in scores.items()}


def train(model: nn.Module, images: Tensor, labels: Tensor, rng: torch.Generator, epochs: int) -> None:
    model.to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    steps = len(images) // BATCH
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=epochs * steps, pct_start=0.2)
    for _ in range(epochs):
        for index in torch.randperm(len(images), generator=rng).split(BATCH)[:steps]:
            turned = (torch.rand(BATCH, generator=rng) < 0.5)[:, None, None, None]
            x = torch.where(turned, images[index].flip(3), images[index]).contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad()
            F.cross_entropy(model(x), labels[index]).backward()
            optimizer.step()
            rates.step()


@torch.no_grad()
def judge(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    pairs = zip(images.split(500), labels.split(500), strict=True)
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in pairs) / len(labels)


def show(rows: list[dict]) -> None:
    print(f"{'network':<10}{'method':<20}{'scope':<12}{'sparsity':>9}{'epochs':>8}{'mean %':>9}{'sd':>7}{'n':>4}")
    names = ("network", "method", "scope", "sparsity", "epochs")
    for one in dict.fromkeys(tuple(row[name] for name in names) for row in rows):
        found = [100 * row["accuracy"] for row in rows if tuple(row[name] for name in names) == one]
        network, method, scope, sparsity, epochs = one
        spread = f"{stdev(found):.2f}" if len(found) > 1 else ""
        said = f"{network:<10}{method:<20}{scope:<12}{100 * sparsity:>7.1f} %{epochs:>8}"
        print(f"{said}{fmean(found):>9.2f}{spread:>7}{len(found):>4}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="where data sets lie")
    parser.add_argument("--network", default="resnet20", choices=NETWORKS)
    parser.add_argument("--methods", nargs="+", default=["prospr"], choices=METHODS)
    parser.add_argument("--scopes", nargs="+", default=["balanced", "focused"])
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.982])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--epochs", type=int, help="by default as above")
    parser.add_argument("--out", default="small_cifar.jsonl", help="a line of JSON a run is added to this file")
    parser.add_argument("--show", action="store_true", help="print the table of the file and run nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
