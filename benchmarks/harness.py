"""What the benchmarks share: timing, peak memory, the training step they are measured in, and images to score by."""

import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F

GIB = 2**30


def training_step(model, batch, device, clock=time.perf_counter) -> tuple[float, float]:
    """Milliseconds of the faster memory layout, and the peak memory of the first in GiB."""
    fastest, peaks = float("inf"), []
    state = {name: t.clone() for name, t in model.state_dict().items()}
    for layout in (torch.contiguous_format, torch.channels_last):
        model.to(memory_format=layout)
        x, y = batch[0].contiguous(memory_format=layout), batch[1]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)

        def step(x=x, y=y, optimizer=optimizer):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        peaks.append(watched(step, device)[1])  # the first time: on the CPU later steps reuse what is freed
        step()
        fastest = min(fastest, 1000 * statistics.median([timed(step, device, clock) for _ in range(5)]))
        optimizer.zero_grad()
    model.to(memory_format=torch.contiguous_format)
    model.load_state_dict(state)
    return fastest, peaks[0] / GIB


def timed(run, device, clock=time.perf_counter) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = clock()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def watched(run, device) -> tuple[object, int]:
    """The result, and the most memory that was in use over what was there before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        torch.cuda.synchronize()
        return result, torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _proc("VmRSS")
    result = run()
    return result, max(0, _proc("VmHWM") - before)


def _proc(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return 1024 * int(line.split()[1])
    raise OSError(f"no {key} in /proc/self/status")


def machine(device: str) -> str:
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, float32 with TF32 in convolutions: {torch.backends.cudnn.allow_tf32}"
    return f"CPU, {torch.get_num_threads()} threads, float32"


def each(run, times: int, device) -> float:
    """Milliseconds a call of so many, one behind the other as in training: on a GPU they queue, and none waits."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / times
    began = time.perf_counter()
    for _ in range(times):
        run()
    return 1000 * (time.perf_counter() - began) / times


def cifar_batches(root: str | None, count: int, batch: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of CIFAR-10's training images, scaled, in an order of `seed`; of noise where there is no `root`."""
    from prospr.lab.data import load

    rng = torch.Generator().manual_seed(seed)
    if root:
        split = load("cifar10", root=root).train
        index = torch.randperm(len(split.labels), generator=rng)[: count * batch]
        mean, std = split.mean.view(3, 1, 1), split.std.view(3, 1, 1)
        images, labels = (split.images[index].float() - mean) / std, split.labels[index]
    else:
        images = torch.randn(count * batch, 3, 32, 32, generator=rng)
        labels = torch.randint(0, 10, (count * batch,), generator=rng)
    return list(zip(images.split(batch), labels.split(batch), strict=True))
