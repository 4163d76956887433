"""Follows channels through a network: one run of it, with every operation telling which indices stay the same channel.

The network is run as it is, on one sample, and the operations PyTorch dispatches are watched. So what couples channels
is found from what the network does, not from the names or classes of its layers; whatever an operation does that has no
rule in `rules.py` only fixes the channels it meets.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from prospr.meta.batches import map_tensors, tensors
from prospr.meta.loss import Call, PureLoss, devices_of, evaluation_mode, replay, replay_python
from prospr.tracing.labels import Forest, Labels

__all__ = ["FAILURES", "INPUT", "OUTPUT", "Attribute", "Choices", "Dims", "Term", "Trace", "pretend_training", "trace"]

FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError)

Dims = list[Labels | None]  # one entry a dimension; None: its size is fixed
Choices = dict[int, int]  # which dimension of a reshape keeps channels of their own, by the reshape's number

INPUT = "tied to the network's input, or to a tensor of fixed size"
OUTPUT = "the network's output"


@dataclass(frozen=True)
class Attribute:
    """A number a module keeps (groups, padding) that is the count of some labels."""

    module: str
    name: str
    labels: Labels
    position: int | None = None  # in a tuple


@dataclass(frozen=True)
class Term:
    """A cost: `factor` times the number of channels in each of `dims`."""

    factor: int
    dims: tuple[tuple[int, ...], ...]


@dataclass
class Trace:
    """What one run showed."""

    forest: Forest
    axes: dict[tuple[str, int], Labels]  # (parameter or buffer, dimension) -> a label for each index
    attributes: list[Attribute] = field(default_factory=list)
    flops: list[Term] = field(default_factory=list)
    uses: list[str] = field(default_factory=list)  # parameters in the order in which operations take them
    written: set[int] = field(default_factory=set)  # labels that are channels of some result, not only read by it
    summed: list[tuple[Labels, Labels]] = field(default_factory=list)  # the two dimensions of every contraction
    outputs: Labels = field(default_factory=list)  # of all dimensions of what the network returned
    in_training: bool = False  # whether the model does something else in train mode
    splits: dict[int, tuple[int, ...]] = field(default_factory=dict)  # sizes of the reshapes that must be chosen for


def pretend_training(model: nn.Module) -> None:
    """Train mode for the model's own code, which may have branches for it; its layers stay in eval mode."""
    for module in model.modules():
        module.training = not type(module).__module__.startswith("torch.nn")


