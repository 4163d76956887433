"""The precision and memory layout of a training, settled for the device it runs on."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from prospr.lab.recipes import Recipe

__all__ = ["Numerics"]


@dataclass(frozen=True)
class Numerics:
    """What "auto" in a recipe stands for on `device`."""

    device: torch.device
    precision: str
    channels_last: bool

    @classmethod
    def of(cls, recipe: Recipe, device: torch.device) -> Numerics:
        """
        >>> Numerics.of(Recipe(epochs=1, batch_size=8, lr=0.1), torch.device("cpu")).precision
        'float32'
        """
        on_gpu = device.type == "cuda"
        precision = recipe.precision
        if precision == "auto":
            precision = "bf16" if on_gpu and torch.cuda.is_bf16_supported() else "float32"
        return cls(device, precision, on_gpu if recipe.channels_last == "auto" else recipe.channels_last)

    @property
    def layout(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format

    @property
    def low(self) -> bool:
        """Whether networks compute in bfloat16."""
        return self.precision == "bf16"

    @contextmanager
    def flags(self, deterministic: bool = False) -> Generator[None, None, None]:
        """Set how a GPU multiplies and how cuDNN chooses its kernels, and put it back."""
        if self.device.type != "cuda":
            yield
            return
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        before = cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark, cudnn.deterministic
        cudnn.allow_tf32 = matmul.allow_tf32 = self.precision != "float32"
        cudnn.benchmark, cudnn.deterministic = not deterministic, deterministic
        try:
            yield
        finally:
            cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark, cudnn.deterministic = before
