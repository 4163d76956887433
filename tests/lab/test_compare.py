from dataclasses import replace

import pytest
import torch

import prospr
from prospr.lab import compare as subject
from prospr.lab.compare import Comparison, compare
from prospr.lab.data import digits
from prospr.lab.models import build
from prospr.lab.recipes import Recipe
from prospr.lab.results import checks_of


@pytest.fixture(scope="module")
def comparison():
    return Comparison(
        network=lambda seed: build("small_convnet", seed=seed, width=4),
        data=digits(),
        recipe=Recipe(epochs=1, batch_size=256, lr=0.1),
        methods={"snip": "snip", "random": "random"},
        sparsities=(0.5, 0.9),
        seeds=(0, 1),
        checks=(),
    )


@pytest.fixture(scope="module")
def rows(comparison):
    return compare(comparison)


def test_one_row_a_run_with_exact_counts(comparison, rows):
    assert len(rows) == comparison.runs == 2 * (1 + 2 * 2)
    assert [(row.method, row.sparsity, row.seed) for row in rows[:5]] == [
        ("dense", 0.0, 0), ("snip", 0.5, 0), ("snip", 0.9, 0), ("random", 0.5, 0), ("random", 0.9, 0),
    ]  # fmt: skip
    model = build("small_convnet", width=4)
    weights = prospr.prunable(model)
    total = sum(weight.numel() for weight in weights.values())
    for row in rows:
        assert row.error is None
        assert 0 <= row.accuracy <= 1
        if row.method != "dense":
            assert (row.kept, row.total) == (round((1 - row.sparsity) * total), total)
            kept = sum(density * weights[layer].numel() for layer, density in row.layers.items())
            assert kept == pytest.approx(row.kept)


def test_all_methods_of_a_seed_start_alike_and_see_the_same_batches(comparison, monkeypatch):
    seen = []

    def spy(model, train_batches, test, recipe, masks=None, progress=None):
        state = torch.cat([p.detach().flatten() for p in model.parameters()])
        data = torch.cat([labels for _, labels in train_batches.epoch(3)])
        seen.append((train_batches.seed, state, data))
        return real(model, train_batches, test, recipe, masks, progress)

    real = subject.train
    monkeypatch.setattr(subject, "train", spy)
    compare(comparison)
    for seed in (0, 1):
        runs = [(state, data) for s, state, data in seen if s == seed]
        assert len(runs) == 5
        assert all(torch.equal(state, runs[0][0]) and torch.equal(data, runs[0][1]) for state, data in runs)
    assert not torch.equal(seen[0][1], seen[-1][1])


def test_a_comparison_gives_the_same_rows_again(comparison, rows):
    def plain(row):
        return replace(row, score_seconds=None, train_seconds=None)

    one_seed = replace(comparison, seeds=(1,))
    assert [plain(row) for row in compare(one_seed)] == [plain(row) for row in rows if row.seed == 1]


def test_a_network_is_scored_once_for_all_sparsities(rows):
    times = {row.score_seconds for row in rows if row.method == "snip" and row.seed == 0}
    assert len(times) == 1
    masks = [row.layers for row in rows if row.method == "snip" and row.seed == 0]
    assert all(masks[0][layer] >= masks[1][layer] for layer in masks[0])


def test_a_methods_own_scope_is_used(comparison):
    rows = compare(replace(comparison, methods={"erk": "erk"}, sparsities=(0.8,), seeds=(0,)))
    densities = rows[1].layers
    assert densities["conv1.weight"] > 2 * densities["conv4.weight"]


def test_a_method_that_fails_is_a_row_with_its_error(comparison):
    class Broken(prospr.Score):
        def saliency(self, problem):
            raise prospr.PruningError("conv1.weight: nothing to rank")

    methods = {"broken": Broken(), "random": "random"}
    rows = compare(replace(comparison, methods=methods, seeds=(0,)))
    broken = [row for row in rows if row.method == "broken"]
    assert [row.sparsity for row in broken] == [0.5, 0.9]
    assert all(row.error == "PruningError: conv1.weight: nothing to rank" and row.accuracy is None for row in broken)
    assert all(row.accuracy is not None for row in rows if row.method == "random")


