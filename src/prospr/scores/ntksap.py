"""NTK-SAP: keep the spectrum of the neural tangent kernel, whatever the weights (Wang, Li, Sun, ICLR 2023)."""

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from prospr.errors import SettingError
from prospr.meta.batches import map_tensors, tensors
from prospr.meta.loss import Call, Params, PureLoss, devices_of, evaluation_mode, masks_on, replay
from prospr.meta.ranks import Team
from prospr.meta.redraw import Init, redrawn_parameters
from prospr.scores.base import Problem, Score, Scores, outputs

__all__ = ["NtkSap"]

_Norm = nn.modules.batchnorm._NormBase


@dataclass(frozen=True)
class NtkSap(Score):
    """d/dm of ||f(x; m w) - f(x; m (w + v))||^2, w drawn anew, v and x Gaussian: what a weight adds to the NTK's trace.

    Only the shape of the data is looked at (integer inputs, such as tokens, are used as they are), and nothing of the
    model's own weights: the mask is for the initialization, not for one draw of it. In eval mode, the statistics of
    norm layers measured at w and held for both outputs. Meant for rounds: Iterative(NtkSap(), rounds=20).

    epsilon: the standard deviation of v, on the prunable weights.
    redraws: the derivative is the mean over so many draws of w, v and x.
    init: the model's own initialization, called on a model whose weights are lent to it; by default `reset_parameters`
        of every layer. `init=lambda model: None` keeps the weights that are there.

    >>> import torch, prospr
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 30), torch.nn.ReLU(), torch.nn.Linear(30, 3))
    >>> batches = [(torch.zeros(32, 8), torch.zeros(32, dtype=torch.long))]      # looked at for its shape
    >>> prospr.prune(net, batches, sparsity=0.9, method=prospr.Iterative(prospr.NtkSap(), rounds=20))
    Masks(2 layers, 33 of 330 kept, sparsity 0.9000)
    """

    epsilon: float = 0.01
    redraws: int = 5
    init: Init | None = None

    def __post_init__(self) -> None:
        if not (self.epsilon > 0 and math.isfinite(self.epsilon)):
            raise SettingError(f"NtkSap(epsilon={self.epsilon!r}): use a positive number")
        if not isinstance(self.redraws, int) or self.redraws < 1:
            raise SettingError(f"NtkSap(redraws={self.redraws!r}): use a whole number, 1 or more")
        if self.init is not None and not callable(self.init):
            raise SettingError(f"NtkSap(init={self.init!r}): use a function that initialises the model it is given")

    def saliency(self, problem: Problem) -> Scores:
        call = problem.known_call("NtkSap", own=True)
        pure = problem.pure_loss(_outputs)
        trained = problem.start(pure)
        norms = _measurable_norms(pure.model)
        total: Scores = {}
        mine, everyone = _share(call, problem.team)
        with evaluation_mode(pure.model):
            for r in range(self.redraws):
                seed = problem.seed * 1_000_003 + r
                one = self._derivative(problem, pure, trained, norms, call, mine, everyone, seed)
                total = {name: total[name] + d if total else d for name, d in one.items()}
        if problem.team is not None:  # a sum over samples, each of which one rank has
            total = dict(zip(total, problem.team.sums(list(total.values()), 0), strict=True))
        return {name: d / self.redraws for name, d in total.items()}

    def _derivative(
        self,
        problem: Problem,
        pure: PureLoss,
        trained: Params,
        norms: list[_Norm],
        call: Call,
        mine: slice,
        everyone: int,
        seed: int,
    ) -> Scores:
        """For one draw. From one generator on the CPU: a seed for the weights, then the inputs, then v.

        The inputs are drawn for the samples of all ranks; `mine` are those of this one.
        """
        generator = torch.Generator().manual_seed(seed % 2**63)
        weight_seed = int(torch.randint(2**31, (), generator=generator, device="cpu"))
        rows = mine.stop - mine.start

        def drawn_input(t: Tensor) -> Tensor:
            if not t.is_floating_point():
                return t
            if t.dim() == 0 or t.shape[0] != rows:
                return _normal(t.shape, t, generator)
            return _normal((everyone, *t.shape[1:]), t, generator)[mine]

        noise = map_tensors(call, drawn_input)
        drawn = redrawn_parameters(pure.model, self.init, weight_seed)
        drawn = {name: drawn[name] for name in trained}  # what is frozen stays what it is
        on = masks_on(pure.model)  # a weight that is pruned already has no value to draw
        w = _masked({name: drawn[name] for name in problem.names}, on)
        v = _masked({name: self.epsilon * _normal(w[name].shape, w[name], generator) for name in problem.names}, on)
        masks = problem.masks or {}
        here = {**drawn, **_masked(w, masks)}
        there = {**drawn, **_masked({name: w[name] + v[name] for name in w}, masks)}

        if rows == 0:
            return {name: torch.zeros_like(w[name]) for name in problem.names}
        team = problem.team
        with pure.swapped(here, team):
            if norms:
                with torch.no_grad(), _measuring(norms):
                    _replayed(pure, noise, weight_seed)
            # Seen from either side the other is a constant. So only one graph is held at a time, with its own weights
            # in the model until its gradient is taken, as activation checkpointing needs.
            with torch.no_grad(), pure.swapped(there, team):
                f_there = _replayed(pure, noise, weight_seed)
            f_here, g_here = _pull_back(pure, here, problem.names, noise, f_there, weight_seed)
            _, g_there = _pull_back(pure, there, problem.names, noise, f_here, weight_seed)
        # m multiplies the weights on both sides
        return {name: w[name] * g_here[name] + (w[name] + v[name]) * g_there[name] for name in problem.names}


