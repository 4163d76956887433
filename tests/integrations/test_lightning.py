"""The callback in Lightning: the same data, masks that hold and are saved, no pruning twice."""

import importlib
import logging
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import prospr
from prospr.errors import BatchError, LossError, ModelError, SettingError

pytest.importorskip("lightning")
import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torchmetrics.classification import MulticlassAccuracy

from prospr.integrations.lightning import PruneAtStart

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*exists and is not empty.*"),
    pytest.mark.filterwarnings("ignore:.*number of training batches.*", "ignore::FutureWarning"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(pl.LightningModule):
    """Calls itself in training_step, logs, and keeps a metric."""

    def __init__(self, dropout: float = 0.1):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(
                nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3)
            )
        self.accuracy = MulticlassAccuracy(3)
        self.seen: list = []  # batches that it was trained on, and scored on
        self.scored: list = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        scores = self(batch[0])
        self.accuracy(scores, batch[1])
        loss = F.cross_entropy(scores, batch[1])
        self.log("loss", loss)
        self.log("accuracy", self.accuracy)
        (self.seen if self.begun else self.scored).append(batch[0].clone())
        return loss

    begun = False

    def on_train_epoch_start(self):
        self.begun = True

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


class Inside(Classifier):
    """Calls its network, and not itself."""

    def training_step(self, batch):
        return {"loss": F.cross_entropy(self.net(batch[0]), batch[1])}


class ByHand(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Silent(Classifier):
    def training_step(self, batch, batch_idx):
        return None


def data(workers: int = 0, shuffle: bool = True) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(48, 6, generator=generator)
    settings = {"num_workers": workers, "persistent_workers": workers > 0}
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()), 8, shuffle=shuffle, **settings)


def fit(module, callbacks, folder, *, loader=None, checkpoint=None, **settings) -> pl.Trainer:
    pl.seed_everything(3, verbose=False)
    trainer = pl.Trainer(
        default_root_dir=folder,
        callbacks=[*callbacks, ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{epoch}")],
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 2, **settings},
    )
    trainer.fit(module, loader if loader is not None else data(), ckpt_path=checkpoint)
    return trainer


def assert_zero(model, masks) -> None:
    assert all(not model.get_parameter(name)[~mask].any() for name, mask in masks.items())


@pytest.mark.parametrize(
    ("workers", "settings"),
    [(0, {}), (0, {"precision": "bf16-mixed"}), (0, {"accumulate_grad_batches": 3}), (1, {})],
    ids=["plain", "bf16", "accumulation", "workers"],
)
def test_same_data_and_masks_that_hold(tmp_path, workers, settings):
    dense, sparse = Classifier(), Classifier()
    fit(dense, [], tmp_path / "dense", loader=data(workers), **settings)
    callback = PruneAtStart(0.8)
    trainer = fit(sparse, [callback], tmp_path / "sparse", loader=data(workers), **settings)
    assert len(sparse.seen) == len(dense.seen) == 12
    assert all(torch.equal(a, b) for a, b in zip(sparse.seen, dense.seen, strict=True))
    assert callback.masks is not None
    assert list(callback.masks) == ["net.0.weight", "net.4.weight"]
    assert callback.masks.kept == round(0.2 * callback.masks.total)
    assert_zero(sparse, callback.masks)
    assert trainer.callback_metrics["sparsity"].item() == pytest.approx(callback.masks.sparsity)
    assert {"loss", "accuracy"} <= set(trainer.callback_metrics)
    scored = list({tuple(x.flatten().tolist()): x for x in sparse.scored}.values())
    assert len(scored) == 4
    batches = [(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()) for x in scored]
    assert prospr.prune(Classifier(), batches, 0.8, method="prospr-one-shot") == callback.masks  # in full precision


def test_going_on_from_a_checkpoint(tmp_path):
    whole, rest = PruneAtStart(0.8, method="snip"), PruneAtStart(0.5, method="random")
    one, two = Classifier(dropout=0.0), Classifier(dropout=0.0)
    fit(one, [whole], tmp_path, loader=data(shuffle=False))
    fit(two, [rest], tmp_path / "again", loader=data(shuffle=False), checkpoint=tmp_path / "epoch=0.ckpt")
    assert not two.scored
    assert len(two.seen) == 6
    assert rest.masks == whole.masks
    for name, p in one.named_parameters():
        assert torch.equal(p, two.get_parameter(name)), name  # as if it had never stopped


def test_a_checkpoint_is_read_without_a_trainer(tmp_path):
    module, callback = Classifier(), PruneAtStart(0.8, method="snip")
    fit(module, [callback], tmp_path)
    path = tmp_path / "epoch=1.ckpt"
    again = Classifier.load_from_checkpoint(path, strict=False)
    masks = prospr.Masks.from_state_dict(torch.load(path, weights_only=True)["state_dict"])
    assert masks == callback.masks
    masks.apply(again)
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in module.named_parameters())


def test_a_second_fit_keeps_the_masks(tmp_path):
    module, first, second = Classifier(), PruneAtStart(0.8, method="snip"), PruneAtStart(0.5, method="random")
    fit(module, [first], tmp_path / "one")
    fit(module, [second], tmp_path / "two")
    assert second.masks == first.masks
    assert_zero(module, first.masks)


def test_a_checkpoint_that_was_not_pruned(tmp_path):
    fit(Classifier(), [], tmp_path)
    with pytest.raises(ModelError, match=r"goes on from a checkpoint that put no masks on the model"):
        fit(Classifier(), [PruneAtStart(0.8)], tmp_path, checkpoint=tmp_path / "epoch=0.ckpt")


@pytest.mark.parametrize("method", ["synflow", "ntk-sap", "phew"])
def test_methods_that_must_see_the_call(tmp_path, method):
    whole = PruneAtStart(0.8, method=method)
    fit(Classifier(), [whole], tmp_path, max_epochs=1)
    part = PruneAtStart(0.8, method=method, part="net")
    module = Inside()
    fit(module, [part], tmp_path, max_epochs=1)
    assert part.masks is not None
    assert {f"net.{name}": int(m.sum()) for name, m in part.masks.items()} == {
        name: int(m.sum()) for name, m in whole.masks.items()
    }
    assert_zero(module.net, part.masks)
    with pytest.raises(BatchError, match="must know the shape of an input"):
        fit(Inside(), [PruneAtStart(0.8, method=method)], tmp_path, max_epochs=1)


def test_what_goes_wrong_says_what_to_do(tmp_path):
    with pytest.raises(ModelError, match=r"part='head': Classifier has no such part; it has net, accuracy"):
        fit(Classifier(), [PruneAtStart(0.8, part="head")], tmp_path)
    with pytest.raises(SettingError, match=r"ByHand optimizes by hand.*pass loss="):
        fit(ByHand(), [PruneAtStart(0.8)], tmp_path)
    with pytest.raises(LossError, match=r"Silent.training_step gave None, and not a loss"):
        fit(Silent(), [PruneAtStart(0.8)], tmp_path)
    with pytest.raises(BatchError, match=r"cannot be read from a list without taking them.*pass batches="):
        fit(Classifier(), [PruneAtStart(0.8)], tmp_path, loader=CombinedLoader([data(), data()]))


def test_without_the_library(monkeypatch):
    monkeypatch.delitem(sys.modules, "prospr.integrations.lightning")
    for name in ("lightning", "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"needs lightning; pip install 'prospect-pruning\[lightning\]'"):
        importlib.import_module("prospr.integrations.lightning")
