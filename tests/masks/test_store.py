"""Masks on disk: the round trip, what other programs see, and files that are damaged or hostile."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from prospr import Masks
from prospr.errors import MaskFileError
from prospr.masks import store

NAMES = ["z.weight", "a.weight", "слой.вес", "层 1/重み", 'quo"te\\', "emoji 🌱", "m.weight"]


@pytest.fixture
def masks():
    torch.manual_seed(0)
    shapes = [(2, 3), (4,), (), (1, 1, 2, 5), (7, 11), (3,), (64, 65)]
    return Masks({name: torch.rand(shape) > 0.5 for name, shape in zip(NAMES, shapes, strict=True)})


@pytest.fixture
def path(masks, tmp_path):
    path = tmp_path / "masks.safetensors"
    masks.save(path, method="snip", note="naïve ✓")
    return path


def test_round_trip(masks, path):
    loaded = Masks.load(path)
    assert loaded == masks
    assert list(loaded) == NAMES  # the order decides ties, and safetensors does not keep it
    assert loaded.digest() == masks.digest()
    assert all(m.dtype == torch.bool for m in loaded.values())
    assert Masks.load(str(path)) == masks


def test_notes(path):
    assert store.load(path)[1] == {"method": "snip", "note": "naïve ✓"}


def test_masks_that_are_not_contiguous(tmp_path):
    mask = (torch.arange(12) % 5 == 0).reshape(3, 4).T
    Masks({"w": mask}).save(tmp_path / "m")
    assert torch.equal(Masks.load(tmp_path / "m")["w"], mask)


def test_large_masks(tmp_path):
    masks = Masks({"w": torch.rand(2000, 1001) > 0.9, "v": torch.rand(513, 257, 3, 3) > 0.5})
    masks.save(tmp_path / "m")
    assert Masks.load(tmp_path / "m") == masks
    assert masks.total < (tmp_path / "m").stat().st_size < masks.total + 1000  # one byte an entry


def test_a_folder_that_is_not_there_is_made(masks, tmp_path):
    masks.save(tmp_path / "new" / "folder" / "m.safetensors")
    assert Masks.load(tmp_path / "new" / "folder" / "m.safetensors") == masks


def test_other_programs_can_read_it(masks, path):
    with safe_open(path, framework="pt") as file:
        assert sorted(file.keys()) == sorted(NAMES)
        assert file.metadata()["format"] == "prospr-masks"
        assert json.loads(file.metadata()["shapes"]) == {name: list(m.shape) for name, m in masks.items()}
        for name in NAMES:
            assert torch.equal(file.get_tensor(name), masks[name])
    pytest.importorskip("numpy")
    from safetensors.torch import load_file

    assert {n: t.tolist() for n, t in load_file(path).items()} == {n: m.tolist() for n, m in masks.items()}


def test_it_reads_what_safetensors_writes(tmp_path):
    pytest.importorskip("numpy")
    from safetensors.torch import save_file

    tensors = {"b": torch.tensor([True, False]), "a": torch.tensor([[True]])}
    shapes = json.dumps({"b": [2], "a": [1, 1]})
    save_file(tensors, tmp_path / "m", {"format": "prospr-masks", "version": "1", "shapes": shapes})
    assert Masks.load(tmp_path / "m") == Masks(tensors)


def test_the_file_may_be_read_by_others(path):
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_save_that_fails_leaves_the_old_file(masks, path, monkeypatch):
    old = path.read_bytes()
    real, calls = store.raw_bytes, []

    def fail(mask):
        calls.append(mask)
        if len(calls) == 3:
            raise OSError("disk full")
        return real(mask)

    monkeypatch.setattr(store, "raw_bytes", fail)
    with pytest.raises(OSError, match="disk full"):
        Masks({name: ~m for name, m in masks.items()}).save(path)
    assert len(calls) == 3  # in the middle
    assert path.read_bytes() == old
    assert os.listdir(path.parent) == [path.name]


def test_a_save_that_is_interrupted_leaves_nothing(masks, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        masks.save(tmp_path / "m")
    assert os.listdir(tmp_path) == []


def test_a_save_replaces(masks, path):
    other = Masks({"w": torch.tensor([True, False])})
    other.save(path)
    assert Masks.load(path) == other
    assert os.listdir(path.parent) == [path.name]


# --- files that are damaged or hostile


def write(path: Path, header, data: bytes = b"\x01\x00", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def header(shapes='{"w": [2]}', format="prospr-masks", version="1", notes="{}", **tensor):
    metadata = {"format": format, "version": version, "shapes": shapes, "notes": notes}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return {"__metadata__": metadata, "w": {"dtype": "BOOL", "shape": [2], "data_offsets": [0, 2], **tensor}}


def test_the_file_made_by_hand_is_good(tmp_path):
    """So that each file below is bad for one reason alone."""
    assert Masks.load(write(tmp_path / "m", header()))["w"].tolist() == [True, False]


HOSTILE = {
    "another format": (header(format="prospr-scores"), b"\1\0", "not one that Masks.save wrote"),
    "no format": (header(format=None), b"\1\0", "not one that Masks.save wrote"),
    "no metadata": ({"w": header()["w"]}, b"\1\0", "not one that Masks.save wrote"),
    "a later version": (header(version="2"), b"\1\0", "format version '2', and this release reads 1; upgrade"),
    "no version": (header(version=None), b"\1\0", "format version None"),
    "another dtype": (header(dtype="U8"), b"\1\0", r"w is torch\.uint8 .* bool mask"),
    "a float": (header(dtype="F16", shape=[1], shapes='{"w": [1]}'), b"\1\0", r"w is torch\.float16 .* bool mask"),
    "neither true nor false": (header(), b"\1\2", "w holds bytes that are neither true nor false"),
    "255": (header(), b"\xff\0", "w holds bytes that are neither true nor false"),
    "shapes of another": (header(shapes='{"v": [2]}'), b"\1\0", "table of shapes does not match its tensors"),
    "shapes of more": (header(shapes='{"v": [2], "w": [2]}'), b"\1\0", "table of shapes does not match"),
    "another shape": (header(shapes='{"w": [1, 2]}'), b"\1\0", r"w is torch\.bool of shape \[2\], .* \[1, 2\]"),
    "a shape that is none": (header(shapes='{"w": "2"}'), b"\1\0", "announced; the file is damaged"),
    "no shapes": (header(shapes=None), b"\1\0", "announces no masks"),
    "shapes that are a list": (header(shapes='["w"]'), b"\1\0", "announces no masks"),
    "shapes that are not JSON": (header(shapes="{"), b"\1\0", "not a readable mask file"),
    "shapes nested deep": (header(shapes="[" * 200_000), b"\1\0", "not a readable mask file"),
    "notes that are a list": (header(notes="[1]"), b"\1\0", "or no notes"),
    "no masks": ({"__metadata__": header(shapes="{}")["__metadata__"]}, b"", "announces no masks"),
    "a mask of nothing": (header(shapes='{"w": [0]}', shape=[0], data_offsets=[0, 0]), b"", "damaged"),
    "more bytes than announced": (header(), b"\1\0\1", "not a readable mask file"),
    "fewer bytes than announced": (header(), b"\1", "not a readable mask file"),
    "offsets that overlap": (header(data_offsets=[1, 3]), b"\1\0", "not a readable mask file"),
    "offsets that run backwards": (header(data_offsets=[2, 0]), b"\1\0", "not a readable mask file"),
    "a shape that overflows": (header(shape=[2**63, 2**63]), b"\1\0", "not a readable mask file"),
    "a header that is not JSON": (b"{'w'", b"\1\0", "not a readable mask file"),
    "a header that is not text": (b"\xff\xfe\xfd\xfc", b"\1\0", "not a readable mask file"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile(case, tmp_path):
    head, data, message = HOSTILE[case]
    path = write(tmp_path / "m.safetensors", head, data)
    with pytest.raises(MaskFileError, match=message) as error:
        Masks.load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**32, 2**40, 2**63 - 1, 2**64 - 1])
def test_a_header_length_that_lies(length, tmp_path):
    with pytest.raises(MaskFileError, match="not a readable mask file"):
        Masks.load(write(tmp_path / "m", header(), length=length))


def test_truncated(masks, path, tmp_path):
    whole = path.read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    cut = tmp_path / "cut"
    for end in {0, 1, 7, 8, 9, 8 + size // 2, 8 + size - 1, 8 + size, 8 + size + 1, len(whole) - 1}:
        cut.write_bytes(whole[:end])
        with pytest.raises(MaskFileError, match=r"cut: not a readable mask file .*; save the masks again"):
            Masks.load(cut)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_random_bytes(tmp_path, data):
    (tmp_path / "noise").write_bytes(data)
    with pytest.raises(MaskFileError):
        Masks.load(tmp_path / "noise")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_flipped_byte_is_an_error_or_other_masks(masks, path, data):
    """Nothing but a MaskFileError ever comes out, and what loads is masks."""
    whole = bytearray(path.read_bytes())
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    bad = path.with_name("flipped")
    bad.write_bytes(whole)
    try:
        loaded = Masks.load(bad)
    except MaskFileError:
        pass
    else:
        assert all(m.dtype == torch.bool and int(m.view(torch.uint8).max()) <= 1 for m in loaded.values())


def test_no_file(tmp_path):
    for path in (tmp_path / "missing.safetensors", tmp_path):
        with pytest.raises(MaskFileError, match="there is no such file"):
            Masks.load(path)
