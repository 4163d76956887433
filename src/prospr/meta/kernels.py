"""Operations with a second derivative that is right and fast, swapped in without touching the user's model.

PyTorch's own double backward of a convolution takes its weight term from a forward convolution whose kernel is a whole
feature map, and that of batch norm is a chain of some thirty elementwise operations. Both have closed forms in the
ordinary, tuned kernels. A few other operations have no second derivative at all, or a wrong one; they are replaced by
plain formulas.
"""

import functools
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from prospr.meta import fused

__all__ = [
    "ForwardOverReverse",
    "GradientInside",
    "OneBackward",
    "ReverseOverReverse",
    "without_weight_gradients",
]

aten = torch.ops.aten


class _Skip(threading.local):
    active = False


_skip = _Skip()


@contextmanager
def without_weight_gradients() -> Generator[None]:
    """Inside, the first backward pass of a convolution returns zeros in place of a leaf weight's gradient.

    A Hessian-vector product needs the graph of the gradient, not its value: one of nine convolutions is saved.
    """
    before, _skip.active = _skip.active, True
    try:
        yield
    finally:
        _skip.active = before


def _quiet(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of an autograd.Function that calls plain operations: no mode needs to look at each of them."""

    @functools.wraps(method)
    def call(ctx, *args):
        with torch._C.DisableTorchFunction():
            return method(ctx, *args)

    return call


# ---------------------------------------------------------------------------------------------------- convolution


class _Convolution(torch.autograd.Function):
    @staticmethod
    @_quiet
    def forward(ctx: Any, x, weight, bias, settings):
        ctx.save_for_backward(x, weight)
        ctx.settings = settings
        ctx.leaf = weight.is_leaf
        return aten.convolution(x, weight, bias, *settings)

    @staticmethod
    @_quiet
    def backward(ctx: Any, grad):
        x, weight = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:3])
        value = needs[1] and not (_skip.active and ctx.leaf)
        return *_ConvolutionBackward.apply(grad, x, weight, ctx.settings, needs, value), None


class _ConvolutionBackward(torch.autograd.Function):
    @staticmethod
    @_quiet
    def forward(ctx: Any, grad, x, weight, settings, needs, weight_value):
        ctx.save_for_backward(grad, x, weight)
        ctx.set_materialize_grads(False)
        ctx.settings = settings
        mask = [needs[0], weight_value, needs[2]]
        gx, gw, gb = _convolution_backward(grad, x, weight, settings, mask)
        if needs[1] and not weight_value:
            gw = weight.new_zeros(()).expand(weight.shape)
        return gx, gw, gb

    @staticmethod
    @_quiet
    def backward(ctx: Any, ggx, ggw, ggb):
        # The convolution is bilinear, so each term is one ordinary kernel.
        grad, x, weight = ctx.saved_tensors
        settings = ctx.settings
        needs = ctx.needs_input_grad
        out = gx = gw = None
        if needs[0]:
            if ggx is not None:
                out = aten.convolution(ggx, weight, None, *settings)
            if ggw is not None:
                term = aten.convolution(x, ggw, ggb, *settings)
                out = term if out is None else out + term
            elif ggb is not None:
                term = ggb.reshape(-1, *[1] * (x.dim() - 2)).expand_as(grad)
                out = term if out is None else out + term
        if needs[1] and ggw is not None:
            gx = _convolution_backward(grad, x, ggw, settings, [True, False, False])[0]
        if needs[2] and ggx is not None:
            gw = _convolution_backward(grad, ggx, weight, settings, [False, True, False])[1]
        return out, gx, gw, None, None, None


def _convolution_backward(grad, x, weight, settings, mask):
    _, _, _, transposed, _, groups = settings
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return aten.convolution_backward(grad, x, weight, [channels], *settings, mask)


def _convolution(transposed: bool, dims: int) -> Callable[..., Tensor]:
    original = getattr(F, f"conv_transpose{dims}d" if transposed else f"conv{dims}d")

    def many(value: Any) -> list[int]:
        return list(value) * (dims if len(value) == 1 else 1) if isinstance(value, Sequence) else [value] * dims

    def plain(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        if isinstance(padding, str) or not _replaceable(x, weight, dims):
            return original(x, weight, bias, stride, padding, dilation, groups)
        settings = (many(stride), many(padding), many(dilation), False, [0] * dims, groups)
        return _Convolution.apply(x, weight, bias, settings)

    def transpose(x, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
        if not _replaceable(x, weight, dims):
            return original(x, weight, bias, stride, padding, output_padding, groups, dilation)
        settings = (many(stride), many(padding), many(dilation), True, many(output_padding), groups)
        return _Convolution.apply(x, weight, bias, settings)

    return transpose if transposed else plain


def _replaceable(x: Tensor, weight: Tensor, dims: int) -> bool:
    plain = x.dtype == weight.dtype and not x.is_complex()
    return plain and x.dim() == dims + 2 and not torch.is_autocast_enabled(x.device.type)


# ----------------------------------------------------------------------------------------------------- batch norm


class _BatchNorm(torch.autograd.Function):
    """Batch norm with the statistics of the batch."""

    @staticmethod
    @_quiet
    def forward(ctx: Any, x, weight, bias, running, momentum, eps):
        out, mean, rstd = aten.native_batch_norm(x, weight, bias, *running, True, momentum, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.eps = eps
        return out

    @staticmethod
    @_quiet
    def backward(ctx: Any, grad):
        x, weight, mean, rstd = ctx.saved_tensors
        gx, gw, gb = _BatchNormBackward.apply(grad, x, weight, mean, rstd, ctx.eps)
        needs = ctx.needs_input_grad
        return gx if needs[0] else None, gw if needs[1] else None, gb if needs[2] else None, None, None, None


class _BatchNormBackward(torch.autograd.Function):
    @staticmethod
    @_quiet
    def forward(ctx: Any, grad, x, weight, mean, rstd, eps):
        scale = torch.ones_like(rstd) if weight is None else weight
        gx, gw, gb = aten.native_batch_norm_backward(
            grad, x, scale, None, None, mean, rstd, True, eps, [True, True, True]
        )
        ctx.save_for_backward(grad, x, weight, mean, rstd, gw, gb)
        ctx.set_materialize_grads(False)
        return gx, gw, gb

    @staticmethod
    @_quiet
    def backward(ctx: Any, a, b, d):
        # With xh = (x - mean) r and U(t) = r (t - mean t - xh mean(t xh)), N elements a channel, and a, b, d the
        # cotangents of gx, gw, gb, the three results are linear in a, grad and xh with one coefficient a channel:
        #   cotangent of grad:    w U(a) + b xh + d
        #   cotangent of x:      -r q w U(a) + (b - w r p) U(grad) - (w r z / N) xh
        #   cotangent of weight:  z = sum(a U(grad));        p = mean(a xh), q = mean(grad xh)
        grad, x, weight, mean, r, gw, gb = ctx.saved_tensors
        needs_x = ctx.needs_input_grad[1]
        if a is None:
            a = torch.zeros_like(grad)
        if fused.available(a, x, grad):
            out, gx, z = fused.batch_norm_double_backward(a, b, d, grad, x, weight, mean, r, gw, gb, needs_x)
            return out, gx, (None if weight is None else z), None, None, None
        n = x.numel() // x.shape[1]
        w_r = r if weight is None else weight * r
        q, g = gw / n, gb / n
        a_xh, a_sum = _channel_sums(a, x, mean, r)
        p, a_mean = a_xh / n, a_sum / n
        # sum(a (grad - mean grad)): the same reduction kernel, with grad in the place of x
        a_grad, _ = _channel_sums(a, grad, g, torch.ones_like(r))
        z = r * (a_grad - a_xh * q)
        k = -w_r * p if b is None else b - w_r * p  # the coefficient of xh in the first, of U(grad) in the second
        shift = -w_r * a_mean if d is None else d - w_r * a_mean

        out = _per_channel(x, k * r, shift - k * r * mean).addcmul_(a, _broadcast(w_r, x))
        gx = None
        if needs_x:
            c_a = -w_r * r * q
            c_grad = k * r
            c_x = -(c_a * p + c_grad * q + w_r * z / n) * r
            gx = _per_channel(x, c_x, -c_x * mean - c_a * a_mean - c_grad * g)
            gx.addcmul_(a, _broadcast(c_a, x)).addcmul_(grad, _broadcast(c_grad, x))
        return out, gx, (None if weight is None else z), None, None, None


def _channel_sums(t: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """`sum(t (x - mean) rstd)` and `sum(t)`, one number a channel, in one pass."""
    ones = torch.ones_like(rstd)
    _, products, sums = aten.native_batch_norm_backward(
        t, x, ones, None, None, mean, rstd, True, 0.0, [False, True, True]
    )
    return products, sums


def _per_channel(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`scale x + shift`, one number a channel, in one pass (batch norm in eval mode)."""
    zero, one = torch.zeros_like(scale), torch.ones_like(scale)
    return aten.native_batch_norm(x, scale, shift, zero, one, False, 0.0, 0.0)[0]


def _broadcast(channel: Tensor, x: Tensor) -> Tensor:
    return channel.reshape(-1, *[1] * (x.dim() - 2))


def _uses_batch_statistics(x, training) -> bool:
    return bool(training) and not torch.is_autocast_enabled(x.device.type)


def _batch_norm(input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    if not _uses_batch_statistics(input, training) or (weight is None) != (bias is None):
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if input.numel() == input.shape[1]:  # one value a channel: let PyTorch say so in its own words
        return F.batch_norm(input, None, None, weight, bias, training, momentum, eps)
    return _BatchNorm.apply(input, weight, bias, (running_mean, running_var), momentum, eps)


def _native_batch_norm(
    input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
):
    # cuDNN's kernel has no forward-mode rule; the native one has.
    if not _uses_batch_statistics(input, training):
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    return aten.native_batch_norm(input, weight, bias, running_mean, running_var, True, momentum, eps)[0]


# ------------------------------------------------------------------------------------------------- plain formulas


def _weight_norm(v, g, dim=0):
    return v * (g / torch.norm_except_dim(v, 2, dim))  # the fused kernel's double backward is wrong


def _hard_sigmoid(input, inplace=False):
    return F.relu6(input + 3) / 6  # PyTorch has no second derivative of its own, which is zero


def _without_cudnn(function: Callable) -> Callable:
    def call(*args, **kwargs):
        with torch.backends.cudnn.flags(enabled=False):  # cuDNN's recurrent kernels have no second derivative
            return function(*args, **kwargs)

    return call


# A loss may have gradients inside, a penalty on them for instance; a Hessian-vector product is then their third
# derivative. PyTorch's is wrong for these three norms where the statistics are those of the data.


def _plain_batch_norm(input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    count = input.numel() // input.shape[1]
    if not training or count == 1:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    dims = [d for d in range(input.dim()) if d != 1]
    out, mean, variance = _normalized(input, dims, eps)
    _follow(running_mean, mean.flatten(), momentum)
    _follow(running_var, variance.flatten() * (count / (count - 1)), momentum)
    return _scaled(out, weight, bias, input)


def _plain_instance_norm(
    input, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-5
):
    count = input[0, 0].numel()
    if not use_input_stats or count == 1:
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    out, mean, variance = _normalized(input, list(range(2, input.dim())), eps)
    _follow(running_mean, mean.flatten(1).mean(0), momentum)
    _follow(running_var, variance.flatten(1).mean(0) * (count / (count - 1)), momentum)
    return _scaled(out, weight, bias, input)


def _plain_layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    out = _normalized(input, list(range(-len(normalized_shape), 0)), eps)[0]
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias).to(input.dtype)


def _normalized(x: Tensor, dims: list[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = x.mean(dims, keepdim=True)
    variance = (x - mean).square().mean(dims, keepdim=True)
    return (x - mean) * (variance + eps).rsqrt(), mean, variance


def _scaled(out: Tensor, weight: Tensor | None, bias: Tensor | None, x: Tensor) -> Tensor:
    out = out if weight is None else out * _broadcast(weight, x)
    return (out if bias is None else out + _broadcast(bias, x)).to(x.dtype)


def _follow(running: Tensor | None, value: Tensor, momentum: float) -> None:
    if running is not None:
        with torch.no_grad():
            running.lerp_(value.to(running.dtype), momentum)


_ALWAYS: dict[Any, Callable] = {torch._weight_norm: _weight_norm, F.hardsigmoid: _hard_sigmoid}
for _name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    _ALWAYS[getattr(torch._VF, _name)] = _without_cudnn(getattr(torch._VF, _name))

_REVERSE: dict[Any, Callable] = {**_ALWAYS, F.batch_norm: _batch_norm}
for _dims in (1, 2, 3):
    _REVERSE[getattr(F, f"conv{_dims}d")] = _convolution(False, _dims)
    _REVERSE[getattr(F, f"conv_transpose{_dims}d")] = _convolution(True, _dims)

_FORWARD: dict[Any, Callable] = {**_ALWAYS, F.batch_norm: _native_batch_norm}

_PLAIN: dict[Any, Callable] = {
    **_ALWAYS,
    F.batch_norm: _plain_batch_norm,
    F.instance_norm: _plain_instance_norm,
    F.layer_norm: _plain_layer_norm,
}


class GradientInside(Exception):
    """The loss differentiates the network itself."""


_DIFFERENTIATING = {torch.autograd.grad: 4, Tensor.backward: 3}  # and where create_graph is among the arguments


class OneBackward(TorchFunctionMode):
    """Operations for one backward pass.

    plain: whether there are gradients inside the loss; if not, one that must be differentiated is GradientInside.
    """

    replacements: ClassVar[dict[Any, Callable]] = {}

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.plain = plain

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in _DIFFERENTIATING and not self.plain:
            place = _DIFFERENTIATING[func]
            if kwargs.get("create_graph") or any(args[place : place + 1]):
                raise GradientInside
        found = _PLAIN if self.plain or torch._C._functorch.maybe_current_level() else self.replacements
        if func in found and "input" in kwargs:
            args = (kwargs.pop("input"), *args)
        return found.get(func, func)(*args, **kwargs)


class ReverseOverReverse(OneBackward):
    """Operations for two backward passes."""

    replacements = _REVERSE


class ForwardOverReverse(OneBackward):
    """Operations for dual numbers through one backward pass."""

    replacements = _FORWARD
