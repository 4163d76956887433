"""Extreme eigenvalues against the whole spectrum, and the learning rate made of them."""

import pytest
import torch
from cases import BY_NAME

import prospr
from prospr.meta import pure_loss
from prospr.meta.curvature import extreme_eigenvalues, stable_lr


def whole_hessian(loss, params, batch):
    names = list(params)
    sizes = [params[n].numel() for n in names]

    def flat(vector):
        parts = dict(zip(names, vector.split(sizes), strict=True))
        return loss({n: parts[n].reshape(params[n].shape) for n in names}, batch)

    return torch.autograd.functional.hessian(flat, torch.cat([params[n].flatten() for n in names]))


@pytest.mark.parametrize("name", ["mlp", "residual", "conv-batchnorm-maxpool"])
def test_both_ends_of_the_spectrum(name):
    case = BY_NAME[name]
    loss = pure_loss(case.model())
    batch = case.batches(1)[0]
    spectrum = torch.linalg.eigvalsh(whole_hessian(loss, loss.params(), batch))
    ends = extreme_eigenvalues(loss, loss.params(), batch, most=80, tolerance=1e-7)
    assert ends.smallest == pytest.approx(spectrum[0].item(), rel=1e-3, abs=1e-5 * spectrum[-1].item())
    assert ends.largest == pytest.approx(spectrum[-1].item(), rel=1e-3)
    assert ends.magnitude == max(abs(ends.smallest), abs(ends.largest))
    loose = extreme_eigenvalues(loss, loss.params(), batch)
    assert loose.products <= 30
    assert loose.magnitude == pytest.approx(ends.magnitude, rel=0.1)


@pytest.mark.parametrize("name", ["mlp", "residual", "conv-batchnorm-maxpool", "unet", "lstm"])
def test_the_larger_end_alone_takes_fewer_products(name):
    case = BY_NAME[name]
    loss = pure_loss(case.model(), **case.settings)
    batch = case.batches(1)[0]
    both = extreme_eigenvalues(loss, loss.params(), batch, most=80, tolerance=1e-7)
    one = extreme_eigenvalues(loss, loss.params(), batch, both=False)
    assert one.magnitude == pytest.approx(both.magnitude, rel=0.1)
    assert one.products <= extreme_eigenvalues(loss, loss.params(), batch).products
    assert stable_lr(loss, loss.params(), batch) == 1 / one.magnitude


def test_a_negative_end_that_is_the_larger_sets_the_rate():
    saddle = lambda p, x: 0.5 * (torch.tensor([-8.0, 1.0, 2.0]) * p["w"] ** 2).sum()  # noqa: E731
    w = {"w": torch.zeros(3)}
    assert extreme_eigenvalues(saddle, w, None).smallest == pytest.approx(-8.0)
    assert extreme_eigenvalues(saddle, w, None, both=False, tolerance=0).smallest == pytest.approx(-8.0)
    assert stable_lr(saddle, w, None, kappa=2.0) == pytest.approx(0.25, rel=0.02)
    assert stable_lr(saddle, w, None, kappa=2.0) == 2.0 / extreme_eigenvalues(saddle, w, None, both=False).magnitude


def diagonal(*values):
    """A loss whose Hessian has these eigenvalues."""
    return lambda p, x: 0.5 * (torch.tensor(values, dtype=torch.float64) * p["w"] ** 2).sum()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("most", range(1, 6))
def test_the_larger_end_alone_is_the_longest_product_in_the_space_seen(sign, most):
    """Beside an orthonormal basis of the start, its product, the product of that, and so on."""
    values = sign * torch.cat([torch.linspace(-3, 3, 60, dtype=torch.float64), torch.tensor([7.0, -6.0])])
    w = {"w": torch.zeros(62, dtype=torch.float64)}
    got = extreme_eigenvalues(diagonal(*values.tolist()), w, None, both=False, tolerance=0, most=most)
    start = torch.randn(62, generator=torch.Generator().manual_seed(0)).double()
    basis = torch.linalg.qr(torch.stack([values**k * start for k in range(most)], 1)).Q
    longest = torch.linalg.matrix_norm(values[:, None] * basis, 2).item()
    inside = torch.linalg.eigvalsh(basis.T @ (values[:, None] * basis)).abs().max().item()
    assert got.products == most
    assert got.magnitude == pytest.approx(longest, rel=1e-10)
    assert inside < got.magnitude < 7


