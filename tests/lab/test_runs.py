import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import types
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import prospr
from prospr.atomic import write
from prospr.errors import FolderError, PruningError, SettingError
from prospr.lab import experiment as experiments
from prospr.lab import recipes
from prospr.lab import run as running
from prospr.lab.data import Dataset, Split, datasets, digits
from prospr.lab.experiment import USUAL, Data, Experiment, Pruning, Training
from prospr.lab.run import Options, run, run_many
from prospr.lab.runs import loggers, making
from prospr.lab.runs.checkpoints import Checkpoints, DamagedWarning
from prospr.lab.runs.files import BusyError, locked
from prospr.lab.runs.folder import RunFolder, find_run, finished
from prospr.lab.runs.making import Loader, Parts, check, method_of
from prospr.lab.train import Run, evaluate, train

EVERY_EPOCH = Options(save_every=0)
SMALL = {"width": 4}


def small(method="snip", epochs=4, **changes):
    training = Training(epochs=epochs, batch_size=512)
    return Experiment(**{"method": method, "settings": SMALL, "training": training, **changes})


def interrupted(one, folder, epoch):
    """Run until `epoch` epochs are done and all but the last of them saved, and be interrupted."""

    def progress(done, total, text):
        if done == epoch and text != "scoring":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(one, folder, "cpu", progress, options=EVERY_EPOCH)


def weights(result):
    return result.model().state_dict()


def assert_same(left, right):
    assert left.figures == right.figures
    rows = [[{k: v for k, v in row.items() if k != "seconds"} for row in one.epochs] for one in (left, right)]
    assert rows[0] == rows[1]
    a, b = weights(left), weights(right)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return run(small(), tmp_path_factory.mktemp("unbroken"), "cpu", options=EVERY_EPOCH)


# Killed


@pytest.mark.slow
@pytest.mark.parametrize("way", ["random", "writes", "ticket"])
def test_killed_again_and_again_a_run_ends_as_an_unbroken_one(way, tmp_path):
    script = Path(__file__).with_name("kills.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), way, str(tmp_path)], capture_output=True, text=True, env=environment, timeout=400
    )
    assert done.returncode == 0, done.stderr
    killed = int(done.stdout.split()[1])
    assert killed >= 20


def test_resumed_it_ends_the_same(unbroken, tmp_path):
    interrupted(small(), tmp_path, epoch=3)
    place = RunFolder(small(), tmp_path)
    assert not place.done
    assert len(place.metrics()) == 3  # the third was recorded, not saved
    told = []
    result = run(small(), tmp_path, "cpu", lambda done, total, text: told.append((done, total, text.split(":")[0])))
    assert told == [(1, 2, "epoch 3"), (2, 2, "epoch 4")]
    assert json.loads((result.folder / "result.json").read_text())["resumed_at"] == 2
    assert_same(unbroken, result)


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path):
    interrupted(small(), tmp_path, epoch=3)
    (home,) = tmp_path.iterdir()
    (home / "metrics.jsonl").write_text('{"epoch": 1}\n' * 9 + '{"epo')  # as another writer would leave it
    assert [row["epoch"] for row in run(small(), tmp_path, "cpu").epochs] == [1, 2, 3, 4]


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_last_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def flip_header_byte(path):
    content = bytearray(path.read_bytes())
    content[20] ^= 0xFF
    path.write_bytes(bytes(content))


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, flip_last_byte, flip_header_byte, empty])
def test_a_damaged_checkpoint_is_noticed_and_the_previous_used(damage, unbroken, tmp_path):
    interrupted(small(), tmp_path, epoch=3)
    (home,) = tmp_path.iterdir()
    damage(home / "checkpoint.safetensors")
    with pytest.warns(DamagedWarning, match=r"checkpoint\.safetensors: .*went on from the previous"):
        result = run(small(), tmp_path, "cpu")
    assert json.loads((home / "result.json").read_text())["resumed_at"] == 1
    assert "previous checkpoint" in result.notes[0]
    assert_same(unbroken, result)


def test_with_both_damaged_it_begins_again(unbroken, tmp_path):
    interrupted(small(), tmp_path, epoch=3)
    (home,) = tmp_path.iterdir()
    truncate(home / "checkpoint.safetensors")
    flip_last_byte(home / "checkpoint.previous.safetensors")
    with pytest.warns(DamagedWarning, match="began again"):
        result = run(small(), tmp_path, "cpu")
    assert_same(unbroken, result)


def test_a_damaged_checkpoint_does_not_push_out_the_good_one(tmp_path):
    points = Checkpoints(tmp_path, "mark")
    for value in range(2):
        points.save({"x": torch.tensor(value)})
    flip_last_byte(points.latest)
    state, note = points.load()
    assert state["x"] == 0
    assert "checksum" in note
    assert points.read(points.latest)["x"] == 0
    points.save({"x": torch.tensor(5)})
    assert points.read(points.previous)["x"] == 0


