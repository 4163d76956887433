"""An experiment as plain values: what is pruned, how, and how it is trained. Its identity is a hash of them.

Nothing here imports torch, so that a command's `--help` need not wait for it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, NamedTuple

from prospr.errors import SettingError
from prospr.lab.recipes import Recipe, recipes

__all__ = ["CHECKS", "DENSE", "SCHEMA", "Data", "Experiment", "Pruning", "Training"]

SCHEMA = 2  # of identities and of the files of a run; raise it when the same values come to mean another experiment
DENSE = "dense"
AUTO = "auto"
CHECKS = ("shuffled", "redrawn", "inverted")


class Usual(NamedTuple):
    """What "auto" stands for with a data set."""

    network: str
    recipe: str
    pad: int = 0
    flip: bool = False


USUAL = {
    "digits": Usual("small_convnet", "digits", pad=1),
    "cifar10": Usual("resnet20", "prospr-cifar", pad=4, flip=True),
    "cifar100": Usual("resnet20", "prospr-cifar", pad=4, flip=True),
    "mnist": Usual("small_convnet", "prospr-cifar", pad=2),
    "fashion-mnist": Usual("small_convnet", "prospr-cifar", pad=2, flip=True),
    "tiny-imagenet": Usual("resnet18", "prospr-cifar", pad=4, flip=True),
    "imagenet": Usual("resnet50", "prospr-imagenet", flip=True),
    "folder": Usual("resnet50", "prospr-imagenet", flip=True),
    "isbi2012": Usual("unet", "unet-cells", flip=True),
    "phc-c2dh-u373": Usual("unet", "unet-cells", flip=True),
    "dic-c2dh-hela": Usual("unet", "unet-cells", flip=True),
}

SEGMENTED = ("isbi2012", "phc-c2dh-u373", "dic-c2dh-hela")


@dataclass(frozen=True)
class Data:
    """How the images are loaded and augmented."""

    images: str | None = None
    """The images of dataset "folder": a folder with train/ and test/ or val/ in it."""
    size: int | None = None
    """Another height and width, for the data sets that take one."""
    validation: float = 0.0
    """This share of the training images is left out of the training and looked at after every epoch."""
    pad: int | None = None
    """Augmentation: images are moved by up to so many pixels; by default what is usual with the data set."""
    flip: bool | None = None
    """Augmentation: half of the images are mirrored; by default what is usual with the data set."""


@dataclass(frozen=True)
class Pruning:
    """What goes, and settings of the method; None is the method's own."""

    scope: Literal["global", "balanced", "mapped", "tapered", "spread", "focused", "layer", "erk"] | None = None
    """What is compared. global: all weights; balanced: all, as shares of their layer; mapped, tapered: balanced, with
    fewer in layers of small maps, in large layers; spread, focused: balanced, channels too, or in fewer channels;
    layer: the weights of each layer; erk: the same, with ERK's densities."""
    granularity: str | None = None
    """What goes whole: "weight", "channel", a pattern such as "2:4", a block such as "4x4"."""
    keep_per_layer: int = 0
    """At least so many weights (or channels) stay in every layer."""
    budget: Literal["parameters", "channels", "flops"] = "parameters"
    """What the sparsity of channels is a share of."""
    round_to: int = 1
    """The channels kept of a layer are a multiple of this."""
    per_flop: bool = False
    """Divide the score of channels by the FLOPs that go with them."""
    shrink: bool = False
    """Train the smaller network, without what is pruned, in place of the masked one."""
    weights: Literal["keep", "rescale", "redraw"] = "keep"
    """What the smaller network starts from: its first weights, these for the inputs left, or others (3SP + reinit)."""
    after_training: bool = False
    """Train the network, prune the trained one, and train what is left."""
    rewind: int | None = None
    """After training: what is left goes back to its weights of this step; without, it keeps the trained ones."""
    score_batch_size: int = 256
    """Images in a batch of the scoring."""
    rounds: int | None = None
    """Prune in so many rounds, scoring anew in each."""
    redraw: bool = False
    """Every round scores another draw of the initial weights."""
    steps: int | None = None
    """ProsPr: the number of inner training steps."""
    inner_lr: float | Literal["auto"] | None = None
    """ProsPr: the learning rate of the inner steps."""
    inner_momentum: float | None = None
    """ProsPr: the momentum of the inner steps."""
    order: Literal["exact", "first"] | None = None
    """ProsPr: exact meta-gradients, or without curvature."""
    same_batch: bool = False
    """ProsPr: all inner steps see one batch, as in the paper's table on the number of steps."""
    check: Literal["shuffled", "redrawn", "inverted"] | None = None
    """A sanity check of the method: its mask shuffled within layers, its mask on other weights, its scores inverted."""


