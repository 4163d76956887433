"""Tensors that are sharded over ranks: the parameters of a model after FSDP2's `fully_shard`, each rank some rows."""

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from prospr.errors import BatchError, DerivativeError, LossError, ModelError
from prospr.meta.batches import to_device
from prospr.meta.loss import ModelLoss, Params, devices_of, replay
from prospr.meta.ranks import Team

__all__ = ["ShardedProducts", "is_shard", "is_sharded", "like_shard", "local", "mesh_of", "shard_of"]


def is_shard(t: Any) -> bool:
    """Whether it is a DTensor. The module is looked for, not imported: without it there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def is_sharded(model: nn.Module) -> bool:
    return any(is_shard(p) for p in model.parameters())


def local(t: Any) -> Tensor:
    """This rank's rows of a shard, in the same memory; any other tensor as it is."""
    return t._local_tensor if is_shard(t) else t


def shard_of(rows: Tensor, parameter: Any) -> Tensor:
    """This rank's rows as a shard in the form of `parameter`."""
    form = {"shape": parameter.shape, "stride": parameter.stride()}
    module = sys.modules["torch.distributed.tensor"]
    return module.DTensor.from_local(rows, parameter.device_mesh, parameter.placements, run_check=False, **form)


def like_shard(whole: Tensor, parameter: Any) -> Tensor:
    """A tensor that every rank has, as a shard in the form of `parameter`. Nothing is sent."""
    module = sys.modules["torch.distributed.tensor"]
    mesh, places = parameter.device_mesh, parameter.placements
    return module.distribute_tensor(whole.to(parameter.device), mesh, places, src_data_rank=None)


def mesh_of(model: nn.Module) -> Any:
    """The one-dimensional mesh that every parameter lies on by rows; an error where one does not."""
    named: dict[str, Any] = dict(model.named_parameters())
    mesh = next(p.device_mesh for p in named.values() if is_shard(p))
    for name, p in named.items():
        if not is_shard(p):
            raise ModelError(
                f"{name}: this parameter is not sharded and others are; call fully_shard on the whole model"
            )
        if p.device_mesh != mesh or mesh.ndim != 1 or not p.placements[0].is_shard(0):
            raise ModelError(
                f"{name}: it lies as {p.placements} on {p.device_mesh}; only rows on one mesh of one dimension, which "
                "is what fully_shard(model) makes, can be scored. Prune before sharding, then masks.apply(model)"
            )
    return mesh


class ShardedProducts:
    """Gradients of a sharded model's loss, by a backward pass through the model: each rank has its rows of them.

    It stands where `Products` does. FSDP2's backward pass cannot be differentiated, so there are no Hessian products.
    """

    def __init__(self, model: nn.Module, loss: ModelLoss, team: Team, seed: int) -> None:
        self.model, self.loss, self.team = model, loss, team
        self.seed = seed + 104_729 * team.rank  # each rank's dropout is its own
        self.recorder = SimpleNamespace(expected=0)

    def laid_out(self, params: Mapping[str, Tensor]) -> Params:
        return {name: p.detach() for name, p in params.items()}

    def gradient(
        self, params: Mapping[str, Tensor], batch: Any, step: int = 0, last: bool = False
    ) -> tuple[Tensor, Params]:
        """The loss of the whole batch at `params`, this rank's rows, and its rows of the gradient."""
        share = self._share(batch, step, last)
        named = {name: p for name, p in self.model.named_parameters() if name in params}
        grads_before = [(p, p.grad) for p in self.model.parameters()]
        buffers = [(b, b.detach().clone()) for b in self.model.buffers() if not is_shard(b)]
        changed = []
        try:
            for p, _ in grads_before:
                p.grad = None
            for name, p in named.items():
                rows = local(p.detach())
                if rows.data_ptr() != params[name].data_ptr():
                    changed.append((rows, rows.clone()))
                    rows.copy_(params[name])
            devices = devices_of(local(p) for p in named.values())
            with torch.enable_grad(), replay(self.seed + 15_485_863 * step, devices):
                value = self.loss(self.model, to_device(batch, next(iter(named.values())).device))
                (value * (share * self.team.size)).backward()  # FSDP takes the mean over ranks
            if all(p.grad is None for p in named.values()):
                raise LossError("the loss gave no parameter a gradient; is it computed by calling the model?")
            grads = {n: torch.zeros_like(local(p)) if p.grad is None else local(p.grad) for n, p in named.items()}
            return self.team.sum(value.detach().double() * share), {n: g.detach() for n, g in grads.items()}
        finally:
            with torch.no_grad():
                for now, before in [*changed, *buffers]:
                    now.copy_(before)
            for p, grad in grads_before:
                p.grad = grad

    partial_gradient = gradient  # with zeros for what plays no part, as over any ranks

    def hvp(self, *_: Any, **__: Any) -> Params:
        raise DerivativeError(
            "FSDP2's backward pass cannot be differentiated, so there are no Hessian products of a sharded model; use "
            "order='first', or prune before fully_shard"
        )

    def _share(self, batch: Any, step: int, last: bool) -> float:
        """What this rank's part counts of the whole batch. All ranks find the same wrong, so that none waits."""
        said = self.team.gather((float(self.team.settings.weight(batch)), step, last))
        empty = [name for name, (weight, *_) in zip(self.team.names, said, strict=True) if not weight > 0]
        if empty:
            raise BatchError(
                f"a batch is empty on rank {empty[0]}, and every rank must run a sharded model; use larger batches"
            )
        if any(one[1:] != said[0][1:] for one in said):
            raise BatchError("the ranks are not at the same step: do all have the same number of batches?")
        return said[self.team.rank][0] / sum(weight for weight, *_ in said)
