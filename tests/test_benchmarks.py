"""The benchmarks run: on narrow networks or few steps, in this process, for what they write and not for their times."""

import importlib.util
import json
import shlex
import sys
from dataclasses import replace

import pytest
import torch
from benchmark_scripts import BENCHMARKS, imported
from torch import nn

import prospr
from prospr.lab.experiment import Experiment
from prospr.lab.models import build
from prospr.lab.runs.folder import find_run
from prospr.lab.runs.making import check


@pytest.fixture
def channels(monkeypatch):
    yield from imported("channels", monkeypatch)


@pytest.fixture
def narrower(monkeypatch):
    yield from imported("narrower", monkeypatch)


@pytest.fixture
def small_channels(monkeypatch):
    yield from imported("small_channels", monkeypatch)


@pytest.fixture
def small_cifar(monkeypatch):
    yield from imported("small_cifar", monkeypatch)


@pytest.fixture
def scale(monkeypatch):
    yield from imported("scale", monkeypatch)


@pytest.fixture
def stability(monkeypatch):
    yield from imported("stability", monkeypatch)


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
    pytest.importorskip("matplotlib", reason="draws a figure")
    fair.main([*options, "--show", "--figure", str(tmp_path / "fair.svg")])
    drawn = (tmp_path / "fair.svg").read_text()
    assert "above SNIP" in drawn
    assert "random, balanced" in drawn.lower()


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it is the whole table by default")
def test_several_groups_are_scored_at_once(fair, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(fair, "score_first", lambda group, _: asked.append([one.method for one in group]))
    options = ["--folder", str(tmp_path / "runs"), "--out", str(tmp_path / "fair.jsonl"), "--epochs", "1"]
    arms = ["--sparsities", "0.5", "--arms", "snip", "erk", "magnitude"]
    fair.main([*options, *arms, "--together", "1", "--scorers", "2", "--ahead", "2"])
    assert asked == [["snip", "erk"], ["magnitude"]]


def test_the_plan_of_the_whole_benchmark(fair):
    """Each line is of a table with such arms, and goes to that table's file."""
    lines = [shlex.split(line, comments=True) for line in (BENCHMARKS / "fair.plan").read_text().splitlines()]
    wishes = [fair._arguments(line) for line in lines if line]
    assert {wish.table for wish in wishes} == set(fair.TABLES)
    for wish in wishes:
        assert len(fair.wanted(wish)) == len(wish.arms) * len(wish.seeds) * len(wish.sparsities or [0.8])
        assert wish.out == f"results/{'fair' if wish.split == 'test' else 'screening_methods'}_{wish.table}.jsonl"


def test_what_is_left_of_a_plan(fair, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fair, "measure", None)  # nothing is run
    out, plan = tmp_path / "fair.jsonl", tmp_path / "plan.txt"
    lines = [
        f"--arms snip erk --sparsities 0.9 0.95 --out {out}",
        f"--arms snip 'random, balanced' --sparsities 0.95 --epochs 9 --out {out}",
        f"--arms erk magnitude --sparsities 0.95 --out {out}",  # erk is in the first line
    ]
    plan.write_text("\n".join(lines))
    wish = fair._arguments(["--full", "--seeds", "0", *shlex.split(lines[0])])
    done = [{"run": one.identity, "train_seconds": 90.0} for _, one in fair.wanted(wish)[:1]]
    same = {"split": "test", "network": "resnet20", "dataset": "cifar10", "experiment": {"training": {"epochs": 200}}}
    out.write_text("".join(json.dumps(line | same) + "\n" for line in done))
    fair.main(["--plan", str(plan), "--show", "--seeds", "0"])
    shown = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[:2] for line in shown] == [["3", "4"], ["2", "2"], ["1", "2"], ["6", "7"]]
    assert [line[2] for line in shown[:3]] == ["4", "?", "2"]  # 90 s a run; of nine epochs none is known
    assert shown[1][3] == "resnet20, test, 9 epochs: snip 'random, balanced'"


