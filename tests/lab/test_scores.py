"""What runs keep of their scores: counts that agree with the masks, and with scores taken anew."""

import json
import math
from itertools import pairwise

import pytest
import torch

import prospr
from prospr.lab.data import digits
from prospr.lab.experiment import Experiment, Pruning, Training
from prospr.lab.report.histograms import histograms, power, read_histogram, ticks
from prospr.lab.report.setups import setups
from prospr.lab.run import run
from prospr.lab.runs import making
from prospr.lab.runs.making import Parts
from prospr.lab.runs.memory import Peak
from prospr.lab.runs.records import gather
from prospr.lab.runs.scores import BINS, summarise_scores

SHORT = Training(epochs=1, batch_size=512)


def experiment(method, sparsity=0.8, **pruning):
    return Experiment(
        method=method, sparsity=sparsity, settings={"width": 4}, training=SHORT, pruning=Pruning(**pruning)
    )


def scored(method, **pruning):
    parts = Parts(experiment(method, **pruning), digits(), torch.device("cpu"))
    found = parts.score()
    return parts, found.masks, found.summary()


def counted(summary, part):
    """{layer: how many of `part`, zeros and negative ones included}."""
    at = ("kept", "removed").index(part)
    return {
        name: sum(layer[part]) + layer["zeros"][at] + sum(layer.get("negative", {}).get(part, ()))
        for name, layer in summary["layers"].items()
    }


@pytest.mark.parametrize("method", ["prospr-one-shot", "snip", "grasp", "magnitude", "random", "phew"])
def test_counts_are_those_of_scores_taken_anew(method):
    parts, masks, summary = scored(method)
    batches = parts.batches(256)
    scores = prospr.score(parts.network(), batches, method=method, loss=parts.task.loss, seed=0)
    assert counted(summary, "kept") == {name: int(mask.sum()) for name, mask in masks.items()}
    assert counted(summary, "removed") == {name: int((~mask).sum()) for name, mask in masks.items()}
    cut = prospr.masks.threshold(scores, masks)
    assert summary["smallest_kept"] == pytest.approx(cut.smallest_kept)
    assert summary["largest_removed"] == pytest.approx(cut.largest_pruned)
    edges = summary["edges"]
    for name, s in scores.items():
        sizes = s[(s > 0) & masks[name]].abs().double().log10()
        inside = [int(((sizes >= a) & (sizes < b)).sum()) for a, b in pairwise(edges)]
        assert sum(abs(a - b) for a, b in zip(inside[1:], summary["layers"][name]["kept"][1:], strict=True)) <= 2
    assert len(edges) - 1 <= BINS + 2


def test_no_bin_has_both_sides_of_a_threshold():
    _, _, summary = scored("snip")
    both = [
        sum(layer["kept"][i] for layer in summary["layers"].values())
        and sum(layer["removed"][i] for layer in summary["layers"].values())
        for i in range(len(summary["edges"]) - 1)
    ]
    assert not any(both)


@pytest.mark.parametrize(("method", "left"), [("synflow", 0.8), ("force", 1.0)])
def test_rounds_are_shown_by_their_last(method, left):
    """What stays pruned is no part of the last choice; where weights can return, all are."""
    _, masks, summary = scored(method, rounds=2)
    total = masks.total
    assert summary["rounds"] == 2
    assert sum(counted(summary, "kept").values()) == masks.kept
    chosen_from = sum(sum(counted(summary, part).values()) for part in ("kept", "removed"))
    share = left if left == 1.0 else 0.2**0.5  # the density after the first of two exponential rounds
    assert chosen_from == pytest.approx(share * total, abs=1)


@pytest.mark.parametrize("rounds", [None, 3])
def test_channels_are_counted_as_channels(rounds):
    parts, masks, summary = scored("snip", granularity="channel", rounds=rounds)
    groups = prospr.channels.groups(parts.network(), parts.example)
    removed = groups.removed(masks)
    kept = {name: sum(g not in removed for g in ids) for name, ids in groups.sets.items()}
    assert summary["unit"] == "channels"
    assert counted(summary, "kept") == kept


