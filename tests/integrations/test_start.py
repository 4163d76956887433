"""What the callbacks share: data that are not taken from the training, masks out of checkpoints, several processes."""

import random

import numpy as np
import pytest
import torch
from integrations.ranks import RANKS, run
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import prospr
from prospr.errors import BatchError, ModelError, SettingError
from prospr.integrations.start import Start, adopt_masks, training_batches, zero_share

NUMBERS = TensorDataset(torch.arange(20.0))


class Drawn(Dataset):
    """Numbers with noise from every global generator."""

    def __len__(self):
        return 20

    def __getitem__(self, i):
        return i + torch.rand(()) + random.random() + np.random.rand()  # noqa: NPY002  what users' transforms do


class Counting(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(20.0))


class Once(IterableDataset):
    def __iter__(self):
        return self

    def __next__(self):
        return torch.zeros(())


def shuffled(workers: int = 0, generator=None) -> DataLoader:
    return DataLoader(NUMBERS, 4, shuffle=True, num_workers=workers, generator=generator)


LOADERS = {
    "global": shuffled,
    "generator": lambda: shuffled(generator=torch.Generator().manual_seed(5)),
    "sampler": lambda: DataLoader(
        NUMBERS, 4, sampler=RandomSampler(NUMBERS, generator=torch.Generator().manual_seed(5))
    ),
    "augmented": lambda: DataLoader(Drawn(), 4, shuffle=True),
    "one-by-one": lambda: DataLoader(NUMBERS, None, shuffle=True),
    "iterable": lambda: DataLoader(Counting(), 4),
}


def all_of(loader) -> torch.Tensor:
    return torch.cat([torch.as_tensor(b[0] if isinstance(b, (list, tuple)) else b).flatten() for b in loader])


def seed() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002


@pytest.mark.parametrize("name", LOADERS)
def test_reading_ahead_takes_nothing(name):
    seed()
    alone = all_of(LOADERS[name]())
    seed()
    loader = LOADERS[name]()
    with training_batches(loader) as batches:
        ahead = all_of(batches)
        again = all_of(batches)
    after = all_of(loader)
    assert torch.equal(after, alone)
    assert torch.equal(ahead, alone)  # the batches that are coming
    assert len(again) == len(alone)


def test_where_reading_ahead_would_take():
    once = training_batches(DataLoader(Once(), 4))
    with pytest.raises(BatchError, match=r"Once is used up by reading it.*pass batches= to the callback"), once:
        pass
    generator = training_batches(x for x in ())
    with pytest.raises(BatchError, match=r"cannot be read from a generator without taking.*pass batches="), generator:
        pass


def test_wrong_settings_are_told_at_once():
    with pytest.raises(TypeError, match="sparcity"):
        Start(0.5, sparcity=0.9)
    with pytest.raises(SettingError, match=r"sparsity=1\.5"):
        Start(1.5)
    with pytest.raises(SettingError, match=r"method='snap' is not known"):
        Start(0.5, method="snap")


class Rooted(nn.Module):
    """A masked parameter of the model itself, beside those of its layers."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 4))
        self.layer = nn.Linear(4, 2)


def test_a_dense_model_adopts_masks():
    torch.manual_seed(0)
    pruned, dense = Rooted(), Rooted()
    masks = prospr.prune(pruned, None, 0.5, method="magnitude", prunable=["matrix", "layer.weight"])
    adopt_masks(dense)
    adopt_masks(dense)
    dense.load_state_dict(pruned.state_dict())
    assert prospr.Masks.of(dense) == masks
    assert zero_share(dense) == 0.5
    dense.load_state_dict(Rooted().state_dict())  # the masks stay
    assert zero_share(dense) == 0.5
    plain = Rooted()
    adopt_masks(plain)
    plain.load_state_dict(Rooted().state_dict())
    assert zero_share(plain) is None


def test_masks_of_a_state_dict():
    with pytest.raises(prospr.errors.MaskError, match=r"no masks in this state_dict"):
        prospr.Masks.from_state_dict(nn.Linear(2, 2).state_dict())


def test_masks_that_are_on_stay():
    model = nn.Linear(4, 2)
    masks = prospr.prune(model, None, 0.5, method="magnitude")
    start = Start(0.9, method="random")
    start.begin(model, None, None, resumed=True)
    assert start.masks == masks


def test_a_checkpoint_without_masks():
    with pytest.raises(ModelError, match=r"goes on from a checkpoint that put no masks on the model"):
        Start(0.9).begin(nn.Linear(4, 2), None, None, resumed=True)


def test_pieces_of_weights_are_refused():
    model = nn.Linear(4, 2)
    model.weight.ds_id = 0  # as DeepSpeed marks them
    with pytest.raises(ModelError, match=r"weight: this weight is spread over several processes.*prune before"):
        Start(0.5).begin(model, None, None, resumed=False)


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(run, args=(str(folder),), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


def test_all_processes_prune_alike(ends):
    first, second = ends
    assert prospr.Masks(first["masks"]) == second["masks"]
    assert all(torch.equal(t, second["state"][name]) for name, t in first["state"].items())
    assert prospr.Masks(first["masks"]).sparsity == 0.5


def test_an_error_of_one_process_reaches_all(ends):
    assert all("batches is empty" in end["said"] for end in ends)
