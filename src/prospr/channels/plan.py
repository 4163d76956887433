"""Plans: how a network is made smaller, as data. A plan and a state_dict are a checkpoint of the smaller network."""

import copy
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prospr.atomic import write_text
from prospr.channels.size import Size
from prospr.errors import PlanError
from prospr.layers import inputs_first
from prospr.masks import enforce
from prospr.masks.masks import Masks, table
from prospr.meta.batches import tensors
from prospr.meta.loss import evaluation_mode, unwrap

__all__ = ["Plan"]

_FORMAT, _VERSION = "prospr channels", 1
_ATTRIBUTES = ("groups", "num_groups", "padding")


@dataclass(frozen=True)
class Plan:
    """What is kept of every tensor of a network, and the numbers its modules must know.

    keep: {parameter or buffer: {dimension: indices kept}}, for those that lose something.
    shapes: of all parameters and buffers of the network before.
    attributes: {module: {attribute: value}}, such as the groups of a convolution.

    >>> import torch, prospr
    >>> def build():
    ...     return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    >>> net, example = build(), torch.zeros(1, 8)
    >>> masks = prospr.prune(net, None, 0.5, method="magnitude", granularity="channel", example=example)
    >>> plan = prospr.channels.plan(net, masks, example)
    >>> small = plan.shrink(net)
    >>> small[0].out_features
    7
    >>> again = prospr.channels.Plan.from_json(plan.to_json()).shrink(build())       # from the model's own constructor
    >>> again.load_state_dict(small.state_dict())
    <All keys matched successfully>
    """

    keep: Mapping[str, Mapping[int, Sequence[int]]]
    shapes: Mapping[str, Sequence[int]]
    attributes: Mapping[str, Mapping[str, Any]]
    before: Size
    after: Size

    def __post_init__(self) -> None:
        """Everything is looked at, because a plan may come from a file."""
        for name, shape in self.shapes.items():
            if not isinstance(name, str) or not _whole(shape):
                raise PlanError(f"{name}: a shape must be whole numbers, and is {shape!r}; the plan is damaged")
        for name, dims in self.keep.items():
            if name not in self.shapes:
                raise PlanError(f"{name}: the plan keeps some of it, and has no shape of it; the plan is damaged")
            shape = self.shapes[name]
            for dim, indices in dims.items():
                if not _whole([dim]) or not 0 <= dim < len(shape):
                    raise PlanError(f"{name}: there is no dimension {dim!r} of {list(shape)}; the plan is damaged")
                rising = _whole(indices) and all(a < b for a, b in itertools.pairwise(indices))
                if not rising or not indices or indices[0] < 0 or indices[-1] >= shape[dim]:
                    raise PlanError(
                        f"{name}: the indices kept of dimension {dim} must be whole numbers in rising order, from 0 to "
                        f"{shape[dim] - 1}, and are not; the plan is damaged"
                    )
        for path, values in self.attributes.items():
            for key, value in values.items():
                if key not in _ATTRIBUTES or not _whole(value if isinstance(value, list) else [value]):
                    raise PlanError(
                        f"{path}.{key} = {value!r}: a plan sets {', '.join(_ATTRIBUTES)} to whole numbers, and nothing "
                        "else"
                    )
        for size in (self.before, self.after):
            if not _whole(list(vars(size).values())):
                raise PlanError(f"{size}: sizes must be whole numbers; the plan is damaged")

    # Doing it

    def shrink(self, model: nn.Module) -> nn.Module:
        """A smaller copy of `model`, which is not changed. It must have the shapes the plan was made for."""
        with torch.inference_mode(False):
            small = copy.deepcopy(unwrap(model))
            held = enforce.held(small)
            if held:
                enforce.remove(small, held)
            self._check(small)
            self._resize(small)
        return small

    def _resize(self, small: nn.Module) -> None:
        replaced: dict[int, Tensor] = {}
        named = {**dict(small.named_parameters()), **dict(small.named_buffers())}
        for name in self.keep:
            tensor = named[name]
            part = self.cut(name, tensor.detach())
            replaced[id(tensor)] = (
                nn.Parameter(part, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else part
            )
        for module in small.modules():
            for held in (module._parameters, module._buffers):
                for key, tensor in held.items():
                    if tensor is not None and id(tensor) in replaced:
                        held[key] = replaced[id(tensor)]  # ty: ignore[invalid-assignment]
        for path, values in self.attributes.items():
            module = small.get_submodule(path)
            for key, value in values.items():
                setattr(module, key, tuple(value) if isinstance(getattr(module, key), tuple) else value)
        with evaluation_mode(small), torch.no_grad():  # training, spectral norm goes a step on when it is computed
            for module in small.modules():
                _tell_sizes(module)

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """What is kept of a tensor of the shape of `name`: a parameter, its gradient, its momentum."""
        for dim, indices in self.keep.get(name, {}).items():
            tensor = tensor.index_select(dim, torch.tensor(indices, device=tensor.device))
        return tensor.clone()

    def masks(self, masks: Mapping[str, Tensor]) -> Masks:
        """Masks of the large network, for the smaller one."""
        return Masks({name: self.cut(name, mask) for name, mask in masks.items()})

    def optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module, small: nn.Module) -> torch.optim.Optimizer:
        """An optimizer of the same class and settings for `small`, with the state that `optimizer` has for `model`.

        >>> import torch, prospr
        >>> x = torch.ones(2, 8)
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        >>> sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        >>> net(x).sum().backward(); sgd.step()
        >>> masks = prospr.prune(net, None, 0.5, method="magnitude", granularity="channel", example=x)
        >>> plan = prospr.channels.plan(net, masks, x)
        >>> small = plan.shrink(net)
        >>> sgd = plan.optimizer(sgd, net, small)
        >>> sgd.state[small[0].weight]["momentum_buffer"].shape
        torch.Size([7, 8])
        """
        names = {id(p): name for name, p in unwrap(model).named_parameters()}
        new = dict(unwrap(small).named_parameters())
        groups = []
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) not in names:
                    raise PlanError(
                        f"the optimizer has a parameter of shape {tuple(p.shape)} that is not of this model; pass the "
                        "model whose parameters it was made with"
                    )
            groups.append({**group, "params": [new[names[id(p)]] for p in group["params"]]})
        accepted = {k: v for k, v in optimizer.defaults.items() if k in _arguments(type(optimizer))}
        fresh = type(optimizer)(groups, **accepted)
        for p, state in optimizer.state.items():
            name = names[id(p)]
            odd = [k for k, v in state.items() if any(t.dim() and t.shape != p.shape for t in tensors(v))]
            if odd and self.keep:
                raise PlanError(
                    f"{type(optimizer).__name__} has a state {odd[0]!r} for {name} that is not of the parameter's "
                    "shape, so it cannot be cut; make a new optimizer for the smaller network"
                )
            fresh.state[new[name]] = {
                key: self.cut(name, value)
                if isinstance(value, Tensor) and value.shape == p.shape
                else copy.deepcopy(value)
                for key, value in state.items()
            }
        return fresh

    def _check(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, shape in self.shapes.items():
            if name not in named:
                raise PlanError(f"{name}: {type(model).__name__} has no such tensor; this plan is for another network")
            if tuple(named[name].shape) != tuple(shape):
                raise PlanError(
                    f"{name}: the plan is for a tensor of shape {tuple(shape)}, and this one has "
                    f"{tuple(named[name].shape)}; shrink the network as it was before"
                )
        for name, tensor in named.items():
            if name not in self.shapes and tensor.numel() > 1:
                raise PlanError(f"{name}: the plan does not know this tensor; it is for another network")
        for path, values in self.attributes.items():
            if path not in modules:
                raise PlanError(f"{path}: {type(model).__name__} has no such module; this plan is for another network")
            for key, value in values.items():
                now = getattr(modules[path], key, None)
                like = len(value) if isinstance(value, list) else None
                if (len(now) if isinstance(now, tuple) else None) != like or not _whole(now if like else [now]):
                    raise PlanError(
                        f"{path}.{key}: the plan sets it to {value!r}, and it is {now!r} here; this plan is for "
                        "another network"
                    )

    # Keeping it

    def to_json(self) -> str:
        lists: list[list[int]] = []
        numbers: dict[tuple[int, ...], int] = {}
        keep: dict[str, dict[str, int]] = {}
        for name, dims in self.keep.items():
            for dim, indices in dims.items():
                key = tuple(indices)
                if key not in numbers:
                    numbers[key] = len(lists)
                    lists.append(list(key))
                keep.setdefault(name, {})[str(dim)] = numbers[key]
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "attributes": self.attributes,
            "keep": keep,
            "indices": lists,
            "before": vars(self.before),
            "after": vars(self.after),
        }
        return json.dumps(content)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        try:
            content = json.loads(text)
            if content["format"] != _FORMAT:
                raise PlanError(f"this is no plan: its format is {content['format']!r}")
            if content["version"] != _VERSION:
                raise PlanError(f"a plan of version {content['version']}; this library reads version {_VERSION}")
            lists = dict(enumerate(content["indices"]))
            keep = {
                name: {int(dim): lists[number] for dim, number in dims.items()}
                for name, dims in content["keep"].items()
            }
            sizes = Size(**content["before"]), Size(**content["after"])
            return cls(keep, content["shapes"], content["attributes"], *sizes)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"this is no plan, or a damaged one ({type(error).__name__}: {error})") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, whole or not at all."""
        write_text(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        return cls.from_json(Path(path).read_text(encoding="utf-8", errors="replace"))

    def __str__(self) -> str:
        rows: list[tuple[Any, ...]] = [("tensor", "before", "after")]
        for name in self.keep:
            shape = list(self.shapes[name])
            after = [len(self.keep[name].get(d, range(n))) for d, n in enumerate(shape)]
            if len(shape) > 1:
                rows.append((name, "x".join(map(str, shape)), "x".join(map(str, after))))
        for key, before in vars(self.before).items():
            after = vars(self.after)[key]
            rows.append((key, f"{before:,}", f"{after:,} ({after / max(1, before):.2%})"))
        return table(rows, left=1)


def _whole(numbers: Any) -> bool:
    return isinstance(numbers, (list, tuple)) and all(type(n) is int and n >= 0 for n in numbers)


def _arguments(kind: type) -> set[str]:
    code = kind.__init__.__code__
    return set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def _tell_sizes(module: nn.Module) -> None:
    """The sizes that layers of PyTorch keep beside their weights."""
    weight = getattr(module, "weight", None)  # computed, where it is parametrized
    if not isinstance(weight, Tensor):
        weight = None
    if isinstance(module, nn.modules.conv._ConvNd) and weight is not None:
        first, second = weight.shape[:2]
        into, outof = (first, second * module.groups) if module.transposed else (second * module.groups, first)
        module.in_channels, module.out_channels = into, outof
    elif isinstance(module, nn.Linear) and weight is not None:
        module.out_features, module.in_features = weight.shape
    elif inputs_first(module) and weight is not None:
        module.nx, module.nf = weight.shape
    elif isinstance(module, nn.modules.batchnorm._NormBase):
        for tensor in (weight, module._buffers.get("running_mean")):
            if tensor is not None:
                module.num_features = len(tensor)
    elif isinstance(module, nn.GroupNorm) and weight is not None:
        module.num_channels = len(weight)
    elif isinstance(module, nn.Embedding) and weight is not None:
        module.num_embeddings, module.embedding_dim = weight.shape
    elif isinstance(module, nn.PReLU) and weight is not None:
        module.num_parameters = len(weight)
