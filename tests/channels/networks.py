"""Networks whose channels are awkward to take out, and what must be kept whole of each."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from prospr.lab import models


@dataclass(frozen=True)
class Network:
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]  # a call's arguments: a tuple, or a dict of keyword arguments
    kept: dict[str, str] = field(default_factory=dict)  # {parameter kept whole: what the reason says}
    free: tuple[str, ...] = ()  # sets that must be found, by name
    random: bool = False  # draws random numbers in train mode, of the size of its channels

    def model(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = self.build()
            with torch.no_grad():  # nothing is zero or one by chance
                for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                    if name.endswith(("norm.bias", "running_mean")):
                        tensor.normal_(0, 0.1)
                    elif name.endswith("running_var"):
                        tensor.uniform_(0.5, 1.5)
        return model.to(dtype)

    def call(self, dtype: torch.dtype = torch.float64, seed: int = 1) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            given = self.inputs()
        given = given if isinstance(given, (tuple, dict)) else (given,)
        cast = lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t  # noqa: E731
        if isinstance(given, dict):
            return (), {key: cast(value) for key, value in given.items()}
        return tuple(map(cast, given)), {}

    def example(self, dtype: torch.dtype = torch.float64) -> Any:
        args, kwargs = self.call(dtype)
        return kwargs or args


def images(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


class Forward(nn.Module):
    """Named layers and a function of them and the inputs."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module):
        super().__init__()
        self._function = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args, **kwargs):
        return self._function(self, *args, **kwargs)


def pooled(x: Tensor) -> Tensor:
    return x.flatten(2).mean(2)


# Groups of channels in convolutions


def few_large_groups() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 1), nn.ReLU(), nn.Conv2d(16, 24, 3, groups=2), nn.ReLU(), nn.Conv2d(24, 4, 1), nn.Flatten()
    )


def many_small_groups() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 1), nn.ReLU(), nn.Conv2d(16, 24, 3, groups=8), nn.ReLU(), nn.Conv2d(24, 4, 1), nn.Flatten()
    )


def depthwise_multiplier() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 1),
        nn.Conv2d(6, 18, 3, groups=6),
        nn.BatchNorm2d(18),
        nn.ReLU(),
        nn.Conv2d(18, 4, 1),
        nn.Flatten(),
    )


def transposed_groups(groups: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 12, 3, stride=2, groups=groups),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 4, 1),
        nn.Flatten(),
    )


def concatenated_then_grouped(groups: int) -> nn.Module:
    return Forward(
        lambda m, x: m.out(F.relu(m.both(torch.cat([F.relu(m.a(x)), F.relu(m.b(x))], 1)))).flatten(1),
        a=nn.Conv2d(3, 6, 3, padding=1),
        b=nn.Conv2d(3, 6, 1),
        both=nn.Conv2d(12, 12, 3, groups=groups),
        out=nn.Conv2d(12, 4, 1),
    )


class Shuffled(nn.Module):
    """ShuffleNet's unit: grouped 1x1, channels shuffled between the groups, depthwise, grouped 1x1, added."""

    def __init__(self, groups: int = 2):
        super().__init__()
        self.groups = groups
        self.stem = nn.Conv2d(3, 8, 1)
        self.first = nn.Conv2d(8, 12, 1, groups=groups)
        self.depth = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.last = nn.Conv2d(12, 8, 1, groups=groups)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = F.relu(self.stem(x))
        y = F.relu(self.first(x))
        y = y.unflatten(1, (self.groups, -1)).transpose(1, 2).flatten(1, 2)
        return self.head(pooled(F.relu(x + self.last(self.depth(y)))))


def shuffled_by_module() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 1), nn.Hardswish(), nn.ChannelShuffle(3), nn.Conv2d(12, 8, 3, groups=2), nn.LogSigmoid(),
        nn.Conv2d(8, 4, 1), nn.Flatten(),
    )  # fmt: skip


# Sharing


