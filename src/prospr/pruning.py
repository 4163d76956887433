"""The two verbs: `score` a model, `prune` a model."""

import re
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

from prospr.channels.costs import Unit
from prospr.channels.groups import Groups, find_groups
from prospr.errors import (
    BatchError,
    CollapseError,
    CollapseWarning,
    InexactWarning,
    KeptWholeWarning,
    RankError,
    SettingError,
)
from prospr.granularity import Channels, Focused, Kind, Mapped, Weights
from prospr.layers import computed, inputs_first
from prospr.masks import enforce
from prospr.masks.maps import has_maps, map_factors
from prospr.masks.masks import Masks
from prospr.masks.outputs import entries, outputs
from prospr.masks.patterns import Granularity, parse
from prospr.masks.reach import reach
from prospr.masks.select import Scope, check_floor, check_sparsity
from prospr.meta.batches import Stream
from prospr.meta.loss import (
    Call,
    ModelLoss,
    call_of,
    check_seed,
    cross_entropy,
    devices_of,
    one_sample,
    replay,
    unwrap,
)
from prospr.meta.ranks import Ranks, Team, fingerprints, joined, together
from prospr.meta.shards import is_sharded
from prospr.registry import Method, find
from prospr.schedules import Iterative
from prospr.scores.base import Problem, Score, Scores, Which
from prospr.scores.base import prunable as find_prunable
from prospr.sharded import prune_shards, score_shards

__all__ = ["prune", "score"]


def score(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    *,
    method: str | Score | Iterative | Method = "prospr",
    loss: ModelLoss = cross_entropy,
    prunable: Which = None,
    granularity: Granularity | None = None,
    example: Any = None,
    seed: int = 0,
    ranks: Ranks | Literal["auto"] | None = "auto",
) -> Scores:
    """What every prunable weight is worth, as {parameter name: tensor of its shape}. The model is not changed.

    The scores are shares: together they are 1.

    batches: any iterable of batches, such as a DataLoader; as many are read as the method needs. Each is to hold
        tensors of its own, since several are looked at together.
    method: by default ProsPr in one shot. (That of `prospr.prune` scores in twenty rounds, which are no one score.)
    loss: `loss(model, batch) -> scalar tensor`; cross-entropy of (inputs, targets) by default.
    prunable: which parameters; see `prospr.prunable`.
    granularity, example: "channel" for one score a group of channels, as {set of channels: tensor}; see `prospr.prune`.
        Patterns and blocks are made of the scores of single weights.
    seed: of what the method and the model draw; the same seed gives the same scores.
    ranks: where torch.distributed is initialised all its ranks score together ("auto"): each passes its part of every
        batch, and all get the scores of the whole batches. It must then be called on every rank. A `prospr.Ranks` says
        which and how; None scores in this process alone.

    A model in eval mode is scored in train mode, as it will be trained; one in train mode exactly as it is. One that
    FSDP2's fully_shard has sharded is scored as it lies, with scores that are shards too; see docs/scale.md.
    """
    model, seed = unwrap(model), check_seed(seed)
    chosen = find(method).in_one_shot()
    if chosen.rule.rounds > 1:
        raise SettingError(
            f"method={method!r} scores anew in each of its {chosen.rule.rounds} rounds, so it has no one score; "
            "prospr.prune runs it, and prospr.score takes the score inside it"
        )
    if chosen.rule.redraw:
        raise SettingError(f"method={method!r}: prospr.score scores the weights as they are; leave redraw=True out")
    if (granularity or chosen.granularity) != "channel":
        parse(granularity or chosen.granularity)
    with torch.inference_mode(False), replay(None, devices_of(model.parameters())):
        if is_sharded(model):
            problem = _problem(model, batches, loss, prunable, seed, None, example)
            return score_shards(problem, chosen, granularity or chosen.granularity, ranks)
        facts = {"method": chosen.rule, "seed": seed, "granularity": granularity, "example given": example is not None}
        with _team(ranks, "prospr.score", model, facts) as team:
            problem = _problem(model, batches, loss, prunable, seed, team, example)
            if (granularity or chosen.granularity) != "channel":
                _warn_of_computed(model, prunable)
                return chosen.rule.score.score(problem)
            found = _groups(problem, example, prunable)
            return Channels(found).score(chosen.rule.score, _of_channels(problem, found))