def test_a_checkpoint_of_other_masks_is_not_taken(tmp_path):
    Checkpoints(tmp_path, "one").save({"x": torch.zeros(2)})
    state, note = Checkpoints(tmp_path, "other").load()
    assert state is None
    assert "of another run, or of other masks" in note


def test_damaged_masks_are_scored_again(unbroken, tmp_path):
    interrupted(small(), tmp_path, epoch=3)
    (home,) = tmp_path.iterdir()
    flip_last_byte(home / "masks.safetensors")
    with pytest.warns(DamagedWarning, match=r"masks\.safetensors.*scored again"):
        result = run(small(), tmp_path, "cpu")
    assert json.loads((home / "result.json").read_text())["resumed_at"] == 2
    assert_same(unbroken, result)


def test_what_is_scored_is_not_scored_again(unbroken, tmp_path, monkeypatch):
    interrupted(small(), tmp_path, epoch=1)
    monkeypatch.setattr(Parts, "score", lambda *_: pytest.fail("scored again"))
    assert_same(unbroken, run(small(), tmp_path, "cpu"))


def test_what_a_killed_process_left_half_written_goes(tmp_path):
    home = tmp_path / small().identity
    home.mkdir()
    (home / ".result.json.0.tmp").write_text('{"half')
    run(small(epochs=1), tmp_path, "cpu")
    run(small(), tmp_path, "cpu")
    assert not list(home.glob(".*"))


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fill(temporary):
        temporary.write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write(path, fill)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


# Finished


def test_what_is_finished_is_not_run_again(tmp_path, monkeypatch):
    first = run(small(epochs=1), tmp_path, "cpu")
    before = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    monkeypatch.setattr(running, "trainer_for", lambda *_: pytest.fail("trained again"))
    again = run(small(epochs=1), tmp_path, "cpu", lambda *_: pytest.fail("told of progress"))
    assert again == first
    assert {path: path.stat().st_mtime_ns for path in first.folder.iterdir()} == before
    assert list(finished(tmp_path)) == [first]


def test_the_folder(unbroken):
    names = {path.name for path in unbroken.folder.iterdir()}
    assert names == {
        "checkpoint.safetensors",
        "experiment.json",
        "lock",
        "masks.safetensors",
        "metrics.jsonl",
        "result.json",
        "scores.json",
    }
    stored = json.loads((unbroken.folder / "result.json").read_text())
    assert stored["schema"] == 2
    made = stored["environment"]
    assert made["versions"]["torch"] == torch.__version__
    assert made["device"] == "cpu"
    assert made["command"]
    assert unbroken.sizes["kept"] == unbroken.masks.kept
    assert unbroken.seconds["score"] > 0
    assert unbroken.seconds["train"] > 0
    assert unbroken.sizes["parameters"] == sum(p.numel() for p in unbroken.model().parameters())
    assert len(unbroken.epochs) == 4
    assert "test" in unbroken.epochs[-1]
    assert "test" not in unbroken.epochs[0]


def test_the_figure_is_that_of_the_stored_network(unbroken):
    seen = evaluate(unbroken.model(), digits().test)
    assert seen["accuracy"] == unbroken.figure
    model = unbroken.model()
    for name, mask in unbroken.masks.items():
        assert not model.get_parameter(name)[~mask].any()


def test_it_is_the_training_of_train(unbroken):
    parts = Parts(small(), digits(), torch.device("cpu"))
    model, masks = parts.network(), parts.score().masks
    result = train(model, parts.batches(512), digits().test, small().trained_by, masks)
    assert result.test == unbroken.figures
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), unbroken.model().parameters(), strict=True))


def test_found_by_the_first_digits(unbroken, tmp_path):
    folder, name = unbroken.folder.parent, unbroken.folder.name
    assert find_run(name[:4], folder).result() == unbroken
    assert find_run(str(unbroken.folder)).result() == unbroken
    with pytest.raises(FolderError, match="there is no run 'zz'"):
        find_run("zz", folder)
    for other in ("abc1", "abc2"):
        (tmp_path / other).mkdir()
        (tmp_path / other / "experiment.json").write_text("{}")
    with pytest.raises(FolderError, match=r"2 runs .* begin with 'ab'"):
        find_run("ab", tmp_path)


def test_a_result_of_another_schema_is_refused(tmp_path):
    result = run(small("dense", epochs=1), tmp_path, "cpu")
    path = result.folder / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 99}))
    with pytest.raises(FolderError, match="schema 99"):
        run(small("dense", epochs=1), tmp_path, "cpu")
    path.write_text("{")
    with pytest.raises(FolderError, match="damaged"):
        run(small("dense", epochs=1), tmp_path, "cpu")


