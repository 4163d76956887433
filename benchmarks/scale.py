"""What depth and ranks cost: time and peak memory of the meta-gradient against M, and against the number of processes.

    python benchmarks/scale.py                                # ResNet-20 of batch 8 on the CPU, about ten minutes
    python benchmarks/scale.py --device cuda --networks resnet50 --batch 256 --steps 1 3 10 30 100 --first 1024
    python benchmarks/scale.py --parts select --select 2147484648     # more scores than 2^31, in 16 bits
    python benchmarks/scale.py --parts sets --out results/scale_sets_cpu.json    # memory in sets of weights

Time is in units of one plain training step (forward, backward, SGD update; the faster of the two memory layouts) of the
same process; memory is the peak over what was there before. On the CPU every cell is a process of its own, because a
process does not give memory back; it has one thread, and time is the processor's, so that others on the machine do not
count. Ranks have a part of one batch each: their time is that of the busiest.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from harness import GIB, machine, timed, training_step, watched

SHAPES = {  # network: (classes, image side, batch on a CPU, batch on a GPU)
    "resnet20": (10, 32, 8, 512),
    "resnet18": (10, 32, 4, 512),
    "resnet50": (1000, 224, 2, 256),
}
PARTS = ("depth", "ranks", "select", "sets")
SETS = (  # optimizer, store, steps; no steps: a training step
    *(("sgd", "device", m) for m in (1, 3, 10)),
    *(("momentum", "device", m) for m in (1, 3, 10)),
    ("adamw", "device", 3),
    *(("momentum", "recompute", m) for m in (9, 25)),
    *(("momentum", "first", m) for m in (3, 10)),
    ("momentum", "", 0),
)
STORES = ("device", "cpu", "recompute")


@dataclass(frozen=True)
class Cell:
    part: str
    network: str = ""
    batch: int = 0
    store: str = ""  # or "first": first order, which stores nothing
    steps: int = 0
    ranks: int = 1
    device: str = "cpu"
    count: int = 0  # of scores
    optimizer: str = "momentum"


@dataclass(frozen=True)
class Measured:
    step_ms: float = float("nan")
    seconds: float = float("nan")
    steps_time: float = float("nan")  # the same in training steps
    peak_gib: float = float("nan")  # above what was there before; of all ranks together
    weights_gib: float = 0.0  # one set of weights
    error: str = ""


def main(arguments: list[str] | None = None) -> None:
    args = _arguments(arguments)
    if args.cell:
        print(json.dumps(asdict(measure(Cell(**json.loads(args.cell))))))
        return
    rows = []
    print(f"torch {torch.__version__}, {machine(args.device)}")
    for title, cells in _cells(args):
        print(f"\n{title}")
        print(f"{'':<14}{'M':>5}{'ranks':>6}{'seconds':>9}{'steps':>9}{'/ M':>8}{'peak GiB':>10}{'trajectory':>12}")
        for cell in cells:
            done = measure(cell) if cell.device == "cuda" else _in_process(cell)
            rows.append({**asdict(cell), **asdict(done)})
            print(_line(cell, done), flush=True)
            if args.out:
                Path(args.out).write_text(json.dumps({"machine": machine(args.device), "rows": rows}, indent=1) + "\n")


def _cells(args) -> list[tuple[str, list[Cell]]]:
    found = []
    for network in args.networks:
        batch = args.batch or SHAPES[network][2 if args.device == "cpu" else 3]
        here = {"network": network, "batch": batch, "device": args.device}
        if "depth" in args.parts:
            stores = [s for s in args.stores if s != "cpu" or args.device == "cuda"]  # on the CPU it is the same
            cells = [Cell("depth", store=store, steps=m, **here) for store in stores for m in args.steps]
            cells += [Cell("depth", store="first", steps=m, **here) for m in [*args.steps, args.first]]
            found.append((f"{network}, batch {batch}: depth", cells))
        if "ranks" in args.parts:
            most = torch.cuda.device_count() if args.device == "cuda" else 64
            here["batch"] = batch * 8 if args.device == "cpu" and not args.batch else batch
            cells = [Cell("ranks", store="device", steps=3, ranks=n, **here) for n in args.ranks if n <= most]
            found.append((f"{network}, batch {here['batch']} over all ranks: M = 3", cells))
    if "select" in args.parts:
        cells = [Cell("select", count=n, device=args.device) for n in args.select]
        found.append(("selection of 5 %, scores in bfloat16", cells))
    if "sets" in args.parts:
        cells = [Cell("sets", optimizer=name, store=store, steps=m) for name, store, m in SETS]
        found.append(("twelve square layers, two samples: peak and trajectory in sets of weights", cells))
    return found


def _line(cell: Cell, done: Measured) -> str:
    name = f"{cell.count:,}" if cell.part == "select" else cell.store
    if cell.part == "sets":
        sets = done.error or f"{done.peak_gib / done.weights_gib:>15.1f} sets"
        return f"{cell.optimizer + ', ' + (cell.store or 'a step'):<24}{cell.steps:>5}{sets}"
    if done.error:
        return f"{name:<14}{cell.steps:>5}{cell.ranks:>6}  {done.error}"
    kept = {"device": cell.steps, "recompute": 2 * cell.steps**0.5}.get(cell.store, 0)
    return (
        f"{name:<14}{cell.steps:>5}{cell.ranks:>6}{done.seconds:>9.2f}{done.steps_time:>9.1f}"
        f"{done.steps_time / max(1, cell.steps):>8.2f}{done.peak_gib:>10.3f}{kept * done.weights_gib:>12.3f}"
    )


def measure(cell: Cell) -> Measured:
    try:
        return {"depth": _depth, "ranks": _ranks, "select": _select, "sets": _sets}[cell.part](cell)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return Measured(error="out of memory")


def _prepared(cell: Cell, device: torch.device):
    from prospr.lab.models import build

    torch.manual_seed(0)
    classes, side, _, _ = SHAPES[cell.network]
    model = build(cell.network, num_classes=classes).to(device)
    batches = [
        (torch.randn(cell.batch, 3, side, side, device=device), torch.randint(0, classes, (cell.batch,), device=device))
        for _ in range(min(4, cell.steps + 1))
    ]
    return model, [batches[m % len(batches)] for m in range(cell.steps + 1)]


def _depth(cell: Cell) -> Measured:
    from prospr.meta import SGD, metagrad, pure_loss

    device = torch.device(cell.device)
    model, batches = _prepared(cell, device)
    loss, optimizer = pure_loss(model), SGD(lr=1e-4, momentum=0.9)  # so small that a thousand steps diverge nowhere
    how = {"order": "first"} if cell.store == "first" else {"store": cell.store, "mode": "reverse"}

    def run(steps: int = cell.steps):
        return metagrad(loss, loss.params(), batches[: steps + 1], optimizer, **how)

    if device.type == "cuda":
        run(min(3, cell.steps))  # kernels are chosen and modules loaded at the first call
    clock = _clock(device)
    before, _ = training_step(model, batches[0], device, clock)
    seconds = []
    _, peak = watched(lambda: seconds.append(timed(run, device, clock)), device)
    if seconds[0] < 5:  # of a short time, the first is much: once more
        seconds += [timed(run, device, clock) for _ in range(3)]
    after, _ = training_step(model, batches[0], device, clock)
    step, took = min(before, after), min(seconds)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return Measured(step, took, 1000 * took / step, peak / GIB, weights / GIB)


def _ranks(cell: Cell) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_one_rank, args=(cell, folder), nprocs=cell.ranks)
        parts = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(cell.ranks)]
    step, took = parts[0]["step_ms"], max(part["seconds"] for part in parts)
    return Measured(step, took, 1000 * took / step, sum(part["peak_gib"] for part in parts))


def _one_rank(rank: int, cell: Cell, folder: str) -> None:
    import torch.distributed as dist

    from prospr.meta import SGD, Ranks, metagrad, pure_loss

    device = torch.device(cell.device, rank) if cell.device == "cuda" else torch.device("cpu")
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), cell.ranks)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=cell.ranks)
    model, batches = _prepared(cell, device)
    clock = _clock(device)
    step = training_step(model, batches[0], device, clock)[0] if rank == 0 else float("nan")  # of the whole batch
    dist.barrier()
    loss, ranks = pure_loss(model), Ranks()
    mine = list(ranks.part(batches))

    def run():
        return metagrad(loss, loss.params(), mine, SGD(lr=1e-4, momentum=0.9), mode="reverse", ranks=ranks)

    _, peak = watched(run, device)
    took = statistics.median([timed(run, device, clock) for _ in range(5)])
    done = Measured(step, took, peak_gib=peak / GIB)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(asdict(done)))
    dist.barrier()
    time.sleep(0.5)
    dist.destroy_process_group()


def _clock(device: torch.device):
    torch.set_num_threads(1)
    return time.process_time if device.type == "cpu" else time.perf_counter


def _select(cell: Cell) -> Measured:
    import prospr

    device = torch.device(cell.device)
    block = torch.randn(2**24 + 1, generator=torch.Generator().manual_seed(0)).abs().to(torch.bfloat16)
    scores = torch.empty(cell.count, dtype=torch.bfloat16, device=device)
    for piece in scores.split(block.numel()):
        piece.copy_(block[: piece.numel()])
    seconds, clock = [], _clock(device)

    def run() -> None:
        start = clock()
        masks = prospr.select({"scores": scores}, 0.95)
        seconds.append(clock() - start)
        assert masks.kept == max(1, round(0.05 * cell.count))

    _, peak = watched(run, device)
    return Measured(seconds=seconds[0], peak_gib=peak / GIB)


def _sets(cell: Cell) -> Measured:
    """The peak above a model whose activations are next to nothing beside its weights."""
    from torch import nn

    from prospr.meta import SGD, AdamW, metagrad, pure_loss

    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = torch.device("cpu")
    model = nn.Sequential(*[nn.Linear(1500, 1500, bias=False) for _ in range(12)])
    batches = [(torch.randn(2, 1500), torch.randint(0, 1500, (2,))) for _ in range(cell.steps + 1)]

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        nn.functional.cross_entropy(model(batches[0][0]), batches[0][1]).backward()
        optimizer.step()

    def score() -> None:
        optimizer = {"sgd": SGD(1e-4), "momentum": SGD(1e-4, momentum=0.9), "adamw": AdamW(1e-4)}[cell.optimizer]
        how = {"order": "first"} if cell.store == "first" else {"store": cell.store, "mode": "reverse"}
        loss = pure_loss(model)
        metagrad(loss, loss.params(), batches, optimizer, **how)

    _, peak = watched(score if cell.steps else train, device)
    return Measured(
        peak_gib=peak / GIB, weights_gib=sum(p.numel() * p.element_size() for p in model.parameters()) / GIB
    )


def _in_process(cell: Cell) -> Measured:
    command = [sys.executable, "-W", "ignore", __file__, "--cell", json.dumps(asdict(cell))]
    exact = {"MALLOC_MMAP_THRESHOLD_": str(2**20)} if cell.part == "sets" else {}  # what is freed is given back
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **exact})
    if done.returncode:
        return Measured(error=(done.stderr.strip().splitlines() or ["killed, out of memory?"])[-1][:100])
    return Measured(**json.loads(done.stdout.strip().splitlines()[-1]))


def _arguments(arguments: list[str] | None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--parts", nargs="+", default=["depth", "ranks"], choices=PARTS)
    parser.add_argument("--networks", nargs="+", default=["resnet20"], choices=list(SHAPES))
    parser.add_argument("--stores", nargs="+", default=list(STORES), choices=STORES)
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 3, 10, 30, 100, 1000])
    parser.add_argument("--first", type=int, default=1024, help="steps of one more cell of first order")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--select", nargs="+", type=int, default=[25_000_000], help="numbers of scores")
    parser.add_argument("--batch", type=int, help="samples a batch, over all ranks (default: by network and device)")
    parser.add_argument("--out", help="write the rows as JSON to this file")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
