"""GraSP: keep the flow of the gradient (Wang et al., ICLR 2020)."""

import itertools
from dataclasses import dataclass

import torch

from prospr.errors import BatchError, SettingError
from prospr.meta.loss import training_mode
from prospr.meta.products import Mode, Products
from prospr.scores.base import Problem, Score, Scores, Tempered

__all__ = ["Grasp"]


@dataclass(frozen=True)
class Grasp(Score):
    """w (H g): by how much, to first order, removing the weight lowers the squared norm of the gradient; equation 8.

    The paper removes the *highest* of -w (H g); here the larger score is kept, so the sign is turned. It is not an
    absolute value: weights whose removal would raise the gradient norm go first.

    temperature: the model's outputs are divided by it (200, as in the paper's code).
    batches: g and H are means over so many batches (GraSP-MB for more than one).

    >>> import torch, prospr
    >>> batch = torch.randn(30, 5), torch.arange(30) % 3                # ten a class
    >>> scores = prospr.score(torch.nn.Linear(5, 3), [batch], method=prospr.Grasp())
    >>> bool((scores["weight"] < 0).any())                              # signed
    True
    """

    temperature: float = 200.0
    batches: int = 1
    mode: Mode = "auto"
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise SettingError(f"Grasp(temperature={self.temperature!r}): use a positive number")
        if not isinstance(self.batches, int) or self.batches < 1:
            raise SettingError(f"Grasp(batches={self.batches!r}): use a whole number, 1 or more")

    def saliency(self, problem: Problem) -> Scores:
        data = list(itertools.islice(problem.data(), self.batches))
        if len(data) < self.batches:
            raise BatchError(f"batches holds {len(data)}, and Grasp(batches={self.batches}) reads {self.batches}")
        loss = problem.pure_loss(Tempered(problem.loss, self.temperature))
        params = problem.start(loss)
        with training_mode(problem.model):
            products = Products(
                loss, mode=self.mode, micro_batch=self.micro_batch, seed=problem.seed, team=problem.team
            )
            g = _mean([products.gradient(params, batch, i)[1] for i, batch in enumerate(data)])
            h = _mean([products.hvp(params, batch, g, i) for i, batch in enumerate(data)])
        weights = problem.weights()
        return {name: weights[name] * h[name] for name in problem.names}

    def rank(self, saliency: Scores) -> Scores:
        return saliency


def _mean(parts: list[Scores]) -> Scores:
    return {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}
