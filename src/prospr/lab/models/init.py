"""The initial weights every network here starts from."""

from __future__ import annotations

from torch import nn


def kaiming_(model: nn.Module) -> None:
    """Convolutions Kaiming normal (fan out, ReLU) with zero biases, in place; other layers as PyTorch makes them."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
