"""Floating-point operations of a forward pass."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from prospr.meta.loss import Call, PureLoss, call_of, devices_of, evaluation_mode, replay, unwrap

__all__ = ["flops", "flops_by_module"]


def flops(model: nn.Module, example: Any) -> int:
    """Floating-point operations of one forward pass on `example`, an input, a tuple of arguments or a dict of
    keyword arguments.

    Counted are matrix products, convolutions, attention and recurrent layers, two operations a multiply-add; a masked
    weight counts like any other. The pass is in eval mode and without gradients, and leaves the model, its statistics
    and the random state as they were.

    >>> import torch
    >>> from prospr.counting import flops
    >>> flops(torch.nn.Linear(10, 5), torch.zeros(1, 10))     # 2 x 10 x 5
    100
    """
    return flops_by_module(model, call_of(example))[0]


def flops_by_module(model: nn.Module, call: Call) -> tuple[int, dict[str, int]]:
    """The same in all, and by the name of each module, its children included."""
    model = unwrap(model)
    counter = FlopCounterMode(display=False)
    pure = PureLoss(model, lambda net, given: net(*given[0], **given[1]))
    with torch.no_grad(), replay(0, devices_of(model.parameters())), evaluation_mode(model), _plain_kernels(), counter:
        pure(pure.params(), call)
    root = type(model).__name__
    counts = {module: sum(ops.values()) for module, ops in counter.get_flop_counts().items()}
    by_module = {"" if m == root else m.removeprefix(f"{root}."): n for m, n in counts.items() if m != "Global"}
    return counts.get("Global", 0), by_module


@contextmanager
def _plain_kernels() -> Generator[None]:
    """Fused transformer layers and LSTMs off: the counter has no formula for them and would count nothing."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            # None leaves a setting alone: setting allow_tf32 warns on most machines
            rest = {"deterministic": None, "allow_tf32": None, "fp32_precision": None}
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False, **rest))
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
