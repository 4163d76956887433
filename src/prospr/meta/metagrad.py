"""The exact gradient of a loss after M training steps with respect to the weights before the first.

No graph spans two steps. The steps are run and their weights kept; then a cotangent `lam` walks back through them, one
Hessian-vector product a step. Activations are those of one step, whatever M is.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from prospr.errors import DerivativeError, LossError, SettingError
from prospr.meta.batches import take
from prospr.meta.loss import Params, devices_of, replay
from prospr.meta.optimizers import Optimizer, State
from prospr.meta.products import Loss, Mode, Products
from prospr.meta.ranks import Ranks, fingerprints, joined
from prospr.meta.trajectory import KeptBatches, Moment, Store, trajectory

__all__ = ["Order", "Trace", "adjoint", "check_order", "metagrad"]

Order = Literal["exact", "first"]

_RESCALE_EVERY = 4  # steps; a cotangent that grows a hundredfold each step stays far inside float32 between two of them


@dataclass
class Trace:
    """What happened on the way: pass one as `trace=` and read it after.

    `losses[m]` is the loss at step m, the last one that after all steps. `norms[m]` is the norm of dL(w_M)/dw_m: their
    ratio from one step to the next says how fast the derivative grows, and so how far it can be trusted. `logs[m]` is
    its logarithm to the base 2, which is finite also where the norm itself is beyond the largest number.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    logs: list[float] = field(default_factory=list)

    @property
    def growths(self) -> list[float]:
        """For each step, the factor by which the cotangent grows on its way back through it."""
        return [2.0 ** (here - after) for here, after in itertools.pairwise(self.logs)]

    @property
    def growth(self) -> float:
        """The mean factor by which the cotangent grows a step back; 1.0 when there are no steps."""
        if len(self.logs) < 2 or not math.isfinite(self.logs[-1]) or not math.isfinite(self.logs[0]):
            return 1.0
        return 2.0 ** ((self.logs[0] - self.logs[-1]) / (len(self.logs) - 1))


def metagrad(
    loss: Loss,
    params: Mapping[str, Tensor],
    batches: Iterable[Any],
    optimizer: Optimizer,
    *,
    steps: int | None = None,
    order: Order = "exact",
    store: Store = "device",
    mode: Mode = "auto",
    micro_batch: int | None = None,
    seed: int = 0,
    capture: bool = True,
    trace: Trace | None = None,
    ranks: Ranks | None = None,
) -> Params:
    """dL(w_M, D_M) / dw_0, where w_M comes from M steps of `optimizer` on the batches D_0 .. D_{M-1}.

    loss: `loss(params, batch) -> scalar tensor`, for a module `prospr.meta.pure_loss(model)`.
    batches: M + 1 of them; M is `steps`, or one less than there are batches.
    order: "exact", or "first", which takes the M steps but drops all curvature (it stores and keeps nothing).
    store: where the M sets of weights are kept: on the "device"; on the "cpu", copied while the GPU works; or only
        about 2 sqrt(M) of them at a time, the others being run again ("recompute"). With the last two, batches that
        are on a GPU are kept on the CPU.
    mode: how Hessian-vector products are taken; see `prospr.meta.hvp`.
    micro_batch: evaluate each batch in pieces of this many samples. The loss must be a mean over samples.
    capture: on a GPU, record the evaluations as CUDA graphs where there are enough of them for that to pay.
    seed: of the random numbers the loss draws (dropout); each step has its own, the same at each visit.
    ranks: every batch is this rank's part of it, and the result that of the whole batches, on every rank.

    A parameter that a step does not use is left alone by it, as torch.optim does (over several ranks it counts as used,
    with a gradient of zero). Of a loss made by `pure_loss`, weights that masks hold at zero stay there.

    >>> import torch, prospr
    >>> quadratic = lambda p, x: 0.5 * x * (p["w"] ** 2).sum()          # one step: w -> (1 - lr x) w
    >>> w = {"w": torch.tensor([2.0])}
    >>> g = prospr.meta.metagrad(quadratic, w, [3.0, 3.0], prospr.meta.SGD(lr=0.1))
    >>> round(g["w"].item(), 4)                                         # x (1 - lr x)^2 w = 3 * 0.49 * 2
    2.94
    """
    if not params:
        raise SettingError("metagrad got no parameters: are all of the model's parameters frozen?")
    device = next(iter(params.values())).device
    facts = {} if ranks is None else {**fingerprints(params), "the optimizer": repr(optimizer), "steps": steps}
    with joined(ranks, "metagrad", device, facts) as team:
        products = Products(loss, mode=mode, micro_batch=micro_batch, seed=seed, capture=capture, team=team)
        how = {"steps": steps, "order": order, "store": store, "trace": trace}
        lam, exponent = adjoint(products, params, batches, optimizer, **how)
    result = dict(zip(lam, _scaled(list(lam.values()), exponent), strict=True))
    result = {name: t.contiguous() for name, t in result.items()}
    if not torch.isfinite(_largest(result)).all():
        raise DerivativeError(
            f"the meta-gradient overflowed: its largest entry is near 2^{exponent.item():.0f}. Lower the inner "
            'learning rate (lr="auto" finds a stable one), take fewer steps, or use float64'
        )
    return result


