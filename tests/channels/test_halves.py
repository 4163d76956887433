"""Channels that forward cuts by number (chunk, split, slices), or that share a module: right whichever go."""

import random

import pytest
import torch
import torch.nn.functional as F
from channels.twins import find
from masks.graphs import Net
from torch import nn

import prospr
from prospr.errors import KeptWholeWarning


def mean(x):
    return x.mean((2, 3))


def chunk_and_cat(m, x):
    a, b = m.c(x).chunk(2, 1)
    return m.h(mean(m.a(torch.cat([a.relu(), b.tanh()], 1)).relu()))


def branches(cut):
    def forward(m, x):
        first, second = cut(m.c(x).relu())
        return m.h(mean(m.a(first) + m.b(second)))

    return lambda: Net(forward, c=nn.Conv2d(3, 16, 3), a=nn.Conv2d(8, 6, 1), b=nn.Conv2d(8, 6, 1), h=nn.Linear(6, 3))


def attention(m, x):
    q, k, v = m.qkv(x.flatten(2).mT).chunk(3, -1)
    return m.o((torch.softmax(q @ k.mT, -1) @ v).mean(1))


def cross_stage(m, x):  # C2f of YOLOv8
    y = list(m.a(x).relu().chunk(2, 1))
    y.append(m.k(y[-1]).relu())
    return m.h(mean(m.o(torch.cat(y, 1))))


def shuffled(m, x):  # a unit of ShuffleNetV2
    a, b = m.a(x).chunk(2, 1)
    y = torch.cat([a, m.k(b).relu()], 1).unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return m.h(mean(y))


def shared_norm(m, x):
    return m.h(mean(m.g(m.b(m.g(m.a(x)).relu())).relu()))


def features_in_training(m, x):
    f = m.b(m.a(x).relu()).relu()
    return (m.h(mean(f)), mean(f)) if m.training else m.h(mean(f))


def divided_in_training(m, x):
    f = m.a(x).relu()
    return m.h(mean(m.b(f / (1 + f.mean(1, keepdim=True)) if m.training else f)))


def gated(m, x):
    a, b = m.c(x).chunk(2, 1)
    return m.h(mean(a * b.sigmoid()))


def dropped(m, x):
    return m.h(F.dropout(mean(m.a(x).relu()), 0.5, m.training))