def test_a_plan_is_scored_at_once_and_trained_line_by_line(fair, tmp_path, monkeypatch, capsys):
    asked, trained, run_many = [], [], fair.run_many

    def running(experiments, *given, **options):
        trained.append([one.method for one in experiments])
        return run_many(experiments, *given, **options)

    monkeypatch.setattr(fair, "run_many", running)
    monkeypatch.setattr(fair, "score_first", lambda group, _: asked.append([one.method for one in group]))
    first, second, plan = tmp_path / "first.jsonl", tmp_path / "second.jsonl", tmp_path / "plan.txt"
    alike = "--sparsities 0.5 --together 2"
    lines = [
        "# two lines of a kind share a group",
        f"{alike} --arms snip --out {first}",
        f"{alike} --arms erk dense --out {first}",
        "",
        f"{alike} --out {second} --arms magnitude --split validation",
        f"{alike} --out {second} --arms random --epochs 2 --group-minutes 60  # too long",
    ]
    plan.write_text("\n".join(lines))
    words = ["--folder", str(tmp_path / "runs"), "--epochs", "1", "--plan", str(plan), "--minutes", "50"]
    fair.main([*words, "--scorers", "2"])
    assert asked == [["snip", "erk", "dense", "magnitude", "random"]]
    assert trained == [["snip", "erk"], ["dense"], ["magnitude"]]
    assert [json.loads(line)["arm"] for line in first.read_text().splitlines()] == ["snip", "erk", "dense"]
    (held_out,) = map(json.loads, second.read_text().splitlines())
    assert (held_out["arm"], held_out["split"]) == ("magnitude", "validation")
    assert "1 runs are left out" in capsys.readouterr().out
    fair.main(words)
    assert len(trained) == 3  # what has a line is not run again
    asked.clear()
    plan.write_text("\n".join([*lines[-1:], f"{alike} --out {second} --arms snip --split validation"]))
    fair.main([*words, "--scorers", "2"])
    assert asked == [["snip"]]  # what is trained is scored ahead, though a line before it is left out


def test_what_runs_took_says_what_a_group_will_take(fair, tmp_path, monkeypatch, capsys):
    out, given = tmp_path / "fair.jsonl", []

    def running(experiments, *others, options, **rest):
        given.append(options.compile)
        return run_many(experiments, *others, options=replace(options, compile=False), **rest)

    run_many = fair.run_many
    monkeypatch.setattr(fair, "run_many", running)
    words = ["--folder", str(tmp_path / "runs"), "--out", str(out), "--epochs", "1", "--sparsities", "0.5", "--compile"]
    fair.main([*words, "--arms", "snip", "erk", "--minutes", "1"])
    lines = [json.loads(line) | {"train_seconds": 90.0} for line in out.read_text().splitlines()]  # the two together
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    capsys.readouterr()
    fair.main([*words, "--arms", "dense", "magnitude", "--minutes", "1", "--group-minutes", "0.1"])
    assert "2 runs are left out; they take 90 s" in capsys.readouterr().out
    fair.main([*words, "--arms", "dense", "magnitude", "--minutes", "1", "--together", "1"])  # 45 s each, it is thought
    assert [json.loads(line)["arm"] for line in out.read_text().splitlines()] == ["snip", "erk", "dense", "magnitude"]
    fair.main([*words, "--table", "structured", "--arms", "random, channels", "--minutes", "1"])
    assert given == [True, True, True, False]  # networks of a shape each are not compiled one after the other


def test_a_group_that_would_end_too_late_is_called_off_for_the_next(fair, tmp_path, monkeypatch, capsys):
    clock, given = [0.0], []

    def running(experiments, folder, device, told, **rest):
        given.append([one.method for one in experiments])
        if experiments[0].method == "synflow":  # half a minute to begin, and two minutes a run
            for done in (0.0, 0.1, 0.3, 0.5):
                clock[0] += 30
                told(done, 1, "")
            raise AssertionError("not called off")
        return run_many(experiments, folder, device, told, **rest)

    run_many = fair.run_many
    monkeypatch.setattr(fair, "run_many", running)
    monkeypatch.setattr(fair.time, "perf_counter", lambda: clock[0])
    out, plan = tmp_path / "fair.jsonl", tmp_path / "plan.txt"
    plan.write_text("--arms synflow\n--arms snip --together 7\n--arms synflow --seeds 1\n")
    words = ["--folder", str(tmp_path / "runs"), "--out", str(out), "--epochs", "1", "--sparsities", "0.5"]
    fair.main([*words, "--plan", str(plan), "--minutes", "3"])
    shown = capsys.readouterr().out
    assert "1 runs are called off: they would take 195 s" in shown  # 90 s so far, and 0.7 runs of 150 s
    assert "1 runs are left out; they take 195 s, and 90 are spent" in shown  # of the same kind
    assert given == [["synflow"], ["snip"]]
    assert [json.loads(line)["arm"] for line in out.read_text().splitlines()] == ["snip"]