def adjoint(
    products: Products,
    params: Mapping[str, Tensor],
    batches: Iterable[Any],
    optimizer: Optimizer,
    *,
    steps: int | None = None,
    order: Order = "exact",
    store: Store = "device",
    trace: Trace | None = None,
) -> tuple[Params, Tensor]:
    """As `metagrad`, as (lam, e) with dL(w_M)/dw_0 = lam 2^e and the largest entry of lam near 1: never overflows.

    Where only the ranking of the entries matters, e can be left alone.
    """
    check_order(order)
    if not isinstance(optimizer, Optimizer):
        raise SettingError(
            f"the inner optimizer is a {type(optimizer).__name__}: use one of prospr.meta's, such as "
            "prospr.meta.AdamW(lr=1e-3), or a subclass of prospr.meta.Optimizer"
        )
    with torch.inference_mode(False), replay(None, devices_of(params.values())):  # a loader may draw random numbers
        losses: list[Tensor] = []
        logs: list[Tensor] = []
        if order == "first":
            lam = _first_order(products, params, batches, optimizer, steps, losses)
            exponent = torch.zeros((), dtype=torch.float64, device="cpu")
        else:
            watch = None if trace is None else logs
            lam, exponent = _exact(products, params, batches, optimizer, steps, store, losses, watch)
        if trace is not None:
            trace.losses[:] = torch.stack(losses).tolist()
            trace.logs[:] = torch.stack(logs[::-1] or [_norm(lam).log2()]).tolist()
            trace.norms[:] = torch.tensor(trace.logs, dtype=torch.float64, device="cpu").exp2().tolist()
        return lam, exponent


def check_order(order: Any) -> None:
    if order not in ("exact", "first"):
        raise SettingError(f"order={order!r}: use 'exact' or 'first'")


def _first_order(products, params, batches, optimizer, steps, losses) -> Params:
    """The gradient at w_M. One batch and one set of weights at a time: the last batch is the one none follows."""
    products.recorder.expected = steps or 1
    w = products.laid_out(params)
    state = optimizer.init_all(w)
    updates = _Updates(optimizer, w)
    last: Any = None
    for step, batch in enumerate(take(batches, steps)):
        if step > 0:
            value, grads = products.partial_gradient(w, last, step - 1)
            losses.append(value)
            w, state = updates.step(w, grads, state, step - 1)
        last = batch
    value, lam = products.gradient(w, last, len(losses), last=True)
    losses.append(value)
    _check_losses(losses)
    return lam


def _exact(products, params, batches, optimizer, steps, store, losses, logs) -> tuple[Params, Tensor]:
    batch_of = KeptBatches(take(batches, steps), store)
    total = len(batch_of) - 1
    products.recorder.expected = total

    def advance(w: Params, state: State, step: int) -> tuple[Moment, Params, State]:
        value, grads = products.partial_gradient(w, batch_of[step], step)
        if len(losses) == step:  # a store that runs steps again comes here twice
            losses.append(value)
        kept = (grads, state) if optimizer.keeps_gradients else ({}, {})
        return Moment(w, *kept), *updates.step(w, grads, state, step)

    w = products.laid_out(params)
    updates = _Updates(optimizer, w)
    state = optimizer.init_all(w)
    moments = trajectory(store, total, advance)
    for step in range(total):
        before = state
        moment, w, state = advance(w, state, step)
        moments.push(step, moment, before)
        del moment, before  # what the store does not keep is freed now
    value, lam = products.gradient(w, batch_of[total], total, last=True)
    losses.append(value)
    _check_losses(losses)
    if logs is not None:
        logs.append(_norm(lam).log2())

    exponent = torch.zeros((), dtype=torch.float64, device=value.device)
    lam_state: State = {name: tuple(torch.zeros_like(s) for s in parts) for name, parts in state.items()}
    del state, w
    for step in reversed(range(total)):
        w, grads, state = moments.pop(step)
        lam, on_grads, lam_state = updates.pullback(w, grads, state, step, lam, lam_state)
        if on_grads is not None:
            lam = _add(lam, products.hvp(w, batch_of[step], on_grads, step))
        del w, grads, state, on_grads
        if step % _RESCALE_EVERY == 0:
            lam, lam_state, shift = _rescale(lam, lam_state)
            exponent = exponent + shift
        if logs is not None:
            logs.append(_norm(lam).log2() + exponent)
    return lam, exponent


