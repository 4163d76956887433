"""The Masks class: its numbers, by hand."""

import hashlib

import pytest
import torch

import prospr
from prospr import Masks
from prospr.errors import MaskError

A = torch.tensor([[1, 0, 0], [1, 1, 0]], dtype=torch.bool)  # 3 of 6
B = torch.tensor([0, 0, 0, 0], dtype=torch.bool)  # 0 of 4
C = torch.ones(1, 1, 2, 1, dtype=torch.bool)  # 2 of 2


@pytest.fixture
def masks():
    return Masks({"a.weight": A, "b.weight": B, "c.weight": C})


def test_numbers(masks):
    assert (masks.kept, masks.total) == (5, 12)
    assert masks.density == pytest.approx(5 / 12)
    assert masks.sparsity == pytest.approx(7 / 12)
    assert masks.densities() == {"a.weight": 0.5, "b.weight": 0.0, "c.weight": 1.0}
    assert masks.empty() == ["b.weight"]
    assert Masks({"a": A, "c": C}).empty() == []


def test_it_is_a_mapping(masks):
    assert list(masks) == ["a.weight", "b.weight", "c.weight"]
    assert len(masks) == 3
    assert masks["a.weight"] is A or torch.equal(masks["a.weight"], A)
    assert "a.weight" in masks
    assert "a" not in masks
    assert dict(masks).keys() == masks.keys()
    with pytest.raises(KeyError):
        masks["d.weight"]


def test_equality(masks):
    assert masks == Masks({"a.weight": A.clone(), "b.weight": B.clone(), "c.weight": C.clone()})
    assert masks == {"a.weight": A, "b.weight": B, "c.weight": C}
    assert masks != Masks({"a.weight": ~A, "b.weight": B, "c.weight": C})
    assert masks != Masks({"a.weight": A, "b.weight": B})
    assert masks != Masks({"a.weight": A, "b.weight": B, "d.weight": C})
    assert masks != Masks({"a.weight": A.reshape(3, 2), "b.weight": B, "c.weight": C})
    assert masks != Masks({"b.weight": B, "a.weight": A, "c.weight": C})  # the order decides ties
    assert masks != 5
    with pytest.raises(TypeError, match="unhashable"):
        hash(masks)


def test_overlap():
    first = Masks({"a": torch.tensor([True, True, False, False]), "b": torch.tensor([True, False])})
    second = Masks({"b": torch.tensor([True, True]), "a": torch.tensor([False, True, True, True])})
    assert first.overlap(second) == pytest.approx(2 / 3)  # a[1] and b[0], of three
    assert second.overlap(first) == pytest.approx(2 / 5)
    assert first.overlap(first) == 1.0
    assert Masks({"a": B}).overlap({"a": ~B}) == 0.0


def test_overlap_of_other_networks(masks):
    with pytest.raises(MaskError, match=r"d\.weight: only one of the two masks has this layer"):
        masks.overlap({**masks, "d.weight": A})
    with pytest.raises(MaskError, match=r"a\.weight: masks of shape \(2, 3\) and \(3, 2\) differ"):
        masks.overlap({**masks, "a.weight": A.reshape(3, 2)})


def test_digest(masks):
    """A digest that other programs can compute: names, shapes and one byte an entry."""
    h = hashlib.sha256()
    h.update(b"a.weight(2, 3)" + bytes([1, 0, 0, 1, 1, 0]))
    h.update(b"b.weight(4,)" + bytes(4))
    h.update(b"c.weight(1, 1, 2, 1)" + bytes([1, 1]))
    assert masks.digest() == h.hexdigest()
    strided = Masks({"a.weight": A.T.contiguous().T, "b.weight": B, "c.weight": C})
    assert not strided["a.weight"].is_contiguous()
    assert strided.digest() == masks.digest()
    assert Masks({"a.weight": A}).digest() != Masks({"b.weight": A}).digest()
    assert Masks({"a.weight": A}).digest() != Masks({"a.weight": A.reshape(3, 2)}).digest()
    assert Masks({"a.weight": A}).digest() != Masks({"a.weight": ~A}).digest()


def test_printing(masks):
    assert repr(masks) == "Masks(3 layers, 5 of 12 kept, sparsity 0.5833)"
    assert str(masks).splitlines() == [
        "layer     shape    kept  of  density",
        "a.weight  2x3         3   6   50.00%",
        "b.weight  4           0   4    0.00%",
        "c.weight  1x1x2x1     2   2  100.00%",
        "total                 5  12   41.67%",
    ]


def test_printing_of_large_numbers():
    mask = torch.zeros(1000, 1234, dtype=torch.bool)
    mask[0] = True
    assert str(Masks({"w": mask})).splitlines()[1] == "w      1000x1234  1,234  1,234,000    0.10%"


def test_a_mask_without_dimensions():
    masks = Masks({"scale": torch.tensor(True)})
    assert (masks.kept, masks.total, masks.density) == (1, 1, 1.0)
    assert str(masks).splitlines()[1].split() == ["scale", "1", "1", "100.00%"]


def test_to(masks):
    there = masks.to("meta")
    assert all(m.device.type == "meta" for m in there.values())
    assert masks.to("cpu") == masks


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({}, "there are no masks"),
        ({"w": torch.ones(2)}, r"w: a mask must be a tensor of torch\.bool, and is torch\.float32; use mask\.bool\(\)"),
        ({"w": torch.ones(2, dtype=torch.uint8)}, r"w: .* and is torch\.uint8"),
        ({"v": A, "w": [True]}, "w: .* and is list"),
        ({"w": torch.ones(0, 3, dtype=torch.bool)}, r"w: a mask of shape \(0, 3\) has no entries"),
    ],
)
def test_what_is_not_a_mask(masks, message):
    with pytest.raises(MaskError, match=message):
        Masks(masks)


def test_every_error_is_a_pruning_error():
    kinds = [getattr(prospr.errors, name) for name in prospr.errors.__all__]
    errors = [kind for kind in kinds if not issubclass(kind, Warning)]
    assert len(errors) == 14
    assert all(issubclass(kind, prospr.PruningError) for kind in errors)
    assert issubclass(prospr.errors.MaskFileError, MaskError)
