"""Inner optimizers: a pure update, and its pullback.

An optimizer turns (w, g, state) into (w', state'). Its pullback turns cotangents of (w', state') into cotangents of
w, g and state. The network is not inside: its part is one Hessian-vector product with the cotangent of g.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from prospr.errors import SettingError
from prospr.meta.loss import Params

__all__ = ["SGD", "Adam", "AdamW", "Optimizer", "State"]

State = dict[str, tuple[Tensor, ...]]


class Optimizer:
    """Write `init` and `step` for one tensor; the pullback follows by differentiating `step` alone.

    `t` counts the steps from 0. `step` must be differentiable torch operations on its own arguments. It is called once
    a parameter, so it may also use norms of that parameter (as LARS does), but nothing across parameters.

    >>> import torch, prospr
    >>> class SignDescent(prospr.meta.Optimizer):
    ...     def step(self, w, g, state, t):
    ...         return w - 0.1 * torch.tanh(10 * g), state
    >>> quadratic = lambda p, x: (x * p["w"] ** 2).sum()
    >>> g = prospr.meta.metagrad(quadratic, {"w": torch.tensor([3.0])}, [1.0, 1.0], SignDescent())
    >>> round(g["w"].item(), 3)
    5.8
    """

    keeps_gradients: ClassVar[bool] = True  # whether the pullback reads (g, state), which must be stored then

    def init(self, w: Tensor) -> tuple[Tensor, ...]:
        """The state of one parameter before the first step."""
        return ()

    def step(self, w: Tensor, g: Tensor, state: tuple[Tensor, ...], t: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One update of one parameter: the new parameter and the new state."""
        raise NotImplementedError(f"{type(self).__name__} must define step(w, g, state, t)")

    def init_all(self, params: Mapping[str, Tensor]) -> State:
        return {name: self.init(w) for name, w in params.items()}

    @torch.no_grad()
    def step_all(self, params: Params, grads: Params, state: State, t: int) -> tuple[Params, State]:
        """One update of all parameters; new tensors, the old ones are not written to."""
        new = {name: self.step(w, grads[name], state[name], t) for name, w in params.items()}
        return {name: w for name, (w, _) in new.items()}, {name: s for name, (_, s) in new.items()}

    def pullback(
        self, params: Params, grads: Params, state: State, t: int, lam: Params, lam_state: State
    ) -> tuple[Params, Params | None, State]:
        """Cotangents of (w', state') to cotangents of (w with g held, g, state). A `g` of None means zero."""
        direct: Params = {}
        on_grads: Params = {}
        on_state: State = {}
        for name, w in params.items():
            with torch.enable_grad():
                inputs = [x.detach().requires_grad_() for x in (w, grads[name], *state[name])]
                out, new_state = self.step(inputs[0], inputs[1], tuple(inputs[2:]), t)
                pairs = zip((out, *new_state), (lam[name], *lam_state[name]), strict=True)
                outputs = [(o, c) for o, c in pairs if o.requires_grad]
                back = torch.autograd.grad(
                    [o for o, _ in outputs],
                    inputs,
                    [c for _, c in outputs],
                    allow_unused=True,
                    materialize_grads=True,
                )
            direct[name], on_grads[name], on_state[name] = back[0], back[1], tuple(back[2:])
        return direct, on_grads, on_state