def prune(
    model: nn.Module,
    batches: Iterable[Any] | None,
    sparsity: float,
    *,
    method: str | Score | Iterative | Method = "prospr",
    loss: ModelLoss = cross_entropy,
    prunable: Which = None,
    scope: Scope | None = None,
    keep_per_layer: int = 0,
    granularity: Granularity | None = None,
    budget: Unit = "parameters",
    round_to: int = 1,
    per_flop: bool = False,
    example: Any = None,
    seed: int = 0,
    collapse: Literal["error", "warn", "ignore"] = "error",
    ranks: Ranks | Literal["auto"] | None = "auto",
) -> Masks:
    """Prune `model` in place before it is trained; it stays sparse while it trains. Returns the masks.

    batches: any iterable of batches, such as a DataLoader; as many are read as the method needs (the default four in
        each of its rounds), each with tensors of its own. None for methods that look at weights alone ("magnitude",
        "random", "erk"); with `example`, also for those that look at shapes ("synflow", "ntk-sap", "phew").
    loss: `loss(model, batch) -> scalar tensor`; cross-entropy of (inputs, targets) by default.
    prunable: which parameters; see `prospr.prunable`.
    seed: of what the method and the model draw; on one machine the same seed gives the same masks.
    sparsity: the share of prunable weights that go, 0.95 for 95 %.
    method: "prospr" scores 20 times, each time with the initial weights of every layer in another order, so it is for
        networks that are not trained yet. For weights that are, use "prospr-one-shot". See `prospr.methods()`.
    scope, keep_per_layer, granularity: see `prospr.select`; the method says which by default.
    granularity="channel": whole channels go, with every weight, bias and norm parameter that belongs to them, so that
        `prospr.shrink` can make the network smaller. `sparsity` is then the share of the network's `budget`
        ("parameters", "channels" or "flops") that goes; round_to, per_flop: see `prospr.channels.Groups.select`.
        Which channels go together is found by running the model on one sample of the first batch, or of `example`, an
        input (or a tuple of arguments, or a dict of keyword arguments) as the model takes it.
    collapse: what to do where pruning cuts every path from input to output. A layer that empties beside a skip
        connection is a warning. After an error the model is as it was.
    ranks: see `prospr.score`. All ranks end with the same masks, or with an error.

    >>> import torch, prospr
    >>> model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Linear(50, 3))
    >>> batches = [(torch.randn(32, 20), torch.randint(0, 3, (32,))) for _ in range(4)]
    >>> masks = prospr.prune(model, batches, sparsity=0.9)
    >>> masks
    Masks(2 layers, 115 of 1150 kept, sparsity 0.9000)
    """
    if collapse not in ("error", "warn", "ignore"):
        raise SettingError(f"collapse={collapse!r}: use 'error', 'warn' or 'ignore'")
    check_sparsity(sparsity)  # before the scoring, not after it
    plain, seed = unwrap(model), check_seed(seed)
    chosen = find(method)
    with torch.inference_mode(False), replay(None, devices_of(plain.parameters())):
        granularity = granularity or chosen.granularity
        chosen = chosen.in_one_shot() if is_sharded(plain) else chosen.suited(granularity)
        asked, scope = scope is not None, scope or chosen.scope
        if granularity != "channel" and (budget != "parameters" or round_to != 1 or per_flop):
            raise SettingError("budget, round_to and per_flop are for granularity='channel'")
        if is_sharded(plain):
            problem = _problem(plain, batches, loss, prunable, seed, None, example)
            masks = prune_shards(problem, sparsity, chosen, scope, keep_per_layer, granularity, ranks)
            if collapse != "ignore":
                _check_collapse(plain, masks, None, collapse)
            masks.apply(plain)
            return masks
        facts = {"method": chosen.rule, "seed": seed, "granularity": granularity, "sparsity": sparsity, "scope": scope}
        facts |= {"keep_per_layer": keep_per_layer, "budget": budget, "round_to": round_to, "per_flop": per_flop}
        facts |= {"collapse": collapse, "example given": example is not None}
        with _team(ranks, "prospr.prune", plain, facts) as team:
            problem = _problem(plain, batches, loss, prunable, seed, team, example)
            if granularity == "channel":
                found = _groups(problem, example, prunable)
                kind: Kind = Channels(found, scope, max(1, keep_per_layer), budget, round_to, per_flop)
                problem, collapse = _of_channels(problem, found), "ignore"  # every layer keeps a channel
            else:
                _refuse_transposed(plain, problem.names, granularity)
                _warn_of_computed(plain, prunable)
                kind = _weights(problem, scope, keep_per_layer, granularity, example, asked)
                if granularity == "weight":
                    check_floor({n: w.numel() for n, w in problem.weights().items()}, sparsity, keep_per_layer)
            call = problem.call() if collapse != "ignore" else None
            masks = chosen.rule.masks(problem, sparsity, kind)
            if collapse != "ignore":
                _check_collapse(plain, masks, call, collapse)
            if team is not None:
                remedy = "The scores differ in their last digits, which different hardware or libraries can do"
                team.agree("the masks", masks.digest(), remedy)
        _warn_of_masked(plain, masks)
        masks.apply(plain)
    return masks


