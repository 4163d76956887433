"""What a run starts from, and when it prunes: weights of smaller networks, pruning after training, BYOL."""

import math
from dataclasses import replace
from itertools import islice

import pytest
import torch

import prospr
from prospr.errors import SettingError
from prospr.lab.byol import pretrain
from prospr.lab.estimate import estimate
from prospr.lab.experiment import Experiment, Pruning, Training
from prospr.lab.models import build, initialise
from prospr.lab.run import Options, run, run_many
from prospr.lab.runs.folder import RunFolder
from prospr.lab.runs.making import Loader, Parts, check
from prospr.lab.runs.pretrained import settings_of
from prospr.lab.train import train

CPU = torch.device("cpu")
SHORT = Training(epochs=2, batch_size=512)
CHANNELS = Experiment(
    method="3sp", sparsity=0.5, settings={"width": 8}, training=SHORT,
    pruning=Pruning(granularity="channel", shrink=True),
)  # fmt: skip


def with_weights(weights):
    return replace(CHANNELS, pruning=replace(CHANNELS.pruning, weights=weights))


def parts_of(experiment):
    return Parts(experiment, Loader(CPU)(experiment), CPU)


# Smaller networks


@pytest.fixture(scope="module")
def pruned():
    parts = parts_of(CHANNELS)
    masks = parts.score().masks
    return masks, prospr.channels.plan(parts.network(), masks, parts.example)


@pytest.mark.parametrize("weights", ["keep", "rescale"])
def test_a_smaller_network_starts_as_shrink_makes_it(weights, pruned):
    masks, plan = pruned
    parts = parts_of(with_weights(weights))
    ours = parts.smaller(parts.network(), plan).state_dict()
    theirs = prospr.shrink(parts.network(), masks, parts.example, weights=weights).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_weights_drawn_anew_are_those_of_the_networks_own_initialization(pruned):
    _, plan = pruned
    parts = parts_of(with_weights("redraw"))
    kept, drawn, again = (
        parts_of(with_weights(weights)).smaller(parts.network(), plan) for weights in ("keep", "redraw", "redraw")
    )
    for name, weight in drawn.named_parameters():
        assert torch.equal(weight, again.get_parameter(name))
        assert weight.shape == kept.get_parameter(name).shape
        if weight.dim() == 4:
            assert not torch.equal(weight, kept.get_parameter(name))
    other = parts_of(replace(with_weights("redraw"), seed=1)).smaller(parts.network(), plan)
    assert not torch.equal(drawn.conv2.weight, other.conv2.weight)