def test_a_recipe_that_changed_under_its_name_is_noticed(tmp_path, monkeypatch):
    one = Experiment(method="dense", settings=SMALL)
    place = RunFolder(one, tmp_path)
    place.path.mkdir()
    place.begin()
    place.begin()
    changed = {**recipes.recipes(), "digits": recipes.Recipe(12, 64, 0.3)}
    monkeypatch.setattr(experiments, "recipes", lambda: changed)
    with pytest.raises(FolderError, match="'digits' is now"):
        place.begin()


# Shrunk, segmented, validated


def test_the_smaller_network_is_trained(tmp_path):
    one = small(epochs=2, sparsity=0.5, pruning=Pruning(granularity="channel", shrink=True, round_to=2))
    result = run(one, tmp_path, "cpu", options=EVERY_EPOCH)
    plan = prospr.channels.Plan.load(result.folder / "plan.json")
    assert result.sizes["trained_parameters"] == plan.after.parameters < plan.before.parameters
    assert result.sizes["trained_flops"] < result.sizes["flops"]
    assert evaluate(result.model(), digits().test)["accuracy"] == result.figure
    interrupted(one, tmp_path / "again", epoch=2)
    assert_same(result, run(one, tmp_path / "again", "cpu"))


def test_validation_and_a_curve_of_the_test_images(tmp_path):
    training = Training(epochs=3, batch_size=512, evaluate_every=2)
    result = run(small(training=training, data=Data(validation=0.2)), tmp_path, "cpu")
    seen = [sorted({"validation", "test"} & row.keys()) for row in result.epochs]
    assert seen == [[], ["test", "validation"], ["test"]]
    plain = run(small(training=replace(training, evaluate_every=0)), tmp_path, "cpu")
    assert plain.figures != result.figures  # a fifth of the images was left out


def cells(classes=2):
    images = torch.randint(256, (24, 1, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = (images[:, 0] > 127).long() % classes
    split = Split(images, labels, torch.tensor([127.0]), torch.tensor([70.0]))
    return Dataset("isbi2012", split, split, classes)


@pytest.mark.parametrize("loss", [None, "dice"])
def test_segmentation_is_inferred_from_the_data_set(loss, tmp_path, monkeypatch):
    monkeypatch.setattr(making, "load", lambda *args, **kwargs: cells())
    settings = {"width": 16, "depth": 1}
    training = Training(epochs=1, batch_size=8, loss=loss)
    one = Experiment(dataset="isbi2012", method="snip", settings=settings, sparsity=0.5, training=training)
    result = run(one, tmp_path, "cpu")
    assert one.network_name == "unet"
    assert result.headline == "mean_iou"
    assert 0 < result.figure <= 1


def test_images_that_are_streamed(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 2), ("val", 1)):
        for label, grey in (("dark", 40), ("light", 200)):
            home = tmp_path / "images" / part / label
            home.mkdir(parents=True)
            for number in range(count):
                image.new("RGB", (40, 32), (grey + number,) * 3).save(home / f"{number}.png")
    one = Experiment(
        dataset="folder", network="small_convnet", method="snip", sparsity=0.5,
        data=Data(images=str(tmp_path / "images")), pruning=Pruning(score_batch_size=2),
        training=Training(epochs=2, batch_size=2),
    )  # fmt: skip
    result = run(one, tmp_path / "runs", "cpu", options=EVERY_EPOCH)
    assert result.sizes["num_classes"] == 2
    assert result.steps == 4
    interrupted(one, tmp_path / "again", epoch=2)
    assert_same(result, run(one, tmp_path / "again", "cpu"))


def test_every_method_sees_the_same_for_one_seed():
    dense, pruned, other = (
        Parts(one, digits(), torch.device("cpu")) for one in (small("dense"), small("force"), small("dense", seed=1))
    )
    first, second, third = (list(parts.network().parameters()) for parts in (dense, pruned, other))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, third, strict=True))
    for epoch in range(2):
        a, b, c = (next(parts.batches(64).epoch(epoch))[0] for parts in (dense, pruned, other))
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


# Errors and locks


def test_an_error_is_written_down_and_the_run_can_be_run_again(tmp_path, monkeypatch):
    def fail(self, *_):
        raise PruningError("no scores\ntoday")

    with monkeypatch.context() as patch:
        patch.setattr(Parts, "score", fail)
        with pytest.raises(PruningError, match="no scores"):
            run(small(epochs=1), tmp_path, "cpu")
    place = RunFolder(small(epochs=1), tmp_path)
    assert place.error()["error"] == "PruningError: no scores today"
    assert "in fail" in place.error()["traceback"]
    assert run(small(epochs=1), tmp_path, "cpu").error is None
    assert place.error() is None


