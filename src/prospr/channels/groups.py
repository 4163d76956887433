"""Groups: the channels of a network that must go together, what they are worth and what they cost."""

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from prospr.channels.budget import Scope, choose
from prospr.channels.costs import Costs, Unit
from prospr.channels.size import Size
from prospr.channels.trial import without_masks, works
from prospr.errors import KeptWholeWarning, MaskError, ModelError, ScoreError
from prospr.layers import inputs_first
from prospr.masks.masks import Masks
from prospr.meta.loss import Call, call_of, one_sample, unwrap
from prospr.tracing.trace import FAILURES, OUTPUT, Choices, Term, Trace, trace

__all__ = ["Groups", "find_groups", "groups"]

Axis = tuple[str, int]
_LAYERS = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)


def groups(model: nn.Module, example: Any, *, verify: bool = True) -> "Groups":
    """Find which channels of `model` must go together, by running it on one sample of `example`.

    example: an input, a tuple of arguments or a dict of keyword arguments.
    verify: try it: the network without every other channel, of random weights in float64, must give the same numbers
        as with those channels masked. Channels for which it does not (a size written in forward) are kept whole.

    Channels that cannot go are kept whole; layers whose outputs are, other than the network's own, are named in a
    KeptWholeWarning with the reason. The model is not changed.

    >>> import torch, prospr
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    >>> found = prospr.channels.groups(net, torch.zeros(1, 8))
    >>> print(found)
    channels   go together
    0.weight   4 of 0.weight[0], 0.bias[0], 2.weight[1]
    """
    with torch.inference_mode(False):
        found = find_groups(model, call_of(example), verify)
    found.warn(stacklevel=3)
    return found


