"""One training by several processes is that of one process, on any number of them in turn."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from ranks import trainings
from ranks.trainings import CHANNELS, EXPERIMENT, small
from safetensors.torch import load_file

from prospr import Masks
from prospr.cli import main
from prospr.lab.run import run
from prospr.lab.runs.files import is_locked
from prospr.lab.runs.folder import find_run

pytest.importorskip("tyro")


def assert_near(found, want, within):
    assert list(found) == list(want)
    for name, value in want.items():
        if name.startswith(("model.", "momentum.", "sums")):
            size = max(1e-3, value.abs().max().item())
            assert (found[name] - value).abs().max() <= within * size, name


@pytest.mark.parametrize("size", [2, 4])
def test_a_training_is_that_of_one_process(pool, size):
    """In float64: batch norm, augmentation, masks, Nesterov, unequal parts and, of four ranks, two with none."""
    alone = trainings.trainer()
    (want,) = alone.train(trainings.data()[1])
    results = pool("trains", "trainer", size=size)
    for state, test in results:
        assert_near(state, alone.states()[0], 1e-9)
        assert torch.equal(state["history"][:, 1], alone.states()[0]["history"][:, 1])  # training accuracy
        assert test == pytest.approx(want.test, rel=1e-9)
        for name, value in results[0][0].items():  # all ranks end with the same bits
            assert name in ("spent", "history") or torch.equal(state[name], value), name
    assert alone.run.masks is not None
    for name, mask in alone.run.masks.items():
        assert bool((results[0][0][f"model.{name}"][~mask] == 0).all())


def test_statistics_of_each_rank(pool):
    """Another training, but one for all ranks, tested with the first rank's statistics."""
    alone = trainings.trainer()
    alone.train(trainings.data()[1])
    (first, test), (second, other) = pool("trains", "trainer", "own", size=2)
    assert test == other
    for name, value in first.items():
        assert name in ("spent", "history") or torch.equal(value, second[name]), name
    with pytest.raises(AssertionError):
        assert_near(first, alone.states()[0], 1e-3)


@pytest.mark.parametrize("size", [2, 4])
def test_pixels_that_count_weigh_the_parts(pool, size):
    alone = trainings.maps()
    alone.train()
    for state, _ in pool("trains", "maps", size=size):
        assert_near(state, alone.states()[0], 1e-9)


def test_a_loss_that_is_no_mean(pool):
    assert all("is no mean over samples" in message for _, message in pool.raised("trains", "maps", "dice", size=2))


def test_dropout_is_each_ranks_own(pool):
    (one, _), (two, _) = pool("trains", "trainer", "all", 0.5, size=2)
    assert all(torch.equal(value, two[name]) for name, value in one.items() if name.startswith("model."))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Runs of one process, by experiment."""
    folder = tmp_path_factory.mktemp("unbroken")
    return {one.identity: small(one, folder=folder) for one in (EXPERIMENT, CHANNELS)}


@pytest.mark.parametrize("experiment", [EXPERIMENT, CHANNELS], ids=["weights", "shrunk"])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 4)])
def test_a_run_goes_on_with_another_number_of_ranks(pool, tmp_path, unbroken, experiment, sizes):
    """In float64: weights to 1e-9 of each tensor's largest, masks and plan the same."""
    first, then = sizes
    want = unbroken[experiment.identity]
    if first == 1:
        with pytest.raises(trainings.Interrupted):
            small(experiment, 2, tmp_path)
    else:
        errors = pool.raised("runs", experiment, tmp_path, 2, size=first)
        assert errors[0][0] == "Interrupted"
        assert all(kind == "RankError" and "rank 0 failed: Interrupted" in text for kind, text in errors[1:])
    home = tmp_path / experiment.identity
    assert "Interrupted" in json.loads((home / "error.json").read_text())["error"]
    assert not is_locked(home / "lock")
    if then == 1:
        small(experiment, folder=tmp_path)
    else:
        results = pool("runs", experiment, tmp_path, size=then)
        assert all(result == results[0] for result in results)
    told = json.loads((home / "result.json").read_text())
    assert told["resumed_at"] == 1
    assert told["environment"].get("ranks") == (None if then == 1 else then)
    assert sorted(path.name for path in home.iterdir()) == sorted(path.name for path in want.folder.iterdir())
    assert_near(load_file(home / "checkpoint.safetensors"), load_file(want.folder / "checkpoint.safetensors"), 1e-9)
    assert Masks.load(home / "masks.safetensors") == Masks.load(want.folder / "masks.safetensors")
    if experiment is CHANNELS:
        assert (home / "plan.json").read_bytes() == (want.folder / "plan.json").read_bytes()
    rows = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in want.epochs], rel=1e-9)
    assert told["figures"] == pytest.approx(want.figures, rel=1e-9)


def test_what_cannot_go_together(pool, tmp_path):
    for options, says in [({"engine": "graph"}, "engine='graph' cannot go together"), ({"compile": True}, "compile")]:
        for kind, message in pool.raised("run_with", tmp_path, options, size=2):
            assert kind == "SettingError"
            assert message.startswith(says)
    assert not list(tmp_path.iterdir())


def command(folder, epochs="40"):
    words = ["run", "--settings", "width", "4", "--device", "cpu", "--method", "snip", "--epochs", epochs]
    return [sys.executable, "-m", "prospr", *words, "--save-every", "0", "--folder", str(folder)]


@pytest.mark.slow
def test_a_rank_is_killed_and_the_next_start_goes_on(tmp_path):
    """Two processes as torchrun starts them, but with nobody who watches them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(
            command(tmp_path, "2000"),
            env={**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        until = time.monotonic() + 90
        while not list(tmp_path.glob("*/checkpoint.previous.safetensors")):
            assert time.monotonic() < until
            assert started[0].poll() is None
            time.sleep(0.1)
        os.kill(started[1].pid, signal.SIGKILL)
        began = time.monotonic()
        _, said = started[0].communicate(timeout=60)
    finally:
        for process in started:
            process.kill()
    assert time.monotonic() - began < 60
    assert started[0].returncode == 1
    assert "prospr: rank 1 is gone: the connection broke" in said
    (home,) = tmp_path.iterdir()
    assert "rank 1 is gone" in json.loads((home / "error.json").read_text())["error"]
    stopped_at = len((home / "metrics.jsonl").read_text().splitlines())
    told = []

    def progress(done, total, text):
        told.append((total, text))
        raise trainings.Interrupted

    with pytest.raises(trainings.Interrupted):
        run(find_run(str(home)).experiment, tmp_path, "cpu", progress)
    ((left, text),) = told
    goes_on = 2000 - left + 1
    assert text.startswith(f"epoch {goes_on}:")
    assert 2 <= goes_on <= stopped_at + 1


@pytest.mark.slow
def test_the_command_under_torchrun(tmp_path):
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run([*start, *command(tmp_path, "2")[1:]], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[2/2] epoch 2") == 1
    assert done.stdout.count("test        loss") == 1
    assert json.loads(next(tmp_path.glob("*/result.json")).read_text())["environment"]["ranks"] == 2


def test_a_sweep_shares_out_its_work_itself(tmp_path, monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["sweep", "--folder", str(tmp_path)]) == 1
    assert "torchrun started 2 processes for one run, and this command starts its own" in capsys.readouterr().err
