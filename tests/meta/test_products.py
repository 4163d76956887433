"""Gradients, Hessian-vector products and the fused kernels inside them."""

import random
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from cases import BY_NAME
from oracle import dual_backward
from torch import nn

import prospr
from prospr.meta import gradient, hvp, pure_loss
from prospr.meta.products import Products


def by_differences(loss, params, batch, vector, h=1e-5):
    plus = gradient(loss, {n: p + h * vector[n] for n, p in params.items()}, batch)[1]
    minus = gradient(loss, {n: p - h * vector[n] for n, p in params.items()}, batch)[1]
    return {n: (plus[n] - minus[n]) / (2 * h) for n in params}


def noise(params, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in params.items()}


CONVOLUTIONS = {
    "plain": (lambda x, w, b: F.conv2d(x, w, b), (4, 3, 5, 5), (6, 3, 3, 3)),
    "stride-pad-dilation": (
        lambda x, w, b: F.conv2d(x, w, b, stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
        (2, 3, 7, 8),
        (4, 3, 3, 2),
    ),
    "groups": (lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=2), (2, 4, 5, 5), (6, 2, 3, 3)),
    "one-dimension": (lambda x, w, b: F.conv1d(x, w, b, stride=2), (2, 3, 9), (4, 3, 3)),
    "three-dimensions": (lambda x, w, b: F.conv3d(x, w, b, padding=1), (2, 2, 3, 4, 4), (3, 2, 2, 3, 3)),
    "same": (lambda x, w, b: F.conv2d(x, w, b, padding="same"), (2, 3, 5, 5), (4, 3, 3, 3)),
    "unbatched": (lambda x, w, b: F.conv2d(x, w, b), (3, 5, 5), (4, 3, 3, 3)),
    "transposed": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1),
        (2, 3, 4, 4),
        (3, 5, 3, 3),
    ),
    "transposed-groups": (lambda x, w, b: F.conv_transpose1d(x, w, b, groups=2), (2, 4, 5), (4, 3, 3)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_convolution_kernels_equal_pytorchs_double_backward(name, bias):
    function, x, w = CONVOLUTIONS[name]
    x, w = torch.randn(x, dtype=torch.float64), torch.randn(w, dtype=torch.float64)
    channels = function(x, w, None).shape[-3 if name == "unbatched" else 1]
    if bias:
        inputs = [x, w, torch.randn(channels, dtype=torch.float64)]
        call = function
    else:
        inputs, call = [x, w], lambda x, w: function(x, w, None)
    for ours, theirs in zip(dual_backward(call, inputs, True), dual_backward(call, inputs, False), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (4, 3, 5, 2), (2, 3, 2, 3, 2)])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_kernel_equals_pytorchs_double_backward(shape, affine):
    x = 3 * torch.randn(shape, dtype=torch.float64) + 2
    if affine:
        inputs = [x, torch.rand(3, dtype=torch.float64) + 0.5, torch.randn(3, dtype=torch.float64)]
        call = lambda x, w, b: F.batch_norm(x, None, None, w, b, True)  # noqa: E731
    else:
        inputs, call = [x], lambda x: F.batch_norm(x, None, None, None, None, True)
    for ours, theirs in zip(dual_backward(call, inputs, True), dual_backward(call, inputs, False), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-8)


def test_batch_norm_on_data_that_needs_no_gradient():
    x = torch.randn(8, 3, 4, 4, dtype=torch.float64)
    inputs = [torch.rand(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)]
    call = lambda w, b: F.batch_norm(x, None, None, w, b, True)  # noqa: E731
    for ours, theirs in zip(dual_backward(call, inputs, True), dual_backward(call, inputs, False), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-10)


def test_batch_norm_of_one_value_a_channel_is_pytorchs_own_error():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    loss = pure_loss(net)
    one = torch.randn(1, 3), torch.tensor([0])
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        hvp(loss, loss.params(), one, noise(loss.params()))


