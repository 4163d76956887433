"""Many ways to prune ResNet-20, trained briefly and judged on images held out of the training set, not the test set.

    python benchmarks/screening.py --root DIR --out screening.jsonl
    python benchmarks/screening.py --root DIR --variants snip it20 it20-m10 --sparsities 0.956 0.982 --epochs 30

DIR holds cifar-10-batches-bin. Every variant starts from the same weights and sees the same images in the same order,
seed by seed. Several processes score while one trains, `--together` at a time; a line a run is written as it ends. On a
GPU 30 epochs take about 7 s a run; without one it is a small version on the embedded digits that shows it works.

What `prospr run` has settings for can be tried by `fair.py --split validation` too; here are scores of one's own.
"""

import argparse
import copy
import json
import os
import queue
import sys
import time
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from harness import machine
from torch import multiprocessing

import prospr
from prospr import Iterative, Magnitude, NtkSap, ProsPr, Snip
from prospr.lab.experiment import Data, Experiment, Training
from prospr.lab.models import initialise
from prospr.lab.run import choose_device
from prospr.lab.runs.making import Loader, Parts
from prospr.lab.train import Run, train_together
from prospr.registry import Method, find
from prospr.scores.base import Problem, Score, Scores

start = partial(initialise, "resnet20")  # draws a convolutional network's first weights as the lab does


@dataclass(frozen=True)
class Spread(Score):
    """Another score, scaled so that every output and every input of a layer has the same total, and every layer too."""

    inner: Score
    sweeps: int = 8

    def score(self, problem: Problem) -> Scores:
        return {name: self._spread(s) for name, s in self.inner.score(problem).items()}

    def _spread(self, s: torch.Tensor) -> torch.Tensor:
        table = s.double().flatten(2).sum(2) if s.dim() > 2 else s.double()
        scale = torch.ones_like(table)
        for _ in range(self.sweeps):
            for dim in (0, 1):
                total = (table * scale).sum(dim, keepdim=True)
                scale = scale / torch.where(total > 0, total, 1.0)
        scale = scale / (table * scale).sum().clamp_min(1e-300)
        return (s.double() * scale.reshape(*scale.shape, *[1] * (s.dim() - 2))).to(s.dtype)


@dataclass(frozen=True)
class Redrawn(Score):
    """Another score, of the network with its first weights drawn anew; every round draws others."""

    inner: Score
    draws: int = 1

    def score(self, problem: Problem) -> Scores:
        total: Scores = {}
        for draw in range(self.draws):
            seed = problem.seed * 7919 + draw + 1
            model = copy.deepcopy(problem.model)
            with torch.random.fork_rng(devices=[0] if torch.cuda.is_available() else []):
                torch.manual_seed(seed)
                start(model)
            found = self.inner.score(replace(problem, model=model, seed=seed))
            total = {name: total[name] + s if total else s for name, s in found.items()}
        return total


@dataclass(frozen=True)
class Shuffled(Score):
    """Nothing but noise, drawn anew in every round."""

    def score(self, problem: Problem) -> Scores:
        generator = torch.Generator().manual_seed(problem.seed)
        masks = problem.masks or {}
        noise = {n: torch.rand(w.shape, generator=generator).to(w.device) for n, w in problem.weights().items()}
        return {name: s * masks[name] if name in masks else s for name, s in noise.items()}


