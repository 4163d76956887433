"""The exact meta-gradient against the unrolled graph, finite differences and numbers by hand."""

import copy

import pytest
import torch
from cases import BY_NAME, CASES, Case
from oracle import loss_of, relative_error, unrolled
from torch import nn

import prospr
from prospr.meta import SGD, Adam, AdamW, Optimizer, Trace, metagrad, pure_loss


class SmoothLion(Optimizer):
    """An optimizer of the user's: a soft sign of a mean, two numbers of state a weight."""

    def init(self, w):
        return torch.zeros_like(w), torch.ones_like(w)

    def step(self, w, g, state, t):
        mean, size = 0.9 * state[0] + 0.1 * g, 0.9 * state[1] + 0.1 * g * g
        return w - 0.05 * torch.tanh(mean / size), (mean, size)


OPTIMIZERS = {
    "sgd": SGD(lr=0.1),
    "momentum": SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": SGD(lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.02),
    "dampening": SGD(lr=0.1, momentum=0.9, dampening=0.3),
    "dampening-of-one": SGD(lr=0.1, momentum=0.9, dampening=1.0),
    "published": SGD(lr=0.5, momentum=0.9, detach_first=True),
    "published-nesterov": SGD(lr=0.1, momentum=0.9, nesterov=True, detach_first=True),
    "adam": Adam(lr=0.01, weight_decay=0.1, eps=1e-3),
    "adamw": AdamW(lr=0.01, eps=1e-3),
    "user": SmoothLion(),
}


def prepared(case: Case, count: int):
    model = case.model()
    loss = pure_loss(model, **case.settings)
    return model, loss, loss.params(), case.batches(count)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_equals_the_unrolled_graph(case, optimizer):
    model, loss, params, batches = prepared(case, 6)
    for steps in range(6):
        ours = metagrad(loss, params, batches[: steps + 1], optimizer)
        theirs = unrolled(model, batches[: steps + 1], optimizer, case.loss)
        assert relative_error(ours, theirs) < 1e-10, f"M = {steps}"


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_forward_mode_equals_the_unrolled_graph(case):
    model, loss, params, batches = prepared(case, 4)
    ours = metagrad(loss, params, batches, SGD(lr=0.1, momentum=0.9), mode="forward")
    assert relative_error(ours, unrolled(model, batches, SGD(lr=0.1, momentum=0.9), case.loss)) < 1e-10


class Cube(torch.autograd.Function):
    """Has no rule for dual numbers."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad * ctx.saved_tensors[0] ** 2


def test_forward_mode_says_what_is_missing():
    w = {"w": torch.tensor([2.0, 1.0], dtype=torch.float64)}
    loss = lambda p, _: Cube.apply(p["w"]).sum()  # noqa: E731
    assert metagrad(loss, w, [0, 0], SGD(lr=0.01))["w"].isfinite().all()
    with pytest.raises(prospr.errors.DerivativeError, match='order="first"'):
        metagrad(loss, w, [0, 0], SGD(lr=0.01), mode="forward")


class Turns(nn.Module):
    """A head for each of two tasks; a batch says which."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 5, dtype=torch.float64)
        self.heads = nn.ModuleList(nn.Linear(5, 3, dtype=torch.float64) for _ in range(2))

    def forward(self, given):
        x, task = given
        return self.heads[task](torch.tanh(self.body(x)))


TWINS = {
    "momentum": (SGD(0.3, momentum=0.9), lambda p: torch.optim.SGD(p, 0.3, momentum=0.9)),
    "decay": (SGD(0.3, weight_decay=0.1), lambda p: torch.optim.SGD(p, 0.3, weight_decay=0.1)),
    "nesterov": (
        SGD(0.3, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.3, momentum=0.9, nesterov=True),
    ),
    "adam": (Adam(0.05), lambda p: torch.optim.Adam(p, 0.05)),
    "adamw": (AdamW(0.05, weight_decay=0.1), lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1)),
}


