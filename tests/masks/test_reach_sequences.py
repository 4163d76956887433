"""Paths through attention and recurrent layers, by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import prospr
from prospr.masks.reach import reach


class Functional(nn.Module):
    """Attention of two heads of width 2 by scaled_dot_product_attention, or by its formula."""

    def __init__(self, formula=False, causal=False):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
        self.out = nn.Linear(4, 3)
        self.formula, self.causal = formula, causal

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (2, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.formula:
            scores = q @ k.transpose(-2, -1) / 2**0.5
            if self.causal:
                future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
                scores = scores.masked_fill(future, -torch.inf)
            mixed = scores.softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Module(nn.Module):
    """The same by nn.MultiheadAttention."""

    def __init__(self, **settings):
        super().__init__()
        self.mix = nn.MultiheadAttention(4, 2, **settings)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        if not self.mix.batch_first:
            x = x.transpose(0, 1)
        return self.out(self.mix(x, x, x)[0])


def everything(model):
    return {name: torch.ones_like(p, dtype=torch.bool) for name, p in prospr.prunable(model).items()}


def effective(model, masks, x):
    found = reach(model, masks, ((x,), {}))
    assert found is not None
    return {name.removesuffix(".weight"): m for name, m in found.effective.items()}, found.connected


X = torch.ones(1, 3, 4)
KINDS = [Functional(), Functional(formula=True), Functional(formula=True, causal=True), Functional(causal=True)]


@pytest.mark.parametrize("model", KINDS)
def test_a_dead_value(model):
    masks = everything(model)
    masks["v.weight"][1] = False  # the second value of the first head
    found, connected = effective(model, masks, X)
    assert connected
    assert torch.equal(found["out"], torch.tensor([[True, False, True, True]] * 3))
    assert {n: int(m.sum()) for n, m in found.items()} == {"q": 16, "k": 16, "v": 12, "out": 9}


@pytest.mark.parametrize("model", KINDS)
def test_a_head_without_queries_still_carries_values(model):
    """Attention is then even over all keys: the head's keys are of no use, and its values are."""
    masks = everything(model)
    masks["q.weight"][:2] = False
    found, connected = effective(model, masks, X)
    assert connected
    assert {n: int(m.sum()) for n, m in found.items()} == {"q": 8, "k": 8, "v": 16, "out": 12}
    assert not found["k"][:2].any()


@pytest.mark.parametrize("model", KINDS)
def test_no_values_no_path(model):
    masks = everything(model)
    masks["v.weight"][:] = False
    found, connected = effective(model, masks, X)
    assert connected is False
    assert not any(m.any() for m in found.values())


@pytest.mark.parametrize("settings", [{}, {"batch_first": True}, {"kdim": 4, "vdim": 4, "batch_first": True}])
@pytest.mark.parametrize("training", [True, False])
def test_multihead_attention(settings, training):
    model = Module(**settings).train(training)
    masks = everything(model)
    masks["mix.in_proj_weight"][:2] = False  # the queries of the first head
    masks["mix.in_proj_weight"][4 + 4 + 3] = False  # the last value of the second head
    masks["mix.out_proj.weight"][0] = False
    found, connected = effective(model, masks, X)
    assert connected
    assert model.training is training
    rows = found["mix.in_proj_weight"].any(1).tolist()
    queries, keys, values = [False, False, True, True], [False, False, True, True], [True, True, True, False]
    assert rows == [*queries, *keys, *values]
    assert torch.equal(found["mix.out_proj"], torch.tensor([[False] * 4] + [[True, True, True, False]] * 3))
    assert torch.equal(found["out"], torch.tensor([[False, True, True, True]] * 3))


def test_attention_of_a_single_sequence():
    model = Module(batch_first=True)
    masks = everything(model)
    masks["mix.in_proj_weight"][4 + 4] = False
    found, _ = effective(model, masks, X[0])
    assert torch.equal(found["mix.out_proj"], torch.tensor([[False, True, True, True]] * 4))


