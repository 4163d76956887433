"""Time and memory of the meta-gradient: engines x networks x number of steps.

    python benchmarks/metagrad.py                                      # ResNet-20 on the CPU, a few minutes
    python benchmarks/metagrad.py --public PATH/TO/mil-ad-prospr       # with the paper's own code in the same run
    python benchmarks/metagrad.py --device cuda --networks resnet20 vgg19 resnet18 resnet50

Time is in units of one plain training step (forward, backward, SGD update; the faster of the two memory layouts) of the
same process. Memory is the peak over what was there before, in units of that step's. On the CPU every cell is a process
of its own, because a process does not give memory back.
"""

import argparse
import importlib
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from harness import GIB, machine, timed, training_step, watched

SHAPES = {  # network: (classes, image side, batch on a CPU, batch on a GPU)
    "resnet20": (10, 32, 128, 512),
    "vgg19": (10, 32, 32, 512),
    "resnet18": (10, 32, 16, 512),
    "resnet50": (1000, 224, 4, 128),
}
ENGINES = ("first", "reverse", "forward", "recompute", "unrolled", "public")


@dataclass(frozen=True)
class Cell:
    network: str
    batch: int
    engine: str
    steps: int
    device: str


@dataclass(frozen=True)
class Measured:
    step_ms: float = float("nan")
    steps_time: float = float("nan")  # in training steps
    peak_gib: float = float("nan")  # above what was there before
    trajectory_gib: float = 0.0  # of the peak, the stored weights
    error: str = ""


def main() -> None:
    args = _arguments()
    if args.cell:
        print(json.dumps(asdict(measure(Cell(**json.loads(args.cell)), args.public, args.repeat))))
        return
    device = args.device
    print(f"torch {torch.__version__}, {machine(device)}")
    if args.public:
        print(f"scores of the published code and ours (detach_first), float64: {agreement(args.public):.1e} apart")
    rows = []
    for network in args.networks:
        batch = args.batch or SHAPES[network][2 if device == "cpu" else 3]
        here = lambda cell: measure(cell, args.public, args.repeat)  # noqa: E731
        run = here if device == "cuda" else lambda cell: _in_process(cell, args)
        unit = run(Cell(network, batch, "step", 0, device))
        print(f"\n{network}, batch {batch}; one training step: {unit.step_ms:.1f} ms, {unit.peak_gib:.2f} GiB")
        print(f"{'engine':<11}{'M':>4}{'steps':>9}{'4.5M+2':>8}{'peak GiB':>10}{'trajectory':>12}{'x step mem':>12}")
        for engine in args.engines:
            if engine == "public" and not args.public:
                continue
            for steps in args.steps:
                cell = Cell(network, batch, engine, steps, device)
                done = run(cell)
                rows.append({**asdict(cell), **asdict(done), "step_gib": unit.peak_gib})
                print(_line(cell, done, unit), flush=True)
                if args.out:
                    Path(args.out).write_text(json.dumps({"machine": machine(device), "rows": rows}, indent=1))


def _line(cell: Cell, done: Measured, unit: Measured) -> str:
    if done.error:
        return f"{cell.engine:<11}{cell.steps:>4}  {done.error}"
    working = (done.peak_gib - done.trajectory_gib) / unit.peak_gib
    return (
        f"{cell.engine:<11}{cell.steps:>4}{done.steps_time:>9.1f}{4.5 * cell.steps + 2:>8.1f}"
        f"{done.peak_gib:>10.2f}{done.trajectory_gib:>12.3f}{working:>12.2f}"
    )


def measure(cell: Cell, public: str | None, repeat: int) -> Measured:
    from prospr.lab.models import build

    classes, side, _, _ = SHAPES[cell.network]
    torch.manual_seed(0)
    device = torch.device(cell.device)
    model = build(cell.network, num_classes=classes).to(device)
    images = [torch.randn(cell.batch, 3, side, side, device=device) for _ in range(min(4, cell.steps + 1))]
    labels = torch.randint(0, classes, (cell.batch,), device=device)
    batches = [(images[i % len(images)], labels) for i in range(cell.steps + 1)]
    if cell.engine == "step":
        ms, peak = training_step(model, batches[0], device)
        return Measured(ms, 1.0, peak)
    run = _engine(cell, model, batches, public)
    try:
        if device.type == "cuda":
            run()  # kernels are chosen and modules loaded at the first call
        _, peak = watched(run, device)
        step_ms, _ = training_step(model, batches[0], device)
        seconds = []
        for _ in range(repeat):
            seconds.append(timed(run, device))
            again, _ = training_step(model, batches[0], device)
            step_ms = min(step_ms, again)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return Measured(error="out of memory")
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    kept = {"reverse": cell.steps, "forward": cell.steps, "recompute": 2 * cell.steps**0.5}.get(cell.engine, 0)
    return Measured(step_ms, 1000 * statistics.median(seconds) / step_ms, peak / GIB, kept * weights / GIB)