@pytest.mark.parametrize("store", ["device", "recompute"])
@pytest.mark.parametrize("twin", TWINS)
def test_what_a_step_does_not_use_is_left_alone_as_torch_does(twin, store):
    torch.manual_seed(0)
    ours, theirs = TWINS[twin]
    net = Turns()
    batches = [
        ((torch.randn(8, 4, dtype=torch.float64), task), torch.randint(0, 3, (8,))) for task in (0, 1, 0, 0, 1, 0)
    ]
    loss = pure_loss(net)
    along = {name: torch.randn_like(p) for name, p in loss.params().items()}

    def trained(shift):
        model = copy.deepcopy(net)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p += shift * along[name]
        optimizer = theirs(model.parameters())
        for (x, task), y in batches[:-1]:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model((x, task)), y).backward()
            optimizer.step()
        return torch.nn.functional.cross_entropy(model(batches[-1][0]), batches[-1][1]).item()

    trace = Trace()
    g = metagrad(loss, loss.params(), batches, ours, store=store, trace=trace)
    assert abs(trace.losses[-1] - trained(0.0)) < 1e-12
    slope = (trained(1e-5) - trained(-1e-5)) / 2e-5
    assert abs(sum((g[name] * along[name]).sum() for name in g).item() - slope) < 1e-7 * max(1, abs(slope))
    first = metagrad(loss, loss.params(), batches, ours, order="first", trace=trace)
    assert abs(trace.losses[-1] - trained(0.0)) < 1e-12
    assert first["heads.1.weight"].abs().max() == 0  # plays no part in the last loss


def test_a_pruned_model_stays_pruned_while_it_is_differentiated():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8, dtype=torch.float64), nn.Tanh(), nn.Linear(8, 3, dtype=torch.float64))
    batches = [(torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 3, (8,))) for _ in range(5)]
    masks = prospr.prune(net, None, 0.7, method="magnitude")
    loss, trace = pure_loss(net), Trace()
    g = metagrad(loss, loss.params(), batches, SGD(0.5, momentum=0.9), trace=trace)
    assert all((g[name][~mask] == 0).all() for name, mask in masks.items())
    optimizer = torch.optim.SGD(net.parameters(), 0.5, momentum=0.9)
    for x, y in batches[:-1]:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    x, y = batches[-1]
    assert abs(trace.losses[-1] - torch.nn.functional.cross_entropy(net(x), y).item()) < 1e-12


@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 2.0**-20), (torch.float32, 2.0**-140)])
def test_numbers_near_the_smallest_come_through(dtype, size):
    loss = lambda p, _: (size * p["w"].to(torch.float64)).sum()  # noqa: E731
    w = {"w": torch.ones(2, dtype=dtype)}
    exact, direct = (metagrad(loss, w, [0] * count, SGD(0.1))["w"] for count in (2, 1))
    assert torch.equal(exact, direct)
    assert (exact > 0).all()


def test_a_parameter_without_entries():
    loss = lambda p, _: (p["w"] ** 2).sum() + p["none"].sum()  # noqa: E731
    g = metagrad(loss, {"w": torch.ones(2), "none": torch.zeros(0)}, [0] * 6, SGD(0.1))
    assert g["none"].numel() == 0
    assert g["w"].isfinite().all()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_first_order_drops_the_curvature_and_nothing_else(case):
    model, loss, params, batches = prepared(case, 4)
    for optimizer in (SGD(lr=0.1, momentum=0.9), AdamW(lr=0.01)):
        ours = metagrad(loss, params, iter(batches), optimizer, order="first")
        assert relative_error(ours, unrolled(model, batches, optimizer, case.loss, first_order=True)) < 1e-10


