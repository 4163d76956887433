"""Which runs of a page can be compared with each other, and what they are called there. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from prospr.lab.experiment import CHECKS
from prospr.lab.results import DENSE, Row, method_name, methods_of, row_of
from prospr.lab.runs.records import Record


@dataclass(frozen=True)
class Setup:
    """Runs that differ in method, sparsity and seed only: the same network, data and training.

    names: of each record's method, with the settings of pruning in which the runs differ.
    common: the settings of pruning in which they agree and are not as by default.
    """

    records: Sequence[Record]
    names: Sequence[str]
    common: Mapping[str, Any]

    @property
    def title(self) -> str:
        one = self.records[0].experiment
        settings = "".join(f", {key} {value}" for key, value in one.settings.items())
        changes = {**changed(one.data), **{k: v for k, v in changed(one.training).items() if k != "epochs"}}
        more = "".join(f", {words(key, value)}" for key, value in {**changes, **self.common}.items())
        epochs = f"{one.trained_by.epochs} epochs, recipe {one.recipe_name}"
        return f"{one.network_name}{settings} on {one.dataset}, {epochs}{more}"

    @property
    def labels(self) -> list[str]:
        """What each record is called: its method, and the sanity check that it is."""
        checks = [None if r.experiment.method == DENSE else r.experiment.pruning.check for r in self.records]
        return [f"{name}, {check}" if check else name for name, check in zip(self.names, checks, strict=True)]

    @property
    def methods(self) -> list[str]:
        """The methods in the order of the rows, which gives them their colours; then those with no run that ended, and
        sanity checks."""
        return list(dict.fromkeys([*methods_of(self.rows), *(label for label in self.labels if label != DENSE)]))

    @property
    def rows(self) -> list[Row]:
        """The runs that ended, well or not, as rows of a comparison."""
        pairs = zip(self.records, self.names, strict=True)
        return [row_of(record, name) for record, name in pairs if record.state != "unfinished"]

    def one_place(self, file: str) -> list[tuple[str, Record]]:
        """(method, run) at one sparsity and with one seed, of runs that have this file: where most methods have one; of
        several such places the highest sparsity, then the first seed. Sanity checks are left out."""
        places: dict[tuple[float, int], dict[str, Record]] = {}
        for record, name in zip(self.records, self.names, strict=True):
            one = record.experiment
            if one.method != DENSE and one.pruning.check is None and (record.folder / file).is_file():
                places.setdefault((float(one.sparsity), one.seed), {})[name] = record
        best = max(places, key=lambda place: (len(places[place]), place[0], -place[1]), default=None)
        return [] if best is None else list(places[best].items())


def setups(records: Sequence[Record]) -> list[Setup]:
    """The records that can be compared with each other, most first; of each setup the dense ones first, then by method,
    sparsity and seed, and sanity checks last."""
    groups: dict[str, list[Record]] = {}
    for record in sorted(records, key=_order):
        key = replace(record.experiment, method=DENSE, seed=0).identity  # a dense run has no settings of pruning
        groups.setdefault(key, []).append(record)
    return [_setup(group) for group in sorted(groups.values(), key=len, reverse=True)]


def changed(part: Any) -> dict[str, Any]:
    """The fields of a group of settings that are not as by default."""
    return {one.name: v for one in fields(part) if (v := getattr(part, one.name)) != getattr(type(part)(), one.name)}


def words(name: str, value: Any) -> str:
    """
    >>> words("round_to", 8), words("shrink", True), words("drops", (3, 7))
    ('round to 8', 'shrink', 'drops 3 7')
    """
    name = name.replace("_", " ")
    if value is True:
        return name
    return f"{name} {' '.join(map(str, value)) if isinstance(value, (tuple, list)) else value}"


def _setup(records: Sequence[Record]) -> Setup:
    pruned = [changed(record.experiment.pruning) for record in records if record.experiment.method != DENSE]
    common = {key: v for key, v in pruned[0].items() if all(key in o and o[key] == v for o in pruned)} if pruned else {}
    common.pop("check", None)
    return Setup(records, [method_name(record.experiment, common) for record in records], common)


def _order(record: Record) -> tuple[Any, ...]:
    one = record.experiment
    check = -1 if one.method == DENSE or one.pruning.check is None else CHECKS.index(one.pruning.check)
    place = (one.dataset, one.network_name, one.method != DENSE)
    return (*place, check >= 0, one.method, str(replace(one.pruning, check=None)), one.sparsity, check, one.seed)
