"""What the callbacks have in common: prune once, on the data that training is about to see, and disturb nothing."""

import copy
import inspect
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from prospr.errors import BatchError, ModelError, PruningError
from prospr.masks import Masks, enforce
from prospr.masks.select import check_sparsity
from prospr.meta.loss import ModelLoss, unwrap
from prospr.pruning import prune
from prospr.registry import find

__all__ = ["Start", "adopt_masks", "training_batches", "zero_share"]


class Start:
    """How to prune at the start of a training, and what came of it.

    sparsity: the share of prunable weights that go, 0.95 for 95 %.
    loss: `loss(model, batch)`; by default what the trainer itself minimises.
    batches: what to score on; by default batches of the training data.
    settings: of `prospr.prune`: method, prunable, scope, keep_per_layer, granularity, seed, ... Of many processes the
        first scores, on its part of the data, and all get its masks; with ranks="auto" they score together. The method
        is "prospr-one-shot" by default: what a trainer starts from is often pretrained, and "prospr" redraws weights.

    masks: those on the model; None before the training begins.
    """

    def __init__(
        self,
        sparsity: float,
        *,
        loss: ModelLoss | None = None,
        batches: Iterable[Any] | None = None,
        **settings: Any,
    ) -> None:
        inspect.signature(prune).bind(None, None, sparsity, **settings)  # wrong names are told now, not at the start
        check_sparsity(sparsity)
        settings = {"method": "prospr-one-shot"} | settings
        find(settings["method"])
        self.sparsity = sparsity
        self.loss = loss
        self.batches = batches
        self.settings = settings
        self.masks: Masks | None = None

    def begin(
        self,
        model: nn.Module,
        loader: Any,
        loss: ModelLoss,
        *,
        resumed: bool,
        prepare: Callable[[Any], Any] | None = None,
    ) -> None:
        """Prune, unless there are masks on the model: those of a checkpoint, or of an earlier fit, stay.

        prepare: what the trainer does with a batch before the loss sees it.
        """
        _refuse_pieces(model)
        if enforce.held(model):
            self.masks = Masks.of(model)
            return
        if resumed:
            raise ModelError(
                "the training goes on from a checkpoint that put no masks on the model: it was made without this "
                "callback, or the callback was not there when the checkpoint was loaded. Give it to the trainer when "
                "the trainer is made, with the model itself (not model_init=), or begin the training anew"
            )
        given = training_batches(loader, prepare) if self.batches is None else nullcontext(self.batches)
        with given as batches:
            if "ranks" in self.settings:
                self.masks = prune(model, batches, self.sparsity, loss=loss, **self.settings)
            else:
                alone = partial(prune, model, batches, self.sparsity, loss=loss, ranks=None)
                self.masks = _agreed(model, lambda: alone(**self.settings))


def zero_share(model: nn.Module) -> float | None:
    """The share of the masked parameters' weights that are zero now, counted; None without masks."""
    model = unwrap(model)
    named = dict(model.named_parameters(remove_duplicate=False))
    masked = [named[name] for name in enforce.held(model)]
    if not masked:
        return None
    return 1 - sum(int(p.count_nonzero()) for p in masked) / sum(p.numel() for p in masked)


# Checkpoints


def adopt_masks(model: nn.Module) -> None:
    """Let a dense model take the masks out of the state_dict that is loaded into it, as its own.

    A pruned model's state_dict holds its masks; a dense model that loads it would find them unexpected.
    """
    model = unwrap(model)
    hooks = model._load_state_dict_pre_hooks.values()
    if not any(getattr(hook, "hook", None) is _adopt for hook in hooks):
        model.register_load_state_dict_pre_hook(_adopt)


def _adopt(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    found: dict[str, Tensor] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        mask = state_dict.get(f"{prefix}{name}_mask")
        if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == p.shape:
            found[name] = mask
    if found:
        # PyTorch is going through the model's hooks just now, and a masked parameter of its own adds one to them.
        model._load_state_dict_pre_hooks = OrderedDict(model._load_state_dict_pre_hooks)
        enforce.apply(model, found)


# Data


@contextmanager
def training_batches(loader: Any, prepare: Callable[[Any], Any] | None = None) -> Generator[Iterable[Any]]:
    """The batches that `loader` is about to give, without taking them from it.

    They are read by a loader of its own, in this process, with copies of the samplers; after the block the generators
    of Python, NumPy and PyTorch's CPU are as they were. A generator that the dataset itself keeps is not.
    """
    state, numpy = random.getstate(), sys.modules.get("numpy")
    numpys = numpy.random.get_state() if numpy is not None else None
    torchs = torch.get_rng_state()
    try:
        yield _Prepared(_own_loader(loader), prepare)
    finally:
        random.setstate(state)
        torch.set_rng_state(torchs)
        if numpy is not None:
            numpy.random.set_state(numpys)


class _Prepared:
    """Batches, each after what the trainer does to it; can be begun again."""

    def __init__(self, batches: Iterable[Any], prepare: Callable[[Any], Any] | None) -> None:
        self.batches = batches
        self.prepare = prepare

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches) if self.prepare is None else map(self.prepare, self.batches)


def _own_loader(loader: Any) -> Iterable[Any]:
    if isinstance(loader, Sequence) and not any(hasattr(part, "batch_sampler") for part in loader):
        return loader  # a list of batches
    if not all(hasattr(loader, name) for name in ("dataset", "batch_sampler", "collate_fn")):
        raise BatchError(
            f"batches to prune on cannot be read from a {type(loader).__name__} without taking them from the training; "
            "pass batches= to the callback"
        )
    dataset, collate = loader.dataset, loader.collate_fn
    if isinstance(dataset, IterableDataset):
        if iter(dataset) is dataset:
            raise BatchError(
                f"a {type(dataset).__name__} is used up by reading it, so batches to prune on would be missing from "
                "the training; pass batches= to the callback"
            )
        return DataLoader(dataset, loader.batch_size, collate_fn=collate, drop_last=loader.drop_last)
    shared = {id(dataset): dataset}  # which samplers hold, and which is not copied
    own = {"collate_fn": collate, "generator": copy.deepcopy(loader.generator, shared)}
    if loader.batch_sampler is None:
        return DataLoader(dataset, None, sampler=copy.deepcopy(loader.sampler, shared), **own)
    return DataLoader(dataset, batch_sampler=copy.deepcopy(loader.batch_sampler, shared), **own)


# Many processes


def _refuse_pieces(model: nn.Module) -> None:
    """A rank that holds a piece of a weight cannot score it."""
    for name, p in model.named_parameters():
        if type(p.data).__name__ == "DTensor" or hasattr(p, "ds_id") or "_flat_param" in name:
            raise ModelError(
                f"{name}: this weight is spread over several processes (FSDP, DeepSpeed, tensor parallel), and scores "
                "are taken of whole weights; prune before it is spread: prospr.prune(model, batches, sparsity)"
            )


def _agreed(model: nn.Module, work: Callable[[], Masks]) -> Masks:
    """The masks that `work` puts on the model; of many processes the first does it, and all get the same."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return work()
    said: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            said = [{name: mask.cpu() for name, mask in work().items()}]
        except PruningError as error:
            said = [error]
    dist.broadcast_object_list(said, src=0)
    if isinstance(said[0], PruningError):
        raise said[0]
    masks = Masks(said[0])
    masks.apply(model)
    return masks
