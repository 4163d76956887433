"""The initial weights every network here starts from."""

from __future__ import annotations

from torch import nn


def kaiming_(model: nn.Module) -> None:
    """Convolutions Kaiming normal (fan out, ReLU) with zero biases, in place; other layers as PyTorch makes them."""
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
            # A transposed convolution's weight is (inputs, outputs, ...): what PyTorch calls its fan in is its fan out.
            mode = "fan_in" if isinstance(module, nn.ConvTranspose2d) else "fan_out"
            nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def truncated_(model: nn.Module, deviation: float = 0.02) -> None:
    """Matrices and positions truncated normal, biases zero, LayerNorms as PyTorch makes them, in place: the usual start
    of a vision transformer."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1:
                nn.init.trunc_normal_(parameter, std=deviation)
            else:
                nn.init.zeros_(parameter)
