"""Awkward networks: one list that every test of a derivative, a method or a mask runs over.

Each case is small enough for float64 and an unrolled graph of five steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def _images(generator: torch.Generator, size: int = 6) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(5, 2, size, size, generator=generator, dtype=torch.float64),
        torch.randint(0, 3, (5,), generator=generator),
    )


def _vectors(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(6, 4, generator=generator, dtype=torch.float64), torch.randint(0, 3, (6,), generator=generator)


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(0, 7, (4, 5), generator=generator)


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Any] = _images
    loss: Callable[[nn.Module, Any], Tensor] | None = None  # None: the default, cross-entropy

    def model(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.build().double()

    def batches(self, count: int, seed: int = 1) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        return [self.batch(generator) for _ in range(count)]

    @property
    def settings(self) -> dict[str, Any]:
        return {} if self.loss is None else {"loss": self.loss}


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.conv1, self.norm1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    """nn.MultiheadAttention, and scaled_dot_product_attention called directly."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 8) * 0.1)
        self.norm = nn.LayerNorm(8)
        self.mixer = nn.MultiheadAttention(8, 2, batch_first=True)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.embed(x.flatten(1, 2))
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        y = self.norm(x)
        x = x + self.mixer(y, y, y, need_weights=False)[0]
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        return self.head(F.gelu(x[:, 0]))


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.rnn = kind(6, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.rnn(x.flatten(1, 2))[0][:, -1])


class Tied(nn.Module):
    """A language model whose embedding is also its output layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.embed(tokens))))


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class UNet(nn.Module):
    """Down, up by a transposed convolution, concatenation."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(2, 4, 3, padding=1)
        self.deep = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x):
        a = F.relu(self.down(x))
        b = F.relu(self.norm(self.up(F.relu(self.deep(a)))))
        return self.out(torch.cat([a, b], 1)).mean((2, 3))


class Partly(nn.Module):
    """Frozen parameters, unused ones, and one norm layer in eval mode."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Conv2d(2, 3, 3, padding=1)
        self.frozen.requires_grad_(False)
        self.fixed_norm = nn.BatchNorm2d(3)
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(4, 3)
        with torch.no_grad():
            self.fixed_norm.running_mean.normal_()
            self.fixed_norm.running_var.uniform_(0.5, 2)
        self.fixed_norm.eval()

    def forward(self, x):
        x = self.norm(self.conv(F.relu(self.fixed_norm(self.frozen(x)))))
        return self.head(F.silu(x).mean((2, 3)))


class Checkpointed(nn.Module):
    """Runs its body again during the backward pass; with `checkpointing` off the same network is an ordinary one."""

    checkpointing = True

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3),
            nn.Tanh(),
            nn.Flatten(),
            nn.Dropout(0.3),
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False) if self.checkpointing else self.body(x))


class Viewing(nn.Module):
    """Calls .view on activations, which channels-last tensors refuse."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.head = nn.Linear(48, 3)

    def forward(self, x):
        return self.head(F.relu(self.conv(x)).view(len(x), -1))


class Twice(nn.Module):
    """One layer used twice, and one power too many for a constant Hessian."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.head = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.again(torch.tanh(self.again(torch.tanh(self.first(x)))))))


def _weight_norm() -> nn.Module:
    norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(nn.Conv2d(2, 4, 3)), nn.Tanh(), nn.Flatten(), norm(nn.Linear(64, 3)))


def _plus_penalty(model: nn.Module, batch: Any) -> Tensor:
    """A loss that reads the parameters themselves."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets) + 0.1 * sum(p.square().sum() for p in model.parameters())


class Reading(nn.Module):
    """Reads the running statistics of its norm, before and after they are brought up to date."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x):
        x = self.conv(x) - self.norm.running_mean[:, None, None]
        x = torch.tanh(self.norm(x)) * self.norm.running_var[:, None, None].sqrt()
        return self.head(x.mean((2, 3)) + self.norm.running_mean)


def _plus_slopes(model: nn.Module, batch: Any) -> Tensor:
    """A loss with gradients inside: by the inputs and by the parameters."""
    inputs, targets = batch[0].detach().requires_grad_(), batch[1]
    loss = F.cross_entropy(model(inputs), targets)
    slopes = torch.autograd.grad(loss, [inputs, *model.parameters()], create_graph=True)
    return loss + 0.02 * sum(slope.square().sum() for slope in slopes)


def _smooth(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), norm, nn.Tanh(), nn.Flatten(), nn.Linear(144, 3))


CASES = [
    Case("mlp", lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), _vectors),
    Case(
        "conv-batchnorm-maxpool",
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
        ),
    ),
    Case("residual", Residual),
    Case(
        "group-and-layer-norm",
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 3)
        ),
    ),
    Case(
        "depthwise",
        lambda: nn.Sequential(
            nn.Conv2d(2, 6, 1),
            nn.Conv2d(6, 6, 3, stride=2, padding=1, groups=6, bias=False),
            nn.BatchNorm2d(6, affine=False),
            nn.Hardswish(),
            nn.Conv2d(6, 4, 3, padding="same", dilation=2, groups=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 3),
        ),
    ),
    Case("attention", Attention, lambda g: _images(g, 6)),
    Case("lstm", Recurrent),
    Case("gru", lambda: Recurrent(nn.GRU)),
    Case("tied", Tied, _tokens, next_token),
    Case(
        "dropout",
        lambda: nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 3)),
        _vectors,
    ),
    Case("unet", UNet),
    Case("frozen-unused-mixed-modes", Partly),
    Case("checkpointed", Checkpointed),
    Case("view", Viewing),
    Case("shared-layer", Twice, _vectors, _plus_penalty),
    Case("weight-norm", _weight_norm),
    Case("reads-statistics", Reading),
    Case("slopes-of-batch-norm", lambda: _smooth(nn.BatchNorm2d(4)), loss=_plus_slopes),
    Case("slopes-without-scales", lambda: _smooth(nn.BatchNorm2d(4, affine=False)), loss=_plus_slopes),
    Case("slopes-of-instance-norm", lambda: _smooth(nn.InstanceNorm2d(4, affine=True)), loss=_plus_slopes),
    Case("slopes-of-layer-norm", lambda: _smooth(nn.LayerNorm([6, 6])), loss=_plus_slopes),
    Case(
        "one-and-three-dimensions",
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 2)),
            nn.Conv3d(1, 2, (1, 3, 3)),
            nn.BatchNorm3d(2),
            nn.Flatten(2),
            nn.Conv1d(2, 3, 5, stride=3),
            nn.BatchNorm1d(3),
            nn.Tanh(),
            nn.ConvTranspose1d(3, 2, 3, stride=2, output_padding=1),
            nn.InstanceNorm1d(2, affine=True),
            nn.Flatten(),
            nn.LazyLinear(3),
        ),
    ),
]


def _materialised(case: Case) -> Case:
    if case.name != "one-and-three-dimensions":
        return case

    def build() -> nn.Module:
        model = case.build().double()
        model(case.batch(torch.Generator().manual_seed(0))[0])
        return model

    return Case(case.name, build, case.batch, case.loss)


CASES = [_materialised(case) for case in CASES]
BY_NAME = {case.name: case for case in CASES}