@pytest.mark.parametrize("steps", [1, 2, 4, 5, 9, 12])
@pytest.mark.parametrize("store", ["cpu", "recompute"])
def test_every_store_gives_the_same_bits(store, steps):
    _, loss, params, batches = prepared(BY_NAME["dropout"], steps + 1)
    for optimizer in (SGD(lr=0.1, momentum=0.9), AdamW(lr=0.01)):
        kept = metagrad(loss, params, batches, optimizer)
        other = metagrad(loss, params, batches, optimizer, store=store)
        assert all(torch.equal(kept[name], other[name]) for name in kept)


def test_recompute_keeps_about_two_sqrt_m_moments():
    from prospr.meta.trajectory import trajectory

    alive, most = 0, 0
    moments = trajectory("recompute", 100, lambda w, state, step: (("moment", step), w, state))
    for step in range(100):
        moments.push(step, type("M", (), {"params": {}})(), {})
    for step in reversed(range(100)):
        assert moments.pop(step) == ("moment", step)
        alive = len(moments._snapshots) + len(moments._stretch)
        most = max(most, alive)
    assert most <= 20


def test_equals_central_differences_of_the_whole_training():
    case = BY_NAME["mlp"]
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()  # smooth: no kinks to step over
    loss, batches = pure_loss(model), case.batches(5)
    params = loss.params()
    for optimizer in (SGD(lr=0.3, momentum=0.9, nesterov=True), Adam(lr=0.05)):

        def after_training(w, optimizer=optimizer):
            state = {n: optimizer.init(p) for n, p in w.items()}
            for t, batch in enumerate(batches[:-1]):
                leaves = {n: p.detach().requires_grad_() for n, p in w.items()}
                grads = torch.autograd.grad(loss_of(model, leaves, batch), list(leaves.values()))
                new = {n: optimizer.step(p, g, state[n], t) for (n, p), g in zip(w.items(), grads, strict=True)}
                w, state = {n: a for n, (a, _) in new.items()}, {n: s for n, (_, s) in new.items()}
            return loss_of(model, w, batches[-1]).item()

        ours = metagrad(loss, params, batches, optimizer)
        generator = torch.Generator().manual_seed(3)
        for _ in range(5):
            v = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in params.items()}
            h = 1e-5
            plus = after_training({n: p + h * v[n] for n, p in params.items()})
            minus = after_training({n: p - h * v[n] for n, p in params.items()})
            ahead = sum((ours[n] * v[n]).sum().item() for n in ours)
            assert (plus - minus) / (2 * h) == pytest.approx(ahead, rel=1e-6)


def test_quadratic_by_hand():
    # w -> (1 - lr x) w each step; L = x w^2 / 2, so dL/dw_0 = x (1 - lr x)^(2 M) w
    bowl = lambda p, x: 0.5 * x * (p["w"] ** 2).sum()  # noqa: E731
    w = {"w": torch.tensor([2.0, -1.0], dtype=torch.float64)}
    for steps in range(5):
        g = metagrad(bowl, w, [3.0] * (steps + 1), SGD(lr=0.1))
        assert torch.allclose(g["w"], 3 * 0.7 ** (2 * steps) * w["w"], rtol=1e-14)


def test_one_published_step_with_momentum_is_first_order():
    # The trap of the public code: with the first buffer detached, the curvature of step 0 is gone.
    _, loss, params, batches = prepared(BY_NAME["residual"], 2)
    published = metagrad(loss, params, batches, SGD(lr=0.5, momentum=0.9, detach_first=True))
    first = metagrad(loss, params, batches, SGD(lr=0.5, momentum=0.9), order="first")
    exact = metagrad(loss, params, batches, SGD(lr=0.5, momentum=0.9))
    assert relative_error(published, first) < 1e-12
    assert relative_error(exact, first) > 0.1


