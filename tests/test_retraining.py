"""Train, prune, train again: which weights, which values, how many trainings, and what a killed run does."""

import hashlib
import itertools
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from cases import BY_NAME
from torch import nn

import prospr
from prospr.errors import CollapseWarning, FolderError, MaskError, SettingError
from prospr.masks.enforce import rezero
from prospr.retraining import retrain

# A training one can do in one's head: step s adds (s + 1) times these numbers to the weights, 1 to the bias and 1 to a
# statistic. Ten steps are the whole schedule: 1 + 2 + ... + 10 = 55.
RATES = torch.tensor([[1.0, -2.0, 0.5, 0.25, -3.0, 0.125, 4.0, 0.0]])
START = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]])


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 1)
        self.register_buffer("steps_seen", torch.zeros(1))
        with torch.no_grad():
            self.line.weight.copy_(START)
            self.line.bias.zero_()


class Adding:
    """The training above; it keeps the calls made of it, and what the model was at each."""

    def __init__(self):
        self.calls = []
        self.seen = []

    def __call__(self, model, start, stop):
        self.calls.append((start, stop))
        self.seen.append({name: value.clone() for name, value in model.state_dict().items()})
        with torch.no_grad():
            for step in range(start, 10 if stop is None else stop):
                model.line.weight.add_(RATES, alpha=step + 1)
                model.line.bias += 1
                model.steps_seen += 1
                rezero(model)


def small_net():
    with torch.random.fork_rng():
        torch.manual_seed(5)
        net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
        nn.init.uniform_(net[4].weight, -0.5, 0.5)  # as large as the first layer's: neither empties
        return net


class Real:
    """SGD on noise from torch's global random state, with dropout; may be killed at its n-th call, half way."""

    def __init__(self, killed_at=None):
        self.calls = []
        self.killed_at = killed_at

    def __call__(self, model, start, stop):
        self.calls.append((start, stop))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        stop = 8 if stop is None else stop
        for step in range(start, stop):
            if len(self.calls) == self.killed_at and step == (start + stop) // 2:
                raise KeyboardInterrupt
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.randn(8, 6)), torch.randint(0, 4, (8,))).backward()
            optimizer.step()


def assert_same(first, second):
    first, second = first.state_dict(), second.state_dict()
    assert list(first) == list(second)
    for name in first:
        assert torch.equal(first[name], second[name]), name


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


# ---- killed and called again

PLANS = {
    "one shot": {"sparsity": 0.8, "rewind": 3},
    "levels": {"sparsity": 0.9, "rewind": 3, "levels": 3},
    "from the start": {"sparsity": 0.9, "rewind": 0, "levels": 2},
    "after training": {"sparsity": 0.8},
    "after training, levels": {"sparsity": 0.8, "levels": 2},
}


def unbroken(plan, folder=None):
    torch.manual_seed(7)
    model, train = small_net(), Real()
    masks = retrain(model, train, **plan, folder=folder)
    return model, masks, train.calls, torch.rand(3)


@pytest.mark.parametrize("same_process", [True, False])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_killed_at_any_training_and_called_again(tmp_path, plan, same_process):
    want, masks, calls, after = unbroken(plan)
    for killed_at in range(1, len(calls) + 1):
        folder = tmp_path / str(killed_at)
        torch.manual_seed(7)
        model = small_net()
        with pytest.raises(KeyboardInterrupt):
            retrain(model, Real(killed_at), **plan, folder=folder)
        assert_same(model, small_net())  # as it was, and without masks
        torch.manual_seed(1234)
        if not same_process:
            model = small_net()
        train = Real()
        assert retrain(model, train, **plan, folder=folder) == masks
        assert train.calls == calls[killed_at - 1 :]  # what was finished is not trained again
        assert_same(model, want)
        assert torch.equal(torch.rand(3), after)  # the random state goes on as in the unbroken run


def test_killed_again_and_again(tmp_path):
    plan = PLANS["levels"]
    want, masks, calls, _ = unbroken(plan)
    torch.manual_seed(7)
    for _ in calls:
        train = Real(killed_at=2)  # one stage a call
        try:
            model = small_net()
            got = retrain(model, train, **plan, folder=tmp_path)
        except KeyboardInterrupt:
            continue
    assert len(train.calls) == 1
    assert got == masks
    assert_same(model, want)


def test_a_folder_changes_nothing(tmp_path):
    plan = PLANS["levels"]
    first, second = unbroken(plan), unbroken(plan, tmp_path)
    assert_same(first[0], second[0])
    assert torch.equal(first[3], second[3])
    files = {path.name for path in tmp_path.iterdir()}
    levels = {f"level-{t}.{kind}" for t in (1, 2, 3) for kind in ("pt", "safetensors")}
    assert files == {"settings.json", "start.pt", "step-3.pt", "level-0.pt", *levels}


