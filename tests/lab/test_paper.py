"""The paper's tables: its numbers, the experiments that measure the same, and ours beside them."""

import csv
import json
import subprocess
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
from fake_runs import fake_run

from prospr.cli import main
from prospr.errors import SettingError
from prospr.lab import paper
from prospr.lab.experiment import DENSE, USUAL, Experiment, Pruning, Training
from prospr.lab.paper import DATASETS, METHODS, NETWORKS, NOT_RUN, Cell, PaperRow, compare, tables
from prospr.lab.recipes import recipes
from prospr.lab.run import run_many
from prospr.lab.runs.making import check
from prospr.registry import methods

SOURCE = Path(__file__).parents[3] / "shared" / "paper" / "tables.csv"
SHIPPED = resources.files("prospr.lab") / "data_files" / "paper.csv"


def lines():
    return list(csv.DictReader(SHIPPED.read_text(encoding="utf-8").splitlines()))


def test_every_number_is_there_as_printed():
    rows = [(name, row) for name, table in tables().items() for row in table.rows]
    assert len(rows) == len(lines()) == 562
    for line in lines():
        like = [
            row
            for name, row in rows
            if (name, row.dataset, row.network, row.method, row.metric, row.note)
            == (line["table"], line["dataset"], line["model"], line["method"], line["metric"], line["note"])
            and row.sparsity == pytest.approx(float(line["sparsity"]) / 100)
        ]
        sd = float(line["std"]) if line["std"] else None
        assert [(row.mean, row.sd) for row in like] == [(float(line["mean"]), sd)]


@pytest.mark.skipif(not SOURCE.exists(), reason="the file the numbers came from is not here")
def test_the_numbers_are_the_papers_file():
    assert SHIPPED.read_bytes() == SOURCE.read_bytes()


def test_nine_tables():
    found = tables()
    assert len(found) == 9
    assert {name: table.runs for name, table in found.items()} == {
        "lth_cifar10_resnet20": "all", "lth_cifar10_vgg16": "all", "lth_tiny_imagenet": "all", "imagenet": "all",
        "structured": "all", "effect_of_m": "all", "walltime": "all", "segmentation": "some", "byol": "all",
    }  # fmt: skip
    for table in found.values():
        assert table.title
        assert table.shows
        assert "tab:" in table.source


def test_every_name_of_the_paper_has_a_meaning():
    rows = [row for table in tables().values() for row in table.rows]
    assert {row.dataset for row in rows} == set(DATASETS)
    assert {row.network for row in rows} == set(NETWORKS)
    assert {row.method for row in rows} == set(METHODS) | set(NOT_RUN)
    assert set(DATASETS.values()) <= set(USUAL)
    assert set(METHODS.values()) <= {DENSE, *methods()}
    assert {table.recipe for table in tables().values() if table.runs != "none"} <= set(recipes())


@pytest.mark.parametrize("name", [name for name, table in tables().items() if table.runs != "none"])
def test_what_can_be_run_could_be_run(name):
    runs = tables()[name].experiments(seeds=[0])
    assert len({one.identity for one in runs}) == len(runs)
    for one in runs:
        if one.network_name.startswith("torchvision:"):
            one = replace(one, network="resnet50")  # it need not be installed
        check(one)