def test_weight_norm_product_by_differences():
    # PyTorch's fused weight norm gives a wrong product here; see docs/mathematics.md.
    loss = lambda p, _: torch.tanh(torch._weight_norm(p["v"], p["g"], 0)).pow(2).sum()  # noqa: E731
    params = {"v": torch.randn(3, 4, dtype=torch.float64), "g": torch.rand(3, 1, dtype=torch.float64)}
    vector = noise(params)
    want = by_differences(loss, params, None, vector)
    for mode in ("reverse", "forward"):
        got = hvp(loss, params, None, vector, mode=mode)
        for n in params:
            assert torch.allclose(got[n], want[n], rtol=1e-6, atol=1e-8)


def test_autocast_inside_the_loss_uses_pytorchs_kernels():
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 3))

    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(batch[0]), batch[1]).float()

    x, y = BY_NAME["view"].batches(1)[0]
    pure = pure_loss(net, loss)
    vector = noise(pure.params())
    half = hvp(pure, pure.params(), (x.float(), y), vector)
    full = hvp(pure_loss(net), pure.params(), (x.float(), y), vector)
    a, b = (torch.cat([t.flatten() for t in h.values()]) for h in (half, full))
    assert F.cosine_similarity(a, b, dim=0) > 0.98


def test_mode_auto_takes_the_forward_way_where_reverse_has_none():
    class OnceDifferentiable(torch.autograd.Function):
        generate_vmap_rule = False

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.save_for_forward(x)
            return x**3

        @staticmethod
        def jvp(ctx, t):
            (x,) = ctx.saved_tensors
            return 3 * x**2 * t

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return 3 * x**2 * g

    loss = lambda p, _: OnceDifferentiable.apply(p["w"]).square().sum()  # noqa: E731
    w, v = {"w": torch.tensor([2.0])}, {"w": torch.tensor([1.0])}
    with pytest.raises(prospr.errors.DerivativeError, match='order="first"'):
        hvp(loss, w, None, v, mode="reverse")
    assert hvp(loss, w, None, v)["w"].item() == pytest.approx(480.0)  # (w^6)'' = 30 w^4


def test_an_error_of_the_loss_itself_is_not_dressed_up():
    def loss(p, _):
        raise RuntimeError("my own trouble")

    with pytest.raises(RuntimeError, match=r"^my own trouble$"):
        hvp(loss, {"w": torch.ones(1)}, None, {"w": torch.ones(1)})


def test_a_loss_linear_in_the_weights_has_no_curvature():
    product = hvp(lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(2)}, 3.0, {"w": torch.ones(2)})
    assert product["w"].tolist() == [0.0, 0.0]


def test_settings_are_checked():
    loss, w = (lambda p, x: p["w"].sum()), {"w": torch.ones(2)}
    with pytest.raises(prospr.PruningError, match="mode='sideways'"):
        hvp(loss, w, None, w, mode="sideways")
    with pytest.raises(prospr.PruningError, match="micro_batch=0"):
        gradient(loss, w, None, micro_batch=0)
    with pytest.raises(prospr.PruningError, match=r"micro_batch=2\.0: use a whole number"):
        gradient(loss, w, None, micro_batch=2.0)
    with pytest.raises(prospr.PruningError, match="first dimension to split"):
        gradient(loss, w, 3.0, micro_batch=2)
    with pytest.raises(prospr.PruningError, match=r"first dimension \(4 and 5\)"):
        gradient(loss, w, (torch.ones(4), torch.ones(5)), micro_batch=2)


def test_micro_batches_of_named_tuples_dicts_and_scalars():
    from collections import namedtuple

    Pair = namedtuple("Pair", "x scale")
    mean = lambda p, b: (p["w"] * b.x).mean() * b.scale  # noqa: E731
    batch = Pair(torch.arange(6.0), torch.tensor(2.0))
    w = {"w": torch.tensor(3.0)}
    assert gradient(mean, w, batch, micro_batch=4)[1]["w"].item() == pytest.approx(5.0)
    named = lambda p, b: (p["w"] * b["x"]).mean() * b["times"]  # noqa: E731
    assert gradient(named, w, {"x": torch.arange(6.0), "times": 2}, micro_batch=5)[1]["w"].item() == pytest.approx(5.0)


