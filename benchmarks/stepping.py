"""A network made ready to be timed: a training step and an inference, eager, compiled or captured in a CUDA graph."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from harness import GIB, watched
from torch import nn

MODES = ("eager", "compiled", "captured", "captured-compiled")


@dataclass(frozen=True)
class How:
    """The device, the numbers and the memory layout that every network of a run has."""

    device: torch.device
    precision: str  # "float32", "tf32" or "bf16" (autocast)
    layout: str  # "contiguous" or "channels_last"

    def set_up(self) -> None:
        if self.device.type == "cuda":
            torch.backends.cudnn.benchmark = True  # shapes are fixed, as in training
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = self.precision == "tf32"

    def autocast(self):
        # No cache: what it holds would outlive a capture, and no weight here is used twice in a step.
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16", cache_enabled=False)

    @property
    def memory_format(self):
        return torch.channels_last if self.layout == "channels_last" else torch.contiguous_format

    def __str__(self) -> str:
        where = f"CPU, {torch.get_num_threads()} threads"
        if self.device.type == "cuda":
            where = torch.cuda.get_device_name()
        return f"{where}, {self.precision}, {self.layout}"


class Stepper:
    """`train` and `infer` of one network on one batch that stays where it is. Takes the network over.

    The training step is forward, cross-entropy, backward and an SGD update with momentum by foreach operations. The
    learning rate is 0, so that every step is the same one.
    """

    def __init__(self, model: nn.Module, batch, how: How, mode: str) -> None:
        self.how, self.mode = how, mode
        self.model = model.to(how.device, memory_format=how.memory_format)
        self.x = batch[0].to(how.device, memory_format=how.memory_format)
        self.y = batch[1].to(how.device)
        self.forward = torch.compile(self.model, dynamic=False) if "compiled" in mode else self.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=0.9, foreach=True)
        self.train, self.infer = self._train, self._infer
        self.peak_gib = float("nan")

    def prepare(self, memory: bool) -> None:
        """Warm up: compile, let kernels be chosen, capture; on a GPU measure the peak memory of a training step too.

        On the CPU only the first step of a process can be measured; see `first_peak`.
        """
        captured = "captured" in self.mode
        self.to_infer()
        _warm_up(self._infer, captured, self.how.device)
        if captured:
            self.infer = _capture(self._infer)
        self.to_train()
        _warm_up(self._train, captured, self.how.device)
        self.optimizer.zero_grad(set_to_none=True)  # gradients are made in the graph's own memory
        if captured:
            self.train, peak = watched(lambda: _capture(self._train), self.how.device)
        elif memory and self.how.device.type == "cuda":
            _, peak = watched(self._train, self.how.device)
        else:
            return
        self.peak_gib = (peak + self._held()) / GIB

    def first_peak(self) -> float:
        """GiB of the very first training step: weights, gradients, momentum and what the backward pass needs."""
        held = self._held()
        self.to_train()
        return (watched(self._train, self.how.device)[1] + held) / GIB

    def to_train(self) -> None:
        self.model.train()

    def to_infer(self) -> None:
        self.model.eval()

    def _train(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with self.how.autocast():
            loss = F.cross_entropy(self.forward(self.x), self.y)
        loss.backward()
        self.optimizer.step()

    def _infer(self) -> None:
        with torch.inference_mode(), self.how.autocast():
            self.forward(self.x)

    def _held(self) -> int:
        """Bytes of weights, statistics, masks and momentum; gradients come and go with a step."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)


def _warm_up(run, captured: bool, device: torch.device) -> None:
    if not captured:
        for _ in range(3 if device.type == "cuda" else 1):  # kernels are chosen in the first calls
            run()
        return
    # On another stream than the default one, as captures must be warmed up.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)


def _capture(run):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return graph.replay
