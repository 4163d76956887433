"""Train, prune, train again: which weights, which values, and how many trainings."""

import itertools
import subprocess
import sys
import warnings

import pytest
import torch
from cases import BY_NAME
from torch import nn
from trainings import Adding, Real, Toy, assert_same, small_net

import prospr
from prospr.errors import CollapseWarning, MaskError, SettingError
from prospr.retraining import retrain

# ---- by hand


def test_a_lottery_ticket_by_hand():
    model, train = Toy(), Adding()
    masks = retrain(model, train, sparsity=0.5, rewind=2)
    assert train.calls == [(0, 2), (2, None), (2, None)]
    # After ten steps: 1+55, 2-110, 3+27.5, 4+13.75, 5-165, 6+6.875, 7+220, 8. The four largest in size are
    # -160, 227, -108 and 56.
    assert masks["line.weight"].tolist() == [[True, True, False, False, True, False, True, False]]
    # At step 2 a weight is its start plus (1 + 2) times its rate.
    assert train.seen[2]["line.weight"].tolist() == [[4.0, -4.0, 0.0, 0.0, -4.0, 0.0, 19.0, 0.0]]
    assert train.seen[2]["line.bias"].tolist() == [2.0]  # the bias and the statistic are rewound too
    assert train.seen[2]["steps_seen"].tolist() == [2.0]
    # And then the rest of the schedule, 3 + ... + 10 = 52 times the rate.
    assert model.line.weight.tolist() == [[56.0, -108.0, 0.0, 0.0, -160.0, 0.0, 227.0, 0.0]]
    assert model.steps_seen.tolist() == [10.0]
    assert prospr.Masks.of(model) == masks


def test_rewinding_to_the_start():
    model, train = Toy(), Adding()
    retrain(model, train, sparsity=0.5, rewind=0)
    assert train.calls == [(0, None), (0, None)]
    assert train.seen[1]["line.weight"].tolist() == [[1.0, 2.0, 0.0, 0.0, 5.0, 0.0, 7.0, 0.0]]
    assert train.seen[1]["line.bias"].tolist() == [0.0]


def test_magnitude_after_training_by_hand():
    model, train = Toy(), Adding()
    masks = retrain(model, train, sparsity=0.75)
    assert train.calls == [(0, None), (0, None)]
    assert masks["line.weight"].tolist() == [[False, False, False, False, True, False, True, False]]
    assert train.seen[1]["line.weight"].tolist() == [[0.0, 0.0, 0.0, 0.0, -160.0, 0.0, 227.0, 0.0]]  # kept as trained
    assert train.seen[1]["line.bias"].tolist() == [10.0]
    assert model.line.weight.tolist() == [[0.0, 0.0, 0.0, 0.0, -325.0, 0.0, 447.0, 0.0]]
    assert model.steps_seen.tolist() == [20.0]


def test_levels_by_hand():
    """8, 4, 2, 1 weights. Every level is judged after its own training."""

    class Turning(Adding):
        def __call__(self, model, start, stop):
            super().__call__(model, start, stop)
            if len(self.calls) == 3:  # the training of the first level's four shrinks weight 6, until then the largest
                with torch.no_grad():
                    model.line.weight[0, 6] = 0.5

    model, train = Toy(), Turning()
    masks = retrain(model, train, sparsity=0.875, rewind=2, levels=3)
    assert train.calls == [(0, 2), (2, None), (2, None), (2, None), (2, None)]
    live = [(seen["line.weight"] != 0).flatten().nonzero().flatten().tolist() for seen in train.seen[2:]]
    assert live == [[0, 1, 4, 6], [1, 4], [4]]
    assert train.seen[4]["line.weight"].tolist() == [[0.0, 0.0, 0.0, 0.0, -4.0, 0.0, 0.0, 0.0]]  # 5 - 3 x 3
    assert masks.kept == 1


def test_another_score():
    class Smallest(prospr.Score):
        def score(self, problem):
            return {name: -w.abs() for name, w in problem.weights().items()}

    model, train = Toy(), Adding()
    masks = retrain(model, train, sparsity=0.5, rewind=2, method=Smallest(), levels=2)
    # Pruned weights are zero, the smallest of all; they stay pruned.
    assert masks["line.weight"].tolist() == [[False, False, True, True, False, True, False, True]]


def test_a_score_is_told_what_is_left():
    seen = []

    class Watched(prospr.Magnitude):
        def score(self, problem):
            seen.append((problem.seed, None if problem.masks is None else problem.masks["line.weight"].sum().item()))
            return super().score(problem)

    retrain(Toy(), Adding(), sparsity=0.875, rewind=2, levels=3, method=Watched(), seed=10)
    assert seen == [(10, None), (11, 4), (12, 2)]


# ---- real trainings


@pytest.mark.parametrize("rewind", [None, 0, 3])
def test_one_level_is_one_shot(rewind):
    torch.manual_seed(1)
    model = small_net()
    masks = retrain(model, Real(), 0.8, rewind=rewind, levels=1)

    torch.manual_seed(1)
    twin, train = small_net(), Real()
    begin = rewind or 0
    if begin:
        train(twin, 0, begin)
    origin = {name: value.clone() for name, value in twin.state_dict().items()}
    train(twin, begin, None)
    want = prospr.select({n: w.abs() for n, w in prospr.prunable(twin).items()}, 0.8)
    assert masks == want
    if rewind is not None:
        twin.load_state_dict(origin)
    want.apply(twin)
    train(twin, begin, None)
    assert_same(model, twin)