class Chance(nn.Module):
    """Leaves out layers by chance."""

    def __init__(self, chance):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))
        self.out, self.chance = nn.Linear(4, 3), chance

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) if self.chance() < 0.5 else x
        return self.out(x)


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_the_numbers_of_random_are_the_same_on_every_pass(mode):
    loss = pure_loss(Chance(random.random).double())
    params, batch = loss.params(), BY_NAME["mlp"].batches(1)[0]
    vector = noise(params)
    found, expected = hvp(loss, params, batch, vector, mode=mode), by_differences(loss, params, batch, vector)
    left_out = [name for name in params if not found[name].any()]
    assert 0 < len(left_out) < 16
    for name in params:
        assert torch.allclose(found[name], expected[name], rtol=1e-6, atol=1e-8), name


@pytest.mark.parametrize("chance", ["random", "numpy", "none"])
def test_what_draws_numbers_outside_pytorch_is_not_recorded(chance):
    """A recording would repeat the branches that were taken when it was made."""
    numbers = pytest.importorskip("numpy").random.random if chance == "numpy" else random.random
    loss = pure_loss(Chance(numbers if chance != "none" else lambda: 0.0).double())
    products = Products(loss)
    products.recorder.watching = True
    products.gradient(loss.params(), BY_NAME["mlp"].batches(1)[0])
    assert products.recorder.enabled is (chance == "none")


class Complex(nn.Module):
    """Wants the last dimension of its activations, and of a parameter, without gaps."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(1, 3, 4, 2))
        self.conv, self.out = nn.Conv2d(2, 3, (1, 3)), nn.Linear(12, 3)

    def forward(self, x):
        x = torch.view_as_complex(self.conv(x)) * torch.view_as_complex(self.scale)
        return self.out(torch.view_as_real(x).square().sum(-1).flatten(1))


def test_a_network_that_needs_its_memory_as_it_was():
    model = Complex().double()
    loss = pure_loss(model)
    products, params = Products(loss), loss.params()
    laid = products.laid_out(params)
    assert laid["scale"].stride() == params["scale"].stride()  # is no kernel
    assert laid["conv.weight"].is_contiguous(memory_format=torch.channels_last)
    batch, vector = (torch.randn(5, 2, 4, 4).double(), torch.tensor([0, 1, 2, 0, 1])), noise(params)
    found, expected = hvp(loss, params, batch, vector), by_differences(loss, params, batch, vector)
    for name in params:
        assert torch.allclose(found[name], expected[name], rtol=1e-6, atol=1e-8), name
    assert gradient(loss, params, batch)[0].item() == pytest.approx(loss(params, batch).item())


def test_a_narrow_strided_shortcut_keeps_its_layout_on_the_cpu():
    """oneDNN corrupts memory there in channels-last (torch 2.13); see `_overruns`."""
    narrow = nn.Sequential(nn.Conv2d(3, 8, 1, stride=2), nn.Flatten(), nn.LazyLinear(2))
    narrow(torch.zeros(1, 3, 8, 8))
    wide = nn.Sequential(nn.Conv2d(16, 8, 1, stride=2), nn.Flatten())
    assert Products(pure_loss(narrow)).layout == torch.contiguous_format
    assert Products(pure_loss(wide)).layout == torch.channels_last
    assert Products(pure_loss(nn.Conv2d(3, 8, 3, stride=2))).layout == torch.channels_last


@pytest.mark.slow
def test_a_narrow_resnet_is_scored_without_a_crash():
    code = """
