"""What the tests of enforcement train: small networks, data, masks and one training loop."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import prospr

STEPS = 100

Optimizers = dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1),
}


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batch(step: int, size: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def random_masks(model: nn.Module, sparsity: float = 0.5, seed: int = 7) -> prospr.Masks:
    generator = torch.Generator().manual_seed(seed)
    scores = {name: torch.rand(p.shape, generator=generator) for name, p in prospr.prunable(model).items()}
    return prospr.select(scores, sparsity)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS, start: int = 0) -> list[float]:
    """Plain training by somebody who knows nothing of masks; returns the losses."""
    losses = []
    for step in range(start, start + steps):
        inputs, targets = batch(step)
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_held(model: nn.Module, masks: prospr.Masks, before: dict[str, Tensor]) -> None:
    """Every pruned weight is exactly zero, and every layer trained: its kept weights moved."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, mask in masks.items():
        now = named[name].detach()
        assert now[~mask].numel() > 0
        assert bool((now[~mask] == 0).all()), f"{name}: {int(now[~mask].count_nonzero())} pruned weights came back"
        assert not torch.equal(now[mask], before[name][mask]), f"{name}: the kept weights did not train"


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert list(a) == list(b)
    for name in a:
        assert torch.equal(a[name], b[name]), f"{name} differs by {(a[name] - b[name]).abs().max().item()}"
