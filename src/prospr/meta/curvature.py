"""The extreme eigenvalues of the loss's Hessian, and a learning rate that suits them."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prospr.errors import DerivativeError, LossError, SettingError
from prospr.meta.loss import Params, check_seed
from prospr.meta.products import Loss, Mode, Products
from prospr.meta.ranks import Team

__all__ = ["Extremes", "check_kappa", "extreme_eigenvalues", "stable_lr"]


class Extremes(NamedTuple):
    """The smallest and the largest eigenvalue, and the number of Hessian-vector products spent on them."""

    smallest: float
    largest: float
    products: int

    @property
    def magnitude(self) -> float:
        """The largest absolute value of an eigenvalue."""
        return max(abs(self.smallest), abs(self.largest))


def extreme_eigenvalues(
    loss: Loss,
    params: Mapping[str, Tensor],
    batch: Any,
    *,
    most: int = 30,
    tolerance: float = 0.02,
    both: bool = True,
    mode: Mode = "auto",
    micro_batch: int | None = None,
    seed: int = 0,
    team: Team | None = None,
) -> Extremes:
    """Lanczos iteration on Hessian-vector products, until both ends move by less than `tolerance` of the larger.

    team: the ranks that have a part of the batch each, where there are several.

    With `both=False` it looks for the larger in size alone; the other end may then be far off. What it gives for it is
    the longest H y, of all y of length 1 in the space seen so far: that is no longer than the eigenvalue, and no
    shorter than the best y' H y in the same space. It stops where these two differ by less than `tolerance`.

    Three vectors are held, whatever `most` is: without re-orthogonalisation eigenvalues may be found twice, but the
    extreme ones are right.

    >>> import torch, prospr
    >>> bowl = lambda p, x: 0.5 * (torch.tensor([4.0, 1.0, -2.0]) * p["w"] ** 2).sum()
    >>> ends = prospr.meta.curvature.extreme_eigenvalues(bowl, {"w": torch.ones(3)}, None)
    >>> round(ends.smallest, 3), round(ends.largest, 3)
    (-2.0, 4.0)
    """
    if most < 1:
        raise SettingError(f"most={most}: use at least 1 product")
    products = Products(loss, mode=mode, micro_batch=micro_batch, seed=seed, team=team)
    products.recorder.expected = min(most, 10 if both else 4)  # that many it takes as a rule
    v = _unit(_noise(params, seed))
    previous: Params | None = None
    alphas: list[Tensor] = []
    betas: list[Tensor] = []
    ends: tuple[float, float] | None = None
    count = 0
    while count < most:
        u = products.hvp(params, batch, v)
        count += 1
        alpha = _dot(u, v)
        alphas.append(alpha)
        u = _axpy(u, v, -alpha)
        if previous is not None:
            u = _axpy(u, previous, -betas[-1])
        beta = _dot(u, u).sqrt()
        diagonal = torch.stack(alphas).double().cpu()
        matrix = torch.diag(diagonal)
        if betas:
            off = torch.stack(betas).double().cpu()
            matrix += torch.diag(off, 1) + torch.diag(off, -1)
        if not (torch.isfinite(matrix).all() and torch.isfinite(beta)):
            value = products.gradient(params, batch)[0]
            if not torch.isfinite(value):
                raise LossError(
                    f"the loss is {value.item()} at step 0; check the batch and the loss at the initial weights"
                )
            raise DerivativeError("the Hessian has NaN or infinite entries; check the loss at the initial weights")
        values = torch.linalg.eigvalsh(matrix)
        before, ends = ends, (values[0].item(), values[-1].item())
        size = max(abs(ends[0]), abs(ends[1]))
        if beta.item() <= 1e-7 * max(size, 1e-30):
            break  # the space is exhausted: these are all the eigenvalues it has
        if not both:
            longest = _longest(matrix, beta)
            ends = (-longest, ends[1]) if -ends[0] > ends[1] else (ends[0], longest)
            if longest - size <= tolerance * longest:
                break
        elif before is not None and max(abs(a - b) for a, b in zip(ends, before, strict=True)) <= tolerance * size:
            break
        betas.append(beta)
        previous, v = v, {name: t / beta.to(t.dtype) for name, t in u.items()}
    assert ends is not None
    return Extremes(ends[0], ends[1], count)


def stable_lr(
    loss: Loss,
    params: Mapping[str, Tensor],
    batch: Any,
    *,
    kappa: float = 1.0,
    mode: Mode = "auto",
    micro_batch: int | None = None,
    seed: int = 0,
    team: Team | None = None,
) -> float:
    """kappa / |lambda|, lambda the eigenvalue of the Hessian that is largest in size.

    A step of SGD multiplies the derivative by I - lr H. At initialization the eigenvalue of largest size is often
    negative, so each step stretches that direction by 1 + kappa: kappa is how much of it a step may add. lambda is
    found to some percent (see `both=False` above), far nearer than it is from one batch to the next.

    >>> import torch, prospr
    >>> bowl = lambda p, x: 0.5 * (torch.tensor([4.0, 1.0, -2.0]) * p["w"] ** 2).sum()
    >>> round(prospr.meta.curvature.stable_lr(bowl, {"w": torch.ones(3)}, None, kappa=2.0), 2)
    0.5
    """
    check_kappa(kappa)
    how: dict[str, Any] = {"mode": mode, "micro_batch": micro_batch, "seed": seed, "team": team}
    ends = extreme_eigenvalues(loss, params, batch, both=False, **how)
    if ends.magnitude == 0:
        raise DerivativeError("the loss has no curvature at these weights, so no learning rate follows from it")
    return kappa / ends.magnitude


def check_kappa(kappa: Any) -> None:
    if not isinstance(kappa, (int, float)) or not 0 < kappa < math.inf:
        raise SettingError(f"kappa={kappa!r}: use a positive number, such as 0.5")


def _longest(matrix: Tensor, beta: Tensor) -> float:
    """Of all H y, y of length 1 in the space seen: H is `matrix` in it, and `beta` leads out of it from the last."""
    out = torch.zeros(1, len(matrix), dtype=matrix.dtype, device=matrix.device)
    out[0, -1] = beta
    return torch.linalg.matrix_norm(torch.cat([matrix, out]), 2).item()


def _noise(params: Mapping[str, Tensor], seed: int) -> Params:
    generator = torch.Generator().manual_seed(check_seed(seed))
    kinds = {name: torch.complex64 if p.is_complex() else torch.float32 for name, p in params.items()}
    return {
        name: torch.randn(p.shape, generator=generator, dtype=kinds[name], device="cpu").to(p.device, p.dtype)
        for name, p in params.items()
    }


def _dot(a: Params, b: Params) -> Tensor:
    pairs = [(_real(a[name]), _real(b[name])) for name in a]
    parts = [(x * y).sum(dtype=torch.float64) for x, y in pairs]
    return torch.stack([p.to(parts[0].device) for p in parts]).sum()


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t) if t.is_complex() else t


def _axpy(a: Params, b: Params, scale: Tensor) -> Params:
    return {name: t + scale.to(t.device, t.dtype) * b[name] for name, t in a.items()}


def _unit(a: Params) -> Params:
    norm = _dot(a, a).sqrt()
    return {name: t / norm.to(t.device, t.dtype) for name, t in a.items()}
