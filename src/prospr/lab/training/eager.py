"""Training in plain PyTorch, with torch.optim.SGD: what a CPU runs, and the reference for everything faster."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from prospr.errors import SettingError
from prospr.lab.data import Files, Split
from prospr.lab.seeds import derive
from prospr.lab.training.loop import Trainer
from prospr.lab.training.runs import Run
from prospr.meta.loss import replay
from prospr.meta.ranks import Team, fingerprints
from prospr.meta.synced import synced_batch_norm

__all__ = ["EagerTrainer", "Norms"]

Norms = Literal["all", "own"]


class EagerTrainer(Trainer):
    """Trains one run, step by step. On the CPU the result is the same to the bit, resumed or not.

    team: where several ranks train it together. Each takes its part of every batch, and its dropout is its own;
        gradients are those of the whole batch, so the training is that of one process but for rounding.
    norms: what batch norm takes its statistics over: "all" ranks, or a rank's "own" part, as DistributedDataParallel
        does; tests and checkpoints then have the first rank's.

    >>> from prospr.lab.data import Batches, digits
    >>> from prospr.lab.models import build
    >>> from prospr.lab.recipes import Recipe
    >>> data, recipe = digits(), Recipe(epochs=2, batch_size=256, lr=0.1)
    >>> batches = Batches(data.train.images, data.train.labels, recipe.batch_size, seed=0)
    >>> trainer = EagerTrainer(Run(build("small_convnet", seed=0), batches, recipe))
    >>> trainer.train_epoch()
    >>> (state,) = trainer.states()                              # to be saved
    >>> resumed = EagerTrainer(Run(build("small_convnet", seed=0), batches, recipe))
    >>> resumed.load_states([state])
    >>> (result,) = resumed.train(data.test)
    >>> len(result.epochs)
    2
    """

    def __init__(self, run: Run, team: Team | None = None, norms: Norms = "all") -> None:
        super().__init__([run])
        self.run, recipe = run, run.recipe
        self.team = team
        self._own_part = None if team is None else _OwnPart(run, team, norms)
        (self._numerics,) = self.numerics
        if self._numerics.channels_last:
            cast(Any, run.model).to(memory_format=torch.channels_last)  # torch's types leave this form out
        self._optimizer = torch.optim.SGD(
            run.model.parameters(),
            lr=recipe.lr,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            nesterov=recipe.nesterov,
        )
        parameters = dict(run.model.named_parameters())
        # A factor of the weight's own type multiplies twice as fast as a boolean.
        self._kept = [(parameters[name], mask.to(parameters[name])) for name, mask in (run.masks or {}).items()]
        self._enforce()

    def _take(self, start: int, stop: int) -> None:
        run, numerics = self.run, self._numerics
        (sums,) = self._sums
        run.model.train()
        seed = run.batches.seed
        part = (0, 1) if self.team is None else (self.team.rank, self.team.size)
        noise = () if part[0] == 0 else (part[0],)
        batches = islice(run.batches.epoch(self.epoch, part), start, stop)
        rates = run.rates(self.epoch)
        own, seen = self._own_part, torch.zeros_like(sums)
        with numerics.flags(), nullcontext() if own is None else own.norms():
            for step, (images, targets) in enumerate(batches, start):
                for group in self._optimizer.param_groups:
                    group["lr"] = rates[step]
                images = images.to(self.device).contiguous(memory_format=numerics.layout)
                targets = targets.to(self.device)
                self._optimizer.zero_grad(set_to_none=True)
                with (
                    replay(derive("noise", seed, self.epoch, step, *noise), [self.device]),  # a dropout layer's
                    torch.autocast(self.device.type, torch.bfloat16, enabled=numerics.low),
                ):
                    measure = run.task.measure if own is None else own.measure
                    loss, counts = measure(run.model, (images, targets))
                if own is None:
                    loss.backward()
                else:
                    loss = own.backward(loss, targets, step)
                self._optimizer.step()
                self._enforce()
                seen[:1] += loss.detach()
                seen[1:] += counts
        if self.team is not None:
            seen[1:] = self.team.sum(seen[1:])
            self._check_weights()
        sums += seen

    def _check_weights(self) -> None:
        assert self.team is not None
        said = fingerprints(dict(self.run.model.named_parameters()))
        remedy = "All ranks started from the same and took the same steps: is the memory of a machine faulty?"
        self.team.agree("the weights", " ".join(said.values()), remedy)

    def _look(self, part: str, split: Split | Files) -> list[dict[str, float]]:
        if self._own_part is not None:
            self._own_part.share_buffers()
        return super()._look(part, split)

    @torch.no_grad()
    def _enforce(self) -> None:
        for weight, factor in self._kept:
            weight.mul_(factor)

    def _momentum(self, index: int) -> dict[str, Tensor]:
        state = self._optimizer.state
        found = {name: state[p].get("momentum_buffer") for name, p in self.run.model.named_parameters() if p in state}
        return {name: buffer for name, buffer in found.items() if buffer is not None}

    def _load(self, index: int, momentum: dict[str, Tensor]) -> None:
        for name, p in self.run.model.named_parameters():
            self._optimizer.state.pop(p, None)
            if name in momentum:
                self._optimizer.state[p]["momentum_buffer"] = torch.empty_like(p).copy_(momentum[name])
        self._enforce()

    def write_back(self) -> None:
        """Training works on the model itself."""


class _OwnPart:
    """What is different where a rank has a part of every batch."""

    def __init__(self, run: Run, team: Team, norms: Norms) -> None:
        if norms not in get_args(Norms):
            raise SettingError(f"norms={norms!r}: use 'all' or 'own'")
        weight = run.task.weight
        if weight is None:
            raise SettingError(
                f"the loss of this {run.task.name} is no mean over samples, so ranks cannot have a part of a batch "
                "each; train in one process, or with another loss"
            )
        if run.batches.batch_size < team.size:
            raise SettingError(
                f"a batch of {run.batches.batch_size} cannot be cut for {team.size} processes; use fewer of them, or "
                "larger batches"
            )
        self.run, self.team, self.weight = run, team, weight
        found = [m for m in run.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self._normed = found if norms == "all" else []
        self._used: list[nn.Parameter] = []  # what has a gradient; known after the first batch

    @contextmanager
    def norms(self) -> Generator[None]:
        """Batch norm takes the statistics of all ranks."""
        for module in self._normed:
            module.__dict__["forward"] = partial(synced_batch_norm, module, self.team)
        try:
            yield
        finally:
            for module in self._normed:
                module.__dict__.pop("forward", None)

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The mean loss of the part, and its counts; of an empty part, zeros."""
        inputs, targets = batch
        if len(targets):
            return self.run.task.measure(model, batch)
        nothing = torch.zeros(self.run.task.size, device=inputs.device)
        if self._normed:  # its statistics are needed by the others, and theirs here
            return 0 * model(inputs).sum(), nothing
        return torch.zeros((), device=inputs.device), nothing

    def backward(self, loss: Tensor, targets: Tensor, step: int) -> Tensor:
        """Give the parameters the gradient of the whole batch's loss, and return that."""
        weight = float(self.weight(targets))
        if loss.requires_grad:
            # Statistics over all ranks carry cotangents to the others: the weight must be in them.
            (loss * weight if weight else 0 * loss.nan_to_num()).backward()
        if not self._used:
            named = [(name, p) for name, p in self.run.model.named_parameters() if p.grad is not None]
            self.team.agree("the parameters that have a gradient", [name for name, _ in named], "Give them all a part")
            self._used = [p for _, p in named]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._used]
        value = (loss.detach() * weight if weight else torch.zeros_like(loss)).to(grads[0].dtype)
        whole, *means = self.team.mean([value, *grads], weight, step + 1, factor=1.0)
        for p, grad in zip(self._used, means, strict=True):
            p.grad = grad
        return whole

    def share_buffers(self) -> None:
        """Statistics of a rank's own become those of the first."""
        buffers = dict(self.run.model.named_buffers())
        if self._normed or not buffers:
            return
        for name, value in (self.team.share(buffers) or {}).items():
            buffers[name].copy_(value)
