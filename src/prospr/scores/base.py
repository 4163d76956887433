"""What every score has in common."""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from prospr.errors import BatchError, InexactWarning, ModelError, ScoreError
from prospr.layers import inputs_first
from prospr.meta.batches import Stream, map_tensors, tensors
from prospr.meta.loss import (
    Call,
    ModelLoss,
    Params,
    PureLoss,
    call_of,
    called_with,
    cross_entropy,
    masks_on,
    one_sample,
    unwrap,
)
from prospr.meta.products import Products
from prospr.meta.ranks import Team

__all__ = ["Problem", "Score", "Scores", "Tempered", "outputs", "prunable", "shares"]

Scores = dict[str, Tensor]
Which = Callable[[str, nn.Parameter], bool] | Iterable[str] | None

_LINEAR_MAPS = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)


def prunable(model: nn.Module, which: Which = None) -> dict[str, nn.Parameter]:
    """The parameters that may be pruned, by name.

    By default every weight of a convolution or Linear layer (Hugging Face's Conv1D is one), and the matrices of
    attention and recurrent layers; never a bias, a norm layer, an embedding, or a frozen parameter. A weight that is
    used twice counts once: an embedding tied to a Linear layer is that layer's weight. `which` chooses otherwise:
    names, or a function of (name, parameter).

    >>> import torch, prospr
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4))
    >>> list(prospr.prunable(net))
    ['0.weight']
    """
    model = unwrap(model)
    named = dict(model.named_parameters())
    if which is None:
        matrices = {id(p) for module in model.modules() for p in _matrices(module)}
        chosen = {name: p for name, p in named.items() if id(p) in matrices and p.requires_grad}
    elif callable(which):
        chosen = {name: p for name, p in named.items() if which(name, p)}
    else:
        wanted = [which] if isinstance(which, str) else list(which)
        tied = {id(p): name for name, p in named.items()}
        for name in wanted:
            if name not in named:
                other = dict(model.named_parameters(remove_duplicate=False)).get(name)
                if other is not None:
                    raise ModelError(f"prunable names {name!r}, which is tied to {tied[id(other)]!r}; name that one")
                raise ModelError(f"prunable names {name!r}, which is not a parameter; the model has {_some(named)}")
        chosen = {name: p for name, p in named.items() if name in set(wanted)}
    if not chosen:
        raise ModelError(
            f"{type(model).__name__} has nothing to prune: no trainable weight of a convolution or Linear layer"
            if which is None
            else f"prunable= chose none of the {len(named)} parameters: {_some(named)}"
        )
    for name, p in chosen.items():
        if not p.is_floating_point():
            raise ModelError(f"{name}: a parameter of type {p.dtype} cannot be pruned")
    return chosen


def _matrices(module: nn.Module) -> Iterator[nn.Parameter]:
    for attribute, p in module._parameters.items():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ModelError(
                f"{type(module).__name__} has no weights yet; run the model once on a batch, then prune it"
            )
        if p is None or p.dim() < 2 or attribute.startswith("bias"):  # attention has biases of three dimensions
            continue
        if isinstance(module, (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)):
            # not weight_hh_l0_g, which the old weight_norm makes of one
            if re.fullmatch(r"\w*weight|weight_(ih|hh|hr)(_l\d+(_reverse)?)?", attribute):
                yield p
        elif (isinstance(module, _LINEAR_MAPS) or inputs_first(module)) and attribute == "weight":
            yield p


def _some(named: Mapping[str, Any]) -> str:
    names = list(named)
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


@dataclass(frozen=True)
class Problem:
    """What a score may look at."""

    model: nn.Module
    names: tuple[str, ...]  # of the prunable parameters
    batches: Stream | None = None
    loss: ModelLoss = field(default=cross_entropy)
    seed: int = 0
    masks: Mapping[str, Tensor] | None = None  # in a later round: what is left
    recover: bool = False  # whether pruned weights may come back
    density: float | None = None  # the share that will be kept, where it is known
    drawn: Mapping[str, Tensor] | None = None  # other initial values of the prunable parameters than the model's
    team: Team | None = None  # the ranks that score together, each with its part of every batch
    example: Any = None  # what the model takes, where no batch says it

    def weights(self) -> Scores:
        """The initial values of the prunable parameters, pruned or not."""
        named = dict(self.model.named_parameters())
        drawn = self.drawn or {}
        return {name: drawn[name] if name in drawn else named[name].detach() for name in self.names}

    def shape(self, name: str) -> torch.Size:
        """Of a whole weight, also where this rank has some of its rows."""
        return self.weights()[name].shape

    def own(self, name: str, whole: Tensor) -> Tensor:
        """What this rank has of a tensor in the form of the weight `name`: all of it, or some rows."""
        return whole

    def products(self, loss: PureLoss, **settings: Any) -> Products:
        """Derivatives of `loss`, over all ranks."""
        return Products(loss, seed=self.seed, team=self.team, **settings)

    def pure_loss(self, loss: ModelLoss | None = None) -> PureLoss:
        """The loss as a function of the parameters; of the sparse network, where pruned weights stay pruned."""
        model = unwrap(self.model)
        on = masks_on(model)
        masks = {} if self.recover or self.masks is None else self.masks
        both = {name: m & on[name].to(m.device) if name in on else m for name, m in masks.items()}
        return PureLoss(model, loss or self.loss, on | both)

    def start(self, loss: PureLoss) -> Params:
        """The trainable parameters at the start of inner training: masked, in a later round."""
        params = loss.params()
        for name in self.names:
            if name not in params:
                raise ModelError(
                    f"{name}: this parameter is frozen, so it has no gradient; call requires_grad_() on it, "
                    "or leave it out of prunable="
                )
        params = {**params, **(self.drawn or {})}
        masks = self.masks or {}
        return {name: p * masks[name].to(p.device) if name in masks else p for name, p in params.items()}

    def data(self) -> Iterator[Any]:
        if self.batches is None:
            raise BatchError("this method looks at data; pass batches, for instance a DataLoader")
        return self.batches

    def own_call(self) -> Call | None:
        """What the loss calls the model with, for the next batch (which is not read); None where that is not known."""
        ahead = self.batches.peek() if self.batches is not None else []
        call = called_with(self.model, self.loss, ahead[0]) if ahead else None
        return call_of(self.example) if call is None and self.example is not None else call

    def call(self) -> Call | None:
        """The same, for what looks at the shape of the data alone. Ranks all get the first sample that one has."""
        own = self.own_call()
        if self.team is None:
            return own
        sample = None if own is None else one_sample(own)
        some = sample is not None and any(t.numel() for t in tensors(sample))
        first = self.team.first(map_tensors(sample, Tensor.cpu) if some else None)
        places = iter(tensors(sample))
        return map_tensors(first, lambda t: t.to(next(places).device)) if sample is not None else first

    def known_call(self, who: str, own: bool = False) -> Call:
        """The same, and an error where it is not known; `own`: of this rank."""
        call = self.own_call() if own else self.call()
        if call is None:
            raise BatchError(
                f"{who} must know the shape of an input; pass batches, and a loss that calls the model (of the first "
                "batch only the shape is looked at), or example="
            )
        return call


