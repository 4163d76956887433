"""Gradient and Hessian-vector product of one batch, in one process or over many, in one piece or in several."""

import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, cast

import torch
import torch.autograd.forward_ad as fwad
from torch import Tensor, nn

from prospr.errors import BatchError, DerivativeError, InexactWarning, LossError, SettingError
from prospr.meta.batches import micro_batches
from prospr.meta.capture import Recorder
from prospr.meta.kernels import (
    ForwardOverReverse,
    GradientInside,
    OneBackward,
    ReverseOverReverse,
    without_weight_gradients,
)
from prospr.meta.loss import Params, PureLoss, check_seed, devices_of, replay, replay_python
from prospr.meta.ranks import Team

__all__ = ["Mode", "Products", "gradient", "hvp", "plain_grad"]

Mode = Literal["auto", "reverse", "forward"]
Loss = Callable[[Params, Any], Tensor]

# What PyTorch says where an operation has no derivative of the kind asked for.
_MISSING = (
    "is not implemented",
    "not implemented for",
    "implement the jvp function",
    "not support",
    "not yet support",
    "no forward",
    "forward AD",
    "double backward",
)

# What it says where a tensor's memory is not laid out as an operation wants it.
_STRIDES = ("view size is not compatible", "stride", "contiguous", "setStorage", "out of bounds for storage")


def _overruns(loss: Loss) -> bool:
    """Whether a network on the CPU has a strided 1x1 convolution of fewer than 16 inputs.

    In channels-last layout oneDNN's kernel for it writes past its memory, and the process dies (torch 2.13, images of
    64 pixels and more).
    """
    if not isinstance(loss, PureLoss):
        return False
    return any(
        isinstance(module, nn.Conv2d)  # whose weight may be computed, and is not asked for: that can write to buffers
        and all(p.device.type == "cpu" for p in module.parameters())
        and set(module.kernel_size) == {1}
        and max(module.stride) > 1
        and module.in_channels // module.groups < 16
        for module in loss.model.modules()
    )


def gradient(
    loss: Loss, params: Mapping[str, Tensor], batch: Any, *, micro_batch: int | None = None, seed: int = 0
) -> tuple[Tensor, Params]:
    """The loss of one batch and its gradient.

    >>> import torch, prospr
    >>> value, grads = prospr.meta.gradient(lambda p, x: (p["w"] ** 3 * x).sum(), {"w": torch.tensor([2.0])}, 5.0)
    >>> value.item(), grads["w"].item()
    (40.0, 60.0)
    """
    return Products(loss, micro_batch=micro_batch, seed=seed).gradient(params, batch)


def hvp(
    loss: Loss,
    params: Mapping[str, Tensor],
    batch: Any,
    vector: Mapping[str, Tensor],
    *,
    mode: Mode = "auto",
    micro_batch: int | None = None,
    seed: int = 0,
) -> Params:
    """The product of the loss's Hessian with `vector`.

    `mode`: "reverse" (two backward passes: least memory, most operations), "forward" (dual numbers through one
    backward pass), or "auto": reverse, and forward for a loss that reverse cannot differentiate.

    >>> import torch, prospr
    >>> w, v = {"w": torch.tensor([2.0])}, {"w": torch.tensor([10.0])}
    >>> prospr.meta.hvp(lambda p, x: (p["w"] ** 3 * x).sum(), w, 5.0, v)["w"].item()     # 6 w x v
    600.0
    """
    return Products(loss, mode=mode, micro_batch=micro_batch, seed=seed).hvp(params, batch, vector)