def test_a_cut_network_is_an_error(tmp_path):
    with pytest.raises(prospr.errors.CollapseError, match="no path is left"):
        run(small("magnitude", sparsity=0.999), tmp_path, "cpu")


def hold(path, ready):
    with locked(Path(path)):
        ready.set()
        time.sleep(60)


def test_a_dead_process_keeps_no_lock(tmp_path):
    one = small("dense", epochs=1)
    home = tmp_path / one.identity
    home.mkdir()
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=hold, args=(str(home / "lock"), ready))
    holder.start()
    try:
        assert ready.wait(60)
        with pytest.raises(BusyError, match=f"process {holder.pid} on"):
            run(one, tmp_path, "cpu")
        os.kill(holder.pid, signal.SIGKILL)
        holder.join()
        assert run(one, tmp_path, "cpu").error is None
    finally:
        holder.kill()
        holder.join()


def test_two_processes_at_once(tmp_path):
    words = ["run", "--method", "dense", "--epochs", "6", "--settings", "width", "4", "--folder", str(tmp_path)]
    command = [sys.executable, "-m", "prospr", *words, "--device", "cpu", "--wait"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [one.communicate(timeout=120)[0] for one in both]
    assert [one.returncode for one in both] == [0, 0]
    assert sorted("[1/6]" in text for text in said) == [False, True]  # one trained, the other waited
    assert said[0][said[0].index("small_convnet") :] == said[1][said[1].index("small_convnet") :]


# Many


def test_many(tmp_path, monkeypatch):
    loads = []
    real = making.load
    monkeypatch.setattr(making, "load", lambda name, *args, **kwargs: loads.append(name) or real(name, *args, **kwargs))
    wanted = [
        small("dense", epochs=1),
        small(epochs=1),
        small("magnitude", epochs=1, sparsity=0.999),  # cuts the network
        small("dense", epochs=1, sparsity=0.5),  # the first again
        small(epochs=1, seed=1),
    ]
    run(wanted[1], tmp_path, "cpu")
    loads.clear()
    told = []
    results = run_many(wanted, tmp_path, "cpu", lambda done, total, text: told.append((done, total)))
    assert loads == ["digits"]
    assert [result.experiment.identity for result in results] == [one.identity for one in wanted]
    assert [result.error is None for result in results] == [True, True, False, True, True]
    assert "CollapseError" in results[2].error
    with pytest.raises(FolderError, match="has no figures"):
        _ = results[2].figure
    assert results[0] == results[3]
    assert told[-1] == (4, 4)
    assert_same(results[1], run(wanted[1], tmp_path / "alone", "cpu"))


def test_what_another_process_is_at_is_waited_for(tmp_path):
    mine, theirs = small("dense", epochs=1), small("dense", epochs=1, seed=1)
    home = tmp_path / theirs.identity
    home.mkdir()
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=hold, args=(str(home / "lock"), ready))
    holder.start()
    done = []

    def progress(runs, total, text):
        done.append(text)
        if runs == 1:  # the other one is done: let go
            holder.kill()

    try:
        assert ready.wait(60)
        results = run_many([theirs, mine], tmp_path, "cpu", progress)
        assert [result.error for result in results] == [None, None]
        assert "seed 0" in done[0]
    finally:
        holder.kill()
        holder.join()


GRAPH = Options(save_every=0, engine="graph")  # the step of a graph, uncaptured: it runs on a CPU too


def trained_together(monkeypatch):
    """How many runs each trainer was made for, from now on."""
    sizes, real = [], running.trainer_for
    monkeypatch.setattr(running, "trainer_for", lambda runs, *rest: sizes.append(len(runs)) or real(runs, *rest))
    return sizes


def test_together_each_gives_what_it_gives_alone(tmp_path, monkeypatch):
    sizes = trained_together(monkeypatch)
    wanted = [small(epochs=2), small("dense", epochs=2), small(epochs=3), small(epochs=2, seed=1)]
    wanted.insert(1, small("magnitude", epochs=2, sparsity=0.999))
    results = run_many(wanted, tmp_path, "cpu", together=3, options=GRAPH)
    assert sizes == [2, 1, 1]  # one of the first three fails; three epochs cannot go with two
    assert [one.error is None for one in results] == [True, False, True, True, True]
    for one, result in zip(wanted, results, strict=True):
        if result.error is None:
            assert_same(result, run(one, tmp_path / "alone", "cpu", options=GRAPH))


