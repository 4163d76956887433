"""The same numbers on a GPU: its kernels, its random numbers, its memory."""

from collections import UserDict

import pytest
import torch
import torch.nn.functional as F
from cases import CASES
from oracle import dual_backward, relative_error

from prospr.meta import SGD, AdamW, capture, metagrad, pure_loss
from prospr.meta.metagrad import adjoint
from prospr.meta.products import Products

pytestmark = pytest.mark.gpu


def on(device, batch):
    return batch.to(device) if isinstance(batch, torch.Tensor) else tuple(t.to(device) for t in batch)


@pytest.mark.parametrize("mode", ["reverse", "auto"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_equals_the_cpu_in_float64(case, mode):
    results = {}
    for device in ("cpu", "cuda"):
        model = case.model().to(device)
        for module in model.modules():  # the two devices draw other random numbers
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        loss = pure_loss(model, **case.settings)
        for optimizer in (SGD(lr=0.1, momentum=0.9), AdamW(lr=0.01, eps=1e-3)):
            g = metagrad(loss, loss.params(), case.batches(4), optimizer, mode=mode)  # batches move by themselves
            results.setdefault(type(optimizer).__name__, []).append({n: t.cpu() for n, t in g.items()})
    # cuDNN's float64 kernels round more than the CPU's; PyTorch's fused weight norm has float32 inside on a GPU
    tolerance = 1e-5 if case.name == "weight-norm" else 1e-7
    for cpu, cuda in results.values():
        assert relative_error(cuda, cpu) < tolerance


@pytest.mark.parametrize("store", ["cpu", "recompute"])
def test_every_store_gives_the_same(store):
    case = next(c for c in CASES if c.name == "checkpointed")
    model = case.model().cuda()
    loss = pure_loss(model)
    kept = metagrad(loss, loss.params(), case.batches(8), SGD(lr=0.1, momentum=0.9))
    state = torch.cuda.get_rng_state()
    other = metagrad(loss, loss.params(), case.batches(8), SGD(lr=0.1, momentum=0.9), store=store)
    assert relative_error(other, kept) < 1e-10  # with dropout replayed
    assert torch.equal(state, torch.cuda.get_rng_state())


def _wide_and_deep(steps, store):
    """The derivative of a network of 16 MB over many steps, and the most GPU memory it took."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1000, 2000), torch.nn.Tanh(), torch.nn.Linear(2000, 1000)).cuda()
    loss = pure_loss(model)
    batches = ((torch.randn(64, 1000, device="cuda"), torch.randint(0, 1000, (64,), device="cuda")) for _ in range(999))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    settings = {"steps": steps, "store": store, "capture": False}
    result = metagrad(loss, loss.params(), batches, SGD(lr=0.01, momentum=0.9), **settings)
    return result, torch.cuda.max_memory_allocated()


def test_a_trajectory_on_the_cpu_takes_no_room_on_the_gpu():
    (kept, much), (copied, little) = (_wide_and_deep(60, store) for store in ("device", "cpu"))
    assert all(torch.equal(copied[name], t) for name, t in kept.items())  # copied while others compute, yet right
    assert much - little > 40 * 16e6
    assert _wide_and_deep(120, "cpu")[1] < 1.1 * little


def test_activations_do_not_grow_with_the_number_of_steps():
    case = next(c for c in CASES if c.name == "residual")
    model = case.model().float().cuda()
    loss = pure_loss(model)
    images = torch.randn(256, 2, 32, 32, device="cuda")
    batches = [(images, torch.randint(0, 3, (256,), device="cuda"))] * 31

    def peak(steps):
        torch.cuda.reset_peak_memory_stats()
        metagrad(loss, loss.params(), batches[: steps + 1], SGD(lr=0.01, momentum=0.9), capture=False)
        return torch.cuda.max_memory_allocated()

    peak(1)
    assert peak(30) < 1.01 * peak(2)


@pytest.mark.parametrize("name", ["dropout", "checkpointed", "residual", "lstm", "attention"])
def test_recorded_steps_equal_direct_ones(name, monkeypatch):
    monkeypatch.setattr(capture, "PAYS_ANYWHERE", 0)  # whether it pays depends on what else the GPU does just now
    case = next(c for c in CASES if c.name == name)
    model = case.model().cuda()
    loss = pure_loss(model, **case.settings)
    batches = case.batches(13)
    for optimizer in (SGD(lr=0.1, momentum=0.9), AdamW(lr=0.01, eps=1e-3)):
        direct = metagrad(loss, loss.params(), batches, optimizer, capture=False)
        products = Products(loss)
        lam, exponent = adjoint(products, loss.params(), batches, optimizer)
        assert products.recorder.enabled, "the recording was given up"
        assert [r is not None for r in products.recorder._recordings.values()] == [True, True]
        assert relative_error({n: t * 2**exponent for n, t in lam.items()}, direct) < 1e-7


def test_a_loss_that_cannot_be_recorded_is_evaluated_directly():
    case = next(c for c in CASES if c.name == "mlp")
    model = case.model().cuda()

    def waits(model, batch):
        value = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        assert value.item() > 0  # a wait for the GPU, which no graph can hold
        return value

    loss, plain = pure_loss(model, waits), pure_loss(model)
    got = metagrad(loss, loss.params(), case.batches(9), SGD(lr=0.1))
    want = metagrad(plain, plain.params(), case.batches(9), SGD(lr=0.1))
    assert relative_error(got, want) < 1e-10
    assert torch.ones(3, device="cuda").sum().item() == 3  # the device is well


@pytest.mark.parametrize("shape", [(7, 3), (64, 5, 9, 7), (16, 130, 4, 4)])
@pytest.mark.parametrize("affine", [True, False])
def test_fused_batch_norm_equals_pytorchs_double_backward(shape, affine):
    x = (3 * torch.randn(shape, dtype=torch.float64) + 2).cuda()
    x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
    channels = shape[1]
    weights = [
        torch.rand(channels, dtype=torch.float64).cuda() + 0.5,
        torch.randn(channels, dtype=torch.float64).cuda(),
    ]
    inputs = [x, *weights] if affine else [x]
    call = lambda x, w=None, b=None: torch.tanh(F.batch_norm(x, None, None, w, b, True))  # noqa: E731
    ours, theirs = dual_backward(call, inputs, True), dual_backward(call, inputs, False)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-8, atol=1e-8)


def test_recorded_steps_read_every_batch_of_a_mapping():
    """A batch of a class of its own must be copied into the recording, not remembered by it."""
    case = next(c for c in CASES if c.name == "mlp")
    model = case.model().cuda()
    loss = pure_loss(model, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]))
    batches = [UserDict(x=x, y=y) for x, y in case.batches(13)]
    direct = metagrad(loss, loss.params(), batches, SGD(lr=0.1), capture=False)
    assert relative_error(metagrad(loss, loss.params(), batches, SGD(lr=0.1)), direct) < 1e-7
