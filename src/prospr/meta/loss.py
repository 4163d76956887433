"""A module and a loss as a pure function of the module's parameters.

Nothing the user can see changes: parameters and buffers are swapped out while the function runs and put back after
it, also when it raises; random numbers come from a seed; compiled modules run their original code.
"""

import functools
import operator
import random
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from prospr.errors import BatchError, ModelError, SettingError
from prospr.meta.batches import map_tensors, tensors, to_device
from prospr.meta.ranks import Team
from prospr.meta.synced import synced_batch_norm

__all__ = [
    "Call",
    "ModelLoss",
    "Params",
    "PureLoss",
    "call_of",
    "called_with",
    "check_seed",
    "cross_entropy",
    "devices_of",
    "evaluation_mode",
    "masks_on",
    "one_sample",
    "pure_loss",
    "replay",
    "replay_python",
    "training_mode",
    "unwrap",
]

Params = dict[str, Tensor]
_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)

ModelLoss = Callable[[nn.Module, Any], Tensor]
Call = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments a model is called with


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """The default loss: cross-entropy of `model(inputs)` for a batch `(inputs, targets)`."""
    if not isinstance(batch, Sequence) or isinstance(batch, str) or len(batch) != 2:
        raise BatchError(
            f"the default loss takes a batch (inputs, targets), and got {_describe(batch)}; "
            "pass loss=lambda model, batch: ... for anything else"
        )
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def pure_loss(model: nn.Module, loss: ModelLoss = cross_entropy) -> "PureLoss":
    """Turn `loss(model, batch)` into `f(params, batch)`, a pure function of the trainable parameters.

    >>> import torch, prospr
    >>> model = torch.nn.Linear(3, 2)
    >>> f = prospr.meta.pure_loss(model)
    >>> batch = torch.ones(4, 3), torch.tensor([0, 1, 0, 1])
    >>> zero = {name: torch.zeros_like(p) for name, p in f.params().items()}
    >>> round(f(zero, batch).item(), 4)      # log 2: the model's own weights play no part
    0.6931

    Weights that prospr's masks hold at zero on the model are held at zero here too.
    """
    return PureLoss(model, loss, masks_on(unwrap(model)))


