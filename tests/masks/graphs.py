"""Small networks for the tests of reach, and what is left of them."""

import torch
from torch import nn

import prospr


class Net(nn.Module):
    """A network from its layers and a function."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.function = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args):
        return self.function(self, *args)


def cut(model, **gone):
    """Masks that keep everything but the entries named: layer__attribute=index."""
    masks = {name: torch.ones_like(p, dtype=torch.bool) for name, p in prospr.prunable(model).items()}
    for name, index in gone.items():
        masks[name.replace("__", ".")][index] = False
    return prospr.Masks(masks)


def look(model, masks, *example):
    """(effective weights by layer, connected)."""
    found = prospr.inspect(model, masks, example)
    return {layer.name.removesuffix(".weight"): layer.effective for layer in found.layers}, found.connected


ALL = (slice(None),)
