"""Linear layers of other libraries, known without importing them: where a model has one, its library is loaded."""

import sys

from torch import nn

__all__ = ["inputs_first"]


def inputs_first(module: nn.Module) -> bool:
    """Whether this is a linear layer whose weight is (inputs, outputs): Hugging Face's Conv1D, of which GPT-2 is made.

    >>> import torch
    >>> from prospr.layers import inputs_first
    >>> inputs_first(torch.nn.Linear(3, 2))
    False
    """
    kind = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return kind is not None and isinstance(module, kind)