def masks_on(model: nn.Module) -> dict[str, Tensor]:
    """The masks that are on a model, by parameter: buffers called `<parameter>_mask`, as Masks.apply leaves them."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = {}
    for module in model.modules():
        for key, p in module._parameters.items():
            mask = module._buffers.get(f"{key}_mask")
            if p is not None and mask is not None and mask.dtype == torch.bool and mask.shape == p.shape:
                found[names[id(p)]] = mask
    return found


class PureLoss:
    """A function `f(params, batch) -> scalar`; see `pure_loss`."""

    def __init__(
        self, model: nn.Module, loss: ModelLoss = cross_entropy, masks: Mapping[str, Tensor] | None = None
    ) -> None:
        self.model = unwrap(model)
        self.loss = loss
        self.masks = masks or {}  # parameters are multiplied by these before the model sees them
        self._modules = list(self.model.modules())
        owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in self._modules:
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    owners.setdefault(id(parameter), []).append((module, attribute))
        self._places = {name: owners[id(p)] for name, p in self.model.named_parameters()}
        self._names = {id(p): name for name, p in self.model.named_parameters()}
        # What forward may write to: embeddings that keep their rows short, and a frozen network that follows the one
        # that is trained (MoCo, BYOL). A frozen network larger than what is trained is not copied: it is a backbone.
        short = {id(m.weight) for m in self._modules if isinstance(m, _LOOKUPS) and m.max_norm is not None}
        frozen = {name: p.numel() for name, p in self.model.named_parameters() if not p.requires_grad}
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad) if frozen else 0
        self._written = {name for name, p in self.model.named_parameters() if id(p) in short}
        self._written |= set(frozen) if sum(frozen.values()) <= trained else set()
        self._watched = False  # whether forward ran once, and what else it writes to is known
        self._swapped: Params | None = None

    def params(self) -> Params:
        """The trainable parameters, detached: tied ones once, frozen ones (requires_grad off) not at all."""
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

    def batch_statistics(self) -> list[str]:
        """Names of the norm layers that mix the samples of a batch in their current mode."""
        return [
            name
            for name, module in self.model.named_modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
            and (module.training or (module.running_mean is None and module.running_var is None))
        ]

    def kernels(self) -> set[str]:
        """Names of the weights of convolutions over images."""
        kinds = (nn.Conv2d, nn.ConvTranspose2d)
        places = self._places.items()
        return {n for n, owners in places if all(isinstance(m, kinds) and key == "weight" for m, key in owners)}

    def own(self, tensor: Tensor) -> str | None:
        """The name of a tensor that is a parameter of the model itself, and not one that is put in its place."""
        return self._names.get(id(tensor))

    def synced(self) -> list[str]:
        """Names of the norm layers that take statistics over all ranks in their current mode."""
        return [name for name, m in self.model.named_modules() if isinstance(m, nn.SyncBatchNorm) and m.training]

    def __call__(self, params: Mapping[str, Tensor], batch: Any) -> Tensor:
        if self._swapped is params:
            return self.evaluate(batch)
        with self.swapped(params):
            return self.evaluate(batch)

    @contextmanager
    def swapped(self, params: Mapping[str, Tensor], team: Team | None = None) -> Generator[None]:
        """Hold `params` and fresh copies of all buffers inside the module; SyncBatchNorm takes the team's statistics.

        Gradients must be taken inside this block: activation checkpointing runs the module again during the backward
        pass, and would find the module's own weights after it.
        """
        unknown = [name for name in params if name not in self._places]
        if unknown:
            raise ModelError(
                f"{unknown[0]!r} is not a parameter of {type(self.model).__name__}; "
                f"it has {', '.join(list(self._places)[:6])}, ..."
            )
        before = [(m, dict(m._parameters), dict(m._buffers), _attributes(m)) for m in self._modules]
        thin = [m for m in self._modules if isinstance(m, _LOOKUPS) and m.sparse]
        watched: dict[str, tuple[Tensor, int]] = {}
        try:
            for name in self._written.difference(params):
                module, attribute = self._places[name][0]
                self._put(name, cast(Tensor, module._parameters[attribute]).detach().clone())
            for name, tensor in params.items():
                if name in self.masks:
                    self._put(name, tensor * self.masks[name])
                elif name in self._written:
                    self._put(name, tensor.clone())
                elif self._watched or tensor.is_inference() or isinstance(tensor, nn.Parameter):
                    self._put(name, tensor)
                else:  # a copy once: where forward writes to it, from now on
                    copy = tensor.clone()
                    watched[name] = copy, copy._version
                    self._put(name, copy)
            copies: dict[int, Tensor] = {}
            for module, _, buffers, attributes in before:
                for attribute, buffer in buffers.items():
                    if buffer is not None:
                        module._buffers[attribute] = copies.setdefault(id(buffer), buffer.detach().clone())
                if isinstance(module, nn.RNNBase) and "_flat_weights" in attributes:  # a second list of its weights
                    names = module._flat_weights_names
                    module.__dict__["_flat_weights"] = [module._parameters.get(n) for n in names]
                if isinstance(module, nn.SyncBatchNorm):
                    module.__dict__["forward"] = functools.partial(synced_batch_norm, module, team)
            for embedding in thin:  # sparse gradients can be neither added up nor differentiated
                embedding.sparse = False
            self._swapped = params  # ty: ignore[invalid-assignment]
            yield
        finally:
            self._swapped = None
            self._written |= {name for name, (copy, version) in watched.items() if copy._version > version}
            self._watched |= bool(watched)
            for embedding in thin:
                embedding.sparse = True
            for module, parameters, buffers, attributes in before:
                module._parameters.clear()
                module._parameters.update(parameters)
                module._buffers.clear()
                module._buffers.update(buffers)
                _put_back(module, attributes)

    def _put(self, name: str, tensor: Tensor) -> None:
        for module, attribute in self._places[name]:
            module._parameters[attribute] = tensor  # ty: ignore[invalid-assignment]

    def evaluate(self, batch: Any) -> Tensor:
        """The loss with whatever parameters are in the module now."""
        place = next((p.device for p in self.model.parameters()), None)
        with ExitStack() as stack:
            # Fused attention kernels and compiled code have no second derivative.
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            # A copy, since a model may write to its inputs, and a batch is looked at more than once.
            return self.loss(self.model, to_device(batch, place, copy=True) if place is not None else batch)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What a module holds beside parameters: tables that forward makes when it first needs them, flags, outputs."""
    return {**module.__dict__, "_non_persistent_buffers_set": set(module._non_persistent_buffers_set)}


def _put_back(module: nn.Module, attributes: dict[str, Any]) -> None:
    kept = module._non_persistent_buffers_set
    kept.clear()
    kept.update(attributes["_non_persistent_buffers_set"])
    for key in module.__dict__.keys() - attributes.keys():
        del module.__dict__[key]
    module.__dict__.update({**attributes, "_non_persistent_buffers_set": kept, "training": module.training})