def _team(
    ranks: Ranks | Literal["auto"] | None, what: str, model: nn.Module, facts: dict[str, Any]
) -> AbstractContextManager[Team | None]:
    """The ranks that score `model` together; an error where they do not start from the same."""
    if ranks is None or (ranks == "auto" and not together()):
        return nullcontext()
    if not isinstance(ranks, Ranks) and ranks != "auto":
        raise SettingError(f"ranks={ranks!r}: use 'auto', prospr.Ranks(...) or None")
    said = {key: re.sub(r" at 0x[0-9a-f]+", "", repr(value)) for key, value in facts.items()}
    weights = {f"the parameter {name}": p for name, p in model.named_parameters()}
    device = next(iter(weights.values())).device if weights else torch.device("cpu")
    return joined(Ranks() if ranks == "auto" else ranks, what, device, {**said, **fingerprints(weights)})


def _problem(
    model: nn.Module,
    batches: Iterable[Any] | None,
    loss: ModelLoss,
    which: Which,
    seed: int,
    team: Team | None,
    example: Any = None,
) -> Problem:
    if not callable(loss):
        raise SettingError(f"loss={loss!r}: use a function of (model, batch) that returns a scalar tensor")
    names = tuple(find_prunable(model, which))
    stream = None if batches is None else Stream(batches)
    return Problem(model, names, stream, loss, seed, team=team, example=example)


def _refuse_transposed(model: nn.Module, names: tuple[str, ...], granularity: Granularity) -> None:
    """Patterns are counted along a weight's second dimension, which are its inputs in every layer but two."""
    kind, rows, columns = parse(granularity)
    if kind == "weight" or (kind == "block" and rows == columns):
        return
    for name in names:
        module = model.get_submodule(name.rpartition(".")[0])
        if inputs_first(module) or isinstance(module, nn.modules.conv._ConvTransposeNd):
            raise SettingError(
                f"granularity={granularity!r}: such patterns are for weights of (outputs, inputs), and {name} of a "
                f"{type(module).__name__} is (inputs, outputs); leave such layers out of prunable=, or use "
                "granularity='weight' or square blocks"
            )


def _weights(
    problem: Problem, scope: Scope, keep_per_layer: int, granularity: Granularity, example: Any, asked: bool
) -> Kind:
    """Single weights or patterns; `asked`: the scope is the user's own choice and not the method's."""
    if scope not in ("mapped", "focused"):
        return Weights(scope, keep_per_layer, granularity)
    if granularity != "weight":
        raise SettingError(f"scope={scope!r} is for single weights, and granularity is {granularity!r}; leave one out")
    if scope == "mapped":
        return _mapped(problem, keep_per_layer, example, asked)
    call = _example(problem, example)
    return Focused(cache(lambda: find_groups(problem.model, call, verify=False)), keep_per_layer)


