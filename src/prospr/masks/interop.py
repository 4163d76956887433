"""To and from torch.nn.utils.prune, the convention that other tools read."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import prune as torch_prune

from prospr.errors import MaskError
from prospr.masks import enforce
from prospr.meta.loss import unwrap

__all__ = ["from_torch", "to_torch"]


def to_torch(masks: Mapping[str, Tensor], model: nn.Module) -> None:
    model = unwrap(model)
    uses: dict[int, int] = {}
    for module in model.modules():
        for p in module._parameters.values():
            uses[id(p)] = uses.get(id(p), 0) + 1
    places = {name: enforce.locate(model, name, mask) for name, mask in masks.items()}
    for name, (module, attribute) in places.items():
        if uses[id(module._parameters[attribute])] > 1:
            raise MaskError(
                f"{name}: this weight is shared by several modules, and torch.nn.utils.prune would untie it; "
                "keep the masks on with masks.apply"
            )
        if isinstance(module, NonDynamicallyQuantizableLinear):
            raise MaskError(
                f"{name}: nn.MultiheadAttention reads this weight without calling its module, so the hook of "
                "torch.nn.utils.prune never runs; keep the masks on with masks.apply"
            )
    for name, (module, attribute) in places.items():
        if enforce.is_masked(module, attribute):
            enforce.remove(model, {name: masks[name]})
        p = module.get_parameter(attribute)
        torch_prune.custom_from_mask(module, attribute, masks[name].to(p.device, p.dtype))


def from_torch(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for prefix, module in unwrap(model).named_modules():
        for attribute in module._parameters:
            stem = attribute.removesuffix("_orig")
            if stem != attribute and f"{stem}_mask" in module._buffers:
                found[f"{prefix}.{stem}" if prefix else stem] = module._buffers[f"{stem}_mask"].bool()
    if not found:
        raise MaskError(f"torch.nn.utils.prune has put no masks on this {type(model).__name__}")
    return found
