"""A small vision transformer (Dosovitskiy et al. 2021) with norms before the layers, for 32x32 images.

Heads can be taken away by making q, k, v and proj narrower: only these layers know how many there are.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from prospr.lab.models.init import truncated_


@torch.fx.wrap  # one step to torch.fx, which cannot follow a branch on a size
def _check_tokens(found: int, known: int) -> None:
    if found != known:
        raise ValueError(
            f"the images have {found} patches, and the network has positions for {known}; build it with image= the "
            "side of the images"
        )


class Positions(nn.Module):
    """Adds what is learned for each place."""

    def __init__(self, tokens: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, tokens, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _check_tokens(x.shape[1], self.weight.shape[1])
        return x + self.weight


class Attention(nn.Module):
    """Heads of `head_dim` each; how many there are follows from the layers."""

    def __init__(self, width: int, heads: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(width, heads * head_dim)
        self.k = nn.Linear(width, heads * head_dim)
        self.v = nn.Linear(width, heads * head_dim)
        self.proj = nn.Linear(heads * head_dim, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and two Linear layers, each behind a norm and beside its input."""

    def __init__(self, width: int, heads: int, mlp: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, width // heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, mlp * width), nn.GELU(), nn.Linear(mlp * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Patches, positions, blocks, a norm, the mean over the patches and a Linear layer."""

    def __init__(
        self, num_classes: int, image: int, patch: int, width: int, depth: int, heads: int, mlp: int, in_channels: int
    ):
        super().__init__()
        self.patches = nn.Conv2d(in_channels, width, patch, stride=patch)
        self.positions = Positions((image // patch) ** 2, width)
        self.blocks = nn.Sequential(*(Block(width, heads, mlp) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, num_classes)
        truncated_(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.positions(self.patches(images).flatten(2).transpose(1, 2))
        return self.fc(self.norm(self.blocks(x)).mean(1))


def vit(
    num_classes: int = 10,
    image: int = 32,
    patch: int = 4,
    width: int = 192,
    depth: int = 6,
    heads: int = 3,
    mlp: int = 4,
    in_channels: int = 3,
) -> ViT:
    """A pre-norm vision transformer with learned positions and mean pooling in place of a class token.

    `image` and `patch` are sides in pixels; `width` must be a multiple of `heads`; the MLPs are `mlp` times `width`
    wide inside. 2,693,194 parameters, 2,665,344 of them prunable.

    >>> vit(width=12, depth=2)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    if image % patch:
        raise ValueError(f"image={image} is not a multiple of patch={patch}; resize the images or change patch")
    if width % heads:
        raise ValueError(f"width={width} is not a multiple of heads={heads}; take {width - width % heads + heads}")
    return ViT(num_classes, image, patch, width, depth, heads, mlp, in_channels)
