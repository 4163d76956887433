"""What a mask does to a network: effective density, dead channels, collapse, FLOPs, and how sure the choice was."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prospr.counting import flops_by_module
from prospr.errors import MaskError
from prospr.layers import inputs_first
from prospr.masks.masks import table
from prospr.masks.reach import reach
from prospr.meta.loss import call_of, unwrap

__all__ = ["Inspection", "Layer", "Threshold", "histogram", "inspect", "threshold"]


@dataclass(frozen=True)
class Layer:
    """One pruned parameter."""

    name: str
    shape: tuple[int, ...]
    kept: int
    effective: int | None  # of the kept, those on a path from input to output; None where that is not known
    channels: int  # its outputs
    dead_channels: int | None  # outputs without an effective weight
    flops: int  # of one forward pass, dense; 0 where the module's own operations are not counted
    sparse_flops: int  # the same, with the pruned weights left out

    @property
    def total(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Inspection:
    """The layers, and what follows from them. Print it."""

    layers: tuple[Layer, ...]
    flops: int  # of the whole network, for the example it was inspected with
    sparse_flops: int
    connected: bool | None  # whether any path leads from the input to the output; None where that is not known

    @property
    def density(self) -> float:
        return sum(layer.kept for layer in self.layers) / sum(layer.total for layer in self.layers)

    @property
    def effective_density(self) -> float | None:
        """The density counting only kept weights on a path from input to output; None where that is not known.

        Biases and norm parameters (pruned with their channels) are no part of it.
        """
        edges = [layer for layer in self.layers if len(layer.shape) > 1]
        if not edges or any(layer.effective is None for layer in edges):
            return None
        return sum(layer.effective or 0 for layer in edges) / sum(layer.total for layer in edges)

    @property
    def empty(self) -> list[str]:
        """Layers that keep nothing."""
        return [layer.name for layer in self.layers if layer.kept == 0]

    def __str__(self) -> str:
        rows: list[tuple[Any, ...]] = [("layer", "shape", "kept", "of", "density", "effective", "dead", "MFLOPs")]
        for layer in self.layers:
            effective = "?" if layer.effective is None else f"{layer.effective / layer.total:.2%}"
            dead = "?" if layer.dead_channels is None else f"{layer.dead_channels}/{layer.channels}"
            shape = "x".join(map(str, layer.shape))
            density = f"{layer.kept / layer.total:.2%}"
            flops = f"{layer.sparse_flops / 1e6:.3g}/{layer.flops / 1e6:.3g}"
            rows.append((layer.name, shape, f"{layer.kept:,}", f"{layer.total:,}", density, effective, dead, flops))
        kept, total = sum(layer.kept for layer in self.layers), sum(layer.total for layer in self.layers)
        effective = "?" if self.effective_density is None else f"{self.effective_density:.2%}"
        flops = f"{self.sparse_flops / 1e6:.3g}/{self.flops / 1e6:.3g}"
        rows.append(("total", "", f"{kept:,}", f"{total:,}", f"{self.density:.2%}", effective, "", flops))
        return table(rows, left=2)


def inspect(model: nn.Module, masks: Mapping[str, Tensor], example: Any) -> Inspection:
    """Look at what `masks` leave of `model`, which is not changed. `example`: an input, or a tuple of them.

    >>> import torch, prospr
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
    >>> first = torch.tensor([[1, 1, 0], [0, 0, 0]], dtype=torch.bool)       # its second output is dead,
    >>> masks = prospr.Masks({"0.weight": first, "2.weight": torch.ones(1, 2, dtype=torch.bool)})
    >>> print(prospr.inspect(net, masks, torch.ones(1, 3)))                  # so half of the last layer is too
    layer     shape  kept  of  density  effective  dead       MFLOPs
    0.weight  2x3       2   6   33.33%     33.33%   1/2  4e-06/1.2e-05
    2.weight  1x2       2   2  100.00%     50.00%   0/1    4e-06/4e-06
    total               4   8   50.00%     37.50%       8e-06/1.6e-05
    """
    call = call_of(example)
    model = unwrap(model)
    named = dict(model.named_parameters())
    for name, mask in masks.items():
        if name not in named or named[name].shape != mask.shape:
            raise MaskError(f"{name}: this mask does not fit {type(model).__name__}; it belongs to another network")
    reached = reach(model, masks, call)
    total, by_module = flops_by_module(model, call)
    layers = []
    for name, mask in masks.items():
        path = name.rpartition(".")[0]
        module = model.get_submodule(path)
        alone = (
            not list(module.children()) and sum(p.dim() > 1 for p in module._parameters.values() if p is not None) == 1
        )
        flops = by_module.get(path, 0) if alone and mask.dim() > 1 else 0
        kept = int(mask.sum())
        effective = dead = None
        if reached is not None and mask.dim() > 1:  # scales and biases are no edges of a path
            live = reached.effective[name]
            effective, dead = int(live.sum()), int((~_by_output(module, live).flatten(1).any(1)).sum())
        channels = len(_by_output(module, mask)) if mask.dim() else 1
        sparse = flops * kept // mask.numel()
        layers.append(Layer(name, tuple(mask.shape), kept, effective, channels, dead, flops, sparse))
    saved = sum(layer.flops - layer.sparse_flops for layer in layers)
    return Inspection(tuple(layers), total, total - saved, reached.connected if reached is not None else None)


def _by_output(module: nn.Module, mask: Tensor) -> Tensor:
    """The mask with one row an output; a transposed convolution's weight is (inputs, outputs of a group, ...)."""
    if inputs_first(module) and mask.dim() == 2:
        return mask.T
    if not isinstance(module, nn.modules.conv._ConvTransposeNd) or mask.dim() < 2:
        return mask
    return mask.unflatten(0, (module.groups, -1)).movedim(2, 1).flatten(0, 1)


