"""Training in plain PyTorch, with torch.optim.SGD: what a CPU runs, and the reference for everything faster."""

from __future__ import annotations

from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor

from prospr.lab.seeds import derive
from prospr.lab.training.loop import Trainer
from prospr.lab.training.runs import Run
from prospr.meta.loss import replay

__all__ = ["EagerTrainer"]


class EagerTrainer(Trainer):
    """Trains one run, step by step. On the CPU the result is the same to the bit, resumed or not.

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

    def __init__(self, run: Run) -> None:
        super().__init__([run])
        self.run, recipe = run, run.recipe
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
        batches = islice(run.batches.epoch(self.epoch), start, stop)
        rates = run.rates(self.epoch)
        with numerics.flags():
            for step, (images, targets) in enumerate(batches, start):
                for group in self._optimizer.param_groups:
                    group["lr"] = rates[step]
                images = images.to(self.device).contiguous(memory_format=numerics.layout)
                targets = targets.to(self.device)
                self._optimizer.zero_grad(set_to_none=True)
                with (
                    replay(derive("noise", seed, self.epoch, step), [self.device]),  # a dropout layer's
                    torch.autocast(self.device.type, torch.bfloat16, enabled=numerics.low),
                ):
                    loss, counts = run.task.measure(run.model, (images, targets))
                loss.backward()
                self._optimizer.step()
                self._enforce()
                sums[:1] += loss.detach()
                sums[1:] += counts

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
