"""All parameters of a network in one tensor, so that SGD is a handful of kernels whatever the number of layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from prospr.lab.recipes import Recipe
from prospr.lab.training.numerics import Numerics

__all__ = ["Flat", "sgd_"]

ALIGN = 16  # elements; tensor cores want their operands at multiples of 16 bytes


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies."""

    start: int
    shape: torch.Size
    channels_last: bool

    @property
    def size(self) -> int:
        return self.shape.numel()

    @property
    def gap(self) -> int:
        """Elements that are left free behind it."""
        return -self.size % ALIGN

    def view(self, flat: Tensor) -> Tensor:
        """The parameter within `flat`."""
        values = flat[self.start : self.start + self.size]
        if not self.channels_last:
            return values.view(self.shape)
        out, fan_in, height, width = self.shape
        return values.view(out, height, width, fan_in).permute(0, 3, 1, 2)

    def line(self, values: Tensor) -> Tensor:
        """A tensor of the parameter's shape as it lies within a flat one; a view where its layout is the slot's."""
        return (values.permute(0, 2, 3, 1) if self.channels_last else values).reshape(-1)


class Flat:
    """The trainable parameters of `model`, moved into one tensor, and SGD on them.

    In bfloat16 the weights and biases of convolutions and Linear layers, which autocast would convert one by one in
    every step, are replaced in the model by views of `low`, a bfloat16 copy made at once; `weights` stays in float32.
    """

    def __init__(
        self, model: nn.Module, numerics: Numerics, recipe: Recipe, masks: Mapping[str, Tensor] | None = None
    ) -> None:
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        kinds = {p.dtype for p in parameters.values()}
        if len(kinds) != 1:
            names = ", ".join(sorted(map(str, kinds))) or "none"
            raise ValueError(f"trainable parameters are of {names}; use one floating-point type, or engine='eager'")
        self.dtype = kinds.pop()
        self.recipe = recipe
        low = _computed_low(model) if numerics.low else set()
        self.names = sorted(parameters, key=lambda name: parameters[name] not in low)  # those in bfloat16 first
        self.slots: dict[str, Slot] = {}
        end = self.cut = 0
        for name in self.names:
            p = parameters[name]
            slot = self.slots[name] = Slot(end, p.shape, numerics.channels_last and p.dim() == 4)
            end += slot.size + slot.gap
            self.cut = end if p in low else self.cut
        device = numerics.device
        # Tensors of their own, not rows of one: torch.compile is wary of arguments that share memory.
        self.weights, self.momentum, self.grad = (torch.zeros(end, dtype=self.dtype, device=device) for _ in range(3))
        self.low, self.low_grad = (torch.zeros(self.cut, dtype=torch.bfloat16, device=device) for _ in range(2))
        self._gap = torch.zeros(ALIGN, dtype=self.dtype, device=device)
        self._low_gap = self._gap.to(torch.bfloat16)
        self.mask: Tensor | None = None
        if masks:
            self.mask = torch.ones_like(self.weights)
            for name, mask in masks.items():
                self.slots[name].view(self.mask).copy_(mask)
        self.leaves = [parameters[name] for name in self.names]
        self.load({name: p.detach() for name, p in parameters.items()}, {})
        for name, p in parameters.items():
            p.data = self.slots[name].view(self.low if p in low else self.weights)

    @torch.no_grad()
    def load(self, parameters: Mapping[str, Tensor], momentum: Mapping[str, Tensor]) -> None:
        """Take over weights and SGD's buffers; a buffer that is not given is 0."""
        self.momentum.zero_()
        for name, slot in self.slots.items():
            slot.view(self.weights).copy_(parameters[name])
            if name in momentum:
                slot.view(self.momentum).copy_(momentum[name])
        if self.mask is not None:
            self.weights.mul_(self.mask)
        self.refresh()

    def refresh(self) -> None:
        """Bring the bfloat16 copy up to date."""
        self.low.copy_(self.weights[: self.cut])

    def parts(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of `flat`, which is `weights` or `momentum`, by parameter name."""
        return {name: slot.view(flat) for name, slot in self.slots.items()}

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor | None], lr: Tensor, update: Callable[..., None]) -> None:
        """One step of SGD by `update`, which is `sgd_` or a compiled one; `lr` has one element, on the device."""
        pieces: tuple[list[Tensor], list[Tensor]] = [], []
        for name, grad in zip(self.names, grads, strict=True):
            slot = self.slots[name]
            if grad is None:
                raise ValueError(
                    f"{name} has no part in the loss; set its requires_grad to False, or use engine='eager'"
                )
            full = slot.start >= self.cut
            pieces[full].append(slot.line(grad))
            if slot.gap:
                pieces[full].append((self._gap if full else self._low_gap)[: slot.gap])
        if pieces[0]:
            torch.cat(pieces[0], out=self.low_grad)
        if pieces[1]:
            torch.cat(pieces[1], out=self.grad[self.cut :])
        r = self.recipe
        tensors = self.weights, self.grad, self.momentum, self.mask, self.low, self.low_grad, lr
        update(*tensors, r.momentum, r.weight_decay, r.nesterov)


def sgd_(
    weights: Tensor,
    grad: Tensor,
    momentum: Tensor,
    mask: Tensor | None,
    low: Tensor,
    low_grad: Tensor,
    lr: Tensor,
    mu: float,
    decay: float,
    nesterov: bool,
) -> None:
    """torch.optim.SGD's update of `weights` and `momentum`, then the mask; the gradients of `low` are in `low_grad`.

    Momentum starts at 0, which gives the first step torch.optim gives. Each line is one pass over memory.
    """
    cut = low.numel()
    grad[:cut].copy_(low_grad)
    grad.add_(weights, alpha=decay)
    torch.add(grad, momentum, alpha=mu, out=momentum)
    if nesterov:
        weights.addcmul_(grad.add_(momentum, alpha=mu), lr, value=-1)
    else:
        weights.addcmul_(momentum, lr, value=-1)
    if mask is not None:
        weights.mul_(mask)
    low.copy_(weights[:cut])


def _computed_low(model: nn.Module) -> set[Tensor]:
    """The parameters that autocast converts before every use: those that only convolutions and Linear layers have."""
    low: set[Tensor] = set()
    others: set[Tensor] = set()
    for module in model.modules():
        group = low if isinstance(module, (_ConvNd, nn.Linear)) else others
        group.update(p for p in module._parameters.values() if p is not None and p.dtype == torch.float32)
    return low - others