def test_networks_of_a_shape_each_are_compiled_beside_others_that_train(fair, tmp_path, monkeypatch):
    happened = []

    class Compiling:
        def __init__(self, runs, _):
            happened.append(("begin", [one.method for one in runs]))

        def wait(self):
            happened.append("wait")

    def running(experiments, *others, options, **rest):
        happened.append(([one.method for one in experiments], options.compile))
        return run_many(experiments, *others, options=replace(options, compile=False), **rest)

    run_many = fair.run_many
    monkeypatch.setattr(fair, "run_many", running)
    monkeypatch.setattr(fair, "compile_beside", Compiling)
    monkeypatch.setattr(fair, "score_first", lambda *_: None)
    plan, out = tmp_path / "plan.txt", tmp_path / "fair.jsonl"
    plan.write_text("--arms snip\n--table structured --arms 3sp 'random, channels'\n")
    words = ["--folder", str(tmp_path / "runs"), "--out", str(out), "--epochs", "1", "--sparsities", "0.5", "--compile"]
    fair.main([*words, "--plan", str(plan), "--scorers", "2"])
    first, *then = happened
    assert first == ("begin", ["3sp", "random"])
    assert then == [(["snip"], True), "wait", (["3sp", "random"], True)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for what it makes ready, not for what it compiles")
def test_what_is_compiled_beside_is_made_ready(fair, tmp_path):
    args = fair._arguments(["--folder", str(tmp_path), "--scorers", "2", "--epochs", "1"])
    good = Experiment(method="3sp", sparsity=0.5, seed=0)
    bad = replace(good, method="no such method")
    good = replace(good, pruning=replace(good.pruning, granularity="channel", shrink=True))
    compiling = fair.compile_beside([good, bad], args)
    compiling.wait()
    assert compiling.successful()  # what fails is told where it is trained
    assert fair.RunFolder(good, tmp_path).masks.exists()
    assert fair.RunFolder(good, tmp_path).plan.exists()


@pytest.mark.parametrize("table", ["resnet20", "resnet20b", "vgg16", "structured"])
def test_every_arm_is_an_experiment(fair, table):
    whole = fair.TABLES[table]
    assert whole.baseline in whole.arms
    shares = map(str, whole.sparsities)
    options = ["--table", table, "--dataset", "cifar10", "--network", whole.network, "--seeds", "0", "1"]
    wanted = fair.wanted(fair._arguments([*options, "--arms", *whole.arms, "--sparsities", *shares]))
    pruned = len(whole.arms) - 1  # a dense network is the same at every sparsity
    assert len({one.identity for _, one in wanted}) == 2 * (pruned * len(whole.sparsities) + 1)
    for _, one in wanted:
        check(one)


def test_a_table_has_its_recipe_and_its_network(fair):
    """Those of NTK-SAP's published script, and those of the paper; on another network neither."""
    found = {}
    for table in ("resnet20", "resnet20b"):
        options = ["--table", table, "--dataset", "cifar10", "--arms", "snip", "--sparsities", "0.9", "--seeds", "0"]
        options += ["--epochs", str(fair.TABLES[table].epochs)]
        ((_, found[table]),) = fair.wanted(fair._arguments([*options, "--network", "resnet20"]))
    ours, theirs = found["resnet20"].trained_by, found["resnet20b"].trained_by
    assert (ours.epochs, ours.batch_size, ours.weight_decay, ours.drops) == (200, 256, 5e-4, (100, 150))
    assert (theirs.epochs, theirs.batch_size, theirs.weight_decay, theirs.drops) == (160, 128, 1e-4, (80, 120))
    assert [one.settings for one in found.values()] == [{}, {"shortcut": "B"}]
    ((_, small),) = fair.wanted(fair._arguments([*options, "--network", "vgg16"]))
    assert not small.settings


def test_channels_are_taken_out_before_the_training(fair, tmp_path, capsys):
    out = tmp_path / "fair.jsonl"
    options = ["--folder", str(tmp_path / "runs"), "--out", str(out), "--epochs", "1", "--sparsities", "0.8"]
    options += ["--dataset", "digits", "--network", "small_convnet", "--score-batch", "128", "--seeds", "0"]
    arms = ["dense", "3sp", "prospr, channels", "3sp + rescale", "3sp + reinit", "random, channels"]
    fair.main(["--table", "structured", *options, "--arms", *arms[:2]])
    first = out.read_text()
    fair.main(["--table", "structured", *options, "--arms", *arms])
    assert out.read_text().startswith(first)
    lines = {line["arm"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert list(lines) == arms
    for arm, line in lines.items():
        sizes = line["sizes"]
        assert (sizes["parameters"], line["table"], line["error"]) == (16_794, "structured", None)
        left, flops = sizes["trained_parameters"] / sizes["parameters"], sizes["trained_flops"] / sizes["flops"]
        assert left == flops == 1 if arm == "dense" else 0.17 < left <= 0.2 and flops < 0.4
    assert lines["3sp"]["layers"] == lines["3sp + reinit"]["layers"] != lines["random, channels"]["layers"]
    assert len({line["accuracy"] for line in lines.values()}) > 3  # other weights, other channels
    capsys.readouterr()
    fair.main(["--table", "structured", "--out", str(out), "--show"])
    shown = capsys.readouterr().out
    assert "minus 3sp" in shown
    assert f"{100 * lines['3sp']['sizes']['trained_flops'] / lines['3sp']['sizes']['flops']:.2f}" in shown
    fair.main(["--table", "vgg16", *options, "--arms", "dense", "snip"])  # in the same file, a table of its own
    shown = capsys.readouterr().out
    assert "minus snip" in shown
    assert "3sp" not in shown
    assert [json.loads(line)["arm"] for line in out.read_text().splitlines()[6:]] == ["dense", "snip"]
    with pytest.raises(SystemExit):
        fair.main(["--table", "vgg16", *options, "--arms", "3sp"])
    assert "table vgg16 has 'dense', 'prospr'" in capsys.readouterr().err


def test_settings_are_chosen_by_images_held_out(fair, tmp_path, capsys):
    out, folder = tmp_path / "fair.jsonl", tmp_path / "runs"
    options = ["--folder", str(folder), "--out", str(out), "--epochs", "1", "--sparsities", "0.8", "--seeds", "0"]
    options += ["--dataset", "digits", "--network", "small_convnet", "--score-batch", "128", "--arms", "snip"]
    fair.main([*options, "--split", "validation"])
    (line,) = map(json.loads, out.read_text().splitlines())
    result = find_run(line["run"], folder).result()
    assert line["accuracy"] == result.epochs[-1]["validation"] != result.figure
    assert line["loss"] is None
    assert line["experiment"]["data"]["validation"] == 0.1
    fair.tell(start=-100.0, results=False)(1.0, 1, f"snip: accuracy {100 * result.figure:.2f} %")
    shown = capsys.readouterr().out
    assert "1.00 of 1 runs" in shown
    assert f"{100 * result.figure:.2f}" not in shown  # the test images are not told of
    fair.main(options)
    other = json.loads(out.read_text().splitlines()[1])
    assert (other["split"], other["accuracy"]) == ("test", find_run(other["run"], folder).result().figure)
    capsys.readouterr()
    fair.main(["--out", str(out), "--show"])
    tables = capsys.readouterr().out.split("\n\n")  # they are never taken together
    assert [f"{100 * one['accuracy']:.2f}" in shown for one in (line, other) for shown in tables] == [1, 0, 0, 1]


def test_weights_kept_are_counted_layer_by_layer(fair, tmp_path, capsys):
    layers = dict.fromkeys(("conv1.weight", "conv2.weight", "conv3.weight", "conv4.weight", "fc.weight"), 0.0)
    experiment = Experiment("digits", "small_convnet").to_dict()
    sizes = {"image": [1, 8, 8], "num_classes": 10}
    same = {"experiment": experiment, "sizes": sizes, "dataset": "digits", "network": "small_convnet", "sparsity": 0.9}
    lines = [
        {**same, "run": "a", "arm": "snip", "method": "snip", "seed": 0, "layers": {**layers, "conv2.weight": 0.25}},
        {**same, "run": "b", "arm": "snip", "method": "snip", "seed": 1, "layers": {**layers, "conv2.weight": 0.5}},
        {**same, "run": "c", "arm": "erk", "method": "erk", "seed": 0, "layers": {**layers, "conv1.weight": 1.0}},
        {**same, "run": "d", "arm": "dense", "method": "dense", "seed": 0, "sparsity": 0.0, "layers": {}},
        {**same, "run": "e", "arm": "grasp", "method": "grasp", "seed": 0, "layers": {}, "error": "cut", "sizes": {}},
    ]
    out = tmp_path / "fair.jsonl"
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fair.main(["--out", str(out), "--show", "--densities"])
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[2:]}
    assert rows["conv1.weight"] == ["144", "0", "144"]
    assert rows["conv2.weight"] == ["2304", "864", "0"]  # (576 + 1152) / 2
    assert rows["all"] == ["16592", "864", "144"]
    fair.main(["--out", str(out), "--show", "--densities", "--arms", "erk"])
    assert "snip" not in capsys.readouterr().out
    fair.main(["--out", str(out), "--show", "--densities", "--sparsities", "0.5"])
    assert "no pruned network" in capsys.readouterr().out
    before = {"experiment": Experiment("cifar10", "resnet20").to_dict()}  # a line that does not say its image's size
    assert sys.modules["fair_show"].weights_of(before)["conv1.weight"] == 3 * 16 * 9


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
    # Three numbers of four digits each: off by 5e-4 of their size at most.
    assert shrunk["train_ratio"] == pytest.approx(dense["train_ms"] / shrunk["train_ms"], rel=1.5e-3)
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


def test_scopes_that_were_tried(small_cifar):
    """They change what the library does, for that time alone."""
    batches = [(torch.randn(4, 1, 8, 8), torch.arange(4)) for _ in range(4)]

    def masks(scope):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(4, 16, 3), nn.Flatten())
        model.append(nn.Linear(64, 4))
        with small_cifar.tried(scope) as known:
            return prospr.prune(model, batches, 0.5, method="snip", scope=known)

    plain = {scope: masks(scope) for scope in ("balanced", "tapered", "mapped")}
    assert masks("tapered-0.5") != plain["tapered"] == masks("tapered-0.3")
    assert masks("mapped-0.5") != plain["mapped"] == masks("mapped-1")
    assert masks("mapped-0") == plain["balanced"] != masks("rooted")
    assert all(masks(scope) == found for scope, found in plain.items())


def test_channels_by_their_maps(small_channels):
    model = build("vgg16", seed=0, width=16)
    images = torch.randn(8, 3, 32, 32)
    how = {"sparsity": 0.5, "method": "snip", "granularity": "channel", "scope": "balanced"}
    batches, found = [(images, torch.arange(8))], []
    for power in (0.0, 0.5):
        twin = build("vgg16", seed=0, width=16)
        with small_channels.mapped(twin, images[:1], power):
            found.append(prospr.prune(twin, batches, **how))
    assert found[0] == prospr.prune(model, batches, **how)
    last = "features.40.weight"
    assert found[1][last].sum() < found[0][last].sum()


def test_random_masks_in_some_of_the_channels(narrower, tmp_path, capsys):
    assert narrower.even({"a": 4, "b": 100, "c": 100}, 50) == {"a": 4, "b": 23, "c": 23}
    out = tmp_path / "narrower.json"
    narrower.main(["--seeds", "0", "--sparsities", "0.95", "--shares", "1", "0.25", "--epochs", "1", "--out", str(out)])
    wide, narrow = json.loads(out.read_text())["rows"]
    assert narrow["weights_each"] > 2 * wide["weights_each"]
    assert "small_convnet" in capsys.readouterr().out
    model = build("resnet20", width=8, in_channels=1)
    masks = narrower.draw(model, torch.zeros(1, 1, 8, 8), 0.95, 0.5, seed=0)
    assert sum(int(m.sum()) for m in masks.values()) == round(0.05 * sum(m.numel() for m in masks.values()))
    assert masks["layer3.1.conv1.weight"].flatten(1).any(1).sum() == 16  # of 32
    assert masks["layer3.1.conv2.weight"].flatten(1).any(1).sum() > 24  # the stream has them all


def test_what_scores_have_in_common(stability):
    values = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-12, 1 + 3 * 2**-12, -3.0001, 0.0])
    rounded = torch.tensor([1.0, 1 + 2**-10, 1.0, 1 + 2**-10, -3.0, 0.0])
    assert torch.equal(stability.ten_bits(values), rounded)
    scores = {"a": torch.arange(40.0).view(4, 10), "b": torch.arange(20.0)}
    best = stability.first(scores)
    assert [mask.nonzero().flatten().tolist() for mask in best.values()] == [[38, 39], [19]]
    other = stability.first({"a": torch.arange(40.0).flip(0), "b": torch.arange(20.0)})
    assert stability.overlap(best, other) == 1 / 3
    assert stability.overlap(best, best) == 1


