"""The size of the weight itself."""

from dataclasses import dataclass

from prospr.scores.base import Problem, Score, Scores

__all__ = ["Magnitude"]


@dataclass(frozen=True)
class Magnitude(Score):
    """|w|; looks at no data."""

    def saliency(self, problem: Problem) -> Scores:
        return problem.weights()
