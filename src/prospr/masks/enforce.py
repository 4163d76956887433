"""Masks that hold while a model trains, whoever trains it.

A pruned weight is zeroed once. Its gradient is zeroed by a hook on the parameter itself, so momentum, weight decay,
clipping and data parallelism all see a weight that rests at zero, wherever in the model it is used; the forward pass
costs nothing. What a gradient hook cannot see is caught behind it: after each step of a torch.optim optimizer (which
may hold momentum from before the pruning) and after each load_state_dict the pruned weights are zeroed again.
"""

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from prospr.errors import MaskError
from prospr.meta.loss import unwrap
from prospr.meta.shards import is_shard, like_shard, local

__all__ = ["applied", "apply", "held", "is_masked", "locate", "remove", "rezero"]

_GUARDS = "_prospr_guards"  # a module's attribute: {parameter's attribute: Guard}; tied weights share one Guard
# parameter -> weak reference to its Guard, for the optimizers' hook. A Guard holds its parameter, so a strong one here
# would keep every model that was ever pruned alive.
_guarded: WeakIdKeyDictionary = WeakIdKeyDictionary()


class Guard:
    """Keeps one parameter at its mask, a buffer of `module`; itself the hook on the parameter's gradient.

    It is an attribute of every module that has the parameter, so a deepcopy or a pickle of the module has its own,
    which puts itself on the new parameter when it is made.
    """

    __torch_unserializable__ = True  # tells torch that a parameter may be saved without this hook

    def __init__(self, module: nn.Module, attribute: str) -> None:
        self.module = module
        self.attribute = attribute
        self.parameter = module.get_parameter(attribute)
        self._install()

    def _install(self) -> None:
        _guarded[self.parameter] = weakref.ref(self)
        self.handle = None
        frozen = not self.parameter.requires_grad
        if frozen and (self.parameter.is_inference() or not self.parameter.is_floating_point()):
            return  # it cannot be trained
        if frozen:
            self.parameter.requires_grad_()  # or no hook can be put on it; it may be trained later
        if is_shard(self.parameter):  # FSDP2 writes the gradient itself, and calls these hooks alone
            self.handle = self.parameter.register_post_accumulate_grad_hook(self._after_gradient)
        else:
            self.handle = self.parameter.register_hook(self)
        if frozen:
            self.parameter.requires_grad_(False)

    @property
    def mask(self) -> Tensor:
        buffer = self.module._buffers.get(f"{self.attribute}_mask")  # looked up each time: .to(device) replaces it
        if buffer is None or buffer.dtype != torch.bool:
            raise MaskError(
                f"{type(self.module).__name__}.{self.attribute}: the buffer {self.attribute}_mask was prospr's and is "
                "another's now (torch.nn.utils.prune was put on after the pruning); masks.to_torch(model) hands over"
            )
        return buffer

    def __call__(self, grad: Tensor) -> Tensor:
        if grad.is_sparse:  # of an embedding with sparse=True: the rows that were looked up
            grad = grad.coalesce()
            kept = self.mask[tuple(grad.indices())]
            values = grad.values().masked_fill(~kept, 0.0)
            return torch.sparse_coo_tensor(
                grad.indices(), values, grad.shape, check_invariants=False, is_coalesced=True
            )
        return grad.masked_fill(~self.mask, 0.0)  # torch.where copies its number to a GPU, which a CUDA graph cannot

    @torch.no_grad()
    def _after_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            local(parameter.grad).masked_fill_(~local(self.mask), 0.0)

    _after_gradient.__torch_unserializable__ = True  # ty: ignore[missing-attribute]

    @torch.no_grad()
    def zero(self) -> None:
        if self.replaced:
            self.release()
            self.parameter = self.module.get_parameter(self.attribute)
            self._install()
            if is_shard(self.parameter) and not is_shard(self.mask):
                self.module._buffers[f"{self.attribute}_mask"] = like_shard(self.mask, self.parameter)
        local(self.parameter).masked_fill_(~local(self.mask), 0.0)

    @property
    def replaced(self) -> bool:
        """Whether the module has another parameter by now: load_state_dict(assign=True), an assignment, fully_shard.

        FSDP2 puts the whole weight into the module for as long as it computes with it; the shard stays the parameter.
        """
        now = self.module._parameters.get(self.attribute)
        if now is self.parameter or not isinstance(now, nn.Parameter):
            return False
        return is_shard(now) or not is_shard(self.parameter)

    @property
    def bereft(self) -> bool:
        """Whether the module has no such parameter any more: its weight is computed from others now.

        Where it is computed from the very parameter (spectral_norm, torch.nn.utils.prune), the mask holds on that.
        """
        here = self.attribute in self.module._parameters
        return not here and all(p is not self.parameter for p in self.module.parameters())

    def release(self) -> None:
        _guarded.pop(self.parameter, None)
        if self.handle is not None:
            self.handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "attribute": self.attribute, "parameter": self.parameter}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._install()