CONV = {"a": lambda: nn.Conv2d(3, 16, 3), "b": lambda: nn.Conv2d(16, 16, 1), "h": lambda: nn.Linear(16, 3)}
NETWORKS = {
    "chunk and cat": lambda: Net(chunk_and_cat, c=nn.Conv2d(3, 16, 3), a=nn.Conv2d(16, 6, 1), h=nn.Linear(6, 3)),
    "chunk": branches(lambda y: y.chunk(2, 1)),
    "tensor_split": branches(lambda y: y.tensor_split(2, 1)),
    "half slices": branches(lambda y: (y[:, : y.shape[1] // 2], y[:, y.shape[1] // 2 :])),
    "every other": branches(lambda y: (y[:, ::2], y[:, 1::2])),
    "queries, keys, values": lambda: Net(attention, qkv=nn.Linear(3, 24), o=nn.Linear(8, 3)),
    "cross-stage": lambda: Net(
        cross_stage, a=nn.Conv2d(3, 16, 3), k=nn.Conv2d(8, 8, 3, padding=1), o=nn.Conv2d(24, 10, 1), h=nn.Linear(10, 3)
    ),
    "channel shuffle": lambda: Net(shuffled, a=nn.Conv2d(3, 16, 3), k=nn.Conv2d(8, 8, 1), h=nn.Linear(16, 3)),
    "shared norm": lambda: Net(
        shared_norm, g=nn.GroupNorm(4, 16, affine=False), **{name: make() for name, make in CONV.items()}
    ),
    "features in training": lambda: Net(features_in_training, **{name: make() for name, make in CONV.items()}),
    "divided in training": lambda: Net(divided_in_training, **{name: make() for name, make in CONV.items()}),
    "gate": lambda: Net(gated, c=nn.Conv2d(3, 16, 3), h=nn.Linear(8, 3)),
}
FREE = {  # what can go all the same
    "chunk and cat": {"a.weight"},
    "chunk": {"a.weight"},
    "tensor_split": {"a.weight"},
    "half slices": {"a.weight"},
    "every other": {"a.weight"},
    "queries, keys, values": set(),
    "cross-stage": {"k.weight", "o.weight"},
    "channel shuffle": set(),
    "shared norm": set(),
    "features in training": {"a.weight"},
    "divided in training": {"b.weight"},
    "gate": {"c.weight"},
}
IMAGES = torch.randn(4, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore::prospr.errors.KeptWholeWarning")
@pytest.mark.parametrize("name", NETWORKS)
def test_any_choice_of_channels_is_right(name):
    torch.manual_seed(0)
    model = NETWORKS[name]().double()
    found = find(model, IMAGES)
    assert set(found.sets) == FREE[name]
    if not found.sets:
        return
    choose = random.Random(0)
    for _ in range(12):
        removed = {g for ids in found.sets.values() for g in choose.sample(ids, choose.randrange(len(ids)))}
        masks, twin = found.masks(removed), NETWORKS[name]().double()
        twin.load_state_dict(model.state_dict())
        masks.apply(twin)
        small = prospr.shrink(model, masks, found)
        for training in (True, False):
            for network in (twin, small):
                network.training = training  # of its own; norms are tried elsewhere
            for wanted, got in zip(_tensors(twin(IMAGES)), _tensors(small(IMAGES)), strict=True):
                assert torch.allclose(wanted, got, rtol=1e-10, atol=1e-12)


def _tensors(out):
    return out if isinstance(out, tuple) else (out,)


def test_halves_are_named():
    with pytest.warns(KeptWholeWarning, match=r"c\.weight \(without some .*other numbers"):
        prospr.channels.groups(NETWORKS["chunk and cat"](), IMAGES.float())


def test_a_shared_module_is_named():
    with pytest.warns(KeptWholeWarning, match="g is used for several sets of channels, and has one num_groups"):
        prospr.channels.groups(NETWORKS["shared norm"](), IMAGES.float())


def test_noise_in_training_keeps_nothing_whole():
    model = Net(dropped, a=nn.Conv2d(3, 16, 3), h=nn.Linear(16, 3))
    assert list(find(model, IMAGES.float()).sets) == ["a.weight"]


def test_a_channel_that_a_buffer_reads_stays():
    model = Net(
        lambda m, x: torch.cat([F.linear(m.a(x), m.table), m.h(m.a(x))], 1), a=nn.Linear(5, 8), h=nn.Linear(8, 3)
    )
    model.register_buffer("table", torch.randn(4, 8))
    x, masks = torch.randn(6, 5), prospr.Masks({"h.weight": torch.ones(3, 8, dtype=torch.bool)})
    masks["h.weight"][:, 2:4] = False
    small = prospr.shrink(model, masks, x)
    masks.apply(model)
    assert torch.allclose(model(x), small(x), atol=1e-6)


def test_rescaling_weights_that_are_tied_or_computed():
    x = torch.randn(2, 8)
    tied = Net(
        lambda m, x: m.o(m.two(torch.tanh(m.one(torch.tanh(m.e(x)))))),
        e=nn.Linear(8, 16),
        one=nn.Linear(16, 16),
        two=nn.Linear(16, 16),
        o=nn.Linear(16, 3),
    )
    tied.two.weight = tied.one.weight
    masks = prospr.prune(tied, None, 0.5, method="magnitude", granularity="channel", example=x)
    kept, scaled = (prospr.shrink(tied, masks, x, weights=how).one.weight for how in ("keep", "rescale"))
    assert torch.allclose(scaled, kept * (16 / kept.shape[1]) ** 0.5)
    normed = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.utils.parametrizations.weight_norm(nn.Linear(16, 3)))
    masks = prospr.prune(normed, None, 0.5, method="magnitude", granularity="channel", example=x)
    small = prospr.shrink(normed, masks, x, weights="rescale")
    assert small(x).shape == (2, 3)
