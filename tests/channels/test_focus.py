"""scope="focused": enough weights for each of fewer channels."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import prospr
from prospr import Iterative, Random, Snip
from prospr.channels.focus import ENOUGH, inner_channels
from prospr.channels.groups import groups
from prospr.errors import BatchError, SettingError
from prospr.granularity import Focused, Weights
from prospr.lab.models import build


def focused(model, *shape):
    return Focused(lambda: groups(model, torch.zeros(1, *shape)))


def mlp(*widths):
    layers = [one for a, b in pairwise(widths) for one in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def noise(model, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.rand(p.shape, generator=rng) for name, p in prospr.prunable(model).items()}


def images(count=30, size=8, side=8):
    rng = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, 3, side, side, generator=rng), torch.randint(0, 10, (size,), generator=rng))
        for _ in range(count)
    ]


def middle(masks, name="layer3.1"):
    """How many channels between a block's two convolutions have weights: as the first makes, as the second reads."""
    made, read = masks[f"{name}.conv1.weight"], masks[f"{name}.conv2.weight"].transpose(0, 1)
    return made.flatten(1).any(1), read.flatten(1).any(1)


def test_by_hand():
    """Four weights a layer, so two channels with two each: 1 and 3, whose totals are 21 and 19, not 0 and 2, which
    have the largest weights and nothing else."""
    model = mlp(4, 4, 4)
    table = torch.tensor([[9.0, 1, 1, 1], [5, 6, 5, 5], [8, 1, 1, 1], [4, 4, 7, 4]])
    scores = {"0.weight": table, "2.weight": table.T.contiguous()}
    one_each = Weights("balanced").select(scores, 0.75)
    assert one_each["0.weight"].nonzero().tolist() == [[0, 0], [1, 1], [2, 0], [3, 2]]
    masks = focused(model, 4).select(scores, 0.75)
    assert masks["0.weight"].nonzero().tolist() == [[1, 0], [1, 1], [1, 2], [3, 2]]  # of three fives the first two
    assert masks["2.weight"].nonzero().tolist() == [[0, 1], [1, 1], [2, 1], [2, 3]]