@dataclass(frozen=True)
class Drawn(Score):
    """Masks drawn at random, with a structure: which kind of it does a sparse ResNet train best with?

    tilt: a layer of n weights keeps in proportion to n**tilt of them (0: as many as any other), at most half.
    middle: only this share of the channels between the two convolutions of a block.
    taps: only these places of a 3x3 kernel, of 0 to 8.
    """

    tilt: float = 0.0
    middle: float = 1.0
    taps: tuple[int, ...] = tuple(range(9))

    def score(self, problem: Problem) -> Scores:
        assert problem.density is not None
        generator = torch.Generator().manual_seed(problem.seed)
        weights = problem.weights()
        open_ = {name: self._open(name, w.shape) for name, w in weights.items()}
        room = {name: min(int(o.sum()), weights[name].numel() // 2) for name, o in open_.items()}
        counts = self._counts(room, {n: w.numel() for n, w in weights.items()}, problem.density)
        found = {}
        for name, w in weights.items():
            noise = torch.rand(w.shape, generator=generator)
            order = torch.where(open_[name], noise, -1.0).flatten().argsort(descending=True)
            score = torch.zeros(w.numel())
            score[order[: counts[name]]] = 1.0 + torch.rand(counts[name], generator=generator)
            found[name] = score.reshape(w.shape).to(w.device)
        return found

    def _open(self, name: str, shape: torch.Size) -> torch.Tensor:
        """Where weights may be."""
        found = torch.ones(shape, dtype=torch.bool)
        if name.startswith("layer") and ".conv1." in name:
            found[round(self.middle * shape[0]) :] = False
        if name.startswith("layer") and ".conv2." in name:
            found[:, round(self.middle * shape[1]) :] = False
        if len(shape) == 4 and shape[2:] == (3, 3) and shape[1] > 3:
            kept = torch.zeros(9, dtype=torch.bool)
            kept[list(self.taps)] = True
            found &= kept.view(3, 3)
        return found

    def _counts(self, room: dict[str, int], sizes: dict[str, int], density: float) -> dict[str, int]:
        wanted = round(density * sum(sizes.values()))
        low, high = 0.0, 1e9
        for _ in range(200):
            factor = (low + high) / 2
            total = sum(min(room[n], int(factor * sizes[n] ** self.tilt)) for n in room)
            low, high = (factor, high) if total <= wanted else (low, factor)
        counts = {n: min(room[n], int(low * sizes[n] ** self.tilt)) for n in room}
        for name in sorted(room, key=room.__getitem__, reverse=True):
            extra = min(wanted - sum(counts.values()), room[name] - counts[name], 20)
            counts[name] += extra
        return counts


def in_rounds(rounds: int = 20, recover: bool = False, **changes) -> Iterative:
    return Iterative(ProsPr(**changes), rounds, recover=recover)


def balanced(rule: Iterative) -> Method:
    return Method(rule, scope="balanced")


VARIANTS: dict[str, str | Method | Iterative | ProsPr] = {
    "snip": "snip",
    "synflow": "synflow",
    "ntk-sap": Iterative(NtkSap(init=start), rounds=20),
    "force": "force",
    "prospr": "prospr-one-shot",
    "it20": in_rounds(),
    "it20-recover": in_rounds(recover=True),
    "it20-m10": in_rounds(steps=10),
    "iter-snip": "iter-snip",
    "erk": "erk",
    "it20-first30": in_rounds(steps=30, order="first", lr=0.1),
    "it60-m1": in_rounds(60, steps=1, lr=0.01),
    "prospr-erk": Method(ProsPr(), scope="erk"),
    "it20-kappa3": in_rounds(kappa=3.0),
    "random-balanced": balanced(Iterative(Shuffled(), rounds=100)),
    "it20-balanced": balanced(Iterative(ProsPr(), rounds=20)),
    "it20-balanced-m10": balanced(Iterative(ProsPr(steps=10), rounds=20)),
    "it20-balanced-recover": balanced(Iterative(ProsPr(), rounds=20, recover=True)),
    "it20-balanced-redrawn": balanced(Iterative(Redrawn(ProsPr()), rounds=20)),
    "it20-redrawn": Iterative(Redrawn(ProsPr()), rounds=20),
    "iter-snip-balanced": balanced(Iterative(Snip(), rounds=60)),
    "iter-snip-redrawn": Iterative(Redrawn(Snip()), rounds=60),
    "iter-snip-balanced-redrawn": balanced(Iterative(Redrawn(Snip()), rounds=60)),
    "it20-spread": Iterative(Spread(ProsPr()), rounds=20),
    "iter-snip-spread": Iterative(Spread(Snip()), rounds=60),
    "magnitude-spread": Iterative(Spread(Magnitude()), rounds=60),
    "it20-spread-redrawn": Iterative(Spread(Redrawn(ProsPr())), rounds=20),
    "it20-spread-recover": Iterative(Spread(ProsPr()), rounds=20, recover=True),
    "it20-erk": Method(in_rounds(), scope="erk"),
    "grasp": "grasp",
    "prospr-lr0.1": ProsPr(lr=0.1),
    "iter-snip-mb": Iterative(Snip(batches=4), rounds=60),
    "random": "random",
    "magnitude": "magnitude",
    "drawn": Iterative(Drawn(), rounds=1),
    "drawn-early": Iterative(Drawn(tilt=-0.3), rounds=1),
    "drawn-late": Iterative(Drawn(tilt=0.25), rounds=1),
    "drawn-mid50": Iterative(Drawn(middle=0.5), rounds=1),
    "drawn-mid25": Iterative(Drawn(middle=0.25), rounds=1),
    "drawn-cross": Iterative(Drawn(taps=(1, 3, 4, 5, 7)), rounds=1),
    "default-m10": balanced(Iterative(ProsPr(steps=10), rounds=20, redraw=True)),
    "default-m30": balanced(Iterative(ProsPr(steps=30), rounds=20, redraw=True)),
}


def main() -> None:
    args = _arguments()
    device = choose_device(None)
    print(f"torch {torch.__version__}, {machine(device.type)}", flush=True)
    wanted = [(v, s, seed) for v in args.variants for s in args.sparsities for seed in args.seeds]
    context = multiprocessing.get_context("spawn")
    todo, done = context.Queue(), context.Queue()
    for one in wanted:
        todo.put(one)
    for _ in range(args.scorers):
        todo.put(None)
    workers = [context.Process(target=score, args=(args, todo, done), daemon=True) for _ in range(args.scorers)]
    for worker in workers:
        worker.start()
    began, left = time.perf_counter(), len(wanted)
    loader = Loader(device, args.root)
    out = Path(args.out or os.devnull)
    while left:
        ready = []
        while len(ready) < min(args.together, left):
            try:
                found = done.get(timeout=5)
            except queue.Empty:
                if not any(worker.is_alive() for worker in workers) and done.empty():
                    sys.exit("the processes that score have ended early")
                continue
            if found["error"] is not None:
                left -= 1
                tell(args, found, out, began)
                continue
            ready.append(found)
        if not ready:
            break
        for row in train(args, ready, loader, device):
            left -= 1
            tell(args, row, out, began)
    for worker in workers:
        worker.join()


def experiment(args, seed: int) -> Experiment:
    if args.dataset == "digits":
        return Experiment(seed=seed, data=Data(validation=0.2), training=Training(epochs=args.epochs))
    training = Training(epochs=args.epochs, precision=args.precision)
    return Experiment(args.dataset, args.network, seed=seed, data=Data(validation=0.1), training=training)


def score(args, todo, done) -> None:
    """In a process of its own: score what comes, and hand the masks on."""
    torch.set_num_threads(1)
    device = choose_device(None)
    loader = Loader(device, args.root)
    while (one := todo.get()) is not None:
        variant, sparsity, seed = one
        parts = Parts(experiment(args, seed), loader(experiment(args, seed)), device)
        row = {"variant": variant, "sparsity": sparsity, "seed": seed, "error": None}
        model, began = parts.network(), time.perf_counter()
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                batches = parts.batches(args.score_batch)
                how = {"loss": parts.task.loss, "example": parts.example, "seed": seed, "collapse": "warn"}
                masks = prospr.prune(model, batches, sparsity, method=find(VARIANTS[variant]), **how)
            row |= {"masks": {name: mask.cpu().numpy() for name, mask in masks.items()}, "empty": masks.empty()}
            seen = prospr.inspect(parts.network(), masks, parts.example)
            row |= {"layers": masks.densities(), "effective": seen.effective_density, "kept": masks.kept}
            row |= {"warnings": sorted({str(one.message) for one in said})}
        except prospr.PruningError as error:
            row["error"] = str(error)
        row["score_seconds"] = time.perf_counter() - began
        done.put(row)


def train(args, rows: list[dict], loader: Loader, device: torch.device) -> list[dict]:
    """The rows with what their networks reached."""
    runs = []
    for row in rows:
        one = experiment(args, row["seed"])
        parts = Parts(one, loader(one), device)
        masks = {name: torch.from_numpy(mask).to(device) for name, mask in row.pop("masks").items()}
        recipe = one.trained_by
        runs.append(Run(parts.network(), parts.batches(recipe.batch_size), recipe, masks, parts.task))
    data = loader(experiment(args, 0))
    began = time.perf_counter()
    found = train_together(
        runs,
        together=args.together,
        validation=data.validation,
        evaluate_every=args.epochs,
        compile=args.compile,
    )
    seconds = (time.perf_counter() - began) / len(runs)
    return [
        {**row, "validation": one.epochs[-1].validation, "loss": one.epochs[-1].loss, "train_seconds": seconds}
        for row, one in zip(rows, found, strict=True)
    ]


def tell(args, row: dict, out: Path, began: float) -> None:
    name = f"{row['variant']:<16}{100 * row['sparsity']:>6.1f} %  seed {row['seed']}"
    if row["error"] is not None:
        print(f"{name}  failed: {row['error']}", flush=True)
    else:
        empty = f"  {len(row['empty'])} layers empty" if row["empty"] else ""
        print(
            f"{name}  validation {100 * row['validation']:.2f}  effective {100 * row['effective']:.2f} %"
            f"  scored {row['score_seconds']:.1f} s  trained {row['train_seconds']:.1f} s"
            f"  [{time.perf_counter() - began:.0f} s]{empty}",
            flush=True,
        )
    row = {**row, "epochs": args.epochs, "score_batch": args.score_batch, "network": args.network}
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _arguments() -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS) if gpu else ["snip", "it20"], choices=VARIANTS)
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.956, 0.982] if gpu else [0.9])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1] if gpu else [0])
    parser.add_argument("--epochs", type=int, default=30 if gpu else 2)
    parser.add_argument("--dataset", default="cifar10" if gpu else "digits")
    parser.add_argument("--network", default="resnet20" if gpu else "small_convnet")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--score-batch", type=int, default=512 if gpu else 128)
    parser.add_argument("--root", help="where data sets lie")
    parser.add_argument("--scorers", type=int, default=6 if gpu else 1)
    parser.add_argument("--together", type=int, default=8)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", help="a line of JSON a run is added to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
