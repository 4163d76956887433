"""Blocks that the transformers here are made of.

Heads can be taken away by making q, k, v and proj narrower: only these layers know how many there are.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Positions(nn.Module):
    """Adds what is learned for each place; of fewer tokens than there are places, the first ones."""

    def __init__(self, tokens: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, tokens, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight[:, : x.shape[1]]


class Attention(nn.Module):
    """Heads of `head_dim` each; how many there are follows from the layers. If `causal`, no token sees a later one."""

    def __init__(self, width: int, heads: int, head_dim: int, causal: bool = False):
        super().__init__()
        self.head_dim = head_dim
        self.causal = causal
        self.q = nn.Linear(width, heads * head_dim)
        self.k = nn.Linear(width, heads * head_dim)
        self.v = nn.Linear(width, heads * head_dim)
        self.proj = nn.Linear(heads * head_dim, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and two Linear layers, each behind a norm and beside its input."""

    def __init__(self, width: int, heads: int, mlp: int, causal: bool = False):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, width // heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, mlp * width), nn.GELU(), nn.Linear(mlp * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def check_heads(width: int, heads: int) -> None:
    if width % heads:
        raise ValueError(f"width={width} is not a multiple of heads={heads}; take {width - width % heads + heads}")
