"""When weights are pruned: at once, or in rounds that score again what is left."""

import warnings
from dataclasses import dataclass, replace
from typing import Literal

import torch

from prospr.errors import BatchError, CollapseError, InexactWarning, ScoreError, SettingError, ZeroScoreWarning
from prospr.granularity import Kind
from prospr.masks.masks import Masks
from prospr.scores.base import Problem, Score, Scores

__all__ = ["Iterative", "reordered"]


@dataclass(frozen=True)
class Iterative:
    """Score, prune a little, score the sparse network, prune a little more: `rounds` times.

    schedule: the density after round t of T is d^(t/T) ("exponential") or 1 - (1 - d) t/T ("linear").
    recover: False: what is pruned stays pruned, and the sparse network is what is scored and trained in inner steps.
        True: the gradient is that of the sparse network, but every weight is scored with its initial value, so a pruned
        one can come back (FORCE).
    redraw: every round scores another draw of the initial weights: those of each layer, in another order. What is kept
        then suits the initialization rather than these weights, and is spread over a layer's channels. On ResNet-20 at
        95 % and more, weights drawn anew in each round gave masks that trained better; see docs/findings.md.

    One round is one shot. Each round reads on in the batches, and begins again where they end.

    >>> import torch, prospr
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 30), torch.nn.ReLU(), torch.nn.Linear(30, 3))
    >>> batches = [(torch.randn(32, 8), torch.randint(0, 3, (32,))) for _ in range(5)]
    >>> prospr.prune(net, batches, sparsity=0.9, method=prospr.Iterative(prospr.Snip(), rounds=10))
    Masks(2 layers, 33 of 330 kept, sparsity 0.9000)
    """

    score: Score
    rounds: int = 100
    schedule: Literal["exponential", "linear"] = "exponential"
    recover: bool = False
    redraw: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.score, Score):
            raise SettingError(f"Iterative(score={self.score!r}): use a prospr.Score, such as prospr.Snip()")
        if not isinstance(self.rounds, int) or self.rounds < 1:
            raise SettingError(f"Iterative(rounds={self.rounds!r}): use a whole number, 1 or more")
        if self.schedule not in ("exponential", "linear"):
            raise SettingError(f"Iterative(schedule={self.schedule!r}): use 'exponential' or 'linear'")

    def sparsities(self, sparsity: float) -> list[float]:
        """The sparsity after each round; the last is exactly the one asked for.

        >>> import prospr
        >>> [round(s, 3) for s in prospr.Iterative(prospr.Snip(), rounds=3).sparsities(0.999)]
        [0.9, 0.99, 0.999]
        """
        shares = [t / self.rounds for t in range(1, self.rounds)]
        density = 1 - sparsity
        before = [1 - density**t if self.schedule == "exponential" else sparsity * t for t in shares]
        return [*before, sparsity]

    def masks(self, problem: Problem, sparsity: float, kind: Kind) -> Masks:
        """Run all rounds, of weights or of channels. The model is not changed."""
        if self.rounds > 1 and not kind.in_rounds:
            raise SettingError(f"{kind}: this fixes the sparsity, so there are no rounds; use rounds=1")
        masks: Masks | None = None
        for t, target in enumerate(self.sparsities(sparsity)):
            if problem.batches is not None:
                problem.batches.next_round()
            drawn = reordered(problem.weights(), problem.seed + t) if self.redraw else problem.drawn
            now = replace(
                problem, masks=masks, recover=self.recover, seed=problem.seed + t, density=1 - target, drawn=drawn
            )
            try:
                scores = kind.score(self.score, now)
                with warnings.catch_warnings():
                    if t + 1 < self.rounds:  # what scores nothing now, and is kept, is scored again
                        warnings.simplefilter("ignore", ZeroScoreWarning)
                        warnings.simplefilter("ignore", InexactWarning)
                    masks = kind.select(scores, target, None if self.recover else masks)
            except BatchError as error:
                if masks is None:
                    raise
                raise BatchError(
                    f"round {t + 1} of {self.rounds}: {error}. An iterator is read once; pass a list or a loader, "
                    "which every round can read, or use a method of one round"
                ) from error
            except ScoreError as error:
                if masks is None:
                    raise
                empty = ", ".join(masks.empty()) or "no layer is empty"
                raise CollapseError(
                    f"round {t + 1} of {self.rounds}, at a sparsity of {masks.sparsity:.4f}: {error} ({empty}). The "
                    "network is cut: lower the sparsity, or pass keep_per_layer=1 or more"
                ) from error
        assert masks is not None
        return masks


def reordered(weights: Scores, seed: int) -> Scores:
    """The values of each weight in another order, drawn on the CPU so that every device has the same. Zeros stay."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, w in weights.items():
        values, there = w.flatten().clone(), torch.nonzero(w.flatten()).flatten()
        order = torch.randperm(len(there), generator=generator, device="cpu").to(w.device)
        values[there] = values[there[order]]
        found[name] = values.reshape(w.shape)
    return found
