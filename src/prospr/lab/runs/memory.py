"""How much memory a piece of work took at its peak, where that can be told: on a GPU."""

from __future__ import annotations

import torch

__all__ = ["Peak"]


class Peak:
    """Watches the GPU's memory from here on. On a CPU there is nothing to read: the resident memory of a process that
    ran something before does not grow where the next thing takes what the first gave back.

    >>> Peak(torch.device("cpu")).total is None
    True
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)

    @property
    def total(self) -> int | None:
        """The most bytes that this process's tensors took since then, those included that were there before."""
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None

    @property
    def added(self) -> int | None:
        """The same, above what was there before."""
        return None if self.total is None else self.total - self._before
