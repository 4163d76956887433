"""Training images that live on the device, and batches made of them there from an epoch's draws."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from prospr.lab.data import IGNORE, Batches, CropFlip, Stream
from prospr.lab.training.numerics import Numerics

__all__ = ["Store", "drawn_ahead", "in_memory", "upload"]


class Store:
    """The images of `batches`, padded once, channels last, as the bytes they are; runs on the same data share one."""

    def __init__(self, batches: Batches, device: torch.device) -> None:
        self.moved, edges = batches.augment is not None, (batches.pad,) * 4
        self.images = F.pad(batches.images.to(device), edges).permute(0, 2, 3, 1).contiguous()
        self.labels = batches.labels.to(device)
        self.maps = self.labels.dim() > 1  # a label a pixel, which moves with it
        if self.maps:
            self.labels = F.pad(self.labels, edges, value=IGNORE)
        height, width = batches.images.shape[2:]
        self.rows = torch.arange(height, device=device)
        self.columns = torch.arange(width, device=device)
        self.mirrored = self.columns.flip(0)
        mean, std = (None if value is None else value.to(device) for value in (batches.mean, batches.std))
        self.scaling = None if mean is None or std is None else (mean, std)

    @staticmethod
    def key(batches: Batches) -> tuple:
        """Equal for batches that can share a store."""
        scaling = [None if value is None else tuple(value.tolist()) for value in (batches.mean, batches.std)]
        return batches.images.data_ptr(), batches.labels.data_ptr(), batches.augment is None, batches.pad, *scaling

    @torch.no_grad()
    def batch(self, drawn: Tensor, dtype: torch.dtype, numerics: Numerics) -> tuple[Tensor, Tensor]:
        """Inputs and targets for `drawn`, four rows of an epoch's draws. Nothing here waits for the device."""
        index, top, left, mirrored = drawn.unbind(0)
        images, labels = self.images, self.labels
        if self.moved:
            rows = (top.unsqueeze(1) + self.rows).unsqueeze(2)
            columns = left.unsqueeze(1) + torch.where(mirrored.unsqueeze(1) > 0, self.mirrored, self.columns)
            pixels = index.view(-1, 1, 1), rows, columns.unsqueeze(1)
            images, labels = images[pixels], labels[pixels if self.maps else index]
        else:
            images, labels = images[index], labels[index]
        if self.scaling is not None:
            mean, std = self.scaling
            images = (images - mean) / std  # in float32: bfloat16 is too coarse for the difference
        images = images.to(dtype).permute(0, 3, 1, 2)
        return images.contiguous(memory_format=numerics.layout), labels


def drawn_ahead(batches: Batches | Stream) -> bool:
    """Whether an epoch's random numbers are known before it begins, so that a store can make the batches."""
    if isinstance(batches, Stream):
        return False
    return batches.augment is None or isinstance(batches.augment, CropFlip)


def in_memory(batches: Batches | Stream) -> Batches:
    """`batches`, whose images can live on the device; an error for a stream of files."""
    if isinstance(batches, Stream):
        raise ValueError("images that are read from files in every epoch cannot live on the GPU; use engine='eager'")
    return batches


def upload(batches: Batches, epoch: int) -> Tensor:
    """An epoch's draws as one tensor (steps, 4, batch size); the rest of a short last batch is never looked at."""
    draws = batches.draws(epoch)
    drawn = torch.stack([draws.order, draws.top, draws.left, draws.mirrored.long()])
    wanted = len(batches) * batches.batch_size
    drawn = F.pad(drawn[:, :wanted], (0, max(0, wanted - drawn.shape[1])))
    return drawn.view(4, len(batches), batches.batch_size).transpose(0, 1).contiguous()
