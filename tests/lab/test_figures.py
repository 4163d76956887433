"""Figures for papers: what is drawn where, that the same runs give the same bytes, and what is not drawn."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
from fake_runs import fake_run, grid

from prospr.cli import main
from prospr.errors import FolderError, PackageError, SettingError
from prospr.lab.experiment import Training
from prospr.lab.paper import tables
from prospr.lab.report.setups import setups
from prospr.lab.results import accuracy, cell, verdict
from prospr.lab.runs.records import gather

pytest.importorskip("matplotlib")

from prospr.lab.figures import draw, write_figures
from prospr.lab.figures.style import COLOURS, looks, styled

SHORT = Training(epochs=10)
METHODS = ("prospr", "random", "snip")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three methods and the dense network at two sparsities, three seeds; one failed."""
    folder = tmp_path_factory.mktemp("figures") / "runs"
    for one in grid(METHODS, (0.9, 0.98), training=SHORT):
        failed = (one.method, one.sparsity, one.seed) == ("snip", 0.98, 2)
        fake_run(one, folder, "failed" if failed else "done")
    return folder


@pytest.fixture
def scene(folder):
    (setup,) = setups(gather([folder]).records)
    with styled():
        yield draw.Scene(setup, looks(METHODS))


def lines(figure, label):
    return [line for line in figure.axes[0].lines if line.get_label() == label]