class Groups:
    """See `prospr.channels.groups`.

    sets: {name: group numbers}; the channels of a set are interchangeable, and it is named by the first layer's weight
        that makes them.
    axes: {(parameter or buffer, dimension): the group of each index}, -1 where a channel stays.
    kept_whole: {parameter: why its output channels cannot go}.
    """

    def __init__(
        self, model: nn.Module, found: Trace, frozen: Mapping[str, str], only: Sequence[str] | None = None
    ) -> None:
        self.parameters = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.read = {
            axis for axis, labels in found.axes.items() if axis[0] in self.parameters and not _written(found, labels)
        }
        self.tensors = {name for name, _ in found.axes}
        buffered = [
            labels
            for axis, labels in found.axes.items()
            if axis[0] not in self.parameters and not _written(found, labels)
        ]
        self.sets: dict[str, list[int]] = {}
        number: dict[int, int] = {}  # root of a class of labels -> group
        refused: dict[int, str] = {}
        for name, kind, roots in _named_kinds(found, self):
            why = frozen.get(name) or _not_allowed(model, kind, only) or _all_tied(found, kind)
            if why is None:
                self.sets[name] = list(range(len(number), len(number) + len(roots)))
                number.update(zip(roots, self.sets[name], strict=True))
            else:
                refused.update(dict.fromkeys(roots, why))
        self.count = len(number)
        self.in_training = found.in_training
        to_group = lambda labels: [number.get(root, -1) for root in found.forest.roots(labels)]  # noqa: E731
        self.axes = {axis: to_group(labels) for axis, labels in found.axes.items()}
        self.coupled = {name for (name, _), ids in self.axes.items() if max(ids, default=-1) >= 0}
        self.attributes = [(a, to_group(a.labels)) for a in found.attributes]
        # Channels that meet in a product of two results (queries and keys), or a buffer, are read by more than weights.
        products = [first for first, second in found.summed if _written(found, first) and _written(found, second)]
        self._products = {group for labels in (*products, *buffered) for group in to_group(labels)} - {-1}
        self._terms = _terms(model, self, [_numbered(term, to_group) for term in found.flops])
        self.kept_whole = _kept_whole(self, found, refused)

    def __len__(self) -> int:
        return self.count

    def in_conflict(self) -> dict[str, str]:
        """{set: why}: a module that several sets pass through has one number for the count of all their channels."""
        passed: dict[tuple[str, str, int | None], list[list[int]]] = {}
        for attribute, ids in self.attributes:
            lines = passed.setdefault((attribute.module, attribute.name, attribute.position), [])
            if ids not in lines:
                lines.append(ids)
        several = {place: {g for ids in lines for g in ids} for place, lines in passed.items() if len(lines) > 1}
        return {
            name: f"{module} is used for several sets of channels, and has one {attribute}"
            for (module, attribute, _), groups in several.items()
            for name, ids in self.sets.items()
            if groups & set(ids)
        }

    def costs(self) -> Costs:
        """The costs of the whole network, to count down."""
        return Costs(self._terms, self.count)

    def size(self, masks: Mapping[str, Tensor] | None = None) -> Size:
        """The size of the network, or of what `masks` leaves of it; FLOPs are of one sample."""
        costs = self.costs()
        if masks is not None:
            costs.remove(list(self.removed(masks)))
        return Size(**costs.now)

    def sum(self, saliency: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Signed numbers a weight, summed over every tensor of a group: the derivative of the group's one mask entry.

        A weight between two channels of one group counts twice, as it does in that derivative.
        """
        device = next(iter(saliency.values())).device
        total = torch.zeros(self.count, dtype=torch.float64, device=device)
        for (name, dim), ids in self.axes.items():
            if name not in saliency or max(ids, default=-1) < 0:
                continue
            s = saliency[name]
            line = s.double().movedim(dim, 0).flatten(1).sum(1) if s.dim() > 1 else s.double()
            where = torch.tensor(ids, device=device)
            total.index_add_(0, where[where >= 0], line.to(device)[where >= 0])
        return {name: total[torch.tensor(ids, device=device)] for name, ids in self.sets.items()}

    def select(
        self,
        scores: Mapping[str, Tensor],
        sparsity: float,
        *,
        budget: Unit = "parameters",
        round_to: int = 1,
        per_flop: bool = False,
        scope: Scope = "global",
        keep_per_layer: int = 1,
        among: Mapping[str, Tensor] | None = None,
    ) -> Masks:
        """Remove the channels of lowest score until the network that is left meets the budget.

        budget: what `sparsity` is a share of: "parameters", "channels" (outputs of layers) or "flops".
        round_to: the channels kept of a set are a multiple of this, or all.
        per_flop: compare scores divided by the FLOPs that removing the channel alone would save, as 3SP can.
        scope: "global"; "layer": the same share of every set; "balanced": scores are shares of their set's total, for
            each weight that the set's channels are in, so that layers come out about equally wide.
        keep_per_layer: so many channels stay in every dimension.
        among: masks of an earlier round; what they removed stays removed.
        """
        self.require()
        if list(scores) != list(self.sets):
            raise ScoreError(
                f"scores are for {', '.join(scores) or 'nothing'}, and the sets here are {', '.join(self.sets)}"
            )
        for name, ids in self.sets.items():
            if scores[name].shape != (len(ids),):
                raise ScoreError(
                    f"{name}: scores of shape {tuple(scores[name].shape)} for {len(ids)} channels; one each is needed"
                )
        gone = list(self.removed(among)) if among is not None else []
        costs, places = self.costs(), self._places()
        removed = choose(
            costs, self.sets, scores, sparsity, budget, round_to, per_flop, scope, keep_per_layer, places, gone
        )
        return self.masks(removed).to(next(iter(scores.values())).device)

    def _places(self) -> dict[str, int]:
        """In how many weights the channels of each set are, as outputs or inputs; some are in norms alone."""
        inside = Counter(
            group
            for (name, _), ids in self.axes.items()
            if len(self.parameters.get(name, ())) > 1
            for group in set(ids)
        )
        return {name: max(1, inside[ids[0]]) for name, ids in self.sets.items()}

    def masks(self, removed: set[int]) -> Masks:
        """Masks of every parameter that has a channel which could go."""
        masks = {}
        for name, shape in self.parameters.items():
            if name not in self.coupled:
                continue
            dims = {d: self.axes[name, d] for d in range(len(shape)) if (name, d) in self.axes}
            mask = torch.ones(shape, dtype=torch.bool, device="cpu")
            for d, ids in dims.items():
                stays = torch.tensor([g not in removed for g in ids], device="cpu")
                mask &= stays.reshape([-1 if e == d else 1 for e in range(len(shape))])
            masks[name] = mask
        return Masks(masks)

    def removed(self, masks: Mapping[str, Tensor]) -> set[int]:
        """Which groups `masks` remove: those that nothing reads, because every weight that would is masked.

        This is exact for any masks, whatever lies between a channel and its readers. Channels that no weight reads, or
        not weights alone (queries and keys meet in a product), go where all that belongs to them is masked. Of a layer
        that is masked whole one channel stays.
        """
        costs, removed = self.costs(), set()
        for g, unused in enumerate(self._unused(masks)):
            if unused and costs.fits([g], 1):
                costs.remove([g])
                removed.add(g)
        return removed

    def _unused(self, masks: Mapping[str, Tensor]) -> list[bool]:
        for name, mask in masks.items():
            if name not in self.parameters or self.parameters[name] != tuple(mask.shape):
                raise MaskError(
                    f"{name}: a mask of shape {tuple(mask.shape)}, and the network "
                    + (f"has {self.parameters[name]}" if name in self.parameters else "has no such parameter")
                )
        left = {
            name: masks[name].detach().cpu().clone()
            if name in masks
            else torch.ones(shape, dtype=torch.bool, device="cpu")
            for name, shape in self.parameters.items()
            if name in self.coupled
        }
        by_weights = {g for axis in self.read for g in self.axes[axis]} - self._products
        gone: list[bool] = []
        while True:
            used = [False] * self.count
            for (name, dim), ids in self.axes.items():
                if name not in left:
                    continue
                some = left[name].movedim(dim, 0).reshape(len(ids), -1).any(1).tolist()
                for g, kept in zip(ids, some, strict=True):
                    if g >= 0 and kept and ((name, dim) in self.read or g not in by_weights):
                        used[g] = True
            now = [not use for use in used]
            if now == gone:
                return gone
            gone = now
            # A channel that goes no longer reads its own inputs.
            for (name, dim), ids in self.axes.items():
                if name in left and any(g >= 0 and gone[g] for g in ids):
                    stays = torch.tensor([g < 0 or not gone[g] for g in ids], device="cpu")
                    left[name] &= stays.reshape([-1 if e == dim else 1 for e in range(left[name].dim())])

    def require(self) -> None:
        """An error where there is nothing to choose from."""
        if not self.count:
            raise ModelError(f"no channel of this network can go: {self._reasons() or 'it has one layer'}")

    def warn(self, stacklevel: int = 4) -> None:
        if self.kept_whole:
            warnings.warn(f"kept whole: {self._reasons()}", KeptWholeWarning, stacklevel=stacklevel)

    def _reasons(self) -> str:
        shown = [f"{name} ({why})" for name, why in list(self.kept_whole.items())[:6]]
        return ", ".join(shown) + (f" and {len(self.kept_whole) - 6} more" if len(self.kept_whole) > 6 else "")

    def __str__(self) -> str:
        rows = [("channels", "go together")]
        for name, ids in self.sets.items():
            where = [f"{n}[{d}]" for (n, d), of in self.axes.items() if ids[0] in of and n in self.parameters]
            more = f" and {len(where) - 6} more" if len(where) > 6 else ""
            rows.append((name, f"{len(ids)} of {', '.join(where[:6])}{more}"))
        rows += [(name, f"kept whole: {why}") for name, why in self.kept_whole.items()]
        width = max(len(row[0]) for row in rows)
        return "\n".join(f"{left.ljust(width)}  {right}".rstrip() for left, right in rows)


def _written(found: Trace, labels: Sequence[int]) -> bool:
    return not found.written.isdisjoint(labels)


def _named_kinds(found: Trace, groups: Groups) -> Iterator[tuple[str, list[Axis], list[int]]]:
    """Channels that have the same places, as (name, places, roots); named by the first weight that makes them."""
    members: dict[int, Counter[Axis]] = {}
    for axis, labels in found.axes.items():
        for root in found.forest.roots(labels):
            if found.forest.why_fixed(root) is None:
                members.setdefault(root, Counter())[axis] += 1
    kinds: dict[tuple[tuple[Axis, int], ...], list[int]] = {}
    for root, places in members.items():
        if any(name in groups.parameters for name, _ in places):
            kinds.setdefault(tuple(places.items()), []).append(root)
    taken: set[str] = set()
    for kind, roots in kinds.items():
        axes = [axis for axis, _ in kind]
        makers = [n for n, d in axes if (n, d) not in groups.read and len(groups.parameters.get(n, ())) > 1]
        first = (makers or [axes[0][0]])[0]
        others = (f"{first} ({k})" for k in itertools.count(2))
        name = first if first not in taken else next(other for other in others if other not in taken)
        taken.add(name)
        yield name, axes, roots


def _all_tied(found: Trace, axes: Sequence[Axis]) -> str | None:
    alone = any(len(set(found.forest.roots(found.axes[axis]))) == 1 for axis in axes)
    return "all its channels are tied to one another" if alone else None


def _not_allowed(model: nn.Module, axes: Sequence[Axis], only: Sequence[str] | None) -> str | None:
    named = dict(model.named_parameters())
    for name, _ in axes:
        if name in named and named[name].dim() > 1:
            if only is not None and name not in only:
                return f"{name} is not among prunable="
            if not named[name].requires_grad:
                return f"{name} is frozen"
    return None


def _numbered(term: Term, to_group: Callable[[Any], list[int]]) -> Term:
    return Term(term.factor, tuple(tuple(to_group(line)) for line in term.dims))


def _terms(model: nn.Module, found: Groups, flops: list[Term]) -> dict[Unit, list[Term]]:
    parameters, channels = {}, []
    for name, shape in found.parameters.items():
        lines = {d: tuple(found.axes[name, d]) for d in range(len(shape)) if (name, d) in found.axes}
        factor = math.prod(n for d, n in enumerate(shape) if d not in lines)
        parameters[name] = Term(factor, tuple(lines.values()))
    names = {id(p): name for name, p in model.named_parameters()}
    for layer in model.modules():
        if isinstance(layer, _LAYERS) or inputs_first(layer):
            for key, p in layer._parameters.items():
                if p is not None and p.dim() > 1 and not key.startswith("bias") and id(p) in names:
                    channels.append(_outputs(layer, names.pop(id(p)), p, found))  # a weight that is shared once
    return {"parameters": list(parameters.values()), "channels": channels, "flops": flops}


def _outputs(layer: nn.Module, name: str, weight: Tensor, found: Groups) -> Term:
    """How many channels a layer makes."""
    rows, columns = (found.axes.get((name, d)) for d in (0, 1))
    if inputs_first(layer):
        return Term(1, (tuple(columns),)) if columns is not None else Term(1, ())
    if not getattr(layer, "transposed", False):
        return Term(1, (tuple(rows),)) if rows is not None else Term(1, ())
    assert isinstance(layer, nn.modules.conv._ConvNd)
    inputs, outputs = len(weight) // layer.groups, weight.shape[1]
    if layer.groups > 1 and layer.groups >= min(inputs, outputs):  # groups go whole
        return Term(outputs, (tuple(rows[::inputs]),)) if rows is not None else Term(outputs, ())
    return Term(layer.groups, (tuple(columns),)) if columns is not None else Term(layer.groups, ())


def _kept_whole(found: Groups, seen: Trace, refused: Mapping[int, str]) -> dict[str, str]:
    """Layers of which some output channel cannot go, and the reason; those of the network's own output must not."""
    kept = {}
    for (name, dim), labels in seen.axes.items():
        if len(found.parameters.get(name, ())) < 2 or (name, dim) in found.read or name in kept or dim > 1:
            continue
        reasons = [seen.forest.why_fixed(root) or refused.get(root) for root in seen.forest.roots(labels)]
        told = [why for why in reasons if why not in (None, OUTPUT)]
        if told:
            kept[name] = told[0] if None not in reasons else f"{len(told)} of {len(reasons)} channels: {told[0]}"
    return kept


def find_groups(model: nn.Module, call: Call, verify: bool = True, only: Sequence[str] | None = None) -> Groups:
    """`groups` without the warning."""
    model = without_masks(unwrap(model))
    try:
        first = trace(model, one_sample(call))
    except FAILURES:  # some models cannot take one sample of a batch
        first = trace(model, call)
    else:
        call = one_sample(call)
    frozen: dict[str, str] = {}
    found = Groups(model, first, frozen, only)
    if conflicts := found.in_conflict():
        frozen.update(conflicts)
        found = Groups(model, first, frozen, only)
    if not verify:
        return found
    while True:
        why = works(model, call, found, list(found.sets))
        if why is None:
            break
        bad = {name: reason for name in found.sets if (reason := works(model, call, found, [name]))}
        if not bad:  # each alone, but not all together: add them one by one
            good: list[str] = []
            for name in found.sets:
                reason = works(model, call, found, [*good, name])
                if reason is None:
                    good.append(name)
                else:
                    bad[name] = reason
        frozen.update(bad)
        found = Groups(model, first, frozen, only)
    return _choose_splits(model, call, first, found, frozen, only)


def _choose_splits(
    model: nn.Module, call: Call, seen: Trace, found: Groups, frozen: dict[str, str], only: Sequence[str] | None
) -> Groups:
    """Reshapes that split channels (attention heads): find which part may lose channels, by trying."""
    choices: Choices = {}
    for sizes in dict.fromkeys(seen.splits.values()):
        for part in range(len(sizes)):
            tried = {**choices, **{number: part for number, s in seen.splits.items() if s == sizes}}
            candidate = Groups(model, trace(model, call, tried), frozen, only)
            fresh = [name for name in candidate.sets if name not in found.sets]
            if fresh and works(model, call, candidate, fresh) is None and set(found.sets) <= set(candidate.sets):
                found, choices = candidate, tried
                break
    return found