def test_the_papers_settings():
    (one,) = tables()["lth_cifar10_resnet20"].experiments(["ProsPr"], [0.977], seeds=[2])
    assert one == Experiment(
        "cifar10", "resnet20", method="prospr-one-shot", sparsity=0.9775, seed=2, recipe="prospr-cifar"
    )
    dense, pruned = tables()["structured"].experiments(["dense", "prospr"], [0, 0.9], [0], datasets=["cifar100"])
    assert (dense.method, dense.pruning) == (DENSE, Pruning())
    assert (pruned.network, pruned.dataset, pruned.sparsity) == ("vgg19", "cifar100", 0.9)
    assert pruned.pruning == Pruning(granularity="channel", shrink=True)
    steps = tables()["effect_of_m"].experiments(sparsities=[0.95], seeds=[0], datasets=["CIFAR-10"])
    assert [(one.pruning.steps, one.pruning.same_batch) for one in steps] == [(m, True) for m in range(4)]
    first = tables()["imagenet"].experiments(["ProsPr"], [0.9], seeds=[0])
    assert {(one.network, one.method, one.pruning.steps, one.pruning.score_batch_size) for one in first} == {
        ("torchvision:vgg19_bn", "prospr-first", 2048, 128),
        ("resnet50", "prospr-first", 1024, 256),
    }
    cells = tables()["segmentation"].experiments(seeds=[0])
    assert [(one.dataset, one.method) for one in cells] == [
        ("phc-c2dh-u373", DENSE), ("phc-c2dh-u373", "prospr-one-shot"),
        ("dic-c2dh-hela", DENSE), ("dic-c2dh-hela", "prospr-one-shot"),
    ]  # fmt: skip


def test_methods_after_training_and_variants_of_3sp():
    table = tables()["lth_cifar10_vgg16"]
    (ticket,) = table.experiments(["LTR after Training"], [0.977], seeds=[1])
    assert (ticket.method, ticket.sparsity, ticket.seed) == ("magnitude", 0.9775, 1)
    assert ticket.pruning == Pruning(after_training=True, rewind=2000)
    (short,) = table.experiments(["LTR after Training"], [0.977], seeds=[1], epochs=20)
    assert (short.trained_by.epochs, short.pruning.rewind) == (20, 200)
    (small,) = tables()["lth_cifar10_resnet20"].experiments(["LTR after Training"], [0.977], seeds=[1])
    assert small.pruning.rewind == 1000
    (after,) = table.experiments(["Magnitude after Training"], [0.977], seeds=[1])
    assert after.pruning == Pruning(after_training=True)
    (before,) = table.experiments(["magnitude"], [0.977], seeds=[1])  # ours is the plain one
    assert before.pruning == Pruning()
    variants = tables()["structured"].experiments(
        ["3SP", "3SP + reinit", "3SP + rescale"], [0.9], seeds=[0], datasets=["cifar10"]
    )
    assert sorted(one.pruning.weights for one in variants) == ["keep", "redraw", "rescale"]
    assert {one.method for one in variants} == {"3sp"}
    assert len(tables()["structured"].experiments(["3sp"], [0.9], seeds=[0], datasets=["cifar10"])) == 1


def test_the_benchmarks_sparsities_are_those_before_rounding():
    table = tables()["lth_cifar10_vgg16"]
    runs = table.experiments(["snip"], seeds=[0])
    assert [one.sparsity for one in runs] == [round(1 - 0.8**k, 4) for k in range(1, 19)]
    assert [round(100 * one.sparsity, 1) for one in runs] == pytest.approx(
        [100 * s for s in table.sparsities], abs=0.11
    )


def test_the_benchmarks_recipe():
    part = {"methods": ["snip"], "sparsities": [0.2], "seeds": [0], "recipe": "missing-the-mark"}
    (small,) = tables()["lth_cifar10_resnet20"].experiments(**part)
    assert (small.recipe, small.trained_by.epochs, small.settings) == ("missing-the-mark-cifar", 160, {"shortcut": "B"})
    (tiny,) = tables()["lth_tiny_imagenet"].experiments(**part, epochs=20)
    assert (tiny.recipe, tiny.trained_by.drops, tiny.settings) == ("missing-the-mark-tiny", (10, 15), {"stem": "7x7"})
    with pytest.raises(SettingError, match="structured is no part of that benchmark; use 'paper'"):
        tables()["structured"].experiments(recipe="missing-the-mark")
    assert tables()["byol"].experiments(recipe="digits")[0].recipe == "digits"
    with pytest.raises(SettingError, match="unknown recipe 'papers'; known names: paper, missing-the-mark, prospr"):
        tables()["byol"].experiments(recipe="papers")


