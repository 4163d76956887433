"""Learn from images without labels (BYOL), then prune 95 % from that starting point by ProsPr: appendix E of the paper.

    python examples/byol.py                                                  # digits, half a minute, no download
    python examples/byol.py --dataset cifar10                                # 2,000 images, a small ResNet-20
    python examples/byol.py --dataset cifar10 --network resnet18 --epochs 20 --train 20 --device cuda

It prints the accuracy of a linear probe on a random network and on the pretrained one, prunes from both starts, and
writes the norms of gradients and meta-gradients of both (norms-random.svg, norms-byol.svg, and the numbers as .csv).
With --train the pruned networks are trained, which is the paper's table. The paper pretrains for 1000 epochs.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

import prospr
from prospr.lab.byol import SMALL_VIEWS, Pretraining, View, layer_norms, linear_probe, pretrain, write_norms
from prospr.lab.data import CropFlip, Dataset, load
from prospr.lab.models import build
from prospr.lab.progress import progress_bar
from prospr.lab.recipes import Recipe
from prospr.lab.train import train

DIGIT = View(area=(0.5, 1.0), flip=0.0, gray=0.0)  # a mirrored digit is another one
STEPS = 3


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    data = dataset(args)
    network = {"in_channels": data.train.images.shape[1], "num_classes": data.num_classes}
    if args.width is not None:
        network["width"] = args.width
    random = build(args.network, seed=args.seed, **network).to(args.device)
    print(f"{data.name}: {len(data.train):,} images to train on, {len(data.test):,} to test on; {args.network}")

    views = (DIGIT, DIGIT) if args.dataset == "digits" else SMALL_VIEWS
    settings = Pretraining(
        epochs=args.epochs,
        batch_size=args.batch,
        lr=args.lr,
        hidden=128 if args.dataset == "digits" else 512,
        warmup=0.05,
        views=views,
        bf16=args.device.startswith("cuda"),
    )
    with progress_bar("pretraining") as report:
        pretrained = pretrain(
            random,
            data,
            settings,
            seed=args.seed,
            checkpoint=args.checkpoint,
            progress=lambda done, loss: report(done, args.epochs, f"epoch {done}: loss {loss:.3f}"),
        )
    print(f"BYOL loss: {pretrained.losses[0]:.3f} in the first epoch, {pretrained.losses[-1]:.3f} in the last")

    recipe = Recipe(args.train or 1, args.batch, 0.1, drops=halves(args.train))
    augment = CropFlip(pad=1) if args.dataset == "digits" else CropFlip(pad=4, flip=True)
    method = prospr.ProsPr(steps=STEPS, lr=args.inner_lr)
    for name, start in {"random": random, "byol": pretrained.network}.items():
        print(f"\n{name} start: linear probe {100 * linear_probe(start, data):.2f} %")
        batches = data.train.batches(args.batch, args.seed, augment, drop_last=True)
        norms = layer_norms(start, batches, steps=STEPS, lr=args.inner_lr)
        ratios = sorted(pair.metagradient / pair.gradient for pair in norms.values() if pair.gradient > 0)
        print(f"meta-gradient over gradient, median of {len(norms)} layers: {ratios[len(ratios) // 2]:.2f}")
        figure = write_norms(norms, args.out / f"norms-{name}.svg", f"L2 norms by layer, {name} start, {STEPS} steps")
        masks = prospr.prune(start, batches, args.sparsity, method=method, seed=args.seed)
        masks.save(args.out / f"masks-{name}.safetensors", method="prospr", start=name)
        print(f"pruned: {masks.kept:,} of {masks.total:,} weights kept; figure: {figure}")
        if args.train:
            result = train(start, batches, data.test, recipe)
            print(f"trained for {args.train} epochs: test accuracy {100 * result.accuracy:.2f} %")


def dataset(args: argparse.Namespace) -> Dataset:
    """The data on the device, the first `--images` of the training part (0: all), and as many to test on at most."""
    data = load(args.dataset)
    if args.images:
        chosen = torch.arange(args.images)
        data = replace(
            data, train=data.train.select(chosen[: len(data.train)]), test=data.test.select(chosen[: len(data.test)])
        )
    return data.to(args.device)


def halves(epochs: int) -> tuple[int, ...]:
    """The paper's drops, after half and three quarters of the training."""
    return tuple(sorted({epochs // 2, 3 * epochs // 4} - {0, epochs}))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pretrain by BYOL, probe, prune by ProsPr.")
    parser.add_argument("--dataset", default="digits", help="digits, cifar10, cifar100, ... (default: %(default)s)")
    parser.add_argument("--network", help="default: small_convnet for digits, resnet20 for the others")
    parser.add_argument("--width", type=int, help="of the network; default: its own, 8 for resnet20 on a CPU")
    parser.add_argument("--epochs", type=int, help="of pretraining; default: 20 for digits, 5 for the others")
    parser.add_argument("--batch", type=int, help="default: 64 on a CPU, 256 on a GPU")
    parser.add_argument("--lr", type=float, default=0.05, help="of pretraining (default: %(default)s)")
    parser.add_argument("--images", type=int, help="use so many; 0: all (default: all, but 2000 photographs on a CPU)")
    parser.add_argument(
        "--inner-lr",
        type=lambda text: text if text == "auto" else float(text),
        default="auto",
        help="of the steps ProsPr looks through, and of the figure: a number or auto (default: %(default)s)",
    )
    parser.add_argument("--sparsity", type=float, default=0.95, help="default: %(default)s")
    parser.add_argument("--train", type=int, default=0, help="train the pruned networks so many epochs (default: 0)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--checkpoint", type=Path, help="a file to go on from when the pretraining is cut")
    parser.add_argument("--out", type=Path, default=Path("byol"), help="folder for figures and masks")
    args = parser.parse_args(arguments)
    small, on_cpu = args.dataset == "digits", args.device == "cpu"
    args.network = args.network or ("small_convnet" if small else "resnet20")
    if args.width is None and args.network == "resnet20" and on_cpu:
        args.width = 8
    args.epochs = args.epochs or (20 if small else 5)
    args.batch = args.batch or (64 if on_cpu else 256)
    if args.images is None:
        args.images = 2000 if on_cpu and not small else 0
    return args


if __name__ == "__main__":
    main()
