"""How many channels should a few weights be spread over? Random masks in all or some of those between two layers.

    python benchmarks/narrower.py --out results/narrower_cpu.json              # ten seeds: six minutes on one core
    python benchmarks/narrower.py --networks resnet20 --sparsities 0.982 0.992 --seeds 0 1 2 3 4 5 6 7

Handwritten digits, which are in the package; what is told is the accuracy on the test images. Every layer keeps as many
weights as the others, at most 90 % of what it could. At `--shares 0.25` they go to a quarter of the channels that one
layer makes and another reads, the same for both; other channels, such as a residual network's stream, are all used.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean, stdev

import torch
from harness import machine

from prospr.channels import groups
from prospr.channels.focus import inner_channels
from prospr.lab.experiment import Experiment, Training
from prospr.lab.runs.making import Loader, Parts
from prospr.lab.train import Run, train_together
from prospr.scores.base import prunable


def main(words: list[str] | None = None) -> None:
    args = _arguments(words)
    torch.set_num_threads(1)
    device = torch.device("cpu")
    loader, rows = Loader(device, None), []
    print(f"torch {torch.__version__}, {machine('cpu')}, {args.epochs} epochs\n")
    print(f"{'network':<16}{'sparsity':>9}{'channels':>10}{'weights each':>14}{'mean %':>9}{'sd':>7}{'n':>4}")
    for network in args.networks:
        for sparsity in args.sparsities:
            for share in args.shares:
                found = [measure(network, sparsity, share, seed, args.epochs, loader, device) for seed in args.seeds]
                rows += found
                reached = [100 * row["accuracy"] for row in found]
                spread = f"{stdev(reached):.2f}" if len(reached) > 1 else ""
                print(
                    f"{network:<16}{100 * sparsity:>7.1f} %{100 * share:>8.0f} %{found[0]['weights_each']:>14.1f}"
                    f"{fmean(reached):>9.2f}{spread:>7}{len(reached):>4}",
                    flush=True,
                )
                if args.out:
                    Path(args.out).write_text(json.dumps({"machine": machine("cpu"), "rows": rows}, indent=1) + "\n")


def measure(
    network: str, sparsity: float, share: float, seed: int, epochs: int, loader: Loader, device: torch.device
) -> dict:
    one = Experiment("digits", network, seed=seed, training=Training(epochs=epochs))
    data = loader(one)
    parts = Parts(one, data, device)
    masks = draw(parts.network(), parts.example, sparsity, share, seed)
    run = Run(parts.network(), parts.batches(one.trained_by.batch_size), one.trained_by, masks, parts.task)
    (done,) = train_together([run], together=1, validation=data.test, evaluate_every=epochs)
    each = [int(m.sum()) / int(m.flatten(1).any(1).sum()) for m in masks.values() if m.dim() == 4 and m.shape[1] > 3]
    row = {"network": network, "sparsity": sparsity, "channels": share, "seed": seed, "epochs": epochs}
    return {**row, "weights_each": fmean(each), "accuracy": done.epochs[-1].validation}


def draw(model: torch.nn.Module, example, sparsity: float, share: float, seed: int) -> dict[str, torch.Tensor]:
    """Masks at random: as many weights in every layer, in a share of its inner channels."""
    rng = torch.Generator().manual_seed(seed + 1000)
    found = groups(model, example, verify=False)
    shapes = {name: p.shape for name, p in prunable(model).items()}
    gone: set[int] = set()
    for one in inner_channels(found, list(shapes)):
        order = torch.randperm(len(one.groups), generator=rng).tolist()
        gone |= {one.groups[i] for i in order[max(2, round(share * len(order))) :]}
    allowed = found.masks(gone)
    places = {name: allowed[name] if name in allowed else torch.ones(s, dtype=torch.bool) for name, s in shapes.items()}
    kept = round((1 - sparsity) * sum(s.numel() for s in shapes.values()))
    counts = even({name: int(0.9 * place.sum()) for name, place in places.items()}, kept)
    masks = {}
    for name, place in places.items():
        order = torch.where(place, torch.rand(place.shape, generator=rng), -1.0).flatten().argsort(descending=True)
        masks[name] = torch.zeros(place.numel(), dtype=torch.bool)
        masks[name][order[: counts[name]]] = True
        masks[name] = masks[name].reshape(place.shape)
    return masks


def even(room: dict[str, int], total: int) -> dict[str, int]:
    """As many each as there is room for, `total` in all."""
    if sum(room.values()) < total:
        raise SystemExit(f"{total} weights have no room in so few channels; give larger --shares or --sparsities")
    counts = dict.fromkeys(room, 0)
    for name in sorted(room, key=lambda one: room[one]):  # the smallest first: the others share what it cannot take
        left = [other for other in room if counts[other] == 0]
        counts[name] = min(room[name], (total - sum(counts.values())) // len(left))
    counts[max(room, key=lambda one: room[one] - counts[one])] += total - sum(counts.values())
    return counts


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["small_convnet"])
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.95, 0.975])
    parser.add_argument("--shares", nargs="+", type=float, default=[1.0, 0.75, 0.5, 0.35, 0.25])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--out", help="write the rows as JSON to this file")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