def test_detach_first_is_torch_optims_differentiable_sgd():
    model, loss, params, batches = prepared(BY_NAME["mlp"], 4)
    settings = {"lr": 0.5, "momentum": 0.9}
    start = {n: p.clone().requires_grad_() for n, p in params.items()}
    w = {n: p.clone() for n, p in start.items()}
    optimizer = torch.optim.SGD(list(w.values()), differentiable=True, **settings)
    for batch in batches[:-1]:
        grads = torch.autograd.grad(
            loss_of(model, {n: p.clone() for n, p in w.items()}, batch), list(w.values()), create_graph=True
        )
        for p, g in zip(w.values(), grads, strict=True):
            p.grad = g
        optimizer.step()
    final = torch.autograd.grad(loss_of(model, w, batches[-1]), list(start.values()))
    ours = metagrad(loss, params, batches, SGD(detach_first=True, **settings))
    assert relative_error(ours, dict(zip(start, final, strict=True))) < 1e-12


@pytest.mark.parametrize("name", ["mlp", "group-and-layer-norm", "tied", "attention"])
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_micro_batches_are_exact_without_batch_statistics(name, size):
    _, loss, params, batches = prepared(BY_NAME[name], 4)
    whole = metagrad(loss, params, batches, SGD(lr=0.1, momentum=0.9))
    pieces = metagrad(loss, params, batches, SGD(lr=0.1, momentum=0.9), micro_batch=size)
    assert relative_error(pieces, whole) < 1e-12


def test_micro_batches_warn_of_batch_statistics():
    model, loss, params, batches = prepared(BY_NAME["residual"], 2)
    with pytest.warns(prospr.errors.InexactWarning, match="norm1, norm2"):
        metagrad(loss, params, batches, SGD(lr=0.1), micro_batch=2)
    model.eval()
    whole = metagrad(loss, params, batches, SGD(lr=0.1))
    assert relative_error(metagrad(loss, params, batches, SGD(lr=0.1), micro_batch=2), whole) < 1e-12


def test_dropout_is_replayed_and_depends_on_seed_and_step():
    _, loss, params, batches = prepared(BY_NAME["dropout"], 3)
    same = [metagrad(loss, params, batches, SGD(lr=0.1)) for _ in range(2)]
    torch.manual_seed(99)  # the global generator plays no part
    same.append(metagrad(loss, params, batches, SGD(lr=0.1)))
    assert all(torch.equal(same[0][n], other[n]) for other in same[1:] for n in same[0])
    other = metagrad(loss, params, batches, SGD(lr=0.1), seed=1)
    assert relative_error(other, same[0]) > 1e-3


def test_float32_agrees_with_float64():
    case = BY_NAME["residual"]
    double = metagrad(pure_loss(case.model()), pure_loss(case.model()).params(), case.batches(4), SGD(lr=0.1))
    model = case.model().float()
    batches = [(x.float(), y) for x, y in case.batches(4)]
    single = metagrad(pure_loss(model), pure_loss(model).params(), batches, SGD(lr=0.1))
    assert all(g.dtype == torch.float32 for g in single.values())
    assert relative_error({n: g.double() for n, g in single.items()}, double) < 1e-3


def test_trace_records_losses_and_growth():
    bowl = lambda p, x: 0.5 * x * (p["w"] ** 2).sum()  # noqa: E731
    trace = Trace()
    metagrad(bowl, {"w": torch.tensor([1.0], dtype=torch.float64)}, [-2.0] * 4, SGD(lr=0.5), trace=trace)
    # each step doubles w, and doubles the derivative once more on the way back
    assert trace.losses == pytest.approx([-1.0, -4.0, -16.0, -64.0])
    assert trace.norms == pytest.approx([128.0, 64.0, 32.0, 16.0])
    assert trace.growth == pytest.approx(2.0)
    assert Trace().growth == 1.0


