"""A small GPT on bytes of Python's own library, pruned at the start: what methods keep, and the loss after training.

    python benchmarks/gpt.py --out results/gpt_cpu.jsonl            # the table of docs/transformers.md; half an hour
    python benchmarks/gpt.py --out results/gpt_cpu.jsonl --untied   # the last layer has weights of its own
    python benchmarks/gpt.py --seeds 0 --steps 50                   # a look

For one seed all networks have the same weights and see the same batches. The last tenth of the text is held out, and
read once, after the last step. The text is a few modules of the running Python, so figures are for one version of it. A
line of JSON a run is added to the file, and a run that has a line is not run again.
"""

import argparse
import inspect
import json
import statistics
import sys
import warnings
from importlib import import_module
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import prospr
from prospr.lab.models import build

MODULES = ("argparse", "typing", "inspect", "doctest", "tarfile", "zipfile", "subprocess", "threading", "unittest.mock")
ARMS = {
    "dense": None,
    "prospr": {"method": "prospr"},
    "prospr, M = 0": {"method": prospr.Iterative(prospr.Snip(), rounds=20, redraw=True), "scope": "mapped"},
    "prospr, M = 10": {"method": prospr.Iterative(prospr.ProsPr(steps=10), rounds=20, redraw=True), "scope": "mapped"},
    "prospr, not redrawn": {"method": prospr.Iterative(prospr.ProsPr(), rounds=20), "scope": "mapped"},
    "prospr, recover": {"method": prospr.Iterative(prospr.ProsPr(), rounds=20, recover=True), "scope": "mapped"},
    "prospr, redrawn, recover": {
        "method": prospr.Iterative(prospr.ProsPr(), rounds=20, redraw=True, recover=True),
        "scope": "mapped",
    },
    "prospr, balanced": {"method": "prospr", "scope": "balanced"},  # without what rare tokens are given
    "prospr, balanced: last layer shuffled": {"method": "prospr", "scope": "balanced"},
    "prospr, balanced: others shuffled": {"method": "prospr", "scope": "balanced"},
    "prospr, layer": {"method": "prospr", "scope": "layer"},
    "prospr, spread": {"method": "prospr", "scope": "spread"},
    "prospr, one shot": {"method": "prospr-one-shot"},
    "prospr, one shot, layer": {"method": "prospr-one-shot", "scope": "layer"},
    "snip": {"method": "snip"},
    "snip, layer": {"method": "snip", "scope": "layer"},
    "synflow": {"method": "synflow"},
    "grasp": {"method": "grasp"},
    "force": {"method": "force"},
    "iter-snip": {"method": "iter-snip"},
    "ntk-sap": {"method": "ntk-sap"},
    "prospr, published": {"method": "prospr-published"},
    "magnitude, layer": {"method": "magnitude", "scope": "layer"},
    "erk": {"method": "erk"},
    "random, balanced": {"method": prospr.Iterative(prospr.Random(), rounds=100), "scope": "balanced"},
}


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", prospr.errors.CollapseWarning)
    text = torch.tensor(list("".join(inspect.getsource(import_module(name)) for name in MODULES).encode()))
    seen, held = text[: 9 * len(text) // 10], text[9 * len(text) // 10 :]
    size = {"width": args.width, "depth": args.depth, "heads": 3, "context": 64, "tied": not args.untied}
    about = {"python": sys.version.split()[0], **size, "steps": args.steps, "sparsity": args.sparsity, "error": None}
    print(f"{len(text):,} bytes; {about}")
    out = Path(args.out) if args.out else None
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out is not None and out.exists() else []
    for seed in args.seeds:
        for arm in args.arms:
            key = {**about, "arm": arm, "seed": seed}
            if any(key.items() <= row.items() for row in rows):
                continue
            rows.append(key | run(arm, seed, size, args, seen, held))
            print(f"seed {seed}  {arm:<40} held-out loss {rows[-1]['loss']:.4f}   {rows[-1]['kept']}", flush=True)
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    print("\nheld-out loss, mean and deviation over the seeds")
    for arm in args.arms:
        losses = [row["loss"] for row in rows if about.items() <= row.items() and row["arm"] == arm]
        spread = f" ({statistics.stdev(losses):.4f})" if len(losses) > 1 else ""
        print(f"{arm:<40} {statistics.fmean(losses):.4f}{spread}")


def run(arm: str, seed: int, size: dict, args: argparse.Namespace, seen: Tensor, held: Tensor) -> dict:
    model, how, kept = build("gpt", seed=seed, **size), ARMS[arm], {}
    if how is not None:
        in_rounds = how["method"] == "prospr" or isinstance(how["method"], prospr.Iterative)
        batches = pieces(seen, 80 if in_rounds else 4, seed)  # twenty rounds of four
        masks = prospr.prune(model, batches, args.sparsity, loss=next_token, seed=seed, **how)
        kept = by_part(masks)
        if ": " in arm:
            model = build("gpt", seed=seed, **size)
            partly_shuffled(masks, arm.partition(": ")[2].startswith("last"), seed).apply(model)
    train(model, pieces(seen, args.steps, 1000 + seed), args.steps)
    with torch.no_grad():
        loss = statistics.fmean(next_token(model, batch).item() for batch in pieces(held, 40, 0))
    return {"loss": loss, "kept": {part: round(density, 4) for part, density in kept.items()}}


def partly_shuffled(masks: prospr.Masks, last: bool, seed: int) -> prospr.Masks:
    """The masks, with that of the last layer shuffled (it may be the embedding too), or those of all others."""
    moved, head = prospr.sanity.shuffle(masks, seed), next(n for n in masks if n in ("tokens.weight", "head.weight"))
    return prospr.Masks({name: moved[name] if (name == head) == last else mask for name, mask in masks.items()})


def pieces(text: Tensor, count: int, seed: int, size: int = 16, length: int = 65) -> list[Tensor]:
    starts = torch.randint(len(text) - length, (count, size), generator=torch.Generator().manual_seed(seed))
    return [torch.stack([text[s : s + length] for s in row]) for row in starts]


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(model: nn.Module, batches: list[Tensor], steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for batch in batches:
        optimizer.zero_grad()
        next_token(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def by_part(masks: prospr.Masks) -> dict[str, float]:
    """The density of each kind of layer, over all blocks."""
    counts: dict[str, list[int]] = {}
    for name, mask in masks.items():
        part = name.removesuffix(".weight").split(".", 2)[-1]
        part = {"attention.q": "q, k", "attention.k": "q, k", "attention.v": "v"}.get(part, part)
        kept = counts.setdefault(part, [0, 0])
        kept[0] += int(mask.sum())
        kept[1] += mask.numel()
    return {part: kept / total for part, (kept, total) in counts.items()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A pruned GPT on bytes.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--untied", action="store_true", help="the token embedding is not the last layer too")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--out", help="a line of JSON a run is added to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
