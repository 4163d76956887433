"""The benchmarks run: on narrow networks or few steps, in this process, for what they write and not for their times."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from prospr.lab.runs.making import check

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
HERE = ("channels", "fair", "stepping", "torch_pruning_rival", "harness", "scale")


def imported(name, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    for other in HERE:
        monkeypatch.delitem(sys.modules, other, raising=False)
    yield importlib.import_module(name)
    for other in HERE:
        sys.modules.pop(other, None)


@pytest.fixture
def channels(monkeypatch):
    yield from imported("channels", monkeypatch)


@pytest.fixture
def scale(monkeypatch):
    yield from imported("scale", monkeypatch)


@pytest.fixture
def fair(monkeypatch):
    yield from imported("fair", monkeypatch)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it is the whole table by default")
def test_runs_that_have_a_line_are_not_run_again(fair, tmp_path, capsys):
    out = tmp_path / "fair.jsonl"
    options = ["--folder", str(tmp_path / "runs"), "--out", str(out), "--epochs", "1", "--sparsities", "0.5"]
    fair.main([*options, "--arms", "snip", "random, balanced"])
    first = out.read_text()
    lines = [json.loads(line) for line in first.splitlines()]
    assert sorted(line["arm"] for line in lines) == ["random, balanced", "snip"]
    assert all(0 < line["accuracy"] < 1 and line["layers"] for line in lines)
    fair.main([*options, "--arms", "snip", "dense", "--folder", str(tmp_path / "elsewhere")])
    assert out.read_text().startswith(first)
    assert [json.loads(line)["arm"] for line in out.read_text().splitlines()[2:]] == ["dense"]
    fair.main([*options, "--minutes", "0", "--group-minutes", "1", "--arms", "erk"])  # it would take too long
    assert len(out.read_text().splitlines()) == 3
    capsys.readouterr()
    fair.main([*options, "--show"])
    shown = capsys.readouterr().out
    assert "minus snip" in shown
    assert f"{100 * next(one['accuracy'] for one in lines if one['arm'] == 'snip'):.2f}" in shown


def test_every_arm_is_an_experiment(fair):
    wanted = fair.wanted(fair._arguments(["--arms", *fair.ARMS]))
    assert len({one.identity for _, one in wanted}) == len(fair.ARMS)
    for _, one in wanted:
        check(one)


def test_every_variant_is_measured_and_written(channels, tmp_path, capsys):
    out = tmp_path / "rows.json"
    options = ["--quick", "--no-memory", "--networks", "resnet18", "--sparsities", "0.9", "--repeats", "1"]
    channels.main([*options, "--batch", "2", "--block", "1", "--torch-pruning", "--out", str(out)])
    result = json.loads(out.read_text())
    rows = {(row["variant"], row["round_to"]): row for row in result["rows"]}
    assert list(rows)[:4] == [("dense", 1), ("masked", 1), ("shrunk", 1), ("shrunk", 8)]
    dense, masked, shrunk = rows["dense", 1], rows["masked", 1], rows["shrunk", 1]
    assert masked["parameters"] == dense["parameters"]
    assert masked["flops"] == dense["flops"]
    assert 0.09 * dense["parameters"] < shrunk["parameters"] <= 0.1 * dense["parameters"]
    assert shrunk["flops"] < 0.6 * dense["flops"]
    assert all(row["n"] == 1 and row["train_ms"] > 0 and row["infer_ms"] > 0 for row in rows.values())
    assert dense["train_ratio"] == 1
    assert shrunk["train_ratio"] == pytest.approx(dense["train_ms"] / shrunk["train_ms"], rel=1e-3)
    assert result["pruning"]["resnet18"]["masked and shrunk apart"] < 1e-5
    shown = capsys.readouterr().out
    assert "1.53" in shown  # the paper's ratio at 90 %
    if importlib.util.find_spec("torch_pruning") is None:
        assert "torch-pruning: not installed" in shown
    else:
        assert rows["torch-pruning", 1]["flops"] == pytest.approx(shrunk["flops"], rel=0.1)


def test_a_spent_budget_stops_with_what_there_is(channels, tmp_path, capsys):
    out = tmp_path / "rows.json"
    channels.main(["--quick", "--no-memory", "--budget", "0", "--out", str(out)])
    result = json.loads(out.read_text())
    assert result["rows"] == []
    assert "budget 0 seconds" in result["stopped"]
    assert "stopped after" in capsys.readouterr().out


def test_what_needs_a_gpu_is_refused_without(channels, capsys):
    with pytest.raises(SystemExit):
        channels.main(["--modes", "captured"])
    assert "CUDA graphs" in capsys.readouterr().err


def test_depth_and_selection_are_measured(scale):
    before = torch.get_num_threads()
    try:
        for store in ("device", "recompute", "first"):
            done = scale.measure(scale.Cell("depth", "resnet20", 2, store, 2))
            assert not done.error
            assert done.steps_time == pytest.approx(1000 * done.seconds / done.step_ms)
            assert done.weights_gib == pytest.approx(4 * 269_722 / 2**30)
        done = scale.measure(scale.Cell("select", count=1000))
        assert done.seconds > 0
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_scale_of_two_ranks_is_written(scale, tmp_path, capsys):
    out = tmp_path / "rows.json"
    scale.main(["--parts", "ranks", "--ranks", "2", "--batch", "4", "--out", str(out)])
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["ranks"], row["batch"], row["error"]) == (2, 4, "")
    assert row["seconds"] > 0
    assert "over all ranks" in capsys.readouterr().out