@pytest.mark.parametrize("name", ["vgg16", "resnet20", "vit"])
def test_initialise_draws_as_build_does(name):
    settings = {} if name == "vit" else {"width": 64}
    first, second = build(name, seed=0, **settings), build(name, seed=1, **settings)
    torch.manual_seed(0)
    initialise(name, second)
    for (where, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        if a.std(correction=0) < 1e-12:
            assert torch.equal(a, b), where
        else:
            assert not torch.equal(a, b), where
            if a.numel() > 2000:
                assert float((b.std() / a.std()).detach()) == pytest.approx(1, abs=5 / math.sqrt(a.numel())), where


def test_runs_differ_in_their_weights_alone(tmp_path):
    results = [run(with_weights(weights), tmp_path, "cpu") for weights in ("keep", "rescale", "redraw")]
    assert len({result.folder for result in results}) == 3
    assert results[0].masks == results[1].masks == results[2].masks
    assert len({result.sizes["trained_parameters"] for result in results}) == 1
    assert len({result.epochs[0]["loss"] for result in results}) == 3
    assert results[2].model().conv1.weight.shape == results[0].model().conv1.weight.shape


def test_weights_are_for_smaller_networks():
    with pytest.raises(SettingError, match=r"is for the smaller network; set pruning\.shrink"):
        check(Experiment(pruning=Pruning(weights="redraw")))
    with pytest.raises(SettingError, match=r"pruning\.weights='old': use 'keep'"):
        Experiment(pruning=Pruning(granularity="channel", shrink=True, weights="old"))


# After training

TICKET = Experiment(
    method="magnitude", sparsity=0.8, settings={"width": 4}, training=replace(SHORT, epochs=3),
    pruning=Pruning(after_training=True, rewind=4),
)  # fmt: skip
AFTER = replace(TICKET, pruning=Pruning(after_training=True))
EVERY_EPOCH = Options(save_every=0)


def by_hand(one):
    """The same by `prospr.retrain`, with SGD written out here: what is kept, and the weights at the end."""
    parts, recipe = parts_of(one), one.trained_by
    batches = parts.batches(recipe.batch_size)

    def train(model, start, stop):
        model.train()
        sgd = torch.optim.SGD(
            model.parameters(), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay,
            nesterov=recipe.nesterov,
        )  # fmt: skip
        steps = len(batches)
        for step in range(start, recipe.epochs * steps if stop is None else stop):
            epoch, within = divmod(step, steps)
            images, labels = next(islice(batches.epoch(epoch), within, None))
            sgd.param_groups[0]["lr"] = recipe.lr_at(step / steps)
            sgd.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            sgd.step()

    model = parts.network()
    masks = prospr.retrain(model, train, one.sparsity, rewind=one.pruning.rewind)
    masks.remove(model)
    return masks, model.state_dict()


@pytest.mark.parametrize("rewind", [None, 0, 3, 4])  # there are three steps in an epoch
def test_a_run_after_training_is_retrain(rewind, tmp_path):
    one = replace(TICKET, pruning=Pruning(after_training=True, rewind=rewind))
    result = run(one, tmp_path, "cpu")
    masks, weights = by_hand(one)
    assert result.masks == masks
    ours = result.model().state_dict()
    assert ours.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.allclose(ours[name], value, rtol=1e-4, atol=1e-6), name
    kept = result.masks["conv2.weight"]
    assert not ours["conv2.weight"][~kept].any()
    assert [epoch["epoch"] for epoch in result.epochs] == [1, 2, 3]
    assert result.seconds["score"] > 0
    assert sorted(path.name for path in result.folder.iterdir() if path.is_dir()) == []


class Stop(Exception):
    """In place of a kill."""


@pytest.mark.parametrize("one", [TICKET, AFTER], ids=["rewound", "kept"])
@pytest.mark.parametrize("moment", ["before pruning, epoch 2", "before pruning, epoch 3", "epoch 3"])
def test_interrupted_anywhere_it_ends_the_same(one, moment, tmp_path):
    def progress(done, total, text):
        if text.startswith(f"{moment}:"):
            raise Stop

    with pytest.raises(Stop):
        run(one, tmp_path / "broken", "cpu", progress, options=EVERY_EPOCH)
    seen = []
    again = run(one, tmp_path / "broken", "cpu", lambda done, total, text: seen.append(text), options=EVERY_EPOCH)
    whole = run(one, tmp_path / "whole", "cpu")
    assert again.figures == whole.figures
    ours, theirs = again.model().state_dict(), whole.model().state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    trained_first = [text for text in seen if text.startswith("before")]
    assert len(trained_first) < 3  # what was done is not done again
    assert again.notes == []


def damage(path):
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize("home", ["first", "rewind"])
@pytest.mark.filterwarnings("ignore::prospr.lab.runs.checkpoints.DamagedWarning")
def test_a_damaged_first_training_is_done_again(home, tmp_path):
    def progress(done, total, text):
        if text.startswith("epoch 2"):
            raise Stop

    with pytest.raises(Stop):
        run(TICKET, tmp_path / "broken", "cpu", progress, options=Options(save_every=1000))
    place = RunFolder(TICKET, tmp_path / "broken")
    for path in (place.path / home).glob("*.safetensors"):
        damage(path)
    again, whole = run(TICKET, tmp_path / "broken", "cpu"), run(TICKET, tmp_path / "whole", "cpu")
    assert again.figures == whole.figures
    assert "before pruning" in again.notes[0]


def test_runs_before_and_after_training_side_by_side(tmp_path):
    wanted = [TICKET, AFTER, replace(TICKET, pruning=Pruning()), replace(TICKET, method="dense")]
    results = run_many(wanted, tmp_path / "many", "cpu")
    assert [result.error for result in results] == [None] * 4
    for one, result in zip(wanted, results, strict=True):
        assert result.figures == run(one, tmp_path / "alone", "cpu").figures


@pytest.mark.gpu
@pytest.mark.filterwarnings("error:.*could not be trained together")
def test_on_a_gpu_side_by_side(tmp_path):
    whole = Training(epochs=4, batch_size=64, precision="float32")
    wanted = [replace(one, seed=seed, training=whole) for one in (TICKET, AFTER) for seed in (0, 1)]
    together = run_many(wanted, tmp_path / "graph", "cuda", together=4, options=Options(engine="graph"))
    alone = run_many(wanted, tmp_path / "eager", "cuda", options=Options(engine="eager"))
    assert [result.error for result in together] == [None] * 4
    for one, other in zip(together, alone, strict=True):
        assert one.masks.overlap(other.masks) > 0.9
        assert one.figure == pytest.approx(other.figure, abs=0.05)


def test_channels_after_training(tmp_path):
    one = replace(CHANNELS, method="magnitude", pruning=replace(CHANNELS.pruning, after_training=True, rewind=2))
    result = run(one, tmp_path, "cpu")
    model = result.model()
    assert result.sizes["trained_parameters"] < 0.6 * result.sizes["parameters"]
    assert model.conv1.weight.shape[0] < 8


def test_what_cannot_be_pruned_after_training(tmp_path):
    with pytest.raises(SettingError, match=r"rewind=3 is for pruning after training; set pruning\.after_training"):
        check(Experiment(pruning=Pruning(rewind=3)))
    with pytest.raises(SettingError, match="would undo the training before"):
        check(replace(with_weights("redraw"), pruning=replace(with_weights("redraw").pruning, after_training=True)))
    with pytest.raises(SettingError, match=r"rewind=9: the training has 9 steps; use fewer"):
        run(replace(TICKET, pruning=Pruning(after_training=True, rewind=9)), tmp_path, "cpu")
    with pytest.raises(SettingError, match="`prospr run` trains it first"):
        parts_of(TICKET).score()
    assert TICKET.label == "small_convnet, digits, magnitude 80 % after training from step 4, seed 0"


# BYOL

LEARNED = Experiment(method="snip", sparsity=0.8, settings={"width": 4}, training=replace(SHORT, byol=2))


def test_a_run_starts_from_what_byol_learned(tmp_path):
    result, dense = run(LEARNED, tmp_path, "cpu"), run(replace(LEARNED, method="dense"), tmp_path, "cpu")
    random = replace(LEARNED, training=SHORT)
    parts = parts_of(random)
    learned = pretrain(parts.network(), parts.data, settings_of(parts_of(LEARNED)), seed=0).network
    start = replace(parts_of(LEARNED), learned=learned.state_dict())
    assert result.masks == start.score().masks
    assert result.masks != parts.score().masks
    model = start.network()
    assert not torch.equal(model.conv2.weight, parts.network().conv2.weight)
    recipe = LEARNED.trained_by
    trained = train(model, start.batches(recipe.batch_size), parts.data.test, recipe, masks=result.masks)
    assert result.figures == trained.test
    assert dense.figures != run(replace(random, method="dense"), tmp_path, "cpu").figures
    assert not (result.folder / "byol.pt").exists()


@pytest.mark.parametrize("moment", ["BYOL, epoch 1", "scoring", "epoch 1"])
def test_a_killed_start_goes_on(moment, tmp_path):
    def progress(done, total, text):
        if text.startswith(moment):
            raise Stop

    with pytest.raises(Stop):
        run(LEARNED, tmp_path / "broken", "cpu", progress, options=EVERY_EPOCH)
    seen = []
    again = run(LEARNED, tmp_path / "broken", "cpu", lambda done, total, text: seen.append(text), options=EVERY_EPOCH)
    assert [text.split(":")[0] for text in seen if "BYOL" in text] == (["BYOL, epoch 2"] if "BYOL" in moment else [])
    assert again.figures == run(LEARNED, tmp_path / "whole", "cpu").figures


def test_byol_says_what_it_cannot(tmp_path):
    with pytest.raises(SettingError, match="for classification, and isbi2012 is for segmentation"):
        Experiment(dataset="isbi2012", training=Training(byol=3))
    with pytest.raises(SettingError, match="learned first; `prospr run` does"):
        parts_of(LEARNED).score()
    cost = estimate(LEARNED, tmp_path)
    assert cost.seconds is None
    assert "2 epochs of BYOL come first" in cost.basis
    assert estimate(TICKET, tmp_path).epochs == 6
