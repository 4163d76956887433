"""Lightning: a callback that prunes when the training begins."""

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from prospr.errors import LossError, ModelError, SettingError
from prospr.integrations.start import Start, adopt_masks, zero_share
from prospr.meta.loss import ModelLoss

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torchmetrics import Metric
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "prospr.integrations.lightning needs lightning; pip install 'prospect-pruning[lightning]'", name=error.name
    ) from error

__all__ = ["PruneAtStart"]


class PruneAtStart(Start, Callback):
    """Prunes a LightningModule when its training begins; the masks hold while it trains.

    sparsity, batches and settings as in `prospr.prune`. The loss is the module's `training_step` by default; what it
    logs while it is scored is not kept. Scored are batches of the training data, in the weights' own precision whatever
    the training's; the training sees the same batches in the same order as without the callback.

    part: the name of the submodule that is pruned, such as "net"; all of the module by default. Methods that look at
        the network alone (SynFlow, NTK-SAP, PHEW, channels) must see how it is called: where `training_step` does not
        call the module itself (`self(x)`), name the part that it calls.

    The masks are in every checkpoint. A fit that goes on from one goes on with its masks; nothing is pruned again.
    The share of zeros, counted, is logged after every epoch as "sparsity".

        trainer = Trainer(max_epochs=10, callbacks=[PruneAtStart(0.9, part="net")])
    """

    def __init__(self, sparsity: float, *, part: str = "", loss: ModelLoss | None = None, **settings: Any) -> None:
        super().__init__(sparsity, loss=loss, **settings)
        self.part = part

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        adopt_masks(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loss = self.loss or _training_loss(pl_module)
        prepare = lambda batch: _as_in_training(trainer, pl_module, batch)  # noqa: E731
        with _quiet(pl_module):
            self.begin(
                self._pruned(pl_module),
                trainer.train_dataloader,
                loss,
                resumed=trainer.global_step > 0,
                prepare=prepare,
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        zeros = zero_share(self._pruned(pl_module))
        if zeros is not None:
            pl_module.log("sparsity", zeros)

    def _pruned(self, module: LightningModule) -> nn.Module:
        try:
            return module.get_submodule(self.part)
        except AttributeError:
            children = ", ".join(name for name, _ in module.named_children())
            raise ModelError(
                f"part={self.part!r}: {type(module).__name__} has no such part; it has {children}"
            ) from None


def _training_loss(module: LightningModule) -> ModelLoss:
    if not module.automatic_optimization:
        raise SettingError(
            f"{type(module).__name__} optimizes by hand, so its training_step gives no loss to score with; pass "
            "loss=lambda model, batch: ... to the callback"
        )
    one = len(inspect.signature(module.training_step).parameters) == 1

    def loss(_: nn.Module, batch: Any) -> Tensor:
        given = module.training_step(batch) if one else module.training_step(batch, 0)
        value = given["loss"] if isinstance(given, dict) else given
        if not isinstance(value, Tensor):
            raise LossError(f"{type(module).__name__}.training_step gave {value!r}, and not a loss")
        return value

    return loss


def _as_in_training(trainer: Trainer, module: LightningModule, batch: Any) -> Any:
    """A batch after the hooks that Lightning runs on it."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


@contextmanager
def _quiet(module: LightningModule) -> Generator[None]:
    """What training_step logs is not kept, and metrics do not remember it."""
    module.__dict__["log"] = lambda *_, **__: None
    try:
        yield
    finally:
        del module.__dict__["log"]
        for part in module.modules():
            if isinstance(part, Metric):
                part.reset()
