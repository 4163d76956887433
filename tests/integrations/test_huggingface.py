"""The callback in Hugging Face's Trainer: the same data, masks that hold and are saved, no pruning twice."""

import copy
import importlib
import sys

import pytest
import torch

import prospr
from prospr.errors import ModelError

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from integrations.hf import gpt2, made, sequences
from transformers import Trainer, TrainerCallback, TrainingArguments

from prospr.integrations.huggingface import PruneAtStart

pytestmark = pytest.mark.filterwarnings("ignore::prospr.errors.CollapseWarning")


def examples() -> list[dict]:
    return [{"input_ids": b["input_ids"][0], "labels": b["labels"][0]} for b in sequences(40, size=1)]


class Watched(Trainer):
    """Keeps the batches it trains on, and the gradients' zeros."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def training_step(self, model, inputs, *args, **kwargs):
        self.seen.append(inputs["input_ids"].clone())
        return super().training_step(model, inputs, *args, **kwargs)


def trainer(folder, callbacks, model=None, **settings) -> Watched:
    settings = {"max_steps": 8, "logging_steps": 2, "save_steps": 4, **settings}
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        weight_decay=0.1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        **settings,
    )
    return Watched(model or made(gpt2), arguments, train_dataset=examples(), callbacks=callbacks)


def assert_zero(model, masks) -> None:
    named = dict(model.named_parameters(remove_duplicate=False))
    assert all(not named[name][~mask].any() for name, mask in masks.items())


@pytest.mark.parametrize(
    "settings",
    [{}, {"bf16": True}, {"gradient_accumulation_steps": 2, "max_steps": 4}, {"dataloader_num_workers": 1}],
    ids=["plain", "bf16", "accumulation", "workers"],
)
def test_same_data_and_masks_that_hold(tmp_path, settings):
    dense = trainer(tmp_path / "dense", [], save_strategy="no", **settings)
    dense.train()
    callback = PruneAtStart(0.9, method=prospr.ProsPr(steps=2, lr=0.1))
    sparse = trainer(tmp_path / "sparse", [callback], save_strategy="no", **settings)
    before = copy.deepcopy(sparse.model)
    sparse.train()
    assert len(sparse.seen) == len(dense.seen)
    assert all(torch.equal(a, b) for a, b in zip(sparse.seen, dense.seen, strict=True))
    assert callback.masks is not None
    assert callback.masks.kept == round(0.1 * callback.masks.total)
    assert_zero(sparse.model, callback.masks)
    first = [{"input_ids": seen, "labels": seen} for seen in sparse.seen[:3]]  # scored in full precision, on these
    by_hand = prospr.prune(
        before, first, 0.9, method=prospr.ProsPr(steps=2, lr=0.1), loss=lambda model, batch: model(**batch).loss
    )
    assert by_hand == callback.masks
    assert not torch.equal(sparse.model.transformer.wpe.weight, before.transformer.wpe.weight)


def test_every_log_has_the_sparsity(tmp_path):
    told = []

    class Told(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            told.append(dict(logs))

    callback = PruneAtStart(0.9, method="snip")
    run = trainer(tmp_path, [callback, Told()], save_strategy="no")
    run.train()
    assert len(told) == len(run.state.log_history) == 5
    for log in (*told, *run.state.log_history):
        assert log["sparsity"] == pytest.approx(callback.masks.sparsity)


def test_going_on_from_a_checkpoint(tmp_path):
    whole = PruneAtStart(0.9, method="snip")
    one = trainer(tmp_path, [whole])
    one.train()
    rest = PruneAtStart(0.5, method="random")  # nothing is pruned again
    two = trainer(tmp_path, [rest], model=made(gpt2))
    two.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert len(two.seen) == 4
    assert rest.masks == whole.masks
    assert_zero(two.model, whole.masks)
    for name, p in one.model.named_parameters():
        assert torch.equal(p, two.model.get_parameter(name)), name  # as if it had never stopped


def test_a_checkpoint_that_was_not_pruned(tmp_path):
    trainer(tmp_path, []).train()
    with pytest.raises(ModelError, match=r"put no masks on the model.*Give it to the trainer when the trainer is made"):
        trainer(tmp_path, [PruneAtStart(0.9)]).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_batches_and_loss_of_ones_own(tmp_path):
    batches = sequences(2, seed=9)
    callback = PruneAtStart(
        0.5, method="snip", batches=batches, loss=lambda model, batch: model(batch["input_ids"]).logits.square().mean()
    )
    run = trainer(tmp_path, [callback], max_steps=1, save_strategy="no")
    before = copy.deepcopy(run.model)
    run.train()
    assert callback.masks == prospr.prune(before, batches, 0.5, method="snip", loss=callback.loss)


def test_without_the_library(monkeypatch):
    monkeypatch.delitem(sys.modules, "prospr.integrations.huggingface")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs transformers; pip install 'prospect-pruning\[huggingface\]'"):
        importlib.import_module("prospr.integrations.huggingface")
