"""PHEW: paths with higher edge weights, found by random walks through the network (Patil and Dovrolis, ICML 2021)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from prospr.errors import SettingError
from prospr.layers import inputs_first
from prospr.scores.base import Problem, Score, Scores
from prospr.tracing.labels import Labels
from prospr.tracing.trace import Trace, trace

__all__ = ["Phew"]

ONE = -1  # the label of a dimension of size 1


@dataclass(frozen=True)
class Phew(Score):
    """How early a weight is walked over: walks go from inputs to outputs and back, along a weight in proportion to |w|.

    Walks begin at an input channel and at an output by turns, and take all of them in turn. At a channel a walk takes
    one of the layers that read it next, or the connection that skips them, each as likely; then one of the layer's
    weights from this channel, in proportion to |w|. Weights that no walk has visited when `density` of all have been
    are ranked below the others, by |w|.

    density: how far to walk; by default as far as prospr.prune needs, or half of the weights for prospr.score.

    Looks at the shape of the data alone.

    >>> import torch, prospr
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 30), torch.nn.ReLU(), torch.nn.Linear(30, 3))
    >>> prospr.prune(net, [(torch.randn(4, 8), torch.zeros(4).long())], sparsity=0.9, method="phew")
    Masks(2 layers, 33 of 330 kept, sparsity 0.9000)
    """

    density: float | None = None

    def __post_init__(self) -> None:
        if self.density is not None and not 0 < self.density <= 1:
            raise SettingError(f"Phew(density={self.density!r}): use a number above 0, up to 1")

    def saliency(self, problem: Problem) -> Scores:
        call = problem.known_call("PHEW")
        network = _Network(problem, trace(problem.model, call))
        weights = problem.weights()
        total = sum(w.numel() for w in weights.values())
        density = next(d for d in (self.density, problem.density, 0.5) if d is not None)
        first = network.walk(max(1, round(density * total)), problem.seed)
        last = 1 + max((int(t[t < NEVER].max()) for t in first.values() if (t < NEVER).any()), default=0)
        largest = max(w.abs().max().item() for w in weights.values()) or 1.0
        scores = {}
        for name, w in weights.items():
            seen = (
                first[name].reshape(w.shape).to(w.device)
                if name in first
                else torch.full(w.shape, NEVER, device=w.device)
            )
            # From 2 down to 1 by the first visit; below 1 by size.
            scores[name] = torch.where(seen < NEVER, 2 - seen.double() / last, w.double().abs() / (2 * largest))
        return scores

    def rank(self, saliency: Scores) -> Scores:
        return saliency


NEVER = torch.iinfo(torch.int64).max


class _Edges:
    """The entries of a weight by the channel a walk comes from, so that one number picks one in proportion to |w|."""

    def __init__(self, size: Tensor, here: tuple[int, Tensor], there: tuple[int, Tensor], channels: int) -> None:
        dim, comes_from = here
        self._to_dim, self._to = there
        self._inner = math.prod(size.shape[self._to_dim + 1 :])
        order = comes_from.argsort(stable=True)
        self._entries = (
            torch.arange(size.numel(), device="cpu")
            .reshape(size.shape)
            .index_select(dim, order)
            .movedim(dim, 0)
            .flatten()
        )
        self._sums = size.index_select(dim, order).movedim(dim, 0).flatten().cumsum(0)
        ends = torch.cat(
            [self._sums.new_zeros(1), self._sums[size.numel() // len(order) - 1 :: size.numel() // len(order)]]
        )
        counts = torch.bincount(comes_from, minlength=channels)
        upto = counts.cumsum(0)
        self._low, self._high = ends[upto - counts], ends[upto]

    def step(self, channels: Tensor, chance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The entry each walk takes, the channel it comes to, and whether there was one to take."""
        low, high = self._low[channels], self._high[channels]
        place = torch.searchsorted(self._sums, low + chance * (high - low), right=True)
        taken = self._entries[place.clamp_max(len(self._sums) - 1)]
        return taken, self._to[taken // self._inner % len(self._to)], high > low


class _Layer:
    """One weight: for each of its entries a channel it reads and one it writes, by number."""

    def __init__(
        self, name: str, weight: Tensor, reads: tuple[int, Tensor], writes: tuple[int, Tensor], channels: int
    ) -> None:
        self.name = name
        self.count = weight.numel()
        size = weight.detach().abs().double().cpu()
        self.edges = {True: _Edges(size, reads, writes, channels), False: _Edges(size, writes, reads, channels)}
        self.reads, self.writes = set(reads[1].tolist()), set(writes[1].tolist())


class _Network:
    """Layers in the order in which they run, and where walks may go from one to the next."""

    def __init__(self, problem: Problem, found: Trace) -> None:
        masks = problem.masks or {}
        named = dict(problem.model.named_parameters())
        drawn = problem.drawn or {}
        owners = {id(p): module for module in problem.model.modules() for p in module._parameters.values()}
        used = [name for name in found.uses if named[name].dim() > 1]
        used = [name for name in used if not isinstance(owners[id(named[name])], nn.Embedding)]
        ends = {name: _ends(name, named[name], owners[id(named[name])], found) for name in used}
        roots = sorted({root for pair in ends.values() for _, channels in pair for root in channels})
        number = {root: i for i, root in enumerate(roots)}
        once: dict[str, _Layer] = {}
        for name, pair in ends.items():
            w = drawn.get(name, named[name])
            w = w * masks[name].to(w.device) if name in masks else w
            reads, writes = (
                (dim, torch.tensor([number[root] for root in channels], device="cpu")) for dim, channels in pair
            )
            once[name] = _Layer(name, w, reads, writes, len(roots))
        self.layers = [once[name] for name in used]
        self.names = [name for name in problem.names if name in once]
        # Inputs are channels that no layer before has written, outputs those that no layer after reads.
        starts, finish = [], []
        for k, layer in enumerate(self.layers):
            written = set().union(*(earlier.writes for earlier in self.layers[:k]))
            read = set().union(*(later.reads for later in self.layers[k + 1 :]))
            starts += [(k, c) for c in sorted(layer.reads - written)]
            finish += [(k, c) for c in sorted(layer.writes - read)]
        self._begin = {True: torch.tensor(starts, device="cpu"), False: torch.tensor(finish, device="cpu")}
        self._next = {(forward, k): self._onward(forward, k) for forward in (True, False) for k in range(len(used))}

    def walk(self, wanted: int, seed: int) -> dict[str, Tensor]:
        """Walk until `wanted` weights have been visited: for each, the number of the step that first did."""
        first = {layer.name: torch.full((layer.count,), NEVER, device="cpu") for layer in self.layers}
        generator = torch.Generator().manual_seed(seed)
        start, seen, idle = 0, 0, 0
        while seen < wanted and idle < 20:
            many = min(1 << 18, max(4096, (wanted - seen) // len(self.layers)))
            for forward in (True, False):
                self._walks(forward, many, start, first, generator)
            start += many
            now = sum(int((first[name] < NEVER).sum()) for name in self.names)
            idle = idle + 1 if now - seen <= 1e-5 * wanted else 0  # what is left is hardly ever reached
            seen = now
        return first

    def _walks(
        self, forward: bool, many: int, start: int, first: dict[str, Tensor], generator: torch.Generator
    ) -> None:
        """`many` walks at once, layer by layer; steps are numbered as if one walk came after the other, by turns."""
        walks = start + torch.arange(many, device="cpu")
        at, channel = self._begin[forward][walks % len(self._begin[forward])].T.contiguous()
        for turn in range(len(self.layers)):
            k = turn if forward else len(self.layers) - 1 - turn
            here = torch.nonzero(at == k).flatten()
            if not len(here):
                continue
            layer = self.layers[k]
            chance, again = torch.rand(2, len(here), generator=generator, dtype=torch.float64, device="cpu")
            taken, channel[here], went = layer.edges[forward].step(channel[here], chance)
            step = (2 * walks[here] + (not forward)) * len(self.layers) + turn
            first[layer.name].scatter_reduce_(0, taken[went], step[went], "amin")
            at[here] = torch.where(went, self._after(forward, k, channel[here], again), -1)

    def _after(self, forward: bool, k: int, channels: Tensor, chance: Tensor) -> Tensor:
        """The layer each walk takes next; -1 where it ends."""
        only, several = self._next[forward, k]
        after = only[channels]
        for channel in channels[after == SEVERAL].unique().tolist():
            here = channels == channel
            after[here] = _pick(several[channel], chance[here])
        return after

    def _onward(self, forward: bool, k: int) -> tuple[Tensor, dict[int, list[list[int]]]]:
        """For each channel the one layer that comes after layer k, or SEVERAL and which."""
        layer = self.layers[k]
        only = torch.full((int(self.layers[0].edges[True]._low.numel()),), -1, device="cpu")
        several = {}
        for channel in layer.writes if forward else layer.reads:
            runs = self._runs(forward, k, channel)
            if [len(run) for run in runs] == [1]:
                only[channel] = runs[0][0]
            elif runs:
                only[channel] = SEVERAL
                several[channel] = runs
        return only, several

    def _runs(self, forward: bool, k: int, channel: int) -> list[list[int]]:
        """Layers that read the channel after layer k (or wrote it before), in runs between which it is added to."""
        runs: list[list[int]] = [[]]
        for j in range(k + 1, len(self.layers)) if forward else range(k - 1, -1, -1):
            layer = self.layers[j]
            takes, ends = (layer.reads, layer.writes) if forward else (layer.writes, layer.reads)
            if channel in takes:
                runs[-1].append(j)
            if channel in ends and runs[-1]:
                runs.append([])
        return [run for run in runs if run]


SEVERAL = -2


def _pick(runs: list[list[int]], chance: Tensor) -> Tensor:
    """One layer of the first run, or, as likely as any of them, what comes behind it."""
    picked = torch.full(chance.shape, -1, device="cpu")
    for i, run in enumerate(runs):
        options = len(run) + (i + 1 < len(runs))
        place = (chance * options).long().clamp_max(options - 1)
        table = torch.tensor([*run, -1], device="cpu")
        picked = torch.where(picked < 0, table[place], picked)
        chance = chance * options - place
    return picked


def _ends(name: str, p: nn.Parameter, module: nn.Module, found: Trace) -> tuple[tuple[int, Labels], tuple[int, Labels]]:
    """(dimension, channels) that a weight reads, and that it writes."""
    rows, columns = (
        found.forest.roots(found.axes[name, d]) if (name, d) in found.axes else [ONE] * p.shape[d] for d in (0, 1)
    )
    conv = module if isinstance(module, nn.modules.conv._ConvNd) else None
    if conv is not None and conv.groups > 1 and conv.groups >= min(conv.in_channels, conv.out_channels) // conv.groups:
        return (0, rows), (0, rows)  # a whole group is one channel
    if inputs_first(module) or (conv is not None and conv.transposed):
        return (0, rows), (1, columns)
    return (1, columns), (0, rows)