def names(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_accuracy_is_that_of_the_runs(scene):
    figure = draw.draw_accuracy(scene, paper=False)
    assert names(figure) == ["Dense", "ProsPr", "Random", "SNIP", "runs failed"]
    for method, name in [("prospr", "ProsPr"), ("snip", "SNIP")]:
        (line,) = lines(figure, name)
        assert list(line.get_xdata()) == pytest.approx([1.0, 1.69897])  # -log10 of the share kept
        means = [100 * accuracy(cell(scene.rows, method, share)).mean for share in (0.9, 0.98)]
        assert list(line.get_ydata()) == pytest.approx(means)
    axes = figure.axes[0]
    assert sorted(text.get_text() for text in axes.get_xticklabels()) == ["90", "98"]
    bands = [band.get_paths()[0].get_extents() for band in axes.collections]
    spread = accuracy(cell(scene.rows, "random", 0.9))
    assert any(
        band.y1 >= 100 * (spread.mean + spread.sd) - 1e-6 and band.y0 <= 100 * (spread.mean - spread.sd)
        for band in bands
    )
    (hollow,) = [line for line in axes.lines if line.get_markerfacecolor() == "white" and len(line.get_xdata())]
    assert hollow.get_ydata()[0] == pytest.approx(100 * accuracy(cell(scene.rows, "snip", 0.98)).mean)


def test_the_papers_numbers_are_behind(scene):
    figure = draw.draw_accuracy(scene)
    assert "the paper's, 200 epochs" in names(figure)  # ours are of 10
    dotted = [line for line in figure.axes[0].lines if line.get_linestyle() == ":"]
    assert len(dotted) == 3 + (1 if "Unpruned" in tables()["lth_cifar10_resnet20"].methods else 0)
    rows = tables()["lth_cifar10_resnet20"].rows
    wanted = [row.mean for row in rows if row.method == "ProsPr" and 0.899 < row.sparsity < 0.981]
    assert wanted
    assert wanted in [pytest.approx(list(line.get_ydata())) for line in dotted]


def test_differences_are_the_verdicts(scene):
    figure = draw.draw_difference(scene, "random")
    assert names(figure) == ["ProsPr", "SNIP", "not shown"]
    marks = [line for line in figure.axes[0].lines if line.get_marker() in "os^" and len(line.get_xdata()) == 1]
    told = [verdict(scene.rows, "prospr", "random", share) for share in (0.9, 0.98)]
    told.append(verdict(scene.rows, "snip", "random", 0.9))  # at 98 % two seeds are left
    assert [line.get_ydata()[0] for line in marks] == pytest.approx([100 * one.difference.mean for one in told])
    hollow = [line.get_markerfacecolor() == "white" for line in marks]
    assert hollow == [one.says == "not shown" for one in told]
    assert draw.draw_difference(replace(scene, looks=looks(["random"])), "random") is None


def test_layers_and_densities(scene):
    layers = draw.draw_layers(scene, 0.98)
    (line,) = lines(layers, "ProsPr")
    here = [row.layers for row in cell(scene.rows, "prospr", 0.98)]
    wanted = [100 * sum(one[name] for one in here) / 3 for name in here[0]]
    assert list(line.get_ydata()) == pytest.approx(wanted)
    assert [text.get_text() for text in layers.axes[0].get_xticklabels()] == ["conv1", "layer1.0.conv1", "fc"]
    density = draw.draw_density(scene)
    (line,) = lines(density, "SNIP")
    assert list(line.get_ydata()) == pytest.approx([0.9 * x for x in line.get_xdata()])  # as fake_runs has it


def test_a_layer_that_is_empty_is_drawn_at_zero(scene):
    rows = [
        replace(row, layers={**row.layers, "fc.weight": 0.0}) if row.method == "snip" else row for row in scene.rows
    ]
    scene.__dict__["rows"] = rows
    axes = draw.draw_layers(scene, 0.9).axes[0]
    labels = dict(zip((t.get_text() for t in axes.get_yticklabels()), axes.get_yticks(), strict=True))
    (line,) = [line for line in axes.lines if line.get_label() == "SNIP"]
    assert line.get_ydata()[-1] == labels["0"] < min(value for name, value in labels.items() if name != "0")


def test_curves_are_means_over_the_seeds(scene):
    figure = draw.draw_curves(scene, 0.9, "loss")
    assert names(figure) == ["Dense", "ProsPr", "Random", "SNIP"]
    (line,) = lines(figure, "Random")
    records = [r for r in scene.setup.records if (r.experiment.method, r.experiment.sparsity) == ("random", 0.9)]
    assert list(line.get_ydata()) == pytest.approx([sum(r.epochs[i]["loss"] for r in records) / 3 for i in range(10)])
    test = draw.draw_curves(scene, 0.9, "test")
    assert list(lines(test, "SNIP")[0].get_xdata()) == [5, 10]
    assert draw.draw_curves(scene, 0.9, "validation") is None


def test_methods_differ_without_colour():
    many = looks([f"m{i}" for i in range(24)])
    assert len({(one.colour, one.mark, one.dash) for one in many.values()}) == 24
    first = list(many.values())[: len(COLOURS)]
    assert len({one.mark for one in first}) == len({one.colour for one in first}) == len(COLOURS)


def test_the_same_runs_give_the_same_bytes(tmp_path):
    folder = tmp_path / "runs"
    for one in grid(("prospr", "random"), (0.9,), training=SHORT):
        fake_run(one, folder)
    code = f"""
from prospr.lab.figures import write_figures
write_figures({str(folder)!r}, {str(tmp_path / "there")!r}, ("pdf", "svg", "png"))
import sys
assert "torch" not in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    here = write_figures(folder, tmp_path / "here", ("pdf", "svg", "png"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(here) == len(list((tmp_path / "there").iterdir())) == 3 * (3 + 4)
    for path in here:
        assert path.read_bytes() == (tmp_path / "there" / path.name).read_bytes(), path.name
    name = "accuracy_resnet20-cifar10-10-epochs-recipe-prospr-cifar"
    drawn = (tmp_path / "here" / f"{name}.svg").read_text()
    assert re.search(r"<text[^>]*>[^<]*ProsPr", drawn)  # letters, not curves
    assert "<dc:date>" not in drawn
    pdf = (tmp_path / "here" / f"{name}.pdf").read_bytes()
    assert b"CreationDate" not in pdf
    assert b"/Type3" not in pdf


def test_the_command(folder, tmp_path, capsys):
    assert main(["figures", str(folder), "-o", str(tmp_path), "--format", "svg", "--baseline", "prospr"]) == 0
    written = capsys.readouterr().out.split()
    assert len(written) == len(list(tmp_path.iterdir())) == 11
    assert any("difference-to-prospr_" in path for path in written)
    words = ["figures", str(folder), "-o", str(tmp_path / "some"), "--format", "svg", "--only", "density", "layers"]
    assert main(words) == 0
    assert sorted(path.name.partition("_")[0] for path in (tmp_path / "some").iterdir()) == [
        "density", "layers-at-90", "layers-at-98",
    ]  # fmt: skip
    wide = (tmp_path / "density_resnet20-cifar10-10-epochs-recipe-prospr-cifar.svg").read_text()
    assert f'width="{72 * 3.35:g}pt"' in wide


def test_what_cannot_be_drawn_says_why(folder, tmp_path, monkeypatch, capsys):
    with pytest.raises(SettingError, match="use some of pdf, svg, png"):
        write_figures(folder, tmp_path, ("jpg",))
    with pytest.raises(SettingError, match=r"only=\['scatter'\]: use some of accuracy, difference"):
        write_figures(folder, tmp_path, only=("scatter",))
    with pytest.raises(SettingError, match="baseline='grasp' is not among the methods; choose from prospr, "):
        write_figures(folder, tmp_path, baseline="grasp")
    with pytest.raises(SettingError, match="width=0: use inches"):
        write_figures(folder, tmp_path, width=0)
    with pytest.raises(FolderError, match="there is no run in it"):
        write_figures(tmp_path, tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    with pytest.raises(PackageError, match=r"matplotlib was asked .* pip install 'prospect-pruning\[figures\]'"):
        write_figures(folder, tmp_path)
    assert main(["figures", str(folder), "-o", str(tmp_path)]) == 1
    assert "prospect-pruning[figures]" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_long_setups_have_short_names(tmp_path):
    changes = Training(
        epochs=4, lr=0.0123, weight_decay=0.000123, momentum=0.876, batch_size=123, warmup=1, nesterov=True
    )
    for settings in ({"width": 8}, {"width": 8, "shortcut": "B"}):
        for one in grid(("snip",), (0.9,), (0,), training=replace(changes, drop_factor=0.123), settings=settings)[1:]:
            fake_run(one, tmp_path / "runs")
    paths = write_figures(tmp_path / "runs", tmp_path / "out", ("svg",))
    assert len(set(paths)) == len(paths)
    assert all(len(path.name) < 160 for path in paths)
    assert len({path.name.partition("_")[2] for path in paths}) == 2