@dataclass(frozen=True)
class Training:
    """Changes to the recipe, field by field; None is the recipe's own."""

    epochs: int | None = None
    """The recipe's drops and warm-up move in proportion, where they are not given."""
    batch_size: int | None = None
    """Images in a batch."""
    lr: float | None = None
    """Learning rate."""
    momentum: float | None = None
    """SGD's momentum."""
    weight_decay: float | None = None
    """On every parameter."""
    nesterov: bool | None = None
    """Nesterov's momentum."""
    drops: tuple[int, ...] | None = None
    """The epochs at which the learning rate drops."""
    drop_factor: float | None = None
    """What it is multiplied by there."""
    warmup: int | None = None
    """So many epochs raise the learning rate from 0."""
    schedule: Literal["drops", "cosine"] | None = None
    """How the learning rate falls; "cosine" has no drops."""
    precision: Literal["auto", "float32", "tf32", "bf16"] | None = None
    """What the network computes in; see docs/training.md."""
    channels_last: bool | Literal["auto"] | None = None
    """The memory layout of images and convolutions."""
    loss: Literal["cross-entropy", "dice"] | None = None
    """By default cross-entropy; Dice loss is for segmentation."""
    evaluate_every: int = 0
    """Look at the test images after so many epochs too, for a curve; the result is always the last epoch's."""
    byol: int = 0
    """Before everything else, learn first weights by so many epochs of BYOL, without labels."""

    @property
    def changes(self) -> dict[str, Any]:
        """The fields of the recipe that are given."""
        names = {one.name for one in fields(Recipe)}
        return {one.name: v for one in fields(self) if one.name in names and (v := getattr(self, one.name)) is not None}


