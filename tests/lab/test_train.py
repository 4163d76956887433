import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from prospr.lab.data import Batches, CropFlip, Split, digits
from prospr.lab.data.memory import statistics
from prospr.lab.models import build
from prospr.lab.recipes import Recipe
from prospr.lab.train import evaluate, train

RECIPE = Recipe(epochs=2, batch_size=128, lr=0.1, drops=(1,))
ENOUGH = Recipe(epochs=4, batch_size=64, lr=0.1, drops=(3,))


@pytest.fixture(scope="module")
def data():
    return digits()


def batches_of(data, seed=0, recipe=RECIPE):
    return Batches(data.train.images, data.train.labels, recipe.batch_size, seed, CropFlip(pad=1))


def half_masks(model):
    """Every second weight of the convolutions."""
    return {
        name: (torch.arange(p.numel()) % 2 == 0).view(p.shape) for name, p in model.named_parameters() if p.dim() == 4
    }


def test_training_lowers_the_loss_and_reports_the_last_epoch(data):
    model = build("small_convnet", seed=0)
    told = []
    batches = batches_of(data, recipe=ENOUGH)
    result = train(model, batches, data.test, ENOUGH, progress=lambda epoch, loss: told.append((epoch, loss)))
    assert len(result.train_losses) == 4
    assert list(result.train_losses) == sorted(result.train_losses, reverse=True)
    assert told == list(enumerate(result.train_losses, start=1))
    assert result.accuracy > 0.8
    assert result.test == evaluate(model, data.test)
    assert (result.accuracy, result.loss) == (result.test["accuracy"], result.test["loss"])
    assert result.seconds > 0


def test_pruned_weights_are_exactly_zero_and_kept_ones_train(data):
    model = build("small_convnet", seed=0)
    masks = half_masks(model)
    at_start = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, batches_of(data), data.test, RECIPE, masks)
    for name, keep in masks.items():
        weight = model.get_parameter(name)
        assert (weight[~keep] == 0).all()
        assert (weight[keep] != at_start[name][keep]).all()


def test_masked_training_is_plain_training_of_the_masked_network(data):
    """The same steps with the masks inside the network, in float64, where rounding is not amplified into view."""
    model, other = (build("small_convnet", seed=0).double() for _ in range(2))
    masks = half_masks(model)
    recipe = dataclasses.replace(RECIPE, epochs=1, drops=(), weight_decay=0.0, momentum=0.0)
    batches = Batches(data.train.images.double(), data.train.labels, recipe.batch_size, seed=0)
    test = Split(data.test.images.double(), data.test.labels)
    train(model, batches, test, recipe, masks)

    params = {name: p.detach().clone().requires_grad_() for name, p in other.named_parameters()}
    for images, labels in batches.epoch(0):
        masked = {name: p * masks[name] if name in masks else p for name, p in params.items()}
        loss = F.cross_entropy(torch.func.functional_call(other, masked, (images,)), labels)
        grads = torch.autograd.grad(loss, list(params.values()))
        with torch.no_grad():
            for p, grad in zip(params.values(), grads, strict=True):
                p -= recipe.lr * grad
    for name, keep in masks.items():
        assert torch.allclose(model.get_parameter(name), params[name] * keep, rtol=0, atol=1e-9)


def test_training_is_bit_reproducible_and_leaves_the_global_random_state_alone(data):
    before = torch.get_rng_state()
    models = [build("small_convnet", seed=5) for _ in range(2)]
    results = [train(model, batches_of(data, seed=5), data.test, RECIPE) for model in models]
    assert torch.equal(torch.get_rng_state(), before)
    assert results[0].train_losses == results[1].train_losses
    states = [model.state_dict() for model in models]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_training_on_a_gpu(data):
    model = build("small_convnet", seed=0).cuda()
    masks = {name: mask.cuda() for name, mask in half_masks(model).items()}
    result = train(model, batches_of(data, recipe=ENOUGH), data.test, ENOUGH, masks)
    assert result.accuracy > 0.8
    assert all((model.get_parameter(name)[~keep] == 0).all() for name, keep in masks.items())


def test_evaluate_by_hand_and_leaves_the_mode():
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False)).train()
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(2))
    images = torch.tensor([[3.0, 0.0], [0.0, 3.0], [3.0, 0.0]]).view(3, 1, 1, 2)
    seen = evaluate(model, Split(images, torch.tensor([0, 1, 1])))
    right = torch.tensor(1 + torch.e**-3).log().item()
    assert seen["accuracy"] == pytest.approx(2 / 3)
    assert seen["loss"] == pytest.approx((2 * right + right + 3) / 3, rel=1e-5)
    assert model.training


def test_masks_that_do_not_fit_are_refused(data):
    model = build("small_convnet", seed=0)
    with pytest.raises(ValueError, match=r"'conv9\.weight', which is not a parameter"):
        train(model, batches_of(data), data.test, RECIPE, {"conv9.weight": torch.ones(1, dtype=torch.bool)})
    with pytest.raises(ValueError, match=r"conv1\.weight: the mask's shape is \(3,\)"):
        train(model, batches_of(data), data.test, RECIPE, {"conv1.weight": torch.ones(3, dtype=torch.bool)})


def test_batches_of_another_size_than_the_recipe_are_refused(data):
    batches = Batches(data.train.images, data.train.labels, 32, seed=0)
    with pytest.raises(ValueError, match=r"batches of 128, train_batches has 32"):
        train(build("small_convnet", seed=0), batches, data.test, RECIPE)


def test_bytes_train_and_test_as_their_normalised_numbers_do(data):
    """uint8 images with a mean and a deviation, and the same numbers as floats."""
    pixels = (data.train.images - data.train.images.min()).mul(3).round().to(torch.uint8)
    as_bytes = Split(pixels, data.train.labels, *statistics(pixels))
    as_floats = Split(as_bytes.inputs(), data.train.labels)
    results = [
        train(build("small_convnet", seed=0), part.batches(RECIPE.batch_size, seed=0), part, RECIPE)
        for part in (as_bytes, as_floats)
    ]
    assert results[0].train_losses == results[1].train_losses
    assert (results[0].accuracy, results[0].loss) == (results[1].accuracy, results[1].loss)
