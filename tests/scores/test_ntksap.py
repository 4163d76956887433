"""NTK-SAP: numbers by hand, an implementation with explicit masks, and what it must not look at."""

import copy

import pytest
import torch
from cases import BY_NAME, CASES, Checkpointed
from torch import nn
from torch.func import functional_call

import prospr
from prospr import Iterative
from prospr.errors import BatchError, SettingError
from prospr.meta.batches import Stream
from prospr.meta.redraw import redrawn_parameters
from prospr.scores import ntksap
from prospr.scores.base import Problem
from prospr.scores.ntksap import NtkSap

NETWORKS = ["mlp", "residual", "conv-batchnorm-maxpool", "unet", "depthwise"]


def problem_of(case, model=None, **settings):
    model = case.model() if model is None else model
    names = tuple(prospr.prunable(model))
    return Problem(model, names, Stream(case.batches(1)), **case.settings, **settings)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_by_hand(monkeypatch):
    """f(x) = W x, so the difference is (m v) x, with v = 0.1 ((1, -1), (2, 0)) and x = (1, 2): (-0.1, 0.2).

    d/dm_kj = 2 (v x)_k v_kj x_j: the first row 2 (-0.1) (0.1, -0.2), the second 2 (0.2) (0.2, 0).
    """
    drawn = {(1, 2): [[1.0, 2.0]], (2, 2): [[1.0, -1.0], [2.0, 0.0]]}
    monkeypatch.setattr(ntksap, "_normal", lambda shape, like, generator: torch.tensor(drawn[tuple(shape)]))
    net = nn.Linear(2, 2, bias=False)
    problem = Problem(net, ("weight",), Stream([(torch.zeros(1, 2), torch.tensor([0]))]))
    saliency = NtkSap(epsilon=0.1, redraws=3).saliency(problem)
    want = torch.tensor([[-0.02, 0.04], [0.08, 0.0]])
    assert torch.allclose(saliency["weight"], want, atol=1e-6)
    assert torch.allclose(NtkSap(epsilon=0.1).score(problem)["weight"], want.abs() / 0.14, atol=1e-5)


def straightforward(model, example, names, *, seed=0, epsilon=0.01, redraws=5, masks=None):
    """Masks that are tensors of their own, both outputs in one graph, differentiated by autograd."""
    total = dict.fromkeys(names, 0.0)
    for r in range(redraws):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + r)
        weight_seed = int(torch.randint(2**31, (), generator=generator))
        x = torch.randn(example.shape, generator=generator).double()
        twin = prospr.sanity.redraw(model, seed=weight_seed)
        w = {n: p.detach() for n, p in twin.named_parameters()}
        v = {n: epsilon * torch.randn(w[n].shape, generator=generator).double() for n in names}
        m = {n: (torch.ones_like(w[n]) if masks is None else masks[n].double()).requires_grad_() for n in names}
        here, there = {n: m[n] * w[n] for n in names}, {n: m[n] * (w[n] + v[n]) for n in names}
        for module in twin.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.momentum = 1.0
        with torch.no_grad():
            functional_call(twin, {n: t.detach() for n, t in here.items()}, (x,))
        twin.eval()
        distance = (functional_call(twin, here, (x,)) - functional_call(twin, there, (x,))).square().sum()
        for n, g in zip(names, torch.autograd.grad(distance, list(m.values())), strict=True):
            total[n] = total[n] + g / redraws
    return total


@pytest.mark.parametrize("name", NETWORKS)
def test_equals_a_straightforward_implementation(name):
    case = BY_NAME[name]
    problem = problem_of(case, seed=3)
    found = NtkSap(epsilon=0.05, redraws=2).saliency(problem)
    example = case.batches(1)[0][0]
    want = straightforward(problem.model, example, problem.names, seed=3, epsilon=0.05, redraws=2)
    for n, s in found.items():
        assert want[n].abs().max() > 0, n
        assert torch.allclose(s, want[n], rtol=1e-9, atol=1e-9 * want[n].abs().max().item()), n


