"""What structured pruning buys: a training step, an inference and their memory, before and after shrinking.

    python benchmarks/channels.py --quick                                            # narrow networks, half a minute
    python benchmarks/channels.py --networks resnet18 vgg19 --out results/channels_cpu.json
    python benchmarks/channels.py --device cuda --budget 400 --out results/channels_h200.json
    PYTHONPATH=FOLDER python benchmarks/channels.py --torch-pruning                  # beside torch-pruning 1.6.1

dense: the network as it is. masked: the whole network with masks on it. shrunk: without the channels that are pruned
(`round_to=8`: as many kept as a multiple of eight). torch-pruning: its magnitude pruning at the FLOPs of `shrunk`.

Times are medians over interleaved repetitions, ratios medians of dense / variant of the same repetition and mode. Data
are random and lie on the device: loading them is not measured. Peak memory is a training step's: weights, gradients,
momentum, activations, workspace. FLOPs are of one forward pass of one sample; a masked weight counts like any other.
"""

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch_pruning_rival
from harness import each, timed
from stepping import MODES, How, Stepper
from torch import nn

import prospr
from prospr.channels.trial import plan_for
from prospr.counting import flops
from prospr.errors import SettingError
from prospr.lab.models import build
from prospr.lab.seeds import generator


@dataclass(frozen=True)
class Shape:
    classes: int
    channels: int
    side: int
    cpu_batch: int
    gpu_batch: int
    quick_side: int


SHAPES = {
    "vgg19": Shape(100, 3, 32, 32, 256, 32),
    "resnet18": Shape(100, 3, 32, 32, 256, 32),
    "resnet50": Shape(1000, 3, 224, 4, 128, 64),
    "unet": Shape(2, 1, 256, 1, 16, 32),
}
QUICK_BATCH, QUICK_WIDTH = 4, 16

# Minutes of the whole training, CIFAR-100, 200 epochs, one RTX 2080 Ti; channels pruned by ProsPr (the paper's appendix
# on wall-clock time). By the share of parameters pruned.
PAPER = {
    "resnet18": {0.0: 83.9, 0.8: 60.76, 0.9: 54.8, 0.95: 46.6},
    "vgg19": {0.0: 50.3, 0.8: 45.8, 0.9: 39.93, 0.95: 38.8},
}


@dataclass(frozen=True)
class Candidate:
    """One network to be timed."""

    variant: str
    sparsity: float
    round_to: int
    model: nn.Module
    parameters: int
    flops: int


@dataclass
class Row:
    network: str
    batch: int
    mode: str
    variant: str
    sparsity: float
    round_to: int
    parameters: int
    flops: int
    train_ms: float = float("nan")
    train_ratio: float = float("nan")  # dense / this, and the lowest and highest of them
    train_range: list[float] = field(default_factory=list)
    infer_ms: float = float("nan")
    infer_ratio: float = float("nan")
    infer_range: list[float] = field(default_factory=list)
    n: int = 0  # repetitions
    peak_gib: float = float("nan")
    ready_s: float = float("nan")  # warming up, compiling, capturing
    error: str = ""


class Clock:
    def __init__(self, seconds: float | None) -> None:
        self.end = float("inf") if seconds is None else time.monotonic() + seconds

    def over(self) -> bool:
        return time.monotonic() > self.end


def main(argv: list[str] | None = None) -> None:
    args = _arguments(argv)
    if args.peak_of:
        model, batch, how = torch.load(args.peak_of, weights_only=False)
        print(Stepper(model, batch, how, "eager").first_peak())
        return
    how = How(torch.device(args.device), args.precision, args.layout)
    how.set_up()
    clock = Clock(args.budget)
    result = {
        "machine": str(how),
        "torch": torch.__version__,
        "method": args.method,
        "per_flop": args.per_flop,
        "pruning": {},
        "rows": [],
    }
    print(f"torch {torch.__version__}, {how}; channels by {args.method}, random data", flush=True)
    for name in args.networks:
        if clock.over():
            break
        batch = args.batch or (QUICK_BATCH if args.quick else _batch(SHAPES[name], args.device))
        print(f"\n{name}, batch {batch}", flush=True)
        candidates, result["pruning"][name] = prepare(name, batch, how, args, clock)
        rows: list[Row] = []
        for mode in args.modes:
            if clock.over():
                break
            wanted = candidates
            if "compiled" in mode and not args.compile_all:
                wanted = [c for c in candidates if c.sparsity in (0.0, max(args.sparsities))]
            fresh = measure(name, batch, wanted, how, mode, args, clock)
            rows += fresh
            print(_table(name, mode, fresh), flush=True)
            result["rows"] += [_numbers(row) for row in fresh]
            _write(args.out, result)
        print("\n".join(_bounds(rows)), flush=True)
    if clock.over():
        result["stopped"] = f"after --budget {args.budget:g} seconds; what was not reached is missing"
        print(f"\nstopped {result['stopped']}")
        _write(args.out, result)


