"""Masks for a multilayer perceptron on handwritten digits: a network in which it counts which weights are kept.

    python benchmarks/small_mlp.py --out results/small_mlp_cpu.jsonl        # about eight minutes on a core
    python benchmarks/small_mlp.py --arms prospr erk --sparsities 0.99 --seeds 0
    python benchmarks/small_mlp.py --out results/small_mlp_tail_cpu.jsonl --tail 0.05 --arms prospr "prospr, balanced"

64 inputs, two hidden layers of 256 with batch norm, ten outputs; 30 epochs of SGD. Accuracy on a fifth of the training
images, which is not trained on; the test images are not read. For one seed all networks have the same weights and see
the same batches. Many pixels at the edge are always blank, so a weight can be worth nothing. With --tail 0.05 there are
fewer images of each digit to train on than of the one before, of the nine a twentieth of the zeros' number. A line of
JSON a run is added to the file, and a run that has a line is not run again.
"""

import argparse
import json
import statistics
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import prospr
from prospr.errors import CollapseError
from prospr.lab.data import digits

ROUNDS = {"rounds": 20, "redraw": True}
ARMS: dict[str, dict] = {
    "prospr": {"method": "prospr"},
    "prospr, balanced": {"method": "prospr", "scope": "balanced"},
    "prospr: shuffled": {"method": "prospr"},
    "prospr, M = 0": {"method": prospr.Iterative(prospr.Snip(), **ROUNDS), "scope": "balanced"},
    "prospr, not redrawn": {"method": prospr.Iterative(prospr.ProsPr(), rounds=20), "scope": "balanced"},
    "prospr, spread": {"method": "prospr", "scope": "spread"},
    "prospr, global": {"method": "prospr", "scope": "global"},
    "prospr, one shot": {"method": "prospr-one-shot"},
    "ntk-sap": {"method": "ntk-sap"},
    "synflow": {"method": "synflow"},
    "force": {"method": "force"},
    "grasp": {"method": "grasp"},
    "snip": {"method": "snip"},
    "random, balanced": {"method": prospr.Iterative(prospr.Random(), rounds=100), "scope": "balanced"},
    "erk": {"method": "erk"},
}
EPOCHS, BATCH = 30, 128


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)
    out = Path(args.out) if args.out else None
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out is not None and out.exists() else []
    rows = [row for row in rows if row.get("tail", 1.0) == args.tail]
    done = {(row["arm"], row["sparsity"], row["seed"]) for row in rows}
    seen, held = _halves(args.tail)
    for sparsity in args.sparsities:
        for arm in args.arms:
            for seed in args.seeds:
                if (arm, sparsity, seed) not in done:
                    key = {"arm": arm, "sparsity": sparsity, "seed": seed, "tail": args.tail}
                    rows.append(key | _run(arm, sparsity, seed, seen, held))
                    if out is not None:
                        with out.open("a") as file:
                            file.write(json.dumps(rows[-1]) + "\n")
            here = [row for row in rows if (row["arm"], row["sparsity"]) == (arm, sparsity)]
            print(_line(arm, sparsity, [row["accuracy"] for row in here]), flush=True)


def _run(arm: str, sparsity: float, seed: int, seen: tuple, held: tuple) -> dict:
    model = _network(seed)
    try:
        masks = prospr.prune(model, _batches(seen, 80, seed), sparsity, seed=seed, **ARMS[arm])
    except CollapseError as error:
        return {"accuracy": None, "error": str(error), "layers": {}}
    if arm.endswith(": shuffled"):
        model = _network(seed)
        masks = prospr.sanity.shuffle(masks, seed)
        masks.apply(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    steps = EPOCHS * (len(seen[0]) // BATCH + 1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for images, labels in _batches(seen, steps, 1000 + seed):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        right = model.eval()(held[0]).argmax(1) == held[1]
    return {"accuracy": right.float().mean().item(), "error": None, "layers": masks.densities()}


def _network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    hidden = [nn.Sequential(nn.Linear(n, 256, bias=False), nn.BatchNorm1d(256), nn.ReLU()) for n in (64, 256)]
    return nn.Sequential(*hidden, nn.Linear(256, 10))


def _halves(tail: float) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Four fifths of the training images to train on, of digit d the tail^(d/9)th part, and the rest."""
    train = digits().train
    images, labels = train.images.float().flatten(1), train.labels
    images = images / images.max()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    first, last = order[: 4 * len(order) // 5], order[4 * len(order) // 5 :]
    by_digit = [first[labels[first] == digit] for digit in range(10)]
    some = [every[: round(len(every) * tail ** (digit / 9))] for digit, every in enumerate(by_digit)]
    first = torch.cat(some) if tail < 1 else first
    return (images[first], labels[first]), (images[last], labels[last])


def _batches(data: tuple[Tensor, Tensor], count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(len(data[0]), generator=generator)[:BATCH] for _ in range(count)]
    return [(data[0][row], data[1][row]) for row in rows]


def _line(arm: str, sparsity: float, found: list[float | None]) -> str:
    reached = [100 * one for one in found if one is not None]
    failed = f", {len(found) - len(reached)} failed" if len(reached) < len(found) else ""
    each = " ".join(f"{one:.1f}" for one in reached)
    if not reached:
        return f"{100 * sparsity:<6g}{arm:<22}{failed.removeprefix(', ')}"
    spread = f" ({statistics.stdev(reached):.1f})" if len(reached) > 1 else ""
    return f"{100 * sparsity:<6g}{arm:<22}{statistics.fmean(reached):.1f}{spread}   {each}{failed}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.95, 0.98, 0.99])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--tail", type=float, default=1.0, help="images of the rarest digit, as a part of the others'")
    parser.add_argument("--out", help="a line of JSON a run is added to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
