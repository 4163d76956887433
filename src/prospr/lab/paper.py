"""The tables of the ProsPr paper: its numbers, and the experiments that measure the same here.

The numbers are in data_files/paper.csv, as the paper prints them. They are never mixed with measured ones: a `Cell` has
the paper's number in `row`, and `measured` reads ours from the folders of finished runs. Nothing here imports torch.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

from prospr.errors import SettingError
from prospr.lab.experiment import DENSE, Experiment, Pruning, Training
from prospr.lab.grid import changed
from prospr.lab.recipes import recipes
from prospr.lab.runs.folder import FOLDER, RunFolder
from prospr.lab.stats import Summary, summarise

__all__ = [
    "BENCHMARK",
    "PAPER",
    "SEEDS",
    "Cell",
    "PaperRow",
    "PaperTable",
    "Published",
    "compare",
    "published",
    "tables",
]

PAPER, BENCHMARK = "paper", "missing-the-mark"
SEEDS = (0, 1, 2)

DATASETS = {
    "CIFAR-10": "cifar10",
    "CIFAR-100": "cifar100",
    "TinyImageNet": "tiny-imagenet",
    "ImageNet": "imagenet",
    "PhC-C2DH-U373": "phc-c2dh-u373",
    "DIC-C2DH-HeLa": "dic-c2dh-hela",
}
NETWORKS = {
    "ResNet-18": "resnet18",
    "ResNet-20": "resnet20",
    "ResNet-50": "resnet50",
    "VGG-16": "vgg16",
    "VGG-19": "vgg19",
    "U-Net": "unet",
}
METHODS = {
    "Unpruned": DENSE,
    "ProsPr": "prospr-one-shot",  # the paper's; prospr's own default is in rounds
    "SNIP": "snip",
    "SNIP-MB": "snip-mb",
    "Iter-SNIP": "iter-snip",
    "FORCE": "force",
    "GraSP": "grasp",
    "GraSP-MB": "grasp-mb",
    "SynFlow": "synflow",
    "3SP": "3sp",
    "3SP + reinit": "3sp",
    "3SP + rescale": "3sp",
    "LTR after Training": "magnitude",
    "Magnitude after Training": "magnitude",
    "Magnitude at Initialization": "magnitude",
    "Random": "random",
}
CHANGES: dict[str, dict[str, Any]] = {
    "LTR after Training": {"after_training": True, "rewind": 1000},
    "Magnitude after Training": {"after_training": True},
    "3SP + reinit": {"weights": "redraw"},
    "3SP + rescale": {"weights": "rescale"},
}
"""What is changed of a method of prospr to be one of the paper; such a row is asked for by the paper's name."""
NOT_RUN = {
    "Jeong et al.": "prunes and fine-tunes in turn, which prospr does not have in this form",
}
BYOL = 1000
"""The epochs of BYOL in the paper."""
FIGURES = {"top1": ("accuracy", 100), "top5": ("top5", 100), "mean_iou": ("mean_iou", 1)}
"""The figure of a run that a metric of the paper is, and what the paper multiplies it by."""
TIMES = {"train_minutes": 60, "train_hours": 3600}
"""The seconds in the unit of a metric that is the time of the training."""

_BENCHMARK_NETWORKS: dict[str, dict[str, int | float | bool | str]] = {
    "resnet20": {"shortcut": "B"},
    "resnet18": {"stem": "7x7"},
}
_GRID = tuple(round(1 - 0.8**k, 4) for k in range(1, 19))  # of the benchmark; the paper prints three digits of it
_LIKE = 6e-4  # of sparsities: what the three digits leave open


@dataclass(frozen=True)
class PaperRow:
    """A number as the paper prints it; the names of data set, network and method are the paper's too.

    sparsity: a share; 0 for a network that is not pruned.
    metric: "top1" and "top5" in percent, "mean_iou" as a share, "train_minutes" and "train_hours".
    sd: the deviation, where one is printed.
    """

    dataset: str
    network: str
    granularity: str
    method: str
    sparsity: float
    metric: str
    mean: float
    sd: float | None
    note: str

    @property
    def missing(self) -> str | None:
        """Why no experiment measures this; None where one does."""
        return NOT_RUN.get(self.method)


