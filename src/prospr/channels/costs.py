"""What a network costs as a function of the channels it keeps: parameters, channels, floating-point operations.

Each cost is a sum of terms, and a term is a factor times the numbers of channels kept in some dimensions: a
convolution's parameters are (kernel) x (inputs kept) x (outputs kept). So what removing a channel saves depends on what
is left beside it, and is exact at every moment of a pruning.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from prospr.tracing.trace import Term

__all__ = ["UNITS", "Costs", "Unit"]

Unit = Literal["parameters", "channels", "flops"]
UNITS: tuple[Unit, ...] = get_args(Unit)


class Costs:
    """The costs of a network, counted down as channels go.

    A group is a number from 0; `-1` in a dimension is a channel that stays. `terms` are by unit.
    """

    def __init__(self, terms: dict[Unit, list[Term]], groups: int) -> None:
        self._lines: list[tuple[int, ...]] = []  # the distinct dimensions
        numbers: dict[tuple[int, ...], int] = {}
        self._terms: list[tuple[Unit, int, tuple[int, ...]]] = []
        for unit, parts in terms.items():
            for term in parts:
                for line in term.dims:
                    if line not in numbers:
                        numbers[line] = len(self._lines)
                        self._lines.append(line)
                self._terms.append((unit, term.factor, tuple(numbers[line] for line in term.dims)))
        self.kept = [len(line) for line in self._lines]  # of each dimension, now
        self._places: list[list[tuple[int, int]]] = [[] for _ in range(groups)]  # group -> (dimension, how often)
        for i, line in enumerate(self._lines):
            for group, times in Counter(line).items():
                if group >= 0:
                    self._places[group].append((i, times))
        self._by_line: list[list[int]] = [[] for _ in self._lines]
        for t, (_, _, lines) in enumerate(self._terms):
            for i in set(lines):
                self._by_line[i].append(t)
        self._values = [self._value(t) for t in range(len(self._terms))]
        self.total: dict[Unit, int] = dict.fromkeys(UNITS, 0)
        for (unit, _, _), value in zip(self._terms, self._values, strict=True):
            self.total[unit] += value
        self.now = dict(self.total)

    def _value(self, t: int) -> int:
        _, value, lines = self._terms[t]
        for i in lines:
            value *= self.kept[i]
        return value

    def _lost(self, groups: Iterable[int]) -> Counter[int]:
        lost: Counter[int] = Counter()
        for group in groups:
            for i, times in self._places[group]:
                lost[i] += times
        return lost

    def fits(self, groups: Sequence[int], least: int) -> bool:
        """Whether every dimension keeps `least` channels (or all it has) without these groups."""
        lost = self._lost(groups)
        return all(self.kept[i] - n >= min(least, len(self._lines[i])) for i, n in lost.items())

    def remove(self, groups: Sequence[int], sign: int = 1) -> None:
        """Take groups out, or put them back with `sign=-1`."""
        lost = self._lost(groups)
        for i, n in lost.items():
            self.kept[i] -= sign * n
        for t in {t for i in lost for t in self._by_line[i]}:
            value = self._value(t)
            self.now[self._terms[t][0]] += value - self._values[t]
            self._values[t] = value

    def saved(self, group: int, unit: Unit) -> int:
        """What removing one group saves, all else as it is now."""
        before = self.now[unit]
        self.remove([group])
        after = self.now[unit]
        self.remove([group], sign=-1)
        return before - after