@dataclass(frozen=True)
class Experiment:
    """One network, pruned by one method at one sparsity with one seed, and trained.

    dataset: a name of `prospr.lab.data.datasets()`.
    network: a name of `prospr.lab.models.networks()`, or "timm:NAME", "torchvision:NAME", "package.module:function".
        "auto" is the one usual with the data set, and so is recipe="auto".
    settings: what else the network's function takes, such as {"width": 8}. The number of classes and of input channels
        are the data set's.
    method: "dense", or a name of `prospr.methods()`.
    recipe: a name of `prospr.lab.recipes.recipes()`.

    For one seed every method starts from the same weights and sees the same images in the same order.

    >>> one = Experiment(method="snip", sparsity=0.95, training=Training(epochs=2))
    >>> one.network_name, one.trained_by.epochs, one.trained_by.drops
    ('small_convnet', 2, (1,))
    >>> replace(one, network="small_convnet").identity == one.identity             # which is what "auto" meant
    True
    """

    dataset: str = "digits"
    """Data set; `prospr datasets` lists them."""
    network: str = AUTO
    """Network; `prospr networks` lists them. "auto" is the one usual with the data set."""
    settings: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Settings of the network, such as `width 8`."""
    method: str = "prospr"
    """"dense", or a pruning method; `prospr methods` lists them."""
    sparsity: float = 0.9
    """The share of weights that go."""
    seed: int = 0
    """Of the first weights, the order of the images and their augmentation."""
    recipe: str = AUTO
    """How it is trained; `prospr recipes` lists them. "auto" is the one usual with the data set."""
    data: Data = Data()
    pruning: Pruning = Pruning()
    training: Training = Training()

    def __post_init__(self) -> None:
        _check_values(self)

    def __hash__(self) -> int:  # `settings` is a dict, which has none
        return hash(self.identity)

    @property
    def network_name(self) -> str:
        """The network, "auto" settled."""
        return USUAL[self.dataset].network if self.network == AUTO else self.network

    @property
    def recipe_name(self) -> str:
        """The recipe, "auto" settled."""
        return USUAL[self.dataset].recipe if self.recipe == AUTO else self.recipe

    @property
    def trained_by(self) -> Recipe:
        """The recipe with its changes."""
        base, changes = self._base(), self.training.changes
        if changes.get("schedule") == "cosine":
            changes = {"drops": (), **changes}
        return replace(base, **changes)

    @property
    def augmentation(self) -> tuple[int, bool]:
        """Pixels that images are moved by, and whether they are mirrored."""
        usual = USUAL[self.dataset]
        pad, flip = self.data.pad, self.data.flip
        return usual.pad if pad is None else pad, usual.flip if flip is None else flip

    @property
    def identity(self) -> str:
        """Sixteen hexadecimal digits: a hash of all values that differ from their defaults.

        A value that says what the default would be ("auto" spelled out, a recipe's own learning rate) has no part in
        it, nor has anything about pruning where the method is "dense". So a new field whose default changes nothing
        leaves the identities of old experiments as they are.
        """
        content = {"schema": SCHEMA, **dict(sorted(_differences(self._plain())))}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def label(self) -> str:
        """The experiment in a few words.

        >>> Experiment(dataset="cifar10", method="snip", sparsity=0.95, seed=2).label
        'resnet20, cifar10, snip 95 %, seed 2'
        """
        pruned, how = DENSE, self.pruning
        if self.method != DENSE:
            pruned = f"{self.method} {100 * self.sparsity:g} %"
            pruned += f" by {how.granularity}" if how.granularity is not None else ""
            pruned += " shrunk" if how.shrink else ""
            pruned += f" weights {how.weights}" if how.weights != "keep" else ""
            pruned += " after training" if how.after_training else ""
            pruned += f" from step {how.rewind}" if how.rewind is not None else ""
            pruned += f" {how.check}" if how.check is not None else ""
        start = f", {self.training.byol} epochs of BYOL" if self.training.byol else ""
        return f"{self.network_name}, {self.dataset}, {pruned}{start}, seed {self.seed}"

    def differences(self) -> list[tuple[str, str]]:
        """Every value that is not the usual one, as in `identity`: its full name, and the value in words.

        >>> Experiment(method="snip", training=Training(epochs=2)).differences()
        [('method', 'method=snip'), ('network', 'network=small_convnet'), ('recipe', 'recipe=digits'),
         ('training.epochs', 'epochs=2')]
        """
        found = dict(sorted(_differences(self._plain())))
        settings = found.pop("settings", {})
        found |= {f"settings.{key}": value for key, value in sorted(settings.items())}
        return [(name, f"{name.rpartition('.')[2]}={value}") for name, value in found.items()]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Experiment:
        """What `to_dict` gave, of this release or an older one.

        >>> one = Experiment(sparsity=0.5, training=Training(drops=(3,), epochs=5))
        >>> Experiment.from_dict(one.to_dict()) == one
        True
        """
        parts = {"data": Data, "pruning": Pruning, "training": Training}
        known = {name: _filled(parts[name], value) for name, value in values.items() if name in parts}
        return _filled(cls, {**values, **known})

    def _base(self) -> Recipe:
        """The recipe by name, in as many epochs as asked for."""
        base, epochs = recipes()[self.recipe_name], self.training.epochs
        return base if epochs is None else base.scaled(epochs)

    def _plain(self) -> Experiment:
        """The same experiment in the one way of saying it that is hashed."""
        pad, flip = self.augmentation
        usual = USUAL[self.dataset]
        base, named = self._base(), recipes()[self.recipe_name]
        own = {
            name: None
            for name, value in self.training.changes.items()
            if value == getattr(named if name == "epochs" else base, name)
        }
        if self.training.loss == "cross-entropy":
            own["loss"] = None
        dense = self.method == DENSE
        return replace(
            self,
            network=self.network_name,
            recipe=self.recipe_name,
            sparsity=Experiment.sparsity if dense else self.sparsity,
            data=replace(
                self.data, pad=None if pad == usual.pad else pad, flip=None if flip == usual.flip else bool(flip)
            ),
            pruning=Pruning() if dense else self.pruning,
            training=replace(self.training, **own),
        )


def _differences(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("pruning.rounds", 20) and so on, of every field that is not as it is by default."""
    default = type(value)()
    for one in fields(value):
        now = getattr(value, one.name)
        if is_dataclass(now):
            yield from _differences(now, f"{prefix}{one.name}.")
        elif now != getattr(default, one.name):
            yield prefix + one.name, _number(now)


def _number(value: Any) -> Any:
    """1.0 as 1, so that both are one value."""
    if isinstance(value, dict):
        return {key: _number(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_number(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _filled(kind: Any, values: Any) -> Any:
    if not isinstance(values, Mapping):
        raise SettingError(f"{kind.__name__}: {values!r} is no table of values")
    known = {one.name for one in fields(kind)}
    unknown = [name for name in values if name not in known]
    if unknown:
        raise SettingError(
            f"{kind.__name__} has no field {unknown[0]!r}; is it of a newer release of prospect-pruning?"
        )
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _check_values(e: Experiment) -> None:
    """What can be known without torch: the values, one by one and together."""
    data, pruning, training = e.data, e.pruning, e.training
    if e.dataset not in USUAL:
        raise SettingError(f"unknown data set {e.dataset!r}; known names: {', '.join(USUAL)}")
    if e.recipe != AUTO and e.recipe not in recipes():
        raise SettingError(f"unknown recipe {e.recipe!r}; known names: auto, {', '.join(recipes())}")
    if not isinstance(e.sparsity, (int, float)) or not 0 <= e.sparsity < 1:
        raise SettingError(f"sparsity={e.sparsity!r}: give a share from 0 up to, but not including, 1")
    if not isinstance(e.seed, int) or e.seed < 0:
        raise SettingError(f"seed={e.seed!r}: use a whole number, 0 or more")
    if (e.dataset == "folder") != (data.images is not None):
        raise SettingError("data.images and dataset='folder' belong together: give both or neither")
    if not 0 <= data.validation < 1:
        raise SettingError(f"data.validation={data.validation!r}: give a share from 0 up to, but not including, 1")
    least = {
        "data.size": (data.size, 1),
        "data.pad": (data.pad, 0),
        "pruning.keep_per_layer": (pruning.keep_per_layer, 0),
        "pruning.round_to": (pruning.round_to, 1),
        "pruning.score_batch_size": (pruning.score_batch_size, 1),
        "pruning.rewind": (pruning.rewind, 0),
        "pruning.rounds": (pruning.rounds, 1),
        "pruning.steps": (pruning.steps, 0),
        "training.epochs": (training.epochs, 1),
        "training.evaluate_every": (training.evaluate_every, 0),
        "training.byol": (training.byol, 0),
    }
    for name, (value, low) in least.items():
        if value is not None and (not isinstance(value, int) or value < low):
            raise SettingError(f"{name}={value!r}: use a whole number, {low} or more")
    positive = {
        "pruning.inner_lr": pruning.inner_lr if pruning.inner_lr != AUTO else None,
        "training.lr": training.lr,
        "training.drop_factor": training.drop_factor,
    }
    for name, value in positive.items():
        if value is not None and not (isinstance(value, (int, float)) and 0 < value < math.inf):
            raise SettingError(f"{name}={value!r}: use a number above 0")
    if pruning.weights not in ("keep", "rescale", "redraw"):
        raise SettingError(f"pruning.weights={pruning.weights!r}: use 'keep', 'rescale' or 'redraw'")
    if pruning.check not in (None, *CHECKS):
        raise SettingError(f"pruning.check={pruning.check!r} is not known; use {', '.join(CHECKS)}, or leave it out")
    if training.loss == "dice" and e.dataset not in SEGMENTED:
        raise SettingError(f"training.loss='dice' is for segmentation, and {e.dataset} is for classification")
    if training.byol and e.dataset in SEGMENTED:
        raise SettingError(f"training.byol={training.byol} is for classification, and {e.dataset} is for segmentation")
    _ = e.trained_by  # the recipe checks its values itself