def test_as_many_channels_as_each_has_weights():
    model, scores = mlp(40, 60, 40), noise(mlp(40, 60, 40))
    kind = focused(model, 40)
    for kept, channels in ((72, 6), (200, 10), (2 * 20 * ENOUGH, 20)):  # sqrt(36), sqrt(100), and so many have enough
        masks = kind.select(scores, 1 - kept / 4800)
        assert masks.kept == kept
        assert abs(int(masks["0.weight"].sum()) - kept // 2) <= 0.3 * kept  # one round: the layers are not yet even
        assert masks["0.weight"].any(1).sum() <= channels + 1
        assert masks["2.weight"].any(0).sum() <= channels + 1


def test_where_all_channels_have_enough_it_is_balanced():
    def refuse():
        raise AssertionError("the network was asked for its channels")

    scores = noise(mlp(40, 60, 40))
    assert 0.5 * 4800 / 2 / ENOUGH > 60
    assert Focused(refuse).select(scores, 0.5) == Weights("balanced").select(scores, 0.5)
    with pytest.raises(AssertionError):
        Focused(refuse).select(scores, 0.8)


def test_inner_channels_are_those_that_one_layer_makes():
    model = build("resnet20", width=4)
    found = groups(model, torch.zeros(2, 3, 8, 8))
    made = [one.made for one in inner_channels(found, list(prospr.prunable(model)))]
    assert made == [(f"layer{stage}.{block}.conv1.weight", 0) for stage in (1, 2, 3) for block in range(3)]
    assert all(len(one.read) == 1 for one in inner_channels(found, list(prospr.prunable(model))))
    assert inner_channels(found, ["layer1.0.conv1.weight"]) == []  # nothing that is pruned reads them


def test_a_residual_network_keeps_its_stream():
    masks = prospr.prune(
        build("resnet20", width=8), images(), 0.98, method=Iterative(Random(), rounds=20), scope="focused"
    )
    assert masks.kept == round(0.02 * masks.total)
    counts = {name: int(mask.sum()) for name, mask in masks.items()}
    inside = [count for name, count in counts.items() if ".conv" in name]
    assert min(inside) > 0.6 * max(inside)  # layers are as even as without
    made, read = middle(masks)
    assert torch.equal(made, read)  # both sides of a channel go at once
    enough = counts["layer3.1.conv1.weight"] ** 0.5
    assert 0.7 * enough <= int(made.sum()) <= enough + 2
    stream = masks["layer3.1.conv2.weight"].flatten(1).any(1) | masks["layer3.2.conv2.weight"].flatten(1).any(1)
    assert stream.sum() > 2 * made.sum()


def test_no_weight_is_kept_in_vain():
    lost = {}
    for scope in ("balanced", "focused"):
        model = build("resnet20", width=8)
        masks = prospr.prune(model, images(), 0.99, method=Iterative(Snip(), rounds=10, redraw=True), scope=scope)
        seen = prospr.inspect(build("resnet20", width=8), masks, torch.zeros(1, 3, 8, 8))
        lost[scope] = 1 - seen.effective_density * masks.total / masks.kept
    assert lost["focused"] < 0.02 < lost["balanced"]


def test_what_is_pruned_stays_pruned():
    model = mlp(40, 60, 40)
    kind, before = focused(model, 40), None
    for seed, sparsity in enumerate((0.5, 0.8, 0.9, 0.95, 0.97)):
        masks = kind.select(noise(model, seed), sparsity, before)
        assert masks.kept == round((1 - sparsity) * 4800)
        assert before is None or all(bool((masks[n] <= before[n]).all()) for n in masks)
        before = masks


def test_channels_that_nothing_comes_into():
    """Of four channels only the first has weights coming in: 3, and 50 that go out of it."""
    model = mlp(3, 4, 50)
    scores = noise(model)
    among = {name: torch.ones_like(s, dtype=torch.bool) for name, s in scores.items()}
    among["0.weight"][1:] = False
    kind = focused(model, 3)
    masks = kind.select(scores, 1 - 53 / 212, among)
    assert masks["0.weight"].nonzero().tolist() == [[0, 0], [0, 1], [0, 2]]
    assert masks["2.weight"].any(0).tolist() == [True, False, False, False]
    assert masks.kept == 53
    assert kind.select(scores, 1 - 54 / 212, among) == Weights("balanced").select(scores, 1 - 54 / 212, among)


def test_it_looks_at_the_network():
    model = build("resnet20", width=4)
    with pytest.raises(SettingError, match=r"prospr\.prune has it"):
        prospr.select(noise(model), 0.9, scope="focused")
    with pytest.raises(SettingError, match="granularity is '2:4'"):
        prospr.prune(model, images(1), 0.5, method="snip", scope="focused", granularity="2:4")
    with pytest.raises(SettingError, match="is for single weights"):
        prospr.prune(model, images(1), 0.5, method="snip", scope="focused", granularity="channel")
    with pytest.raises(BatchError, match="pass batches"):
        prospr.prune(model, None, 0.5, method="random", scope="focused")
    given = prospr.prune(model, None, 0.5, method="random", scope="focused", example=torch.zeros(1, 3, 8, 8))
    assert given.kept == round(0.5 * given.total)


@pytest.mark.gpu
def test_on_a_gpu():
    model, among = mlp(40, 60, 40), None
    for seed, sparsity in enumerate((0.8, 0.95)):
        scores = noise(model, seed)
        kept = focused(model, 40).select(scores, sparsity, among)
        there = {name: s.cuda() for name, s in scores.items()}
        left = None if among is None else among.to("cuda")
        assert focused(model, 40).select(there, sparsity, left).to("cpu") == kept
        among = kept