class Shared(nn.Module):
    """One block used twice, one norm for each use."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.block = nn.Conv2d(6, 6, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(6), nn.BatchNorm2d(6)])
        self.inner = nn.Sequential(nn.Conv2d(6, 10, 1), nn.ReLU(), nn.Conv2d(10, 6, 1))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.stem(x)
        for norm in self.norms:
            x = self.inner(F.relu(norm(self.block(x))))
        return self.head(pooled(x))


class TiedEncoder(nn.Module):
    """An autoencoder whose decoder is the encoder's weight turned round, and two layers that share one weight."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(8, 6, bias=False)
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight

    def forward(self, x):
        h = torch.tanh(self.encode(x))
        h = torch.tanh(self.two(torch.tanh(self.one(h))))
        return F.linear(h, self.encode.weight.t())


# Norms and activations


def instance_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        nn.PReLU(8),
        nn.Conv2d(8, 6, 3),
        nn.InstanceNorm2d(6),
        nn.PReLU(),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


def group_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3), nn.GroupNorm(4, 12), nn.SiLU(), nn.Conv2d(12, 6, 3), nn.GroupNorm(6, 6), nn.Flatten(),
        nn.Linear(24, 3),
    )  # fmt: skip


def one_group_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(1, 8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())


def layer_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


# Moving channels about


def pixels() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.PixelShuffle(2),
        nn.Conv2d(4, 6, 3, padding=1),
        nn.ReLU(),
        nn.PixelUnshuffle(2),
        nn.Conv2d(24, 5, 1),
        nn.Flatten(),
    )


def gated() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 12, 3), nn.GLU(1), nn.Conv1d(6, 8, 1), nn.GLU(1), nn.Flatten(), nn.Linear(16, 3))


class Excited(nn.Module):
    """Squeeze and excitation."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))
        return self.head(pooled(x * gate))


class Dense(nn.Module):
    """DenseNet: every layer reads all before it."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(6 + 4 * i) for i in range(3)])
        self.layers = nn.ModuleList([nn.Conv2d(6 + 4 * i, 4, 3, padding=1, bias=False) for i in range(3)])
        self.last = nn.BatchNorm2d(18)
        self.head = nn.Linear(18, 3)

    def forward(self, x):
        x = self.stem(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = torch.cat([x, layer(F.relu(norm(x)))], 1)
        return self.head(pooled(F.relu(self.last(x))))


class FusedAttention(nn.Module):
    """q, k and v of one Linear layer; only the size of a head is written."""

    def __init__(self, width: int = 12, head_dim: int = 3):
        super().__init__()
        self.head_dim = head_dim
        self.embed = nn.Linear(5, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.embed(x)
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, -1, self.head_dim).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, -1)
        return self.head((x + self.proj(y)).mean(1))


