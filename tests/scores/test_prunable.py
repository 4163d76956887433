"""Which parameters may be pruned."""

import pytest
import torch
from cases import BY_NAME
from torch import nn

import prospr
from prospr.errors import ModelError
from prospr.layers import computed


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 4))
        self.conv = nn.Conv2d(1, 2, 3)
        self.up = nn.ConvTranspose3d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.group = nn.GroupNorm(1, 2)
        self.embed = nn.Embedding(5, 4)
        self.fc = nn.Linear(4, 4)
        self.pair = nn.Bilinear(4, 4, 2)
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.rnn = nn.GRU(4, 3)
        self.prelu = nn.PReLU()


def test_by_default():
    assert list(prospr.prunable(Everything())) == [
        *("conv.weight", "up.weight", "fc.weight", "pair.weight"),
        *("attention.in_proj_weight", "attention.out_proj.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0"),
    ]


def test_the_parameters_themselves():
    model = Everything()
    assert prospr.prunable(model)["fc.weight"] is model.fc.weight


def test_frozen_parameters_are_left_out():
    assert list(prospr.prunable(BY_NAME["frozen-unused-mixed-modes"].model())) == [
        *("conv.weight", "unused.weight", "head.weight"),
    ]


def test_a_tied_weight_counts_once():
    assert list(prospr.prunable(BY_NAME["tied"].model())) == ["embed.weight", "body.weight"]


def test_by_names_in_the_models_order():
    chosen = prospr.prunable(Everything(), ["pair.weight", "embed.weight", "norm.weight"])
    assert list(chosen) == ["norm.weight", "embed.weight", "pair.weight"]
    assert list(prospr.prunable(Everything(), iter(["fc.weight"]))) == ["fc.weight"]


def test_by_a_function():
    chosen = prospr.prunable(Everything(), lambda name, p: name.startswith("fc") or p.dim() == 5)
    assert list(chosen) == ["up.weight", "fc.weight", "fc.bias"]


@pytest.mark.parametrize("wrap", [lambda m: nn.DataParallel(m), torch.compile])
def test_wrappers_leave_no_prefix(wrap):
    model = nn.Sequential(nn.Linear(2, 2))
    assert list(prospr.prunable(wrap(model))) == ["0.weight"]


def test_an_unknown_name():
    with pytest.raises(
        ModelError, match=r"prunable names 'fc\.wieght', which is not a parameter; the model has token, "
    ):
        prospr.prunable(Everything(), ["fc.wieght"])


def test_one_name():
    assert list(prospr.prunable(Everything(), "fc.weight")) == ["fc.weight"]
    with pytest.raises(ModelError, match=r"prunable names 'fc', which is not a parameter; the model has token, "):
        prospr.prunable(Everything(), "fc")


def test_the_other_name_of_a_tied_weight():
    model = BY_NAME["tied"].model()
    names = [n for n, p in model.named_parameters(remove_duplicate=False) if p is model.embed.weight]
    other = next(n for n in names if n != "embed.weight")
    with pytest.raises(ModelError, match=f"prunable names '{other}', which is tied to 'embed.weight'; name that one"):
        prospr.prunable(model, [other])


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("normed", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
@pytest.mark.parametrize(
    ("layer", "weight", "left"),
    [
        (lambda: nn.GRU(4, 3), "weight_hh_l0", ["weight_ih_l0"]),
        (lambda: nn.LSTM(4, 3, proj_size=2), "weight_ih_l0", ["weight_hh_l0", "weight_hr_l0"]),
        (lambda: nn.RNN(4, 3, bidirectional=True), "weight_hh_l0_reverse", ["weight_ih_l0", "weight_hh_l0"]),
        (lambda: nn.LSTMCell(4, 3), "weight_ih", ["weight_hh"]),
        (lambda: nn.MultiheadAttention(4, 2), "in_proj_weight", ["out_proj.weight"]),
        (lambda: nn.MultiheadAttention(4, 2, kdim=3), "k_proj_weight", ["q_proj_weight", "v_proj_weight"]),
    ],
)
def test_what_a_matrix_is_computed_from_is_left_out_and_told(normed, layer, weight, left):
    assert weight in prospr.prunable(layer())
    module = layer()
    normed(module, weight)
    found = list(prospr.prunable(module))
    assert [name for name in found if name in left] == left
    assert not any(name.startswith(weight + "_") or "parametrizations" in name for name in found)
    assert computed(nn.Sequential(nn.Linear(2, 2), module)) == ["1"]
    assert computed(nn.Sequential(nn.Linear(2, 2), layer())) == []


@pytest.mark.parametrize("which", [[], lambda name, p: False])
def test_none_chosen(which):
    with pytest.raises(ModelError, match=r"prunable= chose none of the 2 parameters: weight, bias"):
        prospr.prunable(nn.Linear(2, 2), which)


@pytest.mark.parametrize(
    "model",
    [nn.ReLU(), nn.BatchNorm2d(3), nn.Linear(2, 2).requires_grad_(False), nn.Embedding(3, 2)],
    ids=lambda m: type(m).__name__,
)
def test_nothing_to_prune(model):
    with pytest.raises(ModelError, match=f"{type(model).__name__} has nothing to prune: no trainable weight"):
        prospr.prunable(model)


def test_complex_weights():
    with pytest.raises(ModelError, match=r"weight: a parameter of type torch\.complex64 cannot be pruned"):
        prospr.prunable(nn.Linear(2, 2, dtype=torch.complex64))


def test_a_layer_without_weights_yet():
    with pytest.raises(ModelError, match="LazyLinear has no weights yet; run the model once"):
        prospr.prunable(nn.Sequential(nn.LazyLinear(3)))
