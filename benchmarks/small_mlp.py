"""Masks for a multilayer perceptron on handwritten digits: a network in which it counts which weights are kept.

    python benchmarks/small_mlp.py --out results/small_mlp_cpu.jsonl        # about eight minutes on a core
    python benchmarks/small_mlp.py --arms prospr erk --sparsities 0.99 --seeds 0
    python benchmarks/small_mlp.py --out results/small_mlp_tail_cpu.jsonl --tail 0.05 --arms prospr "prospr, balanced"
    python benchmarks/small_mlp.py --out results/small_mlp_cpu.jsonl --leads      # ProsPr by other settings
    python benchmarks/small_mlp.py --out results/small_mlp_cifar_cpu.jsonl --root DIR --sparsities 0.99

64 inputs, two hidden layers of 256 with batch norm, ten outputs; 30 epochs of SGD. Accuracy on a fifth of the training
images, which is not trained on; the test images are not read. For one seed all networks have the same weights and see
the same batches. Many pixels at the edge are always blank, so a weight can be worth nothing. A line of JSON a run is
added to the file, and a run that has a line is not run again.

--tail 0.05: fewer images of each digit to train on than of the one before, of the nine a twentieth of the zeros'.
--root DIR: in place of digits CIFAR-10 (in DIR/cifar-10-batches-bin) as 8 x 8 gray pixels, none of which is blank;
20,000 images to train on and 5,000 others.
"""

import argparse
import copy
import itertools
import json
import statistics
import warnings
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import prospr
from prospr.errors import CollapseError
from prospr.lab.data import digits, load
from prospr.meta.loss import evaluation_mode
from prospr.schedules import reordered
from prospr.scores.base import Problem, Scores


@dataclass(frozen=True)
class Averaged(prospr.Score):
    """The mean of a score, as shares, over other batches; `redraw`: and over other orders of every layer's weights."""

    one: prospr.Score
    times: int
    redraw: bool = False

    def score(self, problem: Problem) -> Scores:
        found = []
        for time in range(self.times):
            weights = reordered(problem.weights(), 1000 * problem.seed + time) if self.redraw else problem.drawn
            found.append(self.one.score(replace(problem, drawn=weights)))
        return {name: torch.stack([scores[name] for scores in found]).mean(0) for name in problem.names}


@dataclass(frozen=True)
class WarmedUp(prospr.Score):
    """A score of the network in eval mode, with norm statistics that are the mean over ten batches."""

    one: prospr.Score

    def saliency(self, problem: Problem) -> Scores:
        model = copy.deepcopy(problem.model).train()
        with torch.no_grad():
            for name, start in problem.start(problem.pure_loss()).items():
                model.get_parameter(name).copy_(start)
            for module in model.modules():
                if isinstance(module, nn.BatchNorm1d):
                    module.reset_running_stats()
                    module.momentum = None
            for images, _ in itertools.islice(problem.data(), 10):
                model(images)
        with patch.object(import_module("prospr.scores.prospr"), "training_mode", evaluation_mode):
            return self.one.saliency(replace(problem, model=model))


def _rounds(score: prospr.Score, redraw: bool = True, recover: bool = False) -> dict:
    """What the default does on a perceptron, with another score."""
    return {"method": prospr.Iterative(score, rounds=20, redraw=redraw, recover=recover), "scope": "balanced"}