import torch, prospr
from prospr.lab.models import build
batches = [(torch.randn(8, 3, 64, 64), torch.arange(8))]
for seed in range(3):
    prospr.score(build("resnet18", seed=seed, width=4), batches, method="snip")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_determinants_and_solutions(mode):
    generator = torch.Generator().manual_seed(0)
    w, v = (torch.randn(3, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    found = hvp(lambda p, _: -torch.linalg.slogdet(p["w"])[1], {"w": w}, None, {"w": v}, mode=mode)["w"]
    assert torch.allclose(found, (w.inverse() @ v @ w.inverse()).mT, atol=1e-12)
    solved = lambda p, _: torch.linalg.solve(3 * torch.eye(3, dtype=torch.float64) + p["w"], p["w"]).square().sum()  # noqa: E731
    shifted = [gradient(solved, {"w": w + step * v}, None)[1]["w"] for step in (1e-6, -1e-6)]
    product = hvp(solved, {"w": w}, None, {"w": v}, mode=mode)["w"]
    assert torch.allclose(product, (shifted[0] - shifted[1]) / 2e-6, rtol=1e-6, atol=1e-8)


class Sine(torch.autograd.Function):
    """Once differentiable, with a rule for dual numbers."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * ctx.saved_tensors[0].cos()


def test_once_differentiable_functions_go_forward_but_not_beside_a_solution():
    w, v = {"w": torch.tensor([[0.3, 0.2], [0.1, 0.5]])}, {"w": torch.ones(2, 2)}
    own, plain = (hvp(lambda p, f: f(p["w"]).square().sum(), w, f, v)["w"] for f in (Sine.apply, torch.sin))
    assert torch.allclose(own, plain)
    with pytest.raises(prospr.errors.DerivativeError, match="once_differentiable"):
        hvp(lambda p, f: torch.linalg.solve(torch.eye(2) + p["w"], f(p["w"])).sum(), w, Sine.apply, v)


def test_what_the_loss_itself_raises_is_no_missing_derivative():
    net = nn.Linear(4, 3)
    loss = pure_loss(net)
    batch = torch.randn(5, 4), torch.zeros(5, 1, dtype=torch.long)  # labels of one dimension too many
    with pytest.raises(RuntimeError, match="multi-target") as raised:
        hvp(loss, loss.params(), batch, loss.params())
    assert not isinstance(raised.value, prospr.errors.DerivativeError)


@pytest.mark.parametrize("product", [False, True])
def test_a_parameter_that_is_reached_past_the_model_is_an_error(product):
    net = nn.Linear(4, 3)
    decayed = [net.weight]
    loss = pure_loss(net, lambda m, b: F.cross_entropy(m(b[0]), b[1]) + sum(p.square().sum() for p in decayed))
    batch = torch.randn(5, 4), torch.zeros(5, dtype=torch.long)
    with pytest.raises(prospr.errors.LossError, match="weight: the loss reaches this parameter past the model"):
        hvp(loss, loss.params(), batch, loss.params()) if product else gradient(loss, loss.params(), batch)
    inside = pure_loss(net, lambda m, b: F.cross_entropy(m(b[0]), b[1]) + m.weight.square().sum())
    assert gradient(inside, inside.params(), batch)[1]["weight"].isfinite().all()


def test_hard_sigmoid_has_a_product():
    net = nn.Sequential(nn.Linear(4, 5), nn.Hardsigmoid(), nn.Linear(5, 3))
    smooth = nn.Sequential(nn.Linear(4, 5), nn.Identity(), nn.Linear(5, 3))
    smooth[1].forward = lambda x: (x / 6 + 0.5).clamp(0, 1)
    smooth.load_state_dict(net.state_dict())
    batch = 3 * torch.randn(16, 4), torch.randint(0, 3, (16,))
    ones = {name: torch.ones_like(p) for name, p in net.named_parameters()}
    got, want = (hvp(pure_loss(m), pure_loss(m).params(), batch, ones) for m in (net, smooth))
    assert all(torch.allclose(got[name], want[name], atol=1e-6) for name in got)


def test_complex_convolutions_go_their_own_way():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.c, self.o = nn.Conv1d(2, 3, 3, dtype=torch.complex64), nn.Linear(24, 3)

        def forward(self, x):
            return self.o(torch.view_as_real(self.c(torch.view_as_complex(x)) ** 2).flatten(1))

    loss = pure_loss(Net())
    batch = torch.randn(7, 2, 6, 2), torch.randint(0, 3, (7,))
    ones = {name: torch.ones_like(p) for name, p in loss.params().items()}
    one, other = (hvp(loss, loss.params(), batch, ones, mode=mode) for mode in ("auto", "forward"))
    assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in one)
