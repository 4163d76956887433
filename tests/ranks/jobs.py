"""What the processes of the pool do: functions of (rank, number of ranks, group, ...)."""

import os
import signal
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.nn.functional as F
from cases import BY_NAME, Case, Checkpointed
from ranks import trainings
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import prospr
from prospr.masks.enforce import rezero
from prospr.meta import SGD, Adam, AdamW, metagrad, pure_loss
from prospr.meta.ranks import Team, joined
from prospr.meta.shards import local


def _dict_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A mean over the tokens that count, whose number differs between samples."""
    logits = model(batch["tokens"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def _labelled(generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(0, 7, (9, 5), generator=generator)
    counts = torch.rand(9, 5, generator=generator) < torch.linspace(0.2, 1, 9)[:, None]
    counts[:, 1] = True
    return {"tokens": tokens, "labels": torch.where(counts, tokens, -100)}


def tokens_that_count(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def _checkpointed() -> nn.Module:
    model = Checkpointed()
    model.body[6] = nn.Identity()  # each rank's dropout is its own
    return model


NETWORKS = {
    **BY_NAME,
    "tokens": Case("tokens", BY_NAME["tied"].build, _labelled, _dict_loss),
    "checkpointed-norm": Case("checkpointed-norm", _checkpointed),
    "wide": Case(
        "wide",
        lambda: nn.Sequential(
            nn.Conv2d(2, 6, 3), nn.Tanh(), nn.Conv2d(6, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3)
        ),
    ),
}
METHODS = {
    "sgd": prospr.ProsPr(steps=3, lr=0.1),
    "nesterov": prospr.ProsPr(steps=3, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": prospr.ProsPr(steps=3, optimizer=Adam(lr=0.01)),
    "adamw": prospr.ProsPr(steps=3, optimizer=AdamW(lr=0.01)),
    "auto": prospr.ProsPr(steps=2, lr="auto"),
    "first": prospr.ProsPr(steps=3, lr=0.1, momentum=0.9, order="first"),
    "first-adam": prospr.ProsPr(steps=3, order="first", optimizer=Adam(lr=0.01)),
    "pieces": prospr.ProsPr(steps=2, lr=0.1, micro_batch=2),
    "recompute": prospr.ProsPr(steps=5, lr=0.1, momentum=0.9, store="recompute"),
    "forward": prospr.ProsPr(steps=2, lr=0.1, mode="forward"),
    "snip-mb": prospr.Snip(batches=3),
    "grasp-mb": prospr.Grasp(batches=2),
    "ntksap": prospr.NtkSap(redraws=2),
    "iterative-prospr": prospr.Iterative(prospr.ProsPr(steps=1, lr=0.1), rounds=3),
    "iterative-ntksap": prospr.Iterative(prospr.NtkSap(redraws=1), rounds=2),
}


def method(name: str) -> Any:
    return METHODS.get(name, name)


def part(batch: Any, rank: int, ranks: int) -> Any:
    """Unequal parts, in order: of 2 ranks a third and the rest; of 4 the second has nothing in a batch of five."""
    if isinstance(batch, dict):
        return {key: part(t, rank, ranks) for key, t in batch.items()}
    if isinstance(batch, tuple):
        return tuple(part(t, rank, ranks) for t in batch)
    ends = (
        [0, len(batch) // 3, len(batch)] if ranks == 2 else [0, 1, max(1, len(batch) // 4), len(batch) - 1, len(batch)]
    )
    return batch[ends[rank] : ends[rank + 1]]


def _parts(network: str, count: int, rank: int, ranks: int) -> list[Any]:
    return [part(batch, rank, ranks) for batch in NETWORKS[network].batches(count)]


def _ranks(group, **settings) -> prospr.Ranks:
    return prospr.Ranks(group, timeout=60, silence=5, **settings)


def score(rank, ranks, group, network, name, weight=None):
    case = NETWORKS[network]
    how = _ranks(group, **({} if weight is None else {"weight": globals()[weight]}))
    batches = _parts(network, 6, rank, ranks)
    return prospr.score(case.model(), batches, method=method(name), **case.settings, seed=3, ranks=how)


def prune(rank, ranks, group, network, name, settings, auto=False):
    case = NETWORKS[network]
    model = case.model()
    how = "auto" if auto else _ranks(group)
    batches = _parts(network, 6, rank, ranks)
    masks = prospr.prune(model, batches, 0.5, method=method(name), **case.settings, ranks=how, **settings)
    return masks.digest(), prospr.Masks.of(model).digest()


def synced(rank, ranks, group, network, name):
    case = NETWORKS[network]
    model = nn.SyncBatchNorm.convert_sync_batchnorm(case.model())
    before = {key: t.clone() for key, t in model.state_dict().items()}
    batches = [tuple(t.tensor_split(ranks)[rank] for t in batch) for batch in case.batches(6)]
    scores = prospr.score(model, batches, method=method(name), ranks=_ranks(group), **case.settings)
    assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items())
    assert all("forward" not in module.__dict__ for module in model.modules())
    return scores


def derivative(rank, ranks, group, network, settings):
    case = NETWORKS[network]
    loss = pure_loss(case.model(), **case.settings)
    trace = prospr.meta.Trace()
    batches = _parts(network, 4, rank, ranks)
    result = metagrad(
        loss, loss.params(), batches, SGD(lr=0.1, momentum=0.9), trace=trace, ranks=_ranks(group), **settings
    )
    return result, trace.losses


def parts(rank, ranks, group, network):
    return list(prospr.Ranks(group).part(NETWORKS[network].batches(2)))


def shards(rank, ranks, group, cases):
    """Random scores with many ties, each rank some rows of every layer; what `prospr.select` gives on all of them."""
    generator = torch.Generator().manual_seed(5)

    def whole(least: int, most: int) -> int:
        return int(torch.randint(least, most, (), generator=generator))

    for case in range(cases):
        scores, own = {}, {}
        for i in range(whole(1, 5)):
            dtype = [torch.float64, torch.float32, torch.bfloat16, torch.float16][whole(0, 4)]
            s = torch.randn(whole(1, 40), whole(1, 6), generator=generator)
            s = ((s * 2).round() / 2 if whole(0, 2) else s).to(dtype)
            ends = sorted(whole(0, len(s) + 1) for _ in range(ranks - 1))
            ends = [0, *ends, len(s)]
            scores[f"layer{i}"], own[f"layer{i}"] = s, s[ends[rank] : ends[rank + 1]]
        scores["last"], own["last"] = torch.tensor([0.25, -0.0]), torch.tensor([0.25, -0.0])[rank::ranks]
        sparsity = whole(0, 100) / 100
        how = {"scope": ["global", "layer"][whole(0, 2)], "keep_per_layer": whole(0, 2) * (case % 3)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                want = prospr.select(scores, sparsity, **how)
            except prospr.PruningError as error:
                with pytest.raises(type(error)):
                    prospr.masks.select_shards(own, sparsity, _ranks(group), **how)
                continue
        masks = prospr.masks.select_shards(own, sparsity, _ranks(group), **how)
        for name, mask in masks.items():
            everyone = [None] * ranks
            dist.all_gather_object(everyone, mask, group)
            assert torch.equal(torch.cat(everyone), want[name]), (case, name)
    return cases


# ----------------------------------------------------------------------------------------------------- training


def trains(rank, ranks, group, made, *settings):
    """What a trainer of `trainings` ends with on this rank, and how its epochs went."""
    with joined(_ranks(group), "training", torch.device("cpu"), {}) as team:
        trainer = getattr(trainings, made)(team, *settings)
        (result,) = trainer.train(trainings.data()[1] if made == "trainer" else None)
        return trainer.states()[0], result.test


def runs(rank, ranks, group, experiment, folder, stop_after=None, **options):
    result = trainings.small(experiment, stop_after, folder, ranks=_ranks(group), **options)
    return dict(result.figures), result.folder


def run_with(rank, ranks, group, folder, options):
    return trainings.small(folder=folder, ranks=_ranks(group), **options)


# ------------------------------------------------------------------------------------------------------- shards


def fsdp(network: str, group, children: bool = True, **settings) -> nn.Module:
    """The network with every layer that has parameters sharded, and the whole."""
    model = NETWORKS[network].model()
    mesh = DeviceMesh.from_group(group if group is not None else dist.group.WORLD, "cpu")
    for module in model.children() if children else ():
        if any(True for _ in module.parameters()):
            fully_shard(module, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def gathered(tensors) -> dict[str, Tensor]:
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}


def fsdp_scores(rank, ranks, group, network, name, weight=None):
    """Whole scores, and whether the model was left as it was."""
    case = NETWORKS[network]
    model = fsdp(network, group, children=network != "tokens")  # whose weights are tied across layers
    before = {key: t.clone() for key, t in gathered(model.state_dict()).items()}
    how = {} if weight is None else {"weight": globals()[weight]}
    batches = _parts_of_some(network, 6, rank, ranks)
    scores = prospr.score(model, batches, method=method(name), **case.settings, seed=3, ranks=_ranks(group, **how))
    named = dict(model.named_parameters())
    assert all(s.placements == named[n].placements and s.shape == named[n].shape for n, s in scores.items())
    assert all(torch.equal(t, before[key]) for key, t in gathered(model.state_dict()).items())
    assert all(p.grad is None for p in model.parameters())
    return gathered(scores)


def _parts_of_some(network: str, count: int, rank: int, ranks: int) -> list[Any]:
    """Unequal parts, none of them empty."""
    found = []
    for batch in NETWORKS[network].batches(count):
        ends = {2: [0, 1], 4: [0, 1, 2, 3]}[ranks]
        whole = batch if isinstance(batch, dict) else dict(enumerate(batch))
        own = {k: t[ends[rank] : (ends[rank + 1] if rank + 1 < ranks else len(t))] for k, t in whole.items()}
        found.append(own if isinstance(batch, dict) else tuple(own.values()))
    return found


def fsdp_prune(rank, ranks, group, network, name, settings):
    case = NETWORKS[network]
    model = fsdp(network, group)
    batches = _parts_of_some(network, 6, rank, ranks)
    masks = prospr.prune(model, batches, 0.5, method=method(name), **case.settings, ranks=_ranks(group), **settings)
    whole = masks.whole()
    assert (masks.kept, masks.total, masks.densities()) == (whole.kept, whole.total, whole.densities())
    assert prospr.Masks.of(model).whole() == whole
    assert all(m.to_local().shape == local(model.get_parameter(n)).shape for n, m in masks.items())
    with pytest.raises(prospr.errors.MaskError, match=r"use masks.whole\(\) on all ranks first"):
        masks.digest()
    return whole.digest()


def fsdp_trains(rank, ranks, group, way, optimizer, folder=None):
    """The whole weights after some steps, half of them after a checkpoint was loaded into another model.

    way: whether masks are put on "before" or "after" the sharding; "kept whole": after, and forward passes leave whole
        weights in the modules.
    """
    case = NETWORKS["wide"]
    masks = trainings.random_masks(case.model())
    settings = {"reshard_after_forward": False} if way == "kept whole" else {}
    if way == "before":
        model = case.model()
        masks.apply(model)
        mesh = DeviceMesh.from_group(group if group is not None else dist.group.WORLD, "cpu")
        fully_shard(model, mesh=mesh)
    else:
        model = fsdp("wide", group, **settings)
        masks.apply(model)
    steps = trainings.OPTIMIZERS[optimizer](model.parameters())
    pruned = {name: ~mask for name, mask in masks.items()}
    for i, batch in enumerate(case.batches(8)):
        if i == 4 and folder is not None:
            torch.distributed.checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder, process_group=group)
            other = fsdp("wide", group)
            masks.apply(other)
            with torch.no_grad():
                for p in other.parameters():
                    p.add_(1.0)
            state = {"model": other.state_dict()}
            torch.distributed.checkpoint.load(state, checkpoint_id=folder, process_group=group)
            other.load_state_dict(state["model"])
            assert all(
                torch.equal(a, b)
                for a, b in zip(
                    gathered(model.state_dict()).values(), gathered(other.state_dict()).values(), strict=True
                )
            )
        inputs, targets = (t.tensor_split(ranks)[rank] for t in batch)
        if way == "kept whole":  # and so they are in the modules now
            with torch.no_grad():
                model(inputs)
            assert not isinstance(model[2].weight, DTensor)
            rezero(model)
        steps.zero_grad()
        (F.cross_entropy(model(inputs), targets) * (len(targets) * ranks / len(batch[1]))).backward()
        if way != "before" or i > 0:
            for name, p in gathered({n: p.grad for n, p in model.named_parameters() if n in masks}).items():
                assert not p[pruned[name]].any(), (i, name)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
        for name, w in gathered({n: p for n, p in model.named_parameters() if n in masks}).items():
            assert not w[pruned[name]].any(), (i, name)
            assert w[~pruned[name]].all(), (i, name)
    return gathered(model.state_dict())


def fsdp_refuses(rank, ranks, group, name, settings):
    model = fsdp("wide", group)
    return prospr.prune(
        model, _parts("wide", 6, rank, ranks), 0.5, method=method(name), **{"ranks": _ranks(group), **settings}
    )


# ---------------------------------------------------------------------------------------------- what goes wrong


def other_weights(rank, ranks, group):
    model = NETWORKS["mlp"].model()
    if rank == 1:
        with torch.no_grad():
            model[2].weight[0, 0] += 1e-12
    return prospr.score(model, _parts("mlp", 1, rank, ranks), method="snip", ranks=_ranks(group))


def other_sparsity(rank, ranks, group):
    return prospr.prune(
        NETWORKS["mlp"].model(),
        _parts("mlp", 4, rank, ranks),
        0.5 if rank else 0.4,
        method="snip",
        ranks=_ranks(group),
    )


def too_few_batches(rank, ranks, group, network="mlp"):
    count = 2 if rank == 1 else 4
    return prospr.score(NETWORKS[network].model(), _parts(network, count, rank, ranks), ranks=_ranks(group))


def uneven_steps(rank, ranks, group, order):
    loss = pure_loss(NETWORKS["mlp"].model())
    batches = _parts("mlp", 2 if rank == 1 else 4, rank, ranks)
    return metagrad(loss, loss.params(), batches, SGD(lr=0.1), order=order, ranks=_ranks(group))


def other_masks(rank, ranks, group):
    class Different(prospr.Score):
        def score(self, problem):
            return {n: torch.randn_like(w) for n, w in problem.weights().items()}  # each rank has its own seed

        def __repr__(self):
            return "Different()"

    return prospr.prune(
        NETWORKS["wide"].model(), _parts("wide", 1, rank, ranks), 0.5, method=Different(), ranks=_ranks(group)
    )


def other_shards(rank, ranks, group):
    return prospr.masks.select_shards({"b" if rank == 2 else "a": torch.randn(3)}, 0.5, _ranks(group))


def bad_shards(rank, ranks, group):
    scores = torch.tensor([1.0, 2.0, float("nan") if rank == 2 else 3.0])
    return prospr.masks.select_shards({"a": scores}, 0.5, _ranks(group))


def alone(rank, ranks, group):
    """One rank calls, the others do not."""
    if rank != 0:
        return None
    how = prospr.Ranks(group, timeout=2)
    with warnings.catch_warnings(record=True) as said, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(prospr.meta.ranks, "NOTICE_AFTER", 0.5)
        with pytest.raises(prospr.PruningError) as error:
            prospr.score(NETWORKS["mlp"].model(), _parts("mlp", 4, rank, ranks), ranks=how)
    return type(error.value).__name__, str(error.value), [str(w.message) for w in said]


def by_itself(rank, ranks, group):
    """One rank alone, on purpose."""
    if rank != 0:
        return None
    return prospr.score(NETWORKS["mlp"].model(), NETWORKS["mlp"].batches(6), method=method("sgd"), seed=3, ranks=None)


def dies(rank, ranks, group, how, silence, victim):
    """One rank is killed, stopped, or raises, between two steps."""
    batches = _parts("mlp", 200, rank, ranks)

    def until_then():
        for i, batch in enumerate(batches):
            if i == 20 and rank == victim:
                if how == "raises":
                    raise ValueError("this disk is full")
                os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            yield batch

    began = time.monotonic()
    try:
        settings = prospr.Ranks(group, timeout=60, silence=silence)
        prospr.score(
            NETWORKS["mlp"].model(),
            until_then(),
            method=prospr.ProsPr(steps=100, lr=0.01, order="first"),
            ranks=settings,
        )
    except prospr.PruningError as error:
        return type(error).__name__, str(error), time.monotonic() - began


def leaves(rank, ranks, group):
    raise SystemExit(0)


def gathers(rank, ranks, group):
    """Words and numbers over many rounds."""
    team = Team(_ranks(group), "test", torch.device("cpu"), {})
    said = [team.gather((rank, i)) for i in range(20)]
    sums = team.sums([torch.full((3, 2), rank + 1.0), torch.full((), 2.0, dtype=torch.bfloat16)], 7)
    whole = team.sum(torch.full((2,), rank + 1))
    team.leave()
    return said, sums, whole