@pytest.fixture
def gpt(monkeypatch):
    yield from imported("gpt", monkeypatch)


def test_rare_bytes_are_kept_by_default(gpt, tmp_path, monkeypatch, capsys):
    """In the layer that predicts them; and of shuffled masks each layer keeps as many weights."""
    out, arms = tmp_path / "gpt.jsonl", ["prospr", "prospr, balanced", "prospr, balanced: last layer shuffled"]
    words = ["gpt.py", "--out", str(out), "--seeds", "0", "--steps", "2", "--width", "24", "--depth", "1"]
    monkeypatch.setattr(sys, "argv", [*words, "--arms", *arms])
    gpt.main()
    served, balanced, shuffled = (json.loads(line) for line in out.read_text().splitlines())
    assert served["kept"]["tokens"] > 1.2 * balanced["kept"]["tokens"]
    assert shuffled["kept"] == balanced["kept"]
    assert shuffled["loss"] != balanced["loss"]
    gpt.main()  # what has a line is not run again
    assert len(out.read_text().splitlines()) == 3
    assert "held-out loss, mean" in capsys.readouterr().out


@pytest.fixture
def totals(monkeypatch):
    yield from imported("totals", monkeypatch)


def test_shares_of_layers_add_up(totals, tmp_path, monkeypatch):
    out = tmp_path / "totals.jsonl"
    words = ["totals.py", "--out", str(out), "--network", "resnet20", "--width", "4", "--batch", "8"]
    for more in (["--methods", "snip"], ["--steps", "0", "2"]):
        monkeypatch.setattr(sys, "argv", [*words, *more])
        totals.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["score"] for row in rows] == ["snip", "M = 0", "M = 2"]
    assert all(sum(row["shares"].values()) == pytest.approx(1, abs=1e-4) for row in rows)
    assert rows[0]["shares"] != rows[2]["shares"]


@pytest.fixture
def concentration(monkeypatch):
    yield from imported("concentration", monkeypatch)


def test_channels_within_blocks_by_hand(concentration):
    masks = {
        name: torch.zeros_like(w, dtype=torch.bool) for name, w in prospr.prunable(build("resnet20", seed=0)).items()
    }
    for block in range(3):
        masks[f"layer3.{block}.conv1.weight"][: 4 + block, 0, 1, 1] = True  # makes four, five and six channels
        masks[f"layer3.{block}.conv2.weight"][0, 1:5, 1, 1] = True  # reads the second to the fifth
    assert concentration.within(masks) == pytest.approx((3 + 4 + 4) / 3)
    assert concentration.alive(masks, 1) == (0.0, 0.0)


def test_memory_in_sets_of_weights(scale):
    cell = scale.Cell("sets", store="first", steps=3)
    done = scale._in_process(cell)
    assert done.peak_gib / done.weights_gib == pytest.approx(5.1, abs=1)  # docs/scale.md
    assert scale._line(cell, done).endswith("sets")
