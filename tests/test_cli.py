import json
import os
import subprocess
import sys
import time

import pytest

import prospr
from prospr.cli import main
from prospr.lab import commands
from prospr.lab.experiment import Data, Experiment, Pruning, Training
from prospr.lab.run import Options, run
from prospr.lab.runs.making import Parts

pytest.importorskip("tyro")

COMMANDS = ("run", "prune", "show", "report", "paper", "sweep", "results", "methods", "networks", "datasets", "recipes")
QUICK = ["--method", "snip", "--epochs", "2", "--batch-size", "512", "--settings", "width", "4", "--device", "cpu"]


def quick_run(folder, *more):
    return ["run", *QUICK, "--folder", str(folder), *more]


def parse(line):
    return commands.parse(line.split())


def shell(*words, **settings):
    return subprocess.run(
        [sys.executable, "-m", "prospr", *words], capture_output=True, text=True, timeout=120, **settings
    )


def test_help_of_every_command_without_torch():
    code = f"""
import sys
from prospr.cli import main
for words in [["--help"], *([name, "--help"] for name in {COMMANDS!r}), ["--version"]]:
    assert main(words) == 0, words
    assert "torch" not in sys.modules, words
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for text in (*COMMANDS, "--sparsity", "--inner-lr", "--dry-run", f"prospr {prospr.__version__}"):
        assert text in done.stdout


def test_help_comes_at_once():
    """On a machine that does nothing else in 0.3 s; here, whatever else runs, long before torch is imported."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    torch_took = time.perf_counter() - start
    start = time.perf_counter()
    assert shell("run", "--help").returncode == 0
    assert time.perf_counter() - start < 0.7 * torch_took


