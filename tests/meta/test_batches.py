"""Batches of any form."""

from collections import UserDict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from prospr.errors import BatchError
from prospr.meta.batches import map_tensors, micro_batches, tensors, to_device
from prospr.meta.loss import one_sample

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Output(dict):
    """A dict and a dataclass at once, as Hugging Face's outputs are."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self):
        self.update(loss=self.loss, logits=self.logits)


class Moving(UserDict):
    """As Hugging Face's batches: `to` changes the batch itself."""

    def to(self, device):
        self.data = {key: t.to(device) for key, t in self.data.items()}
        return self


class Frozen(Mapping):
    """A mapping that is no dict."""

    def __init__(self, content):
        self._content = content

    def __getitem__(self, key):
        return self._content[key]

    def __iter__(self):
        return iter(self._content)

    def __len__(self):
        return len(self._content)


ONE, TWO = torch.ones(4, 3), torch.full((4,), 2.0)
TREES = {
    "dict": {"a": ONE, "b": [TWO, "text"]},
    "output": Output(loss=TWO, logits=ONE),
    "moving": Moving({"a": ONE, "b": TWO}),
    "frozen": Frozen({"a": ONE, "b": TWO}),
    "pair": Pair(ONE, (TWO, None)),
}


@pytest.mark.parametrize("name", TREES)
def test_every_tensor_is_reached(name):
    tree = TREES[name]
    assert sorted(t.dim() for t in tensors(tree)) == [1, 2]
    doubled = map_tensors(tree, lambda t: 2 * t)
    assert type(doubled) is (dict if name == "frozen" else type(tree))
    assert sum(t.sum().item() for t in tensors(doubled)) == 2 * (12 + 8)
    assert sum(t.sum().item() for t in tensors(tree)) == 12 + 8  # as it was
    if name == "output":
        assert torch.equal(doubled.logits, doubled["logits"])


def test_moving_a_batch_leaves_it_where_it_was():
    batch = Moving({"a": ONE})
    moved = to_device(batch, torch.device("meta"))
    assert (batch["a"].device.type, moved["a"].device.type) == ("cpu", "meta")
    assert isinstance(moved, Moving)


@pytest.mark.parametrize("name", ["dict", "moving", "frozen", "pair"])
def test_pieces(name):
    pieces = list(micro_batches(TREES[name], 3))
    assert [(share, start) for share, start, _ in pieces] == [(0.75, 0), (0.25, 3)]
    assert [sorted(len(t) for t in tensors(piece)) for _, _, piece in pieces] == [[3, 3], [1, 1]]


def test_pieces_of_nothing():
    with pytest.raises(BatchError, match="tensors with a first dimension to split"):
        list(micro_batches({"a": "text"}, 2))


def test_one_sample_of_labels_too():
    args, kwargs = one_sample(((ONE,), {"labels": torch.arange(4), "weights": torch.ones(5), "scale": torch.ones(())}))
    assert args[0].shape == (1, 3)
    assert {key: tuple(t.shape) for key, t in kwargs.items()} == {"labels": (1,), "weights": (5,), "scale": ()}


def test_a_dict_of_its_own_class_stays_one():
    class Attributed(dict):
        def __getattr__(self, name):
            return self[name]

    given = Attributed(x=torch.ones(2), more=[torch.zeros(1)])
    found = map_tensors(given, lambda t: t + 1)
    assert type(found) is Attributed
    assert found.x.tolist() == [2, 2]
    assert found.more[0].item() == 1
    assert given.x.tolist() == [1, 1]


def test_a_dataclass_with_fields_that_its_init_does_not_take():
    @dataclass(frozen=True)
    class Derived:
        x: torch.Tensor
        double: torch.Tensor = field(init=False)

        def __post_init__(self):
            object.__setattr__(self, "double", 2 * self.x)

    found = map_tensors(Derived(torch.ones(2)), lambda t: t + 1)
    assert (found.x.tolist(), found.double.tolist()) == ([2, 2], [3, 3])
