"""Putting masks on, replacing them, and taking them off."""

import copy
import gc
import weakref

import pytest
import torch
from masks.training import OPTIMIZERS, assert_held, assert_same, mlp, random_masks, train, weights
from torch import nn

import prospr
from prospr.errors import MaskError


def traces(model):
    """Everything that hooks leave on a model: module attributes, hooks of modules and of parameters."""
    found = []
    for module in model.modules():
        for key, value in sorted(module.__dict__.items()):
            if ("hook" in key and value) or key.startswith("_prospr"):
                found.append((key, len(value)))
    return found + [len(p._backward_hooks or ()) for p in model.parameters()]


def test_apply_zeroes_the_pruned_and_leaves_the_rest():
    model = mlp()
    before, masks = weights(model), random_masks(model)
    assert masks.apply(model) is None
    for name, p in model.named_parameters():
        expected = torch.where(masks[name], before[name], 0.0) if name in masks else before[name]
        assert torch.equal(p, expected)
    assert prospr.Masks.of(model) == masks


def test_by_hand():
    layer = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    prospr.Masks({"weight": torch.tensor([[True, False, True], [False, False, True]])}).apply(layer)
    assert layer.weight.tolist() == [[1.0, 0.0, 3.0], [0.0, 0.0, 6.0]]
    layer(torch.tensor([[1.0, 10.0, 100.0]])).sum().backward()
    assert layer.weight.grad.tolist() == [[1.0, 0.0, 100.0], [0.0, 0.0, 100.0]]
    torch.optim.SGD(layer.parameters(), lr=0.5, weight_decay=1.0).step()  # w - 0.5 (g + w)
    assert layer.weight.tolist() == [[0.0, 0.0, -48.5], [0.0, 0.0, -47.0]]


def test_other_masks_replace_the_first():
    model = mlp()
    first, second = random_masks(model, sparsity=0.8), random_masks(model, seed=8)
    first.apply(model)
    hooks = traces(model)
    zeros = {name: p == 0 for name, p in model.named_parameters()}
    second.apply(model)
    assert traces(model) == hooks  # nothing twice
    assert prospr.Masks.of(model) == second != first
    for name, mask in second.items():
        p = dict(model.named_parameters())[name]
        assert torch.equal(p == 0, zeros[name] | ~mask)
    before = weights(model)
    train(model, OPTIMIZERS["sgd"](model.parameters()), steps=20)
    assert_held(model, second, before)
    used = second["3.weight"].any(0)[:, None]  # a unit that nothing reads has no gradient
    back = second["0.weight"] & ~first["0.weight"] & used
    assert int(back.sum()) > 5
    assert bool((model[0].weight[back] != 0).all())  # pruned by the first alone, they train again


def test_remove_leaves_nothing_behind():
    model, dense = mlp(), mlp()
    masks = random_masks(model)
    keys, clean = list(model.state_dict()), traces(model)
    masks.apply(model)
    assert traces(model) != clean
    masks.remove(model)
    assert list(model.state_dict()) == keys
    assert traces(model) == clean
    assert not model[0]._load_state_dict_pre_hooks
    assert not model[0]._load_state_dict_post_hooks
    assert sorted(model[0].__dict__) == sorted(dense[0].__dict__)
    with pytest.raises(MaskError, match="no masks on this Sequential"):
        prospr.Masks.of(model)


def test_remove_keeps_the_zeros_and_lets_them_train():
    model = mlp()
    masks = random_masks(model)
    masks.apply(model)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    train(model, optimizer, steps=5)
    masks.remove(model)
    pruned = ~masks["0.weight"]
    assert bool((model[0].weight[pruned] == 0).all())
    train(model, optimizer, steps=5)
    assert bool((model[0].weight[pruned] != 0).all())


def test_remove_some():
    model = mlp()
    masks = random_masks(model)
    masks.apply(model)
    prospr.Masks({"0.weight": masks["0.weight"]}).remove(model)
    assert list(prospr.Masks.of(model)) == ["3.weight"]
    before = weights(model)
    train(model, OPTIMIZERS["sgd"](model.parameters()), steps=5)
    used = masks["3.weight"].any(0)[:, None]  # a unit that nothing reads has no gradient
    assert bool((model[0].weight[~masks["0.weight"] & used] != 0).all())
    assert_held(model, prospr.Masks({"3.weight": masks["3.weight"]}), before)


