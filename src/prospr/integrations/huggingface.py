"""Hugging Face's Trainer: a callback that prunes when the training begins, and the loss and start of its models."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from prospr.errors import LossError
from prospr.integrations.start import Start, adopt_masks, zero_share

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "prospr.integrations.huggingface needs transformers; pip install 'prospect-pruning[huggingface]'",
        name=error.name,
    ) from error

__all__ = ["PruneAtStart", "initial_weights", "loss"]


def loss(model: nn.Module, batch: Any) -> Tensor:
    """`model(**batch).loss`: what a Hugging Face model computes where the batch has labels."""
    value = model(**batch).loss
    if value is None:
        raise LossError(f"{type(model).__name__} gave no loss; its batch has {', '.join(batch)}, and needs labels")
    return value


def initial_weights(model: nn.Module) -> None:
    """Draw a Hugging Face model's weights anew, in place, as its class does: an `init=` for NtkSap, shrink and redraw.

    >>> import prospr
    >>> method = prospr.Iterative(prospr.NtkSap(init=initial_weights), rounds=20)     # "ntk-sap" for these models
    """
    model.apply(model._init_weights)  # ty: ignore[invalid-argument-type]


class PruneAtStart(Start, TrainerCallback):
    """Prunes the model of a `transformers.Trainer` when its training begins; the masks hold while it trains.

    sparsity, batches and settings as in `prospr.prune`; loss is `model(**batch).loss` by default. Scored are
    batches of the training data, in the weights' own precision whatever the training's; the training sees the same
    batches in the same order as without the callback.

    The masks are in every checkpoint. A training that goes on from one goes on with its masks; nothing is pruned again.
    For that the callback must be given to the Trainer when it is made. Every log has the share of zeros, counted, as
    "sparsity".

        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[PruneAtStart(0.9, method="snip")])
    """

    def on_init_end(self, args, state, control, model=None, **_: Any) -> None:
        if model is not None:
            adopt_masks(model)

    def on_train_begin(self, args, state, control, model=None, train_dataloader=None, **_: Any) -> None:
        assert model is not None
        with _plain_forward(model):
            self.begin(model, train_dataloader, self.loss or loss, resumed=state.global_step > 0)

    def on_log(self, args, state, control, logs=None, model=None, **_: Any) -> None:
        zeros = zero_share(model) if model is not None else None
        if zeros is not None:
            for where in (logs, state.log_history[-1] if state.log_history else None):
                if where is not None:
                    where["sparsity"] = zeros


@contextmanager
def _plain_forward(model: nn.Module) -> Generator[None]:
    """The model without the mixed precision that accelerate has wrapped its forward in."""
    own = model.__dict__
    wrapped = own.get("forward")
    if "_original_forward" not in own or wrapped is None:
        yield
        return
    own["forward"] = own["_original_forward"]
    try:
        yield
    finally:
        own["forward"] = wrapped
