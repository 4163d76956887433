"""Masks travel with a model: copies, pickles, checkpoints, other types and devices."""

import copy
import io
import pickle
import warnings
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from masks.training import OPTIMIZERS, assert_held, assert_same, batch, mlp, random_masks, train, weights
from torch import nn

import prospr


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
    "deepcopy of a deepcopy": lambda model: copy.deepcopy(copy.deepcopy(model)),
}


@pytest.fixture
def model():
    model = mlp()
    random_masks(model).apply(model)
    train(model, OPTIMIZERS["sgd"](model.parameters()), steps=5)
    return model


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_has_masks_of_its_own(model, way):
    masks, inputs = prospr.Masks.of(model), batch(0)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = COPIES[way](model)
    assert prospr.Masks.of(other) == masks
    assert list(other.state_dict()) == list(model.state_dict())
    assert torch.equal(model.eval()(inputs), other.eval()(inputs))
    model.train(), other.train()

    before, state = weights(other), copy.deepcopy(model.state_dict())
    train(other, OPTIMIZERS["sgd"](other.parameters()), steps=20)
    assert_held(other, masks, before)
    assert_same(state, model.state_dict())

    random_masks(other, sparsity=0.9, seed=8).apply(other)
    assert prospr.Masks.of(model) == masks
    before = weights(model)
    train(model, OPTIMIZERS["adamw"](model.parameters()), steps=20)
    assert_held(model, masks, before)
    prospr.Masks.of(other).remove(other)
    assert prospr.Masks.of(model) == masks


def test_a_copy_keeps_an_optimizer_with_old_momentum_in_check(model):
    masks = prospr.Masks.of(model)
    masks.remove(model)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    train(model, optimizer, steps=5)
    masks.apply(model)
    other, second = copy.deepcopy((model, optimizer))
    momentum = second.state[other[0].weight]["momentum_buffer"]
    assert bool(momentum[~masks["0.weight"]].any())
    before = weights(other)
    train(other, second, steps=20)
    assert_held(other, masks, before)


def test_to_another_process(model):
    """torch.multiprocessing sends a model by this pickler, which warns of hooks that it cannot send."""
    masks = prospr.Masks.of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = pickle.loads(ForkingPickler.dumps(model))
    assert prospr.Masks.of(other) == masks
    before = weights(other)
    train(other, OPTIMIZERS["sgd"](other.parameters()), steps=20)
    assert_held(other, masks, before)


def test_masks_of_a_model_are_a_snapshot(model):
    masks = prospr.Masks.of(model)
    digest = masks.digest()
    other = mlp()
    random_masks(other, sparsity=0.2, seed=9).apply(other)
    model.load_state_dict(other.state_dict())
    assert masks.digest() == digest != prospr.Masks.of(model).digest()


def test_the_masks_given_are_copied():
    model = mlp()
    masks = random_masks(model)
    masks.apply(model)
    before = prospr.Masks.of(model)
    for mask in masks.values():
        mask.logical_not_()
    assert prospr.Masks.of(model) == before != masks


def test_state_dict_holds_the_masks(model):
    assert list(model.state_dict()) == [
        *("0.weight", "0.bias", "0.weight_mask"),
        *("1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"),
        *("3.weight", "3.bias", "3.weight_mask"),
    ]
    assert model.state_dict()["0.weight_mask"].dtype == torch.bool


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip(model, assign):
    """The masks in the checkpoint replace those on the model."""
    masks, inputs = prospr.Masks.of(model), batch(0)[0]
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = mlp(seed=1)
    random_masks(other, sparsity=0.8, seed=8).apply(other)
    result = other.load_state_dict(torch.load(file, weights_only=True), assign=assign)
    assert result.missing_keys == result.unexpected_keys == []
    assert prospr.Masks.of(other) == masks
    assert torch.equal(model.eval()(inputs), other.eval()(inputs))
    before = weights(other)
    train(other.train(), OPTIMIZERS["sgd"](other.parameters()), steps=20)
    assert_held(other, masks, before)


@pytest.mark.parametrize("assign", [False, True])
def test_a_dense_checkpoint_keeps_the_masks(model, assign):
    masks, dense = prospr.Masks.of(model), mlp(seed=1).state_dict()
    given = copy.deepcopy(dense)
    old = model[0].weight
    result = model.load_state_dict(dense, strict=True, assign=assign)
    assert result.missing_keys == result.unexpected_keys == []
    assert list(dense) == list(given)
    assert prospr.Masks.of(model) == masks
    assert (model[0].weight is old) is not assign
    for name, p in model.named_parameters():
        mask = masks.get(name, torch.ones_like(p, dtype=torch.bool))
        assert torch.equal(p, torch.where(mask, given[name], 0.0))
    before = weights(model)
    train(model, OPTIMIZERS["sgd"](model.parameters()), steps=20)
    assert_held(model, masks, before)
    if assign:
        assert not old._backward_hooks  # the parameter that left is let go


def test_a_dense_checkpoint_into_one_submodule(model):
    masks = prospr.Masks.of(model)
    model[0].load_state_dict({"weight": torch.ones(8, 6), "bias": torch.zeros(8)})
    assert torch.equal(model[0].weight, masks["0.weight"].float())


def test_a_wrong_checkpoint_is_refused_as_ever(model):
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*0\.bias"):
        model.load_state_dict({name: t for name, t in mlp().state_dict().items() if name != "0.bias"})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(model, dtype):
    masks, before = prospr.Masks.of(model), weights(model)
    model.to(dtype)
    assert model[0].weight.dtype == dtype
    assert model[0].weight_mask.dtype == torch.bool
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for step in range(20):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs.to(dtype)), targets).backward()
        assert bool((model[0].weight.grad[~masks["0.weight"]] == 0).all())
        optimizer.step()
    assert_held(model, masks, {name: w.to(dtype) for name, w in before.items()})


def test_parameters_replaced_by_a_conversion_are_taken_up_at_the_next_load(model):
    """torch may be told to make new parameters where a model is converted."""
    masks, old = prospr.Masks.of(model), model[0].weight
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert model[0].weight is not old
    model.load_state_dict(model.state_dict())
    model.float()
    before = weights(model)
    train(model, OPTIMIZERS["sgd"](model.parameters()), steps=20)
    assert_held(model, masks, before)


def test_through_the_meta_device(model):
    masks, state = prospr.Masks.of(model), copy.deepcopy(model.state_dict())
    model.to("meta").to_empty(device="cpu").load_state_dict(state)
    assert prospr.Masks.of(model) == masks
    before = weights(model)
    train(model, OPTIMIZERS["sgd"](model.parameters()), steps=20)
    assert_held(model, masks, before)


def test_an_averaged_model(model):
    """torch.optim.swa_utils copies the model and averages its weights."""
    masks = prospr.Masks.of(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for step in range(5):
        train(model, optimizer, steps=1, start=step)
        average.update_parameters(model)
    assert prospr.Masks.of(average.module) == masks
    assert bool((average.module[0].weight[~masks["0.weight"]] == 0).all())