def test_two_masks_on_one_module():
    lstm = nn.LSTM(2, 3)
    masks = random_masks(lstm)
    masks.apply(lstm)
    prospr.Masks({"weight_ih_l0": masks["weight_ih_l0"]}).remove(lstm)
    assert list(prospr.Masks.of(lstm)) == ["weight_hh_l0"]
    lstm.load_state_dict({name: torch.ones_like(t) for name, t in nn.LSTM(2, 3).state_dict().items()})
    assert torch.equal(lstm.weight_hh_l0, masks["weight_hh_l0"].float())
    assert torch.equal(lstm.weight_ih_l0, torch.ones(12, 2))


BAD = {
    "another name": ({"5.weight": torch.ones(3, 8, dtype=torch.bool)}, r"5\.weight: Sequential has no such parameter"),
    "another attribute": ({"0.kernel": torch.ones(3, 8, dtype=torch.bool)}, r"0\.kernel: .* has 0\.weight"),
    "another shape": (
        {"3.weight": torch.ones(3, 9, dtype=torch.bool)},
        r"3\.weight: the mask has shape \(3, 9\) and the parameter \(3, 8\)",
    ),
    "not a parameter": ({"1.running_mean": torch.ones(8, dtype=torch.bool)}, r"1\.running_mean: "),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("masked", [False, True])
def test_one_mask_that_does_not_fit_changes_nothing(case, masked):
    model = mlp()
    if masked:
        random_masks(model, sparsity=0.2, seed=9).apply(model)
    state, before = copy.deepcopy(model.state_dict()), traces(model)
    extra, message = BAD[case]
    masks = prospr.Masks({"0.weight": torch.zeros(8, 6, dtype=torch.bool), **extra})
    with pytest.raises(MaskError, match=message):
        masks.apply(model)
    assert_same(state, model.state_dict())
    assert traces(model) == before


def test_remove_is_all_or_nothing():
    model = mlp()
    masks = random_masks(model)
    prospr.Masks({"0.weight": masks["0.weight"]}).apply(model)
    with pytest.raises(MaskError, match=r"3\.weight: there is no mask on this parameter"):
        masks.remove(model)
    assert list(prospr.Masks.of(model)) == ["0.weight"]


def test_a_module_with_such_an_attribute_of_its_own():
    model = mlp()
    model[3].register_buffer("weight_mask", torch.zeros(1))
    with pytest.raises(MaskError, match=r"3\.weight: the module has an attribute weight_mask of its own; rename it"):
        random_masks(model).apply(model)
    assert not hasattr(model[0], "weight_mask")
    assert model[3].weight_mask.tolist() == [0.0]


def test_a_masked_model_is_freed():
    """The hook on every optimizer's step must not keep a model alive that nobody else holds."""
    model = mlp()
    masks = random_masks(model)
    masks.apply(model)
    train(model, OPTIMIZERS["sgd"](model.parameters()), steps=2)
    other = copy.deepcopy(model)
    references = [weakref.ref(m) for m in (model, other, model[0].weight, other[0].weight)]
    del model, other
    gc.collect()
    assert [r() for r in references] == [None] * 4


def test_a_parameter_that_is_frozen_while_masks_are_put_on():
    model = torch.nn.Linear(4, 3).requires_grad_(False)
    masks = prospr.Masks({"weight": torch.tensor([[True, False, True, False]] * 3)})
    masks.apply(model)
    assert not model.weight.requires_grad
    model.requires_grad_(True)
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None
    assert (model.weight.grad[~masks["weight"]] == 0).all()
    assert (model.weight.grad[masks["weight"]] != 0).all()
    masks.remove(model)
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    assert (model.weight.grad != 0).all()


def test_a_model_made_in_inference_mode_is_masked():
    with torch.inference_mode():
        model = torch.nn.Linear(4, 3).requires_grad_(False)
        masks = prospr.Masks({"weight": torch.tensor([[True, False, True, False]] * 3)})
        masks.apply(model)
        assert (model.weight[:, 1] == 0).all()
        masks.remove(model)
