"""Grids, sweeps and their command, and the results of folders of runs. Executors are tested in executors/."""

import csv
import json
import math
import subprocess
import sys

import pytest

from prospr.cli import main
from prospr.errors import FolderError, SettingError
from prospr.lab.commands import parse
from prospr.lab.executors import Processes, Ray, Slurm
from prospr.lab.experiment import Experiment, Pruning, Training
from prospr.lab.grid import changed, grid
from prospr.lab.results import Row, accuracy, cell, load, setups_of, verdict, write_csv
from prospr.lab.run import run_many
from prospr.lab.runs.files import is_locked, locked
from prospr.lab.runs.folder import RunFolder
from prospr.lab.sweep import sweep

SMALL = Experiment(method="snip", settings={"width": 4}, training=Training(epochs=4, batch_size=512))


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


def test_one_process_is_run_many(tmp_path):
    wanted = grid(changed(SMALL, epochs=1), method=["dense", "snip"])
    assert sweep(wanted, tmp_path, "cpu") == run_many(wanted, tmp_path, "cpu")
    with pytest.raises(SettingError, match="processes=0"):
        sweep(wanted, tmp_path, "cpu", processes=0)
    with pytest.raises(SettingError, match="processes=2: an executor is given"):
        sweep(wanted, tmp_path, "cpu", processes=2, executor=Ray())


def test_what_another_process_is_at_can_be_left(tmp_path):
    first, second = grid(changed(SMALL, epochs=1), method=["dense", "snip"])
    lock = RunFolder(first, tmp_path).lock
    lock.parent.mkdir()
    with locked(lock):
        busy, done = run_many([first, second], tmp_path, "cpu", wait=False)
        holder = lock.read_text()
        assert is_locked(lock)
    assert busy.error.startswith("BusyError: ")
    assert RunFolder(first, tmp_path).error() is None  # it is not a failure of the run
    assert done.error is None
    assert not is_locked(lock)
    assert lock.read_text() == holder  # to look is not to hold


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


def test_options_that_are_not_for_the_executor(tmp_path, capsys):
    words = ["sweep", "--folder", str(tmp_path)]
    assert main([*words, "--partition", "gpu"]) == 1
    assert "--partition is not for --executor processes, which takes processes" in capsys.readouterr().err
    assert main([*words, "--executor", "ray", "--runs-per-job", "2"]) == 1
    assert "--runs-per-job is not for --executor ray, which takes address, cpus, gpus" in capsys.readouterr().err
    command = parse([*words, "--executor", "slurm", "--gpus", "1", "--minutes", "30", "--sbatch", "account=a", "x"])
    assert command.workplace.make() == Slurm(gpus=1, minutes=30, sbatch=("account=a", "x"))
    command = parse(["paper", "structured", "--executor", "ray", "--gpus", "0.25", "--address", "auto"])
    assert command.workplace.make() == Ray("auto", gpus=0.25)
    assert parse([*words, "--processes", "3"]).workplace.make() == Processes(3)


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
