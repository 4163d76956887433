import subprocess
import sys
from pathlib import Path

import pytest

from prospr.lab import demo, progress
from prospr.lab.progress import plain_lines, progress_bar

HELP_WITHOUT_TORCH = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("demo", sys.argv[1])
demo = importlib.util.module_from_spec(spec)
spec.loader.exec_module(demo)
try:
    demo.main(["--help"])
except SystemExit as end:
    assert end.code == 0
assert "torch" not in sys.modules, "torch was imported"
"""


def test_help_does_not_import_torch():
    """The demo's own file; what `import prospr` imports is not its doing."""
    done = subprocess.run(
        [sys.executable, "-c", HELP_WITHOUT_TORCH, demo.__file__], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--seeds" in done.stdout


def test_the_demo_writes_its_page_and_table_and_prints_the_comparison(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "METHODS", ("snip", "random"))
    monkeypatch.setattr(demo, "SPARSITIES", (0.9,))
    words = ["--quick", "--seeds", "1", "--out", str(tmp_path / "demo")]
    assert demo.main(words) == 0
    page = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    table = (tmp_path / "demo" / "results.csv").read_text(encoding="utf-8").splitlines()
    assert len(table) == 1 + 3 + 2  # a heading; dense and two methods; two sanity checks of the first
    assert "python -m prospr.lab.demo --out" in page
    assert "small_convnet on digits, 2 epochs" in page
    assert "5 runs: 5 done." in page
    printed = capsys.readouterr().out
    assert "[5/5] small_convnet, digits, snip 90 % redrawn, seed 0: " in printed
    assert "Sanity checks" in page
    assert "The scores behind the masks" in page
    assert str(tmp_path / "demo" / "report.html") in printed
    lines = [line.split(",") for line in table]
    accuracy = 100 * float(next(line for line in lines if line[:2] == ["snip", ""])[4])
    assert f"{accuracy:.1f}" in page
    assert f"{accuracy:.1f}" in printed
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "demo" / "runs").glob("*/result.json")}
    assert len(before) == 5
    assert demo.main(words) == 0  # all of it is done
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert (tmp_path / "demo" / "results.csv").read_text(encoding="utf-8").splitlines() == table


@pytest.mark.parametrize("seeds", ["0", "-1"])
def test_too_few_seeds_are_refused(seeds, capsys):
    with pytest.raises(SystemExit):
        demo.main(["--seeds", seeds])
    assert "too few; give at least 1" in capsys.readouterr().err


def test_the_command_makes_the_same_demo_again():
    options = demo.parser().parse_args(["--out", "my demo", "--seeds", "5", "--quick"])
    assert demo.command(options) == "python -m prospr.lab.demo --out 'my demo' --seeds 5 --quick"
    again = demo.parser().parse_args(["--out", "my demo", "--seeds", "5", "--quick"])
    assert again == options
    assert options.out == Path("my demo")


def test_plain_lines_tell_whole_steps_once(capsys):
    report = plain_lines()
    for done, text in [(0.5, "half"), (1, "one"), (1.0, "scoring"), (1.5, "more"), (2, "two")]:
        report(done, 2, text)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" (")[0] for line in lines] == ["[1/2] one", "[2/2] two"]


def test_a_terminal_without_rich_gets_plain_lines(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    with progress_bar("training") as report:
        report(1, 1, "one")
    assert capsys.readouterr().out.startswith("[1/1] one")