def test_nothing_is_scored_twice(tmp_path, monkeypatch):
    asked = []
    real = making.Watched.score
    monkeypatch.setattr(making.Watched, "score", lambda self, problem: asked.append(1) or real(self, problem))
    one = experiment("snip")
    result = run(one, tmp_path, "cpu")
    assert asked == [1]
    stored = json.loads((result.folder / "scores.json").read_text())
    assert stored["identity"] == one.identity
    assert (result.folder / "scores.json").stat().st_size < 20_000
    (result.folder / "result.json").unlink()
    (result.folder / "scores.json").unlink()
    assert run(one, tmp_path, "cpu").figures == result.figures
    assert asked == [1]  # the masks are there
    assert not (result.folder / "scores.json").exists()


def test_masks_are_what_they_are_without_a_watcher():
    parts, masks, _ = scored("force", rounds=3)
    method = prospr.Iterative(prospr.Snip(), rounds=3, recover=True)
    alone = prospr.prune(parts.network(), parts.batches(256), 0.8, method=method, loss=parts.task.loss)
    assert masks == alone


def test_scores_of_zero_and_below_have_their_place():
    scores = {"w": torch.tensor([-100.0, -1.0, 0.0, 1.0, 100.0])}
    kept, everything = {"w": scores["w"] > 0.5}, {"w": torch.ones(5, dtype=torch.bool)}
    stored = {"unit": "weights", "rounds": 1, **summarise_scores(scores, kept, everything)}
    one = read_histogram("x", stored)
    assert one.signed
    assert one.zeros == (0, 1)
    assert one.total == 5
    assert one.clean
    places = [one.place(score) for score in scores["w"].tolist()]
    assert places == sorted(places)
    assert (places[0], places[-1]) == pytest.approx((0, 1), abs=0.03)
    assert sum(one.kept) == 2
    filled = [i for i, count in enumerate(one.removed) if count]
    assert max(filled) < len(one.removed) / 2 <= min(i for i, count in enumerate(one.kept) if count)
    assert [round(t, 6) for t in ticks(one)] == [-100.0, -10.0, -1.0, 100.0, 10.0, 1.0]
    assert power(3) == "10³"


def test_all_alike_and_all_zero_are_no_error():
    everything = {"w": torch.ones(4, dtype=torch.bool)}
    for value in (0.0, 2.0):
        scores = {"w": torch.full((4,), value)}
        told = summarise_scores(scores, {"w": torch.tensor([True, True, False, False])}, everything)
        assert sum(told["layers"]["w"]["kept"]) + told["layers"]["w"]["zeros"][0] == 2
        assert all(map(math.isfinite, told["edges"]))
        assert json.loads(json.dumps(told, allow_nan=False)) == told
    told = summarise_scores({"w": torch.ones(4)}, everything, everything)
    assert told["largest_removed"] is None


def test_a_layers_own_threshold_is_not_drawn(tmp_path):
    run(experiment("snip", scope="layer"), tmp_path, "cpu")
    (setup,) = setups(gather([tmp_path]).records)
    (one,) = histograms(setup).histograms
    assert not one.clean


def test_memory_is_left_out_on_a_cpu(tmp_path):
    assert run(experiment("snip"), tmp_path, "cpu").memory == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_on_a_gpu(tmp_path):
    device = torch.device("cuda")
    peak = Peak(device)
    held = torch.empty(10_000_000, dtype=torch.uint8, device=device)
    del held
    assert 10_000_000 <= peak.added < 20_000_000
    result = run(experiment("snip"), tmp_path, device)
    assert result.memory["together"] == 1
    assert result.memory["score"] > 0
    assert result.memory["train"] >= sum(p.numel() * 4 for p in result.model().parameters())
