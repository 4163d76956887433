import dataclasses
import math

import pytest

from prospr.lab.recipes import Recipe, recipe, recipes


def test_learning_rate_drops_and_warms_up():
    recipe = Recipe(epochs=10, batch_size=1, lr=0.2, drops=(4, 8), warmup=2)
    rates = [recipe.lr_at(epoch) for epoch in (0, 1, 1.5, 2, 3.9, 4, 8)]
    assert rates == pytest.approx([0, 0.1, 0.15, 0.2, 0.2, 0.02, 0.002])


def test_papers_recipes():
    cifar = recipes()["prospr-cifar"]
    assert (cifar.epochs, cifar.batch_size, cifar.lr, cifar.drops, cifar.weight_decay) == (
        200,
        256,
        0.1,
        (100, 150),
        5e-4,
    )
    assert all(recipe.momentum == 0.9 for recipe in recipes().values())


def test_impossible_recipes_are_refused():
    with pytest.raises(ValueError, match="epochs is 0"):
        Recipe(epochs=0, batch_size=1, lr=0.1)
    with pytest.raises(ValueError, match=r"drops at epochs \[5\].*use epochs 1 to 4"):
        Recipe(epochs=5, batch_size=1, lr=0.1, drops=(2, 5))
    with pytest.raises(ValueError, match="batch_size is 0"):
        Recipe(epochs=1, batch_size=0, lr=0.1)
    with pytest.raises(ValueError, match=r"warmup is 3 epochs; use 0 to 2"):
        Recipe(epochs=3, batch_size=1, lr=0.1, warmup=3)
    with pytest.raises(ValueError, match="unknown schedule 'linear'; known: drops, cosine"):
        Recipe(epochs=3, batch_size=1, lr=0.1, schedule="linear")
    with pytest.raises(ValueError, match="has no drops"):
        Recipe(epochs=3, batch_size=1, lr=0.1, schedule="cosine", drops=(1,))
    with pytest.raises(ValueError, match="unknown precision 'fp8'"):
        Recipe(epochs=3, batch_size=1, lr=0.1, precision="fp8")
    with pytest.raises(ValueError, match="nesterov=True needs a momentum"):
        Recipe(epochs=3, batch_size=1, lr=0.1, momentum=0.0, nesterov=True)


def test_cosine_falls_to_zero_after_the_warm_up():
    settings = Recipe(epochs=10, batch_size=1, lr=0.2, schedule="cosine", warmup=2)
    rates = [settings.lr_at(epoch) for epoch in (0, 1, 2, 4, 6, 8, 10)]
    quarter = 0.1 * 2**-0.5
    assert rates == pytest.approx([0, 0.1, 0.2, 0.1 + quarter, 0.1, 0.1 - quarter, 0])


def test_every_field_of_a_named_recipe_can_be_changed():
    for name, known in recipes().items():
        assert recipe(name) == known
    changed = recipe("prospr-cifar", epochs=20, drops=(5,), precision="tf32", channels_last=False)
    assert changed == dataclasses.replace(
        recipes()["prospr-cifar"], epochs=20, drops=(5,), precision="tf32", channels_last=False
    )
    with pytest.raises(ValueError, match="unknown recipe 'prospr'; known names: prospr-cifar, "):
        recipe("prospr")


def test_a_recipe_keeps_its_proportions_when_scaled():
    long = Recipe(epochs=200, batch_size=1, lr=0.1, drops=(100, 150), warmup=5)
    assert (long.scaled(40).drops, long.scaled(40).warmup) == ((20, 30), 1)
    assert long.scaled(2).drops == (1,)
    assert long.scaled(1).drops == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"momentum": -1.0},
        {"momentum": 1.0},
        {"weight_decay": -1.0},
        {"weight_decay": math.nan},
        {"lr": 0.0},
        {"lr": math.inf},
        {"drop_factor": -0.1},
    ],
)
def test_numbers_that_cannot_be(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name} is .*; use a number"):
        recipe("digits", **wrong)
