"""The size of the weight itself."""

from dataclasses import dataclass

from prospr.scores.base import Problem, Score, Scores

__all__ = ["Magnitude"]


@dataclass(frozen=True)
class Magnitude(Score):
    """|w|, of a channel the sum of them; looks at no data."""

    def saliency(self, problem: Problem) -> Scores:
        return {name: w.abs() for name, w in problem.weights().items()}
