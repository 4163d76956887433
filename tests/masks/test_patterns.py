"""N of M, and blocks."""

import pytest
import torch
from cases import BY_NAME
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import prospr
from prospr.errors import InexactWarning, SettingError


def test_two_of_four_by_hand():
    scores = {"w": torch.tensor([[1.0, 4.0, 2.0, 3.0, 5.0, 5.0, 5.0, 0.0]])}
    masks = prospr.select(scores, 0.5, granularity="2:4")
    assert masks["w"].tolist() == [[False, True, False, True, True, True, False, False]]  # of equals the earlier


@given(
    outputs=st.integers(1, 6),
    groups=st.integers(1, 5),
    pattern=st.sampled_from([(1, 2), (2, 4), (1, 4), (3, 4), (2, 8)]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_every_group_keeps_its_best_n(outputs, groups, pattern, seed):
    n, m = pattern
    generator = torch.Generator().manual_seed(seed)
    s = torch.rand(outputs, groups * m, generator=generator)
    mask = prospr.select({"w": s}, 1 - n / m, granularity=f"{n}:{m}")["w"]
    for row, kept in zip(s.reshape(-1, m), mask.reshape(-1, m), strict=True):
        assert int(kept.sum()) == n
        assert row[kept].min() >= row[~kept].max()


def test_convolutions_group_their_input_channels():
    s = torch.rand(5, 8, 3, 3)
    mask = prospr.select({"w": s}, 0.5, granularity="2:4")["w"]
    assert mask.shape == s.shape
    assert (mask.reshape(5, 2, 4, 3, 3).sum(2) == 2).all()


def test_a_layer_that_does_not_fit_is_kept_whole_and_named():
    scores = {"first": torch.rand(8, 3, 3, 3), "second": torch.rand(8, 8)}
    with pytest.warns(InexactWarning, match="first: the number of inputs is no multiple of 4"):
        masks = prospr.select(scores, 0.5, granularity="2:4")
    assert masks["first"].all()
    assert masks["second"].float().mean() == 0.5


def test_a_pruned_network_trains_in_its_pattern():
    case = BY_NAME["mlp"]
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    masks = prospr.prune(model, case.batches(4), 0.5, granularity="2:4")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for x, y in case.batches(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    for name in masks:
        assert (model.get_parameter(name).reshape(-1, 4).count_nonzero(1) == 2).all()


@pytest.mark.gpu
def test_pytorch_takes_the_weight_as_semi_structured():
    layer = nn.Linear(128, 64, bias=False).half().cuda()
    prospr.prune(layer, None, 0.5, method="magnitude", granularity="2:4").remove(layer)
    sparse = torch.sparse.to_sparse_semi_structured(layer.weight.detach())
    x = torch.randn(64, 128, device="cuda").half()
    assert torch.allclose(torch.nn.functional.linear(x, sparse), layer(x), rtol=1e-2, atol=1e-2)


def test_blocks_by_hand():
    s = torch.tensor([[1.0, 1.0, 9.0, 0.0], [1.0, 1.0, 0.0, 0.0], [4.0, 0.0, 0.0, 0.0], [0.0, 0.0, 3.0, 3.0]])
    mask = prospr.select({"w": s}, 0.5, granularity=(2, 2))["w"]  # block means 1, 9/4; 1, 3/2
    assert mask.tolist() == [[False, False, True, True], [False, False, True, True]] * 2


@pytest.mark.parametrize("shape", [(6, 9), (8, 8, 3, 3), (5, 7, 1)])
@pytest.mark.parametrize("block", [(2, 2), (4, 3), (1, 8)])
def test_blocks_are_kept_or_pruned_whole(shape, block):
    mask = prospr.select({"w": torch.rand(shape)}, 0.6, granularity=block)["w"]
    assert mask.shape == shape
    matrix = mask.movedim((0, 1), (-2, -1)).reshape(-1, shape[0], shape[1])
    pieces = [piece for layer in matrix for rows in layer.split(block[0], 0) for piece in rows.split(block[1], 1)]
    assert all(bool(piece.all()) or not bool(piece.any()) for piece in pieces)
    assert sum(bool(piece.all()) for piece in pieces) == round(0.4 * len(pieces))


def test_one_by_one_blocks_are_weights():
    scores = {"a": torch.rand(4, 6), "b": torch.rand(3, 4, 2, 2), "bias": torch.rand(5)}
    assert prospr.select(scores, 0.7, granularity=(1, 1)) == prospr.select(scores, 0.7)


@pytest.mark.parametrize(
    ("settings_", "says"),
    [
        ({"granularity": "4:2", "sparsity": 0.5}, "granularity='4:2'"),
        ({"granularity": "channels", "sparsity": 0.5}, "granularity='channels'"),
        ({"granularity": (0, 4), "sparsity": 0.5}, r"granularity=\(0, 4\)"),
        ({"granularity": "2:4", "sparsity": 0.9}, "prunes exactly 0.5, not 0.9"),
        ({"granularity": "2:4", "sparsity": 0.5, "scope": "erk"}, "leave scope and floors out"),
        ({"granularity": "2:4", "sparsity": 0.5, "keep_per_layer": 1}, "leave scope and floors out"),
    ],
)
def test_what_cannot_be_is_refused(settings_, says):
    with pytest.raises(SettingError, match=says):
        prospr.select({"w": torch.rand(4, 8)}, **settings_)


def test_patterns_have_no_rounds():
    case = BY_NAME["mlp"]
    with pytest.raises(SettingError, match="there are no rounds"):
        prospr.prune(case.model(), case.batches(4), 0.5, method="force", granularity="2:4")


@pytest.mark.parametrize("scope", ["global", "balanced", "tapered", "spread", "layer", "erk"])
def test_blocks_of_one_are_weights(scope):
    generator = torch.Generator().manual_seed(0)
    scores = {"c": torch.rand(8, 4, 3, 3, generator=generator), "w": torch.rand(6, 8, generator=generator) / 9}
    for sparsity in (0.5, 0.9):
        assert prospr.select(scores, sparsity, scope=scope, granularity=(1, 1)) == prospr.select(
            scores, sparsity, scope=scope
        )
    case = BY_NAME["mlp"]
    rule = prospr.Iterative(prospr.Snip(), rounds=5)
    whole, single = (
        prospr.prune(case.model(), case.batches(5), 0.8, method=rule, scope=scope, granularity=g)
        for g in ((1, 1), "weight")
    )
    assert whole == single


def test_blocks_cut_short_are_told_of():
    net = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10))
    with pytest.warns(InexactWarning, match=r"blocks of 8 x 8 the sparsity is 0\.2000, not 0\.5: 0\.weight, 2\.weight"):
        prospr.prune(net, None, 0.5, method="random", granularity=(8, 8), collapse="ignore")


@pytest.mark.parametrize("granularity", ["2:4", (2, 4)])
def test_patterns_of_transposed_convolutions_are_refused(granularity):
    net = nn.Sequential(nn.ConvTranspose2d(8, 12, 3))
    with pytest.raises(SettingError, match=r"0\.weight of a ConvTranspose2d is \(inputs, outputs\)"):
        prospr.prune(net, None, 0.5, method="magnitude", granularity=granularity, collapse="ignore")
    square = prospr.prune(net, None, 0.5, method="magnitude", granularity=(4, 4), collapse="ignore")
    assert square.sparsity == 0.5