class Products:
    """Derivatives of one loss, with random numbers that depend on (seed, step) alone."""

    def __init__(
        self,
        loss: Loss,
        *,
        mode: Mode = "auto",
        micro_batch: int | None = None,
        seed: int = 0,
        capture: bool = True,
        team: Team | None = None,
    ) -> None:
        if mode not in ("auto", "reverse", "forward"):
            raise SettingError(f"mode={mode!r}: use 'auto', 'reverse' or 'forward'")
        if micro_batch is not None and (not isinstance(micro_batch, int) or micro_batch < 1):
            raise SettingError(f"micro_batch={micro_batch!r}: use a whole number of samples, at least 1")
        self.loss = loss
        self.mode: Mode = mode
        self.micro_batch = micro_batch
        self.team = team
        self.seed = check_seed(seed) + (0 if team is None else 104_729 * team.rank)  # each rank's dropout is its own
        # Channels last is what convolutions run fastest in. A network that calls .view on its activations, or needs
        # their strides otherwise, cannot have it; the first evaluation finds out.
        self.layout = torch.contiguous_format if _overruns(loss) else torch.channels_last
        self._kernels = loss.kernels() if isinstance(loss, PureLoss) else None
        self.synced = loss.synced() if team is not None and isinstance(loss, PureLoss) else []
        if self.synced and micro_batch is not None:
            raise SettingError(
                f"micro_batch={micro_batch}: {_some(self.synced)} take statistics over all ranks, and pieces of a "
                "batch have none; leave micro_batch out, or use activation checkpointing to save memory"
            )
        self.recorder = Recorder(capture and not self.synced)
        self._factor = 1.0  # of the loss, while it is differentiated
        self._walked = self._looked = False  # whether the graph of the loss was looked through
        self._valued = False  # whether the loss has a value, and what fails is a derivative
        self._plain = False  # whether the loss has gradients inside, and norms are written out
        if micro_batch is not None and isinstance(loss, PureLoss) and (mixed := loss.batch_statistics()):
            warnings.warn(
                f"micro_batch={micro_batch} is not exact here: {_some(mixed)} take statistics over the batch, and "
                "now see only a piece of it. Leave micro_batch out, use activation checkpointing to save memory, "
                "or put these layers in eval mode.",
                InexactWarning,
                stacklevel=2,
            )

    def laid_out(self, params: Mapping[str, Tensor]) -> Params:
        """The parameters, detached, in the memory layout that is evaluated; what is no kernel keeps its own."""
        return {
            name: p.detach().contiguous(memory_format=self.layout)
            if p.dim() == 4 and (self._kernels is None or name in self._kernels)
            else p.detach()
            for name, p in params.items()
        }

    def gradient(
        self, params: Mapping[str, Tensor], batch: Any, step: int = 0, last: bool = False
    ) -> tuple[Tensor, Params]:
        """The loss and its gradient; zeros for parameters that play no part.

        last: whether it is the gradient after all steps, which ranks must agree on.
        """
        value, grads = self.partial_gradient(params, batch, step, last)
        if len(grads) < len(params):
            grads = {**self._zeros(params), **grads}
        return value, grads

    def partial_gradient(
        self, params: Mapping[str, Tensor], batch: Any, step: int = 0, last: bool = False
    ) -> tuple[Tensor, Params]:
        """The same without the parameters that play no part; over several ranks, with zeros for them."""
        if self.team is None:
            return self._local_gradient(params, batch, step)
        value, grads = self._over_ranks(
            self.team,
            batch,
            lambda: self._local_gradient(params, batch, step),
            lambda: (torch.zeros(()), {}),
            3 * step + (2 if last else 1),
            params,
        )
        return value, grads

    def hvp(self, params: Mapping[str, Tensor], batch: Any, vector: Mapping[str, Tensor], step: int = 0) -> Params:
        """The Hessian of the loss times `vector`."""
        if self.team is None:
            return self._local_hvp(params, batch, vector, step)
        return self._over_ranks(
            self.team,
            batch,
            lambda: (None, self._local_hvp(params, batch, vector, step)),
            lambda: (None, {}),
            3 * step,
            params,
        )[1]

    def _over_ranks(self, team: Team, batch: Any, evaluate: Callable, nothing: Callable, tag: int, params) -> Any:
        """The mean over all ranks' parts of the batch, each by its weight; a rank may have none of it."""
        weight = float(team.settings.weight(batch))
        if not weight >= 0 or weight == float("inf"):
            raise BatchError(f"the weight of a batch is {weight}; it must be a finite number, 0 or more")
        if self.synced and weight == 0:
            raise BatchError(
                f"a batch is empty on rank {team.names[team.rank]}, and {_some(self.synced)} need samples on every "
                "rank; use larger batches"
            )
        # Where statistics go over all ranks so do cotangents, and the weight must be in them.
        self._factor = weight if self.synced else 1.0
        value, parts = evaluate() if weight > 0 else nothing()
        parts = {**self._zeros(params), **parts} if len(parts) < len(params) else parts
        names = list(params)
        parts = {name: parts[name] for name in names}
        kind = torch.promote_types(parts[names[0]].dtype, torch.float32)
        sent = [*parts.values()] if value is None else [value.to(kind), *parts.values()]
        del parts
        means = team.mean(sent, weight, tag, factor=1.0 if self.synced else None)
        return None if value is None else means[0], dict(zip(names, means[-len(names) :], strict=True))

    def _zeros(self, params: Mapping[str, Tensor]) -> Params:
        return {name: torch.zeros_like(p) for name, p in self.laid_out(params).items()}

    def _local_gradient(self, params: Mapping[str, Tensor], batch: Any, step: int) -> tuple[Tensor, Params]:
        value: Tensor | None = None
        total: Params = {}
        for fraction, piece, seed in self._pieces(batch, step):
            loss, grads = self._evaluate(self._gradient, params, piece, (), step, seed)
            value = _accumulate(value, loss, fraction)
            total = _add(total, grads, fraction)
        return cast(Tensor, value), total

    def _local_hvp(self, params: Mapping[str, Tensor], batch: Any, vector: Mapping[str, Tensor], step: int) -> Params:
        total: Params = {}
        for fraction, piece, seed in self._pieces(batch, step):
            product = self._evaluate(self._hvp, params, piece, vector, step, seed)
            total = _add(total, product, fraction)
        return total

    def _evaluate(self, function: Callable, params, batch, vector, step: int, seed: int) -> Any:
        direct = lambda p, b, v: self._in_layout(function, p, b, v, step, seed)  # noqa: E731
        return self.recorder(getattr(function, "__name__", ""), direct, (dict(params), batch, dict(vector)), seed)

    def _gradient(self, params, batch, _, step: int, seed: int) -> tuple[Tensor, Params]:
        with self._evaluation(params, seed, OneBackward(self._plain)) as leaves:
            loss = self._value(leaves, batch, step)
            grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        used = {name: g for name, g in zip(leaves, grads, strict=True) if g is not None}
        return loss.detach(), {name: g.to_dense() if g.is_sparse else g for name, g in used.items()}

    def _in_layout(self, function: Callable, *args):
        try:
            return function(*args)
        except GradientInside:
            self._plain = True
        except RuntimeError as error:
            if self.layout == torch.contiguous_format or not any(sign in str(error) for sign in _STRIDES):
                raise
            self.layout = torch.contiguous_format
        return self._in_layout(function, *args)

    def _hvp(self, params, batch, vector, step: int, seed: int) -> Params:
        ways = {"reverse": self._reverse_over_reverse, "forward": self._forward_over_reverse}
        missing: Exception | None = None
        for mode, product in ways.items() if self.mode == "auto" else [(self.mode, ways[self.mode])]:
            try:
                result = product(params, batch, vector, step, seed)
            except RuntimeError as error:  # NotImplementedError is one
                if isinstance(error, torch.OutOfMemoryError) or not any(sign in str(error) for sign in _MISSING):
                    raise
                if mode == "reverse" and not self._valued:
                    raise  # the loss itself raises it
                missing = missing or error
            else:
                self.mode = cast(Mode, mode)  # what worked once is not asked again
                return result
        raise DerivativeError(
            f"an operation of the network has no second derivative (mode={self.mode!r}): {missing}. "
            'Use order="first" and an lr of your own, which need none, or replace the operation'
        ) from missing

    def _reverse_over_reverse(self, params, batch, vector, step: int, seed: int) -> Params:
        self._valued = False
        with self._evaluation(params, seed, ReverseOverReverse(self._plain)) as leaves:
            loss = self._value(leaves, batch, step)
            self._valued = True
            if not self._walked:
                _refuse_once_differentiable(loss)
                self._walked = True
            inputs = list(leaves.values())
            with without_weight_gradients():
                grads = plain_grad([loss], inputs, [torch.ones_like(loss)], create_graph=True)
            # A gradient that is constant in the parameters has no second derivative to add.
            outputs = [
                (g, vector[name]) for name, g in zip(leaves, grads, strict=True) if g is not None and g.requires_grad
            ]
            if not outputs:
                return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
            products = plain_grad([g for g, _ in outputs], inputs, [v for _, v in outputs])
            return {
                name: torch.zeros_like(leaf) if p is None else p
                for (name, leaf), p in zip(leaves.items(), products, strict=True)
            }

    def _forward_over_reverse(self, params, batch, vector, step: int, seed: int) -> Params:
        with self._evaluation(params, seed, ForwardOverReverse(self._plain)) as leaves, fwad.dual_level():
            duals = {name: fwad.make_dual(leaf, vector[name]) for name, leaf in leaves.items()}
            with _holding(self.loss, duals, self.team):
                loss = self._value(duals, batch, step)
                # Without a graph the backward passes of det and solve take a factorization that has no tangent; with
                # one, a function that is marked once_differentiable loses its own.
                nodes = list(_nodes(loss))
                once = any(_once_differentiable(node) for node in nodes)
                if once and any("Linalg" in node.name() for node in nodes):
                    raise NotImplementedError("once_differentiable beside a determinant or a solution is not supported")
                grads = plain_grad([loss], list(duals.values()), [torch.ones_like(loss)], create_graph=not once)
            tangents = [None if g is None else fwad.unpack_dual(g).tangent for g in grads]
            return {
                name: torch.zeros_like(leaf) if t is None else t.detach()
                for (name, leaf), t in zip(leaves.items(), tangents, strict=True)
            }

    @contextmanager
    def _evaluation(self, params: Mapping[str, Tensor], seed: int, kernels) -> Generator[Params]:
        """Fresh leaves, held in the module until the gradients are taken; the random numbers of this step."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            devices = [] if self.recorder.recording else devices_of(params.values())
            stack.enter_context(replay(seed, devices))
            drawn = stack.enter_context(replay_python(seed))
            leaves = {name: p.requires_grad_() for name, p in self.laid_out(params).items()}
            stack.enter_context(_holding(self.loss, leaves, self.team))
            stack.enter_context(kernels)
            yield leaves
            if self.recorder.watching and drawn():  # a recording would go the same way again
                self.recorder.enabled = False

    def _value(self, leaves: Params, batch: Any, step: int) -> Tensor:
        value = self.loss(leaves, batch)
        if not isinstance(value, Tensor):
            raise LossError(f"the loss returned a {type(value).__name__}; it must return a scalar tensor")
        if value.dim() != 0:
            raise LossError(
                f"the loss returned a tensor of shape {tuple(value.shape)} at step {step}; "
                "reduce it to a scalar, for instance with .mean()"
            )
        if not value.requires_grad:
            raise LossError(
                "the loss does not depend on any parameter that is trained: is it computed under torch.no_grad(), "
                "detached, or are all parameters frozen?"
            )
        if not self._looked and isinstance(self.loss, PureLoss):
            _refuse_ways_around(self.loss, value, leaves)
            self._looked = True
        return value if self._factor == 1.0 else value * self._factor

    def _pieces(self, batch: Any, step: int) -> Iterator[tuple[float, Any, int]]:
        """(share of the batch, piece, seed): one piece, or micro-batches."""
        seed = (self.seed * 1_000_003 + step) % 2**31
        if self.micro_batch is None:
            yield 1.0, batch, seed
            return
        for share, start, piece in micro_batches(batch, self.micro_batch):
            yield share, piece, (seed + 7919 * start) % 2**31


def plain_grad(outputs, inputs, cotangents, create_graph: bool = False) -> tuple[Tensor | None, ...]:
    """torch.autograd.grad as no TorchFunctionMode sees it.

    Handling it would switch our kernels off while it runs, and activation checkpointing runs the network in there.
    """
    return torch.autograd.Variable._execution_engine.run_backward(
        tuple(outputs),
        tuple(cotangents),
        create_graph,  # keep the graph
        create_graph,
        tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=False,
    )


def _refuse_once_differentiable(loss: Tensor) -> None:
    """A function marked once_differentiable ends the graph of its gradient, and PyTorch would silently add nothing."""
    for node in _nodes(loss):
        if _once_differentiable(node):
            raise NotImplementedError(f"{node.name()} is marked once_differentiable: its derivative is not implemented")


def _refuse_ways_around(loss: PureLoss, value: Tensor, leaves: Params) -> None:
    """A parameter that is reached by another way than the model would be a constant there, and its derivative wrong."""
    for node in _nodes(value):
        variable = getattr(node, "variable", None)
        name = None if variable is None else loss.own(variable)
        if name in leaves:
            raise LossError(
                f"{name}: the loss reaches this parameter past the model (by a list or a variable that was made "
                "before), so its derivative would lack a part; read it from the model inside the loss, as an attribute "
                "of its module"
            )


def _once_differentiable(node: Any) -> bool:
    backward = getattr(getattr(type(node), "_forward_cls", None), "backward", None)  # of a Function in Python
    code = getattr(backward, "__code__", None)
    return code is not None and code.co_filename == torch.autograd.function.__file__  # PyTorch's wrapper around it


def _nodes(loss: Tensor) -> Iterator[Any]:
    """Every operation in the graph of the loss, and at its ends the tensors that gradients are added up in."""
    seen = set()
    ahead = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        ahead.extend(following for following, _ in node.next_functions)


@contextmanager
def _holding(loss: Loss, params: Params, team: Team | None) -> Generator[None]:
    if isinstance(loss, PureLoss):
        with loss.swapped(params, team):
            yield
    else:
        yield


def _accumulate(total: Tensor | None, value: Tensor, fraction: float) -> Tensor:
    scaled = value if fraction == 1.0 else value * fraction
    return scaled if total is None else total + scaled


def _add(total: Params, term: Params, fraction: float) -> Params:
    if fraction == 1.0:
        return term
    return total | {name: _accumulate(total.get(name), t, fraction) for name, t in term.items()}


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
