"""Masks hold wherever in a network the weight is used."""

import copy

import pytest
import torch
import torch.nn.functional as F
from masks.training import OPTIMIZERS, STEPS, assert_held, random_masks, weights
from torch import nn
from torch.utils.checkpoint import checkpoint

import prospr


class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.shared(F.relu(self.shared(x))))


class NamedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.two = self.one
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.two(F.relu(self.one(x))))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 6)
        self.mix = nn.Linear(6, 6)
        self.out = nn.Linear(6, 5, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(self.mix(self.embedding(x)).mean(1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.attention(x, x, x, need_weights=False)[0].mean(1))


class OtherWidths(Attention):
    """Key and value of other widths: three separate projections."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, kdim=4, vdim=5)

    def forward(self, x):
        return self.out(self.attention(x, x[..., :4], x[..., :5])[0].mean(1))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=True)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.layer(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 4, num_layers=2, batch_first=True, bidirectional=True, proj_size=3)
        self.cell = nn.GRUCell(6, 4)
        self.out = nn.Linear(10, 3)

    def forward(self, x):
        return self.out(torch.cat([self.lstm(x)[0][:, -1], self.cell(x[:, 0])], 1))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(checkpoint(self.body, x, use_reentrant=False))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv1d(1, 4, 3, padding=1)
        self.depthwise = nn.Conv1d(4, 4, 3, padding=1, groups=4)
        self.up = nn.ConvTranspose1d(4, 2, 2, stride=2)
        self.pair = nn.Bilinear(24, 24, 3)

    def forward(self, x):
        x = self.up(F.relu(self.depthwise(F.relu(self.down(x[:, None]))))).flatten(1)
        return self.pair(x, x)


def flat(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def sequences(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def tokens(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 5, (8, 4), generator=generator), torch.randint(0, 5, (8,), generator=generator)


PLACES = {
    CalledTwice: (flat, ["shared.weight", "out.weight"]),
    NamedTwice: (flat, ["one.weight", "out.weight"]),
    Tied: (tokens, ["embedding.weight", "mix.weight"]),
    Attention: (sequences, ["attention.in_proj_weight", "attention.out_proj.weight", "out.weight"]),
    OtherWidths: (
        sequences,
        [
            *(f"attention.{w}" for w in ("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight")),
            "out.weight",
        ],
    ),
    Encoder: (
        sequences,
        [
            *("layer.self_attn.in_proj_weight", "layer.self_attn.out_proj.weight"),
            *("layer.linear1.weight", "layer.linear2.weight", "out.weight"),
        ],
    ),
    Recurrent: (
        sequences,
        [
            *(
                f"lstm.weight_{kind}_l{layer}{back}"
                for layer in (0, 1)
                for back in ("", "_reverse")
                for kind in ("ih", "hh", "hr")
            ),
            *("cell.weight_ih", "cell.weight_hh", "out.weight"),
        ],
    ),
    Checkpointed: (flat, ["body.0.weight", "body.2.weight", "out.weight"]),
    Convolutions: (flat, ["down.weight", "depthwise.weight", "up.weight", "pair.weight"]),
}


def build(kind):
    torch.manual_seed(0)
    return kind()


def fit(model, data, name="sgd", steps=STEPS):
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(steps):
        inputs, targets = data(step)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", PLACES)
def test_prunable_finds_every_matrix_once(kind):
    assert list(prospr.prunable(build(kind))) == PLACES[kind][1]


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_hundred_steps(kind, name):
    model, data = build(kind), PLACES[kind][0]
    masks, before = random_masks(model), weights(model)
    masks.apply(model)
    fit(model, data, name)
    assert_held(model, masks, before)


@pytest.mark.parametrize("kind", PLACES)
def test_a_copy_is_masked_and_its_own(kind):
    model, data = build(kind), PLACES[kind][0]
    masks = random_masks(model)
    masks.apply(model)
    other, kept = copy.deepcopy(model), weights(model)
    before = weights(other)
    fit(other, data, steps=10)
    assert_held(other, masks, before)
    assert all(torch.equal(kept[name], p) for name, p in model.named_parameters())
    model.eval(), other.eval()
    other.load_state_dict(model.state_dict())
    inputs = data(0)[0]
    assert torch.equal(model(inputs), other(inputs))


def test_both_places_of_a_tied_weight():
    model = build(Tied)
    masks = random_masks(model)
    masks.apply(model)
    fit(model, tokens)
    assert model.out.weight is model.embedding.weight
    assert bool((model.out.weight[~masks["embedding.weight"]] == 0).all())
    other = copy.deepcopy(model)
    assert other.out.weight is other.embedding.weight
    assert prospr.Masks.of(other) == masks


def test_a_dense_checkpoint_of_tied_weights():
    """Both names of the weight are in the checkpoint, and the one without the mask is loaded last."""
    model = build(Tied)
    dense = {name: torch.full_like(t, 2.0) for name, t in model.state_dict().items()}
    masks = random_masks(model)
    masks.apply(model)
    model.load_state_dict(dense)
    mask = masks["embedding.weight"]
    assert torch.equal(model.out.weight, mask * 2.0)
    assert model.out.weight is model.embedding.weight


def test_a_tied_weight_has_one_mask():
    model = build(Tied)
    mask = torch.rand(5, 6) > 0.5
    before = weights(model)
    twice = prospr.Masks({"embedding.weight": mask, "out.weight": ~mask})
    with pytest.raises(prospr.errors.MaskError, match=r"out\.weight: .* the same weight as embedding\.weight"):
        twice.apply(model)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    first, second = prospr.Masks({"embedding.weight": mask}), prospr.Masks({"out.weight": ~mask})
    first.apply(model)
    second.apply(model)  # by its other name: replaces
    assert torch.equal(prospr.Masks.of(model)["embedding.weight"], ~mask)
    second.remove(model)
    assert not [key for key in model.state_dict() if "mask" in key]
    assert not any(m._load_state_dict_post_hooks for m in model.modules())