def test_a_finished_run_is_not_run_again(tmp_path):
    want, masks, _, after = unbroken(PLANS["levels"], tmp_path)
    model, train = small_net(), Real()
    assert retrain(model, train, **PLANS["levels"], folder=tmp_path) == masks
    assert train.calls == []
    assert_same(model, want)
    assert torch.equal(torch.rand(3), after)


def test_killed_while_pruning(tmp_path):
    class Fails(prospr.Magnitude):
        left = 1

        def score(self, problem):
            if Fails.left == 0:
                raise KeyboardInterrupt
            Fails.left -= 1
            return super().score(problem)

    plan = {**PLANS["levels"], "method": Fails()}
    torch.manual_seed(7)
    with pytest.raises(KeyboardInterrupt):
        retrain(small_net(), Real(), **plan, folder=tmp_path)
    Fails.left = 10
    model, train = small_net(), Real()
    retrain(model, train, **plan, folder=tmp_path)
    assert train.calls == [(3, None), (3, None)]
    assert Fails.left == 8  # the first level's masks are stored
    assert_same(model, unbroken(PLANS["levels"])[0])


def test_killed_while_writing(tmp_path, monkeypatch):
    plan, whole = PLANS["one shot"], torch.save

    def cut(stage, path):
        whole(stage, path)
        if len(list(tmp_path.glob("*.pt"))) == 2:
            path.write_bytes(path.read_bytes()[:100])
            raise OSError("no space left on device")

    torch.manual_seed(7)
    monkeypatch.setattr(torch, "save", cut)
    model = small_net()
    with pytest.raises(OSError, match="no space"):
        retrain(model, Real(), **plan, folder=tmp_path)
    monkeypatch.undo()
    assert {path.name for path in tmp_path.iterdir()} == {"settings.json", "start.pt", "step-3.pt"}
    assert_same(model, small_net())
    retrain(model, Real(), **plan, folder=tmp_path)
    assert_same(model, unbroken(plan)[0])


@pytest.mark.gpu
def test_killed_on_a_gpu(tmp_path):
    def train(model, start, stop):
        if calls and len(calls) == killed_at:
            raise KeyboardInterrupt
        calls.append((start, stop))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for _ in range(start, 8 if stop is None else stop):
            optimizer.zero_grad()
            inputs, targets = torch.randn(8, 6, device="cuda"), torch.randint(0, 4, (8,), device="cuda")
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    calls, killed_at = [], None
    torch.manual_seed(7)
    want = small_net().cuda()
    masks = retrain(want, train, **PLANS["levels"])
    for fail in range(1, 5):
        torch.manual_seed(7)
        calls, killed_at = [], fail
        with pytest.raises(KeyboardInterrupt):
            retrain(small_net().cuda(), train, **PLANS["levels"], folder=tmp_path / str(fail))
        torch.manual_seed(99)
        calls, killed_at = [], None
        model = small_net().cuda()
        assert retrain(model, train, **PLANS["levels"], folder=tmp_path / str(fail)) == masks
        assert len(calls) == 5 - fail
        assert all(p.is_cuda for p in model.parameters())
        for name, value in want.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value)


# ---- damage, and folders of other runs

DAMAGE = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "text": lambda data: b"<html>404</html>",
}


