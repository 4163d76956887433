"""Sanity checks as experiments: what is trained is what the check says, and the run tells that it is one."""

from dataclasses import replace

import pytest
import torch

import prospr
from prospr.errors import SettingError
from prospr.lab.data import digits
from prospr.lab.experiment import CHECKS, Experiment, Pruning, Training
from prospr.lab.results import checks_of, load, means
from prospr.lab.run import run, run_many
from prospr.lab.runs.making import Parts, check

SHORT = Training(epochs=1, batch_size=512)


def experiment(name=None, method="snip", **changes):
    pruning = Pruning(check=name, **changes)
    return Experiment(method=method, sparsity=0.8, seed=1, settings={"width": 4}, training=SHORT, pruning=pruning)


def parts(one):
    return Parts(one, digits(), torch.device("cpu"))


@pytest.fixture(scope="module")
def found():
    return parts(experiment()).score().masks


def same_weights(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_shuffled_keeps_as_many_in_every_layer_elsewhere(found):
    one = parts(experiment("shuffled"))
    moved = one.score().masks
    assert moved.densities() == found.densities()
    assert moved != found
    assert moved == prospr.sanity.shuffle(found, seed=1)
    assert same_weights(one.start(), one.network())


def test_redrawn_is_the_mask_on_other_weights(found):
    one = parts(experiment("redrawn"))
    assert one.score().masks == found
    assert same_weights(one.network(), parts(experiment()).network())
    assert not same_weights(one.start(), one.network())
    assert same_weights(one.start(), one.start())


def test_inverted_keeps_what_the_method_would_prune_first(found):
    moved = parts(experiment("inverted")).score().masks
    assert moved.kept == found.kept
    assert not any(bool((moved[name] & found[name]).any()) for name in found)


def test_what_is_trained_is_the_check(tmp_path, found):
    result = run(experiment("redrawn"), tmp_path, "cpu")
    assert result.masks == found
    model, started = result.model(), parts(experiment("redrawn")).start()
    assert all(bool((p[~found[name]] == 0).all()) for name, p in model.named_parameters() if name in found)
    untouched = {name: p for name, p in started.named_parameters() if name in found}
    moved = [(model.get_parameter(name) - p)[found[name]].abs().mean().item() for name, p in untouched.items()]
    assert max(moved) < 0.1  # one epoch from those weights, not from the others
    plain = parts(experiment()).network()
    assert all(
        (model.get_parameter(n) - plain.get_parameter(n))[found[n]].abs().mean().item() > 2 * m
        for n, m in zip(untouched, moved, strict=True)
    )


def test_a_check_beside_what_it_checks_is_not_scored_again(tmp_path, found, monkeypatch):
    plain = run(experiment(), tmp_path, "cpu")
    monkeypatch.setattr(Parts, "score", lambda *_: pytest.fail("it was scored again"))
    shuffled, redrawn = (run(experiment(name), tmp_path, "cpu") for name in ("shuffled", "redrawn"))
    assert shuffled.masks == prospr.sanity.shuffle(found, seed=1)
    assert redrawn.masks == found
    assert shuffled.seconds["score"] == redrawn.seconds["score"] == plain.seconds["score"]  # what the mask has cost
    with pytest.raises(pytest.fail.Exception, match="scored again"):
        run(experiment("inverted"), tmp_path, "cpu")  # of other scores
    with pytest.raises(pytest.fail.Exception, match="scored again"):
        run(replace(experiment("shuffled"), seed=2), tmp_path, "cpu")  # the other seed's run is not there


def test_a_check_beside_a_damaged_run_is_scored(tmp_path, found):
    plain = run(experiment(), tmp_path, "cpu")
    path = plain.folder / "masks.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    result = run(experiment("redrawn"), tmp_path, "cpu")
    assert result.masks == found
    assert not result.notes  # the damage is not its own


def test_a_check_that_cuts_the_network_has_no_masks_of_the_run_beside_it(tmp_path):
    plain = replace(experiment(), sparsity=0.995, method="synflow")
    first, result = run_many([plain, replace(plain, pruning=Pruning(check="shuffled"))], tmp_path, "cpu")
    assert first.error is None
    assert result.error.startswith("CollapseError: no path is left")
    assert not (result.folder / "masks.safetensors").exists()


def test_a_check_is_an_experiment_of_its_own_and_the_others_are_what_they_were():
    plain = experiment()
    assert plain.identity == "8e352cff48050484"
    assert len({plain.identity, *(experiment(name).identity for name in CHECKS)}) == 4
    dense = replace(plain, method="dense")
    assert replace(dense, pruning=Pruning(check="shuffled")).identity == dense.identity
    assert experiment("shuffled").label == "small_convnet, digits, snip 80 % shuffled, seed 1"


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (experiment("inverted", "force"), "'force' scores anew in each of its 60 rounds"),
        (experiment("inverted", rounds=3), "no one score to invert"),
        (experiment("shuffled", "3sp"), "moves single weights, and channel go whole"),
        (experiment("shuffled", granularity="4x4"), "moves single weights"),
    ],
)
def test_checks_that_cannot_be_are_refused_before_anything_runs(one, message):
    with pytest.raises(SettingError, match=message):
        check(one)


def test_an_unknown_check_is_refused():
    with pytest.raises(SettingError, match="'upside-down' is not known; use shuffled, redrawn, inverted"):
        Experiment(pruning=Pruning(check="upside-down"))


def test_a_check_that_cuts_the_network_is_a_run_that_failed(tmp_path):
    one = replace(experiment("shuffled"), sparsity=0.995, method="synflow")
    (result,) = run_many([one], tmp_path, "cpu")
    assert result.error.startswith("CollapseError: no path is left")


def test_results_tell_checks_from_methods(tmp_path):
    wanted = [experiment(), experiment("shuffled"), experiment("inverted")]
    run_many(wanted, tmp_path, "cpu")
    rows = load(tmp_path)
    assert [(row.method, row.check) for row in rows] == [("snip", ""), ("snip", "inverted"), ("snip", "shuffled")]
    assert checks_of(rows) == [("snip", 0.8, "inverted"), ("snip", 0.8, "shuffled")]
    told = means(rows, "snip")
    assert [row["method"] for row in told] == ["snip", "snip, inverted", "snip, shuffled"]
    assert [row["n"] for row in told] == [1, 1, 1]
    assert not list(tmp_path.glob(f"{wanted[1].identity}/scores.json"))  # those of a check would be another method's