class _Seen(Exception):
    """Carries what the model was called with out of the loss, before anything is computed."""


def called_with(model: nn.Module, loss: ModelLoss, batch: Any) -> Call | None:
    """The arguments `loss` calls the model with; None where it does not call the model itself."""

    def look(_, args, kwargs):
        raise _Seen(args, kwargs)

    pure = PureLoss(model, loss)
    handle = pure.model.register_forward_pre_hook(look, with_kwargs=True, prepend=True)
    try:
        with replay(0, devices_of(pure.model.parameters())):
            pure(pure.params(), batch)
    except _Seen as seen:
        return seen.args
    finally:
        handle.remove()
    return None


def call_of(example: Any) -> Call:
    """An example as a model is called with it: a tuple of arguments, a dict of keyword arguments, or one input."""
    if isinstance(example, tuple):
        return example, {}
    return ((), example) if isinstance(example, dict) else ((example,), {})


def one_sample(call: Call) -> Call:
    """The same arguments with the first sample of each tensor; a vector as long as the batch is a number a sample."""
    batch = next((len(t) for t in tensors(call) if t.dim() > 1), None)
    first = lambda t: t.dim() > 1 or (t.dim() == 1 and len(t) == batch)  # noqa: E731
    return map_tensors(call, lambda t: t[:1] if t.layout == torch.strided and first(t) else t)


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's and DistributedDataParallel's wrappers."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod  # ty: ignore[invalid-assignment]
        elif isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        else:
            return model


@contextmanager
def training_mode(model: nn.Module) -> Generator[None]:
    """Put a model that is in eval mode into train mode, by its own `train`, and back after.

    A model already in train mode is left as it is, so norm layers frozen by the user stay frozen.
    """
    with _modes_kept(model):
        was = model.training
        if not was:
            model.train()
        try:
            yield
        finally:
            if not was:
                model.eval()  # what its `train` undid, such as weights merged for inference


@contextmanager
def evaluation_mode(model: nn.Module) -> Generator[None]:
    """Put a model into eval mode, and every module back into its own after.

    By the flags alone: a `train` of its own may merge or fold weights, and nobody would undo it.
    """
    with _modes_kept(model):
        for module in model.modules():
            module.training = False
        yield


@contextmanager
def _modes_kept(model: nn.Module) -> Generator[None]:
    flags = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


def devices_of(parameters: Iterable[Tensor]) -> list[torch.device]:
    """The devices a model is on, each once."""
    return sorted({p.device for p in parameters}, key=str)


def check_seed(seed: Any) -> int:
    """The seed as an int; NumPy's whole numbers are ones too."""
    try:
        number = operator.index(seed)
    except TypeError:
        number = None
    if number is None or not -(2**63) <= number < 2**63:
        raise SettingError(f"seed={seed!r}: use a whole number of at most 64 bits")
    return number


@contextmanager
def replay(seed: int | None, devices: Sequence[torch.device] = ()) -> Generator[None]:
    """Draw random numbers from `seed` on the CPU and on `devices`; the global generators come back as they were.

    With `seed=None` the generators go on from where they are, and are only put back.
    """
    generators = [torch.default_generator]
    for device in devices:
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            generators.append(torch.cuda.default_generators[index])
    states = [generator.get_state() for generator in generators]
    try:
        if seed is not None:
            for generator in generators:
                generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextmanager
def replay_python(seed: int) -> Generator[Callable[[], bool]]:
    """The same for the global generators of `random` and NumPy; it gives a function: whether any number was drawn."""
    numpy = sys.modules.get("numpy.random")
    before = random.getstate(), numpy.get_state() if numpy else None

    def drawn() -> bool:
        if random.getstate() != random.Random(seed).getstate():
            return True
        return numpy is not None and _place(numpy.get_state()) != _place(numpy.RandomState(seed).get_state())

    try:
        random.seed(seed)
        if numpy:
            numpy.seed(seed)
        yield drawn
    finally:
        random.setstate(before[0])
        if numpy:
            numpy.set_state(before[1])


def _place(state: Any) -> tuple:
    """Where a generator of NumPy's stands: its position in a table of numbers, and the first of the table."""
    name, table, *place = state
    return name, int(table[0]), *place


def _describe(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return f"a single tensor of shape {tuple(batch.shape)}"
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return f"a {type(batch).__name__} of {len(batch)} items"
    return f"a {type(batch).__name__}"
