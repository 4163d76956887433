"""Runs that are killed and called again, damaged files, and folders of other runs."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from trainings import Real, assert_same, small_net

import prospr
from prospr.errors import FolderError
from prospr.retraining import retrain

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


def contents(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
