"""No opinion: the baseline every score must beat."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from prospr.scores.base import Problem, Score, Scores

__all__ = ["Random"]


@dataclass(frozen=True)
class Random(Score):
    """Uniform noise, drawn on the CPU from the seed alone: the same on every device."""

    def saliency(self, problem: Problem) -> Scores:
        return _noise(problem.weights(), problem.seed)

    def score_groups(self, problem: Problem, total: Callable[[Scores], Scores]) -> Scores:
        return self.rank(_noise(total(problem.weights()), problem.seed))  # a sum of noise would be a measure of size


def _noise(like: Scores, seed: int) -> Scores:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(t.shape, generator=generator, dtype=torch.float32).to(t.device) for name, t in like.items()
    }