ARMS: dict[str, dict] = {
    "prospr": {"method": "prospr"},
    "prospr, balanced": {"method": "prospr", "scope": "balanced"},
    "prospr: shuffled": {"method": "prospr"},
    "prospr, M = 0": _rounds(prospr.Snip()),
    "prospr, not redrawn": _rounds(prospr.ProsPr(), redraw=False),
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
LEADS: dict[str, dict] = {
    **{f"prospr, M = {steps}": _rounds(prospr.ProsPr(steps=steps)) for steps in (1, 10, 30, 79)},
    "prospr, not redrawn, M = 0": _rounds(prospr.Snip(), redraw=False),
    "prospr, not redrawn, M = 0, eleven batches": _rounds(prospr.Snip(batches=11), redraw=False),
    "prospr, M = 0, eleven batches": _rounds(prospr.Snip(batches=11)),
    **{f"prospr, not redrawn, M = {m}": _rounds(prospr.ProsPr(steps=m), redraw=False) for m in (1, 10, 30, 79)},
    "prospr, not redrawn, M = 10, first order": _rounds(prospr.ProsPr(steps=10, order="first"), redraw=False),
    "prospr, lr 0.1": _rounds(prospr.ProsPr(lr=0.1)),
    "prospr, lr 0.1, M = 30": _rounds(prospr.ProsPr(lr=0.1, steps=30)),
    "prospr, kappa 0.25": _rounds(prospr.ProsPr(kappa=0.25)),
    "prospr, kappa 4": _rounds(prospr.ProsPr(kappa=4.0)),
    "prospr, momentum": _rounds(prospr.ProsPr(momentum=0.9)),
    "prospr, first order": _rounds(prospr.ProsPr(order="first")),
    "prospr, same batch": _rounds(prospr.ProsPr(same_batch=True)),
    "prospr, batches of 16": _rounds(prospr.ProsPr()) | {"batch": 16},
    "prospr, batches of 512": _rounds(prospr.ProsPr()) | {"batch": 512},
    "prospr, four trajectories": _rounds(Averaged(prospr.ProsPr(), 4)),
    "prospr, focused": {"method": "prospr", "scope": "focused"},
    "prospr, recover": _rounds(prospr.ProsPr(), redraw=False, recover=True),
    "prospr, redrawn, recover": _rounds(prospr.ProsPr(), recover=True),
    "prospr, recover, global": {"method": prospr.Iterative(prospr.ProsPr(), rounds=20, recover=True)},
    "prospr, recover, global, 60 rounds": {"method": prospr.Iterative(prospr.ProsPr(), rounds=60, recover=True)},
    "force, 20 rounds": {"method": prospr.Iterative(prospr.Snip(), rounds=20, recover=True)},
    "prospr, warmed up": _rounds(WarmedUp(prospr.ProsPr())),
    "prospr, four draws": _rounds(Averaged(prospr.ProsPr(), 4, redraw=True)),
    "prospr, sixteen draws": _rounds(Averaged(prospr.ProsPr(), 16, redraw=True)),
    "prospr, M = 0, sixteen draws": _rounds(Averaged(prospr.Snip(), 16, redraw=True)),
}
EPOCHS, BATCH = 30, 128


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)
    out = Path(args.out) if args.out else None
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out is not None and out.exists() else []
    images = {"tail": args.tail, "data": "cifar10" if args.root else "digits"}
    rows = [row for row in rows if images == {"tail": row.get("tail", 1.0), "data": row.get("data", "digits")}]
    done = {(row["arm"], row["sparsity"], row["seed"]) for row in rows}
    seen, held = _gray_cifar(args.root) if args.root else _digits(args.tail)
    for sparsity in args.sparsities:
        for arm in args.arms or (LEADS if args.leads else ARMS):
            for seed in args.seeds:
                if (arm, sparsity, seed) not in done:
                    key = {"arm": arm, "sparsity": sparsity, "seed": seed}
                    rows.append(key | images | _run(arm, sparsity, seed, seen, held))
                    if out is not None:
                        with out.open("a") as file:
                            file.write(json.dumps(rows[-1]) + "\n")
            found = _by_seed(rows, arm, sparsity)
            line = _line(arm, sparsity, list(found.values()))
            if arm != args.minus:
                line += _paired(found, _by_seed(rows, args.minus, sparsity), args.minus)
            print(line, flush=True)


def _by_seed(rows: list[dict], arm: str, sparsity: float) -> dict[int, float | None]:
    found = {row["seed"]: row["accuracy"] for row in rows if (row["arm"], row["sparsity"]) == (arm, sparsity)}
    return dict(sorted(found.items()))


def _paired(found: dict[int, float | None], other: dict[int, float | None], name: str) -> str:
    """The difference to another arm in the seeds that both have, and its deviation."""
    pairs = [(found[seed], other[seed]) for seed in found if found[seed] is not None and other.get(seed) is not None]
    gaps = [100 * (mine - theirs) for mine, theirs in pairs]
    if len(gaps) < 2:
        return ""
    return f"   over {name}: {statistics.fmean(gaps):+.2f} ({statistics.stdev(gaps):.2f}, {len(gaps)} pairs)"


def _run(arm: str, sparsity: float, seed: int, seen: tuple, held: tuple) -> dict:
    model, settings = _network(seed), {"batch": BATCH, **(ARMS | LEADS)[arm]}
    try:
        batches = _batches(seen, 80, seed, settings.pop("batch"))
        masks = prospr.prune(model, batches, sparsity, seed=seed, **settings)
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


def _gray_cifar(root: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    split = load("cifar10", root=root).train
    images = F.avg_pool2d(split.images[:25_000].float().mean(1, keepdim=True), 4).flatten(1)
    images, labels = (images - images[:20_000].mean()) / images[:20_000].std(), split.labels[:25_000]
    return (images[:20_000], labels[:20_000]), (images[20_000:], labels[20_000:])


def _digits(tail: float) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
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


def _batches(data: tuple[Tensor, Tensor], count: int, seed: int, size: int = BATCH) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(len(data[0]), generator=generator)[:size] for _ in range(count)]
    return [(data[0][row], data[1][row]) for row in rows]


def _line(arm: str, sparsity: float, found: list[float | None]) -> str:
    reached = [100 * one for one in found if one is not None]
    failed = f", {len(found) - len(reached)} failed" if len(reached) < len(found) else ""
    each = " ".join(f"{one:.1f}" for one in reached)
    if not reached:
        return f"{100 * sparsity:<6g}{arm:<44}{failed.removeprefix(', ')}"
    spread = f" ({statistics.stdev(reached):.1f})" if len(reached) > 1 else ""
    return f"{100 * sparsity:<6g}{arm:<44}{statistics.fmean(reached):.1f}{spread}   {each}{failed}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS | LEADS, metavar="ARM")
    parser.add_argument("--leads", action="store_true", help="ProsPr by other settings, in place of all methods")
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.95, 0.98, 0.99])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--tail", type=float, default=1.0, help="images of the rarest digit, as a part of the others'")
    parser.add_argument("--root", help="where data sets lie: CIFAR-10 in place of digits")
    parser.add_argument(
        "--minus",
        choices=ARMS | LEADS,
        default="prospr",
        metavar="ARM",
        help="an arm; the others are told from it, paired by seed",
    )
    parser.add_argument("--out", help="a line of JSON a run is added to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
