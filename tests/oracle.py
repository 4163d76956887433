"""The straightforward way to a meta-gradient: one graph through all the steps. Slow, large and easy to believe."""

import copy
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from prospr.meta.kernels import ReverseOverReverse


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class _Functional(nn.Module):
    """A module whose forward computes the loss, so that functional_call can swap its parameters."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch):
        return self.loss(self.model, batch)


def loss_of(model: nn.Module, params: dict[str, Tensor], batch: Any, loss=None, seed: int | None = None) -> Tensor:
    holder = _Functional(model, loss or cross_entropy)
    swapped = {f"model.{name}": p for name, p in params.items()}
    swapped |= {f"model.{name}": b.clone() for name, b in model.named_buffers()}
    with torch.random.fork_rng(), sdpa_kernel(SDPBackend.MATH), written_out():
        if seed is not None:
            torch.manual_seed(seed)
        return functional_call(holder, swapped, (batch,), tie_weights=True)


@contextmanager
def written_out():
    """Formulas in place of what PyTorch differentiates wrongly (test_products.py shows it by differences): its weight
    norm twice, its norms with the data's statistics three times, as a loss with gradients inside is."""
    formulas = {"torch._weight_norm": _weight_norm}
    formulas |= {f"torch.nn.functional.{f.__name__}": f for f in (batch_norm, instance_norm, layer_norm)}
    with ExitStack() as stack:
        for name, formula in formulas.items():
            stack.enter_context(mock.patch(name, formula))
        yield


def _weight_norm(v: Tensor, g: Tensor, dim: int) -> Tensor:
    others = [d for d in range(v.dim()) if d != dim]
    return g * v / v.square().sum(others, keepdim=True).sqrt()


_batch_norm = F.batch_norm


def batch_norm(x, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    if not training:
        return _batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    with torch.no_grad():  # brings the running statistics up to date
        _batch_norm(x, running_mean, running_var, None, None, True, momentum, eps)
    dims = [d for d in range(x.dim()) if d != 1]
    return _affine(_normal(x, dims, eps), weight, bias, (1, -1, *[1] * (x.dim() - 2)))


def instance_norm(
    x, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-5
):
    assert use_input_stats
    assert running_mean is None
    return _affine(_normal(x, list(range(2, x.dim())), eps), weight, bias, (1, -1, *[1] * (x.dim() - 2)))


def layer_norm(x, shape, weight=None, bias=None, eps=1e-5):
    return _affine(_normal(x, list(range(x.dim() - len(shape), x.dim())), eps), weight, bias, shape)


def _normal(x: Tensor, dims: list[int], eps: float) -> Tensor:
    mean = x.mean(dims, keepdim=True)
    return (x - mean) / (((x - mean) ** 2).mean(dims, keepdim=True) + eps) ** 0.5


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape) -> Tensor:
    x = x if weight is None else x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


def unrolled(model, batches, optimizer, loss=None, first_order: bool = False) -> dict[str, Tensor]:
    """dL(w_M)/dw_0 by backpropagation through every step; the seed of step m is m."""
    model = copy.deepcopy(model)
    for module in model.modules():  # functional_call puts the weights back before the backward pass runs them again
        if hasattr(module, "checkpointing"):
            module.checkpointing = False
    start = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters() if p.requires_grad}
    w, state = dict(start), {name: optimizer.init(p) for name, p in start.items()}
    for t, batch in enumerate(batches[:-1]):
        value = loss_of(model, w, batch, loss, seed=t)
        grads = torch.autograd.grad(
            value, list(w.values()), create_graph=not first_order, allow_unused=True, materialize_grads=True
        )
        new = {n: optimizer.step(p, g, state[n], t) for (n, p), g in zip(w.items(), grads, strict=True)}
        w, state = {n: p for n, (p, _) in new.items()}, {n: s for n, (_, s) in new.items()}
        if first_order:
            w = {n: p.detach().requires_grad_() for n, p in w.items()}
            state = {n: tuple(x.detach() for x in s) for n, s in state.items()}
    final = loss_of(model, w, batches[-1], loss, seed=len(batches) - 1)
    wrt = w if first_order else start
    grads = torch.autograd.grad(final, list(wrt.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(start, grads, strict=True))


def relative_error(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Of the whole vector: single entries may be exactly zero, all rounding."""
    assert list(a) == list(b)
    difference = torch.cat([(a[n] - b[n]).flatten() for n in b])
    return (difference.norm() / torch.cat([t.flatten() for t in b.values()]).norm()).item()


def dual_backward(function, inputs, kernels: bool):
    """Gradients of sum(f^3) and of their inner product with noise: every output of both backward passes."""
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    if kernels:
        with ReverseOverReverse():
            out = function(*inputs)
    else:
        out = function(*inputs)
    first = torch.autograd.grad(out.pow(3).sum(), inputs, create_graph=True)
    generator = torch.Generator().manual_seed(5)
    vectors = [torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device) for t in inputs]
    return [*first, *torch.autograd.grad(first, inputs, vectors)]
