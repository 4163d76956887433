"""The whole training step as one CUDA graph, for one run or for several side by side.

A small network leaves a GPU waiting: for the next kernel to be launched, and, kernel by kernel, for work enough to fill
it. A graph launches a step at once, and the steps of several runs in one graph fill each other's gaps. The data are
bytes on the device; an epoch's random draws and learning rates are sent there when it begins, and a counter on the
device says which of them a step takes, so nothing passes between the machine and the GPU from the first step of an
epoch to the last.

The same step runs uncaptured, on a CPU too (`capture=False`), where it is tested against `EagerTrainer`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from prospr.lab.seeds import derive
from prospr.lab.tasks import Task
from prospr.lab.training.aligned import aligned
from prospr.lab.training.flat import Flat, sgd_
from prospr.lab.training.loop import Trainer
from prospr.lab.training.narrow import narrowed
from prospr.lab.training.numerics import Numerics
from prospr.lab.training.runs import Run
from prospr.lab.training.store import Store, in_memory, upload
from prospr.meta.loss import replay

__all__ = ["CaptureError", "GraphTrainer"]

WARM_UP = 3  # steps before a capture, in which cuDNN chooses its kernels and libraries take their memory


class CaptureError(RuntimeError):
    """A training step could not be recorded as a CUDA graph."""


class GraphTrainer(Trainer):
    """Trains runs side by side on one GPU, each as it would alone; all their steps are one graph.

    Runs may differ in network, masks, seed, task and settings of SGD, but not in the number of epochs and steps or the
    batch size. Runs on the same images share them. Each model is brought up to date when the training ends, for every
    look at other data and for every checkpoint, not in between.

    capture: record and replay the step; by default where the models are on a GPU.
    compile: pass forward pass, loss and update through torch.compile first: quicker after most of a minute of that.
    deterministic: ask cuDNN for kernels that give the same bits every time, alone or together.

    A network that draws random numbers while it trains (dropout) draws others in company than alone.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        capture: bool | None = None,
        compile: bool = False,
        deterministic: bool = False,
    ) -> None:
        super().__init__(runs)
        apart = [run for run in runs if run.device != self.device or run.recipe.batch_size != runs[0].recipe.batch_size]
        if apart:
            raise ValueError(
                f"runs on {self.device} in batches of {runs[0].recipe.batch_size} and on {apart[0].device} in batches "
                f"of {apart[0].recipe.batch_size} cannot be trained together; train them apart"
            )
        on_gpu = self.device.type == "cuda"
        if capture and not on_gpu:
            raise ValueError(f"a step on {self.device} cannot be captured: CUDA graphs need a GPU; use capture=False")
        self._deterministic = deterministic
        stores: dict[tuple, Store] = {}
        self._lanes: list[_Lane] = []
        for run, numerics, sums in zip(self.runs, self.numerics, self._sums, strict=True):
            batches = in_memory(run.batches)
            key = Store.key(batches)
            if key not in stores:
                stores[key] = Store(batches, self.device)
            self._lanes.append(_Lane(run, stores[key], numerics, sums, compile))
        whole, rest = runs[0].recipe.batch_size, len(in_memory(runs[0].batches).labels) % runs[0].recipe.batch_size
        short = rest if rest and not runs[0].batches.drop_last else whole
        self._sizes = [whole] * (self.steps - 1) + [short]
        self._sent: int | None = None  # the epoch whose draws are on the device
        self._ahead: tuple[int, list[Tensor]] | None = None  # an epoch, and its draws, made while the device was busy
        self._graphs: dict[int, Any] = {}
        if on_gpu and capture is not False:
            self._capture()

    def _take(self, start: int, stop: int) -> None:
        if self._sent != self.epoch:
            self._send(self.epoch)
        for lane in self._lanes:
            lane.counter.fill_(start)
        for step in range(start, stop):
            size = self._sizes[step]
            if size in self._graphs:
                with replay(derive("noise", self.runs[0].batches.seed, self.epoch, step), [self.device]):
                    self._graphs[size].replay()
                continue
            for lane in self._lanes:
                seed = derive("noise", lane.run.batches.seed, self.epoch, step)
                with lane.numerics.flags(self._deterministic), replay(seed, [self.device]):
                    lane.step(size)
        if stop == self.steps and self.epoch + 1 < self.epochs:
            self._ahead = self.epoch + 1, self._draw(self.epoch + 1)

    def _draw(self, epoch: int) -> list[Tensor]:
        return [upload(in_memory(lane.run.batches), epoch) for lane in self._lanes]

    def _send(self, epoch: int) -> None:
        drawn = self._ahead[1] if self._ahead is not None and self._ahead[0] == epoch else self._draw(epoch)
        for lane, values in zip(self._lanes, drawn, strict=True):
            lane.drawn.copy_(values)
            lane.rates.copy_(torch.tensor(lane.run.rates(epoch), dtype=lane.rates.dtype))
        self._sent = epoch

    def _capture(self) -> None:
        self._send(0)
        saved = [[tensor.clone() for tensor in lane.tensors()] for lane in self._lanes]
        home, main = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        streams = [torch.cuda.Stream(self.device) for _ in self._lanes] if len(self._lanes) > 1 else [main]
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(self.device), replay(None, [self.device]):
            for size in dict.fromkeys(self._sizes):
                self._warm_up(size, streams)
                self._graphs[size] = graph = torch.cuda.CUDAGraph()
                try:
                    with torch.cuda.graph(graph, pool=pool, stream=main):
                        self._fork(size, main, streams)
                except RuntimeError as error:
                    torch.cuda.set_stream(home)  # torch.cuda.graph does not, where the end of a capture fails
                    raise _refusal(error) from error
        torch.cuda.synchronize(self.device)
        for lane, before in zip(self._lanes, saved, strict=True):
            for tensor, value in zip(lane.tensors(), before, strict=True):
                tensor.copy_(value)
        torch.cuda.synchronize(self.device)

    def _warm_up(self, size: int, streams: Sequence[torch.cuda.Stream]) -> None:
        """Run the step as the capture will, on the same streams, so that nothing is chosen or allocated within it."""
        torch.cuda.synchronize(self.device)
        for lane, stream in zip(self._lanes, streams, strict=True):
            with torch.cuda.stream(stream), lane.numerics.flags(self._deterministic):
                for _ in range(WARM_UP):
                    lane.counter.zero_()
                    lane.step(size)
                lane.counter.zero_()
                _refuse_waiting(lane, size)
            torch.cuda.synchronize(self.device)

    def _fork(self, size: int, main: torch.cuda.Stream, streams: Sequence[torch.cuda.Stream]) -> None:
        """One step of every run, each on its own stream between two common moments of `main`."""
        for lane, stream in zip(self._lanes, streams, strict=True):
            with ExitStack() as stack:
                if stream is not main:
                    stream.wait_stream(main)
                    stack.enter_context(torch.cuda.stream(stream))
                stack.enter_context(lane.numerics.flags(self._deterministic))
                lane.step(size)
        for stream in streams:
            if stream is not main:
                main.wait_stream(stream)

    def _momentum(self, index: int) -> dict[str, Tensor]:
        flat = self._lanes[index].flat
        return flat.parts(flat.momentum)

    def _load(self, index: int, momentum: dict[str, Tensor]) -> None:
        self._lanes[index].load(momentum)

    def write_back(self) -> None:
        for lane in self._lanes:
            lane.write_back()