@pytest.mark.parametrize("seed", range(20))
def test_the_larger_end_is_not_far_off_where_others_are_near(seed):
    """Ten of nearly the same size, with both signs: no one of them settles soon, and none need to."""
    values = torch.cat([torch.linspace(-1, 1, 500), torch.linspace(8, 10, 5), -torch.linspace(8, 9.9, 5)]).tolist()
    w = {"w": torch.zeros(510, dtype=torch.float64)}
    got = extreme_eigenvalues(diagonal(*values), w, None, both=False, seed=seed)
    assert 0.85 * 10 < got.magnitude <= 10 + 1e-9
    assert got.products <= 5


def test_curvature_too_large_for_the_number_format_is_refused():
    with pytest.raises(prospr.PruningError, match="NaN or infinite entries"):
        stable_lr(lambda p, x: 1e25 * (p["w"] ** 2 * torch.arange(1.0, 5.0)).sum(), {"w": torch.ones(4)}, None)


def test_a_small_space_is_exhausted():
    ends = extreme_eigenvalues(lambda p, x: 1.5 * (p["w"] ** 2).sum(), {"w": torch.ones(4)}, None)
    assert (ends.smallest, ends.largest) == (pytest.approx(3.0), pytest.approx(3.0))
    assert ends.products == 1


def test_prospr_sets_its_rate_from_the_first_batch():
    case = BY_NAME["residual"]
    model, batches = case.model(), case.batches(4)
    loss = pure_loss(model)
    lr = stable_lr(loss, loss.params(), batches[0], kappa=0.7)
    auto = prospr.score(model, batches, method=prospr.ProsPr(lr="auto", kappa=0.7))
    fixed = prospr.score(model, batches, method=prospr.ProsPr(lr=lr))
    assert all(torch.equal(auto[n], fixed[n]) for n in fixed)


@pytest.mark.parametrize("redraw", [False, True])
@pytest.mark.parametrize("name", ["mlp", "residual", "conv-batchnorm-maxpool"])
def test_every_round_finds_the_rate_of_its_own_weights_in_few_products(name, redraw):
    """Weights in another order have another curvature, so no rate is handed on. What a round finds is at most the true
    one, and as a rule near it; of two that are near each other it may find the smaller."""
    found = []

    class Looking(prospr.Score):
        def score(self, problem):
            loss = problem.pure_loss()
            first = problem.batches.peek()[0]
            args = (loss, problem.start(loss), first)
            exact = extreme_eigenvalues(*args, most=40, tolerance=1e-5).magnitude
            found.append((extreme_eigenvalues(*args, both=False, seed=problem.seed), exact))
            return prospr.ProsPr().score(problem)

    case = BY_NAME[name]
    method = prospr.Iterative(Looking(), rounds=5, redraw=redraw)
    prospr.prune(case.model(), case.batches(20), 0.8, method=method, collapse="ignore", **case.settings)
    assert len(found) == 5
    shares = sorted(one.magnitude / exact for one, exact in found)
    assert shares[0] > 0.7
    assert 0.95 < shares[2] <= shares[-1] <= 1 + 1e-4
    assert sum(one.products for one, _ in found) <= 5 * 5


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda f, w: stable_lr(f, w, None, kappa=0.0), "kappa=0.0"),
        (lambda f, w: extreme_eigenvalues(f, w, None, most=0), "most=0"),
        (lambda f, w: stable_lr(lambda p, x: p["w"].sum(), w, None), "no curvature"),
        (lambda f, w: stable_lr(lambda p, x: (p["w"] * float("nan")).square().sum(), w, None), "loss is nan at step 0"),
        (lambda f, w: stable_lr(lambda p, x: (p["w"] - 1).abs().sqrt().sum(), w, None), "NaN or infinite entries"),
    ],
)
def test_what_cannot_be_is_refused(call, says):
    with pytest.raises(prospr.PruningError, match=says):
        call(lambda p, x: (p["w"] ** 2).sum(), {"w": torch.ones(2)})


def test_complex_parameters_count_as_two_real_ones_each():
    torch.manual_seed(0)
    a = torch.randn(6, 6, dtype=torch.complex128)
    w = {"w": torch.randn(6, dtype=torch.complex128), "r": torch.zeros(3, dtype=torch.float64)}
    bowl = lambda p, _: 0.5 * (a @ p["w"]).abs().square().sum() + 0.5 * p["r"].square().sum()  # noqa: E731
    largest = torch.linalg.eigvalsh(a.mH @ a)[-1].item()
    assert abs(extreme_eigenvalues(bowl, w, None).largest - largest) < 0.02 * largest
    assert abs(stable_lr(bowl, w, None) * largest - 1) < 0.05
