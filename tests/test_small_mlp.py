"""The perceptron of benchmarks/small_mlp.py, and the scores it tries."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from benchmark_scripts import imported
from torch import nn

import prospr


@pytest.fixture
def small_mlp(monkeypatch):
    threads = torch.get_num_threads()
    yield from imported("small_mlp", monkeypatch)
    torch.set_num_threads(threads)


def test_a_perceptron_needs_the_weights_that_rounds_find(small_mlp, tmp_path, monkeypatch, capsys):
    out = tmp_path / "mlp.jsonl"
    words = ["small_mlp.py", "--out", str(out), "--sparsities", "0.99", "--seeds", "0"]
    monkeypatch.setattr(sys, "argv", [*words, "--arms", "prospr", "prospr: shuffled", "snip"])
    small_mlp.main()
    rows = {row["arm"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert rows["prospr"]["accuracy"] > rows["prospr: shuffled"]["accuracy"] > rows["snip"]["accuracy"]
    assert rows["prospr"]["layers"] == rows["prospr: shuffled"]["layers"]
    small_mlp.main()  # what has a line is not run again
    assert len(out.read_text().splitlines()) == 3
    assert "99    prospr" in capsys.readouterr().out


def normed_network(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3, bias=False)
    ).double()
    return model, [(torch.randn(10, 4).double(), torch.randint(0, 3, (10,))) for _ in range(11)]


def equal(scores, others):
    return all(torch.allclose(scores[name], others[name], rtol=1e-9) for name in scores)


def test_a_mean_over_batches_and_over_orders_of_weights(small_mlp):
    model, batches = normed_network()
    mean = lambda *found: {name: sum(scores[name] for scores in found) / len(found) for name in found[0]}  # noqa: E731
    each = [prospr.score(model, [batch], method="snip") for batch in batches[:2]]
    assert not equal(*each)
    assert equal(prospr.score(model, batches, method=small_mlp.Averaged(prospr.Snip(), 2)), mean(*each))
    magnitude, drawn = prospr.Magnitude(), small_mlp.Averaged(prospr.Magnitude(), 2, redraw=True)
    assert equal(prospr.score(model, method=small_mlp.Averaged(magnitude, 3)), prospr.score(model, method=magnitude))
    orders = [{n: w.abs() for n, w in small_mlp.reordered(prospr.prunable(model), 7000 + k).items()} for k in (0, 1)]
    total = sum(w.abs().sum() for w in prospr.prunable(model).values())
    assert equal(prospr.score(model, method=drawn, seed=7), {n: w / total for n, w in mean(*orders).items()})


def test_statistics_that_are_warmed_up(small_mlp):
    """By the mean over ten batches; the eleventh is what the score looks at."""
    model, batches = normed_network()
    found = prospr.score(model, batches, method=small_mlp.WarmedUp(prospr.Snip()))
    made = [model[0](images).detach() for images, _ in batches[:10]]
    center, spread = (sum(f(0) for f in fs) / 10 for fs in ([h.mean for h in made], [h.var for h in made]))
    hidden = model[2](torch.nn.functional.batch_norm(model[0](batches[10][0]), center, spread, model[1].weight))
    torch.nn.functional.cross_entropy(model[3](hidden), batches[10][1]).backward()
    sizes = {name: (p * p.grad).abs().detach() for name, p in prospr.prunable(model).items()}
    assert equal(found, {name: size / sum(s.sum() for s in sizes.values()) for name, size in sizes.items()})


def test_gray_images_have_lines_of_their_own(small_mlp, tmp_path, monkeypatch, capsys):
    small = torch.randint(0, 256, (25_000, 1, 8, 8), dtype=torch.uint8)
    large = small.repeat_interleave(4, 2).repeat_interleave(4, 3).expand(-1, 3, -1, -1)
    split = SimpleNamespace(images=large, labels=torch.arange(25_000) % 10)
    monkeypatch.setattr(small_mlp, "load", lambda name, root: SimpleNamespace(train=split))
    seen, held = small_mlp._gray_cifar("anywhere")
    assert (len(seen[0]), len(seen[1]), len(held[0]), len(held[1])) == (20_000, 20_000, 5_000, 5_000)
    flat = small.flatten(1).float()
    assert torch.allclose(held[0], (flat[20_000:] - flat[:20_000].mean()) / flat[:20_000].std(), atol=1e-5)

    monkeypatch.setattr(small_mlp, "_gray_cifar", lambda root: small_mlp._digits(1.0))
    out = tmp_path / "mlp.jsonl"
    words = ["small_mlp.py", "--out", str(out), "--sparsities", "0.9", "--seeds", "0", "1", "--minus", "erk"]
    for more in ([], ["--root", "anywhere"], ["--root", "anywhere"]):
        monkeypatch.setattr(sys, "argv", [*words, "--arms", "erk", "snip", *more])
        small_mlp.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["data"], row["arm"]) for row in rows] == [
        (data, arm) for data in ("digits", "cifar10") for arm in ("erk", "erk", "snip", "snip")
    ]
    gaps = [100 * (rows[2 + k]["accuracy"] - rows[k]["accuracy"]) for k in (0, 1)]
    text = f"over erk: {sum(gaps) / 2:+.2f} ({abs(gaps[0] - gaps[1]) / 2**0.5:.2f}, 2 pairs)"
    assert capsys.readouterr().out.count(text) == 3