def outputs(returned: Any) -> list[Tensor]:
    """The floating-point tensors that a model returned; without a loss it computed beside them, which is no output."""
    found = [t for t in tensors(returned) if t.is_floating_point()]
    return [t for t in found if t.dim() > 0] or found


class Tempered:
    """A loss of the model's outputs divided by a temperature.

    It cannot reach a loss that the model computes itself, as Hugging Face's do, nor outputs of anything but the model's
    own call: such a loss is taken as it is, and a warning says so.
    """

    def __init__(self, loss: ModelLoss, temperature: float) -> None:
        self.loss = loss
        self.temperature = temperature

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        own: list[Tensor] = []
        called = False

        def cooled(_, __, out):
            nonlocal called
            called = True
            own.extend(t for t in tensors(out) if t.dim() == 0)
            return map_tensors(out, lambda t: t / self.temperature if t.is_floating_point() and t.dim() > 0 else t)

        handle = model.register_forward_hook(cooled)
        try:
            value = self.loss(model, batch)
        finally:
            handle.remove()
        if self.temperature != 1 and (not called or any(value is t for t in own)):
            why = "the model computes its own loss" if called else "the loss does not call the model itself"
            warnings.warn(
                f"{why}, so its outputs cannot be divided by temperature={self.temperature}; "
                "it is 1 here. For another, pass a loss of the outputs, such as loss=lambda model, batch: "
                "cross_entropy(model(batch['input_ids']).logits, batch['labels'])",
                InexactWarning,
                stacklevel=2,
            )
        return value


@dataclass(frozen=True)
class Score:
    """What a weight is worth. A subclass defines `saliency`.

    >>> import torch, prospr
    >>> class Small(prospr.Score):                 # keeps the smallest weights
    ...     def score(self, problem):
    ...         return {name: -w.abs() for name, w in problem.weights().items()}
    >>> net = torch.nn.Linear(4, 1, bias=False)
    >>> with torch.no_grad(): _ = net.weight.copy_(torch.tensor([[1., -2., 3., -4.]]))
    >>> prospr.prune(net, None, sparsity=0.5, method=Small())["weight"].tolist()
    [[True, True, False, False]]
    """

    def saliency(self, problem: Problem) -> Scores:
        """A signed number a weight, such as the derivative of a loss with respect to its mask."""
        raise NotImplementedError(f"{type(self).__name__} must define saliency(problem) or score(problem)")

    def score(self, problem: Problem) -> Scores:
        """What selection ranks: larger is kept."""
        return self.rank(self.saliency(problem))

    def score_groups(self, problem: Problem, total: Callable[[Scores], Scores]) -> Scores:
        """The same for channels. `total` sums over all tensors of a group: of derivatives with respect to the weights'
        masks, that is the derivative with respect to the one mask entry they share."""
        return self.rank(total(self.saliency(problem)))

    def rank(self, saliency: Scores) -> Scores:
        """The size of the saliency, as a share of the whole."""
        return shares(saliency)


def shares(saliency: Scores, team: Team | None = None) -> Scores:
    """Sizes as shares of their sum; `team` has some rows of every weight on each rank."""
    for name, s in saliency.items():
        if not torch.isfinite(s).all():
            bad = int((~torch.isfinite(s)).sum())
            raise ScoreError(f"{name}: {bad} of {s.numel()} scores are NaN or infinite; check the loss and data")
    # Half precision has too few numbers for shares of a million weights.
    sizes = {name: s.abs().to(torch.promote_types(s.dtype, torch.float32)) for name, s in saliency.items()}
    sums = [s.sum(dtype=torch.float64).cpu() for s in sizes.values()]
    total = torch.stack(sums).sum() if sums else torch.zeros((), device="cpu")
    total = total if team is None else team.sum(total)
    return {name: (s / total.to(s.device, s.dtype)) if total > 0 else s for name, s in sizes.items()}
