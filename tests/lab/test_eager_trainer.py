from dataclasses import replace

import pytest
import torch
from torch import nn

import prospr
from prospr.lab.data import Batches, CropFlip, Split, digits, load
from prospr.lab.models import build
from prospr.lab.recipes import Recipe
from prospr.lab.tasks import segmentation
from prospr.lab.train import train, train_together
from prospr.lab.training import EagerTrainer, Run

RECIPE = Recipe(epochs=3, batch_size=256, lr=0.1, drops=(1,), warmup=1, nesterov=True)


@pytest.fixture(scope="module")
def data():
    return digits()


def make_run(data, seed=0, recipe=RECIPE, masks=None, model=None):
    batches = Batches(data.train.images, data.train.labels, recipe.batch_size, seed, CropFlip(pad=1, flip=True))
    return Run(model or build("small_convnet", seed=seed, width=4), batches, recipe, masks)


def half(model):
    return {n: (torch.arange(p.numel()) % 2 == 0).view(p.shape) for n, p in model.named_parameters() if p.dim() > 1}


def assert_same(first, second):
    assert list(first) == list(second)
    for name in first:
        assert torch.equal(first[name], second[name]), name


def timeless(state):
    """A state without the seconds it took."""
    return {**state, "history": state["history"][:, [0, 1, 2, 4, 5]].nan_to_num(-1), "spent": torch.zeros(())}


@pytest.mark.parametrize("stop", [(1, 0), (2, 0), (1, 3), (0, 5)])
def test_a_resumed_run_ends_with_the_same_bits(data, stop):
    whole = EagerTrainer(make_run(data))
    whole.train()
    broken = EagerTrainer(make_run(data))
    for _ in range(stop[0]):
        broken.train_epoch()
    broken.train_steps(stop[1])
    (state,) = broken.states()
    broken.train()  # what happens after a state was taken does not reach into it
    resumed = EagerTrainer(make_run(data, model=build("small_convnet", seed=9, width=4)))
    resumed.load_states([state])
    assert (resumed.epoch, resumed.step) == stop
    resumed.train()
    assert_same(timeless(whole.states()[0]), timeless(resumed.states()[0]))


def test_dropout_is_resumed_too_and_global_random_numbers_are_left_alone(data):
    def make():
        model = build("small_convnet", seed=0, width=4)
        return make_run(data, model=nn.Sequential(*list(model)[:-1], nn.Dropout(0.5), model.fc))

    before = torch.get_rng_state()
    whole = EagerTrainer(make())
    whole.train()
    assert torch.equal(torch.get_rng_state(), before)
    broken, resumed = EagerTrainer(make()), EagerTrainer(make())
    broken.train_epoch()
    broken.train_steps(2)
    torch.randn(5)
    resumed.load_states(broken.states())
    resumed.train()
    assert_same(timeless(whole.states()[0]), timeless(resumed.states()[0]))


def test_masks_enforced_in_place_train_as_applied_masks_do(data):
    one, other = make_run(data), make_run(data)
    masks = prospr.Masks(half(one.model))
    masks.apply(other.model)
    EagerTrainer(replace(one, masks=masks)).train()
    EagerTrainer(other).train()
    masks.remove(other.model)
    assert_same(one.model.state_dict(), other.model.state_dict())
    assert all((one.model.get_parameter(name)[~keep] == 0).all() for name, keep in masks.items())


def test_the_test_images_are_seen_at_the_end_unless_asked_for(data):
    run = make_run(data)
    (quiet,) = EagerTrainer(run).train(data.test)
    assert [epoch.test == epoch.test for epoch in quiet.epochs] == [False, False, True]
    watched = make_run(data)
    told = []
    validation = Split(data.test.images[:100], data.test.labels[:100])
    (loud,) = EagerTrainer(watched).train(
        data.test, validation, evaluate_every=2, progress=lambda done, epochs: told.append((done, epochs[0].loss))
    )
    assert_same(run.model.state_dict(), watched.model.state_dict())
    assert [epoch.test == epoch.test for epoch in loud.epochs] == [False, True, True]
    assert [epoch.validation == epoch.validation for epoch in loud.epochs] == [False, True, False]
    assert told == [(i, epoch.loss) for i, epoch in enumerate(loud.epochs, 1)]
    assert loud.test == quiet.test
    assert loud.epochs[-1].test == loud.accuracy


