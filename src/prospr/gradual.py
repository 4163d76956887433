"""Pruning while a network trains: a little at a time, by magnitude."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from prospr.errors import MaskError, SettingError
from prospr.masks import enforce
from prospr.masks.masks import Masks
from prospr.masks.select import Scope, check_floor, check_scope, check_sparsity, select_among
from prospr.meta.loss import unwrap
from prospr.scores import Magnitude, prunable
from prospr.scores.base import Problem, Which

__all__ = ["GradualMagnitude", "GradualPruner"]


@dataclass(frozen=True)
class GradualMagnitude:
    """The smallest weights go, every few steps of training, until the sparsity asked for (Zhu and Gupta, 2017).

    After t steps of training the sparsity is s + (initial - s) (1 - (t - begin) / (end - begin))^3: fast at first,
    while there is much to spare, and slowly near the end. Nothing is pruned after step `end`; train on for a while.

    sparsity: s, the share of prunable weights that are gone at step `end`.
    begin, end, every: pruned at the steps begin, begin + every, ... and at `end`, which need not be one of them.
    initial: the sparsity at step `begin`.
    scope, keep_per_layer: see `prospr.select`. scope="layer" is what the paper does.

    >>> import torch, prospr
    >>> from prospr.gradual import GradualMagnitude
    >>> model = torch.nn.Sequential(torch.nn.Linear(10, 30), torch.nn.ReLU(), torch.nn.Linear(30, 2))
    >>> pruner = GradualMagnitude(sparsity=0.9, end=20, every=5).on(model)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> for _ in range(30):
    ...     optimizer.zero_grad()
    ...     torch.nn.functional.cross_entropy(model(torch.randn(8, 10)), torch.randint(0, 2, (8,))).backward()
    ...     optimizer.step()
    ...     pruned = pruner.step()                           # after the optimizer's step
    >>> pruner.masks
    Masks(2 layers, 36 of 360 kept, sparsity 0.9000)
    """

    sparsity: float
    end: int
    begin: int = 0
    every: int = 100
    initial: float = 0.0
    scope: Scope = "global"
    keep_per_layer: int = 0

    def __post_init__(self) -> None:
        check_sparsity(self.sparsity)
        check_scope(self.scope)
        if not isinstance(self.initial, (int, float)) or not 0 <= self.initial <= self.sparsity:
            raise SettingError(
                f"GradualMagnitude(initial={self.initial!r}): use a number from 0 to the final sparsity, "
                f"{self.sparsity:g}"
            )
        if not isinstance(self.begin, int) or self.begin < 0:
            raise SettingError(f"GradualMagnitude(begin={self.begin!r}): use a whole number of steps, 0 or more")
        if not isinstance(self.end, int) or self.end <= self.begin:
            raise SettingError(f"GradualMagnitude(end={self.end!r}): use a whole number above begin={self.begin}")
        if not isinstance(self.every, int) or self.every < 1:
            raise SettingError(f"GradualMagnitude(every={self.every!r}): use a whole number of steps, 1 or more")

    def at(self, step: int) -> float:
        """The sparsity after so many steps of training, were it pruned at each.

        >>> from prospr.gradual import GradualMagnitude
        >>> [round(GradualMagnitude(sparsity=0.8, begin=10, end=20).at(t), 3) for t in (0, 10, 15, 20, 30)]
        [0.0, 0.0, 0.7, 0.8, 0.8]
        """
        if step < self.begin:
            return 0.0
        if step >= self.end:
            return self.sparsity
        left = 1 - (step - self.begin) / (self.end - self.begin)
        return self.sparsity + (self.initial - self.sparsity) * left**3

    def due(self, step: int) -> bool:
        """Whether weights are pruned after so many steps."""
        return step == self.end or (self.begin <= step < self.end and (step - self.begin) % self.every == 0)

    def on(self, model: nn.Module, prunable: Which = None) -> "GradualPruner":
        """Begin: masks are put on `model`, and with begin=0 pruned to `initial` at once.

        Masks that are on it already hold: the schedule prunes further from where it exceeds them.
        """
        return GradualPruner(self, model, prunable)


class GradualPruner:
    """A `GradualMagnitude` at work on a model: call `step()` after each step of the optimizer."""

    def __init__(self, settings: GradualMagnitude, model: nn.Module, which: Which = None) -> None:
        self.settings = settings
        self.model = unwrap(model)
        self.steps = 0  # of training, so far
        weights = prunable(self.model, which)
        self._names = tuple(weights)
        check_floor({n: w.numel() for n, w in weights.items()}, settings.sparsity, settings.keep_per_layer)
        held = enforce.held(self.model)
        Masks({n: held.get(n, torch.ones_like(w, dtype=torch.bool)) for n, w in weights.items()}).apply(self.model)
        self._prune_if_due()

    @property
    def masks(self) -> Masks:
        """The masks as they are now. They live on the model, and travel with its state_dict."""
        held = enforce.held(self.model)
        for name in self._names:
            if name not in held:
                raise MaskError(
                    f"{name}: its mask was removed while it was pruned gradually; begin again with on(model)"
                )
        return Masks({name: held[name] for name in self._names})

    def step(self) -> bool:
        """Count one step of training, and prune if it is time to. Returns whether weights were pruned."""
        self.steps += 1
        return self._prune_if_due()

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs beside the model's and the optimizer's own state_dict."""
        return {"settings": asdict(self.settings), "steps": self.steps, "masks": dict(self.masks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was called, before or after the model's state is loaded."""
        missing = [key for key in ("settings", "steps", "masks") if key not in state]
        if missing:
            raise SettingError(f"this is not a state_dict of a GradualPruner: it has no {missing[0]!r}")
        for key, now in asdict(self.settings).items():
            if state["settings"].get(key) != now:
                raise SettingError(
                    f"{key}={now!r}, and the run that is resumed had {key}={state['settings'].get(key)!r}; "
                    "resume it with the settings it began with"
                )
        if set(state["masks"]) != set(self._names):
            name = sorted(set(state["masks"]) ^ set(self._names))[0]
            raise MaskError(f"{name}: pruned in one of the two, the stored run or this one; use the same model")
        Masks({name: state["masks"][name] for name in self._names}).apply(self.model)
        self.steps = state["steps"]

    def _prune_if_due(self) -> bool:
        if not self.settings.due(self.steps):
            return False
        before, target = self.masks, self.settings.at(self.steps)
        if target <= before.sparsity:
            return False
        scores = Magnitude().score(Problem(self.model, self._names))
        after = select_among(
            scores, before, target, scope=self.settings.scope, keep_per_layer=self.settings.keep_per_layer
        )
        after.apply(self.model)
        return after.kept < before.kept

    def __repr__(self) -> str:
        return f"GradualPruner({self.settings}, after {self.steps} steps, sparsity {self.masks.sparsity:.4f})"