@pytest.mark.parametrize(
    ("name", "part", "reason"),
    [
        ("segmentation", {"methods": ["Jeong et al."]}, "which prospr does not have"),
        ("lth_cifar10_vgg16", {"methods": ["ntk-sap"]}, "'ntk-sap' is not in this table of the paper; it has LTR"),
        ("lth_cifar10_vgg16", {"sparsities": [0.5]}, r"sparsity 0\.5 is not in this part .* 0\.488, 0\.59"),
        ("byol", {"datasets": ["imagenet"]}, "it has CIFAR-10, CIFAR-100"),
    ],
)
def test_what_cannot_be_run_says_so(name, part, reason):
    with pytest.raises(SettingError, match=reason):
        tables()[name].experiments(**part)


def test_a_start_by_byol():
    random, byol = tables()["byol"].experiments(seeds=[0], datasets=["cifar100"])
    assert (random.training, byol.training) == (Training(), Training(byol=1000))
    assert replace(byol, training=Training()) == random
    assert (byol.network, byol.method, byol.sparsity) == ("resnet18", "prospr-one-shot", 0.95)
    _, short = tables()["byol"].experiments(seeds=[0], datasets=["cifar100"], epochs=20)
    assert (short.training.byol, short.trained_by.epochs) == (100, 20)


def test_times_are_those_of_runs_trained_alone(tmp_path):
    table = tables()["walltime"]
    assert table.timed
    assert not tables()["structured"].timed
    seeds, part = [0, 1], {"networks": ["vgg19"], "datasets": ["cifar100"], "sparsities": [0, 0.95]}
    dense, pruned = (cell.experiments for cell in table.cells(seeds=seeds, **part))
    assert {one.pruning.granularity for one in pruned} == {"channel"}
    assert all(one.pruning.shrink for one in pruned)
    for one, seconds, together in [(dense[0], 600, 1), (dense[1], 60, 8), (pruned[0], 150, 1), (pruned[1], 210, 1)]:
        fake_run(one, tmp_path)
        path = tmp_path / one.identity / "result.json"
        stored = json.loads(path.read_text())
        stored["seconds"]["train"] = seconds
        stored["memory"] = {"train": 1, "together": together}
        path.write_text(json.dumps(stored))
    first, second = compare(table.cells(seeds=seeds, **part), tmp_path)
    assert (first["our_mean"], first["our_runs"], first["our_speedup"]) == (10, 1, None)
    assert (second["our_mean"], second["our_runs"]) == (3, 2)
    assert second["our_speedup"] == pytest.approx(10 / 3)
    assert second["paper_speedup"] == pytest.approx(50.3 / 38.8)
    imagenet = table.experiments(datasets=["imagenet"], sparsities=[0.8], seeds=[0])[0]
    assert (imagenet.settings, imagenet.trained_by.epochs) == ({"stem": "7x7"}, 90)


def test_times_are_not_taken_of_several_at_once(capsys):
    assert main(["paper", "walltime", "--processes", "2"]) == 1
    assert "walltime takes times, one run at a time" in capsys.readouterr().err


# Ours beside the paper's: on digits, whose numbers no paper has


ROWS = (
    PaperRow("Digits", "Small", "weight", "Unpruned", 0.0, "top1", 99.0, None, ""),
    PaperRow("Digits", "Small", "weight", "SNIP", 0.5, "top1", 98.5, 0.25, ""),
    PaperRow("Digits", "Small", "weight", "SNIP", 0.5, "top5", 99.5, None, ""),
    PaperRow("Digits", "Small", "weight", "Jeong et al.", 0.5, "top1", 97.0, None, ""),
)


