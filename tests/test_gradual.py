"""Pruning while training: the cubic schedule, masks that only shrink, and runs that resume where they stood."""

import copy
import itertools

import pytest
import torch
from cases import BY_NAME
from torch import nn

import prospr
from prospr.errors import MaskError, SettingError
from prospr.gradual import GradualMagnitude
from prospr.masks.select import select_among


def optimizers():
    return {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    }


def small_net():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 4))


def take_step(model, optimizer, step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(16, 6, generator=generator)
    targets = torch.randint(0, 4, (16,), generator=generator)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def test_the_cubic_schedule_by_hand():
    rule = GradualMagnitude(sparsity=0.8, begin=100, end=500, every=100)
    # 0.8 - 0.8 (1 - p)^3 at p = 0, 1/4, 1/2, 3/4, 1: 0.8 times 0, 37/64, 7/8, 63/64, 1
    want = {0: 0.0, 99: 0.0, 100: 0.0, 200: 0.4625, 300: 0.7, 400: 0.7875, 500: 0.8, 501: 0.8, 9999: 0.8}
    assert {t: rule.at(t) for t in want} == pytest.approx(want, abs=1e-12)
    assert rule.at(500) == 0.8
    begun = GradualMagnitude(sparsity=0.8, initial=0.4, begin=0, end=4, every=1)
    assert [begun.at(t) for t in range(5)] == pytest.approx([0.4, 0.63125, 0.75, 0.79375, 0.8], abs=1e-12)


def test_when_it_prunes():
    rule = GradualMagnitude(sparsity=0.8, begin=3, end=10, every=3)
    assert [t for t in range(20) if rule.due(t)] == [3, 6, 9, 10]  # and at the end, which is no multiple


def test_the_weights_that_go_by_hand():
    net = nn.Linear(8, 1, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[8.0, -1.0, 7.0, 2.0, -6.0, 3.0, 5.0, 4.0]]))
    pruner = GradualMagnitude(sparsity=0.75, end=2, every=1).on(net)
    assert pruner.masks.kept == 8
    assert pruner.step()  # after one of two steps: 0.75 x 7/8 = 0.656 gone, 2.75 kept, so 3
    assert net.weight.tolist() == [[8.0, 0.0, 7.0, 0.0, -6.0, 0.0, 0.0, 0.0]]
    with torch.no_grad():
        net.weight[0, 0] = 0.5  # the largest becomes the smallest that is left
    assert pruner.step()
    assert net.weight.tolist() == [[0.0, 0.0, 7.0, 0.0, -6.0, 0.0, 0.0, 0.0]]
    assert not pruner.step()
    assert pruner.masks.kept == 2


def test_a_beginning_at_step_zero_prunes_at_once():
    net = nn.Linear(10, 10)
    assert GradualMagnitude(sparsity=0.9, initial=0.5, end=10).on(net).masks.kept == 50
    assert GradualMagnitude(sparsity=0.9, initial=0.5, begin=1, end=10).on(nn.Linear(10, 10)).masks.kept == 100


@pytest.mark.parametrize("name", optimizers())
@pytest.mark.parametrize("scope", ["global", "layer", "erk"])
def test_masks_only_shrink_and_pruned_weights_stay_zero(name, scope):
    model = small_net()
    optimizer = optimizers()[name](model.parameters())
    rule = GradualMagnitude(sparsity=0.9, begin=4, end=40, every=6, scope=scope)
    pruner = rule.on(model)
    kept, total = [], pruner.masks.total
    before = pruner.masks
    for step in range(50):
        take_step(model, optimizer, step)
        weights = dict(model.named_parameters())
        assert all(not weights[n][~m].any() for n, m in before.items()), step  # also before pruner.step()
        pruned = pruner.step()
        after = pruner.masks
        assert all(bool((after[n] <= before[n]).all()) for n in after)
        assert all(not weights[n][~m].any() for n, m in after.items())
        assert pruned == (after.kept < before.kept)
        if rule.due(step + 1):
            assert after.kept == round((1 - rule.at(step + 1)) * total)
        else:
            assert after == before
        kept.append(after.kept)
        before = after
    assert kept[-1] == round(0.1 * total)
    assert len(set(kept)) == 7  # dense until step 4; then at 10, 16, 22, 28, 34 and 40
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", optimizers())
@pytest.mark.parametrize("pruner_first", [True, False])
@pytest.mark.parametrize("pause", [5, 17, 24])
def test_a_resumed_run_is_the_unbroken_one(tmp_path, name, pruner_first, pause):
    rule = GradualMagnitude(sparsity=0.9, begin=2, end=24, every=4)

    def begin():
        model = small_net()
        return model, optimizers()[name](model.parameters()), rule.on(model)

    def go(model, optimizer, pruner, steps):
        for step in steps:
            take_step(model, optimizer, step)
            pruner.step()

    unbroken = begin()
    go(*unbroken, range(30))

    broken = begin()
    go(*broken, range(pause))
    torch.save([part.state_dict() for part in broken], tmp_path / "checkpoint.pt")
    resumed = begin()
    states = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    for i in (2, 0, 1) if pruner_first else (0, 1, 2):
        resumed[i].load_state_dict(states[i])
    go(*resumed, range(pause, 30))

    want, got = unbroken[0].state_dict(), resumed[0].state_dict()
    assert list(want) == list(got)
    assert all(torch.equal(want[key], got[key]) for key in want)
    assert resumed[2].steps == 30


def test_a_pruners_state_brings_its_masks():
    rule = GradualMagnitude(sparsity=0.9, end=10, every=1)
    pruner = rule.on(small_net())
    for _ in range(4):
        pruner.step()
    model = small_net()
    resumed = rule.on(model)
    resumed.load_state_dict(pruner.state_dict())
    assert prospr.Masks.of(model) == pruner.masks
    assert resumed.masks.kept < resumed.masks.total
    assert all(not dict(model.named_parameters())[n][~m].any() for n, m in pruner.masks.items())