@dataclass(frozen=True)
class SGD(Optimizer):
    """torch.optim.SGD: momentum, dampening, Nesterov, weight decay.

    `detach_first=True` cuts the derivative through the first momentum buffer, as the code published with the paper
    does: with momentum, the curvature of step 0 is then lost, and one step is the same as none.
    """

    lr: float = 0.1
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    detach_first: bool = False

    keeps_gradients: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check(self, lr=0.0, momentum=0.0, weight_decay=0.0)
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise SettingError("nesterov=True needs momentum > 0 and dampening = 0")

    def init(self, w: Tensor) -> tuple[Tensor, ...]:
        return (torch.zeros_like(w),) if self.momentum else ()

    def step(self, w, g, state, t):
        d = g + self.weight_decay * w if self.weight_decay else g
        if not self.momentum:
            return w - self.lr * d, ()
        buffer = (
            self.momentum * state[0] + (1 - self.dampening) * d if t > 0 else d.detach() if self.detach_first else d
        )
        update = d + self.momentum * buffer if self.nesterov else buffer
        return w - self.lr * update, (buffer,)

    @torch.no_grad()
    def step_all(self, params, grads, state, t):
        names, w, d = list(params), list(params.values()), [grads[name] for name in params]
        if self.weight_decay:
            d = torch._foreach_add(d, w, alpha=self.weight_decay)
        if not self.momentum:
            return dict(zip(names, torch._foreach_add(w, d, alpha=-self.lr), strict=True)), state
        buffers = list(d)
        if t > 0:
            buffers = torch._foreach_mul([state[name][0] for name in names], self.momentum)
            torch._foreach_add_(buffers, d, alpha=1 - self.dampening)
        update = torch._foreach_add(d, buffers, alpha=self.momentum) if self.nesterov else buffers
        new = torch._foreach_add(w, update, alpha=-self.lr)
        return dict(zip(names, new, strict=True)), {n: (b,) for n, b in zip(names, buffers, strict=True)}

    @torch.no_grad()
    def pullback(self, params, grads, state, t, lam, lam_state):
        # u = d + momentum b' or b';  b' = momentum b + (1 - dampening) d, or d at the first step;  d = g + decay w
        names, lam_w = list(params), [lam[name] for name in params]
        on_update = torch._foreach_mul(lam_w, -self.lr)
        if not self.momentum:
            on_d, on_state = on_update, lam_state
        else:
            on_buffer = torch._foreach_mul(on_update, self.momentum) if self.nesterov else on_update
            on_buffer = torch._foreach_add([lam_state[name][0] for name in names], on_buffer)
            through = 1.0 - self.dampening if t > 0 else 0.0 if self.detach_first else 1.0
            on_state = {name: (b,) for name, b in zip(names, torch._foreach_mul(on_buffer, self.momentum), strict=True)}
            if not through and not self.nesterov:
                return lam, None, on_state  # the gradient does not enter this step
            on_d = torch._foreach_mul(on_buffer, through)
            if self.nesterov:
                torch._foreach_add_(on_d, on_update)
        direct = torch._foreach_add(lam_w, on_d, alpha=self.weight_decay) if self.weight_decay else lam_w
        return dict(zip(names, direct, strict=True)), dict(zip(names, on_d, strict=True)), on_state


@dataclass(frozen=True)
class Adam(Optimizer):
    """torch.optim.Adam; its weight decay is added to the gradient."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(self, lr=0.0, eps=0.0, weight_decay=0.0)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise SettingError(f"betas={self.betas}: both must lie in [0, 1)")

    def init(self, w: Tensor) -> tuple[Tensor, ...]:
        return torch.zeros_like(w), torch.zeros_like(w)

    def step(self, w, g, state, t):
        if self.weight_decay:
            w, g = self._decay(w, g)
        beta1, beta2 = self.betas
        mean = beta1 * state[0] + (1 - beta1) * g
        square = beta2 * state[1] + (1 - beta2) * g * g
        root = _sqrt(square) / math.sqrt(1 - beta2 ** (t + 1))
        return w - (self.lr / (1 - beta1 ** (t + 1))) * mean / (root + self.eps), (mean, square)

    def _decay(self, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return w, g + self.weight_decay * w


@dataclass(frozen=True)
class AdamW(Adam):
    """torch.optim.AdamW; its weight decay shrinks the weights directly."""

    weight_decay: float = 1e-2

    def _decay(self, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return w * (1 - self.lr * self.weight_decay), g


def _sqrt(x: Tensor) -> Tensor:
    """The square root, with derivative 0 (not infinite) where x is 0: it is multiplied by a momentum of 0 there."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), 0.0)


def _check(optimizer, **least: float) -> None:
    for name, bound in least.items():
        value = getattr(optimizer, name)
        if not isinstance(value, (int, float)) or not value >= bound or math.isinf(value):
            raise SettingError(
                f"{type(optimizer).__name__}({name}={value!r}): use a finite number of at least {bound:g}"
            )