def _outputs(model: nn.Module, call: Call) -> Tensor:
    args, kwargs = call
    return torch.cat([t.flatten() for t in outputs(model(*args, **kwargs))])


def _pull_back(
    pure: PureLoss, params: Params, names: tuple[str, ...], call: Call, other: Tensor, seed: int
) -> tuple[Tensor, Params]:
    """The outputs f, and the gradient of ||f - other||^2."""
    leaves = {name: p.detach().requires_grad_(name in names) for name, p in params.items()}
    with torch.enable_grad(), pure.swapped(leaves):
        f = _replayed(pure, call, seed)
        inputs = [leaves[name] for name in names]
        cotangent = 2 * (f.detach() - other)
        grads = torch.autograd.grad(f, inputs, cotangent, allow_unused=True, materialize_grads=True)
    return f.detach(), dict(zip(names, grads, strict=True))


def _replayed(pure: PureLoss, call: Call, seed: int) -> Tensor:
    with replay(seed, devices_of(pure.model.parameters())):
        return pure.evaluate(call)


def _masked(params: Params, masks: Mapping[str, Tensor]) -> Params:
    return {name: p * masks[name].to(p.device) if name in masks else p for name, p in params.items()}


def _normal(shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    """In float32 on the CPU, so that neither device nor precision changes the numbers."""
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(like.device, like.dtype)


def _share(call: Call, team: Team | None) -> tuple[slice, int]:
    """Which samples of all ranks' are this rank's, and how many there are."""
    rows = next((t.shape[0] for t in tensors(call) if t.dim() > 0), 0)
    if team is None:
        return slice(0, rows), rows
    counts = team.gather(rows)
    start = sum(counts[: team.rank])
    return slice(start, start + rows), sum(counts)


def _measurable_norms(model: nn.Module) -> list[_Norm]:
    """The layers that keep statistics; in a model in train mode, those in eval mode are frozen by the user."""
    return [
        module
        for module in model.modules()
        if isinstance(module, _Norm) and module.running_mean is not None and (module.training or not model.training)
    ]


@contextmanager
def _measuring(norms: list[_Norm]) -> Generator[None]:
    """Let the norm layers keep the statistics of the next batch, and of no other."""
    before = [(norm, norm.training, norm.momentum) for norm in norms]
    try:
        for norm in norms:
            norm.training, norm.momentum = True, 1.0
            norm.reset_running_stats()
        yield
    finally:
        for norm, training, momentum in before:
            norm.training, norm.momentum = training, momentum
