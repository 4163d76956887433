"""A small vision transformer (Dosovitskiy et al. 2021) with norms before the layers, for 32x32 images."""

from __future__ import annotations

import torch
from torch import nn

from prospr.lab.models.init import truncated_
from prospr.lab.models.transformer import Block, Positions, check_heads


@torch.fx.wrap  # one step to torch.fx, which cannot follow a branch on a size
def _check_tokens(found: int, known: int) -> None:
    if found != known:
        raise ValueError(
            f"the images have {found} patches, and the network has positions for {known}; build it with image= the "
            "side of the images"
        )


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
        patches = self.patches(images).flatten(2).transpose(1, 2)
        _check_tokens(patches.shape[1], self.positions.weight.shape[1])
        return self.fc(self.norm(self.blocks(self.positions(patches))).mean(1))


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
    check_heads(width, heads)
    return ViT(num_classes, image, patch, width, depth, heads, mlp, in_channels)