@pytest.mark.parametrize("recover", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_in_a_later_round_the_derivative_is_that_of_the_sparse_network(name, recover):
    case = BY_NAME[name]
    problem = problem_of(case)
    generator = torch.Generator().manual_seed(7)
    masks = {n: torch.rand(w.shape, generator=generator) < 0.6 for n, w in problem.weights().items()}
    found = NtkSap(redraws=1).saliency(problem_of(case, masks=masks, recover=recover))
    want = straightforward(problem.model, case.batches(1)[0][0], problem.names, redraws=1, masks=masks)
    for n, s in found.items():
        expected = want[n] if recover else want[n] * masks[n]
        assert torch.allclose(s, expected, rtol=1e-9, atol=1e-9 * want[n].abs().max().item()), n


def test_activation_checkpointing_changes_nothing(monkeypatch):
    """It runs the network again during the backward pass, when the right weights must still be there."""
    case = BY_NAME["checkpointed"]
    found = prospr.score(case.model(), case.batches(1), method=NtkSap(redraws=2))
    monkeypatch.setattr(Checkpointed, "checkpointing", False)
    assert same(found, prospr.score(case.model(), case.batches(1), method=NtkSap(redraws=2)))


def test_the_seed_decides_all():
    case = BY_NAME["residual"]
    one = prospr.score(case.model(), case.batches(1), method=NtkSap(), seed=1)
    torch.rand(5)
    assert same(one, prospr.score(case.model(), case.batches(1), method=NtkSap(), seed=1))
    assert not same(one, prospr.score(case.model(), case.batches(1), method=NtkSap(), seed=2))


def test_of_the_data_only_the_shape_is_looked_at():
    case = BY_NAME["residual"]
    images, labels = case.batches(1)[0]
    one = prospr.score(case.model(), [(images, labels)], method=NtkSap())
    assert same(one, prospr.score(case.model(), [(images * 100 - 7, labels)], method=NtkSap()))
    assert not same(one, prospr.score(case.model(), [(images[:3], labels[:3])], method=NtkSap()))


def test_integer_inputs_are_used_as_they_are():
    case = BY_NAME["tied"]
    tokens = case.batches(2)
    one = prospr.score(case.model(), tokens[:1], method=NtkSap(), **case.settings)
    assert not same(one, prospr.score(case.model(), tokens[1:], method=NtkSap(), **case.settings))


def normal(model):
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)


@pytest.mark.parametrize("init", [None, normal])
@pytest.mark.parametrize("name", ["mlp", "residual", "lstm"])
def test_the_models_own_weights_play_no_part(name, init):
    case = BY_NAME[name]
    one, other = (prospr.score(case.model(seed), case.batches(1), method=NtkSap(init=init)) for seed in (0, 9))
    assert same(one, other)


def test_an_init_that_does_nothing_keeps_the_models_own_weights():
    case = BY_NAME["mlp"]
    kept = NtkSap(init=lambda model: None)
    one, other = (prospr.score(case.model(seed), case.batches(1), method=kept) for seed in (0, 9))
    assert not same(one, other)


def test_what_is_frozen_is_not_redrawn():
    case = BY_NAME["frozen-unused-mixed-modes"]
    model, other = case.model(), case.model()
    nn.init.normal_(other.frozen.weight)
    one, two = (prospr.score(m, case.batches(1), method=NtkSap()) for m in (model, other))
    assert not same(one, two)
    assert not one["unused.weight"].any()


def test_norm_layers_in_an_eval_model_are_measured_and_those_frozen_by_the_user_are_not():
    case = BY_NAME["residual"]
    train = prospr.score(case.model(), case.batches(1), method=NtkSap())
    assert same(train, prospr.score(case.model().eval(), case.batches(1), method=NtkSap()))
    frozen = case.model()
    frozen.norm1.eval()
    one = prospr.score(frozen, case.batches(1), method=NtkSap())
    assert not same(one, train)
    frozen.norm1.running_var.mul_(9)
    assert not same(one, prospr.score(frozen, case.batches(1), method=NtkSap()))


def everything(model):
    return (
        {n: t.clone() for n, t in model.state_dict().items()},
        [id(t) for t in (*model.parameters(), *model.buffers())],
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [(p.requires_grad, len(p._backward_hooks or ())) for p in model.parameters()],
        [(m.training, getattr(m, "momentum", None), sorted(m.__dict__)) for m in model.modules()],
        torch.get_rng_state(),
    )


def assert_equal(one, other):
    state, ids, grads, requires, modes, random = one
    state_, ids_, grads_, requires_, modes_, random_ = other
    assert same(state, state_)
    assert (ids, requires, modes) == (ids_, requires_, modes_)
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(grads, grads_, strict=True))
    assert torch.equal(random, random_)