def test_masks_that_are_on_the_model_hold():
    model = small_net()
    first = prospr.prune(model, None, 0.6, method="random")
    pruner = GradualMagnitude(sparsity=0.9, end=10, every=1).on(model)
    assert pruner.masks == first  # the schedule is at 0, the model at 0.6
    kept = []
    for _ in range(10):
        pruner.step()
        kept.append(pruner.masks.kept)
        assert all(bool((pruner.masks[n] <= first[n]).all()) for n in first)
    assert kept[0] == kept[1] == first.kept > kept[3] > kept[-1]
    assert kept[-1] == round(0.1 * first.total)


def test_only_what_is_prunable_is_pruned():
    model = small_net()
    pruner = GradualMagnitude(sparsity=0.5, end=1, every=1).on(model, prunable=["3.weight"])
    pruner.step()
    assert list(pruner.masks) == ["3.weight"]
    assert int(model[0].weight.count_nonzero()) == 120
    assert int(model[3].weight.count_nonzero()) == 40


def test_awkward_networks():
    for name in ("residual", "attention"):
        case = BY_NAME[name]
        model = case.model()
        pruner = GradualMagnitude(sparsity=0.8, end=3, every=1, keep_per_layer=1).on(model)
        for _ in range(3):
            pruner.step()
        assert pruner.masks.kept == round(0.2 * pruner.masks.total)
        assert not pruner.masks.empty()


def test_whole_weights_in_layers_never_come_back():
    """Of 24 weights 20 and then 19: by the largest remainder layer c has first one weight, then two."""
    sizes = {"a": 8, "b": 8, "c": 2, "d": 6}
    scores = {name: torch.rand(n) + 0.1 for name, n in sizes.items()}
    first = prospr.select(scores, 1 - 20 / 24, scope="layer")
    assert [int(m.sum()) for m in first.values()] == [7, 7, 1, 5]
    alone = prospr.select(scores, 1 - 19 / 24, scope="layer")
    assert [int(m.sum()) for m in alone.values()] == [6, 6, 2, 5]  # the trap is there
    second = select_among(scores, first, 1 - 19 / 24, scope="layer")
    assert second.kept == 19
    assert all(bool((second[n] <= first[n]).all()) for n in sizes)


def test_what_is_gone_stays_gone_whatever_it_scores():
    scores = {"a": torch.tensor([-5.0, -1.0, -3.0]), "b": torch.tensor([100.0, 0.0, -5.0])}
    masks = {"a": torch.tensor([True, True, True]), "b": torch.tensor([False, False, True])}
    kept = select_among(scores, masks, 1 - 3 / 6)
    assert kept["a"].tolist() == [True, True, True]
    assert kept["b"].tolist() == [False, False, False]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"sparsity": 1.0, "end": 10}, "sparsity=1.0"),
        ({"sparsity": 0.5, "end": 10, "initial": 0.6}, "initial=0.6"),
        ({"sparsity": 0.5, "end": 10, "initial": -0.1}, "initial=-0.1"),
        ({"sparsity": 0.5, "end": 10, "begin": -1}, "begin=-1"),
        ({"sparsity": 0.5, "end": 10, "begin": 10}, "end=10"),
        ({"sparsity": 0.5, "end": 2.5}, "end=2.5"),
        ({"sparsity": 0.5, "end": 10, "every": 0}, "every=0"),
    ],
)
def test_settings_that_cannot_be(settings, word):
    with pytest.raises(SettingError, match=word):
        GradualMagnitude(**settings)


def test_a_state_of_another_run_is_refused():
    rule = GradualMagnitude(sparsity=0.9, end=10)
    state = rule.on(small_net()).state_dict()
    with pytest.raises(SettingError, match=r"sparsity=0.8.*sparsity=0.9"):
        GradualMagnitude(sparsity=0.8, end=10).on(small_net()).load_state_dict(state)
    with pytest.raises(MaskError, match=r"3\.weight"):
        rule.on(small_net(), prunable=["0.weight"]).load_state_dict(state)
    with pytest.raises(SettingError, match="masks"):
        rule.on(small_net()).load_state_dict({"settings": {}, "steps": 1})


def test_masks_that_were_removed_are_missed():
    model = small_net()
    pruner = GradualMagnitude(sparsity=0.9, end=1, every=1).on(model)
    pruner.masks.remove(model)
    with pytest.raises(MaskError, match=r"0\.weight"):
        pruner.step()


def test_a_copy_of_the_model_is_not_touched():
    model = small_net()
    pruner = GradualMagnitude(sparsity=0.9, end=1, every=1).on(model)
    twin = copy.deepcopy(model)
    pruner.step()
    assert "after 1 steps, sparsity 0.9" in repr(pruner)
    for weight, other in itertools.zip_longest((model[0].weight, model[3].weight), (twin[0].weight, twin[3].weight)):
        assert weight.count_nonzero() < other.count_nonzero() == other.numel()


@pytest.mark.parametrize(
    "wrong", [{"scope": "globl"}, {"scope": "focused"}, {"keep_per_layer": -1}, {"keep_per_layer": 500}]
)
def test_settings_are_checked_before_the_training(wrong):
    model = torch.nn.Sequential(torch.nn.Linear(10, 30), torch.nn.ReLU(), torch.nn.Linear(30, 2))
    with pytest.raises(SettingError, match=r"scope|keep_per_layer"):
        GradualMagnitude(sparsity=0.9, end=20, every=5, **wrong).on(model)
    assert not list(model.named_buffers())