# The networks


def prepare(name: str, batch: int, how: How, args, clock: Clock) -> tuple[list[Candidate], dict[str, float | None]]:
    """Every network to be timed, and what finding, scoring, selecting and shrinking (the last) took, in seconds."""
    shape = SHAPES[name]
    narrow = {"width": QUICK_WIDTH} if args.quick else {}
    dense = build(name, seed=0, num_classes=shape.classes, in_channels=shape.channels, **narrow).to(how.device)
    batches = _batches(name, batch, args.quick, how.device)
    example = next(batches)[0][:1]
    seconds: dict[str, float] = {}

    def took(what: str, run: Callable[[], object]):
        results: list = []
        seconds[what] = timed(lambda: results.append(run()), how.device)
        return results[0]

    whole = Candidate("dense", 0.0, 1, dense, _parameters(dense), flops(dense, example))
    found = took("groups", lambda: prospr.channels.groups(dense, example))
    scored = {"method": args.method, "granularity": "channel", "example": example}
    scores = took("score, groups among it", lambda: prospr.score(dense, batches, **scored))
    masks, smaller = {}, {}
    for sparsity in args.sparsities:
        for round_to in args.round_to:
            try:
                kept = took(
                    "select", lambda s=sparsity, r=round_to: found.select(scores, s, round_to=r, per_flop=args.per_flop)
                )
            except SettingError as error:
                print(f"  {sparsity:.0%}, round_to={round_to}: {error}")
                continue
            gone = found.removed(kept)
            masks[sparsity, round_to] = kept
            smaller[sparsity, round_to] = took("cut", lambda r=gone: plan_for(found, dense, r).shrink(dense))
    if masks:
        key = next(iter(masks))
        public = took("shrink, groups among it", lambda: prospr.shrink(dense, masks[key], example))
        assert [p.shape for p in public.parameters()] == [p.shape for p in smaller[key].parameters()]
    candidates = [whole]
    for (sparsity, round_to), small in smaller.items():
        masked = copy.deepcopy(dense)
        masks[sparsity, round_to].apply(masked)
        apart = _apart(masked, small, next(batches)[0][:2])
        seconds["masked and shrunk apart"] = max(apart, seconds.get("masked and shrunk apart", 0.0))
        if "masked" in args.variants and round_to == args.round_to[0]:
            candidates.append(Candidate("masked", sparsity, 1, masked, whole.parameters, whole.flops))
        if "shrunk" in args.variants:
            shrunk = Candidate("shrunk", sparsity, round_to, small, _parameters(small), flops(small, example))
            candidates.append(shrunk)
    if args.torch_pruning:
        candidates += _rivals(dense, example, smaller, args, clock)
    apart = seconds.pop("masked and shrunk apart", float("nan"))
    print("  seconds: " + "; ".join(f"{what} {s:.2f}" for what, s in seconds.items()))
    print(f"  outputs of masked and shrunk, float32: at most {apart:.1e} apart, relative to the largest", flush=True)
    return candidates, {what: _short(value) for what, value in {**seconds, "masked and shrunk apart": apart}.items()}


def _rivals(dense: nn.Module, example: torch.Tensor, smaller, args, clock: Clock) -> Iterator[Candidate]:
    if not torch_pruning_rival.available():
        print("  torch-pruning: not installed, left out (pip install --no-deps torch-pruning==1.6.1)")
        return
    for (sparsity, round_to), ours in smaller.items():
        if round_to == args.round_to[0] and not clock.over():
            small = torch_pruning_rival.pruned(dense, example, flops(ours, example))
            yield Candidate("torch-pruning", sparsity, 1, small, _parameters(small), flops(small, example))


