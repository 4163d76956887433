"""Models that FSDP2 has sharded: scores, masks and training are those of the whole model."""

import pytest
import torch
from ranks import trainings
from ranks.jobs import NETWORKS, method
from ranks.test_scores import assert_close

import prospr

SCORES = ["snip", "snip-mb", "first", "first-adam", "magnitude", "random"]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", SCORES)
def test_scores_are_those_of_the_whole_model(pool, name, size):
    case = NETWORKS["wide"]
    want = prospr.score(case.model(), case.batches(6), method=method(name), **case.settings, seed=3)
    for scores in pool("fsdp_scores", "wide", name, size=size):
        assert_close(scores, want, 1e-10)


def test_parts_may_be_weighed_otherwise(pool):
    case = NETWORKS["tokens"]
    want = prospr.score(case.model(), case.batches(6), method="snip", **case.settings, seed=3)
    assert_close(pool("fsdp_scores", "tokens", "snip", "tokens_that_count", size=2)[0], want, 1e-10)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("name", "settings"),
    [("snip", {}), ("first", {"keep_per_layer": 5}), ("magnitude", {"scope": "layer"}), ("random", {"seed": 4})],
)
def test_masks_are_those_of_the_whole_model(pool, name, settings, size):
    case = NETWORKS["wide"]
    want = prospr.prune(case.model(), case.batches(6), 0.5, method=method(name), **case.settings, **settings)
    assert set(pool("fsdp_prune", "wide", name, settings, size=size)) == {want.digest()}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_masks_hold_while_it_trains(pool, tmp_path, optimizer, size):
    """The training is that of the whole model in one process; a distributed checkpoint holds weights and masks."""
    case = NETWORKS["wide"]
    model = case.model()
    trainings.random_masks(model).apply(model)
    steps = trainings.OPTIMIZERS[optimizer](model.parameters())
    for inputs, targets in case.batches(8):
        steps.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
    for state in pool("fsdp_trains", "after", optimizer, str(tmp_path), size=size):
        assert_close(*({name: t.double() for name, t in one.items()} for one in (state, model.state_dict())), 1e-10)


def test_masks_put_on_before_the_sharding_hold_too(pool):
    pool("fsdp_trains", "before", "sgd", size=2)


def test_masks_hold_where_weights_stay_whole_between_the_passes(pool):
    pool("fsdp_trains", "kept whole", "adamw", size=2)


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("prospr", {}, "exact ProsPr needs Hessian products, and FSDP2's backward pass cannot be differentiated; use "),
        ("prospr-first", {}, 'lr="auto" measures curvature'),
        ("grasp", {}, "a sharded model is scored in one round by 'snip'"),
        ("force", {}, "a sharded model is scored in one round by 'snip'"),
        ("snip", {"granularity": "channel"}, "granularity='channel': of a sharded model single weights"),
        ("snip", {"scope": "erk"}, "scope='erk': of a sharded model"),
        ("snip", {"ranks": None}, "ranks=None: all ranks that hold a sharded model score it"),
    ],
)
def test_what_cannot_be_done_is_said(pool, name, settings, says):
    for kind, message in pool.raised("fsdp_refuses", name, settings, size=2):
        assert kind == "SettingError"
        assert message.startswith(says)


def test_an_empty_part_is_an_error_on_all(pool):
    for kind, message in pool.raised("fsdp_refuses", "snip", {}, size=4):
        assert kind == "BatchError"
        assert message.startswith("a batch is empty on rank 1, and every rank must run a sharded model")
