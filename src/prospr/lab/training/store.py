"""Training images that live on the device, and batches made of them there from an epoch's draws."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from prospr.lab.data import Batches
from prospr.lab.training.numerics import Numerics
from prospr.lab.training.pixels import draws, padding, scaling

__all__ = ["Store", "upload"]


class Store:
    """The images of `batches`, padded once, channels last, as the bytes they are; runs on the same data share one."""

    def __init__(self, batches: Batches, device: torch.device) -> None:
        self.pad = padding(batches)
        images = F.pad(batches.images.to(device), (self.pad or 0,) * 4)
        self.images = images.permute(0, 2, 3, 1).contiguous()
        self.labels = batches.labels.to(device)
        height, width = batches.images.shape[2:]
        self.rows = torch.arange(height, device=device)
        self.columns = torch.arange(width, device=device)
        self.mirrored = self.columns.flip(0)
        found = scaling(batches)
        self.scaling = None if found is None else [torch.tensor(values, device=device) for values in found]

    @staticmethod
    def key(batches: Batches) -> tuple:
        """Equal for batches that can share a store."""
        return batches.images.data_ptr(), batches.labels.data_ptr(), padding(batches), scaling(batches)

    @torch.no_grad()
    def batch(self, drawn: Tensor, dtype: torch.dtype, numerics: Numerics) -> tuple[Tensor, Tensor]:
        """Inputs and targets for `drawn`, four rows of an epoch's draws. Nothing here waits for the device."""
        index, top, left, mirrored = drawn.unbind(0)
        if self.pad is None:
            images = self.images[index]
        else:
            rows = top.unsqueeze(1) + self.rows
            columns = left.unsqueeze(1) + torch.where(mirrored.unsqueeze(1) > 0, self.mirrored, self.columns)
            images = self.images[index.view(-1, 1, 1), rows.unsqueeze(2), columns.unsqueeze(1)]
        if self.scaling is not None:
            mean, deviation = self.scaling
            images = (images - mean) / deviation  # in float32: bytes and bfloat16 are too coarse for the difference
        images = images.to(dtype).permute(0, 3, 1, 2)
        return images.contiguous(memory_format=numerics.layout), self.labels[index]


def upload(batches: Batches, epoch: int) -> Tensor:
    """An epoch's draws as one tensor (steps, 4, batch size); the rest of a short last batch is never looked at."""
    drawn = torch.stack([values.long() for values in draws(batches, epoch)])
    wanted = len(batches) * batches.batch_size
    drawn = F.pad(drawn[:, :wanted], (0, max(0, wanted - drawn.shape[1])))
    return drawn.view(4, len(batches), batches.batch_size).transpose(0, 1).contiguous()