def apply(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """See `Masks.apply`. Everything is checked before anything is changed."""
    model = unwrap(model)
    places = {name: locate(model, name, mask) for name, mask in masks.items()}
    _refuse_two_masks_on_one_weight(places)
    for name, mask in masks.items():
        module, attribute = places[name]
        guard = module.__dict__.get(_GUARDS, {}).get(attribute) or Guard(module, attribute)
        put = mask.detach().to(guard.parameter.device, copy=True)
        if is_shard(guard.parameter) and not is_shard(put):
            put = like_shard(put, guard.parameter)
        guard.module.register_buffer(f"{guard.attribute}_mask", put)
        for owner, key in _owners(model, guard.parameter):
            if _GUARDS not in owner.__dict__:
                owner.__dict__[_GUARDS] = {}
                owner.register_load_state_dict_pre_hook(_before_load)
                owner.register_load_state_dict_post_hook(_after_load)
            owner.__dict__[_GUARDS][key] = guard
        guard.zero()


def remove(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """See `Masks.remove`."""
    model = unwrap(model)
    places = {name: locate(model, name, mask) for name, mask in masks.items()}
    for name, (module, attribute) in places.items():
        if not is_masked(module, attribute):
            raise MaskError(f"{name}: there is no mask on this parameter; masks.apply(model) puts one on")
    _refuse_two_masks_on_one_weight(places)
    for module, attribute in places.values():
        guard = module.__dict__[_GUARDS][attribute]
        guard.zero()
        guard.release()
        del guard.module._buffers[f"{guard.attribute}_mask"]
        for owner in model.modules():
            _forget(owner, guard)


def _forget(module: nn.Module, guard: Guard) -> None:
    guards = module.__dict__.get(_GUARDS, {})
    for attribute in [a for a, g in guards.items() if g is guard]:
        del guards[attribute]
    if guards or _GUARDS not in module.__dict__:
        return
    del module.__dict__[_GUARDS]
    for hooks, ours in (
        (module._load_state_dict_pre_hooks, _before_load),
        (module._load_state_dict_post_hooks, _after_load),
    ):
        for key in [k for k, hook in hooks.items() if getattr(hook, "hook", hook) is ours]:
            del hooks[key]


def rezero(model: nn.Module) -> None:
    """Zero what is pruned, on a model whose weights were written to by hand."""
    for module in unwrap(model).modules():
        _after_load(module, None)


def applied(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the masks on a model, by parameter name; an error where there are none."""
    found = held(model)
    if not found:
        name = type(unwrap(model)).__name__
        raise MaskError(f"there are no masks on this {name}; prospr.prune or masks.apply puts them on")
    return found


def held(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the masks on a model, by parameter name; none, where there are none."""
    model = unwrap(model)
    found = {}
    for prefix, module in model.named_modules():
        for attribute, guard in module.__dict__.get(_GUARDS, {}).items():
            if (guard.module, guard.attribute) == (module, attribute):
                found[f"{prefix}.{attribute}" if prefix else attribute] = guard.mask.clone()
    order = {name: i for i, (name, _) in enumerate(model.named_parameters(remove_duplicate=False))}
    return dict(sorted(found.items(), key=lambda item: order[item[0]]))


def is_masked(module: nn.Module, attribute: str) -> bool:
    """Whether there is a mask of ours on this parameter of the module."""
    return attribute in module.__dict__.get(_GUARDS, {})


def locate(model: nn.Module, name: str, mask: Tensor) -> tuple[nn.Module, str]:
    """The module and attribute a mask is for; an error where there is none, or of another shape."""
    path, _, attribute = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        module = None
    p = module._parameters.get(attribute) if module is not None else None
    if module is None or p is None:
        have = ", ".join([n for n, p in model.named_parameters() if p.dim() > 1][:4])
        raise MaskError(
            f"{name}: {type(model).__name__} has no such parameter (it has {have}, ...); "
            "these masks belong to another network"
        )
    if p.shape != mask.shape:
        raise MaskError(
            f"{name}: the mask has shape {tuple(mask.shape)} and the parameter {tuple(p.shape)}; "
            "these masks belong to another network, or to one of another width"
        )
    if hasattr(module, f"{attribute}_mask") and not is_masked(module, attribute):
        raise MaskError(
            f"{name}: the module has an attribute {attribute}_mask of its own; rename it, or, if torch.nn.utils.prune "
            "made it, take it over with Masks.from_torch and torch.nn.utils.prune.remove"
        )
    return module, attribute


def _owners(model: nn.Module, parameter: nn.Parameter) -> Iterator[tuple[nn.Module, str]]:
    """Every place of the model where the parameter is: several, for a tied weight."""
    for module in model.modules():
        for attribute, p in module._parameters.items():
            if p is parameter:
                yield module, attribute


def _refuse_two_masks_on_one_weight(places: Mapping[str, tuple[nn.Module, str]]) -> None:
    first: dict[int, str] = {}
    for name, (module, attribute) in places.items():
        other = first.setdefault(id(module._parameters[attribute]), name)
        if other != name:
            raise MaskError(f"{name}: this is the same weight as {other} (they are tied); give one of the two a mask")


def _before_load(module: nn.Module, state_dict, prefix: str, *_: Any) -> None:
    """A checkpoint without masks leaves the masks as they are."""
    for attribute, guard in module.__dict__.get(_GUARDS, {}).items():
        if (guard.module, guard.attribute) == (module, attribute):
            state_dict.setdefault(f"{prefix}{attribute}_mask", guard.mask)


def _after_load(module: nn.Module, _: Any) -> None:
    for guard in module.__dict__.get(_GUARDS, {}).values():
        guard.zero()


def _guards() -> list[Guard]:
    found = [reference() for reference in list(_guarded.values())]
    return [guard for guard in found if guard is not None]


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for guard in _guards():
        if guard.bereft and {id(p) for p in guard.module.parameters()} & {id(p) for p in _trained(optimizer)}:
            raise MaskError(
                f"{type(guard.module).__name__}.{guard.attribute}: there is a mask on this parameter, and it is no "
                "parameter any more (weight_norm or another parametrization was put on after the pruning), so what is "
                "pruned would come back; put it on before the pruning"
            )


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if len(_guarded):
        for guard in _guards():
            if guard.replaced:
                guard.zero()
        for p in _trained(optimizer):
            reference = _guarded.get(p)
            guard = reference() if reference is not None else None
            if guard is not None:
                guard.zero()


def _trained(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