REDRAWABLE = [c for c in CASES if c.name not in ("weight-norm", "attention")]


@pytest.mark.parametrize("case", REDRAWABLE, ids=lambda c: c.name)
def test_runs_on_every_network_and_leaves_it_alone(case):
    model, batches = case.model(), case.batches(2)
    for p in list(model.parameters())[::2]:
        p.grad = torch.full_like(p, 0.25) if p.requires_grad else None
    kept, before = copy.deepcopy(batches), everything(model)
    scores = prospr.score(model, batches, method=NtkSap(), **case.settings)
    assert_equal(before, everything(model))
    assert all(s.shape == model.get_parameter(n).shape for n, s in scores.items())
    rule = Iterative(NtkSap(redraws=1), rounds=3)
    masks = prospr.prune(model, batches, 0.5, method=rule, collapse="ignore", **case.settings)
    assert masks.kept == round(0.5 * masks.total)
    for a, b in zip(batches, kept, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("where", ["init", "forward"])
def test_a_failure_in_the_middle_leaves_the_model_alone(where):
    case, calls = BY_NAME["residual"], []
    model = case.model()

    def fail(*_):
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError("in the middle")

    if where == "forward":
        model.head.register_forward_pre_hook(fail)
    before = everything(model)
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        prospr.score(model, case.batches(1), method=NtkSap(init=fail if where == "init" else None))
    assert_equal(before, everything(model))


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_where_gradients_are_off(guard):
    case = BY_NAME["residual"]
    want = prospr.score(case.model(), case.batches(1), method=NtkSap())
    with guard():
        found = prospr.score(case.model(), case.batches(1), method=NtkSap())
    assert same(want, found)


@pytest.mark.parametrize("recover", [False, True])
def test_masks_that_are_on_the_model_hold(recover):
    case = BY_NAME["residual"]
    model = case.model()
    masks = prospr.prune(model, case.batches(1), 0.5, method="magnitude")
    scores = NtkSap(redraws=2).saliency(problem_of(case, model, recover=recover))
    other = NtkSap(redraws=2).saliency(problem_of(case, masks=masks))
    for n, mask in masks.items():
        assert not scores[n][~mask].any()
        assert torch.allclose(scores[n], other[n], rtol=1e-9)


def test_twenty_rounds_prune_without_emptying_a_layer():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 4))
    masks = prospr.prune(
        net, [(torch.zeros(50, 10), torch.zeros(50, dtype=torch.long))], 0.95, method=Iterative(NtkSap(), rounds=20)
    )
    assert masks.kept == round(0.05 * masks.total)
    assert not masks.empty()


def test_a_parameter_that_nothing_redraws_is_named_with_the_remedy():
    case = BY_NAME["attention"]
    with pytest.raises(SettingError, match=r"token: Attention has no reset_parameters to draw it anew; pass init="):
        prospr.score(case.model(), case.batches(1), method=NtkSap())
    scores = prospr.score(case.model(), case.batches(1), method=NtkSap(init=normal))
    assert all(s.any() for s in scores.values())


def test_an_input_must_be_known():
    model = BY_NAME["mlp"].model()
    with pytest.raises(BatchError, match="NtkSap must know the shape of an input"):
        prospr.score(model, None, method=NtkSap())
    with pytest.raises(BatchError, match="a loss that calls the model"):
        prospr.score(model, [1.0], method=NtkSap(), loss=lambda m, b: m[0].weight.sum() * b)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epsilon": 0.0}, "use a positive number"),
        ({"epsilon": float("inf")}, "use a positive number"),
        ({"redraws": 0}, "use a whole number, 1 or more"),
        ({"redraws": 2.5}, "use a whole number, 1 or more"),
        ({"init": "kaiming"}, "use a function that initialises the model"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(SettingError, match=message):
        NtkSap(**settings)


@pytest.mark.parametrize("name", ["residual", "tied", "gru"])
def test_redrawn_parameters_are_those_of_a_redrawn_copy(name):
    model = BY_NAME[name].model()
    before = everything(model)
    found = redrawn_parameters(model, seed=4)
    assert_equal(before, everything(model))
    assert same(found, {n: p.detach() for n, p in prospr.sanity.redraw(model, seed=4).named_parameters()})