class PlainAttention(nn.Module):
    """Matrix products and a softmax, scaled by a constant: heads, and the sizes of keys and of values, can go."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(5, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        weights = torch.softmax(self.q(x) @ self.k(x).transpose(1, 2) * 0.4, -1)
        return self.out((weights @ self.v(x)).mean(1))


class Multihead(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.mixer = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.embed(x)
        x = x + self.mixer(x, x, x, need_weights=False)[0]
        return self.head((x + self.mlp(x)).mean(1))


def encoder_layer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    return Forward(lambda m, x: m.head(m.layer(m.embed(x)).mean(1)), embed=nn.Linear(5, 8), layer=layer,
                   head=nn.Linear(8, 3))  # fmt: skip


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]):
        super().__init__()
        self.embed = nn.Linear(5, 6)
        self.rnn = kind(6, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 3))

    def forward(self, x):
        return self.mlp(self.rnn(torch.relu(self.embed(x)))[0][:, -1])


def weight_normed() -> nn.Module:
    return nn.Sequential(
        weight_norm(nn.Conv2d(3, 8, 3)), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)
    )


def spectral_normed() -> nn.Module:
    """Its second convolution finds its largest singular value a little better in every forward pass of training."""
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), spectral_norm(nn.Conv2d(8, 6, 1)), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(96, 3))


# Sizes that are written in forward


def literal_view() -> nn.Module:
    return Forward(
        lambda m, x: m.head(F.relu(m.two(F.relu(m.one(x)))).view(-1, 6, 4).mean(2)),
        one=nn.Conv2d(3, 8, 3), two=nn.Conv2d(8, 6, 3), head=nn.Linear(6, 3),
    )  # fmt: skip


def literal_slice() -> nn.Module:
    return Forward(
        lambda m, x: m.head(pooled(m.two(m.one(x)[:, :4]))), one=nn.Conv2d(3, 8, 3), two=nn.Conv2d(4, 6, 1),
        head=nn.Linear(6, 3),
    )  # fmt: skip


def literal_pad() -> nn.Module:
    return Forward(
        lambda m, x: m.head(pooled(m.two(x) + F.pad(m.one(x), (0, 0, 0, 0, 1, 1)))), one=nn.Conv2d(3, 6, 3),
        two=nn.Conv2d(3, 8, 3), head=nn.Linear(8, 3),
    )  # fmt: skip


def literal_chunks() -> nn.Module:
    """split(4) is a literal; chunk(2) is not."""
    return Forward(
        lambda m, x: m.head(pooled(sum(m.one(x).split(4, 1)) * torch.mul(*m.two(x).chunk(2, 1)))),
        one=nn.Conv2d(3, 8, 3), two=nn.Conv2d(3, 8, 3), head=nn.Linear(4, 3),
    )  # fmt: skip


def literal_unflatten() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 12), nn.ReLU(), nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 6, 2), nn.Flatten(), nn.Linear(6, 3)
    )


def open_unflatten() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 12), nn.ReLU(), nn.Unflatten(1, (-1, 2, 2)), nn.Conv2d(3, 6, 2), nn.Flatten(), nn.Linear(6, 3)
    )


class Padded(nn.Module):
    """Channels of zeros from a module, whose number can follow."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 8, 3, padding=1)
        self.pad = nn.ConstantPad3d((0, 0, 0, 0, 2, 2), 0.0)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = F.relu(self.one(x))
        return self.head(pooled(F.relu(self.two(x) + self.pad(x))))


# Inputs, outputs, dimensions


def two_inputs() -> nn.Module:
    return Forward(
        lambda m, x, y: m.head(torch.cat([F.relu(m.image(x)).mean((2, 3)), F.relu(m.vector(y))], 1)),
        image=nn.Conv2d(3, 6, 3), vector=nn.Linear(5, 4), head=nn.Linear(10, 3),
    )  # fmt: skip


def keywords() -> nn.Module:
    return Forward(
        lambda m, x, scale: {"classes": m.head(h := F.relu(m.body(x)) * scale), "boxes": (m.box(h),)},
        body=nn.Linear(5, 8), head=nn.Linear(8, 3), box=nn.Linear(8, 4),
    )  # fmt: skip


def dropouts() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Dropout2d(0.3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 6), nn.Dropout(0.5),
        nn.ReLU(), nn.Linear(6, 3),
    )  # fmt: skip


def upward() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.ConvTranspose2d(6, 8, 2, stride=2), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Upsample(scale_factor=2), nn.ReflectionPad2d(1), nn.ConvTranspose2d(8, 2, 3, output_padding=0),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(),
    )  # fmt: skip


def one_and_three() -> nn.Module:
    return Forward(
        lambda m, x: m.line(F.relu(m.norm(m.cube(x))).flatten(2)).amax(2),
        cube=nn.Conv3d(2, 6, 2), norm=nn.BatchNorm3d(6), line=nn.Conv1d(6, 4, 3),
    )  # fmt: skip


def one_channel() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 1, 3), nn.BatchNorm2d(1), nn.ReLU(), nn.Conv2d(1, 6, 1), nn.ReLU(), nn.Conv2d(6, 1, 1),
        nn.Flatten(), nn.Linear(16, 1),
    )  # fmt: skip