def test_together_killed_and_resumed(tmp_path, monkeypatch):
    wanted = [small(seed=seed) for seed in range(3)]

    def stop(done, total, text):
        if done > 1.5:  # after two of four epochs of three runs; the second was not saved
            raise KeyboardInterrupt

    unbroken = run_many(wanted, tmp_path / "unbroken", "cpu", together=3, options=GRAPH)
    with pytest.raises(KeyboardInterrupt):
        run_many(wanted, tmp_path / "killed", "cpu", stop, together=3, options=GRAPH)
    (tmp_path / "killed" / wanted[1].identity / "checkpoint.safetensors").unlink()  # this one begins again
    sizes = trained_together(monkeypatch)
    results = run_many(wanted, tmp_path / "killed", "cpu", together=3, options=GRAPH)
    assert sorted(sizes) == [1, 2]
    for before, after in zip(unbroken, results, strict=True):
        assert_same(before, after)


def test_what_cannot_be_trained_together_is_trained_alone(tmp_path, monkeypatch):
    real = running.trainer_for

    def only_alone(runs, *rest):
        if len(runs) > 1:
            raise RuntimeError("out of memory")
        return real(runs, *rest)

    monkeypatch.setattr(running, "trainer_for", only_alone)
    wanted = [small(epochs=1, seed=seed) for seed in range(2)]
    with pytest.warns(UserWarning, match=r"2 runs could not be trained together \(out of memory\)"):
        results = run_many(wanted, tmp_path, "cpu", together=2, options=GRAPH)
    assert [one.error for one in results] == [None, None]


@pytest.mark.gpu
def test_together_on_a_gpu_each_gives_what_it_gives_alone(tmp_path):
    training = Training(epochs=20, batch_size=64, precision="float32")
    wanted = [small(m, sparsity=0.5, seed=seed, training=training) for m in ("dense", "snip") for seed in range(2)]
    wanted.append(small("magnitude", sparsity=0.999, training=training))
    together = run_many(wanted, tmp_path / "together", "cuda", together=3)
    assert [one.error is None for one in together] == [True, True, True, True, False]
    for one, beside in zip(wanted[:4], together[:4], strict=True):
        alone = run(one, tmp_path / "alone", "cuda")
        assert abs(alone.figure - beside.figure) < 0.05
        assert beside.figure > 0.5


@pytest.mark.gpu
def test_together_on_a_gpu_resumed(tmp_path):
    training = Training(epochs=20, batch_size=64, precision="float32")
    wanted = [small("snip", sparsity=0.5, seed=seed, training=training) for seed in range(3)]

    def stop(done, total, text):
        if "scoring" not in text and done > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_many(wanted, tmp_path, "cuda", stop, together=3, options=EVERY_EPOCH)
    results = run_many(wanted, tmp_path, "cuda", together=3)
    stored = [json.loads((one.folder / "result.json").read_text()) for one in results]
    assert all(0 < one["resumed_at"] < 20 for one in stored)
    assert all(one.figure > 0.5 and len(one.epochs) == 20 for one in results)


# Loggers


class Heard:
    def __init__(self):
        self.begun, self.epochs, self.ends = [], [], []

    def __call__(self, experiment, folder, done):
        self.begun.append((experiment, folder.name, done))
        return self

    def epoch(self, number, figures):
        self.epochs.append((number, sorted(figures)))

    def end(self, figures):
        self.ends.append(sorted(figures))


def test_a_logger_is_told_of_every_epoch(tmp_path):
    heard = Heard()
    one = small("dense", epochs=2)
    run(one, tmp_path, "cpu", options=Options(loggers=[heard]))
    assert heard.begun == [(one, one.identity, 0)]
    assert heard.epochs == [(1, ["loss", "lr", "seconds", "train"]), (2, ["loss", "lr", "seconds", "train"])]
    assert heard.ends == [["accuracy", "loss", "top5"]]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_logger_that_is_not_installed(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match=f"{name} was asked for and is not installed; pip install {name}"):
        getattr(loggers, name)()


def test_what_the_loggers_are_sent(tmp_path, monkeypatch):
    sent = []

    class Writer:
        def __init__(self, folder, purge_step):
            sent.append((Path(folder).name, purge_step))

        def add_scalar(self, name, value, step):
            sent.append((name, step))

        def close(self):
            sent.append("closed")

    class Session:
        summary = types.SimpleNamespace(update=lambda figures: sent.append(sorted(figures)))

        def log(self, figures, step):
            sent.append(("log", step))

        def finish(self):
            sent.append("finished")

    def init(**settings):
        sent.append((settings["id"], settings["resume"]))
        return Session()

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    one = small("dense", epochs=1)
    run(one, tmp_path, "cpu", options=Options(loggers=[loggers.tensorboard(), loggers.wandb()]))
    assert ("tensorboard", 1) in sent
    assert ("loss", 1) in sent
    assert ("final/accuracy", 0) in sent
    assert (one.identity, "allow") in sent
    assert ("log", 1) in sent
    assert ["final/accuracy", "final/loss", "final/top5"] in sent
    assert {"closed", "finished"} <= {one for one in sent if isinstance(one, str)}


