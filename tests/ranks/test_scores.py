"""Ranks that each have a part of every batch give what one process gives on the whole batches."""

import pytest
import torch
from ranks.jobs import NETWORKS, method, part, tokens_that_count
from torch import nn

import prospr
from prospr.meta import SGD, metagrad, pure_loss

WAYS = [
    ("mlp", "sgd"),
    ("mlp", "nesterov"),
    ("mlp", "adam"),
    ("mlp", "adamw"),
    ("mlp", "auto"),
    ("mlp", "first"),
    ("mlp", "pieces"),
    ("mlp", "recompute"),
    ("mlp", "forward"),
    ("mlp", "random"),
    ("mlp", "magnitude"),
    ("wide", "nesterov"),
    ("wide", "adamw"),
    ("wide", "auto"),
    ("wide", "snip"),
    ("wide", "snip-mb"),
    ("wide", "grasp"),
    ("wide", "grasp-mb"),
    ("wide", "phew"),
    ("wide", "ntksap"),
    ("attention", "sgd"),
    ("view", "sgd"),
    ("lstm", "adamw"),
    ("group-and-layer-norm", "sgd"),
    ("tied", "adamw"),
    ("tied", "ntksap"),
]


def assert_close(scores, want, within):
    """Relative to the largest, over the whole vector."""
    assert list(scores) == list(want)
    size = max(t.abs().max() for t in want.values())
    for name, t in want.items():
        assert (scores[name] - t).abs().max() <= within * size, name


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("network", "name"), WAYS)
def test_scores_are_those_of_one_process(pool, network, name, size):
    case = NETWORKS[network]
    want = prospr.score(case.model(), case.batches(6), method=method(name), **case.settings, seed=3)
    results = pool("score", network, name, size=size)
    assert_close(results[0], want, 1e-10)
    for other in results[1:]:
        for key, t in other.items():
            assert torch.equal(t, results[0][key])  # bit for bit


def test_parts_differ_in_size_and_one_is_empty():
    batch = NETWORKS["mlp"].batches(1)[0]
    assert [len(part(batch, r, 2)[0]) for r in range(2)] == [2, 4]
    assert [len(part(batch, r, 4)[0]) for r in range(4)] == [1, 0, 4, 1]


@pytest.mark.parametrize("size", [2, 4])
def test_the_weight_of_a_part_may_be_other_than_its_samples(pool, size):
    case = NETWORKS["tokens"]
    want = prospr.score(case.model(), case.batches(6), method=method("sgd"), **case.settings, seed=3)
    assert_close(pool("score", "tokens", "sgd", "tokens_that_count", size=size)[0], want, 1e-10)
    wrong = pool("score", "tokens", "sgd", size=size)[0]
    counts = [tokens_that_count(part(case.batches(1)[0], r, size)) / 9 for r in range(size)]
    assert len(set(counts)) > 1
    with pytest.raises(AssertionError):
        assert_close(wrong, want, 1e-3)


PRUNINGS = [
    ("wide", "sgd", {}),
    ("wide", "adamw", {"keep_per_layer": 5}),
    ("wide", "force", {}),
    ("wide", "iter-snip", {}),
    ("wide", "iterative-prospr", {}),
    ("wide", "iterative-ntksap", {}),
    ("wide", "synflow", {}),
    ("wide", "random", {"seed": 4}),
    ("wide", "erk", {}),
    ("wide", "3sp", {}),
    ("wide", "sgd", {"granularity": "channel", "budget": "flops"}),
    ("residual", "sgd", {}),
]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("network", "name", "settings"), PRUNINGS)
def test_masks_are_those_of_one_process(pool, network, name, settings, size):
    if network == "residual" and size == 4:
        pytest.skip("batch statistics of one sample do not exist")
    case = NETWORKS[network]
    digests = pool("prune", network, name, settings, size=size)
    assert len({digest for pair in digests for digest in pair}) == 1  # on all ranks, and on the models
    if network != "residual":  # whose statistics are each rank's own
        want = prospr.prune(case.model(), case.batches(6), 0.5, method=method(name), **case.settings, **settings)
        assert digests[0][0] == want.digest()


def test_an_initialised_process_group_is_used_by_itself(pool):
    digests = pool("prune", "wide", "sgd", {}, True)
    case = NETWORKS["wide"]
    assert {pair[0] for pair in digests} == {
        prospr.prune(case.model(), case.batches(6), 0.5, method=method("sgd")).digest()
    }


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("settings", [{}, {"order": "first"}, {"store": "cpu"}, {"steps": 2}])
def test_metagrad_of_the_whole_batches(pool, settings, size):
    case = NETWORKS["mlp"]
    loss = pure_loss(case.model())
    trace = prospr.meta.Trace()
    want = metagrad(loss, loss.params(), case.batches(4), SGD(lr=0.1, momentum=0.9), trace=trace, **settings)
    for result, losses in pool("derivative", "mlp", settings, size=size):
        assert_close(result, want, 1e-12)
        assert losses == pytest.approx(trace.losses, rel=1e-12)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("network", "name"),
    [
        ("residual", "nesterov"),
        ("residual", "adamw"),
        ("residual", "auto"),
        ("residual", "grasp-mb"),
        ("depthwise", "sgd"),
        ("checkpointed-norm", "sgd"),
        ("one-and-three-dimensions", "sgd"),
        ("residual", "ntksap"),
    ],
)
def test_synchronised_batch_norm_is_that_of_the_whole_batch(pool, network, name, size):
    """Double backward included: the statistics of all ranks are in every derivative."""
    case = NETWORKS[network]
    want = prospr.score(case.model(), case.batches(6), method=method(name), **case.settings)
    for result in pool("synced", network, name, size=size):
        assert_close(result, want, 1e-8)


def test_synchronised_batch_norm_without_ranks_is_plain_batch_norm():
    case = NETWORKS["residual"]
    model = nn.SyncBatchNorm.convert_sync_batchnorm(case.model())
    assert_close(prospr.score(model, case.batches(4)), prospr.score(case.model(), case.batches(4)), 1e-12)


def test_part_cuts_batches_that_are_the_same_on_all_ranks(pool):
    whole = NETWORKS["mlp"].batches(2)
    results = pool("parts", "mlp")
    assert [len(result[0][0]) for result in results] == [2, 2, 1, 1]
    for i, (inputs, targets) in enumerate(whole):
        assert torch.equal(torch.cat([result[i][0] for result in results]), inputs)
        assert torch.equal(torch.cat([result[i][1] for result in results]), targets)