class Loose(nn.Module):
    """A parameter and a buffer of its own beside the layers: a scale for each channel, one for each pixel."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.scale = nn.Parameter(torch.rand(8, 1, 1) + 0.5)
        self.register_buffer("shift", torch.randn(1, 8, 1, 1))
        self.place = nn.Parameter(torch.randn(6, 6))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(pooled(F.relu(self.conv(x) * self.scale + self.shift + self.place)))


_POINTS = images(4, 5)
_TOKENS = images(2, 4, 5)
_SMALL = images(3, 3, 6, 6)

NETWORKS = [
    Network("vgg19", lambda: models.vgg19(width=3), images(3, 3, 32, 32), free=("features.0.weight",)),
    Network("resnet18", lambda: models.resnet18(width=4), images(2, 3, 16, 16), free=("conv1.weight",)),
    Network("resnet20-a", lambda: models.resnet20(width=4), images(2, 3, 16, 16), free=("conv1.weight",)),
    Network("resnet20-b", lambda: models.resnet20(width=4, shortcut="B"), images(2, 3, 16, 16), free=("conv1.weight",)),
    Network("resnet50", lambda: models.resnet50(num_classes=5, width=3), images(2, 3, 64, 64), free=("conv1.weight",)),
    Network("unet", lambda: models.unet(width=3, depth=2), images(2, 1, 8, 8), free=("down.0.0.weight",)),
    Network("mobilenet", lambda: models.mobilenet(width=4), images(2, 3, 16, 16), free=("stem.0.weight",)),
    Network(
        "vit",
        lambda: models.vit(width=12, depth=2, image=8),
        images(2, 3, 8, 8),
        kept={
            "patches.weight": "blocks.0.norm1.*mixes all channels",
            "positions.weight": "fixed size",
            **{
                f"blocks.{i}.{name}.weight": "mixes all channels"
                for i in (0, 1)
                for name in ("attention.proj", "mlp.2")
            },
        },
        free=("blocks.0.attention.q.weight", "blocks.1.mlp.0.weight"),
    ),
    Network(
        "gpt",
        lambda: models.gpt(vocabulary=11, context=7, width=12, depth=2, heads=3),
        lambda: torch.randint(0, 11, (3, 6)),
        kept={
            "tokens.weight": "embedding in tokens",
            "positions.weight": "fixed size",
            **{
                f"blocks.{i}.{name}.weight": "mixes all channels"
                for i in (0, 1)
                for name in ("attention.proj", "mlp.2")
            },
        },
        free=("blocks.0.attention.q.weight", "blocks.1.mlp.0.weight"),
    ),
    Network("few-large-groups", few_large_groups, _SMALL, free=("0.weight", "2.weight")),
    Network("many-small-groups", many_small_groups, _SMALL, free=("0.weight",)),
    Network("depthwise-multiplier", depthwise_multiplier, _SMALL, free=("0.weight",)),
    Network("transposed-few-groups", lambda: transposed_groups(2), _SMALL, free=("0.weight",)),
    Network("transposed-many-groups", lambda: transposed_groups(4), _SMALL, free=("0.weight",)),
    Network("concatenated-few-groups", lambda: concatenated_then_grouped(2), _SMALL, free=("a.weight",)),
    Network("concatenated-many-groups", lambda: concatenated_then_grouped(4), _SMALL, free=("a.weight",)),
    Network("shuffle", Shuffled, _SMALL, free=("stem.weight", "first.weight")),
    Network("channel-shuffle", shuffled_by_module, _SMALL, free=("0.weight", "3.weight")),
    Network("shared-block", Shared, _SMALL, free=("stem.weight", "inner.0.weight")),
    Network("tied", TiedEncoder, images(4, 8), free=("encode.weight",)),
    Network("instance-norm", instance_norm, _SMALL, free=("0.weight", "3.weight")),
    Network("group-norm", group_norm, _SMALL, free=("0.weight", "3.weight")),
    Network("one-group-norm", one_group_norm, _SMALL, kept={"0.weight": "tied to one another"}),
    Network("layer-norm", layer_norm, _POINTS, kept={"0.weight": "LayerNorm"}, free=("3.weight",)),
    Network("pixel-shuffle", pixels, _SMALL, free=("0.weight", "2.weight")),
    Network("glu", gated, images(3, 3, 6), free=("0.weight", "2.weight")),
    Network("squeeze-excitation", Excited, _SMALL, free=("conv.weight", "squeeze.weight")),
    Network("dense", Dense, _SMALL, free=("stem.weight", "layers.0.weight", "layers.2.weight")),
    Network("fused-qkv", FusedAttention, _TOKENS, free=("embed.weight", "qkv.weight")),
    Network("plain-attention", PlainAttention, _TOKENS, free=("q.weight", "v.weight")),
    Network(
        "multihead",
        Multihead,
        _TOKENS,
        kept={
            "embed.weight": "embed_dim 8",
            "mixer.in_proj_weight": "a reshape to .* in mixer",
            "mixer.out_proj.weight": "embed_dim 8",
            "mlp.2.weight": "embed_dim 8",
        },
        free=("mlp.0.weight",),
    ),
    Network(
        "encoder-layer",
        encoder_layer,
        _TOKENS,
        kept={
            "embed.weight": "layer.norm1",
            "layer.self_attn.in_proj_weight": "a reshape to .* in layer.self_attn",
            "layer.self_attn.out_proj.weight": "layer.norm1",
            "layer.linear2.weight": "layer.norm1",
        },
        free=("layer.linear1.weight",),
    ),
    Network(
        "lstm",
        lambda: Recurrent(nn.LSTM),
        _TOKENS,
        kept={"embed.weight": "input_size. Expected 6", "rnn.weight_ih_l0": "in rnn", "rnn.weight_hh_l0": "in rnn"},
        free=("mlp.0.weight",),
    ),
    Network(
        "gru",
        lambda: Recurrent(nn.GRU),
        _TOKENS,
        kept={"embed.weight": "input_size. Expected 6", "rnn.weight_ih_l0": "in rnn", "rnn.weight_hh_l0": "in rnn"},
        free=("mlp.0.weight",),
    ),
    Network(
        "weight-norm",
        weight_normed,
        _SMALL,
        kept={f"0.parametrizations.weight.original{i}": "divides by the norm" for i in (0, 1)},
        free=("2.weight",),
    ),
    Network(
        "spectral-norm",
        spectral_normed,
        _SMALL,
        kept={"2.parametrizations.weight.original": "vdot"},
        free=("0.weight",),
    ),
    Network(
        "literal-view",
        literal_view,
        _SMALL,
        kept={"two.weight": r"does not run without some of them: shape .\[-1, 6, 4\]"},
        free=("one.weight",),
    ),
    Network(
        "literal-slice",
        literal_slice,
        _SMALL,
        kept={"one.weight": "4 of 8 channels: .*expected input"},
        free=("two.weight", "one.weight (2)"),
    ),
    Network(
        "literal-pad",
        literal_pad,
        _SMALL,
        kept={"two.weight": r"2 of 8 channels: channels padded \(1\) in"},
        free=("one.weight",),
    ),
    Network(
        "literal-chunks", literal_chunks, _SMALL, kept={"one.weight": "does not run", "two.weight": "does not run"}
    ),
    Network(
        "literal-unflatten",
        literal_unflatten,
        _POINTS,
        kept={"0.weight": r"a reshape to \(1, 3, 2, 2\) in 2"},
        free=("3.weight",),
    ),
    Network("open-unflatten", open_unflatten, _POINTS, free=("0.weight", "3.weight")),
    Network("constant-pad", Padded, _SMALL, free=("one.weight",)),
    Network(
        "two-inputs",
        two_inputs,
        lambda: (torch.randn(3, 3, 6, 6), torch.randn(3, 5)),
        free=("image.weight", "vector.weight"),
    ),
    Network(
        "dict-output", keywords, lambda: {"x": torch.randn(3, 5), "scale": torch.rand(3, 1)}, free=("body.weight",)
    ),
    Network("dropout", dropouts, _SMALL, free=("0.weight", "4.weight"), random=True),
    Network("upward", upward, _SMALL, free=("0.weight", "2.weight")),
    Network("one-and-three-dimensions", one_and_three, images(3, 2, 4, 4, 4), free=("cube.weight",)),
    Network("one-channel", one_channel, images(3, 1, 6, 6), free=("3.weight",)),
    Network("loose-parameters", Loose, _SMALL, kept={"place": "fixed size"}, free=("scale",)),
]
BY_NAME = {network.name: network for network in NETWORKS}


def from_case(case: Any) -> Network:
    """A network of tests/cases.py."""

    def inputs() -> Any:
        batch = case.batches(1)[0]
        return batch[:, :-1] if isinstance(batch, Tensor) else batch[0]

    return Network(case.name, case.build, inputs, random=case.name in ("dropout", "checkpointed"))
