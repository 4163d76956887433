"""A model's weights drawn anew from its initialization."""

import math
from collections.abc import Callable

import torch
from torch import nn

from prospr.errors import SettingError
from prospr.meta.loss import Params, PureLoss, devices_of, evaluation_mode, replay, unwrap

__all__ = ["Init", "draw_anew", "redrawn_parameters"]

Init = Callable[[nn.Module], object]
_HUGGING_FACE = ", such as prospr.integrations.huggingface.initial_weights"


def draw_anew(model: nn.Module, init: Init | None = None, seed: int = 0) -> None:
    """Draw the model's weights anew, in place, from `seed`; the global generators are not touched.

    init: the model's own initialization, called on it. By default `reset_parameters` of every layer; a parameter that
    no layer's reset redraws is an error, and then nothing is changed.
    """
    with replay(seed, devices_of(model.parameters())), torch.no_grad():
        if init is not None:
            init(model)
            return
        reset = {module for module in model.modules() if callable(getattr(module, "reset_parameters", None))}
        for name, module in model.named_modules():
            own = [key for key, p in module._parameters.items() if p is not None]
            if own and module not in reset:
                place = f"{name}.{own[0]}" if name else own[0]
                raise SettingError(
                    f"{place}: {type(module).__name__} has no reset_parameters to draw it anew; pass init=, a "
                    f"function that initialises the model{_HUGGING_FACE if hasattr(model, '_init_weights') else ''}"
                )
        before = [
            (name, module, key, p, p.clone())
            for name, module in model.named_modules()
            for key, p in module._parameters.items()
            if p is not None and (p.is_floating_point() or p.is_complex())
        ]
        for _, _, _, p, _ in before:
            p.fill_(math.nan)  # a reset may write by .data, and write what was there
        try:
            for module in model.modules():
                if module in reset:
                    module.reset_parameters()  # ty: ignore[call-non-callable]
            for name, module, key, p, _ in before:
                if module._parameters.get(key) is p and p.isnan().any():
                    raise SettingError(
                        f"{f'{name}.' if name else ''}{key}: the reset_parameters of {type(module).__name__} does not "
                        "draw it anew; pass init=, a function that initialises the model"
                    )
        except BaseException:
            for _, module, key, p, values in before:
                module._parameters[key] = p
                p.copy_(values)
            raise


def redrawn_parameters(model: nn.Module, init: Init | None = None, seed: int = 0) -> Params:
    """Every parameter as `draw_anew` would leave it, by name, detached; the model is not touched.

    >>> import torch
    >>> from prospr.meta.redraw import redrawn_parameters
    >>> model = torch.nn.Linear(3, 2)
    >>> new = redrawn_parameters(model, seed=1)
    >>> torch.equal(new["weight"], model.weight)
    False
    """
    model = unwrap(model)
    copies = {name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
    # In train mode `swapped` takes the statistics of norm layers away, which their reset sets.
    with evaluation_mode(model), PureLoss(model).swapped(copies):
        draw_anew(model, init, seed)
        return {name: p.detach() for name, p in model.named_parameters()}
