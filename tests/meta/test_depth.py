"""A thousand steps: no overflow, the growth of each step told, and nothing held that need not be."""

import math
import weakref

import pytest
import torch
from cases import BY_NAME

import prospr
from prospr.errors import DerivativeError
from prospr.meta import SGD, Trace, metagrad, pure_loss
from prospr.meta.metagrad import adjoint
from prospr.meta.products import Products
from prospr.meta.trajectory import KeptBatches

STEPS = 1000


def chaos(rate, seen):
    """One step of SGD at lr = 1 is the logistic map w -> rate w (1 - w), whose derivative is rate (1 - 2 w)."""

    def loss(p, last):
        w = p["w"]
        seen.append(w.detach().clone())
        return w.sum() if last else (w**2 / 2 - rate * (w**2 / 2 - w**3 / 3)).sum()

    return loss


def test_a_derivative_far_beyond_float32():
    seen, trace = [], Trace()
    start = {"w": torch.tensor([0.3, 0.31, 0.7])}
    batches = [False] * STEPS + [True]
    products = Products(chaos(3.9, seen))
    lam, exponent = adjoint(products, start, batches, SGD(lr=1.0), trace=trace)
    # The same product in Python's numbers, along the same weights.
    along = torch.stack(seen[:STEPS]).double()
    logs = (3.9 * (1 - 2 * along)).abs().log2()
    want = logs.sum(0)
    assert want.min() > 500  # float32 ends at 128
    assert torch.allclose(lam["w"].double().abs().log2() + exponent, want, rtol=0, atol=1e-2)
    signs = (1 - 2 * along).sign().prod(0)
    assert torch.equal(lam["w"].sign().double(), signs)

    assert len(trace.logs) == STEPS + 1
    assert len(trace.growths) == STEPS
    norms = torch.stack([logs[m:].sum(0) for m in (0, 100, 990, STEPS)])
    for m, one in zip((0, 100, 990, STEPS), norms, strict=True):
        norm = torch.exp2(2 * (one - one.max())).sum().log2() / 2 + one.max()
        assert trace.logs[m] == pytest.approx(norm.item(), abs=1e-2)
    assert math.prod(trace.growths[-5:]) == pytest.approx(2 ** (trace.logs[-6] - trace.logs[-1]))
    assert trace.growth == pytest.approx(2 ** ((trace.logs[0] - trace.logs[-1]) / STEPS))
    with pytest.raises(DerivativeError, match="overflowed"):
        metagrad(chaos(3.9, []), start, batches, SGD(lr=1.0))


def test_a_derivative_that_vanishes_keeps_its_ranking():
    """Far below the smallest number of float32, where every entry would be zero."""
    bowl = lambda p, x: 0.5 * (torch.tensor([0.5, 0.6]) * p["w"] ** 2).sum()  # noqa: E731
    last = lambda p, x: p["w"].sum() if x else bowl(p, x)  # noqa: E731
    lam, exponent = adjoint(Products(last), {"w": torch.ones(2)}, [False] * 100 + [True], SGD(lr=1.0))
    want = torch.tensor([0.5, 0.4], dtype=torch.float64).log2() * 100
    assert exponent.item() == pytest.approx(want[0].item(), abs=4)
    assert torch.allclose(lam["w"].double().log2() + exponent, want, atol=1e-4)


@pytest.mark.slow
def test_a_thousand_exact_steps_of_a_network():
    case = BY_NAME["mlp"]
    model = case.model().float()
    batches = [(x.float(), y) for x, y in case.batches(8)]
    batches = [batches[m % 8] for m in range(STEPS + 1)]
    results = {}
    for store in ("device", "cpu", "recompute"):
        trace = Trace()
        method = prospr.ProsPr(steps=STEPS, lr=0.05, momentum=0.9, store=store, trace=trace)
        results[store] = prospr.score(model, batches, method=method)
        assert len(trace.growths) == STEPS
        assert all(math.isfinite(g) and g > 0 for g in trace.growths)
    for name, s in results["device"].items():
        assert torch.isfinite(s).all()
        assert torch.equal(s, results["cpu"][name])
        assert torch.equal(s, results["recompute"][name])


class Alive:
    """How many of the tensors it was shown are still there, and the most there were at once."""

    def __init__(self):
        self.seen, self.most = [], 0

    def show(self, t):
        if not any(ref() is t for ref in self.seen):
            self.seen.append(weakref.ref(t))
        self.seen = [ref for ref in self.seen if ref() is not None]
        self.most = max(self.most, len(self.seen))


def held(steps, **settings):
    """The most sets of weights and the most batches that are there at once."""
    weights, batches = Alive(), Alive()
    loss = pure_loss(BY_NAME["mlp"].model())

    class Watched(SGD):
        def step_all(self, *args):
            params, state = super().step_all(*args)
            weights.show(params["0.weight"])
            return params, state

    def stream():
        generator = torch.Generator().manual_seed(0)
        for _ in range(steps + 1):
            batch = BY_NAME["mlp"].batch(generator)
            batches.show(batch[0])
            yield batch
            del batch

    metagrad(loss, loss.params(), stream(), Watched(lr=0.1, momentum=0.9), steps=steps, **settings)
    return weights.most, batches.most


@pytest.mark.parametrize("steps", [16, 1024])
def test_first_order_holds_nothing(steps):
    assert held(steps, order="first") == (
        2,
        2,
    )  # weights before and after; the batch that may be the last, and the next


def test_exact_steps_hold_the_trajectory_or_a_root_of_it():
    assert held(100, store="device") == (100, 101)
    weights, _ = held(100, store="recompute")
    assert 15 <= weights <= 23


def test_batches_on_the_cpu_are_kept_as_they_are():
    batches = [(torch.ones(2), "label"), {"x": torch.zeros(1)}]
    kept = KeptBatches(iter(batches), "recompute")
    assert len(kept) == 2
    assert kept[0] is batches[0]
    assert kept[1] is batches[1]
