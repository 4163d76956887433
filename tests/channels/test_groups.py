"""Which channels go together, and what is kept whole."""

import re
import warnings

import pytest
import torch
from cases import BY_NAME as CASES
from channels.networks import BY_NAME, NETWORKS, from_case
from channels.twins import find, some_groups
from torch import nn

import prospr
from prospr.errors import KeptWholeWarning


@pytest.mark.parametrize("network", NETWORKS, ids=lambda n: n.name)
def test_what_is_found_and_what_is_kept_whole(network):
    found = find(network.model(), network.example())
    assert set(network.free) <= set(found.sets)
    assert set(found.kept_whole) == set(network.kept)
    for name, reason in network.kept.items():
        assert re.search(reason, found.kept_whole[name]), found.kept_whole[name]


@pytest.mark.parametrize("network", NETWORKS, ids=lambda n: n.name)
def test_masks_of_groups_remove_those_groups(network):
    found = find(network.model(), network.example())
    if len(found):
        for seed in range(2):
            removed = some_groups(found, seed=seed)
            assert found.removed(found.masks(removed)) == removed


def test_what_it_says():
    network = BY_NAME["layer-norm"]
    assert str(find(network.model(), network.example())).splitlines() == [
        "channels  go together",
        "3.weight  6 of 3.weight[0], 3.bias[0], 5.weight[1]",
        "0.weight  kept whole: native_layer_norm in 1 (LayerNorm) mixes all channels",
    ]
    network = BY_NAME["resnet18"]
    lines = str(find(network.model(), network.example())).splitlines()
    assert lines[1].split(maxsplit=1) == [
        "conv1.weight",
        "4 of conv1.weight[0], bn1.weight[0], bn1.bias[0], layer1.0.conv1.weight[1], layer1.0.conv2.weight[0], "
        "layer1.0.bn2.weight[0] and 7 more",
    ]


def test_the_warning_names_layers_and_reasons():
    network = BY_NAME["vit"]
    with pytest.warns(KeptWholeWarning) as caught:
        prospr.channels.groups(network.model(), network.example())
    (warning,) = caught
    text = str(warning.message)
    assert text.startswith("kept whole: patches.weight (native_layer_norm in blocks.0.norm1 (LayerNorm) mixes all")
    assert warning.filename == __file__
    network = BY_NAME["resnet18"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prospr.channels.groups(network.model(), network.example())


def test_many_kept_layers_are_counted():
    layers = [m for _ in range(9) for m in (nn.Linear(4, 4), nn.LayerNorm(4))]
    with pytest.warns(KeptWholeWarning, match=r"10\.weight \(.*\) and 3 more$"):
        prospr.channels.groups(nn.Sequential(*layers, nn.Linear(4, 2)), torch.zeros(1, 4))


def test_without_trying_it_out():
    """A size that is written in forward is found by trying alone."""
    network = BY_NAME["literal-view"]
    model, example = network.model(), network.example()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "two.weight" in prospr.channels.groups(model, example, verify=False).sets
    assert "two.weight" not in find(model, example).sets


def test_a_depthwise_layer_on_the_input_stays_and_is_named():
    model = nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.Conv2d(6, 4, 1), nn.Conv2d(4, 2, 1))
    found = find(model, torch.zeros(1, 3, 4, 4))
    assert found.kept_whole == {"0.weight": "tied to the network's input, or to a tensor of fixed size"}
    assert list(found.sets) == ["1.weight"]


def test_unused_and_frozen_layers_are_named():
    network = from_case(CASES["frozen-unused-mixed-modes"])
    found = find(network.model(), network.example())
    assert found.kept_whole == {
        "frozen.weight": "frozen.weight is frozen",
        "unused.weight": "unused.weight is not used",
    }
    assert list(found.sets) == ["conv.weight"]
    assert set(found.axes["unused.weight", 0]) == {-1}


def test_groups_of_a_residual_network_by_hand():
    network = from_case(CASES["residual"])
    found = find(network.model(), network.example())
    assert {name: len(ids) for name, ids in found.sets.items()} == {"stem.weight": 4, "conv1.weight": 4}
    for name, d in (("stem.weight", 0), ("conv1.weight", 1), ("conv2.weight", 0), ("norm2.weight", 0),
                    ("norm2.running_var", 0), ("head.weight", 1)):  # fmt: skip
        assert found.axes[name, d] == found.sets["stem.weight"]
    for name, d in (("conv1.weight", 0), ("norm1.bias", 0), ("norm1.running_mean", 0), ("conv2.weight", 1)):
        assert found.axes[name, d] == found.sets["conv1.weight"]


def test_places_of_groups_by_hand():
    """Of two groups of 8 channels the same places go; of eight groups of two, whole ones."""
    few = find(BY_NAME["few-large-groups"].model(), BY_NAME["few-large-groups"].example())
    assert few.axes["0.weight", 0] == [*range(8)] * 2
    assert few.axes["2.weight", 0] == [*range(8, 20)] * 2
    assert few.axes["2.weight", 1] == [*range(8)]
    many = find(BY_NAME["many-small-groups"].model(), BY_NAME["many-small-groups"].example())
    assert many.axes["0.weight", 0] == [g for g in range(8) for _ in range(2)]
    assert many.axes["2.weight", 0] == [g for g in range(8) for _ in range(3)]
    assert set(many.axes["2.weight", 1]) == {-1}


def test_one_input_a_tuple_and_a_dict_find_the_same():
    network = BY_NAME["dict-output"]
    model, example = network.model(), network.example()
    assert find(model, example).axes == find(model, (example["x"], example["scale"])).axes
    network = BY_NAME["vgg19"]
    assert find(network.model(), network.example()[0]).axes == find(network.model(), network.example()).axes


def test_a_masked_model_has_the_groups_of_the_model():
    network = BY_NAME["resnet18"]
    model, example = network.model(), network.example()
    before = find(model, example)
    before.masks(some_groups(before)).apply(model)
    after = find(model, example)
    assert (after.axes, after.sets) == (before.axes, before.sets)


# Beside torch-pruning


@pytest.mark.parametrize("name", ["vgg19", "resnet18", "unet"])
def test_the_same_groups_as_torch_pruning(name):
    tp = pytest.importorskip("torch_pruning", reason="the cross-check needs torch-pruning 1.6.1")
    network = BY_NAME[name]
    model, example = network.model(dtype=torch.float32), network.example(torch.float32)[0]
    found = find(model, example)
    names = {id(p): n for n, p in model.named_parameters()}
    graph = tp.DependencyGraph().build_dependency(model.eval(), example_inputs=example)
    convolutions = [m for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)]
    for layer in convolutions:
        if layer is getattr(model, "head", None):
            continue
        transposed = isinstance(layer, nn.ConvTranspose2d)
        prune = tp.prune_conv_out_channels
        theirs = set()
        for dependency, indices in graph.get_pruning_group(layer, prune, idxs=[0]):
            module, how = dependency.target.module, dependency.handler.__name__
            if isinstance(module, nn.Module) and getattr(module, "weight", None) is not None:
                into = "in_channels" in how
                swap = isinstance(module, nn.ConvTranspose2d)
                dim = int(into != swap) if module.weight.dim() > 1 else 0
                theirs |= {(names[id(module.weight)], dim, i) for i in indices}
        weight = names[id(layer.weight)]
        group = found.axes[weight, int(transposed)][0]
        ours = {(n, d, i) for (n, d), ids in found.axes.items() for i, g in enumerate(ids) if g == group}
        ours = {(n, d, i) for n, d, i in ours if n.endswith("weight")}
        assert theirs == ours, weight