def trace(model: nn.Module, call: Call, choices: Choices | None = None) -> Trace:
    """Run `model` in eval mode on `call` and follow its channels. The model and the random state are not changed."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    call = map_tensors(call, lambda t: t.contiguous() if t.layout == torch.strided else t)
    args, kwargs = call
    with ExitStack() as stack:
        stack.enter_context(replay(0, devices_of(model.parameters())))
        stack.enter_context(evaluation_mode(model))
        stack.enter_context(torch.no_grad())
        stack.enter_context(replay_python(0))
        # Copies, since a forward pass may write to parameters and buffers; laid out as rules know them.
        plain = {
            name: nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format), p.requires_grad)
            for name, p in model.named_parameters()
        }
        stack.enter_context(PureLoss(model).swapped(plain))
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        torch.backends.mha.set_fastpath_enabled(False)  # one operation for a whole layer, which tells nothing
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        watch = Watch(held, choices or {})
        for argument in tensors(call):
            watch.know(argument, [None] * argument.dim())
        for path, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(watch.entering(path, module), prepend=True).remove)
            stack.callback(module.register_forward_hook(watch.leaving, always_call=True).remove)
        stack.enter_context(watch)
        outputs = [model(*args, **kwargs)]
        with suppress(*FAILURES):  # such as a model that wants targets, too
            outputs.append(watch.in_training(model, call))
    for tensor in tensors(outputs):
        for labels in watch.dims(tensor):
            watch.forest.fix(labels or (), OUTPUT, instead_of=INPUT)
            watch.found.outputs += labels or ()
    for name, tensor in held.items():
        if id(tensor) not in watch.used:
            for labels in watch.dims(tensor):
                watch.fix(labels, f"{name} is not used")
                watch.write(labels)  # so that it is told of
    return watch.found


class Watch(TorchDispatchMode):
    """Sees every operation; rules ask it for the labels of a tensor and tell it those of another."""

    def __init__(self, held: Mapping[str, Tensor], choices: Choices) -> None:
        """held: parameters and buffers, by name."""
        super().__init__()
        self.forest = Forest()
        self.found = Trace(self.forest, {})
        self.choices = choices
        self._known: dict[int, tuple[Tensor, Dims]] = {}  # holds the tensors too: an id must not be used again
        self._names: dict[int, str] = {}
        for name, tensor in held.items():
            dims: Dims = [self.forest.new(n) if n > 1 else None for n in tensor.shape]
            self._known[id(tensor)] = tensor, dims
            if isinstance(tensor, nn.Parameter):
                self._names[id(tensor)] = name
            self.found.axes.update({(name, d): labels for d, labels in enumerate(dims) if labels is not None})
        self._inside: list[tuple[str, nn.Module]] = []
        self._reshapes = 0
        self.used: set[int] = set()  # ids of tensors that some operation took
        self._seen: list[Any] = []  # the operations, and the sizes of what they gave

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        from prospr.tracing.rules import rule_for

        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._seen.append((func, [tensor.shape for tensor in tensors(out)]))
        for tensor in tensors((args, kwargs)):
            self.used.add(id(tensor))
            if id(tensor) in self._names:
                self.found.uses.append(self._names[id(tensor)])
        rule_for(func)(self, func, args, kwargs, out)
        return out

    def in_training(self, model: nn.Module, call: Call) -> Any:
        """Run the model as in training: it may have branches for that, such as auxiliary heads."""
        args, kwargs = call
        flops, uses = list(self.found.flops), list(self.found.uses)
        before, self._seen = self._seen, []
        pretend_training(model)
        try:
            out = model(*args, **kwargs)
            self.found.in_training = self._seen != before
            return out
        finally:
            self.found.flops, self.found.uses = flops, uses

    # Where we are

    def entering(self, path: str, module: nn.Module) -> Callable[..., None]:
        return lambda *_: self._inside.append((path, module))

    def leaving(self, *_: Any) -> None:
        self._inside.pop()

    @property
    def place(self) -> tuple[str, nn.Module | None]:
        """The innermost module that is running, and its path."""
        return self._inside[-1] if self._inside else ("", None)

    def here(self, func: Any) -> str:
        path, module = self.place
        name = str(func).removeprefix("aten.").split(".")[0].strip("_")
        return f"{name} in {path or 'the model'}" + (f" ({type(module).__name__})" if module is not None else "")

    # Labels of tensors

    def dims(self, tensor: Any) -> Dims:
        """The labels of a tensor; a tensor that nobody told of (made in forward) has none."""
        if not isinstance(tensor, Tensor):
            return []
        return self._known[id(tensor)][1] if id(tensor) in self._known else [None] * tensor.dim()

    def know(self, tensor: Tensor, dims: Dims) -> None:
        if len(dims) != tensor.dim():
            raise AssertionError(f"{len(dims)} dimensions of labels for a tensor of {tuple(tensor.shape)}")
        for d, (labels, n) in enumerate(zip(dims, tensor.shape, strict=True)):
            if labels is not None and len(labels) != n:
                raise AssertionError(f"{len(labels)} labels for dimension {d} of {tuple(tensor.shape)}")
        clean: Dims = [None if n == 1 else labels for labels, n in zip(dims, tensor.shape, strict=True)]
        self._known[id(tensor)] = tensor, clean

    def fix(self, labels: Labels | None, why: str) -> None:
        self.forest.fix(labels or (), why)

    def join(self, first: Labels | None, second: Labels | None, why: str) -> Labels | None:
        """Make two dimensions the same channels; one of a fixed size fixes the other."""
        if first is None or second is None:
            self.fix(first, why)
            self.fix(second, why)
            return None
        self.forest.join(first, second)
        return first

    def write(self, *dims: Labels | None) -> None:
        for labels in dims:
            self.found.written.update(labels or ())

    def contract(self, first: Labels | None, second: Labels | None, why: str) -> None:
        """Note that an operation sums over two dimensions, index by index."""
        self.join(first, second, why)
        if first is not None and second is not None:
            self.found.summed.append((first, second))

    def solid(self, count: int, why: str) -> Labels:
        """Labels of indices that cannot go."""
        labels = self.forest.new(count)
        self.forest.fix(labels, why)
        return labels

    def count(self, kind: type[nn.Module], name: str, labels: Labels, position: int | None = None) -> bool:
        """Note that attribute `name` of the running module counts `labels`; False where another module is running."""
        path, module = self.place
        if not isinstance(module, kind):
            return False
        value = getattr(module, name)
        if position is not None:
            value = value[position]
        if value != len(labels):
            return False
        self.found.attributes.append(Attribute(path, name, labels, position))
        return True

    def cost(self, factor: int, *dims: tuple[int, Labels | None]) -> None:
        """An operation of `factor` times the product of these dimensions; each is (size, labels)."""
        lists = tuple(tuple(labels) for _, labels in dims if labels is not None)
        fixed = math.prod(size for size, labels in dims if labels is None)
        self.found.flops.append(Term(factor * fixed, lists))

    # Reshaping

    def reshape(self, dims: Dims, old: Sequence[int], new: Sequence[int], why: str) -> Dims:
        """The labels after a reshape. A dimension that is split must stay a rectangle: only one part keeps labels."""
        out: dict[int, Labels | None] = {}
        for before, after in _blocks(old, new):
            self._reshapes += 1  # also where there is nothing to follow: numbers must not depend on earlier choices
            labelled = [d for d in before if dims[d] is not None]
            if len(labelled) != 1:
                for d in labelled:
                    self.fix(dims[d], why)
                continue
            d = labelled[0]
            labels = dims[d]
            assert labels is not None
            inner = math.prod(old[e] for e in before if e > d)
            outer = math.prod(old[e] for e in before if e < d)
            flat = [label for label in labels for _ in range(inner)] * outer
            self._split(flat, after, [new[e] for e in after], out, why)
        return [out.get(e) for e in range(len(new))]

    def _split(
        self, flat: Labels, after: Sequence[int], sizes: list[int], out: dict[int, Labels | None], why: str
    ) -> None:
        number = self._reshapes
        lines = [list(_lines(flat, sizes, e)) for e in range(len(sizes))]  # for each part: the labels at each index
        varying = [e for e in range(len(sizes)) if not _same(self.forest, lines[e])]
        if not varying and sizes:
            varying = [len(sizes) - 1]
        if len(varying) > 1:
            if number not in self.choices:
                self.found.splits[number] = tuple(sizes)
                self.fix(flat, why)
                return
            varying = [self.choices[number]]
            for line in lines[varying[0]]:
                self.forest.join_all(line)
        e = varying[0]
        out[after[e]] = [line[0] for line in lines[e]]


def _lines(flat: Labels, sizes: list[int], part: int) -> Iterator[Labels]:
    """The entries of an array of `sizes` at each index of one of its dimensions."""
    inner = math.prod(sizes[part + 1 :])
    block = inner * sizes[part]
    for i in range(sizes[part]):
        yield [flat[start + k] for start in range(i * inner, len(flat), block) for k in range(inner)]


def _same(forest: Forest, lines: list[Labels]) -> bool:
    """Whether all lines of labels are alike."""
    first = forest.roots(lines[0])
    return all(forest.roots(line) == first for line in lines[1:])


def _blocks(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest runs of dimensions that a reshape turns into each other; those of size 1 belong to none."""
    left = [d for d, n in enumerate(old) if n != 1]
    right = [d for d, n in enumerate(new) if n != 1]
    i = j = 0
    while i < len(left) and j < len(right):
        before, after = [left[i]], [right[j]]
        a, b = old[left[i]], new[right[j]]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                before.append(left[i])
                a *= old[left[i]]
                i += 1
            else:
                after.append(right[j])
                b *= new[right[j]]
                j += 1
        yield before, after