def _engine(cell: Cell, model, batches, public: str | None):
    """A function that computes one meta-gradient: SGD with momentum, as published."""
    if cell.engine == "public":
        return _public(model, batches, cell.steps, public)
    from prospr.meta import SGD, metagrad, pure_loss

    loss, optimizer = pure_loss(model), SGD(lr=0.01, momentum=0.9)
    params = loss.params()
    if cell.engine == "unrolled":
        return lambda: unrolled(loss, params, batches, optimizer)
    settings = {
        "first": {"order": "first"},
        "reverse": {"mode": "reverse"},
        "forward": {"mode": "forward"},
        "recompute": {"mode": "reverse", "store": "recompute"},
    }[cell.engine]
    return lambda: metagrad(loss, params, batches, optimizer, **settings)


def unrolled(loss, params, batches, optimizer):
    """One graph through all steps, by autograd."""
    start = {n: p.clone().requires_grad_() for n, p in params.items()}
    w, state = start, optimizer.init_all(start)
    for t, batch in enumerate(batches[:-1]):
        grads = torch.autograd.grad(loss(w, batch), list(w.values()), create_graph=True)
        new = {n: optimizer.step(p, g, state[n], t) for (n, p), g in zip(w.items(), grads, strict=True)}
        w, state = {n: p for n, (p, _) in new.items()}, {n: s for n, (_, s) in new.items()}
    return torch.autograd.grad(loss(w, batches[-1]), list(start.values()))


def _public(model, batches, steps: int, path: str | None):
    """The code published with the paper, from a checkout of mil-ad/prospr; its package has our name."""
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "prospr"}
    sys.path.insert(0, str(path))
    try:
        theirs = importlib.import_module("prospr.prospr")
    finally:
        sys.path.pop(0)
        for name in [name for name in sys.modules if name.split(".")[0] == "prospr"]:
            del sys.modules[name]
        sys.modules.update(ours)
    prunable = lambda m: isinstance(m, (torch.nn.Conv2d, torch.nn.Linear))  # noqa: E731

    def run():
        sys.stdout, out = sys.stderr, sys.stdout
        try:
            return theirs.prune(model, 0.9, batches, prunable, steps, 0.01, 0.9, return_scores=True)
        finally:
            sys.stdout = out

    return run


def agreement(path: str, steps: int = 3) -> float:
    """The largest relative difference, layer by layer, between the published code's scores and ours."""
    import prospr
    from prospr.lab.models import build

    torch.manual_seed(0)
    model = build("resnet20").double()
    batches = [(torch.randn(8, 3, 32, 32).double(), torch.randint(0, 10, (8,))) for _ in range(steps + 1)]
    theirs = _public(model, batches, steps, path)()
    saliency = prospr.ProsPr(steps=steps, lr=0.01, momentum=0.9, detach_first=True)
    ours = list(prospr.score(model, batches, method=saliency).values())
    total = sum(t.sum() for t in theirs)  # ours are shares of the sum
    return max(((a - b / total).norm() / a.norm()).item() for a, b in zip(ours, theirs, strict=True))


def _in_process(cell: Cell, args) -> Measured:
    command = [
        sys.executable,
        "-W",
        "ignore",
        __file__,
        "--cell",
        json.dumps(asdict(cell)),
        "--repeat",
        str(args.repeat),
    ]
    command += ["--public", args.public] if args.public else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return Measured(error=(done.stderr.strip().splitlines() or ["killed, out of memory?"])[-1][:100])
    return Measured(**json.loads(done.stdout.strip().splitlines()[-1]))


def _arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--networks", nargs="+", default=["resnet20"], choices=list(SHAPES))
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 3, 10, 30])
    parser.add_argument("--batch", type=int, help="samples a batch (default: by network and device)")
    parser.add_argument("--repeat", type=int, default=1, help="timings a cell; the median is reported")
    parser.add_argument("--public", help="a checkout of mil-ad/prospr to run beside ours")
    parser.add_argument("--out", help="write the rows as JSON to this file")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
