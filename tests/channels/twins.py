"""A network of which some channels are masked, and the same network without them."""

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import prospr
from prospr.channels import Groups, Plan
from prospr.errors import KeptWholeWarning
from prospr.meta.batches import tensors


def find(model: nn.Module, example: Any) -> Groups:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KeptWholeWarning)
        return prospr.channels.groups(model, example)


def some_groups(found: Groups, share: float = 0.5, seed: int = 0) -> set[int]:
    """Groups drawn at random, as many as may go."""
    generator = torch.Generator().manual_seed(seed)
    costs, removed = found.costs(), set()
    for ids in found.sets.values():
        for k in torch.randperm(len(ids), generator=generator)[: max(1, round(share * len(ids)))].tolist():
            if costs.fits([ids[k]], 1):
                costs.remove([ids[k]])
                removed.add(ids[k])
    return removed


_found: dict[Any, "Twins"] = {}


def twins_of(network: Any, dtype: torch.dtype = torch.float64, share: float = 0.5, seed: int = 0) -> "Twins":
    """Fresh twins; what takes time is done once."""
    key = id(network), dtype, share, seed
    if key not in _found:
        _found[key] = Twins(network, dtype, share, seed)
    fresh = copy.copy(_found[key])
    fresh.masked, fresh.small = copy.deepcopy(fresh.masked), copy.deepcopy(fresh.small)
    return fresh


class Twins:
    """`masked`, with masks on it, and `small`; what belongs to both is the same to rounding."""

    def __init__(self, network: Any, dtype: torch.dtype = torch.float64, share: float = 0.5, seed: int = 0):
        self.model = network.model(dtype=dtype)
        self.example = network.example(dtype)
        self.call = network.call(dtype)
        self.found = find(self.model, self.example)
        self.removed = some_groups(self.found, share, seed)
        self.masks = self.found.masks(self.removed)
        self.masked = copy.deepcopy(self.model)
        self.masks.apply(self.masked)
        self.plan: Plan = prospr.channels.plan(self.model, self.masks, self.example)
        self.small = self.plan.shrink(self.masked)

    def train(self, mode: bool) -> "Twins":
        self.masked.train(mode)
        self.small.train(mode)
        return self


def run(model: nn.Module, call: Any) -> dict[str, Tensor]:
    """Outputs, gradients of the inputs and of the parameters, and buffers after it."""
    args, kwargs = copy.deepcopy(call)
    inputs = [t.requires_grad_() for t in tensors((args, kwargs)) if t.is_floating_point()]
    outputs = [t for t in tensors(model(*args, **kwargs)) if t.is_floating_point()]
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in outputs]
    model.zero_grad()
    sum((w * t).sum() for w, t in zip(weights, outputs, strict=True)).backward()
    result = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    result |= {f"gradient of input {i}": t.grad for i, t in enumerate(inputs) if t.grad is not None}
    result |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    result |= {name: b.clone() for name, b in model.named_buffers() if not name.endswith("_mask")}
    return result


def assert_same(masked: dict[str, Tensor], small: dict[str, Tensor], plan: Plan, tolerance: float) -> None:
    """All outputs, all gradients and all buffers as one vector each; in float64 each tensor by itself, too.

    Single tensors to the largest number in them, or to a tenth of that in all: some gradients are rounding alone.
    """
    assert list(masked) == list(small)
    kept = {name: plan.cut(name, t) for name, t in masked.items()}
    for kind in ("output", "gradient of input", "weight", "bias", "running"):
        names = [name for name, t in small.items() if kind in name and t.is_floating_point()]
        if names:
            a, b = (torch.cat([part[name].flatten() for name in names]) for part in (kept, small))
            assert (a - b).norm() <= tolerance * b.norm().clamp_min(1e-3), (
                f"{kind}: {(a - b).norm():.1e} of {b.norm():.1e}"
            )
    largest = max(t.abs().max().item() for name, t in small.items() if t.is_floating_point() and "put" not in name)
    for name, t in masked.items():
        assert kept[name].shape == small[name].shape, name
        if t.dtype == torch.float32:
            continue
        if not t.is_floating_point():
            assert torch.equal(kept[name], small[name]), name
            continue
        scale = max(small[name].abs().max().item(), 0.0 if "put" in name else 0.1 * largest)
        error = (kept[name] - small[name]).abs().max().item()
        assert error <= tolerance * scale, f"{name}: {error:.1e} of {scale:.1e}"
