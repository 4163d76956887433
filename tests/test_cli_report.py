import subprocess
import sys

import pytest
from fake_runs import fake_run, grid

from prospr.cli import main
from prospr.lab.experiment import Experiment, Training

pytest.importorskip("tyro")

SHORT = Training(epochs=2)


@pytest.fixture
def runs(tmp_path):
    for one in grid(("snip", "random"), (0.9,), (0, 1), training=SHORT):
        fake_run(one, tmp_path / "runs")
    return tmp_path / "runs"


def test_help_without_torch():
    code = """
import sys
from prospr.cli import main
assert main(["report", "--help"]) == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for text in ("RUNS", "-o", "--out", "--baseline", "--title"):
        assert text in done.stdout


def test_the_page_is_written_where_it_was_asked_for(runs, tmp_path, capsys):
    out = tmp_path / "new" / "page.html"
    assert main(["report", str(runs), "-o", str(out), "--baseline", "snip", "--title", "Two <ways>"]) == 0
    assert capsys.readouterr().out == f"written to {out}\n"
    page = out.read_text(encoding="utf-8")
    assert "<title>Two &lt;ways&gt;</title>" in page
    assert "minus snip" in page
    assert f"prospr report {runs} --out {out} --baseline snip --title" in page
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]


def test_the_defaults_are_those_of_prospr_run(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "6 runs: 6 done" in page
    assert "prospr run --dataset cifar10" in page
    assert "--folder" not in page


def test_several_folders(runs, tmp_path):
    more = fake_run(Experiment(dataset="cifar10", method="grasp", training=SHORT), tmp_path / "more")
    out = tmp_path / "page.html"
    assert main(["report", str(runs), str(more.path), "--out", str(out)]) == 0
    assert "7 runs: 7 done" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: there is no run in it; give a folder that `prospr run` wrote to"),
        (["runs", "--baseline", "snap"], "baseline 'snap' is not among the methods; choose from random, snip"),
    ],
)
def test_errors_are_one_line_and_leave_no_page(words, message, runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", *words]) == 1
    assert capsys.readouterr().err == f"prospr: {message}\n"
    assert not (tmp_path / "report.html").exists()
