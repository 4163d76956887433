"""What each operation does to channels. An operation without a rule fixes every channel it meets."""

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from prospr.meta.batches import tensors
from prospr.tracing.labels import Labels
from prospr.tracing.trace import INPUT, Dims, Watch

__all__ = ["rule_for"]

Rule = Callable[[Watch, Any, tuple, dict[str, Any], Any], None]
_RULES: dict[str, Rule] = {}
_SPATIAL = re.compile(r"_?(?:adaptive_)?(?:max_pool|avg_pool|upsample|reflection_pad|replication_pad)\D*(\d)d")
_MAKES_NEW = ("zeros", "ones", "full", "empty", "rand", "arange", "eye", "linspace", "scalar_tensor", "new_")


def rule(*names: str) -> Callable[[Rule], Rule]:
    def keep(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return keep


def rule_for(func: Any) -> Rule:
    name = func._schema.name.removeprefix("aten::")
    if name in _RULES:
        return _RULES[name]
    if name.rstrip("_") in _RULES and name.endswith("_"):
        return _RULES[name.rstrip("_")]
    if torch.Tag.pointwise in func.tags:
        return pointwise
    if found := _SPATIAL.match(name):
        return lambda *call: spatial(int(found[1]), *call)
    if name.startswith(_MAKES_NEW):
        return new if not name.endswith("_like") else like
    if name.startswith("_scaled_dot_product"):
        return attention
    return unknown


def unknown(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    for tensor in tensors((args, kwargs)):
        for labels in w.dims(tensor):
            w.fix(labels, w.here(func))
            w.write(labels)


def new(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    """A tensor made in forward: its sizes are as they are."""


@rule(
    "clone", "contiguous", "detach", "alias", "lift_fresh", "_to_copy", "positive", "native_dropout",
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "bernoulli", "fill", "zero",
    "normal", "uniform", "_conj", "hardswish", "log_sigmoid_forward", "rrelu_with_noise",
)  # fmt: skip
def like(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    first = out[0] if isinstance(out, tuple) else out
    if first is not args[0] and first.shape == args[0].shape:
        w.know(first, w.dims(args[0]))


@rule("copy", "_prelu_kernel", "_foreach_add")
def pointwise(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    """Element by element: dimensions that meet are the same channels; one of size 1 is spread over the other."""
    parts = list(tensors((args, kwargs)))
    if not isinstance(out, Tensor):
        return unknown(w, func, args, kwargs, out)
    dims: Dims = [None] * out.dim()
    for d in range(out.dim()):
        meet = []
        for part in parts:
            e = d - out.dim() + part.dim()
            if e >= 0 and part.shape[e] == out.shape[d] and out.shape[d] > 1:
                meet.append(w.dims(part)[e])
        for labels in meet[1:]:
            w.join(meet[0], labels, f"a tensor of fixed size at {w.here(func)}")
            w.write(labels)
        dims[d] = None if not meet or any(labels is None for labels in meet) else meet[0]
    w.write(*dims)
    if not any(out is part for part in parts):
        w.know(out, dims)
    return None


@rule("convolution", "convolution_overrideable", "cudnn_convolution", "mkldnn_convolution")
def convolution(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> None:
    x, weight, bias, _, _, _, transposed, _, groups = args[:9]
    inputs = w.dims(x)[1]
    rows, columns = w.dims(weight)[:2]
    for labels in (*w.dims(weight)[2:], w.dims(x)[0], *w.dims(x)[2:]):
        w.fix(labels, w.here(func))
    places = math.prod(weight.shape[2:]) * len(x) * math.prod((x if transposed else out).shape[2:])
    into, outof = (rows, columns) if transposed else (columns, rows)  # the weight's dimensions for inputs, outputs
    if groups == 1:
        w.contract(inputs, into, INPUT if inputs is None else f"one input channel of {w.here(func)}")
        result = outof
        cost = [(x.shape[1], into), (out.shape[1], outof)]
    else:
        result, cost = _grouped(w, func, groups, inputs, (x.shape[1], out.shape[1]), (rows, columns), transposed)
    if bias is not None:
        w.join(result, w.dims(bias)[0], w.here(func))
        w.write(w.dims(bias)[0])
    w.write(result)
    w.know(out, [None, result, *[None] * (out.dim() - 2)])
    w.cost(2 * places, *cost)


def _grouped(
    w: Watch,
    func: Any,
    groups: int,
    inputs: Labels | None,
    sizes: tuple[int, int],
    weight: tuple[Labels | None, Labels | None],
    transposed: bool,
) -> tuple[Labels | None, list[tuple[int, Labels | None]]]:
    """The output's labels and the cost's dimensions. Of many small groups, groups go whole; of few large ones, the same
    places of every group."""
    a, b = sizes[0] // groups, sizes[1] // groups  # channels of a group: in, out
    rows, columns = weight
    here = w.here(func)
    if inputs is None:
        inputs = w.solid(sizes[0], INPUT)
    if rows is None:  # one channel in all
        rows = w.solid(sizes[0] if transposed else sizes[1], here)
    if groups >= min(a, b):
        whole = w.forest.new(groups)
        if not w.count(nn.modules.conv._ConvNd, "groups", whole):
            w.forest.fix(whole, here)
        w.fix(columns, f"a group of channels is whole in {here}")
        w.forest.join(inputs, [label for label in whole for _ in range(a)])
        spread = [label for label in whole for _ in range(b)]
        w.forest.join(rows, [label for label in whole for _ in range(a)] if transposed else spread)
        return (spread if transposed else rows), [(sizes[1], spread), (a, None)]
    for k in range(groups):  # the same places of every group
        w.forest.join(rows[k * len(rows) // groups :][: len(rows) // groups], rows[: len(rows) // groups])
        if transposed:
            w.contract(inputs[k * a :][:a], rows[k * a :][:a], here)
        else:
            w.contract(inputs[k * a :][:a], columns, here)
    if transposed:
        if columns is None:
            columns = w.solid(b, here)
        return columns * groups, [(sizes[1], columns * groups), (a, rows[:a])]
    return rows, [(sizes[1], rows), (a, columns)]


@rule(
    "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training", "_batch_norm_with_update", "_batch_norm_no_update",
)  # fmt: skip
def batch_norm(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    channels = w.dims(args[0])[1]
    for part in args[1:5]:
        if isinstance(part, Tensor):
            w.join(channels, w.dims(part)[0], f"a tensor of fixed size at {w.here(func)}")
            w.write(w.dims(part)[0])
    w.know(out[0], w.dims(args[0]))


@rule("native_group_norm")
def group_norm(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    """Mixes the channels of a group, so a group goes whole."""
    x, weight, bias, _, _, _, groups = args[:7]
    channels = w.dims(x)[1]
    for part in (weight, bias):
        if part is not None:
            w.join(channels, w.dims(part)[0], f"a tensor of fixed size at {w.here(func)}")
            w.write(w.dims(part)[0])
    if channels is not None and groups < len(channels):
        size = len(channels) // groups
        for k in range(groups):
            w.forest.join_all(channels[k * size :][:size])
    if channels is not None and not w.count(nn.GroupNorm, "num_groups", channels[:: len(channels) // groups]):
        w.fix(channels, w.here(func))
    w.know(out[0], w.dims(x))


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm")
def layer_norm(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    x, shape = args[0], args[1]
    why = f"{w.here(func)} mixes all channels"
    for part in tensors(args[2:]):
        for labels in w.dims(part):
            w.fix(labels, why)
    _mixed(w, x, range(x.dim() - len(shape), x.dim()), why)
    w.know(out[0] if isinstance(out, tuple) else out, w.dims(x))


def _mixed(w: Watch, x: Tensor, dims: Any, why: str) -> None:
    for d in dims:
        w.fix(w.dims(x)[d], why)


@rule("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "logcumsumexp")
def along(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    _mixed(w, args[0], [args[1]], f"{w.here(func)} mixes all channels")
    w.know(out, w.dims(args[0]))


@rule("_weight_norm_interface")
def weight_norm(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    """A masked input adds nothing to the norm of a row; a row that is masked has none to be divided by."""
    v, g, dim = (*args, 0)[:3]
    for labels in (w.dims(v)[dim], w.dims(g)[dim]):
        w.fix(labels, f"{w.here(func)} divides by the norm of a channel's weights")
        w.write(labels)
    w.know(out[0], w.dims(v))


@rule(
    "mean", "sum", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean", "prod", "logsumexp", "argmax",
    "argmin", "any", "all", "linalg_vector_norm", "norm", "median",
)  # fmt: skip
def reduction(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    x = args[0]
    if len(args) > 1 and isinstance(args[1], Tensor):
        return pointwise(w, func, args, kwargs, out)  # max(a, b)
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    which = given.get("dim")
    gone = range(x.dim()) if which is None or which == [] else [which] if isinstance(which, int) else which
    gone = {d % x.dim() for d in gone} if x.dim() else set()
    why = f"{w.here(func)} mixes all channels"
    _mixed(w, x, gone, why)
    keep = given.get("keepdim", False)
    dims = [None if d in gone else labels for d, labels in enumerate(w.dims(x)) if keep or d not in gone]
    for part in tensors(out):
        w.know(part, dims if part.dim() == len(dims) else [None] * part.dim())
    return None


def spatial(k: int, w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    """Pools, upsampling and padding of the last k dimensions."""
    x = args[0]
    _mixed(w, x, range(x.dim() - k, x.dim()), w.here(func))
    for part in tensors(out):
        w.know(part, [*w.dims(x)[: x.dim() - k], *[None] * k])


@rule("grid_sampler_2d", "grid_sampler_3d", "cudnn_grid_sampler")
def grid_sampler(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    unknown(w, func, (args[1],), {}, out)
    spatial(args[0].dim() - 2, w, func, args, kwargs, out)


# Matrix products


@rule("mm", "addmm", "bmm", "baddbmm", "mv", "addmv")
def product(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> None:
    adds = func._schema.name.removeprefix("aten::").startswith(("addm", "badd"))
    x, y = args[adds], args[adds + 1]
    here = w.here(func)
    *batch, m, k = w.dims(x)
    *same, k2, n = w.dims(y) if y.dim() > 1 else [*w.dims(y), None]
    for one, other in zip(batch, same, strict=True):
        w.join(one, other, here)
    w.contract(k, k2, INPUT)
    dims = [*batch, m, n] if y.dim() > 1 else [m]
    w.know(out, dims)
    w.write(m, n)
    if adds:
        _added(w, args[0], out, here)
    shape = (*x.shape[:-2], x.shape[-2], x.shape[-1], y.shape[-1] if y.dim() > 1 else 1)
    w.cost(2, *zip(shape, [*batch, m, k if k is not None else k2, n], strict=True))


def _added(w: Watch, term: Tensor, out: Tensor, here: str) -> None:
    for d in range(1, term.dim() + 1):
        if term.shape[-d] == out.shape[-d]:
            w.join(w.dims(term)[-d], w.dims(out)[-d], f"a tensor of fixed size at {here}")
            w.write(w.dims(term)[-d])


def attention(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    """Fused: heads stay apart; queries and keys are scaled by their size, which is therefore fixed."""
    q, k, v = args[:3]
    here = w.here(func)
    heads = w.dims(q)[1]
    for part in (k, v):
        w.join(heads, w.dims(part)[1], here)
    for part in (q, k):
        w.fix(w.dims(part)[3], f"the scale of {here} is by this size")
    for part in (*args[3:], *kwargs.values()):
        if isinstance(part, Tensor):
            unknown(w, func, (part,), {}, out)
    w.know(out[0] if isinstance(out, tuple) else out, [None, heads, None, w.dims(v)[3]])
    batch, length, keys = q.shape[0], q.shape[2], k.shape[2]
    w.cost(2, (batch * length * keys * q.shape[3], None), (q.shape[1], heads))
    w.cost(2, (batch * length * keys, None), (q.shape[1], heads), (v.shape[3], w.dims(v)[3]))


@rule("embedding")
def embedding(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> None:
    weight, index = args[:2]
    w.fix(w.dims(weight)[0], w.here(func))
    w.know(out, [*[None] * index.dim(), w.dims(weight)[1]])
    w.write(w.dims(weight)[1])


# Moving data about


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "squeeze", "unsqueeze", "unflatten", "flatten", "view_copy")
def view(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> None:
    x = args[0]
    if out.numel() != x.numel() or x.numel() == 0:
        return unknown(w, func, args, kwargs, out)
    why = f"a reshape to {tuple(out.shape)} in {w.place[0] or 'the model'}"
    return w.know(out, w.reshape(w.dims(x), x.shape, out.shape, why))


@rule("t", "transpose", "permute")
def permute(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> None:
    dims = w.dims(args[0])
    if func._schema.name == "aten::permute":
        order = [d % len(dims) for d in args[1]]
    else:
        order = list(range(len(dims)))
        a, b = (args[1] % len(dims), args[2] % len(dims)) if len(args) > 1 else (0, len(dims) - 1)
        order[a], order[b] = order[b], order[a]
    w.know(out, [dims[d] for d in order])


@rule("expand")
def expand(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> None:
    """One value spread over a dimension fits any channels there."""
    x = args[0]
    dims: Dims = [None] * (out.dim() - x.dim()) + list(w.dims(x))
    shape = (1,) * (out.dim() - x.dim()) + tuple(x.shape)
    for d, n in enumerate(out.shape):
        if shape[d] != n:
            dims[d] = w.forest.new(n)
    w.know(out, dims)


@rule("slice")
def slice_(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> None:
    x, dim, start, end, step = (*args, *(None,) * 5)[:5]
    dims = list(w.dims(x))
    d = (dim or 0) % len(dims)
    labels = dims[d]
    dims[d] = labels[slice(start, end, step)] if labels is not None else None
    w.know(out, dims)


@rule("select", "unbind")
def select(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    dims = list(w.dims(args[0]))
    d = (args[1] if len(args) > 1 else 0) % len(dims)
    w.fix(dims.pop(d), f"{w.here(func)} picks channels by number")
    for part in tensors(out):
        w.know(part, dims)


@rule("split", "split_with_sizes", "chunk", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes")
def split(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    dims = list(w.dims(args[0]))
    d = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % len(dims)
    start = 0
    for part in out:
        labels = dims[d]
        n = part.shape[d]
        w.know(part, [*dims[:d], labels[start : start + n] if labels is not None else None, *dims[d + 1 :]])
        start += n


@rule("cat")
def cat(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> None:
    parts = [part for part in args[0] if part.numel() or part.dim() > 1]
    d = (args[1] if len(args) > 1 else 0) % out.dim()
    here = w.here(func)
    dims: Dims = list(w.dims(parts[0]))
    for e in range(out.dim()):
        for part in parts[1:]:
            if e != d and w.join(dims[e], w.dims(part)[e], f"a tensor of fixed size at {here}") is None:
                dims[e] = None
    joined = [w.dims(part)[d] for part in parts]
    if all(labels is None for labels in joined):
        dims[d] = None
    else:
        pieces = zip(joined, parts, strict=True)
        dims[d] = [
            label
            for labels, part in pieces
            for label in (labels if labels is not None else w.solid(part.shape[d], f"a part of fixed size at {here}"))
        ]
    w.know(out, dims)


@rule("stack")
def stack(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> None:
    d = (args[1] if len(args) > 1 else 0) % out.dim()
    dims: Dims = list(w.dims(args[0][0]))
    for e in range(len(dims)):
        for part in args[0][1:]:
            if w.join(dims[e], w.dims(part)[e], w.here(func)) is None:
                dims[e] = None
    w.know(out, [*dims[:d], None, *dims[d:]])


@rule("repeat")
def repeat(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> None:
    x, times = args
    dims: Dims = [None] * (out.dim() - x.dim()) + list(w.dims(x))
    for d, n in enumerate(times):
        labels = dims[d]
        if labels is not None:
            dims[d] = labels * n
        elif out.shape[d] == n:  # one value, repeated
            dims[d] = w.forest.new(n)
    w.know(out, dims)


@rule("flip")
def flip(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> None:
    turned = {d % out.dim() for d in args[1]}
    dims = [labels[::-1] if labels is not None and d in turned else labels for d, labels in enumerate(w.dims(args[0]))]
    w.know(out, dims)


@rule("constant_pad_nd")
def constant_pad(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> None:
    """Channels of a constant. Where a padding module makes them their number can change with their neighbours'."""
    x, pads = args[0], list(args[1])
    dims: Dims = list(w.dims(x))
    here = w.here(func)
    for position in range(0, len(pads), 2):
        front, back = pads[position : position + 2]
        d = x.dim() - 1 - position // 2
        labels = dims[d]
        if labels is None or front < 0 or back < 0:
            w.fix(labels if front or back else None, here)
            dims[d] = None if front or back else labels
            continue
        ends = []
        for place, n in ((position, front), (position + 1, back)):
            added = w.forest.new(n)
            if n and not w.count(nn.modules.padding._ConstantPadNd, "padding", added, place):
                w.forest.fix(added, f"channels padded ({n}) in {here}")
            ends.append(added)
        dims[d] = [*ends[0], *labels, *ends[1]]
    w.know(out, dims)


@rule("pixel_shuffle")
def pixel_shuffle(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> None:
    x, r = args
    *batch, channels, height, width = w.dims(x)
    for labels in (height, width):
        w.fix(labels, w.here(func))
    if channels is not None:
        for start in range(0, len(channels), r * r):
            w.forest.join_all(channels[start : start + r * r])
        channels = channels[:: r * r]
    w.know(out, [*batch, channels, None, None])


@rule("pixel_unshuffle")
def pixel_unshuffle(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> None:
    x, r = args
    *batch, channels, height, width = w.dims(x)
    for labels in (height, width):
        w.fix(labels, w.here(func))
    spread = [label for label in channels for _ in range(r * r)] if channels is not None else None
    w.know(out, [*batch, spread, None, None])


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> None:
    """Deals out the channels of each group in turn, so the same places of every group go."""
    x, groups = args
    dims = list(w.dims(x))
    labels = dims[1]
    if labels is not None:
        size = len(labels) // groups
        for place in range(size):
            w.forest.join_all(labels[place::size])
        dims[1] = [label for place in range(size) for label in labels[place::size]]
    w.know(out, dims)


@rule("glu")
def glu(w: Watch, func: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> None:
    """One half gates the other: two halves of the same channels."""
    x = args[0]
    d = (args[1] if len(args) > 1 else -1) % x.dim()
    dims = list(w.dims(x))
    labels = dims[d]
    if labels is not None:
        half = len(labels) // 2
        w.forest.join(labels[:half], labels[half:])
        dims[d] = labels[:half]
    w.know(out, dims)
