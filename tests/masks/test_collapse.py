"""What pruning does where it cuts a network, or empties a layer of it."""

import copy
import warnings

import pytest
import torch
from cases import BY_NAME

import prospr
from prospr.errors import CollapseError, CollapseWarning

MLP = BY_NAME["mlp"]


def state(model):
    return copy.deepcopy(model.state_dict())


def assert_untouched(model, before):
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not any(m._load_state_dict_pre_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(p._backward_hooks for p in model.parameters())


def chain():
    """The last layer is so small that magnitude empties it."""
    model = MLP.model()
    with torch.no_grad():
        model[2].weight.mul_(1e-6)
    return model


def skipping():
    model = BY_NAME["residual"].model()
    with torch.no_grad():
        model.conv2.weight.mul_(1e-6)
    return model


def test_a_cut_network_is_an_error():
    model = chain()
    before = state(model)
    with pytest.raises(CollapseError, match=r"no path .*2\.weight: 0 of 24 weights kept.*keep_per_layer=1") as error:
        prospr.prune(model, MLP.batches(1), 0.5, method="magnitude")
    assert isinstance(error.value, prospr.PruningError)
    assert_untouched(model, before)


def test_the_remedy_helps():
    model = chain()
    masks = prospr.prune(model, MLP.batches(1), 0.5, method="magnitude", keep_per_layer=1)
    assert int(masks["2.weight"].sum()) == 1
    assert masks.kept == 28


def test_a_network_cut_without_an_empty_layer():
    """The first layer keeps unit 0 alone, and the last reads all others."""
    model = MLP.model()
    with torch.no_grad():
        model[0].weight.fill_(1e-3)[0] = 5.0
        model[2].weight.fill_(4.0)[:, 0] = 1e-6
    with pytest.raises(CollapseError, match=r"no path is left .*no layer is empty"):
        prospr.prune(model, MLP.batches(1), 1 - 25 / 56, method="magnitude")


def test_a_warning_in_place_of_the_error():
    model = chain()
    with pytest.warns(CollapseWarning, match=r"no path is left .*2\.weight: 0 of 24"):
        masks = prospr.prune(model, MLP.batches(1), 0.5, method="magnitude", collapse="warn")
    assert masks.empty() == ["2.weight"]
    assert prospr.Masks.of(model) == masks


def test_collapse_ignored():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        masks = prospr.prune(chain(), MLP.batches(1), 0.5, method="magnitude", collapse="ignore")
    assert masks.empty() == ["2.weight"]


def test_without_data_it_is_unknown():
    with pytest.warns(CollapseWarning, match=r"2\.weight: 0 of 24 weights kept \(unknown whether a path is left\)"):
        prospr.prune(chain(), None, 0.5, method="magnitude")


def test_an_empty_layer_beside_a_skip_connection_is_a_warning():
    model, case = skipping(), BY_NAME["residual"]
    with pytest.warns(CollapseWarning, match=r"conv2\.weight: 0 of 144 weights kept \(another path from input"):
        masks = prospr.prune(model, case.batches(1), 0.5, method="magnitude")
    assert masks.empty() == ["conv2.weight"]
    assert prospr.Masks.of(model) == masks


def test_a_path_around_everything_that_is_pruned():
    """Only the branch is pruned, and none of it is left of use; the skip connection stands."""
    model, case = skipping(), BY_NAME["residual"]
    with pytest.warns(CollapseWarning, match="another path from input to output is left"):
        masks = prospr.prune(model, case.batches(1), 0.6, method="magnitude", prunable=["conv1.weight", "conv2.weight"])
    assert masks.empty() == ["conv2.weight"]


def test_a_network_that_cannot_be_traced_is_pruned_all_the_same():
    class Wary(torch.nn.Linear):
        def forward(self, x):
            if bool((x > 0).all()):
                raise RuntimeError("these are no real data")
            return super().forward(x)

    torch.manual_seed(0)
    model = torch.nn.Sequential(Wary(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).double()
    assert prospr.prune(model, MLP.batches(1), 0.5, method="snip").kept == 28
    with torch.no_grad():
        model[2].weight.mul_(1e-6)
    with pytest.warns(CollapseWarning, match=r"2\.weight: 0 of 24 weights kept \(unknown whether a path is left\)"):
        prospr.prune(model, MLP.batches(1), 0.75, method="magnitude")


def test_a_network_that_sends_each_sample_its_own_way_is_judged_by_the_batch():
    class ByFirst(torch.nn.Module):
        """Which of two experts a sample goes to depends on its place in the batch."""

        def __init__(self):
            super().__init__()
            self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 3) for _ in range(2))

        def forward(self, x):
            return torch.stack([self.experts[i % 2](sample) for i, sample in enumerate(x)])

    model = ByFirst()
    with torch.no_grad():  # all that is kept is in the second expert, which one sample never reaches
        model.experts[0].weight.fill_(1e-3)
    batches = [(torch.randn(6, 4), torch.randint(0, 3, (6,)))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CollapseWarning)
        masks = prospr.prune(model, batches, 0.6, method="magnitude")
    assert not masks["experts.0.weight"].any()