def _batches(name: str, batch: int, quick: bool, device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    shape, random = SHAPES[name], generator("data", name)
    side = shape.quick_side if quick else shape.side
    labels = (batch, side, side) if name == "unet" else (batch,)
    while True:
        x = torch.randn(batch, shape.channels, side, side, generator=random)
        y = torch.randint(shape.classes, labels, generator=random)
        yield x.to(device), y.to(device)


def _batch(shape: Shape, device: str) -> int:
    return shape.cpu_batch if device == "cpu" else shape.gpu_batch


def _parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@torch.no_grad()
def _apart(masked: nn.Module, small: nn.Module, x: torch.Tensor) -> float:
    wanted, got = copy.deepcopy(masked).eval()(x), copy.deepcopy(small).eval()(x)
    return ((got - wanted).abs().max() / wanted.abs().max()).item()


# The times


def measure(
    network: str, batch: int, candidates: list[Candidate], how: How, mode: str, args, clock: Clock
) -> list[Row]:
    """Make each ready, then time all of them in turn, `--repeats` times."""
    data = next(_batches(network, batch, args.quick, how.device))
    if "compiled" in mode:
        torch._dynamo.config.recompile_limit = 10 * len(candidates)  # beyond it a network would quietly run eagerly
    rows: dict[int, Row] = {}
    steppers: dict[int, Stepper] = {}
    # Masked networks last: where their capture fails the others are safe.
    for i in sorted(range(len(candidates)), key=lambda i: candidates[i].variant == "masked"):
        if clock.over():
            break
        c = candidates[i]
        rows[i] = Row(network, batch, mode, c.variant, c.sparsity, c.round_to, c.parameters, c.flops)
        if args.memory and how.device.type == "cpu" and mode == "eager":
            rows[i].peak_gib = _peak_in_process(c.model, data, how)
        stepper = Stepper(copy.deepcopy(c.model), data, how, mode)
        try:
            rows[i].ready_s = timed(lambda s=stepper: s.prepare(args.memory), how.device)
        except RuntimeError as error:
            rows[i].error = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
            continue
        if how.device.type == "cuda":
            rows[i].peak_gib = stepper.peak_gib
        steppers[i] = stepper
        print(f"  {mode}: {_label(rows[i])} ready after {rows[i].ready_s:.1f} s", flush=True)
    if 0 in steppers:
        _time_in_turn(rows, steppers, how, args, clock)
    steppers.clear()
    if "compiled" in mode:
        torch._dynamo.reset()
    if how.device.type == "cuda":
        torch.cuda.empty_cache()
    return [rows[i] for i in sorted(rows) if rows[i].n or rows[i].error]


def _time_in_turn(rows: dict[int, Row], steppers: dict[int, Stepper], how: How, args, clock: Clock) -> None:
    calls: dict[tuple[int, str], int] = {}
    times: dict[tuple[int, str], list[float]] = {(i, what): [] for i in steppers for what in ("train", "infer")}
    for repeat in range(args.repeats):
        order = sorted(steppers, reverse=repeat % 2 == 1)  # what drifts with time falls on both ends alike
        for i in order:
            for what in ("train", "infer"):
                stepper = steppers[i]
                getattr(stepper, f"to_{what}")()
                run = getattr(stepper, what)
                once = each(run, calls.get((i, what), 1), how.device)
                if (i, what) not in calls:
                    calls[i, what] = max(1, min(200, round(args.block / max(1e-3, once))))
                    if calls[i, what] > 1:
                        once = each(run, calls[i, what], how.device)
                times[i, what].append(once)
        if clock.over():
            break
    for i in steppers:
        row = rows[i]
        row.n = len(times[i, "train"])
        for what in ("train", "infer"):
            ratios = [dense / own for dense, own in zip(times[0, what], times[i, what], strict=True)]
            setattr(row, f"{what}_ms", statistics.median(times[i, what]))
            setattr(row, f"{what}_ratio", statistics.median(ratios))
            setattr(row, f"{what}_range", [min(ratios), max(ratios)])


def _peak_in_process(model: nn.Module, batch, how: How) -> float:
    """On the CPU a process of its own: memory that is given back stays in a process, and later steps hide in it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step.pt")
        torch.save((model, batch, how), path)
        command = [sys.executable, "-W", "ignore", __file__, "--peak-of", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"  peak memory not measured: {(done.stderr.strip().splitlines() or ['killed'])[-1][:120]}")
        return float("nan")
    return float(done.stdout.strip().splitlines()[-1])


# What is shown


def _label(row: Row) -> str:
    if row.variant == "dense":
        return row.variant
    return f"{row.variant} {row.sparsity:.0%}" + (f" round_to={row.round_to}" if row.round_to > 1 else "")


def _table(network: str, mode: str, rows: list[Row]) -> str:
    paper = PAPER.get(network, {})
    lines = [
        f"\n{mode}; x is dense / variant, n = {max((row.n for row in rows), default=0)}"
        + ("; paper: time of a whole training on CIFAR-100, RTX 2080 Ti" if paper else ""),
        f"{'':<24}{'params':>12}{'MFLOPs':>9}{'x':>6}{'train ms':>11}{'x':>6}{'paper':>7}{'infer ms':>10}{'x':>6}"
        f"{'peak GiB':>10}",
    ]
    for row in rows:
        if row.error:
            lines.append(f"{_label(row):<24}{row.error}")
            continue
        beside = paper.get(row.sparsity) if row.variant == "shrunk" else None
        shown = f"{paper[0.0] / beside:>7.2f}" if beside else f"{'':>7}"
        lines.append(
            f"{_label(row):<24}{row.parameters:>12,}{row.flops / 1e6:>9.0f}{rows[0].flops / row.flops:>6.2f}"
            f"{row.train_ms:>11.2f}{row.train_ratio:>6.2f}{shown}{row.infer_ms:>10.2f}{row.infer_ratio:>6.2f}"
            f"{row.peak_gib:>10.3f}"
        )
    return "\n".join(lines)


def _bounds(rows: list[Row]) -> Iterator[str]:
    """How far each shrunk network is from what its FLOPs promise, and whether launching kernels is what held it up."""
    done = {(row.mode, _label(row)): row for row in rows if not row.error}
    yield "\nwhat bounds it"
    for (mode, label), row in done.items():
        dense = done.get((mode, "dense"))
        if row.variant not in ("shrunk", "torch-pruning") or dense is None:
            continue
        saved = dense.flops / row.flops
        line = f"  {mode}, {label}: {saved:.2f} x fewer FLOPs"
        if row.peak_gib == row.peak_gib:
            line += f", {dense.peak_gib / row.peak_gib:.2f} x less memory"
        line += f"; training {row.train_ratio:.2f} x ({row.train_ratio / saved:.0%} of the FLOPs' promise)"
        yield line + f", inference {row.infer_ratio:.2f} x ({row.infer_ratio / saved:.0%})"
    for mode in ("eager", "compiled"):
        for (_, label), row in [item for item in done.items() if item[0][0] == mode]:
            graph = done.get(({"eager": "captured", "compiled": "captured-compiled"}[mode], label))
            if graph is not None:
                gain = row.train_ms / graph.train_ms
                bound = "launching kernels was the bound" if gain > 1.15 else "launching kernels was not the bound"
                yield f"  {label}: {mode} / captured {gain:.2f} in training, {bound}"


def _short(value):
    """Four digits are enough, and JSON has no NaN."""
    if isinstance(value, list):
        return [_short(v) for v in value]
    return (float(f"{value:.4g}") if value == value else None) if isinstance(value, float) else value


def _numbers(row: Row) -> dict:
    return {key: _short(value) for key, value in asdict(row).items()}


def _write(out: str | None, result: dict) -> None:
    if out:
        part = Path(f"{out}.part")
        lines = ",\n".join("  " + json.dumps(row) for row in result["rows"])
        head = json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1)
        part.write_text(f'{head[:-2]},\n "rows": [\n{lines}\n ]\n}}\n')
        os.replace(part, out)


def _arguments(argv: list[str] | None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--networks", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.8, 0.9, 0.95], help="shares of parameters")
    parser.add_argument("--per-flop", action="store_true", help="compare scores by the FLOPs a channel costs")
    parser.add_argument("--round-to", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--method", default="3sp", choices=["magnitude", "3sp", "prospr"])
    parser.add_argument("--variants", nargs="+", default=["masked", "shrunk"], choices=["masked", "shrunk"],
                        help="beside dense, which is always measured")  # fmt: skip
    parser.add_argument("--torch-pruning", action="store_true", help="beside torch-pruning at equal FLOPs")
    parser.add_argument("--modes", nargs="+", choices=MODES, help="default: eager; on a GPU all")
    parser.add_argument("--compile-all", action="store_true", help="compile every sparsity, not the highest alone")
    parser.add_argument("--precision", choices=["float32", "tf32", "bf16"], help="default: float32; on a GPU bf16")
    parser.add_argument("--layout", choices=["contiguous", "channels_last"], help="on a GPU channels_last by default")
    parser.add_argument("--batch", type=int, help="samples a batch (default: by network and device)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--block", type=float, default=200, help="milliseconds that are timed at a stretch, about")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure peak memory")
    parser.add_argument("--budget", type=float, help="seconds after which to stop with what there is")
    parser.add_argument("--quick", action="store_true", help="narrow networks, small images, two repetitions")
    parser.add_argument("--out", help="write the rows as JSON to this file, after each mode")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    on_gpu = args.device == "cuda"
    args.modes = args.modes or (list(MODES) if on_gpu else ["eager"])
    args.precision = args.precision or ("bf16" if on_gpu else "float32")
    args.layout = args.layout or ("channels_last" if on_gpu else "contiguous")
    if args.quick:
        args.repeats, args.block = min(args.repeats, 2), min(args.block, 20)
    if not on_gpu and (args.precision == "tf32" or any("captured" in mode for mode in args.modes)):
        parser.error("tf32 and CUDA graphs are for --device cuda")
    return args


if __name__ == "__main__":
    main()
