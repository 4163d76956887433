"""U-Net on cell membranes (ISBI-2012): mean IoU of the whole network and of one pruned before it was trained.

    python benchmarks/segmentation.py --data FOLDER --out results/segmentation_h200.json
    python benchmarks/segmentation.py --data FOLDER --method 3sp --shrink            # channels, really taken out

FOLDER holds isbi2012/image and isbi2012/label. For one seed all networks have the same weights, order and augmentation;
of the 30 images nine are tested, once, after the last epoch. They are neighbouring slices of one stack, so the
figures say how much pruning costs, not how well the network does on other tissue.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from harness import machine

import prospr
from prospr.lab.data import CropFlip, load
from prospr.lab.models import build
from prospr.lab.recipes import recipe
from prospr.lab.tasks import segmentation
from prospr.lab.train import train


def main() -> None:
    args = _arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = load("isbi2012", root=args.data, size=args.size, download=False).to(device)
    settings = recipe("unet-cells", epochs=args.epochs, lr=args.lr)
    task = segmentation(data.num_classes, loss=args.loss)
    example = data.train.inputs(0, 1)
    rows = []
    print(
        f"{machine(device)}; {len(data.train)} + {len(data.test)} images of {args.size}; {args.epochs} epochs",
        flush=True,
    )
    for seed in args.seeds:
        for sparsity in (0.0, *args.sparsities):
            model = build("unet", seed=seed, width=args.width).to(device)
            masks = None
            if sparsity:
                batches = data.train.batches(args.score_batch, seed, CropFlip(pad=0, flip=True))
                how = {"method": args.method, "loss": task.loss, "seed": seed}
                masks = prospr.prune(model, batches, sparsity, **how)
                if args.shrink:
                    model, masks = prospr.shrink(model, masks, example), None
                else:
                    masks.remove(model)  # the trainer keeps them, in place
            batches = data.train.batches(settings.batch_size, seed, CropFlip(pad=0, flip=True))
            result = train(model, batches, data.test, settings, masks, task=task)
            kept = sum(p.numel() for p in model.parameters()) if masks is None else masks.kept
            rows.append({"seed": seed, "sparsity": sparsity, "kept": kept, **result.test, "seconds": result.seconds})
            print(f"seed {seed}  {sparsity:6.1%}  {kept:>12,} kept  " + _figures(result.test), flush=True)
    found = {"machine": machine(device), "torch": torch.__version__, "command": sys.argv[1:], "rows": rows}
    print("\nmean IoU, and its difference to the whole network, seed by seed")
    for sparsity in (0.0, *args.sparsities):
        figures = {row["seed"]: row["mean_iou"] for row in rows if row["sparsity"] == sparsity}
        whole = {row["seed"]: row["mean_iou"] for row in rows if row["sparsity"] == 0}
        gaps = [figures[seed] - whole[seed] for seed in figures]
        print(
            f"{sparsity:6.1%}  {statistics.mean(figures.values()):.4f}  {statistics.mean(gaps):+.4f}  n = {len(gaps)}"
        )
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1))


def _figures(test: dict) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in test.items())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--method", default="prospr-one-shot")
    parser.add_argument("--shrink", action="store_true", help="for a method that prunes channels")
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.9])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--loss", default="cross-entropy", choices=["cross-entropy", "dice"])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--score-batch", type=int, default=4)
    parser.add_argument("--out")
    return parser.parse_args()


if __name__ == "__main__":
    main()
