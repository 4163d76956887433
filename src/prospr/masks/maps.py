"""scope="mapped": balanced, with less for the convolutions that make small feature maps."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from prospr.counting import flops_by_module
from prospr.masks.select import shares_of_layers
from prospr.meta.batches import tensors
from prospr.meta.loss import Call, one_sample

__all__ = ["ENOUGH", "has_maps", "map_factors", "mapped_shares"]

ENOUGH = 64  # places of an image that a weight is used at, 8 x 8; with more, its layer's share is whole


def has_maps(weights: Mapping[str, Tensor]) -> bool:
    """Whether some of them are a convolution's."""
    return any(weight.dim() > 2 for weight in weights.values())


def map_factors(model: nn.Module, call: Call, names: Sequence[str]) -> dict[str, float]:
    """What a layer's share counts for: used / 64 where each weight of a convolution is used at fewer than 64 places.

    Those are the pixels it makes (or reads, where it is transposed), counted by running the model on one sample. One
    that makes a single pixel and pads nothing is a linear layer by another name, and has its whole share as they have.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3, padding=1), torch.nn.Conv2d(2, 2, 3, stride=4, padding=1))
    >>> map_factors(model, ((torch.zeros(1, 1, 16, 16),), {}), ["0.weight", "1.weight"])
    {'0.weight': 1.0, '1.weight': 0.25}
    """
    counts, samples = _operations(model, call)
    factors = {}
    for name in names:
        weight = model.get_parameter(name)
        operations = counts.get(name.rpartition(".")[0], 0)
        used = operations / (2 * weight.numel() * samples)
        small = weight.dim() > 2 and 0 < used < ENOUGH and not (used <= 1 and _unpadded(model, name))
        factors[name] = used / ENOUGH if small else 1.0
    return factors


def mapped_shares(scores: Mapping[str, Tensor], factors: Mapping[str, float]) -> dict[str, Tensor]:
    """Each layer's scores as shares of their total size, times the layer's factor."""
    return {name: share * factors[name] for name, share in shares_of_layers(scores).items()}


def _unpadded(model: nn.Module, name: str) -> bool:
    padding = getattr(model.get_submodule(name.rpartition(".")[0]), "padding", 0)
    return padding == "valid" or padding == 0 or (isinstance(padding, tuple) and not any(padding))


def _operations(model: nn.Module, call: Call) -> tuple[dict[str, int], int]:
    """Floating-point operations by module, and of how many samples they are."""
    try:
        return flops_by_module(model, one_sample(call))[1], 1
    except (RuntimeError, ValueError, IndexError):  # some models cannot take one sample of a batch
        batch = next((len(t) for t in tensors(call) if t.dim() > 1), 1)
        return flops_by_module(model, call)[1], batch