@pytest.mark.parametrize("rewind", [None, 2])
@pytest.mark.parametrize("scope", ["global", "layer", "erk"])
def test_levels_are_nested_and_counted(tmp_path, rewind, scope):
    model, train = small_net(), Real()
    last = retrain(model, train, 0.9, rewind=rewind, levels=5, scope=scope, folder=tmp_path)
    levels = [prospr.Masks.load(tmp_path / f"level-{t}.safetensors") for t in range(1, 6)]
    assert levels[-1] == last
    assert [m.kept for m in levels] == [round(160 * 0.1 ** (t / 5)) for t in range(1, 6)]
    for before, after in itertools.pairwise(levels):
        assert all(bool((after[n] <= before[n]).all()) for n in after)
    assert len(train.calls) == (7 if rewind else 6)
    assert all(not dict(model.named_parameters())[n][~m].any() for n, m in last.items())


def test_open_lths_twenty_per_cent_a_level(tmp_path):
    retrain(small_net(), Real(), 1 - 0.8**3, rewind=2, levels=3, folder=tmp_path)
    kept = [prospr.Masks.load(tmp_path / f"level-{t}.safetensors").kept for t in (1, 2, 3)]
    assert kept == [128, 102, 82]  # 160 x 0.8, 0.64, 0.512


@pytest.mark.parametrize("method", ["snip", "random", prospr.Grasp(), prospr.ProsPr(steps=1, lr=0.1)])
def test_scores_with_data(method):
    batches = [(torch.randn(8, 6), torch.randint(0, 4, (8,))) for _ in range(3)]
    model = small_net()
    masks = retrain(model, Real(), 0.7, rewind=1, levels=2, method=method, batches=batches, keep_per_layer=2)
    assert masks.kept == 48
    assert min(int(m.sum()) for m in masks.values()) >= 2


def test_parameters_keep_their_identity():
    model = small_net()
    before = list(model.parameters())
    retrain(model, Real(), 0.8, rewind=2, levels=2)
    assert all(p is q for p, q in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["residual", "attention", "conv-batchnorm-maxpool"])
def test_awkward_networks(name):
    case = BY_NAME[name]
    data = case.batches(2)

    def train(model, start, stop):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(start, 2 if stop is None else stop):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data[0][0]), data[0][1]).backward()
            optimizer.step()

    model = case.model()
    masks = retrain(model, train, 0.5, rewind=1, levels=2)
    assert masks.kept == round(0.5 * masks.total)


# ---- bad input


def test_settings_that_cannot_be():
    for settings, word in [
        ({"sparsity": 1.0}, "sparsity=1.0"),
        ({"sparsity": 0.5, "rewind": -1}, "rewind=-1"),
        ({"sparsity": 0.5, "rewind": 2.5}, "rewind=2.5"),
        ({"sparsity": 0.5, "levels": 0}, "levels=0"),
        ({"sparsity": 0.5, "method": "force"}, "rounds of its own"),
        ({"sparsity": 0.5, "method": "no such"}, "no such"),
    ]:
        train = Adding()
        with pytest.raises(SettingError, match=word):
            retrain(Toy(), train, **settings)
        assert train.calls == []
    with pytest.raises(SettingError, match="train="):
        retrain(Toy(), None, 0.5)


def test_a_model_with_masks_is_refused():
    model = Toy()
    prospr.prune(model, None, 0.5, method="magnitude", collapse="ignore")
    with pytest.raises(MaskError, match=r"masks\.remove"):
        retrain(model, Adding(), 0.5)


def test_an_empty_layer_is_a_warning():
    model = small_net()
    with torch.no_grad():
        model[4].weight.mul_(1e-4)
    with pytest.warns(CollapseWarning, match=r"level 1: 4\.weight: 0 of 64 weights kept"):
        retrain(model, lambda *_: None, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin = small_net()
        with torch.no_grad():
            twin[4].weight.mul_(1e-4)
        retrain(twin, lambda *_: None, 0.5, keep_per_layer=1)


def test_an_error_in_the_training_leaves_the_model_as_it_was():
    for killed_at in (1, 2, 3):
        model = small_net()
        with pytest.raises(KeyboardInterrupt):
            retrain(model, Real(killed_at), 0.8, rewind=3)
        assert_same(model, small_net())
        with pytest.raises(MaskError):
            prospr.Masks.of(model)


def test_it_needs_no_numpy(tmp_path):
    code = f"""
import sys
sys.modules["numpy"] = None
import torch
from prospr.retraining import retrain
for _ in range(2):
    torch.manual_seed(0)
    masks = retrain(torch.nn.Linear(6, 4), lambda *_: None, 0.5, rewind=1, folder={str(tmp_path)!r})
print(masks.kept)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "12", done.stderr


def test_channels_are_refused():
    with pytest.raises(SettingError, match="prunes channels"):
        prospr.retrain(nn.Linear(3, 2), lambda model, start, stop: None, 0.5, method="3sp")


@pytest.mark.parametrize(
    "wrong", [{"scope": "globl"}, {"scope": "mapped"}, {"keep_per_layer": -1}, {"keep_per_layer": 500}]
)
def test_settings_are_checked_before_the_training(wrong):
    def train(*_):
        pytest.fail("it was trained")

    model = torch.nn.Sequential(torch.nn.Linear(10, 30), torch.nn.ReLU(), torch.nn.Linear(30, 2))
    with pytest.raises(SettingError, match=r"scope|keep_per_layer"):
        retrain(model, train, 0.9, **wrong)
