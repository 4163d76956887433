"""Results out: Parquet that others read, and tables for pages and papers."""

import re
import subprocess
import sys

import pytest
from fake_runs import fake_run, grid

from prospr.cli import main
from prospr.errors import PackageError
from prospr.lab.experiment import Training
from prospr.lab.optional import optional
from prospr.lab.results import Row, accuracy, cell, load, write_parquet
from prospr.lab.tables import escape_latex, escape_markdown, latex, markdown

SHORT = Training(epochs=4)


def some(method, accuracies, sparsity=0.9, **more):
    return [Row(method, sparsity, seed, value, **more) for seed, value in enumerate(accuracies)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three methods and the dense network, three seeds; one failed."""
    folder = tmp_path_factory.mktemp("tables") / "runs"
    for one in grid(("prospr", "random", "snip"), (0.9, 0.98), training=SHORT):
        failed = (one.method, one.sparsity, one.seed) == ("snip", 0.98, 2)
        fake_run(one, folder, "failed" if failed else "done")
    return folder


# Parquet


def test_pandas_reads_what_was_run(folder, tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    rows = load(folder)
    table = pandas.read_parquet(write_parquet(rows, tmp_path / "runs.parquet"))
    assert len(table) == len(rows) == 21
    assert table["accuracy"].dtype == "float64"
    assert table["seed"].dtype == "int64"
    means = table.groupby(["method", "sparsity"])["accuracy"].mean()
    for method, share in [("prospr", 0.98), ("snip", 0.98), ("random", 0.9)]:
        assert means[method, share] == pytest.approx(accuracy(cell(rows, method, share)).mean, rel=1e-12)
    for kept, row in zip(table["layers"], rows, strict=True):
        assert dict(kept) == row.layers
    assert list(table["error"].notna()) == [row.error is not None for row in rows]


def test_duckdb_reads_what_was_run(folder, tmp_path):
    duckdb = pytest.importorskip("duckdb")
    pytest.importorskip("pyarrow")
    rows = load(folder)
    path = write_parquet(rows, tmp_path / "runs.parquet")
    base = f"from '{path}' where error is null"
    found = duckdb.sql(f"select method, avg(accuracy), count(*) {base} and sparsity = 0.98 group by method").fetchall()
    assert {name: n for name, _, n in found} == {"prospr": 3, "random": 3, "snip": 2}
    for name, mean, _ in found:
        assert mean == pytest.approx(accuracy(cell(rows, name, 0.98)).mean, rel=1e-12)
    (first,) = cell(rows, "snip", 0.9)[:1]
    ((density,),) = duckdb.sql(f"select layers['fc.weight'] {base} and run = '{first.run}'").fetchall()
    assert density == first.layers["fc.weight"]


def test_columns_are_the_same_whatever_is_in_them(folder, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    schemas = []
    for number, rows in enumerate([load(folder), [Row("snip", 0.9, 0)], []]):
        path = write_parquet(rows, tmp_path / f"{number}.parquet")
        schemas.append(parquet.read_schema(path))
        assert path.read_bytes() == write_parquet(rows, tmp_path / "again.parquet").read_bytes()
    assert schemas[0] == schemas[1] == schemas[2]
    assert {"method", "accuracy", "effective", "dataset", "run", "layers"} <= set(schemas[0].names)


def test_what_is_missing_is_named(monkeypatch, tmp_path, folder, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(PackageError, match=r"pip install 'prospect-pruning\[parquet\]'"):
        write_parquet([], tmp_path / "runs.parquet")
    assert main(["results", str(folder), "--parquet", str(tmp_path / "runs.parquet")]) == 1
    assert "pyarrow was asked for and is not installed" in capsys.readouterr().err
    assert not (tmp_path / "runs.parquet").exists()
    with pytest.raises(ModuleNotFoundError, match="pip install no-such-thing, or"):
        optional("no_such_thing", "no-such-thing")


# Tables


def test_bold_only_where_shown():
    rows = some("a", [0.90, 0.91, 0.92]) + some("b", [0.85, 0.87, 0.86]) + some("c", [0.80, 0.82, 0.81])
    rows += some("a", [0.7, 0.8, 0.9], 0.98) + some("b", [0.75, 0.76, 0.74], 0.98) + some("dense", [0.95] * 3, 0.0)
    lines = markdown(rows).splitlines()
    (a,), (b,) = ([line for line in lines if line.startswith(f"| {name} |")] for name in "AB")
    assert a == "| A | **91.00 ± 1.00** (3) | 80.00 ± 10.00 (3) |"  # the higher mean at 98 % was not shown to be
    assert "**" not in b
    assert "Not pruned: 95.00 ± 0.00 (3)." in lines
    assert lines[-1].startswith("Bold: better than every other")
    two = [row for row in rows if row.seed < 2]
    assert "**" not in markdown(two)
    assert "Bold" not in markdown(two)
    assert "**" not in markdown(some("a", [0.9, 0.91, 0.92]))  # nothing to be better than


def test_a_method_that_failed_is_marked_and_not_bold():
    rows = [*some("a", [0.9, 0.91, 0.92]), Row("a", 0.9, 3, error="collapsed"), *some("b", [0.5, 0.52, 0.51])]
    rows += [Row("c", 0.9, seed, error="collapsed") for seed in range(2)]
    (a,), (b,), (c,) = ([line for line in markdown(rows).splitlines() if line.startswith(f"| {n} |")] for n in "ABC")
    assert a == "| A | 91.00 ± 1.00 (3, 1 failed) |"
    assert b == "| B | 51.00 ± 1.00 (3) |"
    assert c == "| C | 2 failed |"
    whole = [row for row in rows if row.seed < 3]
    assert "**91.00 ± 1.00**" in markdown(whole)  # what never ended is not in the way


def test_many_sparsities_are_lines():
    rows = [row for k in range(1, 10) for row in some("snip", [0.9, 0.91], 1 - 0.5**k) + some("a", [0.5], 1 - 0.5**k)]
    lines = markdown(rows).splitlines()
    assert "| sparsity | SNIP | A |" in lines
    assert "| 50 % | 90.50 ± 0.71 (2) | 50.00 (1) |" in lines
    assert len([line for line in lines if line.startswith("| ") and "%" in line]) == 9
    assert "sparsity & SNIP & A \\\\" in latex(rows)


def test_a_dense_network_alone():
    rows = some("dense", [0.9, 0.92], 0.0)
    assert "Not pruned: 91.00 ± 1.41 (2)." in markdown(rows)
    assert "\\begin{tabular}{lr}" in latex(rows)
    assert "Dense & \\multicolumn{1}{c}{$91.00 \\pm 1.41$ (2)} \\\\" in latex(rows)


def test_differences_to_a_baseline():
    rows = some("snip", [0.90, 0.91, 0.92]) + some("random", [0.85, 0.87, 0.86]) + some("grasp", [0.85, 0.9, 0.84])
    text = markdown(rows, "random")
    assert "points: mean of differences paired by seed" in text
    assert "| SNIP | **+5.00** (+2.52 to +7.48) |" in text
    assert re.search(r"\| GraSP \| \+0\.33 \(-\d+\.\d\d to \+\d+\.\d\d\) \|", text)
    assert "$\\mathbf{+5.00}$ ($+2.52$ to $+7.48$)" in latex(rows, "random")


NASTY = r"a_b & 50% #1 {x}\y ~^ <z> | $m$ *c* `d`"


def test_names_are_escaped():
    assert escape_latex(NASTY) == (
        r"a\_b \& 50\% \#1 \{x\}\textbackslash{}y \textasciitilde{}\textasciicircum{} \textless{}z\textgreater{} "
        r"\textbar{} \$m\$ *c* `d`"
    )
    assert escape_markdown("a|b\nc_d") == r"a\|b c\_d"
    rows = some(NASTY, [0.5], dataset="d_1", network="n|1", setup="50%")
    (line,) = [line for line in markdown(rows).splitlines() if line.startswith("| A")]
    assert len(re.findall(r"(?<!\\)\|", line)) == 3
    text = latex(rows)
    assert r"\caption{n\textbar{}1 on d\_1, 50\%. " in text
    body = [line for line in text.splitlines() if line.startswith("A")]
    assert len(re.findall(r"(?<!\\)&", body[0])) == 1


def test_a_latex_table_is_whole(folder):
    text = latex(load(folder), "random")
    assert text.count("\\begin{table}") == text.count("\\end{table}") == 2
    for inner in re.findall(r"\\begin\{tabular\}\{(l r*|lr*)\}(.*?)\\end\{tabular\}", text, re.S):
        columns, body = inner
        for line in body.splitlines():
            if line.endswith("\\\\") and "multicolumn" not in line:
                assert len(re.findall(r"(?<!\\)&", line)) == len(columns) - 1
    assert "\\multicolumn{2}{c}{$9" in text
    assert "(2, 1 failed)" in text
    depth = 0
    for letter in re.sub(r"\\[{}]", "", text):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        assert depth >= 0
    assert depth == 0
    assert len(re.findall(r"(?<!\\)\$", text)) % 2 == 0


def test_the_command_prints_them_without_torch(folder):
    code = f"""
import sys
from prospr.cli import main
for kind in ("markdown", "latex"):
    assert main(["results", {str(folder)!r}, "--format", kind, "--baseline", "random"]) == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rows = load(folder)
    assert done.stdout.strip() == f"{markdown(rows, 'random')}\n{latex(rows, 'random')}"


@pytest.mark.parametrize("kind", ["markdown", "latex"])
def test_no_runs(kind, tmp_path, capsys):
    assert main(["results", str(tmp_path), "--format", kind]) == 0
    assert "there are no finished runs" in capsys.readouterr().out


def test_sparsities_that_print_alike_keep_their_rows():
    shares = [1 - 0.8**k for k in range(30, 42)]
    rows = [Row(method, share, 0, 0.5) for method in ("a", "b") for share in shares]
    text = markdown(rows)
    assert sum(line.startswith("| 99.") for line in text.splitlines()) == len(shares)


def test_a_run_is_a_folder_of_one(tmp_path):
    fake_run(grid(["snip"], [0.9], training=SHORT)[0], tmp_path / "runs")
    (row,) = load(tmp_path / "runs")
    assert load(next((tmp_path / "runs").iterdir())) == [row]


def test_what_cannot_be_read_hides_nothing_else(tmp_path, capsys):
    fake_run(grid(["snip"], [0.9], training=SHORT)[0], tmp_path / "runs")
    stranger = tmp_path / "runs" / "deadbeefdeadbeef"
    stranger.mkdir()
    (stranger / "experiment.json").write_text('{"schema')
    assert main(["show", "--folder", str(tmp_path / "runs")]) == 0
    out = capsys.readouterr().out
    assert "done" in out
    assert "cannot be read" in out
