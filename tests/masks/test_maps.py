"""scope="mapped": less for convolutions that make small feature maps."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import prospr
from prospr import Iterative, ProsPr, Random, Snip
from prospr.errors import BatchError, SettingError
from prospr.granularity import Mapped, Weights
from prospr.lab.models import build
from prospr.masks.maps import map_factors
from prospr.registry import Method


def factors(model, *inputs):
    return map_factors(model, (inputs, {}), list(prospr.prunable(model)))


def images(side=8, count=2):
    rng = torch.Generator().manual_seed(0)
    return [
        (torch.randn(4, 3, side, side, generator=rng), torch.randint(0, 10, (4,), generator=rng)) for _ in range(count)
    ]


def test_by_hand():
    """Of 48 in each layer: 9, 9, 7, 7, ...; and, at a half, 4.5, 4.5, 3.5, 3.5, ..."""
    row = torch.tensor([9.0, 9, 7, 7, 5, 5, 3, 3]).reshape(1, 1, 8)
    scores = {"a": row, "b": row}
    masks = Mapped({"a": 1.0, "b": 0.5}).select(scores, 0.5)
    assert masks["a"].flatten().tolist() == [True] * 6 + [False] * 2
    assert masks["b"].flatten().tolist() == [True] * 2 + [False] * 6
    assert Mapped({"a": 1.0, "b": 1.0}).select(scores, 0.5) == Weights("balanced").select(scores, 0.5)


def test_in_rounds_the_share_is_of_what_is_left():
    """Of 8 in each layer: 4, 2 and 2; and, at a half, 1.5, 1, 1 and 0.5. With the eights, a's would be a third."""
    scores = {"a": torch.tensor([8.0, 8, 4, 2, 2]), "b": torch.tensor([3.0, 2, 2, 1]).reshape(1, 1, 4)}
    among = {"a": torch.tensor([False, False, True, True, True]), "b": torch.ones(1, 1, 4, dtype=torch.bool)}
    masks = Mapped({"a": 1.0, "b": 0.5}).select(scores, 1 - 5 / 9, among)
    assert masks["a"].tolist() == [False, False, True, True, True]
    assert masks["b"].flatten().tolist() == [True, True, False, False]


def test_two_weights_for_each_output():
    """Of two inputs and three outputs six weights stay, the best, however little the layer's share counts; and never
    more than half of an even part of all that stay."""
    rng = torch.Generator().manual_seed(0)
    scores = {"a": torch.rand(4, 2, 10, generator=rng), "b": torch.rand(3, 2, 5, generator=rng)}
    for kept, count in ((55, 6), (24, 6), (16, 4), (3, 1)):
        masks = Mapped({"a": 1.0, "b": 1e-6}).select(scores, 1 - kept / 110)
        assert masks.kept == kept
        assert int(masks["b"].sum()) == count
        assert torch.equal(masks["b"], scores["b"] >= scores["b"].flatten().sort(descending=True).values[count - 1])
    assert int(Mapped({"a": 1.0, "b": 1e-6}, keep_per_layer=7).select(scores, 0.5)["b"].sum()) == 7


def test_only_weights_that_are_left_are_secured():
    """Also where they score nothing."""
    scores = {"a": torch.rand(4, 2, 10) + 1, "b": torch.zeros(3, 2, 5)}
    among = {"a": torch.ones(4, 2, 10, dtype=torch.bool), "b": torch.zeros(3, 2, 5, dtype=torch.bool)}
    among["b"].view(-1)[-7:] = True
    masks = Mapped({"a": 1.0, "b": 0.1}).select(scores, 0.5, among)
    assert masks.kept == 55
    assert int(masks["b"].sum()) == 6
    assert not (masks["b"] & ~among["b"]).any()


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (nn.Conv2d(3, 4, 3, padding=1), (3, 8, 8), 1.0),  # 64 pixels are enough
        (nn.Conv2d(3, 4, 3, padding=1), (3, 32, 32), 1.0),
        (nn.Conv2d(3, 4, 3), (3, 6, 6), 16 / 64),  # what it makes counts
        (nn.Conv2d(4, 8, 3, groups=2, padding=1), (4, 4, 4), 16 / 64),
        (nn.Conv2d(3, 4, 3, stride=2, padding=1), (3, 8, 8), 16 / 64),
        (nn.ConvTranspose2d(3, 4, 2, stride=2), (3, 4, 4), 16 / 64),  # what it reads counts
        (nn.Conv1d(3, 4, 3, padding=1), (3, 32), 32 / 64),
        (nn.Conv3d(1, 2, 3, padding=1), (1, 2, 2, 2), 8 / 64),
        (nn.Linear(5, 3), (5,), 1.0),  # no map
        (nn.Conv2d(4, 2, 1), (4, 1, 1), 1.0),  # linear layers by another name
        (nn.Conv2d(3, 4, 6, padding="valid"), (3, 6, 6), 1.0),
        (nn.Conv2d(3, 4, 3, padding=1), (3, 1, 1), 1 / 64),
        (nn.Conv2d(3, 4, 3, padding="same"), (3, 1, 1), 1 / 64),
        (nn.Conv2d(4, 2, 1), (4, 2, 1), 2 / 64),
    ],
)
def test_places_that_a_weight_is_used_at(layer, shape, expected):
    for samples in (1, 5):
        assert factors(nn.Sequential(layer), torch.zeros(samples, *shape)) == {"0.weight": pytest.approx(expected)}


