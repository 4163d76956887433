"""Ranks that differ, do not come, fail, stop or die: an error in time that says which, and never a hang."""

import time

import pytest
import torch
from ranks.jobs import NETWORKS, method
from ranks.pool import Pool

import prospr
from prospr.errors import RankError, SettingError
from prospr.meta.ranks import Team, fingerprints


def test_words_and_numbers(pool):
    for said, sums, whole in pool("gathers"):
        assert said == [[(rank, i) for rank in range(4)] for i in range(20)]
        assert torch.equal(sums[0], torch.full((3, 2), 10.0))
        assert (sums[1].item(), sums[1].dtype) == (8.0, torch.bfloat16)
        assert whole.tolist() == [10, 10]


def test_other_weights_are_named(pool):
    for kind, message in pool.raised("other_weights"):
        assert kind == "RankError"
        assert message.startswith("the parameter 2.weight differs between ranks: ranks 0, 2, 3: (3, 8) ")
        assert "; rank 1: (3, 8) " in message
        assert "broadcast" in message


def test_other_settings_are_named(pool):
    for kind, message in pool.raised("other_sparsity"):
        assert kind == "RankError"
        assert message.startswith("sparsity differs between ranks: rank 0: 0.4; ranks 1, 2, 3: 0.5")


def test_a_rank_with_too_few_batches(pool):
    results = pool.raised("too_few_batches")
    assert results[1][0] == "BatchError"
    for kind, message in results[:1] + results[2:]:
        assert kind == "RankError"
        assert message.startswith("rank 1 failed: BatchError: batches holds 2, and 3 steps need 4")


@pytest.mark.parametrize("order", ["exact", "first"])
def test_ranks_that_take_another_number_of_steps(pool, order):
    for kind, message in pool.raised("uneven_steps", order):
        assert kind == "RankError"
        assert "the ranks are not at the same step: do all have the same number of batches?" in message


def test_other_masks_are_an_error_on_all(pool):
    for kind, message in pool.raised("other_masks"):
        assert kind == "RankError"
        assert message.startswith("the masks differ between ranks: rank 0: ")
        assert "; rank 3: " in message


def test_a_rank_that_calls_alone(pool):
    pool.start("alone")
    kind, message, warned = pool.result(0)[1]
    assert [pool.result(rank) for rank in (1, 2, 3)] == [("done", None)] * 3
    assert kind == "RankError"
    assert message.startswith("ranks 1, 2, 3 did not come to prospr.score in 2 s.")
    assert "ranks=None works in this process alone" in message
    assert [text[:45] for text in warned] == ["prospr.score waits for ranks 1, 2, 3. It must"]


def test_a_rank_by_itself_on_purpose(pool):
    case = NETWORKS["mlp"]
    want = prospr.score(case.model(), case.batches(6), method=method("sgd"), seed=3)
    alone, *others = pool("by_itself")
    assert others == [None] * 3
    assert all(torch.equal(alone[name], t) for name, t in want.items())


def test_an_error_on_one_rank_reaches_the_others(pool):
    pool.start("dies", "raises", 20.0, 3)
    results = [pool.result(rank) for rank in range(4)]
    assert results[3] == ("raised", "ValueError", "this disk is full")
    for result in results[:3]:
        kind, message, seconds = result[1]
        assert kind == "RankError"
        assert message == "rank 3 failed: ValueError: this disk is full"
        assert seconds < 20


def test_after_all_that_the_group_works(pool):
    case = NETWORKS["mlp"]
    want = prospr.score(case.model(), case.batches(6), method=method("sgd"), seed=3)
    for result in pool("score", "mlp", "sgd"):
        assert all(torch.allclose(result[name], t, rtol=1e-10) for name, t in want.items())


@pytest.mark.slow
def test_a_rank_that_dies_and_one_that_stops():
    pool = Pool()
    try:
        pool.start("dies", "killed", 20.0, 3)
        for rank in range(3):
            kind, message, seconds = pool.result(rank, 60)[1]
            assert kind == "RankError"
            assert message.startswith("rank 3 is gone"), message
            assert seconds < 30
        assert not pool.processes[3].is_alive()

        pool.start("dies", "stopped", 3.0, 1, size=2)  # its connections stay open
        kind, message, seconds = pool.result(0, 60)[1]
        assert kind == "RankError"
        assert message.startswith("rank 1 gave no sign of life for 3 s")
        assert seconds < 30
        # A sum is under way for ever, and the process can end all the same.
        began = time.monotonic()
        pool.start("leaves", size=2)
        pool.processes[0].join(30)
        assert pool.processes[0].exitcode == 0
        assert time.monotonic() - began < 20
    finally:
        for process in pool.processes:
            process.kill()


@pytest.mark.slow
def test_the_rank_that_holds_the_store_dies():
    pool = Pool()
    try:
        pool.start("dies", "killed", 20.0, 0)
        for rank in (1, 2, 3):
            kind, message, seconds = pool.result(rank, 60)[1]
            assert kind == "RankError"
            assert message.startswith("the store that the ranks met at does not answer: the process that holds it"), (
                message
            )
            assert "rank 0" in message
            assert seconds < 30
    finally:
        for process in pool.processes:
            process.kill()


def test_a_rank_that_fails_after_all_came_does_not_call_it_off(monkeypatch):
    """All ranks hear the same, so each finds the same wrong: also a slow one that sees a note of it first."""

    def failed(self):
        raise RankError("rank 2 failed")

    monkeypatch.setattr(Team, "_look", failed)
    team = object.__new__(Team)
    team.settings = prospr.Ranks()
    came = iter([False, True])
    team._until(lambda: next(came))
    with pytest.raises(RankError, match="rank 2 failed"):
        team._until(lambda: False)


def test_settings():
    with pytest.raises(SettingError, match="timeout=0"):
        prospr.Ranks(timeout=0)
    with pytest.raises(SettingError, match=r"ranks='all': use 'auto', prospr.Ranks\(...\) or None"):
        prospr.score(NETWORKS["mlp"].model(), NETWORKS["mlp"].batches(4), ranks="all")  # ty: ignore
    with pytest.raises(SettingError, match="init_process_group"):
        prospr.score(NETWORKS["mlp"].model(), NETWORKS["mlp"].batches(4), ranks=prospr.Ranks())
    assert issubclass(RankError, prospr.PruningError)


def test_fingerprints_tell_tensors_apart():
    t = torch.randn(50, 3)
    swapped = t.flatten().flip(0).reshape(50, 3)
    nudged = t.clone()
    nudged[49, 2] = torch.nextafter(nudged[49, 2], torch.tensor(9.0))
    kinds = {"a": t, "b": swapped, "c": nudged, "d": t.reshape(3, 50), "e": t.double(), "f": t > 0, "g": t.half()}
    found = fingerprints(kinds)
    assert len(set(found.values())) == len(kinds)
    assert fingerprints({"a": t.t().contiguous().t()})["a"] == found["a"]  # whatever the layout