def test_show_imports_no_torch(tmp_path):
    assert main(quick_run(tmp_path)) == 0
    code = f"""
import sys
from prospr.cli import main
assert main(["show", "--folder", {str(tmp_path)!r}]) == 0
assert main(["show", {os.listdir(tmp_path)[0][:5]!r}, "--folder", {str(tmp_path)!r}]) == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "conv1.weight" in done.stdout


def test_options_are_those_of_the_api():
    assert parse("run").experiment.make() == Experiment()
    asked = parse(
        "run --dataset cifar10 --network resnet20 --settings width 8 shortcut B --method force --sparsity 0.95 "
        "--seed 3 --recipe prospr-cifar --validation 0.1 --pad 2 --flip False --scope layer --granularity weight "
        "--rounds 5 --score-batch-size 64 --epochs 20 --lr 0.05 --drops 3 7 --nesterov True --precision bf16 "
        "--evaluate-every 5"
    )
    assert asked.experiment.make() == Experiment(
        dataset="cifar10", network="resnet20", settings={"width": 8, "shortcut": "B"}, method="force", sparsity=0.95,
        seed=3, recipe="prospr-cifar", data=Data(validation=0.1, pad=2, flip=False),
        pruning=Pruning(scope="layer", granularity="weight", rounds=5, score_batch_size=64),
        training=Training(
            epochs=20, lr=0.05, drops=(3, 7), nesterov=True, precision="bf16", evaluate_every=5
        ),
    )  # fmt: skip
    channels = parse("run --granularity channel --budget flops --round-to 8 --per-flop --shrink")
    assert channels.experiment.pruning == Pruning(
        granularity="channel", budget="flops", round_to=8, per_flop=True, shrink=True
    )
    prospr_settings = parse("run --steps 1 --inner-lr auto --inner-momentum 0.9 --order first")
    assert prospr_settings.experiment.pruning == Pruning(steps=1, inner_lr="auto", inner_momentum=0.9, order="first")


def test_a_run_and_the_same_run_again(tmp_path, capsys):
    assert main(quick_run(tmp_path)) == 0
    first = capsys.readouterr().out
    assert "[2/2] epoch 2: loss" in first
    assert "small_convnet, digits, snip 90 %, seed 0" in first
    one = Experiment(method="snip", settings={"width": 4}, training=Training(epochs=2, batch_size=512))
    result = run(one, tmp_path)  # the very run of the API: it is done
    assert f"accuracy {100 * result.figure:.2f} %" in first
    assert f"{result.sizes['kept']:,} of {result.sizes['total']:,} weights" in first
    assert main(quick_run(tmp_path)) == 0
    second = capsys.readouterr().out
    assert "[2/2]" not in second
    assert first.endswith(second)


def test_json(tmp_path, capsys):
    assert main(quick_run(tmp_path, "--json")) == 0
    out, err = capsys.readouterr()
    content = json.loads(out)  # nothing else is on stdout
    assert "[2/2]" in err
    assert content["done"]
    assert len(content["epochs"]) == 2
    assert content["result"]["headline"] == "accuracy"
    assert main(["show", "--folder", str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["state"] == "done"


def test_a_dry_run_runs_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Parts, "score", lambda *_: pytest.fail("scored"))
    assert main(quick_run(tmp_path / "runs", "--dry-run")) == 0
    said = capsys.readouterr().out
    assert "2 epochs of 3 steps: 6 steps" in said
    assert "not begun" in said
    assert "a few steps were tried" in said
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_of_what_is_done_or_begun(tmp_path, capsys):
    one = Experiment(method="snip", settings={"width": 4}, training=Training(epochs=2, batch_size=512))

    def stop(done, total, text):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(one, tmp_path, "cpu", stop, options=Options(save_every=0))
    assert main(quick_run(tmp_path, "--dry-run")) == 0
    assert "begun: it would go on" in capsys.readouterr().out
    assert main(["show", one.identity[:6], "--folder", str(tmp_path)]) == 0
    assert "not finished: 2 of 2 epochs" in capsys.readouterr().out
    run(one, tmp_path, "cpu")
    assert main(quick_run(tmp_path, "--dry-run", "--json")) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["done"]
    assert content["identity"] == one.identity
    assert content["steps"] == 6
    assert content["basis"] == "as runs before took"
    assert content["seconds"] > 0


def test_a_dry_run_without_the_data_downloads_nothing(tmp_path, capsys):
    assert main(["run", "--dataset", "cifar10", "--dry-run", "--root", str(tmp_path / "data"), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "200 epochs of 196 steps: 39,200 steps" in said
    assert "cifar10 is not here" in said
    assert not (tmp_path / "data").exists()


def test_prune_writes_the_masks_of_the_run(tmp_path, capsys):
    out = tmp_path / "masks.safetensors"
    assert main(["prune", *QUICK, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    masks = prospr.Masks.load(out)
    assert str(masks) in said
    assert main(quick_run(tmp_path / "runs")) == 0
    (home,) = (tmp_path / "runs").iterdir()
    assert prospr.Masks.load(home / "masks.safetensors") == masks


@pytest.mark.parametrize("command", ["methods", "networks", "datasets", "recipes"])
def test_lists(command, capsys):
    assert main([command]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main([command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(lines) == len(rows) + 1
    for row, line in zip(rows, lines[1:], strict=True):
        assert line.startswith(next(iter(row.values())))
    expected = {"methods": "prospr", "networks": "resnet20", "datasets": "cifar10", "recipes": "prospr-cifar"}
    assert expected[command] in {next(iter(row.values())) for row in rows}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--method", "snap"], "unknown method 'snap'; known names: dense, prospr"),
        (["run", "--sparsity", "2"], "sparsity=2.0: give a share"),
        (["run", "--dataset", "cifar"], "unknown data set 'cifar'"),
        (["run", "--network", "resnet21"], "unknown network 'resnet21'"),
        (["run", "--device", "tpuu"], "device='tpuu' is not known"),
        (["run", "--epochs", "2", "--drops", "5"], "lie outside the training"),
        (["prune", "--method", "dense"], "keeps everything"),
        (["prune", "--method", "magnitude", "--sparsity", "0.9999", "--device", "cpu"], "no path is left"),
        (["show", "zz"], "there is no run 'zz'"),
    ],
)
def test_errors_are_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("prospr: ")
    assert message in err
    assert err.count("\n") == 1
    assert main([*words, "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_error_nobody_expected_names_its_kind(monkeypatch, capsys):
    def fail(self):
        raise KeyError("layers")

    monkeypatch.setattr(commands.Methods, "__call__", fail)
    assert main(["methods"]) == 1
    assert capsys.readouterr().err == "prospr: KeyError: 'layers' (--debug shows where)\n"


def test_warnings_are_one_line(tmp_path):
    def stop(done, total, text):
        if done == 2:
            raise KeyboardInterrupt

    one = Experiment(method="snip", settings={"width": 4}, training=Training(epochs=2, batch_size=512))
    with pytest.raises(KeyboardInterrupt):
        run(one, tmp_path, "cpu", stop, options=Options(save_every=0))
    (tmp_path / one.identity / "checkpoint.safetensors").write_bytes(b"half")
    done = shell(*quick_run(tmp_path))
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"prospr: warning: {tmp_path / one.identity}: damaged: checkpoint.safetensors")
    assert f"note: checkpoint.safetensors: {line.split('safetensors: ')[1]}" in done.stdout


@pytest.mark.parametrize("words", [["run", "--bogus", "3"], ["run", "--epochs", "many"], ["walk"], []])
def test_a_command_line_that_is_not_understood(words, capsys):
    assert main(words) == 2


def test_interrupted(monkeypatch, capsys):
    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands.Run, "__call__", interrupt)
    assert main(["run"]) == 130
    assert "interrupted. The same command goes on from the last checkpoint" in capsys.readouterr().err


def test_a_failed_run_is_shown(tmp_path, capsys, monkeypatch):
    def fail(self, *_):
        raise prospr.PruningError("no scores today")

    monkeypatch.setattr(Parts, "score", fail)
    assert main(quick_run(tmp_path)) == 1
    assert capsys.readouterr().err == "prospr: no scores today\n"
    (name,) = os.listdir(tmp_path)
    assert main(["show", name, "--folder", str(tmp_path)]) == 0
    assert "PruningError: no scores today" in capsys.readouterr().out
    assert main(["show", "--folder", str(tmp_path)]) == 0
    assert "failed, 0 epochs" in capsys.readouterr().out
    assert main(["show", "--folder", str(tmp_path / "none")]) == 0
    assert "there are no runs" in capsys.readouterr().out


def test_loggers_that_are_not_installed(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(quick_run(tmp_path, "--wandb")) == 1
    assert "wandb was asked for and is not installed" in capsys.readouterr().err
    assert not os.listdir(tmp_path)


def test_without_the_lab_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.delitem(sys.modules, "prospr.lab.commands")
    assert main(["methods"]) == 1
    assert "pip install 'prospect-pruning[lab]'" in capsys.readouterr().err


def test_the_module_is_the_command(tmp_path):
    done = shell("--version")
    assert (done.returncode, done.stdout) == (0, f"prospr {prospr.__version__}\n")
    failed = shell("run", "--method", "snap", cwd=tmp_path)
    assert failed.returncode == 1
    assert "Traceback" not in failed.stderr


def test_a_reader_that_goes_away(tmp_path):
    done = subprocess.run(
        f"{sys.executable} -m prospr recipes | true", shell=True, capture_output=True, text=True, timeout=60
    )
    assert "Traceback" not in done.stderr


def test_help_that_nobody_reads_to_its_end():
    """`prospr sweep --help | head -1`: no traceback."""
    line = f"{sys.executable} -m prospr sweep --help | head -1"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("usage: prospr sweep")
    assert done.stderr == ""


def test_dry_run_says_what_scoring_is_of(tmp_path, capsys):
    assert main(quick_run(tmp_path, "--dry-run", "--method", "prospr", "--rounds", "2")) == 0
    assert "610, before its rounds were changed" in capsys.readouterr().out
    assert main(quick_run(tmp_path, "--dry-run", "--method", "prospr", "--granularity", "channel")) == 0
    shown = capsys.readouterr().out
    assert "4 a meta-step, 20 for the learning rate" in shown
    assert "scoring comes to it" in shown


def test_masks_into_a_folder_are_refused_before_the_scoring(tmp_path, capsys):
    assert main(["prune", "--method", "snip", "--out", str(tmp_path)]) != 0
    assert "this is a folder; name a file" in capsys.readouterr().err
