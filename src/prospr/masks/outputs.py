"""Every output of a network and every entry of an embedding keeps its part of the layer: none goes for being rare.

What only some samples use scores in proportion to how many do. A token that hardly occurs in a few batches has small
scores in its whole row, of the layer that predicts it and of the embedding that reads it, and would keep nothing, while
frequent ones keep all. So the totals of rows are brought within a factor of an even part before weights are compared.
Classes of about equal numbers are nearly always within it, and then their scores stay as they are, to the bit.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from prospr.layers import embeddings
from prospr.meta.loss import Call, one_sample
from prospr.tracing.trace import FAILURES, Trace, trace

__all__ = ["LEAST", "MOST", "Rows", "entries", "evened", "outputs"]

LEAST, MOST = 1 / 16, 4.0  # how many times an even part a row's total is

Rows = Mapping[str, int]  # weight -> the dimension that is outputs or entries


def entries(model: nn.Module, names: Sequence[str]) -> Rows:
    """The weights that some embedding looks up.

    >>> entries(nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5)), ["0.weight", "1.weight"])
    {'0.weight': 0}
    """
    looked_up = embeddings(model)
    return {name: 0 for name in names if id(model.get_parameter(name)) in looked_up}


def outputs(model: nn.Module, call: Call, names: Sequence[str]) -> Rows:
    """The weights that make what the network returns, found by running it; not what it returns and reads itself.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.LogSoftmax(1))
    >>> outputs(model, ((torch.zeros(1, 4),), {}), ["0.weight", "2.weight"])
    {'2.weight': 0}
    """
    try:
        seen = trace(model, one_sample(call))
    except FAILURES:  # some models cannot take one sample of a batch
        seen = trace(model, call)
    matrices = {name for name, p in model.named_parameters() if p.dim() > 1}
    axes = {axis: (_made(seen, labels), seen.forest.roots(labels)) for axis, labels in seen.axes.items()}
    read = {root for (name, _), (made, roots) in axes.items() if name in matrices and not made for root in roots}
    last = set(seen.forest.roots(seen.outputs)) - read
    return {
        name: dim
        for (name, dim), (made, roots) in axes.items()
        if name in names and name in matrices and made and last.issuperset(roots)
    }


def _made(seen: Trace, labels: Sequence[int]) -> bool:
    """Whether a layer makes these channels, and does not read them alone."""
    return not seen.written.isdisjoint(labels)


def evened(scores: Mapping[str, Tensor], rows: Rows) -> dict[str, Tensor]:
    """The scores, with the totals of such rows brought within a factor of an even part; a row of zeros stays.

    >>> scores = torch.tensor([[75.0, 25.0], [3.0, 1.0], [4.0, 0.0], [2.0, 2.0], [2.0, 2.0], [1.0, 3.0], [0.0, 0.0]])
    >>> evened({"w": scores}, {"w": 0})["w"].sum(1)                  # 10 is an even part of 40 and five fours
    tensor([40.,  4.,  4.,  4.,  4.,  4.,  0.])
    """
    return {name: _evened(s, rows[name]) if name in rows else s for name, s in scores.items()}


def _evened(s: Tensor, dim: int) -> Tensor:
    totals = s.movedim(dim, 0).abs().flatten(1).sum(1, dtype=torch.float64).cpu()
    wanted = _within(totals)
    if torch.equal(wanted, totals):
        return s
    s = s.to(torch.promote_types(s.dtype, torch.float32))  # half precision has too few numbers for a common row
    factors = torch.where(totals > 0, wanted / totals, 1.0).to(s.device, s.dtype)
    return s * factors.reshape([-1 if d == dim else 1 for d in range(s.dim())])


def _within(totals: Tensor) -> Tensor:
    """These totals, none above MOST or below LEAST times an even part, which is the mean of what comes out."""
    there = totals[totals > 0]
    if not len(there):
        return totals
    even, low, high = there.mean(), there.min(), there.max()
    if low < even * LEAST or high > even * MOST:
        for _ in range(60):  # halves what is between: the higher `even` is, the less of it is the mean of what is cut
            even = (low * high).sqrt()
            below = there.clamp(even * LEAST, even * MOST).mean() > even
            low, high = (even, high) if below else (low, even)
    return torch.where(totals > 0, totals.clamp(even * LEAST, even * MOST), totals)
