"""FLOPs by hand, also where PyTorch would run one fused operation; the model is left alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from prospr.counting import flops, flops_by_module


class Bare(nn.Module):
    """Attention without a layer around it."""

    def forward(self, q, kv):
        return F.scaled_dot_product_attention(q, kv, kv)


TOKENS = torch.zeros(2, 5, 8)  # 2 samples of 5 tokens, 8 wide
CASES = {
    "linear": (nn.Linear(8, 4), TOKENS, 2 * 10 * 8 * 4),
    "convolution": (nn.Conv2d(2, 6, 3, stride=2), torch.zeros(1, 2, 7, 9), 2 * 2 * 6 * 9 * 12),
    "depthwise": (nn.Conv2d(8, 8, 3, padding=1, groups=8), torch.zeros(1, 8, 4, 4), 2 * 8 * 9 * 16),
    "transposed": (nn.ConvTranspose2d(8, 4, 2, stride=2), torch.zeros(1, 8, 3, 3), 2 * 8 * 4 * 4 * 9),
    # 2 samples x 3 heads, 4 queries, 5 keys, 8 wide: scores, and their mean of values
    "attention": (Bare(), (torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 5, 8)), 2 * 2 * 6 * 4 * 5 * 8),
    # q, k, v and the output 8 x 8, the MLP 8 x 16 twice; scores and values of 2 x 2 heads of 4
    "transformer": (
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        TOKENS,
        2 * 10 * (4 * 64 + 2 * 128) + 2 * 2 * 4 * 5 * 5 * 4,
    ),
    # four gates of (8 + 4) x 4 weights, three in a GRU
    "lstm": (nn.LSTM(8, 4, batch_first=True), TOKENS, 2 * 10 * 4 * 12 * 4),
    "gru": (nn.GRU(8, 4, batch_first=True), TOKENS, 2 * 10 * 3 * 12 * 4),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("training", [True, False])
def test_flops_by_hand(case, training):
    model, example, expected = CASES[case]
    assert flops(model.train(training), example) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_counts_the_same(case):
    model, example, expected = CASES[case]
    assert flops(model.cuda(), example) == expected  # an example is brought to the model's device
    model.cpu()


def test_modules_add_up():
    net = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 5)))
    assert flops_by_module(net, ((torch.zeros(2, 3),), {})) == (128, {"": 128, "0": 48, "1": 80, "1.1": 80})


class Counts(nn.Module):
    """Writes to a buffer and draws random numbers whatever its mode."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.5)
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        self.calls += 1
        return self.fc(self.drop(self.norm(x)) + torch.randn(3))


def test_nothing_is_left_behind():
    model = Counts()
    model.norm.eval()
    before = {key: t.clone() for key, t in model.state_dict().items()}
    state = torch.get_rng_state()
    switches = (torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled)
    assert flops(model, torch.ones(1, 3)) == 12  # one sample: a norm in train mode would refuse it
    with pytest.raises(RuntimeError, match="running_mean"):
        flops(model, torch.ones(1, 4))
    assert all(torch.equal(t, model.state_dict()[key]) for key, t in before.items())
    assert torch.equal(torch.get_rng_state(), state)
    assert (model.training, model.norm.training, model.drop.training) == (True, False, True)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    after = (torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled)
    assert after == switches


def test_compiled_models_are_counted_uncompiled():
    assert flops(torch.compile(nn.Linear(8, 4)), torch.zeros(1, 8)) == 64
