"""Which indices of a network's tensors belong together: a disjoint-set forest over labels.

Every index of every dimension of a parameter has a label. Where an operation makes two indices the same channel their
labels are joined; where it makes a channel impossible to remove its label is fixed, with the reason.
"""

from collections.abc import Iterable, Sequence

__all__ = ["Forest", "Labels"]

Labels = list[int]  # of the indices of one dimension


class Forest:
    """Labels 0, 1, 2, ... in classes that only ever grow together."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._fixed: dict[int, str] = {}  # root -> why no channel of this class can go

    def new(self, count: int) -> Labels:
        start = len(self._parent)
        self._parent.extend(range(start, start + count))
        return list(range(start, start + count))

    def find(self, label: int) -> int:
        root = label
        while self._parent[root] != root:
            root = self._parent[root]
        while self._parent[label] != root:
            self._parent[label], label = root, self._parent[label]
        return root

    def roots(self, labels: Sequence[int]) -> Labels:
        return [self.find(label) for label in labels]

    def join(self, first: Sequence[int], second: Sequence[int]) -> None:
        """Index by index."""
        for a, b in zip(first, second, strict=True):
            a, b = self.find(a), self.find(b)
            if a == b:
                continue
            low, high = min(a, b), max(a, b)
            self._parent[high] = low
            if high in self._fixed:
                self._fixed.setdefault(low, self._fixed.pop(high))

    def join_all(self, labels: Sequence[int]) -> None:
        """All in one class."""
        self.join(labels[:-1], labels[1:])

    def fix(self, labels: Iterable[int], why: str, instead_of: str | None = None) -> None:
        """The first reason stays, unless it is `instead_of`."""
        for label in labels:
            root = self.find(label)
            if self._fixed.get(root) in (None, instead_of):
                self._fixed[root] = why

    def why_fixed(self, label: int) -> str | None:
        return self._fixed.get(self.find(label))
