"""The same numbers on a GPU: its kernels, its random numbers, its memory."""

import pytest
import torch
from cases import CASES
from oracle import relative_error

from prospr.meta import SGD, AdamW, metagrad, pure_loss

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
    for cpu, cuda in results.values():
        assert relative_error(cuda, cpu) < 1e-8


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


def test_activations_do_not_grow_with_the_number_of_steps():
    case = next(c for c in CASES if c.name == "residual")
    model = case.model().float().cuda()
    loss = pure_loss(model)
    images = torch.randn(256, 2, 32, 32, device="cuda")
    batches = [(images, torch.randint(0, 3, (256,), device="cuda"))] * 31

    def peak(steps):
        torch.cuda.reset_peak_memory_stats()
        metagrad(loss, loss.params(), batches[: steps + 1], SGD(lr=0.01, momentum=0.9))
        return torch.cuda.max_memory_allocated()

    peak(1)
    assert peak(30) < 1.02 * peak(2)
