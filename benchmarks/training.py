"""What a training step costs, against a plain PyTorch loop in the same process; and what real training reaches.

    python benchmarks/training.py --out training.json                     # every way of training, random images
    python benchmarks/training.py --networks vgg16 --ways plain graph together=8
    python benchmarks/training.py --data DIR/cifar-10-batches-bin --accuracy 200 --network resnet20 --seeds 0 1 2 3

Whole epochs of 50,000 images in batches of 256 are timed, with the drawing of random numbers, augmentation, learning
rates and records that belong to them. `plain` is float32 PyTorch as one writes it, on images that are on the device
already: no loader, nothing waited for, no masks (all the others have some). Times are per model. Without a GPU it is a
small version that shows it works.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from harness import GIB, machine
from torch.nn import functional as F

from prospr.lab.data import Batches, CropFlip, Split
from prospr.lab.models import build
from prospr.lab.recipes import recipe
from prospr.lab.train import train_together
from prospr.lab.training import EagerTrainer, GraphTrainer, Run

WAYS = (
    "plain",
    "eager",
    "graph",
    "graph+compile",
    "together=4",
    "together=4+compile",
    "together=8",
    "together=8+compile",
)
AUGMENT = CropFlip(pad=4, flip=True)
MEAN, STD = torch.tensor([125.3, 123.0, 113.9]), torch.tensor([63.0, 62.1, 66.7])  # CIFAR-10's


def main() -> None:
    args = _arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("highest")
    print(f"torch {torch.__version__}, {machine(device.type)}", flush=True)
    data = _cifar(args.data) if args.data else _noise(50_000 if device.type == "cuda" else 48)
    data = [part.to(device) for part in data]
    found = {"torch": torch.__version__, "machine": machine(device.type), "command": sys.argv[1:]}
    if args.accuracy:
        if not args.data:
            sys.exit("--accuracy trains for real: give CIFAR-10's binary folder with --data")
        found["accuracy"] = accuracy(args, data, device)
    else:
        found["rows"] = speed(args, data[0], device)
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1))


def speed(args, data: Split, device: torch.device) -> list[dict]:
    batch = args.batch or (256 if device.type == "cuda" else 16)
    print(f"{len(data)} images, batch {batch}, {args.epochs} epochs timed after one that is not\n")
    head = f"{'network':<10}{'way':<20}{'ms/step':>9}{'s/epoch':>9}{'ratio':>8}{'GiB':>7}{'set-up s':>10}"
    print(head, flush=True)
    rows = []
    for network in args.networks or (["resnet20", "vgg16"] if device.type == "cuda" else ["resnet20"]):
        unit = None
        for way in args.ways or (WAYS if device.type == "cuda" else ("plain", "eager", "graph", "together=2")):
            row = {"network": network, "way": way, "batch": batch, **measure(network, way, batch, data, args.epochs)}
            unit = row["ms_per_step"] if way == "plain" else unit
            row["ratio"] = row["ms_per_step"] / unit if unit else float("nan")
            rows.append(row)
            print(
                f"{network:<10}{way:<20}{row['ms_per_step']:>9.3f}{row['s_per_epoch']:>9.3f}{row['ratio']:>8.3f}"
                f"{row['peak_gib']:>7.2f}{row['setup_s']:>10.1f}",
                flush=True,
            )
            if args.out:
                Path(args.out).write_text(json.dumps({"rows": rows}, indent=1))
    return rows


def measure(network: str, way: str, batch: int, data: Split, epochs: int) -> dict[str, float]:
    device = data.images.device
    count = int(way.partition("=")[2].partition("+")[0]) if way.startswith("together") else 1
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    epoch = _plain(network, batch, data) if way == "plain" else _epochs(network, way, count, batch, data, epochs + 1)
    epoch()
    setup = time.perf_counter() - start
    seconds = []
    for _ in range(epochs):
        start = time.perf_counter()
        epoch()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds) / count
    peak = (
        torch.cuda.max_memory_reserved() if device.type == "cuda" else 0
    )  # a graph's memory is reserved, not allocated
    steps = -(-len(data) // batch)
    return {
        "ms_per_step": 1000 * median / steps,
        "s_per_epoch": median,
        "all_s_per_epoch": [s / count for s in seconds],
        "peak_gib": peak / GIB,
        "setup_s": setup,
    }


def _epochs(network: str, way: str, count: int, batch: int, data: Split, epochs: int):
    """A function that trains one more epoch of `count` runs."""
    settings = recipe("prospr-cifar", batch_size=batch).scaled(epochs)
    runs = [_run(network, seed, settings, data) for seed in range(count)]
    trainer = EagerTrainer(*runs) if way == "eager" else GraphTrainer(runs, compile=way.endswith("+compile"))
    return trainer.train_epoch


def _run(network: str, seed: int, settings, data: Split) -> Run:
    """A run with masks, as all but the dense ones of an experiment have; half of the weights, at random."""
    model = build(network, seed=seed).to(data.images.device)
    rng = torch.Generator().manual_seed(seed)
    masks = {
        name: (torch.rand(p.shape, generator=rng) < 0.5).to(p.device)
        for name, p in model.named_parameters()
        if p.dim() > 1
    }
    batches = Batches(data.images, data.labels, settings.batch_size, seed, AUGMENT, mean=data.mean, std=data.std)
    return Run(model, batches, settings, masks)


def _plain(network: str, batch: int, data: Split):
    """A function that trains one more epoch as anyone would write it."""
    device = data.images.device
    images = (data.images - data.mean.view(3, 1, 1)) / data.std.view(3, 1, 1)
    batches = Batches(images, data.labels, batch, 0, AUGMENT)
    model = build(network, seed=0).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    numbers = iter(range(10**6))

    def epoch() -> float:
        total = torch.zeros((), device=device)
        for images, labels in batches.epoch(next(numbers)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        return total.item()

    return epoch


def accuracy(args, data: list[Split], device: torch.device) -> dict:
    settings = recipe("prospr-cifar", batch_size=args.batch or 256).scaled(args.accuracy)
    runs = [
        Run(
            build(args.network, seed=seed).to(device),
            Batches(
                data[0].images, data[0].labels, settings.batch_size, seed, AUGMENT, mean=data[0].mean, std=data[0].std
            ),
            settings,
        )
        for seed in args.seeds
    ]
    start = time.perf_counter()

    def tell(first, done, epochs):
        if done % max(1, args.accuracy // 20) == 0:
            figures = ", ".join(f"{100 * epoch.train:.2f}" for epoch in epochs)
            print(f"{time.perf_counter() - start:6.0f} s  epoch {done}: training accuracy {figures} %", flush=True)

    results = train_together(runs, data[1], together=args.together, compile=args.compile, progress=tell)
    figures = [100 * result.accuracy for result in results]
    mean, sd = statistics.mean(figures), statistics.stdev(figures) if len(figures) > 1 else float("nan")
    print(f"\n{args.network}, {args.accuracy} epochs, dense: " + ", ".join(f"{figure:.2f}" for figure in figures))
    print(f"test accuracy {mean:.2f} %, sd {sd:.2f}, n = {len(figures)}; {time.perf_counter() - start:.0f} s in all")
    return {
        "network": args.network,
        "epochs": args.accuracy,
        "seeds": args.seeds,
        "test_accuracy": figures,
        "seconds": time.perf_counter() - start,
        "train_losses": [result.train_losses for result in results],
    }


def _noise(count: int) -> list[Split]:
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=rng)
    labels = torch.randint(0, 10, (count,), generator=rng)
    return [Split(images, labels, MEAN, STD), Split(images[:100], labels[:100], MEAN, STD)]


def _cifar(folder: str) -> list[Split]:
    parts = []
    for pattern in ("data_batch_*.bin", "test_batch.bin"):
        files = sorted(Path(folder).glob(pattern))
        if not files:
            sys.exit(f"{folder}: no {pattern} here; give the folder of CIFAR-10's binary version")
        raw = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).view(-1, 3073)
        parts.append(Split(raw[:, 1:].reshape(-1, 3, 32, 32), raw[:, 0].long(), MEAN, STD))
    return parts


def _arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=["resnet20", "vgg16"])
    parser.add_argument("--ways", nargs="+", help=f"of {', '.join(WAYS)}, or other numbers (default: all)")
    parser.add_argument("--batch", type=int, help="default: 256; 16 without a GPU")
    parser.add_argument("--epochs", type=int, default=3, help="epochs timed (default: %(default)s)")
    parser.add_argument("--data", help="folder of CIFAR-10's binary version (default: random images)")
    parser.add_argument("--accuracy", type=int, metavar="EPOCHS", help="train for real, so long, and test")
    parser.add_argument("--network", default="resnet20", help="with --accuracy (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="with --accuracy")
    parser.add_argument(
        "--together", type=int, default=4, help="with --accuracy: runs at a time (default: %(default)s)"
    )
    parser.add_argument("--compile", action="store_true", help="with --accuracy: use torch.compile")
    parser.add_argument("--out", help="write what was found to this JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