def test_an_impossible_sparsity_fails_alone(comparison):
    rows = compare(replace(comparison, methods={"random": "random"}, sparsities=(0.5, 1.5), seeds=(0,)))
    assert rows[1].accuracy is not None
    assert "sparsity=1.5" in rows[2].error


def test_progress_counts_every_run_and_every_epoch(comparison):
    told = []
    twice = replace(comparison, recipe=replace(comparison.recipe, epochs=2), methods={"random": "random"}, seeds=(0,))
    compare(twice, progress=lambda done, total, text: told.append((done, total, text)))
    done = [d for d, _, _ in told]
    assert done == sorted(done)
    assert {d for d in done if d == int(d) and d > 0} == {1, 2, 3}
    assert 0.5 in done
    assert all(total == 3 for _, total, _ in told)
    assert told[-1][2].startswith("random 90 % seed 0: ")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_comparison_on_a_gpu(comparison):
    there = replace(
        comparison,
        network=lambda seed: comparison.network(seed).cuda(),
        data=comparison.data.to("cuda"),
        methods={"prospr": "prospr", "random": "random"},
        seeds=(0,),
    )
    rows = compare(there)
    assert [row.error for row in rows] == [None] * 5


def test_sanity_checks_are_run_by_default_on_the_first_method_at_the_highest_sparsity(comparison, rows):
    assert Comparison.__dataclass_fields__["checks"].default == ("shuffled", "redrawn", "inverted")
    checked = replace(comparison, checks=("shuffled", "redrawn", "inverted"), seeds=(0,))
    trained = []
    original = subject.train

    def watching(model, batches, test, recipe, masks, progress):
        start = model.state_dict()["conv1.weight"].clone()
        trained.append((start, None if masks is None else dict(masks)))
        return original(model, batches, test, recipe, masks, progress)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subject, "train", watching)
        got = compare(checked)
    assert len(got) == checked.runs == 8
    assert checks_of(got) == [("snip", 0.9, check) for check in ("shuffled", "redrawn", "inverted")]
    plain = [row for row in got if not row.check]
    assert [(r.method, r.sparsity, r.accuracy) for r in plain] == [
        (r.method, r.sparsity, r.accuracy) for r in rows if r.seed == 0
    ]  # the checks change nothing else
    by_check = {row.check or (row.method, row.sparsity): trained[i] for i, row in enumerate(got)}
    (start, found) = by_check["snip", 0.9]
    assert torch.equal(by_check["shuffled"][0], start)
    assert not torch.equal(by_check["redrawn"][0], start)
    assert all(torch.equal(by_check["redrawn"][1][n], m) for n, m in found.items())
    for n, m in found.items():
        assert by_check["shuffled"][1][n].sum() == m.sum()
    assert any(not torch.equal(by_check["shuffled"][1][n], m) for n, m in found.items())
    assert not any(bool((by_check["inverted"][1][n] & m).any()) for n, m in found.items())


def test_an_unknown_check_is_refused(comparison):
    with pytest.raises(ValueError, match="unknown check 'upside-down'; known checks: shuffled, redrawn, inverted"):
        replace(comparison, checks=("upside-down",))


def test_methods_that_work_in_rounds_are_compared_too(comparison):
    method = prospr.Iterative(prospr.Snip(), rounds=3, recover=True)
    rounds = replace(comparison, methods={"force": method}, seeds=(0,), checks=("shuffled", "inverted"))
    got = compare(rounds)
    assert len(got) == rounds.runs == 5
    for row in got[1:3]:
        batches = rounds.batches(0, rounds.score_batch_size)
        masks = prospr.prune(rounds.network(0), batches, row.sparsity, method=method, collapse="ignore")
        assert (row.kept, row.layers) == (masks.kept, masks.densities())
        assert row.score_seconds > 0
    assert got[3].accuracy is not None
    assert "no one score a weight to invert" in got[4].error