def test_epochs_record_what_was_trained(data):
    run = make_run(data)
    (result,) = EagerTrainer(run).train(data.test)
    last = (len(run.batches) - 1) / len(run.batches)
    assert [epoch.lr for epoch in result.epochs] == pytest.approx([0.1 * last, 0.01, 0.01])
    assert result.epochs[0].loss > result.epochs[-1].loss
    assert result.epochs[0].train < result.epochs[-1].train <= 1
    assert result.seconds == sum(epoch.seconds for epoch in result.epochs) > 0


def test_a_run_can_be_checkpointed_and_resumed_by_train(data):
    run, states = make_run(data), []
    whole = train(run.model, run.batches, data.test, RECIPE, checkpoint=states.append)
    assert [int(state["epoch"]) for state in states] == [1, 2, 3]
    again = make_run(data, model=build("small_convnet", seed=3, width=4))
    resumed = train(again.model, again.batches, data.test, RECIPE, state=states[0])
    assert resumed.test == whole.test
    assert resumed.train_losses == whole.train_losses
    assert_same(run.model.state_dict(), again.model.state_dict())


def test_states_that_do_not_fit_are_refused(data):
    trainer = EagerTrainer(make_run(data))
    (state,) = trainer.states()
    with pytest.raises(ValueError, match="2 states for 1 runs"):
        trainer.load_states([state, state])
    with pytest.raises(ValueError, match="7 steps asked for, and 6 are left"):
        trainer.train_steps(7)


def test_runs_together_are_runs_alone(data):
    short = replace(RECIPE, epochs=1, drops=(), warmup=0)
    alone = [train(run.model, run.batches, data.test, short) for run in (make_run(data, s, short) for s in range(3))]
    told = []
    results = train_together(
        [make_run(data, s, short) for s in range(3)], data.test, progress=lambda first, done, _: told.append(first)
    )
    assert [result.test for result in results] == [result.test for result in alone]
    assert told == [0, 1, 2]
    with pytest.raises(ValueError, match="together is 0"):
        train_together([], together=0)
    with pytest.raises(ValueError, match="unknown engine 'fast'; known: auto, eager, graph"):
        train_together([make_run(data)], engine="fast")


def test_bfloat16_learns_with_float32_weights(data):
    recipe = replace(RECIPE, precision="bf16", channels_last=True)
    run = make_run(data, recipe=recipe)
    (result,) = EagerTrainer(run).train(data.test)
    exact = make_run(data)
    (reference,) = EagerTrainer(exact).train(data.test)
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    assert result.train_losses == pytest.approx(reference.train_losses, rel=0.02)
    assert result.train_losses != reference.train_losses


def test_segmentation_learns_bright_pixels(data):
    images = data.train.images[:400]
    task = segmentation(2, "dice")
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    recipe = Recipe(epochs=8, batch_size=50, lr=0.1)
    batches = Batches(images, (images[:, 0] > 0).long(), 50, seed=0)
    test = Split(data.test.images, (data.test.images[:, 0] > 0).long())
    result = train(model, batches, test, recipe, task=task)
    assert result.test["mean_iou"] > 0.8
    assert result.epochs[-1].test == result.test["mean_iou"]


def test_images_that_are_read_from_files_train_eagerly(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for part in ("train", "val"):
        for number in range(6):
            folder = tmp_path / part / ("dark", "light")[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            image.new("RGB", (12, 12), (200 * (number % 2) + number,) * 3).save(folder / f"{number}.png")
    data = load("folder", tmp_path)
    train_files, test_files = (replace(files, size=8, resize=8) for files in (data.train, data.test))
    recipe = Recipe(epochs=6, batch_size=3, lr=0.01)
    model = build("small_convnet", seed=0, width=4, in_channels=3, num_classes=2)
    batches = train_files.batches(recipe.batch_size, seed=0)
    result = train(model, batches, test_files, recipe)
    assert len(result.epochs) == 6
    assert result.epochs[-1].train == 1
    with pytest.raises(ValueError, match="read from files in every epoch cannot live on the GPU; use engine='eager'"):
        train(model, batches, test_files, recipe, engine="graph")
