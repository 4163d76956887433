"""No opinion: the baseline every score must beat."""

from dataclasses import dataclass

import torch

from prospr.scores.base import Problem, Score, Scores

__all__ = ["Random"]


@dataclass(frozen=True)
class Random(Score):
    """Uniform noise, drawn on the CPU from the seed alone: the same on every device."""

    def saliency(self, problem: Problem) -> Scores:
        generator = torch.Generator().manual_seed(problem.seed)
        return {
            name: torch.rand(w.shape, generator=generator, dtype=torch.float32).to(w.device)
            for name, w in problem.weights().items()
        }