@dataclass(frozen=True)
class Cell:
    """A number of the paper beside the experiments that measure it here: one a seed, or none and a reason."""

    row: PaperRow
    experiments: tuple[Experiment, ...]
    missing: str | None = None

    def measured(self, folder: str | os.PathLike[str] = FOLDER) -> Summary:
        """Ours, in the paper's unit, of those runs in `folder` that are finished."""
        places = [RunFolder(one, folder) for one in self.experiments]
        done = [place.result() for place in places if place.done]
        if self.row.metric in TIMES:  # of runs side by side it would be the time of all of them
            alone = [one.seconds["train"] for one in done if one.memory.get("together", 1) == 1]
            return summarise([seconds / TIMES[self.row.metric] for seconds in alone])
        figure, scale = FIGURES[self.row.metric]
        return summarise([scale * one.figures[figure] for one in done])


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper.

    source: where it is in the paper.
    differs: what is done otherwise here, or was not said in the paper, a sentence each.
    """

    name: str
    title: str
    shows: str
    source: str
    rows: tuple[PaperRow, ...] = field(repr=False)
    recipe: str = ""
    benchmark: str | None = None
    differs: tuple[str, ...] = ()

    @property
    def networks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.network for row in self.rows))

    @property
    def datasets(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.dataset for row in self.rows))

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.method for row in self.rows))

    @property
    def sparsities(self) -> tuple[float, ...]:
        """Shares, rising."""
        return tuple(sorted({row.sparsity for row in self.rows}))

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.metric for row in self.rows))

    @property
    def timed(self) -> bool:
        """Whether its numbers are times, for which runs are trained one at a time."""
        return any(metric in TIMES for metric in self.metrics)

    @property
    def runs(self) -> str:
        """Whether its rows can be run: "all", "some", "none"."""
        missing = [row.missing is not None for row in self.rows]
        return "none" if all(missing) else "some" if any(missing) else "all"

    def cells(
        self,
        methods: Sequence[str] | None = None,
        sparsities: Sequence[float] | None = None,
        seeds: Sequence[int] = SEEDS,
        recipe: str = PAPER,
        epochs: int | None = None,
        datasets: Sequence[str] | None = None,
        networks: Sequence[str] | None = None,
    ) -> list[Cell]:
        """The numbers of the table, or of a part of it, each with its experiments.

        methods, datasets, networks: by the paper's names or those of prospr.
        sparsities: shares as the paper prints them, 0.982; that of a network not pruned is 0.
        recipe: "paper"; "missing-the-mark", the benchmark's own, with its network; or any of `recipes()`.
        epochs: another number of them, drops in proportion, and so BYOL's and the step that LTR goes back to.
        """
        rows = list(self.rows)
        plain = {name: ours for name, ours in METHODS.items() if name not in CHANGES}
        rows = _chosen(rows, "method", methods, plain)
        rows = _chosen(rows, "dataset", datasets, DATASETS)
        rows = _chosen(rows, "network", networks, NETWORKS)
        if sparsities:
            for share in sparsities:
                if not any(abs(row.sparsity - share) < _LIKE for row in rows):
                    known = ", ".join(f"{one:g}" for one in sorted({row.sparsity for row in rows}))
                    raise SettingError(f"sparsity {share:g} is not in this part of {self.name}; it has {known}")
            rows = [row for row in rows if any(abs(row.sparsity - share) < _LIKE for share in sparsities)]
        found = []
        for row in rows:
            if row.missing is None:
                base = self._experiment(row, recipe)
                base = base if epochs is None else _shortened(base, epochs)
                found.append(Cell(row, tuple(replace(base, seed=seed) for seed in dict.fromkeys(seeds))))
            else:
                found.append(Cell(row, (), row.missing))
        return found

    def experiments(
        self,
        methods: Sequence[str] | None = None,
        sparsities: Sequence[float] | None = None,
        seeds: Sequence[int] = SEEDS,
        recipe: str = PAPER,
        **more: Any,
    ) -> list[Experiment]:
        """What there is to run for `cells(...)`, each once. An error where nothing of it can be run, saying why.

        >>> runs = tables()["lth_cifar10_resnet20"].experiments(["ProsPr", "snip"], [0.982], seeds=[0])
        >>> [(one.label, one.trained_by.epochs) for one in runs]
        [('resnet20, cifar10, snip 98.2 %, seed 0', 200), ('resnet20, cifar10, prospr-one-shot 98.2 %, seed 0', 200)]
        """
        cells = self.cells(methods, sparsities, seeds, recipe, **more)
        found = {one.identity: one for cell in cells for one in cell.experiments}
        if not found:
            reasons = dict.fromkeys(cell.missing for cell in cells if cell.missing)
            raise SettingError(f"{self.name}: no experiment measures what is asked for: {'; '.join(reasons)}")
        return list(found.values())

    def _experiment(self, row: PaperRow, recipe: str) -> Experiment:
        """What a row measures, with seed 0."""
        dataset, network, method = DATASETS[row.dataset], NETWORKS[row.network], METHODS[row.method]
        pruning = Pruning()
        if row.granularity == "channel":
            pruning = replace(pruning, granularity="channel", shrink=True)
        pruning = replace(pruning, **CHANGES.get(row.method, {}))
        if pruning.rewind is not None and network == "vgg16":
            pruning = replace(pruning, rewind=2000)
        if row.note.startswith("M="):
            pruning = replace(pruning, steps=int(row.note[2]), same_batch=True)
        settings: dict[str, int | float | bool | str] = (
            dict(_BENCHMARK_NETWORKS.get(network, {})) if recipe == BENCHMARK else {}
        )
        training = Training(byol=BYOL if "BYOL" in row.note else 0)
        trained_by = self._recipe(recipe)
        if row.metric in TIMES and dataset == "imagenet":
            settings = {"stem": "7x7"} if network == "resnet18" else {}
            trained_by = "prospr-imagenet" if recipe == PAPER else trained_by
            training = replace(training, epochs=int(row.note.partition(" epochs")[0]))
        if dataset == "imagenet":
            network = "torchvision:vgg19_bn" if network == "vgg19" else network
            if method == "prospr-one-shot":
                method = "prospr-first"
                steps, batch = (2048, 128) if "vgg" in network else (1024, 256)
                pruning = replace(pruning, steps=steps, score_batch_size=batch)
        if row.metric == "mean_iou":
            pruning = replace(pruning, score_batch_size=4)
        sparsity = row.sparsity
        if self.benchmark is not None:
            sparsity = min(_GRID, key=lambda one: abs(one - row.sparsity))
        return Experiment(
            dataset=dataset,
            network=network,
            settings=settings,
            method=method,
            sparsity=Experiment.sparsity if method == DENSE else sparsity,
            recipe=trained_by,
            pruning=Pruning() if method == DENSE else pruning,
            training=training,
        )

    def _recipe(self, name: str) -> str:
        if name == PAPER:
            return self.recipe
        if name == BENCHMARK:
            if self.benchmark is None:
                raise SettingError(f"recipe={name!r}: {self.name} is no part of that benchmark; use {PAPER!r}")
            return self.benchmark
        if name not in recipes():
            known = ", ".join([PAPER, BENCHMARK, *recipes()])
            raise SettingError(f"unknown recipe {name!r}; known names: {known}")
        return name


def compare(cells: Sequence[Cell], folder: str | os.PathLike[str] = FOLDER) -> list[dict[str, Any]]:
    """A row a cell: the paper's number, and ours of the runs in `folder` that are finished; None where there is none.

    >>> cells = tables()["segmentation"].cells(["Unpruned"], datasets=["DIC-C2DH-HeLa"])
    >>> [(row["paper_mean"], row["our_mean"], row["our_runs"]) for row in compare(cells, "no such folder")]
    [(0.7514, None, 0)]
    """
    found: list[dict[str, Any]] = []
    for cell in cells:
        row, ours = cell.row, cell.measured(folder)
        values = {name: getattr(row, name) for name in ("dataset", "network", "method", "sparsity", "metric", "note")}
        values |= {"paper_mean": row.mean, "paper_sd": row.sd}
        values |= {"our_mean": ours.mean if ours.n else None, "our_sd": ours.sd if ours.n > 1 else None}
        found.append({**values, "our_runs": ours.n, "missing": cell.missing})
    for row in found:  # times of other machines compare by what pruning saves
        base = next((one for one in found if _unpruned(one, row)), None) if row["metric"] in TIMES else None
        for whose in ("our", "paper"):
            before = None if base is None or base is row else base[f"{whose}_mean"]
            after = row[f"{whose}_mean"]
            row[f"{whose}_speedup"] = None if before is None or after is None else before / after
    return found


def _unpruned(one: dict[str, Any], row: dict[str, Any]) -> bool:
    return one["sparsity"] == 0 and all(one[key] == row[key] for key in ("dataset", "network", "metric"))


@dataclass(frozen=True)
class Published:
    """What a table of the paper has of one method, sparsities rising."""

    table: PaperTable
    rows: tuple[PaperRow, ...]


def published(one: Experiment) -> Published | None:
    """The paper's numbers of this data set, network and method, whatever the sparsity, the seed and the recipe here.

    None where it has none: for settings of the network or of the method that are not the paper's, for sanity checks.

    >>> found = published(Experiment(dataset="cifar10", network="vgg16", method="snip", sparsity=0.5))
    >>> found.table.name, len(found.rows), published(Experiment(dataset="cifar10", network="vgg16", method="phew"))
    ('lth_cifar10_vgg16', 18, None)
    """
    if one.settings not in ({}, _BENCHMARK_NETWORKS.get(one.network_name, {})):
        return None
    found = _by_experiment().get(_kind(one))
    if found is None:
        return None
    name, rows = found
    return Published(tables()[name], rows)


def _kind(one: Experiment) -> tuple[str, str, int, str, Pruning]:
    """What makes runs of two recipes the same row of a table. How many images a batch of the scoring has is no part of
    it, nor whether what is trained is masked or smaller, which computes the same."""
    if one.method == DENSE:
        return one.dataset, one.network_name, one.training.byol, one.method, Pruning()
    how = replace(one.pruning, score_batch_size=Pruning.score_batch_size, shrink=False)
    usual = "channel" if one.method == "3sp" else "weight"
    how = replace(how, granularity=how.granularity or usual)
    method = "prospr-one-shot" if one.method == "prospr" else one.method  # the paper's numbers are behind both
    return one.dataset, one.network_name, one.training.byol, method, how


@cache
def _by_experiment() -> dict[tuple[str, str, int, str, Pruning], tuple[str, tuple[PaperRow, ...]]]:
    """{what is run: (table, rows)}, of the first table that has it."""
    found: dict[tuple[str, str, int, str, Pruning], tuple[str, list[PaperRow]]] = {}
    for name, table in tables().items():
        for row in table.rows:
            if row.missing is None and row.metric in ("top1", "mean_iou"):
                place = found.setdefault(_kind(table._experiment(row, PAPER)), (name, []))
                if place[0] == name:
                    place[1].append(row)
    return {kind: (name, tuple(sorted(rows, key=lambda r: r.sparsity))) for kind, (name, rows) in found.items()}


_ALIKE = (
    "For one seed every method has the same recipe, start and order of images here; the paper trains ProsPr by its own "
    "recipe and takes the other rows from the benchmark (Frankle et al., 2021), which has another."
)
_AFTER = (
    "LTR goes back to step 1000, of VGG-16 to step 2000: said to be the benchmark's, and not checked. Both methods "
    "after training prune in one shot."
)
_SCALES = "The benchmark draws the scales of batch norms from U(0, 1); here they begin at 1 with either recipe."
_BUDGET = "The sparsity of channels is read as the share of parameters that go, which the paper does not say."
_LENGTH = (
    "The learning rate of ProsPr's inner steps is prospr's own choice; the paper prints none but the training's, 0.1."
)

_ABOUT: dict[str, dict[str, Any]] = {
    "lth_cifar10_resnet20": {
        "title": "ResNet-20 on CIFAR-10",
        "shows": "accuracy of eight methods against sparsity",
        "source": "figure 2 and appendix B, tab:lth_cifar10_resnet20",
        "recipe": "prospr-cifar",
        "benchmark": "missing-the-mark-cifar",
        "differs": (_ALIKE, _AFTER, _SCALES, _LENGTH),
    },
    "lth_cifar10_vgg16": {
        "title": "VGG-16 on CIFAR-10",
        "shows": "accuracy of eight methods against sparsity",
        "source": "figure 2 and appendix B, tab:lth_cifar10_vgg16",
        "recipe": "prospr-cifar",
        "benchmark": "missing-the-mark-cifar",
        "differs": (_ALIKE, _AFTER, _SCALES, _LENGTH),
    },
    "lth_tiny_imagenet": {
        "title": "ResNet-18 on Tiny-ImageNet",
        "shows": "accuracy of eight methods against sparsity",
        "source": "figure 2 and appendix B, tab:lth_tiny_imagenet",
        "recipe": "prospr-cifar",
        "benchmark": "missing-the-mark-tiny",
        "differs": (_ALIKE, _AFTER, _SCALES, _LENGTH),
    },
    "imagenet": {
        "title": "VGG-19 and ResNet-50 on ImageNet",
        "shows": "top-1 and top-5 accuracy at 90 and 95 %, ProsPr of the first order",
        "source": "section 4.2, tab:imagenet",
        "recipe": "prospr-imagenet",
        "differs": (
            "VGG-19 is torchvision's with batch norm (install torchvision).",
            "For VGG-19 the paper says 256 steps in one place and 2048 in another; here 2048, batches of 128.",
            "FORCE and Iter-SNIP score one batch a round here, forty in the paper; SNIP-MB and GraSP-MB ten.",
            _LENGTH,
        ),
    },
    "structured": {
        "title": "Channels of VGG-19 on CIFAR-10 and CIFAR-100",
        "shows": "accuracy with whole channels gone, against 3SP and random",
        "source": "section 4.3, tab:structured",
        "recipe": "prospr-cifar",
        "differs": (_BUDGET, "The smaller network is trained, which computes what the masked one does.", _LENGTH),
    },
    "effect_of_m": {
        "title": "Number of meta-steps",
        "shows": "accuracy of VGG-19 without channels, by 0 to 3 steps on one batch",
        "source": "section 4.4, tab:effect_of_m",
        "recipe": "prospr-cifar",
        "differs": (_BUDGET, _LENGTH),
    },
    "walltime": {
        "title": "Wall-clock time",
        "shows": "time of a training without channels; the paper's on an RTX 2080 Ti",
        "source": "appendix C, tab:walltime",
        "recipe": "prospr-cifar",
        "differs": (
            "Ours are times on the machine at hand; what compares is the speed-up over the unpruned training.",
            "ImageNet is trained by prospr-imagenet in the 90 epochs the paper names.",
            _BUDGET,
        ),
    },
    "segmentation": {
        "title": "U-Net on cells",
        "shows": "mean intersection over union on two sets of cells",
        "source": "appendix D, tab:segmentation_u373 and tab:segmentation_hela",
        "recipe": "unet-cells",
        "differs": ("The paper gives the epochs and no more of its recipe; the rest is prospr's.", _LENGTH),
    },
    "byol": {
        "title": "A start by BYOL",
        "shows": "accuracy of ResNet-18 at 95 % from random weights and from BYOL's",
        "source": "appendix E, tab:byol",
        "recipe": "prospr-cifar",
        "differs": ("Of BYOL the paper gives the epochs and the embedding; the rest of it is prospr's.", _LENGTH),
    },
}


@cache
def _rows() -> dict[str, tuple[PaperRow, ...]]:
    text = (resources.files("prospr.lab") / "data_files" / "paper.csv").read_text(encoding="utf-8")
    found: dict[str, list[PaperRow]] = {name: [] for name in _ABOUT}
    for line in csv.DictReader(text.splitlines()):
        row = PaperRow(
            dataset=line["dataset"],
            network=line["model"],
            granularity=line["granularity"],
            method=line["method"],
            sparsity=round(float(line["sparsity"]) / 100, 6),
            metric=line["metric"],
            mean=float(line["mean"]),
            sd=float(line["std"]) if line["std"] else None,
            note=line["note"],
        )
        found[line["table"]].append(row)
    return {name: tuple(rows) for name, rows in found.items()}


def tables() -> dict[str, PaperTable]:
    """Every table of the paper, by the name it has in paper.csv.

    >>> table = tables()["structured"]
    >>> table.networks, table.sparsities
    (('VGG-19',), (0.0, 0.8, 0.9, 0.95))
    """
    return {name: PaperTable(name=name, rows=_rows()[name], **about) for name, about in _ABOUT.items()}


def _shortened(one: Experiment, epochs: int) -> Experiment:
    """In another number of epochs; in proportion too, as the recipe's drops: BYOL's, and the step LTR goes back to."""
    share, step = epochs / one.trained_by.epochs, one.pruning.rewind
    byol = max(1, round(share * one.training.byol)) if one.training.byol else 0
    return changed(one, epochs=epochs, byol=byol, rewind=None if step is None else round(share * step))


def _chosen(rows: list[PaperRow], what: str, asked: Sequence[str] | None, ours: dict[str, str]) -> list[PaperRow]:
    """Rows whose `what` is asked for by the paper's name or by ours."""
    if not asked:
        return rows
    wanted = {name.lower() for name in asked}
    names = {row: {getattr(row, what).lower(), ours.get(getattr(row, what), "")} for row in rows}
    unknown = wanted - set().union(*names.values())
    if unknown:
        known = ", ".join(dict.fromkeys(getattr(row, what) for row in rows))
        raise SettingError(f"{what} {min(unknown)!r} is not in this table of the paper; it has {known}")
    return [row for row in rows if wanted & names[row]]