def test_heads_that_share_keys_and_values():
    """Grouped queries: four heads of width 1 read two heads of keys and values."""

    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.out = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 3)

        def forward(self, x):
            q, k, v = (layer(x).unflatten(-1, (-1, 1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            return self.out(mixed.transpose(1, 2).flatten(-2))

    model = Grouped()
    masks = everything(model)
    masks["v.weight"][1] = False  # read by the last two heads
    found, _ = effective(model, masks, X)
    assert torch.equal(found["out"], torch.tensor([[True, True, False, False]] * 3))
    assert found["q"].any(1).tolist() == [True, True, False, False]
    assert found["k"].any(1).tolist() == [True, False]


def test_multihead_attention_with_separate_projections():
    class Separate(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.MultiheadAttention(4, 2, kdim=3, vdim=2, batch_first=True)

        def forward(self, x):
            return self.mix(x, x[..., :3], x[..., :2])[0]

    model = Separate()
    masks = everything(model)
    masks["mix.v_proj_weight"][0] = False
    found, connected = effective(model, masks, X)
    assert connected
    assert {n.removeprefix("mix."): int(m.sum()) for n, m in found.items()} == {
        "q_proj_weight": 16,
        "k_proj_weight": 12,
        "v_proj_weight": 6,
        "out_proj": 12,
    }


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_transformer_encoder_layer(norm_first, training):
    model = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, norm_first=norm_first).train(training)
    masks = everything(model)
    found = prospr.inspect(model, masks, X)
    assert [layer.effective for layer in found.layers] == [48, 16, 24, 24]
    masks["linear1.weight"][:] = False
    found = prospr.inspect(model, masks, X)
    assert [layer.effective for layer in found.layers] == [48, 16, 0, 0]
    assert found.connected
    assert found.empty == ["linear1.weight"]


class Recurrent(nn.Module):
    def __init__(self, kind, **settings):
        super().__init__()
        self.rnn = kind(3, 2, batch_first=True, **settings)
        self.out = nn.Linear(4 if settings.get("bidirectional") else 2, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_a_dead_unit(kind, gates):
    """Its bias gives it a value, which is no signal: who reads the unit reads nothing."""
    model = Recurrent(kind)
    masks = everything(model)
    masks["rnn.weight_ih_l0"][::2] = False  # unit 0 of each gate
    masks["rnn.weight_hh_l0"][::2] = False
    found, connected = effective(model, masks, torch.ones(1, 4, 3))
    assert connected
    assert torch.equal(found["rnn.weight_ih_l0"], masks["rnn.weight_ih_l0"])
    assert torch.equal(found["rnn.weight_hh_l0"], torch.tensor([[False, False], [False, True]] * gates))
    assert found["out"].tolist() == [[False, True]]
    masks["out.weight"][0, 1] = False
    assert effective(model, masks, torch.ones(1, 4, 3))[1] is False


def test_the_first_layer_feeds_the_second():
    model = Recurrent(nn.LSTM, num_layers=2)
    masks = everything(model)
    masks["rnn.weight_ih_l0"][:] = False
    found, connected = effective(model, masks, torch.ones(1, 4, 3))
    assert connected is False
    assert not any(m.any() for m in found.values())


def test_both_directions():
    model = Recurrent(nn.GRU, bidirectional=True)
    masks = everything(model)
    masks["rnn.weight_ih_l0_reverse"][:] = False
    found, connected = effective(model, masks, torch.ones(1, 4, 3))
    assert connected
    assert found["out"].tolist() == [[True, True, False, False]]
    assert not found["rnn.weight_hh_l0_reverse"].any()


def test_a_cell():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = nn.LSTMCell(3, 2), nn.Linear(2, 1)

        def forward(self, x):
            state = None
            for t in range(x.shape[1]):
                state = self.cell(x[:, t], state)
            return self.out(state[0])

    model = Loop()
    masks = everything(model)
    masks["cell.weight_ih"][::2] = False
    masks["cell.weight_hh"][::2] = False
    found, _ = effective(model, masks, torch.ones(1, 4, 3))
    assert found["out"].tolist() == [[False, True]]
