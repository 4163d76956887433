"""From an experiment's plain values to the things it is made of: data, network, task, method, masks."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

import prospr
from prospr.channels.plan import Plan
from prospr.channels.shrink import fit_weights
from prospr.errors import CollapseError, SettingError
from prospr.lab.data import Batches, CropFlip, Dataset, Files, Split, Stream, datasets, load
from prospr.lab.experiment import DENSE, Experiment, Pruning
from prospr.lab.models import build, initialise, networks
from prospr.lab.models.packages import from_package
from prospr.lab.progress import Report
from prospr.lab.runs.scores import Inverted, Watched
from prospr.lab.seeds import derive
from prospr.lab.tasks import Task, classification, segmentation
from prospr.masks.patterns import Granularity, parse
from prospr.registry import Method, find

__all__ = ["Loader", "Parts", "Scored", "check", "method_of", "network"]

OTHER_WEIGHTS = 1_000_003  # added to a seed: that of redrawn weights


def check(experiment: Experiment) -> None:
    """Raise for a name that is not known and a setting that cannot be, before anything is loaded or run."""
    entry = datasets()[experiment.dataset]
    if experiment.data.size is not None and not entry.resizable:
        raise SettingError(f"data.size={experiment.data.size}: {entry.name} has images of {entry.shape}; leave it out")
    name = experiment.network_name
    make = from_package(name) if ":" in name else networks().get(name)
    if make is None:
        raise SettingError(
            f"unknown network {name!r}; known names: {', '.join(networks())}, and 'package.module:function' for any "
            "other"
        )
    taken = _parameters(make)
    unknown = [key for key in experiment.settings if taken is not None and key not in taken]
    if unknown:
        raise SettingError(f"network {name!r} has no setting {unknown[0]!r}; it has {', '.join(taken or ())}")
    if experiment.method != DENSE:
        method_of(experiment)


def method_of(experiment: Experiment) -> Method:
    """The pruning method with its changes.

    >>> from prospr.lab.experiment import Experiment, Pruning
    >>> method_of(Experiment(pruning=Pruning(steps=1, rounds=5))).score.rounds
    5
    """
    pruning, known = experiment.pruning, prospr.methods()
    if experiment.method not in known:
        raise SettingError(f"unknown method {experiment.method!r}; known names: {DENSE}, {', '.join(known)}")
    method = find(experiment.method)
    granularity = method.granularity if pruning.granularity is None else _granularity(pruning.granularity)
    method = method.suited(granularity)
    rule = method.rule
    if pruning.weights != "keep" and not pruning.shrink:
        raise SettingError(f"pruning.weights={pruning.weights!r} is for the smaller network; set pruning.shrink")
    if pruning.weights != "keep" and pruning.after_training:
        raise SettingError(f"pruning.weights={pruning.weights!r} would undo the training before; leave one of them out")
    if pruning.rewind is not None and not pruning.after_training:
        raise SettingError(f"pruning.rewind={pruning.rewind} is for pruning after training; set pruning.after_training")
    given = {
        "steps": ("steps", pruning.steps),
        "inner_lr": ("lr", pruning.inner_lr),
        "inner_momentum": ("momentum", pruning.inner_momentum),
        "order": ("order", pruning.order),
        "same_batch": ("same_batch", pruning.same_batch or None),
    }
    changes = {field: value for field, value in given.values() if value is not None}
    if changes and not isinstance(rule.score, prospr.ProsPr):
        name = next(name for name, (_, value) in given.items() if value is not None)
        raise SettingError(f"pruning.{name} is for ProsPr, and the method is {experiment.method!r}; leave it out")
    if changes:
        rule = replace(rule, score=replace(rule.score, **changes))
    if isinstance(rule.score, prospr.NtkSap) and ":" not in experiment.network_name:  # it draws weights as we do
        rule = replace(rule, score=replace(rule.score, init=partial(initialise, experiment.network_name)))
    if pruning.rounds is not None:
        rule = replace(rule, rounds=pruning.rounds)
    if pruning.after_training or experiment.training.byol:
        rule = replace(rule, redraw=False)  # learned weights are not a draw of many
    if pruning.redraw:
        rule = replace(rule, redraw=True)
    if pruning.check == "redrawn" and (pruning.after_training or experiment.training.byol):
        raise SettingError("pruning.check='redrawn' draws weights anew, and here they are learned; leave one out")
    if pruning.check == "inverted":
        if rule.rounds > 1:
            raise SettingError(
                f"pruning.check='inverted': {experiment.method!r} scores anew in each of its {rule.rounds} rounds, so "
                "it has no one score to invert; use 'shuffled' or 'redrawn'"
            )
        rule = replace(rule, score=Inverted(rule.score))
    if pruning.check == "shuffled" and granularity != "weight":
        raise SettingError(
            f"pruning.check='shuffled' moves single weights, and {granularity} go whole; use 'redrawn' or 'inverted'"
        )
    if granularity == "channel":
        if pruning.scope not in (None, "global", "balanced", "layer"):
            raise SettingError(
                f"pruning.scope={pruning.scope!r} is for single weights; for channels use 'global', 'balanced' or "
                "'layer'"
            )
    else:
        usual = Pruning()
        given = [name for name in ("budget", "round_to", "per_flop") if getattr(pruning, name) != getattr(usual, name)]
        if given:
            raise SettingError(f"pruning.{given[0]} is for channels; set pruning.granularity to 'channel'")
        if parse(granularity)[0] == "n:m":
            n, m = parse(granularity)[1:]
            if abs(experiment.sparsity - (1 - n / m)) > 1e-6:
                raise SettingError(
                    f"pruning.granularity={granularity!r} prunes {1 - n / m:g}, and sparsity is {experiment.sparsity:g}"
                )
    return replace(method, score=rule, granularity=granularity, scope=pruning.scope or method.scope)


class Loader:
    """Loads data sets onto `device`, each once."""

    def __init__(
        self,
        device: torch.device,
        root: str | os.PathLike[str] | None = None,
        download: bool = True,
        progress: Report | None = None,
    ) -> None:
        self.device, self._root, self._download, self._progress = device, root, download, progress
        self._loaded: dict[tuple, Dataset] = {}

    def __call__(self, experiment: Experiment) -> Dataset:
        name, data = experiment.dataset, experiment.data
        key = name, data.images, data.size, data.validation
        if key not in self._loaded:
            root = data.images if data.images is not None else self._root
            loaded = load(name, root, download=self._download, size=data.size, progress=self._progress)
            if data.validation > 0:  # the same images whatever the seed, so that runs can be compared on them
                loaded = loaded.split_validation(data.validation, seed=0)
            self._loaded[key] = loaded.to(self.device)
        return self._loaded[key]


@dataclass(frozen=True)
class Parts:
    """What an experiment is made of. The weights, the order of the images and their augmentation depend on its seed."""

    experiment: Experiment
    data: Dataset
    device: torch.device
    workers: int = 0
    learned: Mapping[str, Tensor] | None = None
    """First weights in place of drawn ones: those of BYOL."""

    @cached_property
    def task(self) -> Task:
        loss = self.experiment.training.loss
        if datasets()[self.experiment.dataset].task == "segmentation":
            return segmentation(self.data.num_classes, loss or "cross-entropy")
        return classification()

    @property
    def example(self) -> Tensor:
        """One image as the network takes it."""
        train = self.data.train
        if isinstance(train, Files):
            images, _ = next(iter(train.select(torch.tensor([0])).in_order(1)))
            return images
        return train.inputs(0, 1)

    def network(self) -> nn.Module:
        """The network with its first weights, the same every time: what is scored."""
        return self._network(self.experiment)

    def start(self) -> nn.Module:
        """The network as its training begins: that, or with other weights where the sanity check says so."""
        one = self.experiment
        redrawn = one.method != DENSE and one.pruning.check == "redrawn"
        return self._network(replace(one, seed=one.seed + OTHER_WEIGHTS) if redrawn else one)

    def _network(self, experiment: Experiment) -> nn.Module:
        model = network(experiment, self.data.num_classes, self.example.shape[1]).to(self.device)
        if self.learned is not None:
            model.load_state_dict(self.learned)
        elif experiment.training.byol:
            raise SettingError("training.byol starts from weights that are learned first; `prospr run` does")
        return model

    def smaller(self, model: nn.Module, plan: Plan) -> nn.Module:
        """The network without what is pruned, as it is trained."""
        name, weights = self.experiment.network_name, self.experiment.pruning.weights
        small = plan.shrink(model)
        fit_weights(small, model, weights, partial(initialise, name), derive("redraw", self.experiment.seed))
        return small

    def batches(self, batch_size: int) -> Batches | Stream:
        """Augmented batches of the training images."""
        train, seed = self.data.train, self.experiment.seed
        pad, flip = self.experiment.augmentation
        if isinstance(train, Files):
            return train.batches(batch_size, seed, augment=flip, workers=self.workers)
        assert isinstance(train, Split)
        return train.batches(batch_size, seed, CropFlip(pad, flip) if pad or flip else None)

    def score(self, model: nn.Module | None = None, ranks: prospr.Ranks | None = None) -> Scored:
        """What the method keeps of the network with its first weights, or of `model`, and the scores it went by.

        `ranks` take a part of every batch each, with the norm statistics of the whole.
        """
        experiment, pruning = self.experiment, self.experiment.pruning
        method = method_of(experiment)
        watched = Watched(method.rule.score)
        if model is None:
            if pruning.after_training:
                raise SettingError("pruning.after_training prunes a trained network; `prospr run` trains it first")
            model = self.network()
        batches: Iterable[Any] = self.batches(pruning.score_batch_size)
        if ranks is not None:
            if self.task.weight is None:
                raise SettingError(
                    f"training.loss={experiment.training.loss!r} is no mean over samples, so processes cannot have a "
                    "part of a batch each; use one process, or another loss"
                )
            weight = self.task.weight
            ranks = replace(ranks, weight=lambda batch: weight(batch[1]))
            model, batches = nn.SyncBatchNorm.convert_sync_batchnorm(model), ranks.part(batches)
        masks = prospr.prune(
            model,
            batches,
            experiment.sparsity,
            method=replace(method, score=replace(method.rule, score=watched)),
            loss=self.task.loss,
            scope=pruning.scope,
            keep_per_layer=pruning.keep_per_layer,
            budget=pruning.budget,
            round_to=pruning.round_to,
            per_flop=pruning.per_flop,
            example=self.example,
            seed=experiment.seed,
            ranks=ranks,
        )
        return Scored(self.checked(masks), watched)

    def checked(self, masks: prospr.Masks) -> prospr.Masks:
        """The method's masks as the experiment's sanity check has them, where it is one that moves them.

        An error where they then cut the network, as with the method's own.
        """
        if self.experiment.pruning.check != "shuffled":
            return masks
        moved = prospr.sanity.shuffle(masks, self.experiment.seed)
        if prospr.inspect(self.network(), moved, self.example).connected is False:
            raise CollapseError("no path is left from the network's input to its output; lower the sparsity")
        return moved


@dataclass(frozen=True)
class Scored:
    """Masks, and the scores they were chosen by."""

    masks: prospr.Masks
    _watched: Watched

    def summary(self) -> dict[str, Any]:
        """Counts of the scores that were kept and removed; see `prospr.lab.runs.scores`."""
        return self._watched.summary(self.masks)


def network(experiment: Experiment, num_classes: int, in_channels: int) -> nn.Module:
    """The network of an experiment for images of `in_channels` channels.

    >>> network(Experiment(settings={"width": 4}), num_classes=3, in_channels=2).conv1
    Conv2d(2, 4, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)
    """
    name = experiment.network_name
    taken = _parameters(from_package(name) if ":" in name else networks()[name])
    if taken is None:  # it takes anything: what timm and torchvision understand
        taken = ("num_classes", "in_chans") if name.startswith("timm:") else ("num_classes",)
    ends = {"num_classes": num_classes, "in_channels": in_channels, "in_chans": in_channels}
    fitting = {key: value for key, value in ends.items() if key in taken}
    return build(name, seed=experiment.seed, **{**fitting, **experiment.settings})


def _granularity(text: str) -> Granularity:
    if text == "channel":
        return text
    block = re.fullmatch(r"(\d+)x(\d+)", text)
    found: Granularity = (int(block[1]), int(block[2])) if block else text
    parse(found)  # an error for anything else
    return found


def _parameters(make: Any) -> tuple[str, ...] | None:
    """The names of a function's parameters; None where it takes any."""
    parameters = inspect.signature(make).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    return tuple(one.name for one in parameters)
