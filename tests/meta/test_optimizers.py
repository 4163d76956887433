"""Each inner optimizer beside its torch.optim twin, step by step; settings that cannot be are refused."""

import pytest
import torch

import prospr
from prospr.meta import SGD, Adam, AdamW, Optimizer, metagrad

TWINS = {
    "sgd": (SGD(lr=0.1), torch.optim.SGD, {"lr": 0.1}),
    "decay": (SGD(lr=0.1, weight_decay=0.3), torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.3}),
    "momentum": (SGD(lr=0.2, momentum=0.9), torch.optim.SGD, {"lr": 0.2, "momentum": 0.9}),
    "dampening": (
        SGD(lr=0.2, momentum=0.9, dampening=0.4, weight_decay=0.1),
        torch.optim.SGD,
        {"lr": 0.2, "momentum": 0.9, "dampening": 0.4, "weight_decay": 0.1},
    ),
    "dampening-of-one": (
        SGD(lr=0.2, momentum=0.8, dampening=1.0),
        torch.optim.SGD,
        {"lr": 0.2, "momentum": 0.8, "dampening": 1.0},
    ),
    "nesterov": (
        SGD(lr=0.2, momentum=0.7, nesterov=True, weight_decay=0.1),
        torch.optim.SGD,
        {"lr": 0.2, "momentum": 0.7, "nesterov": True, "weight_decay": 0.1},
    ),
    "adam": (Adam(lr=0.05), torch.optim.Adam, {"lr": 0.05}),
    "adam-decay": (
        Adam(lr=0.05, betas=(0.7, 0.8), eps=1e-3, weight_decay=0.2),
        torch.optim.Adam,
        {"lr": 0.05, "betas": (0.7, 0.8), "eps": 1e-3, "weight_decay": 0.2},
    ),
    "adamw": (AdamW(lr=0.05, weight_decay=0.2), torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.2}),
    "adamw-default": (AdamW(), torch.optim.AdamW, {}),
}


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("whole", [True, False], ids=["all-at-once", "tensor-by-tensor"])
def test_ten_steps_equal_torch_optim(name, whole):
    ours, twin, settings = TWINS[name]
    generator = torch.Generator().manual_seed(0)
    draw = lambda: {  # noqa: E731
        "a": torch.randn(3, 2, generator=generator, dtype=torch.float64),
        "b": torch.randn(4, generator=generator, dtype=torch.float64),
    }
    params = draw()
    twins = {n: p.clone().requires_grad_() for n, p in params.items()}
    optimizer = twin(list(twins.values()), **settings)
    state = ours.init_all(params)
    for t in range(10):
        grads = draw()
        before = {n: p.clone() for n, p in params.items()}
        if whole:
            new, state = ours.step_all(params, grads, state, t)
        else:
            stepped = {n: ours.step(p, grads[n], state[n], t) for n, p in params.items()}
            new, state = {n: p for n, (p, _) in stepped.items()}, {n: s for n, (_, s) in stepped.items()}
        assert all(torch.equal(params[n], before[n]) for n in params)  # the old weights are not written to
        params = new
        for n, p in twins.items():
            p.grad = grads[n].clone()
        optimizer.step()
        for n in params:
            assert torch.allclose(params[n], twins[n], rtol=1e-13, atol=1e-14), f"step {t}"


@pytest.mark.parametrize("name", [n for n in TWINS if n.startswith(("sgd", "decay", "mom", "damp", "nest"))])
@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("t", [0, 3])
def test_closed_pullback_equals_the_derivative_of_step(name, detach, t):
    from dataclasses import replace

    optimizer = replace(TWINS[name][0], detach_first=detach)
    generator = torch.Generator().manual_seed(1)
    draw = lambda: {"w": torch.randn(5, generator=generator, dtype=torch.float64)}  # noqa: E731
    w, g, lam = draw(), draw(), draw()
    state = {"w": tuple(draw()["w"] for _ in optimizer.init(w["w"]))}
    lam_state = {"w": tuple(draw()["w"] for _ in state["w"])}
    direct, on_grads, on_state = optimizer.pullback(w, g, state, t, lam, lam_state)
    want_direct, want_grads, want_state = Optimizer.pullback(optimizer, w, g, state, t, lam, lam_state)
    # the closed form gives the direct part without w's path through g, as the general one does
    assert torch.allclose(direct["w"], want_direct["w"], rtol=1e-12)
    got = torch.zeros(5, dtype=torch.float64) if on_grads is None else on_grads["w"]
    assert torch.allclose(got, want_grads["w"], rtol=1e-12)
    if t > 0:  # before the first step there is no buffer to differentiate by
        for a, b in zip(on_state["w"], want_state["w"], strict=True):
            assert torch.allclose(a, b, rtol=1e-12)


def test_adam_is_differentiable_where_a_gradient_is_exactly_zero():
    # g/(|g| + eps) has the derivative 1/eps at 0, and sqrt(v) the derivative infinity at v = 0
    loss = lambda p, x: (p["used"] ** 2).sum() + 0.0 * p["unused"].sum()  # noqa: E731
    params = {"used": torch.tensor([1.0]), "unused": torch.tensor([1.0])}
    for optimizer in (Adam(lr=0.1), AdamW(lr=0.1)):
        g = metagrad(loss, params, [None] * 4, optimizer)
        assert all(torch.isfinite(t).all() for t in g.values())
    leaf = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(1, dtype=torch.float64)
    new, _ = Adam(lr=0.1, eps=1e-2).step(zeros, leaf, (zeros, zeros), 0)
    assert torch.autograd.grad(new, leaf)[0].item() == pytest.approx(-0.1 / 1e-2)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SGD(lr=-1.0), "lr=-1.0"),
        (lambda: SGD(lr=float("nan")), "lr=nan"),
        (lambda: SGD(lr="fast"), "lr='fast'"),
        (lambda: SGD(momentum=-0.1), "momentum=-0.1"),
        (lambda: SGD(nesterov=True), "nesterov=True needs momentum"),
        (lambda: SGD(nesterov=True, momentum=0.9, dampening=0.1), "dampening = 0"),
        (lambda: Adam(betas=(0.9, 1.0)), r"betas=\(0.9, 1.0\)"),
        (lambda: AdamW(lr=0.1, weight_decay=-1), "weight_decay=-1"),
    ],
)
def test_impossible_settings_are_refused(make, says):
    with pytest.raises(prospr.PruningError, match=says):
        make()


def test_an_optimizer_without_a_step_says_so():
    with pytest.raises(NotImplementedError, match="must define step"):
        metagrad(lambda p, x: p["w"].sum(), {"w": torch.ones(1)}, [0, 0], Optimizer())
