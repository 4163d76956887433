"""A small decoder-only transformer for sequences of tokens (Radford et al. 2019), with norms before the layers."""

from __future__ import annotations

import torch
from torch import nn

from prospr.lab.models.init import truncated_
from prospr.lab.models.transformer import Block, Positions, check_heads


@torch.fx.wrap  # one step to torch.fx, which cannot follow a branch on a size
def _check_tokens(tokens: torch.Tensor, context: int) -> None:
    if tokens.dim() != 2 or tokens.is_floating_point():
        raise ValueError(
            f"the network takes token numbers of shape (sequences, length), and got {tokens.dtype} of shape "
            f"{tuple(tokens.shape)}; it is not for images"
        )
    if tokens.shape[1] > context:
        raise ValueError(
            f"sequences of {tokens.shape[1]} tokens, and the network has positions for {context}; build it with "
            "context= the longest"
        )


class GPT(nn.Module):
    """Tokens, positions, causal blocks, a norm and a Linear layer: for every place, a score for each next token."""

    def __init__(self, vocabulary: int, context: int, width: int, depth: int, heads: int, mlp: int, tied: bool):
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = Positions(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, mlp, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        initial_(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        _check_tokens(tokens, self.context)
        return self.head(self.norm(self.blocks(self.positions(self.tokens(tokens)))))


def initial_(model: nn.Module) -> None:
    """GPT-2's start, in place: normal with deviation 0.02, and what is added to the residual stream, 2 layers a block,
    smaller by the root of their number."""
    truncated_(model)
    blocks = list(model.get_submodule("blocks").children())
    with torch.no_grad():
        for block in blocks:
            for name in ("attention.proj.weight", "mlp.2.weight"):
                block.get_parameter(name).mul_((2 * len(blocks)) ** -0.5)


def gpt(
    vocabulary: int = 256,
    context: int = 128,
    width: int = 128,
    depth: int = 4,
    heads: int = 4,
    mlp: int = 4,
    tied: bool = True,
) -> GPT:
    """A pre-norm decoder with learned positions: tokens (n, length) to scores (n, length, vocabulary).

    `context` is the longest sequence; `width` must be a multiple of `heads`; the MLPs are `mlp` times `width` wide
    inside; `tied`: the token embedding is also the last layer. 842,496 parameters by default, 819,200 of them prunable:
    a tied embedding is, being a Linear layer's weight, and one that is not tied is not.

    >>> gpt(vocabulary=50, width=12)(torch.zeros(2, 7, dtype=torch.long)).shape
    torch.Size([2, 7, 50])
    """
    check_heads(width, heads)
    return GPT(vocabulary, context, width, depth, heads, mlp, tied)
