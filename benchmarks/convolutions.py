"""3x3 convolutions of few channels, by the lab's kernels and by cuDNN, as ResNet-20 has them at a batch of 256.

    python benchmarks/convolutions.py
    python benchmarks/convolutions.py --tune            # which blocks, tiles and warps are quickest on this GPU

Microseconds a call in bfloat16, channels last: alone, and of eight streams at work side by side the time divided by
eight. `input` and `weight` are the gradients; the lab's gradient of a weight has its parts added up in the time. Needs
an NVIDIA GPU.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from harness import machine
from torch import multiprocessing
from torch.nn import functional as F

from prospr.lab.training.narrow import CONV, PARTS, WEIGHT, conv3x3, conv3x3_input, conv3x3_weight

SHAPES = ((3, 16, 32), (16, 16, 32), (32, 32, 16), (64, 64, 8))  # channels in and out, side
STREAMS, CALLS = 8, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--tune", action="store_true", help="try other settings of the lab's kernels")
    parser.add_argument("--out", help="write the rows as JSON to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this compares kernels of an NVIDIA GPU, and there is none here")
    torch.backends.cudnn.benchmark = True
    print(f"torch {torch.__version__}, {machine('cuda')}\n")
    rows = tune(args.batch) if args.tune else compare(args.batch)
    if args.out:
        Path(args.out).write_text(json.dumps({"machine": machine("cuda"), "batch": args.batch, "rows": rows}, indent=1))


def compare(batch: int) -> list[dict]:
    """Both ways at every shape, as a table."""
    print(f"{'channels':<12}{'pass':<10}{'cuDNN':>9}{'ours':>9}{'cuDNN / 8':>12}{'ours / 8':>11}{'ratio':>8}")
    rows = []
    for inputs, outputs, side in SHAPES:
        x, y = (_random(batch, channels, side, side) for channels in (inputs, outputs))
        weight = _random(outputs, inputs, 3, 3)
        ways = {
            "forward": (lambda x=x, w=weight: F.conv2d(x, w, padding=1), lambda x=x, w=weight: conv3x3(x, w)),
            "input": (_backward(y, x, weight, 0), lambda y=y, w=weight: conv3x3_input(y, w)),
            "weight": (_backward(y, x, weight, 1), lambda y=y, x=x: conv3x3_weight(y, x).sum(0).to(y.dtype)),
        }
        for name, pair in ways.items():
            if name == "input" and inputs == 3:
                continue  # images have no gradient
            times = [_microseconds(call, streams) for streams in (1, STREAMS) for call in pair]
            rows.append({"channels": [inputs, outputs], "side": side, "pass": name, "us": times})
            shown = f"{times[0]:>9.1f}{times[1]:>9.1f}{times[2]:>12.1f}{times[3]:>11.1f}{times[3] / times[2]:>8.2f}"
            print(f"{f'{inputs} to {outputs}':<12}{name:<10}{shown}", flush=True)
    return rows


def tune(batch: int, processes: int = 12) -> list[dict]:
    """Print the quickest settings of every kernel, eight streams side by side; all that were timed."""
    found, rows = list(trials()), []
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes) as pool:  # to build them takes far longer than to time them; built once is on the disk
        pool.starmap(_built, [(batch, *one) for one in found], chunksize=1)
    for (name, shape), here in itertools.groupby(found, key=lambda one: one[:2]):
        times = []
        for _, _, how in here:
            try:
                times.append((_microseconds(_call(batch, name, shape, how), STREAMS), how))
            except _refusals() as error:  # too much shared memory, too many registers
                print(f"{shape} {name} {how}: {str(error).splitlines()[0][:80]}")
        rows += [{"pass": name, "channels": shape[:2], "side": shape[2], "us": t, "how": how} for t, how in times]
        for microseconds, how in sorted(times, key=lambda one: one[0])[:4]:
            print(f"{f'{shape[0]} to {shape[1]}':<12}{name:<10}{microseconds:>8.2f}  {how}", flush=True)
    return rows


def trials() -> Iterator[tuple[str, tuple[int, int, int], dict]]:
    """Kernel, channels in and out and side, settings."""
    blocks = {3: [(2, 2), (1, 2)], 16: [(2, 2), (4, 2), (1, 2)], 32: [(2, 2), (1, 2)], 64: [(1, 1), (1, 2)]}
    for shape in SHAPES:
        inputs = shape[0]
        for name in ("forward",) if inputs == 3 else ("forward", "input"):
            for (high, wide), (tile, warps) in itertools.product(blocks[inputs], [(64, 4), (128, 4), (128, 8)]):
                yield name, shape, {"high": high, "wide": wide, "tile": tile, "num_warps": warps, "num_stages": 1}
        ways = [(3, 2, 64, 4, 1), (3, 2, 64, 8, 1), (3, 2, 128, 4, 1), (3, 2, 64, 4, 2), (1, 2, 128, 4, 1)]
        ways = ways if inputs < 64 else [(1, 1, 64, 4, 1), (1, 1, 64, 8, 1), (1, 1, 64, 4, 2), (1, 2, 64, 8, 1)]
        for each, wide, tile, warps, stages in ways:
            for parts in (PARTS[inputs] // 2, PARTS[inputs], 2 * PARTS[inputs]):
                how = {"each": each, "wide": wide, "tile": tile, "num_warps": warps, "num_stages": stages}
                yield "weight", shape, {**how, "parts": parts}


def _call(batch: int, name: str, shape: tuple[int, int, int], how: dict) -> Callable[[], torch.Tensor]:
    """One kernel with these settings, which it keeps until the next."""
    inputs, outputs, side = shape
    how = dict(how)
    if name == "weight":
        PARTS[inputs] = how.pop("parts")
        WEIGHT[inputs] = how
    else:
        CONV[inputs] = how
    x, y, weight = _random(batch, inputs, side, side), _random(batch, outputs, side, side), _random(*shape[1::-1], 3, 3)
    if name == "forward":
        return lambda: conv3x3(x, weight)
    return (lambda: conv3x3_input(y, weight)) if name == "input" else (lambda: conv3x3_weight(y, x).sum(0).to(y.dtype))


def _built(batch: int, name: str, shape: tuple[int, int, int], how: dict) -> None:
    try:
        _call(batch, name, shape, how)()
    except _refusals():  # it is told where it is timed
        return


def _refusals() -> tuple[type[Exception], ...]:
    from triton.runtime.errors import TritonError

    return TritonError, RuntimeError


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)


def _backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, which: int):
    wanted = [which == 0, which == 1, False]
    given = [1, 1], [1, 1], [1, 1], False, [0, 0], 1, wanted
    return lambda: torch.ops.aten.convolution_backward(grad, x, weight, None, *given)


@torch.no_grad()
def _microseconds(call, streams: int) -> float:
    """Of one call, in a CUDA graph of `CALLS` of them on each of so many streams."""
    call()
    torch.cuda.synchronize()
    graph, beside = torch.cuda.CUDAGraph(), [torch.cuda.Stream() for _ in range(streams)]
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        for stream in beside:
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                for _ in range(CALLS):
                    call()
        for stream in beside:
            main.wait_stream(stream)
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    graph.replay()
    end.record()
    end.synchronize()
    return 1000 * start.elapsed_time(end) / (2 * CALLS * streams)


if __name__ == "__main__":
    main()