def test_a_layer_that_is_used_twice_or_never():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.twice, self.never = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3)

        def forward(self, x):
            return self.twice(self.twice(x))

    assert factors(Net(), torch.zeros(1, 2, 4, 4)) == {"twice.weight": 32 / 64, "never.weight": 1.0}


def test_a_model_that_needs_its_whole_batch():
    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 2, 3, padding=1)

        def forward(self, x):
            return self.conv(x.reshape(len(x) // 2, 2, *x.shape[1:])[:, 0]) + self.conv(x[1::2])

    # each conv has half of the batch, twice: as many uses a sample as there are pixels
    assert factors(Pairs(), torch.zeros(4, 3, 4, 4)) == {"conv.weight": 16 / 64}


def test_nothing_changes_where_all_maps_are_large():
    """ResNet-20's smallest are 8 x 8."""
    found = factors(build("resnet20", seed=0), torch.zeros(1, 3, 32, 32))
    assert set(found.values()) == {1.0}
    masks = [
        prospr.prune(build("resnet20", seed=0, width=4), images(32), 0.9, method=Snip(), scope=scope)
        for scope in ("balanced", "mapped")
    ]
    assert masks[0] == masks[1]


def test_vgg_keeps_less_where_it_has_four_pixels():
    found = factors(build("vgg16", seed=0, width=4), torch.zeros(1, 3, 32, 32))
    pixels = [1024, 1024, 256, 256, 64, 64, 64, 16, 16, 16, 4, 4, 4]
    assert list(found.values()) == [min(1.0, n / 64) for n in pixels] + [1.0]
    models = [build("vgg16", seed=0, width=4) for _ in range(2)]
    rounds = Iterative(Random(), rounds=20)
    even, mapped = (
        prospr.prune(model, images(32), 0.9, method=rounds, scope=scope)
        for model, scope in zip(models, ("balanced", "mapped"), strict=True)
    )
    assert even.kept == mapped.kept
    last = list(found)[-2]
    assert 0 < int(mapped[last].sum()) < int(even[last].sum()) / 4
    assert int(mapped["features.14.weight"].sum()) > int(even["features.14.weight"].sum())


def small():
    """Its second convolution makes 16 pixels."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(8 * 16, 10))


def test_it_is_the_default():
    """Said in full, the same masks; with balanced layers others."""
    said = Iterative(ProsPr(), rounds=20, redraw=True)
    data = images(count=4)
    masks = {scope: prospr.prune(small(), data, 0.9, method=said, scope=scope) for scope in ("mapped", "balanced")}
    assert prospr.prune(small(), data, 0.9) == masks["mapped"] != masks["balanced"]
    assert int(masks["mapped"]["3.weight"].sum()) < int(masks["balanced"]["3.weight"].sum())


def test_the_default_where_maps_cannot_be_counted():
    """A loss that calls a model's parts says nothing of the maps: layers are balanced, and it is said."""

    def loss(model, batch):
        return F.cross_entropy(model[1:](model[0](batch[0])), batch[1])

    rounds = Iterative(Snip(), rounds=2)
    by_default = Method(rounds, scope="mapped")
    with pytest.warns(UserWarning, match=r"sizes of feature maps are not known \(.*pass example="):
        masks = prospr.prune(small(), images(), 0.9, method=by_default, loss=loss)
    assert masks == prospr.prune(small(), images(), 0.9, method=rounds, loss=loss, scope="balanced")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shown = prospr.prune(small(), images(), 0.9, method=by_default, loss=loss, example=images()[0][0])
    assert shown == prospr.prune(small(), images(), 0.9, method=rounds, scope="mapped") != masks
    with pytest.raises(BatchError, match="found by running the model"):
        prospr.prune(small(), images(), 0.9, method=rounds, loss=loss, scope="mapped")


def test_a_network_without_convolutions_is_not_run():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 3))
    masks = prospr.prune(model, None, 0.5, method="magnitude", scope="mapped")
    masks.remove(model)
    assert masks == prospr.prune(model, None, 0.5, method="magnitude", scope="balanced")


def test_the_model_is_as_it_was():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4 * 36, 10))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs, state, mode = torch.randn(2, 3, 8, 8), torch.get_rng_state(), model.training
    factors(model, inputs)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training is mode


def test_what_cannot_be_mapped():
    model = build("resnet20", seed=0, width=2)
    with pytest.raises(SettingError, match="scope='mapped' looks at the network"):
        prospr.select({"w": torch.rand(4)}, 0.5, scope="mapped")
    with pytest.raises(SettingError, match="scope='mapped' is for single weights, and granularity is '2:4'"):
        prospr.prune(model, images(), 0.5, method="snip", scope="mapped", granularity="2:4")
    with pytest.raises(SettingError, match="scope='mapped' is for single weights; for channels"):
        prospr.prune(model, images(), 0.5, method="snip", scope="mapped", granularity="channel")
    with pytest.raises(BatchError, match="channels and feature maps are found by running the model"):
        prospr.prune(model, None, 0.5, method="magnitude", scope="mapped")
    example = torch.zeros(1, 3, 8, 8)
    assert prospr.prune(model, None, 0.5, method="magnitude", scope="mapped", example=example).kept > 0
