"""Grids, sweeps in processes that die, and the results of folders of runs."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from prospr.cli import main
from prospr.errors import FolderError, SettingError
from prospr.lab.experiment import Experiment, Pruning, Training
from prospr.lab.grid import changed, grid
from prospr.lab.results import Row, accuracy, cell, load, setups_of, verdict, write_csv
from prospr.lab.run import Options, run, run_many
from prospr.lab.runs.files import is_locked, locked
from prospr.lab.runs.folder import RunFolder
from prospr.lab.sweep import _Crew, sweep

SMALL = Experiment(method="snip", settings={"width": 4}, training=Training(epochs=4, batch_size=512))


class Diary:
    """A logger that writes down which process trained which epoch."""

    def __init__(self, experiment, folder, done):
        self.path = Path(folder) / "diary"

    def epoch(self, number, figures):
        with self.path.open("a") as file:
            file.write(f"{number} {os.getpid()}\n")

    def end(self, figures):
        pass


def diary(result):
    return [tuple(map(int, line.split())) for line in (result.folder / "diary").read_text().splitlines()]


class Deadly:
    """A logger that kills its process at the second epoch of one seed."""

    def __init__(self, experiment, folder, done):
        self.seed = experiment.seed

    def epoch(self, number, figures):
        if self.seed == 1 and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    def end(self, figures):
        pass


def holder_of(place):
    return int(place.lock.read_text().split()[1])


# Grids


def test_a_grid_is_every_combination_once():
    runs = grid(SMALL, method=["dense", "snip"], sparsity=[0.8, 0.9], seed=range(3), steps=[None], lr=[0.1, 0.2])
    assert len(runs) == (1 + 2) * 3 * 2  # a dense network has no sparsity
    assert len({one.identity for one in runs}) == len(runs)
    assert [one.training.lr for one in runs[:3]] == [0.1, 0.2, 0.1]
    assert {one.training.epochs for one in runs} == {4}
    assert grid(SMALL) == [SMALL]
    assert grid(SMALL, method="snip") == [SMALL]  # a word is not its letters


def test_grids_that_cannot_be():
    with pytest.raises(SettingError, match="no field 'sparsitys'; it has dataset, network, "):
        grid(SMALL, sparsitys=[0.9])
    with pytest.raises(SettingError, match="seed: there are no values"):
        grid(SMALL, seed=[])
    with pytest.raises(SettingError, match=r"sparsity=1\.5"):
        grid(SMALL, sparsity=[0.5, 1.5])
    assert changed(SMALL, granularity="channel", epochs=9, seed=2) == Experiment(
        method="snip", settings={"width": 4}, seed=2, pruning=Pruning(granularity="channel"),
        training=Training(epochs=9, batch_size=512),
    )  # fmt: skip


# Sweeps


def test_a_process_that_is_killed_loses_nothing_and_nothing_is_done_twice(tmp_path):
    wanted = grid(SMALL, epochs=[12], method=["snip", "dense"], seed=range(3))
    wanted.append(changed(SMALL, method="magnitude", sparsity=0.999))  # it fails
    run(wanted[4], tmp_path, "cpu")  # one is done
    killed = []

    def progress(done, total, text):
        first = RunFolder(wanted[0], tmp_path)
        if not killed and not first.done and len(first.metrics()) >= 3:
            killed.append(holder_of(first))
            os.kill(killed[0], signal.SIGKILL)

    options = Options(save_every=0, loggers=[Diary])
    results = sweep(wanted, tmp_path, "cpu", progress, processes=2, options=options)
    assert [one.experiment for one in results] == wanted
    assert [one.error is None for one in results] == [True] * 6 + [False]
    assert "CollapseError" in results[-1].error
    assert "CollapseError" in json.loads((results[-1].folder / "error.json").read_text())["error"]
    assert not (results[4].folder / "diary").exists()
    for result in results[1:4] + results[5:6]:  # untouched: every epoch once, by one process
        assert [epoch for epoch, _ in diary(result)] == list(range(1, 13))
        assert len({process for _, process in diary(result)}) == 1
    broken = diary(results[0])
    assert {epoch for epoch, _ in broken} == set(range(1, 13))
    counts = Counter(epoch for epoch, _ in broken)
    assert sum(counts.values()) <= 13  # the epoch after the last checkpoint, at most
    assert broken[0][1] == killed[0] != broken[-1][1]
    assert json.loads((results[0].folder / "result.json").read_text())["resumed_at"] >= 2
    assert len({process for result in results[:4] for _, process in diary(result)}) == 3  # two, and one in place
    alone = run(wanted[0], tmp_path / "alone", "cpu")
    assert results[0].figures == pytest.approx(alone.figures, rel=1e-5)


def test_a_run_that_kills_its_process_is_given_up_and_the_others_go_on(tmp_path):
    wanted = grid(SMALL, seed=range(3))
    options = Options(save_every=1000, loggers=[Deadly])
    results = sweep(wanted, tmp_path, "cpu", processes=2, options=options)
    assert [one.error is None for one in results] == [True, False, True]
    assert results[1].error == "2 processes died at it, the last with exit code -9"
    assert RunFolder(wanted[1], tmp_path).error()["error"] == results[1].error
    again = sweep(wanted, tmp_path, "cpu")  # in this process, and without the deadly logger
    assert [one.error for one in again] == [None] * 3
    assert RunFolder(wanted[1], tmp_path).error() is None


def test_what_somebody_else_is_at_is_left_for_last(tmp_path):
    first, second = grid(SMALL, seed=range(2))
    crew = _Crew(2, (tmp_path, "cpu", 1, Options()), None, 2)
    lock = RunFolder(first, tmp_path).lock
    assert not is_locked(lock)
    assert not lock.exists()
    lock.parent.mkdir()
    with locked(lock):
        assert is_locked(lock)
        crew._waiting = [[first], [second]]
        assert crew._next() == [second]
        assert crew._next() == [first]
    crew._waiting = [[first], [second]]
    assert crew._next() == [first]


def test_one_process_is_run_many(tmp_path):
    wanted = grid(changed(SMALL, epochs=1), method=["dense", "snip"])
    assert sweep(wanted, tmp_path, "cpu") == run_many(wanted, tmp_path, "cpu")
    with pytest.raises(SettingError, match="processes=0"):
        sweep(wanted, tmp_path, "cpu", processes=0)


QUICK = ["--settings", "width", "4", "--epochs", "1", "--batch-size", "512", "--device", "cpu"]


def test_the_command(tmp_path, capsys):
    folder = ["--folder", str(tmp_path / "runs")]
    words = ["sweep", *QUICK, *folder, "--methods", "dense", "snip", "--sparsities", "0.8", "0.9", "--seeds", "0", "1"]
    assert main([*words, "--dry-run"]) == 0
    assert "6: 0 done, 0 begun, 6 not begun" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["method"], row["sparsity"], row["n"]) for row in rows] == [
        ("dense", None, 2), ("snip", 0.8, 2), ("snip", 0.9, 2),
    ]  # fmt: skip
    assert main([*words, "--dry-run", "--json"]) == 0
    total = json.loads(capsys.readouterr().out)
    assert (total["runs"], total["done"], total["seconds"]) == (6, 6, 0.0)
    assert main(["sweep", *QUICK, *folder, "--method", "magnitude", "--sparsities", "0.999"]) == 1
    out, err = capsys.readouterr()
    assert "1 of 1 runs failed" in err
    assert "failed" in out.splitlines()[1]


# Results


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two folders: three seeds of dense, snip and random; and other settings, a failure and a copy."""
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    base = changed(SMALL, epochs=2)
    run_many(grid(base, method=["dense", "snip", "random"], sparsity=[0.5], seed=range(3)), first, "cpu")
    others = [
        changed(base, method="prospr", sparsity=0.5, steps=1),
        changed(base, method="magnitude", sparsity=0.999),
        changed(base, epochs=1, sparsity=0.5),
        changed(base, method="dense"),
    ]
    run_many(others, second, "cpu")
    return first, second


