"""Is it the mask? Checks that any pruned network should be put to before its method is believed.

Train these beside the pruned network, on the same data: if a shuffled mask does as well, the method found layer
densities, not weights; if redrawn weights do as well, the mask knows nothing of the weights it was made for; if the
inverted mask does as well, it found nothing.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from prospr.counting import flops
from prospr.errors import SettingError
from prospr.masks.enforce import rezero
from prospr.masks.masks import Masks
from prospr.meta.loss import replay
from prospr.meta.redraw import Init, draw_anew

__all__ = ["invert", "narrow", "redraw", "shuffle"]


def shuffle(masks: Mapping[str, Tensor], seed: int = 0) -> Masks:
    """The same number of weights in every layer, at random places: random pruning with the method's own densities.

    >>> import torch, prospr
    >>> masks = prospr.Masks({"w": torch.arange(10) < 3})
    >>> moved = prospr.sanity.shuffle(masks, seed=1)
    >>> moved.kept, moved == masks
    (3, False)
    """
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, mask in masks.items():
        order = torch.randperm(mask.numel(), generator=generator, device="cpu").to(mask.device)
        moved[name] = mask.flatten()[order].reshape(mask.shape)
    return Masks(moved)


def invert(scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Scores that keep what the method would prune first.

    >>> import torch, prospr
    >>> prospr.select(prospr.sanity.invert({"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}), sparsity=0.5)["w"].tolist()
    [True, True, False, False]
    """
    return {name: -s for name, s in scores.items()}


def redraw(model: nn.Module, init: Init | None = None, seed: int = 0) -> nn.Module:
    """A copy of the model with its weights drawn anew from `seed`; masks that are on the model hold for the copy.

    init: the model's own initialization, called on the copy. By default `reset_parameters` of every layer; a parameter
    that no layer's reset redraws is an error.

    >>> import torch, prospr
    >>> model = torch.nn.Linear(3, 2)
    >>> twin = prospr.sanity.redraw(model, seed=1)
    >>> torch.equal(twin.weight, model.weight), torch.equal(twin.weight, prospr.sanity.redraw(model, seed=1).weight)
    (False, True)
    """
    twin = copy.deepcopy(model)
    draw_anew(twin, init, seed)
    rezero(twin)
    return twin


def narrow(build: Callable[[int], nn.Module], budget: int, widest: int = 1 << 14, example: Any = None) -> nn.Module:
    """The widest `build(width)` within a budget: a small dense network to compare a sparse one with.

    The budget is a number of parameters; with `example`, an input or a tuple of arguments, it is the floating-point
    operations of a forward pass on it (see `prospr.counting.flops`). No width above `widest` is tried. A wider network
    must not be cheaper. The networks that are only measured leave the random state as it was.

    >>> import torch, prospr
    >>> net = prospr.sanity.narrow(lambda width: torch.nn.Linear(10, width), budget=100)
    >>> net.out_features                                     # 9 x 11 = 99 parameters
    9
    >>> net = prospr.sanity.narrow(lambda width: torch.nn.Linear(10, width), budget=100, example=torch.zeros(1, 10))
    >>> net.out_features                                     # 2 x 10 x 5 = 100 FLOPs
    5
    """
    if widest < 1:
        raise SettingError(f"widest={widest}: a width is at least 1")

    def cost(width: int) -> int:
        with replay(None, [torch.device("cuda")] if torch.cuda.is_initialized() else []):
            model = build(width)
            return sum(p.numel() for p in model.parameters()) if example is None else flops(model, example)

    least = cost(1)
    if least > budget:
        unit = "parameters" if example is None else "FLOPs"
        raise SettingError(f"budget={budget}: even build(1) has {least} {unit}; raise the budget")
    low, high = 1, widest + 1  # low is within the budget, high is not or may not be tried
    while 2 * low < high and cost(2 * low) <= budget:
        low *= 2
    high = min(high, 2 * low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= budget else (low, middle)
    return build(low)
