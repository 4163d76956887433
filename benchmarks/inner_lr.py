"""Which inner learning rate? ProsPr's masks and what they train to, for lr = kappa / |lambda| and for fixed ones.

    python benchmarks/inner_lr.py --data DIR/cifar-10-batches-bin --device cuda --workers 8

DIR holds CIFAR-10 in its binary layout (data_batch_*.bin; as many of them as there are). The last tenth of the training
images is the validation set that decides; the test set is not read. ResNet-20 (option A), ProsPr on batches of 512.
"""

import argparse
import csv
import statistics
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

import prospr
from prospr.lab.data import Batches, CropFlip, Split
from prospr.lab.models import build
from prospr.lab.recipes import Recipe
from prospr.lab.train import train

SETTINGS = {
    "random": prospr.Random(),
    "snip": prospr.Snip(),
    "lr 0.1": prospr.ProsPr(lr=0.1),
    "kappa 0.03": prospr.ProsPr(kappa=0.03),
    "kappa 0.1": prospr.ProsPr(kappa=0.1),
    "kappa 0.3": prospr.ProsPr(kappa=0.3),
    "kappa 1": prospr.ProsPr(kappa=1.0),
    "kappa 3": prospr.ProsPr(kappa=3.0),
    "kappa 0.3, M=10": prospr.ProsPr(kappa=0.3, steps=10),
    "kappa 1, M=10": prospr.ProsPr(kappa=1.0, steps=10),
}


@dataclass(frozen=True)
class Job:
    setting: str
    seed: int
    sparsities: tuple[float, ...]
    epochs: int
    data: str
    device: str


def main() -> None:
    args = _arguments()
    sparsities = tuple(args.sparsities)
    jobs = [
        Job(s, seed, sparsities, args.epochs, args.data, args.device) for seed in range(args.seeds) for s in SETTINGS
    ]
    rows = []
    start = time.perf_counter()
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run, job) for job in jobs]):
            rows += done.result()
            print(f"{time.perf_counter() - start:5.0f} s  {rows[-1]['setting']} seed {rows[-1]['seed']}", flush=True)
            if args.out:
                _write(rows, args.out)
    print(f"\nResNet-20, CIFAR-10 validation accuracy after {args.epochs} epochs, {args.seeds} seeds")
    print(
        f"{'setting':<18}{'sparsity':>9}{'accuracy':>10}{'sd':>6}{'lr':>9}{'growth':>8}{'empty':>6}{'thinnest':>10}{'effective':>10}"
    )
    for sparsity in sparsities:
        for setting in SETTINGS:
            mine = [r for r in rows if r["setting"] == setting and r["sparsity"] == sparsity]
            accuracy = [100 * r["accuracy"] for r in mine]
            mean = lambda key, mine=mine: statistics.mean(r[key] for r in mine)  # noqa: E731
            print(
                f"{setting:<18}{sparsity:>9.3f}{statistics.mean(accuracy):>10.2f}{statistics.pstdev(accuracy):>6.2f}"
                f"{mean('lr'):>9.4f}{mean('growth'):>8.2f}{mean('empty'):>6.1f}{mean('thinnest'):>10.4f}"
                f"{mean('effective'):>10.4f}"
            )


def run(job: Job) -> list[dict]:
    """Score once, then train at each sparsity. One seed gives every setting the same init, data order and crops."""
    warnings.simplefilter("ignore")
    device = torch.device(job.device)
    torch.set_num_threads(1)
    training, validation = _data(job.data, device)
    new = lambda: build("resnet20", seed=job.seed).to(device)  # noqa: E731
    augment = CropFlip(pad=4, flip=True)
    batches = Batches(training.images, training.labels, 512, job.seed, augment)
    model, method, trace = new(), SETTINGS[job.setting], prospr.meta.Trace()
    lr = 0.0
    if isinstance(method, prospr.ProsPr):
        lr = method.lr
        if lr == "auto":
            loss = prospr.meta.pure_loss(model)
            lr = prospr.meta.curvature.stable_lr(loss, loss.params(), next(iter(batches)), kappa=method.kappa)
        method = prospr.ProsPr(steps=method.steps, lr=lr, trace=trace)
    scores = prospr.score(model, batches, method=method, seed=job.seed)
    recipe = Recipe(job.epochs, 256, 0.1, weight_decay=5e-4, drops=(job.epochs // 2, 3 * job.epochs // 4))
    rows = []
    for sparsity in job.sparsities:
        masks = prospr.select(scores, sparsity)
        seen = prospr.inspect(model, masks, training.images[:1])
        order = Batches(training.images, training.labels, recipe.batch_size, job.seed, augment)
        result = train(new(), order, validation, recipe, masks)
        rows.append(
            {
                "setting": job.setting,
                "seed": job.seed,
                "sparsity": sparsity,
                "epochs": job.epochs,
                "accuracy": round(result.accuracy, 4),
                "lr": lr,
                "growth": trace.growth,
                "empty": len(masks.empty()),
                "thinnest": min(masks.densities().values()),
                "effective": seen.effective_density,
            }
        )
    return rows


def _data(folder: str, device: torch.device) -> tuple[Split, Split]:
    files = sorted(Path(folder).glob("data_batch_*.bin"))
    if not files:
        sys.exit(f"{folder}: no data_batch_*.bin here; give the folder of CIFAR-10's binary version")
    raw = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).view(-1, 3073)
    images, labels = raw[:, 1:].view(-1, 3, 32, 32).float() / 255, raw[:, 0].long()
    cut = len(labels) * 9 // 10
    mean, deviation = images[:cut].mean((0, 2, 3), keepdim=True), images[:cut].std((0, 2, 3), keepdim=True)
    images = ((images - mean) / deviation).to(device)
    labels = labels.to(device)
    return Split(images[:cut], labels[:cut]), Split(images[cut:], labels[cut:])


def _write(rows: list[dict], path: str) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def _arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with CIFAR-10's data_batch_*.bin")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the device")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.956, 0.982])
    parser.add_argument("--out", help="write one row a run to this CSV file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