class _Lane:
    """One run on the device. Every tensor that outlives a step keeps its address; nothing in a step waits."""

    def __init__(self, run: Run, store: Store, numerics: Numerics, sums: Tensor, compile: bool) -> None:
        self.run, self.store, self.numerics, self.sums = run, store, numerics, sums
        self.model = copy.deepcopy(run.model).train()
        if numerics.low and numerics.channels_last:
            narrowed(self.model)
            if compile:
                aligned(self.model)
        self.flat = Flat(self.model, numerics, run.recipe, run.masks)
        self.dtype = torch.bfloat16 if numerics.low else self.flat.dtype
        device = numerics.device
        self.counter = torch.zeros(1, dtype=torch.long, device=device)
        self.drawn = torch.zeros(run.steps, 4, run.recipe.batch_size, dtype=torch.long, device=device)
        self.rates = torch.zeros(run.steps, dtype=self.flat.dtype, device=device)
        self.measure = _compiled(_measure) if compile else _measure
        self.update = _compiled(sgd_) if compile else sgd_

    def step(self, size: int) -> None:
        """Make a batch, forward, backward, update, mask, count."""
        drawn = self.drawn.index_select(0, self.counter)[0, :, :size]
        images, targets = self.store.batch(drawn, self.dtype, self.numerics)
        loss, counts = self.measure(self.model, self.run.task, images, targets, self.numerics.low)
        grads = torch.autograd.grad(loss, self.flat.leaves, allow_unused=True)
        self.flat.step(grads, self.rates.index_select(0, self.counter), self.update)
        self.sums[:1].add_(loss.detach())
        self.sums[1:].add_(counts)
        self.counter.add_(1)

    def tensors(self) -> list[Tensor]:
        """All that a step changes."""
        flat = self.flat
        return [flat.weights, flat.momentum, flat.low, self.counter, self.sums, *self.model.buffers()]

    @torch.no_grad()
    def load(self, momentum: dict[str, Tensor]) -> None:
        """Take over the run's model."""
        self.flat.load(dict(self.run.model.named_parameters()), momentum)
        for mine, given in zip(self.model.buffers(), self.run.model.buffers(), strict=True):
            mine.copy_(given)

    @torch.no_grad()
    def write_back(self) -> None:
        """Bring the run's model up to date."""
        parameters = dict(self.run.model.named_parameters())
        for name, value in self.flat.parts(self.flat.weights).items():
            parameters[name].copy_(value)
        for mine, given in zip(self.model.buffers(), self.run.model.buffers(), strict=True):
            given.copy_(mine)


def _refuse_waiting(lane: _Lane, size: int) -> None:
    """Take one more step in which to wait for the GPU is an error: within a capture it would leave CUDA in disorder."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        lane.step(size)
    except RuntimeError as error:
        raise _refusal(error) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)
        lane.counter.zero_()


def _refusal(error: RuntimeError) -> CaptureError:
    return CaptureError(
        f"the training step cannot be a CUDA graph ({error}); does the network or the loss wait for the GPU (.item(), "
        "a boolean index)? Use engine='eager'"
    )


def _measure(model: nn.Module, task: Task, images: Tensor, targets: Tensor, low: bool) -> tuple[Tensor, Tensor]:
    # Autocast would keep converted weights from one step to the next; a graph's step must convert its own.
    with torch.autocast(images.device.type, torch.bfloat16, enabled=low, cache_enabled=False):
        return task.measure(model, (images, targets))


@cache
def _compiled(function: Callable) -> Callable:
    """`function`, compiled once for all runs of one architecture: what differs between them are its arguments."""
    compiled = torch.compile(function, dynamic=False)

    def call(*arguments: Any) -> Any:
        # One version a network and batch size; by default the ninth would silently not be compiled.
        with torch._dynamo.config.patch(recompile_limit=64):
            return compiled(*arguments)

    return call
