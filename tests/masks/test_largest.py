"""The largest scores by their bits, against sorting them all."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import prospr
from prospr.masks import largest as module
from prospr.masks.largest import largest
from prospr.masks.select import select_shards

KINDS = {
    torch.float64: st.floats(allow_nan=False, allow_infinity=False, width=64),
    torch.float32: st.floats(allow_nan=False, allow_infinity=False, width=32),
    torch.float16: st.floats(allow_nan=False, allow_infinity=False, width=16),
    torch.bfloat16: st.floats(allow_nan=False, allow_infinity=False, width=16),
}
FEW = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-310, -1e-310, 1e-40, 5e-324, 2.5, 1e30])


@st.composite
def parts(draw):
    found = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(list(KINDS)))
        numbers = draw(st.lists(draw(st.sampled_from([KINDS[kind], FEW])), min_size=1, max_size=30))
        t = torch.tensor(numbers, dtype=kind)
        found.append(torch.where(torch.isfinite(t), t, 0))  # 1e30 is infinite in half precision
    return found


def by_sorting(found, count):
    """Python's own numbers, its own sort, which is stable."""
    rows = [(value, i, j) for i, t in enumerate(found) for j, value in enumerate(t.tolist())]
    masks = [torch.zeros(t.shape, dtype=torch.bool) for t in found]
    for _, i, j in sorted(rows, key=lambda row: -row[0])[:count]:
        masks[i][j] = True
    return masks


@pytest.mark.parametrize("piece", [3, 2**22])
@settings(max_examples=150, deadline=None)
@given(found=parts(), share=st.floats(0, 1))
def test_as_by_sorting(piece, found, share):
    count = round(share * sum(t.numel() for t in found))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", piece)
        for mask, want in zip(largest(found, count), by_sorting(found, count), strict=True):
            assert torch.equal(mask, want)


@settings(max_examples=100, deadline=None)
@given(found=parts(), share=st.floats(0, 1), data=st.data())
def test_without_some(found, share, data):
    without = [torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(t), max_size=len(t)))) for t in found]
    count = round(share * sum(int((~m).sum()) for m in without))
    low = [torch.where(m, -torch.inf, t.double()) for t, m in zip(found, without, strict=True)]
    for mask, want in zip(largest(found, count, without=without), by_sorting(low, count), strict=True):
        assert torch.equal(mask, want)


def test_more_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="4 of 3 scores cannot be kept"):
        largest([torch.randn(3)], 4)


def test_a_million_and_a_transposed_one():
    scores = torch.randn(1000, 1000).mul(50).round()  # a few hundred distinct values
    for t in (scores, scores.t()):
        (mask,) = largest([t], 123_457)
        order = torch.sort(t.flatten(), descending=True, stable=True).indices[:123_457]
        want = torch.zeros(10**6, dtype=torch.bool)
        want[order] = True
        assert torch.equal(mask.flatten(), want)


def test_in_one_process_shards_are_the_whole():
    scores = {"a": torch.randn(20, 3), "b": torch.randn(7)}
    with pytest.raises(prospr.PruningError, match="init_process_group"):
        select_shards(scores, 0.5, prospr.Ranks())