# Experiments


def test_identities_stand():
    """People's folders are named by them: a change of these is a change of SCHEMA."""
    assert Experiment().identity == "3c3cb2fe4904beff"
    full = Experiment(
        dataset="cifar10", method="force", sparsity=0.98, seed=3, settings={"width": 8, "shortcut": "B"},
        pruning=Pruning(rounds=20), training=Training(lr=0.05, drops=(50, 70), epochs=80), data=Data(validation=0.1),
    )  # fmt: skip
    assert full.identity == "8cdb847c38577de2"


def test_a_new_field_leaves_old_identities(monkeypatch):
    @dataclass(frozen=True)
    class Longer(Training):
        label_smoothing: float = 0.0

    @dataclass(frozen=True)
    class Newer(Experiment):
        training: Longer = field(default_factory=Longer)
        distilled: bool = False

    old = Experiment(sparsity=0.5, training=Training(lr=0.3))
    new = Newer(sparsity=0.5, training=Longer(lr=0.3))
    assert new.identity == old.identity
    assert Newer(sparsity=0.5, training=Longer(lr=0.3, label_smoothing=0.1)).identity != old.identity
    assert replace(new, distilled=True).identity != old.identity


def test_every_value_is_part_of_the_identity():
    other = {
        Data: {"size": 64, "validation": 0.5, "pad": 3, "flip": True},
        Pruning: {
            "scope": "layer", "granularity": "channel", "keep_per_layer": 1, "budget": "flops", "round_to": 8,
            "per_flop": True, "shrink": True, "score_batch_size": 32, "rounds": 3, "steps": 1, "inner_lr": 0.5,
            "inner_momentum": 0.5, "order": "first", "same_batch": True, "weights": "redraw", "after_training": True,
            "rewind": 7, "redraw": True, "check": "shuffled",
        },
        Training: {
            "epochs": 13, "batch_size": 32, "lr": 0.01, "momentum": 0.5, "weight_decay": 0.0, "nesterov": True,
            "drops": (3,), "drop_factor": 0.5, "warmup": 1, "schedule": "cosine", "precision": "bf16",
            "channels_last": True, "loss": "cross-entropy", "evaluate_every": 2, "byol": 3,
        },
        Experiment: {
            "dataset": "mnist", "network": "resnet20", "settings": {"width": 2}, "method": "snip", "sparsity": 0.5,
            "seed": 1, "recipe": "prospr-cifar",
        },
    }  # fmt: skip
    parts = {Data: "data", Pruning: "pruning", Training: "training"}
    seen = {Experiment().identity}
    for kind, values in other.items():
        skipped = {"images"} if kind is Data else {"data", "pruning", "training"}
        assert {one.name for one in fields(kind)} - skipped - values.keys() == set()
        for name, value in values.items():
            changed = {name: value} if kind is Experiment else {parts[kind]: kind(**{name: value})}
            seen.add(Experiment(**changed).identity)
    folder = Experiment(dataset="folder", data=Data(images="a")), Experiment(dataset="folder", data=Data(images="b"))
    assert folder[0].identity != folder[1].identity
    assert len(seen) == sum(map(len, other.values()))  # and cross-entropy is the loss in any case


def test_one_experiment_said_in_two_ways():
    plain = Experiment()
    for same in (
        Experiment(network="small_convnet", recipe="digits"),
        Experiment(training=Training(epochs=12, lr=0.1, drops=(8, 11))),
        Experiment(data=Data(pad=1, flip=False)),
    ):
        assert same.identity == plain.identity
    assert Experiment(training=Training(loss="cross-entropy")).identity == plain.identity
    dense = Experiment(method="dense")
    assert Experiment(method="dense", sparsity=0.5, pruning=Pruning(rounds=3)).identity == dense.identity
    assert Experiment(training=Training(lr=1)).identity == Experiment(training=Training(lr=1.0)).identity
    turned = Experiment(settings={"a": 1, "b": 2}), Experiment(settings={"b": 2, "a": 1})
    assert turned[0].identity == turned[1].identity
    assert len({plain, Experiment(network="small_convnet")}) == 2  # they are not equal, though of one identity