def test_a_derivative_beyond_float32_is_an_error_and_its_ranking_survives():
    # 100 steps that each multiply by 3: 3^100 is beyond float32, and so is the loss, unless w starts tiny
    bowl = lambda p, x: -(torch.tensor([20.0, 10.0]) * p["w"]).sum() - 0.0 * (p["w"] ** 2).sum()  # noqa: E731
    saddle = lambda p, x: -10.0 * (p["w"] ** 2).sum() if x else bowl(p, x)  # noqa: E731
    w = {"w": torch.tensor([1e-30, 1e-30])}
    batches = [True] * 60 + [False]
    with pytest.raises(prospr.errors.DerivativeError, match="overflowed"):
        metagrad(saddle, w, batches, SGD(lr=0.2))
    from prospr.meta.metagrad import adjoint
    from prospr.meta.products import Products

    lam, exponent = adjoint(Products(saddle), w, batches, SGD(lr=0.2))
    # exactly -20 * 5^60 and -10 * 5^60
    assert exponent.item() == 143
    assert lam["w"].tolist() == pytest.approx([-20 * 5.0**60 / 2.0**143, -10 * 5.0**60 / 2.0**143], rel=1e-5)


def test_a_compiled_module_is_scored_as_its_original():
    case = BY_NAME["conv-batchnorm-maxpool"]
    plain, compiled = case.model(), torch.compile(case.model(), backend="aot_eager")
    with torch.no_grad():
        compiled(case.batches(1)[0][0])
    inside = case.model()
    inside[0] = torch.compile(inside[0], backend="aot_eager")
    want = metagrad(pure_loss(plain), pure_loss(plain).params(), case.batches(3), SGD(lr=0.1))
    got = metagrad(pure_loss(compiled), pure_loss(compiled).params(), case.batches(3), SGD(lr=0.1))
    nested = metagrad(pure_loss(inside), pure_loss(inside).params(), case.batches(3), SGD(lr=0.1))
    assert relative_error(got, want) < 1e-12
    assert relative_error(dict(zip(want, nested.values(), strict=True)), want) < 1e-12


def test_works_under_no_grad_and_inference_mode():
    _, loss, params, batches = prepared(BY_NAME["mlp"], 3)
    want = metagrad(loss, params, batches, SGD(lr=0.1))
    with torch.no_grad():
        assert relative_error(metagrad(loss, params, batches, SGD(lr=0.1)), want) == 0
    with torch.inference_mode():
        assert relative_error(metagrad(loss, params, batches, SGD(lr=0.1)), want) == 0


def test_parameters_of_two_precisions():
    loss = lambda p, x: (x * p["a"] ** 2).sum().double() + (p["b"] ** 2 * p["a"].double()).sum()  # noqa: E731
    both = {"a": torch.tensor([1.5]), "b": torch.tensor([0.5], dtype=torch.float64)}
    alone = {name: p.double() for name, p in both.items()}
    for optimizer in (SGD(lr=0.1, momentum=0.9), AdamW(lr=0.01)):
        mixed, exact = (metagrad(loss, params, [1.0] * 6, optimizer) for params in (both, alone))
        assert [g.dtype for g in mixed.values()] == [torch.float32, torch.float64]
        assert relative_error({n: g.double() for n, g in mixed.items()}, exact) < 1e-5


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"order": "second"}, "order='second'"),
        ({"store": "disk"}, "store='disk'"),
        ({"steps": -1}, "steps=-1"),
        ({"steps": 1.5}, "steps=1.5"),
        ({"steps": 4}, "holds 3, and 4 steps need 5"),
        ({"params": {}}, "got no parameters"),
        ({"batches": 7}, "iterable of batches, such as a DataLoader or a list; got int"),
        ({"batches": []}, "batches is empty"),
    ],
)
def test_settings_are_checked(settings, says):
    given = {"params": {"w": torch.ones(2)}, "batches": [1.0, 1.0, 1.0], **settings}
    with pytest.raises(prospr.PruningError, match=says):
        metagrad(lambda p, x: (x * p["w"] ** 2).sum(), optimizer=SGD(lr=0.1), **given)
