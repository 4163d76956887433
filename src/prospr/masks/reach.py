"""Which kept weights lie on a path from the network's input to its output.

The network is run once with positive numbers in the place of its kept weights and of its input, and with everything
that could stop a signal taken out: biases, norms, activations, gates, dropout. What a sum of the outputs, each times a
positive number of its own, still depends on is connected; a derivative that is exactly zero means no path.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from prospr.layers import embeddings
from prospr.meta.loss import Call, PureLoss, evaluation_mode
from prospr.meta.products import plain_grad

__all__ = ["Reach", "reach"]


@dataclass(frozen=True)
class Reach:
    """What the signal reaches."""

    effective: dict[str, Tensor]  # the kept weights on a path from input to output
    connected: bool | None  # whether there is such a path at all, if only around the masked weights; None: not known


def reach(model: nn.Module, masks: Mapping[str, Tensor], call: Call) -> Reach | None:
    """Where a signal can go through the masked model; None where the network cannot be traced this way.

    A learned token or embedding counts as an input. A weight that only ever meets zero padding is on no path.
    """
    # double keeps long products from underflowing; some models insist on their own
    for dtype in (torch.float64, None):
        try:
            return _flow(model, masks, call, dtype)
        except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, LookupError, ArithmeticError):
            continue
    return None


def _flow(model: nn.Module, masks: Mapping[str, Tensor], call: Call, dtype: torch.dtype | None) -> Reach:
    generator = torch.Generator().manual_seed(0)
    sources: list[Tensor] = []

    def positive(like: Tensor) -> Tensor:
        noise = torch.rand(like.shape, generator=generator, dtype=torch.float64, device="cpu") + 0.5
        return noise.to(like.device, dtype or like.dtype)

    def prepare(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            sources.append(positive(value).requires_grad_())
            return sources[-1].clone()  # the model may write into it
        if isinstance(value, dict):
            return {key: prepare(item) for key, item in value.items()}
        return type(value)(prepare(item) for item in value) if type(value) in (tuple, list) else value

    params: dict[str, Tensor] = {}
    closed, embedded = _recurrent_biases(model), embeddings(model)
    for name, p in model.named_parameters():
        noise = positive(p.detach()) * (id(p) not in closed)
        mask = masks[name].to(p.device) if name in masks else torch.ones_like(p, dtype=torch.bool)
        if p.dim() > 1:  # activations stay near 1
            noise = noise / mask.flatten(1).sum(1).clamp(min=1).reshape(-1, *[1] * (p.dim() - 1))
        noise = noise * mask
        params[name] = noise.requires_grad_(name in masks or id(p) in embedded)
        if id(p) in embedded:
            sources.append(params[name])
    args, kwargs = prepare(call[0]), prepare(call[1])
    pure = PureLoss(model, lambda m, _: _total(m(*args, **kwargs), positive))
    with torch.enable_grad(), evaluation_mode(model), pure.swapped(params):
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[key] = buffer.to(dtype or buffer.dtype)
        inputs = [*(params[name] for name in masks), *sources]
        with _Open():  # activation checkpointing runs the network again while the gradient is taken
            out = pure.evaluate(None)
            found = plain_grad([out], inputs, [torch.ones_like(out)]) if out.requires_grad else [None] * len(inputs)
    grads = [torch.zeros_like(p) if g is None else g for p, g in zip(inputs, found, strict=True)]
    if not all(torch.isfinite(g).all() for g in grads):
        raise ValueError("the traced signal is not finite")
    effective = {name: (g != 0) & mask.to(g.device) for (name, mask), g in zip(masks.items(), grads, strict=False)}
    if any(bool(g.any()) for g in (*effective.values(), *grads[len(masks) :])):
        return Reach(effective, connected=True)
    return Reach(effective, connected=False if sources else None)


def _recurrent_biases(model: nn.Module) -> set[int]:
    """Their fused kernels add the biases themselves; every other bias is taken out where it is added."""
    recurrent = (m for m in model.modules() if isinstance(m, (nn.RNNBase, nn.RNNCellBase)))
    return {id(p) for m in recurrent for key, p in m._parameters.items() if p is not None and key.startswith("bias")}


def _total(out: Any, positive: Callable[[Tensor], Tensor]) -> Tensor:
    """The outputs' sum, each times a number of its own: what the network takes away from itself does not cancel."""
    if isinstance(out, Tensor):
        return (out * positive(out)).sum() if out.is_floating_point() else out.sum()
    parts = out.values() if isinstance(out, Mapping) else out if isinstance(out, (tuple, list)) else vars(out).values()
    sums = [_total(part, positive) for part in parts if isinstance(part, (Tensor, Mapping, tuple, list))]
    if not sums:
        raise TypeError(f"the model returned a {type(out).__name__} without tensors")
    return torch.stack([s for s in sums if s.is_floating_point()]).sum()


