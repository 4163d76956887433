"""Channels of a network on a GPU. Skipped where there is none."""

from contextlib import nullcontext

import pytest
import torch

import prospr
from prospr.lab.models import build

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("method", ["3sp", prospr.Iterative(prospr.Snip(), 3), prospr.ProsPr(steps=1, lr=0.01)])
@pytest.mark.parametrize("name", ["resnet20", "vit"])
def test_shrunk_is_masked(name, method):
    model = build(name, seed=0).double().cuda()
    x = torch.randn(8, 3, 32, 32, dtype=torch.float64, device="cuda")
    batches = [(x, torch.arange(8, device="cuda"))] * 4
    with pytest.warns(prospr.errors.KeptWholeWarning) if name == "vit" else nullcontext():
        masks = prospr.prune(model, batches, 0.5, method=method, granularity="channel")
    small = prospr.shrink(model, masks, x)
    assert all(p.is_cuda for p in small.parameters())
    for train in (True, False):
        model.train(train)
        small.train(train)
        assert torch.allclose(small(x), model(x), rtol=1e-9, atol=1e-9)