@pytest.mark.parametrize("name", ["start.pt", "step-3.pt", "level-0.pt", "level-1.safetensors", "level-1.pt"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_an_error_that_names_it_and_goes_when_it_is_deleted(tmp_path, name, damage):
    want, masks, _, _ = unbroken(PLANS["one shot"], tmp_path)
    path = tmp_path / name
    path.write_bytes(damage(path.read_bytes()))
    model = small_net()
    with pytest.raises(FolderError, match=f"{name}: the file is damaged.*delete it"):
        retrain(model, Real(), **PLANS["one shot"], folder=tmp_path)
    assert_same(model, small_net())
    path.unlink()
    torch.manual_seed(7)  # where the random state of the start is what was lost
    train = Real()
    assert retrain(model, train, **PLANS["one shot"], folder=tmp_path) == masks
    assert len(train.calls) == (name in ("step-3.pt", "level-0.pt", "level-1.pt"))
    assert_same(model, want)


@pytest.mark.parametrize("name", ["level-0.pt", "level-1.safetensors"])
def test_any_flipped_byte_is_found_or_harmless(tmp_path, name):
    plan = PLANS["one shot"]
    want, masks, _, _ = unbroken(plan, tmp_path)
    path = tmp_path / name
    good = path.read_bytes()
    found = 0
    for position in range(0, len(good), max(1, len(good) // 150)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 0x55]) + good[position + 1 :])
        model, train = small_net(), Real()
        try:
            assert retrain(model, train, **plan, folder=tmp_path) == masks
        except FolderError:
            found += 1
        else:
            assert_same(model, want)
            assert train.calls == []
    assert found > 50


def test_a_weight_changed_in_the_file_is_found(tmp_path):
    unbroken(PLANS["one shot"], tmp_path)
    path = tmp_path / "level-0.pt"
    stage = torch.load(path)
    stage["state"]["0.weight"][0, 0] += 1e-3
    torch.save(stage, path)
    with pytest.raises(FolderError, match=r"level-0\.pt.*checksum"):
        retrain(small_net(), Real(), **PLANS["one shot"], folder=tmp_path)


OTHERS = [
    ({"sparsity": 0.7}, r"sparsity is 0\.8 there and 0\.7 now"),
    ({"rewind": 4}, "rewind is 3 there and 4 now"),
    ({"rewind": None}, "rewind is 3 there and None now"),
    ({"levels": 2}, "levels is 1 there and 2 now"),
    ({"method": "random"}, r"method is 'Magnitude\(\)' there and 'Random\(\)' now"),
    ({"scope": "layer"}, "scope is 'global' there and 'layer' now"),
    ({"keep_per_layer": 1}, "keep_per_layer is 0 there and 1 now"),
    ({"seed": 1}, "seed is 0 there and 1 now"),
    ({"prunable": ["4.weight"]}, r"prunable\['0\.weight'\] is True there and None now"),
]


@pytest.mark.parametrize(("change", "message"), OTHERS, ids=[next(iter(change)) for change, _ in OTHERS])
def test_a_folder_of_other_settings_is_refused(tmp_path, change, message):
    unbroken(PLANS["one shot"], tmp_path)
    before = contents(tmp_path)
    model, train = small_net(), Real()
    with pytest.raises(FolderError, match=message):
        retrain(model, train, **{**PLANS["one shot"], **change}, folder=tmp_path)
    assert train.calls == []
    assert_same(model, small_net())
    assert contents(tmp_path) == before


def test_a_folder_of_another_network_is_refused(tmp_path):
    unbroken(PLANS["one shot"], tmp_path)
    wider = nn.Sequential(nn.Linear(6, 17), nn.BatchNorm1d(17), nn.ReLU(), nn.Dropout(0.2), nn.Linear(17, 4))
    with pytest.raises(FolderError, match=r"shapes\['0\.weight'\] is \[16, 6\] there and \[17, 6\] now"):
        retrain(wider, Real(), **PLANS["one shot"], folder=tmp_path)


def test_other_initial_weights_are_refused_and_the_remedy_works(tmp_path):
    want, _, _, _ = unbroken(PLANS["one shot"], tmp_path)
    model = small_net()
    model[0].reset_parameters()
    with pytest.raises(FolderError, match="began with other weights") as error:
        retrain(model, Real(), **PLANS["one shot"], folder=tmp_path)
    remedy = str(error.value).split("load them: ")[1].split(". For a new run")[0]
    exec(remedy, {"model": model, "torch": torch})
    retrain(model, Real(), **PLANS["one shot"], folder=tmp_path)
    assert_same(model, want)


def test_a_file_of_another_run_is_refused(tmp_path):
    unbroken(PLANS["one shot"], tmp_path / "a")
    unbroken(PLANS["levels"], tmp_path / "b")
    for name in ("level-0.pt", "level-1.safetensors"):
        good = (tmp_path / "a" / name).read_bytes()
        (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
        with pytest.raises(FolderError, match=f"{name}: this file is of another run"):
            retrain(small_net(), Real(), **PLANS["one shot"], folder=tmp_path / "a")
        (tmp_path / "a" / name).write_bytes(good)


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"sparsity": ', "\udcff"])
def test_damaged_settings(tmp_path, text):
    unbroken(PLANS["one shot"], tmp_path)
    (tmp_path / "settings.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(FolderError, match=r"settings\.json: the file is damaged"):
        retrain(small_net(), Real(), **PLANS["one shot"], folder=tmp_path)


def test_a_score_with_a_function_in_it_is_the_same_in_the_next_process(tmp_path):
    @dataclass(frozen=True)
    class Of(prospr.Score):
        size: Callable

        def saliency(self, problem):
            return {name: self.size(w) for name, w in problem.weights().items()}

    def make():
        return lambda w: w**2

    first, second = Of(make()), Of(make())
    assert repr(first) != repr(second)
    train = Real()
    masks = retrain(small_net(), train, 0.5, method=first, folder=tmp_path)
    assert retrain(small_net(), train, 0.5, method=second, folder=tmp_path) == masks
    assert len(train.calls) == 2
    assert " at 0x" not in json.loads((tmp_path / "settings.json").read_text())["method"]


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


def contents(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
