"""What layers are made of: linear layers of other libraries, known without importing them, and computed weights."""

import sys

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

__all__ = ["computed", "embeddings", "inputs_first"]


def inputs_first(module: nn.Module) -> bool:
    """Whether this is a linear layer whose weight is (inputs, outputs): Hugging Face's Conv1D, of which GPT-2 is made.

    >>> import torch
    >>> from prospr.layers import inputs_first
    >>> inputs_first(torch.nn.Linear(3, 2))
    False
    """
    kind = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return kind is not None and isinstance(module, kind)


def computed(model: nn.Module) -> list[str]:
    """The layers whose weight is not a parameter but computed from others: by weight_norm, or another parametrization.

    >>> import torch
    >>> from prospr.layers import computed
    >>> computed(torch.nn.Sequential(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 2))))
    ['0']
    """
    kinds = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)
    several = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)  # of weights
    found = []
    for name, module in model.named_modules():  # without computing any: some parametrizations write to buffers
        if isinstance(module, kinds) and (is_parametrized(module, "weight") or "weight" in module.__dict__):
            found.append(name)
        old = any(isinstance(value, Tensor) and "weight" in key for key, value in module.__dict__.items())
        if isinstance(module, several) and (is_parametrized(module) or old):
            found.append(name)
    return found


def embeddings(model: nn.Module) -> set[int]:
    """The ids of weights that are looked up, row by row; one of them may be a linear layer's too."""
    return {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
