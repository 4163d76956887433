"""Selection among scores that no process has whole."""

import pytest


@pytest.mark.parametrize("size", [2, 4])
def test_masks_of_shards_are_those_of_the_whole(pool, size):
    assert pool("shards", 20, size=size) == [20] * size


def test_other_names_are_an_error(pool):
    for kind, message in pool.raised("other_shards"):
        assert kind == "RankError"
        assert message.startswith("the list of names differs between ranks: ranks 0, 1, 3: ['a']; rank 2: ['b']")


def test_a_score_that_is_no_number_reaches_all(pool):
    results = pool.raised("bad_shards")
    assert results[2] == ("ScoreError", "a: 1 of 3 scores are NaN or infinite; check the loss and the data")
    for kind, message in results[:2] + results[3:]:
        assert kind == "RankError"
        assert message.startswith("rank 2 failed: ScoreError: a: 1 of 3 scores are NaN")
