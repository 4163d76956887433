"""To and from torch.nn.utils.prune."""

import copy

import pytest
import torch
from masks.training import OPTIMIZERS, assert_same, batch, mlp, random_masks, train, weights
from torch import nn
from torch.nn.utils import prune as torch_prune

import prospr
from prospr import Masks
from prospr.errors import MaskError


@pytest.mark.parametrize("applied", [False, True])
def test_round_trip(applied):
    model, ours = mlp(), mlp()
    masks, parameter = random_masks(model), model[0].weight
    masks.apply(ours)
    if applied:
        masks.apply(model)
    masks.to_torch(model)
    assert torch_prune.is_pruned(model)
    assert Masks.from_torch(model) == masks
    assert model[0].weight_orig is parameter  # for a live optimizer
    inputs = batch(0)[0]
    assert torch.equal(model.eval()(inputs), ours.eval()(inputs))
    with pytest.raises(MaskError, match="no masks"):
        Masks.of(model)


def test_both_train_alike():
    model, ours = mlp(), mlp()
    masks = random_masks(model)
    masks.to_torch(model)
    masks.apply(ours)
    losses = [train(m, torch.optim.SGD(m.parameters(), lr=0.1), steps=20) for m in (model, ours)]
    assert losses[0] == losses[1]
    torch_prune.remove(model[0], "weight")
    torch_prune.remove(model[3], "weight")
    assert_same(dict(sorted(weights(model).items())), dict(sorted(weights(ours).items())))


def test_masks_that_torch_made():
    model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, -4.0, 2.0, 3.0], [0.5, 8.0, -6.0, 5.0]]))
    torch_prune.l1_unstructured(model[0], "weight", amount=5)
    masks = Masks.from_torch(model)
    assert list(masks) == ["0.weight"]
    assert masks["0.weight"].tolist() == [[False, False, False, False], [False, True, True, True]]


def test_taking_over_from_torch():
    model = mlp()
    masks = random_masks(model)
    masks.to_torch(model)
    with pytest.raises(MaskError, match=r"0\.weight: .* no such parameter"):
        masks.apply(model)
    taken = Masks.from_torch(model)
    for module in (model[0], model[3]):
        torch_prune.remove(module, "weight")
    taken.apply(model)
    assert Masks.of(model) == masks
    train(model, OPTIMIZERS["sgd"](model.parameters()), steps=5)
    assert bool((model[0].weight[~masks["0.weight"]] == 0).all())


def test_recurrent_layers():
    lstm = nn.LSTM(3, 2)
    ours = copy.deepcopy(lstm)
    masks = random_masks(lstm)
    masks.to_torch(lstm)
    masks.apply(ours)
    x = torch.randn(4, 2, 3)
    assert torch.equal(lstm(x)[0], ours(x)[0])
    assert Masks.from_torch(lstm) == masks


def test_nothing_to_read():
    with pytest.raises(MaskError, match=r"torch\.nn\.utils\.prune has put no masks on this Sequential"):
        Masks.from_torch(mlp())


def untouched(model, masks, message):
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(MaskError, match=message):
        masks.to_torch(model)
    assert_same(state, model.state_dict())
    assert not torch_prune.is_pruned(model)


def test_tied_weights_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    masks = random_masks(model)
    untouched(model, masks, r"0\.weight: this weight is shared by several modules, .* masks\.apply")


def test_attention_is_refused():
    """Its output projection is read and never called, so torch's hook would not run after the first step."""
    model = nn.TransformerEncoderLayer(4, 2, 8)
    untouched(model, random_masks(model), r"self_attn\.out_proj\.weight: nn\.MultiheadAttention reads this weight")


def test_masks_that_do_not_fit_are_refused():
    model = mlp()
    masks = prospr.Masks({**random_masks(model), "3.weight": torch.ones(3, 9, dtype=torch.bool)})
    untouched(model, masks, r"3\.weight: the mask has shape \(3, 9\)")