def test_labels_tell_runs_apart():
    structured = Experiment(pruning=Pruning(granularity="channel", shrink=True))
    assert structured.label == "small_convnet, digits, prospr 90 % by channel shrunk, seed 0"
    assert Experiment(method="dense").label == "small_convnet, digits, dense, seed 0"
    ways = [Pruning(shrink=True, weights=weights) for weights in ("keep", "rescale", "redraw")]
    ways += [Pruning(after_training=True), Pruning(after_training=True, rewind=0), Pruning()]
    labels = {Experiment(pruning=way).label for way in ways} | {Experiment(training=Training(byol=9)).label}
    assert len(labels) == 7


def test_fewer_epochs_move_the_drops():
    assert Experiment(dataset="cifar10", training=Training(epochs=20)).trained_by.drops == (10, 15)
    assert Experiment(training=Training(schedule="cosine")).trained_by.drops == ()
    assert Experiment(training=Training(epochs=20, drops=(3,))).trained_by.drops == (3,)


def test_what_is_usual_is_known_for_every_data_set():
    assert set(USUAL) == set(datasets())
    for name, usual in USUAL.items():
        entry = datasets()[name]
        assert usual.network in making.networks()
        assert usual.recipe in recipes.recipes()
        assert (entry.task == "segmentation") == (name in experiments.SEGMENTED)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dataset": "cifar"}, "unknown data set 'cifar'; known names: digits, cifar10"),
        ({"recipe": "cifar"}, "unknown recipe 'cifar'; known names: auto, prospr-cifar"),
        ({"sparsity": 1.0}, r"sparsity=1\.0"),
        ({"sparsity": -0.1}, r"sparsity=-0\.1"),
        ({"sparsity": "most"}, "sparsity='most'"),
        ({"seed": -1}, "seed=-1"),
        ({"dataset": "folder"}, "belong together"),
        ({"data": Data(images="x")}, "belong together"),
        ({"data": Data(validation=1.0)}, r"data\.validation=1\.0"),
        ({"data": Data(pad=-1)}, r"data\.pad=-1: use a whole number, 0 or more"),
        ({"pruning": Pruning(rounds=0)}, r"pruning\.rounds=0"),
        ({"pruning": Pruning(score_batch_size=1.5)}, r"score_batch_size=1\.5"),
        ({"pruning": Pruning(inner_lr=0.0)}, r"inner_lr=0\.0: use a number above 0"),
        ({"training": Training(epochs=0)}, r"training\.epochs=0"),
        ({"training": Training(lr=-1.0)}, r"training\.lr=-1\.0"),
        ({"training": Training(drops=(99,))}, "lie outside the training"),
        ({"training": Training(loss="dice")}, "is for segmentation"),
    ],
)
def test_impossible_values(values, message):
    with pytest.raises(ValueError, match=message):
        Experiment(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"network": "resnet21"}, "unknown network 'resnet21'; known names: small_convnet"),
        ({"network": "timm:"}, "expected 'timm:NAME'"),
        ({"settings": {"depth": 3}}, "has no setting 'depth'; it has num_classes, width"),
        ({"method": "snap"}, "unknown method 'snap'; known names: dense, prospr"),
        ({"data": Data(size=32)}, r"data\.size=32: digits has images of"),
        ({"method": "snip", "pruning": Pruning(steps=2)}, r"pruning\.steps is for ProsPr"),
        ({"pruning": Pruning(granularity="rows")}, "granularity='rows'"),
        ({"pruning": Pruning(round_to=8)}, r"pruning\.round_to is for channels"),
        ({"pruning": Pruning(granularity="2:4")}, r"prunes 0\.5, and sparsity is 0\.9"),
        ({"pruning": Pruning(granularity="channel", scope="erk")}, "is for single weights"),
    ],
)
def test_unknown_names_are_errors_before_anything_runs(values, message, tmp_path):
    with pytest.raises(SettingError if "timm:" not in values.values() else ValueError, match=message):
        run(Experiment(**values), tmp_path / "runs", "cpu")
    assert not (tmp_path / "runs").exists()


def test_settings_of_the_method():
    changed = method_of(Experiment(pruning=Pruning(steps=1, inner_lr=0.2, inner_momentum=0.9, order="first", rounds=5)))
    assert changed.rule.rounds == 5
    score = changed.rule.score
    assert (score.steps, score.lr, score.momentum, score.order) == (1, 0.2, 0.9, "first")
    assert not score.same_batch
    assert method_of(Experiment(pruning=Pruning(same_batch=True))).rule.score.same_batch
    assert method_of(Experiment(method="force", pruning=Pruning(rounds=7))).rule.recover
    assert method_of(Experiment(method="erk")).scope == "erk"
    assert method_of(Experiment(pruning=Pruning(granularity="4x4"))).granularity == (4, 4)
    check(Experiment(method="3sp", pruning=Pruning(round_to=8)))
    check(Experiment(sparsity=0.5, pruning=Pruning(granularity="2:4")))