def _mapped(problem: Problem, keep_per_layer: int, example: Any, asked: bool) -> Mapped:
    """By what layers make. Where it is not known layers are balanced, with a warning; of maps, if that was asked for,
    it is an error."""
    maps, rows = has_maps(problem.weights()), {}
    factors, unknown = dict.fromkeys(problem.names, 1.0), "sizes of feature maps" if maps else "outputs"
    try:
        call = _example(problem, example)
        if maps:
            factors, unknown = map_factors(problem.model, call, problem.names), "outputs"
        rows = outputs(problem.model, call, problem.names)
    except Exception as error:
        if isinstance(error, RankError) or (asked and unknown != "outputs"):
            raise
        warnings.warn(
            f"the network's {unknown} are not known ({error}), so layers are balanced without regard to them; "
            "pass example= (an input, a tuple of arguments or a dict of keyword arguments), or scope='balanced', which "
            "does without",
            stacklevel=4,
        )
    return Mapped(factors, keep_per_layer, {**rows, **entries(problem.model, problem.names)})


def _groups(problem: Problem, example: Any, which: Which) -> Groups:
    found = find_groups(problem.model, _example(problem, example), only=None if which is None else problem.names)
    found.warn()
    return found


def _example(problem: Problem, example: Any) -> Call:
    call = call_of(example) if example is not None else problem.call()
    if call is None:
        raise BatchError(
            "channels and feature maps are found by running the model, and so are outputs; pass batches and a loss "
            "that calls it, or example= (an input, a tuple of arguments or a dict of keyword arguments)"
        )
    return call


def _of_channels(problem: Problem, found: Groups) -> Problem:
    """The problem with every trainable parameter that a channel has a part in: biases and norms too."""
    trainable = {name for name, p in problem.model.named_parameters() if p.requires_grad}
    names = tuple(name for name in found.parameters if name in found.coupled and name in trainable)
    return replace(problem, names=names)


def _connected(model: nn.Module, masks: Masks, call: Call) -> bool | None:
    found = None
    for part in (one_sample(call), call):  # some models cannot take one sample of a batch, or send each its own way
        reached = reach(model, masks, part)
        if reached is not None and reached.connected is not False:
            return reached.connected
        found = found if reached is None else False
    return found


def _warn_of_computed(model: nn.Module, which: Which) -> None:
    if which is None and (left_out := computed(model)):
        warnings.warn(
            f"{', '.join(left_out[:4])}{', ...' if len(left_out) > 4 else ''}: the weight is computed from other "
            "parameters (weight_norm or another parametrization), so it is not pruned, and no part of the sparsity. "
            "Take that off before, with torch.nn.utils.parametrize.remove_parametrizations, or pass prunable=",
            KeptWholeWarning,
            stacklevel=3,
        )


def _warn_of_masked(model: nn.Module, masks: Masks) -> None:
    """Zeros of masks that are on the model already are initial weights like others, to most scores."""
    held = enforce.held(model)
    again = sum(int((mask & ~held[name].to(mask.device)).sum()) for name, mask in masks.items() if name in held)
    if again:
        warnings.warn(
            f"there were masks on this model, and {again} of the {masks.kept} weights now kept are zeros of theirs; to "
            "begin anew, take a model that is not pruned, and to prune further, a method in rounds to the final "
            "sparsity at once",
            InexactWarning,
            stacklevel=3,
        )


def _check_collapse(model: nn.Module, masks: Masks, call: Call | None, collapse: str) -> None:
    empty = masks.empty()
    connected = _connected(model, masks, call) if call is not None else None
    what = ", ".join(f"{name}: 0 of {masks[name].numel()} weights kept" for name in empty) or "no layer is empty"
    remedy = "lower the sparsity, pass keep_per_layer=1 (or more), or use another method or scope"
    if connected is False and collapse == "error":
        raise CollapseError(f"no path is left from the network's input to its output ({what}); {remedy}")
    if connected is False:
        warnings.warn(f"no path is left from input to output ({what}); {remedy}", CollapseWarning, stacklevel=3)
    elif empty:
        around = "another path from input to output is left" if connected else "unknown whether a path is left"
        warnings.warn(f"{what} ({around}); {remedy}", CollapseWarning, stacklevel=3)
