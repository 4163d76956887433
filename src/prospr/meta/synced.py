"""Batch norm with the statistics of all ranks, which can be differentiated any number of times.

PyTorch's own SyncBatchNorm has no second derivative, and none at all on the CPU.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prospr.meta.ranks import Team

__all__ = ["synced_batch_norm"]


class _Sum(torch.autograd.Function):
    """The sum over all ranks. Each rank's value goes into every rank's sum, so its cotangent is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, team: Team) -> Tensor:
        ctx.team = team
        return team.sum(t)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.team), None


def synced_batch_norm(module: nn.modules.batchnorm._BatchNorm, team: Team | None, x: Tensor) -> Tensor:
    """What `module` computes of `x` as a SyncBatchNorm. Without a team, and in eval mode, that is plain batch norm."""
    mean, var = module.running_mean, module.running_var
    if team is None or not module.training:
        training = module.training or (mean is None and var is None)
        return F.batch_norm(x, mean, var, module.weight, module.bias, training, module.momentum or 0.0, module.eps)
    given, x = x.dtype, x.to(torch.promote_types(x.dtype, torch.float32))  # half precision cannot count the pixels
    dims = [0, *range(2, x.dim())]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    count = x.new_full((1,), x.numel() // x.shape[1])
    sums = _Sum.apply(torch.cat([x.sum(dims), count]), team)
    total = sums[-1].detach()
    batch_mean = sums[:-1] / total
    centred = x - batch_mean.view(shape)
    batch_var = _Sum.apply(centred.square().sum(dims), team) / total
    if mean is not None and var is not None and module.num_batches_tracked is not None:
        with torch.no_grad():
            module.num_batches_tracked += 1
            share = module.momentum if module.momentum is not None else 1 / module.num_batches_tracked.item()
            mean.lerp_(batch_mean.detach().to(mean.dtype), share)
            var.lerp_((batch_var.detach() * total / (total - 1)).to(var.dtype), share)
    out = centred * torch.rsqrt(batch_var + module.eps).view(shape)
    if module.weight is not None:
        out = out * module.weight.view(shape)
    return (out if module.bias is None else out + module.bias.view(shape)).to(given)