def test_an_experiment_of_a_newer_release():
    with pytest.raises(SettingError, match="Training has no field 'colour'"):
        Experiment.from_dict({"training": {"colour": 1}})
    with pytest.raises(SettingError, match="no table"):
        Experiment.from_dict({"training": 3})
    assert Experiment.from_dict({}) == Experiment()


def test_a_package_network_gets_the_data_sets_ends(tmp_path):
    one = Experiment(network="prospr.lab.models:vgg16", settings={"width": 4})
    model = making.network(one, num_classes=7, in_channels=2)
    assert model(torch.zeros(2, 2, 32, 32)).shape == (2, 7)


def test_unknown_devices():
    with pytest.raises(SettingError, match="'tpuu' is not known"):
        running.choose_device("tpuu")
    if not torch.cuda.is_available():
        with pytest.raises(SettingError, match="no GPU"):
            running.choose_device("cuda")


def test_the_loader_loads_once(monkeypatch):
    loader = Loader(torch.device("cpu"))
    first, again = loader(small()), loader(small("dense", seed=4))
    assert first is again
    assert loader(small(data=Data(validation=0.1))).validation is not None


def test_the_last_checkpoint_holds_all_a_resumed_run_needs(unbroken):
    state = load_file(unbroken.folder / "checkpoint.safetensors")
    assert int(state["epoch"]) == 4
    parts = Parts(small(), digits(), torch.device("cpu"))
    model = parts.network()
    Run(model, parts.batches(512), small().trained_by, unbroken.masks)
    assert {name.removeprefix("model.") for name in state if name.startswith("model.")} == set(model.state_dict())


def test_ntk_sap_draws_weights_as_the_lab_does():
    """PyTorch's own convolutions start from a narrow uniform distribution, the lab's from Kaiming's normal one."""
    one = Experiment(method="ntk-sap")
    model = making.network(one, 10, 1)
    before = model.conv2.weight.std().item()
    making.method_of(one).rule.score.init(model)
    assert model.conv2.weight.std().item() == pytest.approx(before, rel=0.1)
    model.conv2.reset_parameters()
    assert model.conv2.weight.std().item() < 0.7 * before


def test_links_pipes_and_devices_are_written_to_and_not_replaced(tmp_path):
    target, link, pipe = tmp_path / "target.txt", tmp_path / "link.txt", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    write(link, lambda path: path.write_text("new"))
    assert link.is_symlink()
    assert target.read_text() == "new"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True)
    write(pipe, lambda path: path.write_text("through"))
    assert reader.communicate(timeout=20)[0] == "through"
    assert pipe.is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.txt", "pipe", "target.txt"]


def test_a_finished_run_whose_description_is_deleted_is_described_again(tmp_path):
    one = small(epochs=1)
    run(one, tmp_path, "cpu")
    stored = tmp_path / one.identity / "experiment.json"
    content = stored.read_text()
    for again in (lambda: run(one, tmp_path, "cpu"), lambda: run_many([one], tmp_path, "cpu")):
        stored.unlink()
        again()
        assert stored.read_text() == content
    assert len(list(finished(tmp_path))) == 1


def test_a_damaged_curve_is_named(tmp_path):
    one = small(epochs=1)
    run(one, tmp_path, "cpu")
    curve = tmp_path / one.identity / "metrics.jsonl"
    curve.write_text('{"epoch": 1, "lo')
    with pytest.raises(FolderError, match=r"metrics\.jsonl: the file is damaged .* delete it"):
        find_run(one.identity, tmp_path).result()
    (found,) = run_many([one], tmp_path, "cpu")
    assert "metrics.jsonl" in found.error
    curve.unlink()
    assert run(one, tmp_path, "cpu").figure > 0


@pytest.mark.parametrize("error", [KeyError("k"), IndexError("i"), AttributeError("a"), OSError("o"), AssertionError()])
def test_any_error_of_one_run_lets_the_others_go_on(error, tmp_path, monkeypatch):
    score = Parts.score

    def failing(self, *args, **kwargs):
        if self.experiment.method == "snip":
            raise error
        return score(self, *args, **kwargs)

    monkeypatch.setattr(Parts, "score", failing)
    results = run_many([small("snip", 1), small("magnitude", 1)], tmp_path, "cpu")
    assert [result.error is None for result in results] == [False, True]


def test_a_damaged_result_of_one_run_lets_the_others_go_on(tmp_path):
    first, second = small("snip", 1), small("magnitude", 1)
    run(first, tmp_path, "cpu")
    (tmp_path / first.identity / "result.json").write_text("{")
    results = run_many([first, second], tmp_path, "cpu")
    assert "result.json: the file is damaged" in results[0].error
    assert results[1].error is None