@dataclass(frozen=True)
class Threshold:
    """How sure the choice was. `margin` is the gap at the threshold as a share of it; `close` the share of the kept
    weights whose score lies within one percent of the smallest kept, which other hardware's rounding may reorder."""

    smallest_kept: float
    largest_pruned: float
    margin: float
    close: float


def threshold(scores: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> Threshold:
    """The scores on both sides of the cut.

    >>> import torch, prospr
    >>> scores = {"w": torch.tensor([4.0, 1.0, 3.0, 2.0])}
    >>> t = prospr.masks.threshold(scores, prospr.select(scores, sparsity=0.5))
    >>> t.smallest_kept, t.largest_pruned, round(t.margin, 3), t.close
    (3.0, 2.0, 0.333, 0.0)
    """
    kept = torch.cat([s[masks[name].to(s.device)].flatten().double().cpu() for name, s in scores.items()])
    pruned = torch.cat([s[~masks[name].to(s.device)].flatten().double().cpu() for name, s in scores.items()])
    low = kept.min().item()
    high = pruned.max().item() if pruned.numel() else float("-inf")
    margin = (low - high) / abs(low) if low and pruned.numel() else float("inf") if not pruned.numel() else 0.0
    within = int(((kept - low).abs() <= 0.01 * abs(low)).sum()) - 1  # the last weight kept is its own threshold
    return Threshold(low, high, margin, within / kept.numel())


def histogram(scores: Mapping[str, Tensor], bins: int = 50) -> tuple[Tensor, dict[str, Tensor]]:
    """Edges in powers of ten over all layers, and the count a layer; scores of exactly zero are in no bin.

    >>> import torch, prospr
    >>> edges, counts = prospr.masks.histogram({"w": torch.tensor([0.001, 0.02, 0.03, 1.0, 0.0])}, bins=3)
    >>> [round(e, 4) for e in edges.tolist()], counts["w"].tolist()
    ([-3.0, -2.0, -1.0, 0.0], [1, 2, 1])
    """
    logs = {name: s[s != 0].abs().double().log10().flatten().cpu() for name, s in scores.items()}
    used = [t for t in logs.values() if t.numel()]
    low = min((t.min().item() for t in used), default=0.0)
    high = max((t.max().item() for t in used), default=0.0)
    edges = torch.linspace(low, high if high > low else low + 1, bins + 1, dtype=torch.float64, device="cpu")
    inner = edges[1:-1].contiguous()
    return edges, {
        name: torch.bincount(torch.bucketize(t, inner, right=True), minlength=bins) for name, t in logs.items()
    }