@pytest.fixture
def digits(monkeypatch):
    """A table of digits in place of the paper's."""
    monkeypatch.setitem(DATASETS, "Digits", "digits")
    monkeypatch.setitem(NETWORKS, "Small", "small_convnet")
    table = paper.PaperTable("digits", "Digits", "nothing", "nowhere", ROWS, "digits", differs=("It is made up.",))
    monkeypatch.setattr(paper, "tables", lambda: {"digits": table})
    return table


def test_ours_are_measured(digits, tmp_path):
    cells = digits.cells(seeds=[0, 1], epochs=1)
    empty = compare(cells, tmp_path)
    assert [(row["our_mean"], row["our_runs"]) for row in empty] == [(None, 0)] * 4
    assert [row["paper_mean"] for row in empty] == [99.0, 98.5, 99.5, 97.0]
    wanted = digits.experiments(seeds=[0, 1], epochs=1)
    assert len(wanted) == 4  # top-1 and top-5 are of the same runs
    results = run_many(wanted[:3], tmp_path, "cpu")
    rows = compare(cells, tmp_path)
    assert [row["our_runs"] for row in rows] == [2, 1, 1, 0]
    first = [100 * result.figures["accuracy"] for result in results]
    assert rows[0]["our_mean"] == pytest.approx((first[0] + first[1]) / 2)
    assert rows[0]["our_sd"] == pytest.approx(abs(first[0] - first[1]) / 2**0.5)
    assert (rows[1]["our_mean"], rows[1]["our_sd"]) == (first[2], None)
    assert rows[2]["our_mean"] == 100 * results[2].figures["top5"]
    assert [row["paper_mean"] for row in rows] == [99.0, 98.5, 99.5, 97.0]
    assert "prunes and fine-tunes in turn" in rows[3]["missing"]
    other = digits.cells(seeds=[0, 1], epochs=2)  # runs of another length do not count
    assert [row["our_runs"] for row in compare(other, tmp_path)] == [0, 0, 0, 0]


def test_segmentation_is_a_share():
    row = next(row for row in tables()["segmentation"].rows if row.method == "ProsPr")
    assert row.mean == 0.9369
    assert Cell(row, ()).measured().n == 0


def test_the_command(digits, tmp_path, capsys):
    words = ["paper", "digits", "--epochs", "1", "--seeds", "0", "1", "--folder", str(tmp_path / "runs")]
    words += ["--device", "cpu"]
    assert main([*words, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "4: 0 done, 0 begun, 4 not begun" in said
    assert "a few steps were tried" in said
    assert not (tmp_path / "runs").exists()
    assert main([*words, "--methods", "snip"]) == 0
    said = capsys.readouterr().out
    cells = digits.cells(["snip"], seeds=[0, 1], epochs=1)
    ours = cells[0].measured(tmp_path / "runs")
    (line,) = [line for line in said.splitlines() if line.startswith("Digits") and "top1" in line]
    assert line.split()[5:] == [*f"{ours.mean:.2f} +- {ours.sd:.2f} (2)".split(), "98.5", "+-", "0.25"]
    assert "recipe digits, 1 epochs in place of the recipe's" in said
    assert main([*words, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "4: 2 done, 0 begun, 2 not begun" in said
    assert "as runs before took" in said
    assert main([*words, "--show", "--json"]) == 0
    assert [row["our_runs"] for row in json.loads(capsys.readouterr().out)] == [0, 2, 2, 0]
    assert main([*words, "--show"]) == 0
    said = capsys.readouterr().out
    assert "not by a run" in said
    assert "Jeong et al.: prunes and fine-tunes in turn" in said
    assert said.endswith("It is made up.\n")


def test_the_list_and_a_table_without_torch():
    code = """
import sys
from prospr.cli import main
assert main(["paper"]) == 0
assert main(["paper", "structured", "--show"]) == 0
assert main(["paper", "table 1"]) == 1
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name in tables():
        assert f"\n{name}  " in done.stdout
    assert "93.61 +- 0.01" in done.stdout
    assert "the paper has no table 'table 1'; known names: lth_cifar10_resnet20" in done.stderr
