"""No opinion: the baseline every score must beat."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from prospr.scores.base import Problem, Score, Scores

__all__ = ["Random"]


@dataclass(frozen=True)
class Random(Score):
    """Uniform noise, drawn on the CPU from the seed alone: the same on every device."""

    def saliency(self, problem: Problem) -> Scores:
        shapes = {name: problem.shape(name) for name in problem.names}
        weights = problem.weights()
        return {name: problem.own(name, t).to(weights[name].device) for name, t in _noise(shapes, problem.seed)}

    def score_groups(self, problem: Problem, total: Callable[[Scores], Scores]) -> Scores:
        sums = total(problem.weights())  # a sum of noise would be a measure of size
        shapes = {name: t.shape for name, t in sums.items()}
        return self.rank({name: t.to(sums[name].device) for name, t in _noise(shapes, problem.seed)})


def _noise(shapes: Mapping[str, torch.Size], seed: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        yield name, torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