def test_rows_of_folders(folders):
    first, second = folders
    rows = load(folders)
    assert len(rows) == 9 + 3  # the dense one of the second folder is in the first
    assert len(load(first)) == 9
    assert len(load(str(second))) == 4
    setups = setups_of(rows)
    assert [name[:2] for name in setups] == [("digits", "small_convnet")] * 2
    here = next(rows for name, rows in setups.items() if "epochs=2" in name[2])
    assert {row.method for row in here} == {"dense", "snip", "random", "prospr (steps=1)", "magnitude"}
    (failed,) = cell(here, "magnitude")
    assert failed.accuracy is None
    assert "CollapseError" in failed.error
    one = Experiment(**{**vars(changed(SMALL, epochs=2, sparsity=0.5)), "seed": 1})
    result = RunFolder(one, first).result()
    (row,) = [row for row in cell(here, "snip", 0.5) if row.seed == 1]
    assert (row.accuracy, row.run, row.kept) == (result.figure, one.identity, result.sizes["kept"])
    assert row.layers == result.sizes["layers"]
    assert accuracy(cell(here, "dense")).n == 3
    with pytest.raises(FolderError, match="no such folder"):
        load([first, "nowhere"])


def test_csv_of_folders(folders, tmp_path):
    rows = load(folders)
    with write_csv(rows, tmp_path / "runs.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(rows)
    assert [line["run"] for line in lines] == [row.run for row in rows]
    assert {line["dataset"] for line in lines} == {"digits"}
    assert "density:conv1.weight" in lines[0]


def some(method, accuracies, sparsity=0.9, **more):
    return [Row(method, sparsity, seed, value, **more) for seed, value in enumerate(accuracies)]


def test_verdicts():
    rows = some("a", [0.90, 0.91, 0.92, 0.90]) + some("b", [0.85, 0.87, 0.86, 0.86]) + some("dense", [0.93] * 4, 0.0)
    better = verdict(rows, "a", "b", 0.9)
    assert better.says == "better"
    assert verdict(rows, "b", "a", 0.9).says == "worse"
    assert better.difference.mean == pytest.approx(0.0475)
    assert str(better).startswith("a is better than b at 90 %: +4.75 points (95 % interval +")
    assert verdict(rows, "a", "dense", 0.9).says == "worse"
    noisy = some("a", [0.9, 0.8, 0.95]) + some("b", [0.85, 0.86, 0.84])
    assert verdict(noisy, "a", "b", 0.9).says == "not shown"
    assert "not shown to differ" in str(verdict(noisy, "a", "b", 0.9))


def test_too_few_seeds_show_nothing():
    two = some("a", [0.9, 0.9]) + some("b", [0.1, 0.1])
    assert verdict(two, "a", "b", 0.9).says == "not shown"
    assert "2 seeds both have, and it takes 3" in str(verdict(two, "a", "b", 0.9))
    alike = some("a", [0.75] * 3) + some("b", [0.5] * 3)
    assert verdict(alike, "a", "b", 0.9).says == "not shown"  # an interval of no width is none
    unpaired = [*some("a", [0.9]), Row("b", 0.9, 7, 0.5)]
    assert math.isnan(verdict(unpaired, "a", "b", 0.9).difference.mean)


def test_verdicts_that_cannot_be():
    rows = some("a", [0.9]) + some("b", [0.8])
    with pytest.raises(SettingError, match=r"no run of 'c' at 0\.9; the methods are a, b"):
        verdict(rows, "a", "c", 0.9)
    with pytest.raises(SettingError, match="several data sets"):
        verdict(rows + some("a", [0.5], dataset="mnist"), "a", "b", 0.9)


def test_the_results_command(folders, tmp_path, capsys):
    path = tmp_path / "runs.csv"
    words = ["results", *map(str, folders), "--baseline", "random", "--csv", str(path)]
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(path.read_text().splitlines()) == 13
    (snip,) = [row for row in rows if row["method"] == "snip" and row["n"] == 3]
    here = next(rows for name, rows in setups_of(load(folders)).items() if "epochs=2" in name[2])
    seen, told = accuracy(cell(here, "snip", 0.5)), verdict(here, "snip", "random", 0.5)
    assert (snip["mean"], snip["sd"]) == (seen.mean, seen.sd)
    assert (snip["verdict"], snip["difference"], snip["low"]) == (told.says, told.difference.mean, told.difference.low)
    (failed,) = [row for row in rows if row["method"] == "magnitude"]
    assert (failed["mean"], failed["n"], failed["failed"], failed["verdict"]) == (None, 0, 1, None)
    assert main(words) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if " snip " in line and "epochs=2" in line]
    assert [f"{100 * seen.mean:.2f}", f"{100 * seen.sd:.2f}", "3"] == line.split(" accuracy ")[1].split()[:3]
    assert f"{told.says}: {100 * told.difference.mean:+.2f} ({100 * told.difference.low:+.2f} to " in out
    assert main(["results", *map(str, folders), "--baseline", "synflow"]) == 1
    assert "there is no such method in these runs; they have snip, dense, magnitude, " in capsys.readouterr().err
    assert main(["results", str(tmp_path)]) == 0
    assert "there are no finished runs" in capsys.readouterr().out


def test_the_results_command_imports_no_torch(folders):
    code = f"""
import sys
from prospr.cli import main
assert main(["results", {str(folders[0])!r}]) == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "small_convnet" in done.stdout