def _first(x, *args, **kwargs):
    return x


def _gate(x, *args, **kwargs):  # never shut: a gate without input is half open, not closed
    return torch.where(torch.isneginf(x), 0.0, x + 1)


def _linear(x, weight, bias=None):
    return F.linear(x, weight)


def _addmm(term, x, y, **kwargs):
    return x @ y if term.dim() == 1 else torch.addmm(term, x, y, **kwargs)


def _without_bias(convolution: Callable) -> Callable:
    def call(x, weight, bias=None, *args, **kwargs):
        return convolution(x, weight, None, *args, **kwargs)

    return call


def _mean_pool(original: Callable, average: Callable) -> Callable:
    """Every input of a window passes, not the largest alone; the indices, where asked for, are the original's."""

    def call(x, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, **kwargs):
        out = original(x, kernel_size, stride, padding, dilation, ceil_mode, **kwargs)
        if dilation not in (1, (1,), (1, 1), (1, 1, 1), [1], [1, 1], [1, 1, 1]):
            return out
        mean = average(x, kernel_size, stride or kernel_size, padding, ceil_mode)
        return (mean, out[1]) if isinstance(out, tuple) else mean

    return call


def _mean_of_two(original: Callable) -> Callable:
    def call(x, other, **kwargs):
        both = all(isinstance(t, Tensor) and t.is_floating_point() for t in (x, other))
        return (x + other) / 2 if both and not kwargs else original(x, other, **kwargs)

    return call


def _sum_of_two(original: Callable, into: bool) -> Callable:
    """A difference does not cancel: that of one sample and the mean over all samples would."""

    def call(x, other, **kwargs):
        both = all(isinstance(t, Tensor) and t.is_floating_point() for t in (x, other))
        return (x.add_ if into else x.add)(other, **kwargs) if both else original(x, other, **kwargs)

    return call


def _mean_along(original: Callable) -> Callable:
    """max, amax and the like: every number along a dimension passes; the indices, where there are some, are theirs."""

    def call(x, *args, **kwargs):
        out = original(x, *args, **kwargs)
        values = out if isinstance(out, Tensor) else out[0]
        if not x.is_floating_point():
            return out
        along = args[0] if args else kwargs.get("dim", kwargs.get("other"))
        if isinstance(along, Tensor):
            return (x + along) / 2
        mean = (x.mean() if along is None else x.mean(along, keepdim=True)).reshape(values.shape)
        return mean if isinstance(out, Tensor) else type(out)((mean, out[1]))

    return call


def _adaptive_mean_pool(original: Callable, average: Callable) -> Callable:
    def call(x, output_size, **kwargs):
        out = original(x, output_size, **kwargs)
        return (average(x, output_size), out[1]) if isinstance(out, tuple) else average(x, output_size)

    return call