class _Updates:
    """The optimizer's steps on the parameters that each step uses, as torch.optim takes them.

    A parameter that plays no part in a step is left alone by it: no decay, no momentum, and it is not counted.
    """

    def __init__(self, optimizer: Optimizer, params: Params) -> None:
        self._optimizer = optimizer
        self._counts = dict.fromkeys(params, 0)  # how many steps have used each parameter
        self._groups: list[dict[int, list[str]]] = []  # of each step: what it uses, by that count

    def step(self, w: Params, grads: Params, state: State, step: int) -> tuple[Params, State]:
        if len(self._groups) == step:  # a store that runs steps again comes here twice
            groups: dict[int, list[str]] = {}
            for name in grads:
                groups.setdefault(self._counts[name], []).append(name)
                self._counts[name] += 1
            self._groups.append(groups)
        new, new_state = dict(w), dict(state)
        for count, names in self._groups[step].items():
            part = self._optimizer.step_all(_some(w, names), _some(grads, names), _some(state, names), count)
            new.update(part[0])
            new_state.update(part[1])
        return new, new_state

    def pullback(
        self, w: Params, grads: Params, state: State, step: int, lam: Params, lam_state: State
    ) -> tuple[Params, Params | None, State]:
        direct, on_grads, on_state = dict(lam), {}, dict(lam_state)
        for count, names in self._groups[step].items():
            before = [_some(tree, names) if tree else {} for tree in (w, grads, state)]
            part = self._optimizer.pullback(*before, count, _some(lam, names), _some(lam_state, names))
            direct.update(part[0])
            on_grads.update(part[1] or {})
            on_state.update(part[2])
        if on_grads and len(on_grads) < len(w):
            on_grads = {name: on_grads[name] if name in on_grads else torch.zeros_like(t) for name, t in w.items()}
        return direct, on_grads or None, on_state


def _some(tree: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: tree[name] for name in names}


def _add(a: Params, b: Params) -> Params:
    return dict(zip(a, torch._foreach_add(list(a.values()), [b[name] for name in a]), strict=True))


def _norm(lam: Params) -> Tensor:
    return torch.linalg.vector_norm(_gathered(torch._foreach_norm(list(lam.values()))))


def _rescale(lam: Params, lam_state: State) -> tuple[Params, State, Tensor]:
    """Divide all cotangents by one power of two, so that the largest entry of lam is near 1: exact, and no overflow."""
    size = _largest(lam)
    usable = torch.isfinite(size) & (size > 0)
    shift = torch.where(usable, torch.floor(torch.log2(torch.where(usable, size, 1.0))), 0.0)
    parts = [*lam.values(), *(t for parts in lam_state.values() for t in parts)]
    scaled = iter(_scaled(parts, -shift))
    return (
        {name: next(scaled) for name in lam},
        {name: tuple(next(scaled) for _ in parts) for name, parts in lam_state.items()},
        shift,
    )


def _largest(lam: Params) -> Tensor:
    """The size of the largest entry; of no entries, none is."""
    return _gathered(torch._foreach_norm([t for t in lam.values() if t.numel()], float("inf"))).max()


def _scaled(parts: list[Tensor], exponent: Tensor) -> list[Tensor]:
    """Each times 2^exponent, in two halves: the whole may be beyond the largest number of its kind."""
    half = torch.floor(exponent / 2)
    for factor in (torch.exp2(half), torch.exp2(exponent - half)):
        parts = _times(parts, factor)
    return parts


def _times(parts: list[Tensor], factor: Tensor) -> list[Tensor]:
    """Each times one number that stays on its device: one kernel where all are of one kind."""
    kinds = {(t.device, t.dtype) for t in parts}
    if len(kinds) == 1:
        device, dtype = next(iter(kinds))
        return list(torch._foreach_mul(parts, factor.to(device, dtype)))
    return [t * factor.to(t.device, t.dtype) for t in parts]


def _gathered(numbers: Sequence[Tensor]) -> Tensor:
    """Scalars of any device and type as one float64 vector."""
    if len({(t.device, t.dtype) for t in numbers}) == 1:
        return torch.stack(list(numbers)).double()
    return torch.stack([t.to(numbers[0].device, torch.float64) for t in numbers])


def _check_losses(losses: list[Tensor]) -> None:
    total = len(losses) - 1
    values = torch.stack([value.to(losses[0].device) for value in losses])
    bad = torch.nonzero(~torch.isfinite(values)).flatten().tolist()
    if not bad:
        return
    first = bad[0]
    where = f"after all {total} steps" if first == total and total else f"at step {first} of {total}"
    remedy = (
        "check the batch and the loss at the initial weights"
        if first == 0
        else 'the inner training diverged: lower its learning rate (lr="auto" finds a stable one)'
    )
    raise LossError(f"the loss is {values[first].item()} {where}; {remedy}")