def _attention(query, key, value, *args, **kwargs):
    heads, shared = query.shape[-3], key.shape[-3]
    if heads != shared and query.dim() > 3:  # grouped-query attention
        key, value = (t.repeat_interleave(heads // shared, -3) for t in (key, value))
    return (1 + query @ key.transpose(-2, -1)) @ value / key.shape[-2]


def _multi_head(
    query, key, value, embed_dim, num_heads, in_w, in_b, bias_k, bias_v, add_zero, dropout, out_w, *_, **kw
):
    if kw.get("use_separate_proj_weight"):
        weights = kw["q_proj_weight"], kw["k_proj_weight"], kw["v_proj_weight"]
    else:
        weights = in_w.chunk(3)
    q, k, v = (F.linear(t, w) for t, w in zip((query, key, value), weights, strict=True))
    split = lambda t: t.unflatten(-1, (num_heads, -1)).movedim(-2, 0).movedim(1, -2)  # noqa: E731
    if query.dim() == 3:  # (length, batch, embedding), as the module passes it
        mixed = _attention(split(q), split(k), split(v)).movedim(-2, 1)
        mixed = mixed.movedim(0, -2).flatten(-2)
    else:
        heads = (t.unflatten(-1, (num_heads, -1)).transpose(0, 1) for t in (q, k, v))
        mixed = _attention(*heads).transpose(0, 1).flatten(-2)
    return F.linear(mixed, out_w), None


def _every(*names: str) -> list[Callable]:
    homes = (F, torch, torch.Tensor, torch.special)
    return [f for name in names for home in homes if (f := getattr(home, name, None)) is not None]


_OPEN: dict[Any, Callable] = {F.linear: _linear, torch.addmm: _addmm, F.scaled_dot_product_attention: _attention}
_PASSING = """
relu relu_ relu6 leaky_relu leaky_relu_ prelu rrelu rrelu_ elu elu_ selu selu_ celu celu_ gelu silu mish hardswish
hardtanh hardtanh_ tanh tanh_ tanhshrink hardshrink softshrink softplus softsign threshold threshold_
clamp clamp_ clamp_min clamp_max clip clip_ abs
dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout
batch_norm layer_norm group_norm instance_norm rms_norm local_response_norm normalize
"""
for _f in _every(*_PASSING.split()):
    _OPEN[_f] = _first
for _f in _every("sigmoid", "sigmoid_", "hardsigmoid", "logsigmoid", "softmax", "log_softmax", "exp", "exp_", "expit"):
    _OPEN[_f] = _gate
for _d in (1, 2, 3):
    for _name in (f"conv{_d}d", f"conv_transpose{_d}d"):
        _OPEN[getattr(F, _name)] = _without_bias(getattr(F, _name))
    for _pool in (
        getattr(F, f"max_pool{_d}d"),
        getattr(F, f"max_pool{_d}d_with_indices"),
        getattr(torch, f"max_pool{_d}d"),
    ):
        _OPEN[_pool] = _mean_pool(_pool, getattr(F, f"avg_pool{_d}d"))
    for _pool in (getattr(F, f"adaptive_max_pool{_d}d"), getattr(F, f"adaptive_max_pool{_d}d_with_indices")):
        _OPEN[_pool] = _adaptive_mean_pool(_pool, getattr(F, f"adaptive_avg_pool{_d}d"))
for _f in _every("maximum", "minimum", "fmax", "fmin"):
    _OPEN[_f] = _mean_of_two(_f)
for _name in ("sub", "subtract", "rsub", "__rsub__", "sub_", "subtract_"):
    for _f in _every(_name):
        _OPEN[_f] = _sum_of_two(_f, into=_name[-2] != "_" and _name[-1] == "_")
for _f in _every("max", "min", "amax", "amin"):
    _OPEN[_f] = _mean_along(_f)
_OPEN[F.multi_head_attention_forward] = _multi_head


class _Open(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in _OPEN and "input" in kwargs:
            args = (kwargs.pop("input"), *args)
        return _OPEN.get(func, func)(*args, **kwargs)
