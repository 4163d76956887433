"""Effective masks against a search of all paths, for random masks."""

import itertools

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import prospr
from prospr.masks.reach import reach


def layers_on_paths(edges):
    """The edges of a layered graph that are on a path from the first layer of nodes to the last, by depth-first search.

    edges[k] is a matrix of booleans, from the nodes of layer k (columns) to those of layer k + 1 (rows).
    """
    used = [torch.zeros_like(e) for e in edges]

    def walk(layer, node):  # True if the end is reached; marks what leads there
        if layer == len(edges):
            return True
        found = False
        for nxt in range(edges[layer].shape[0]):
            if edges[layer][nxt, node] and walk(layer + 1, nxt):
                used[layer][nxt, node] = found = True
        return found

    for node in range(edges[0].shape[1]):
        walk(0, node)
    return used


widths = st.lists(st.integers(1, 4), min_size=2, max_size=5)
chances = st.sampled_from([0.2, 0.4, 0.6, 0.9])


def random_edges(widths, chance, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(o, i, generator=generator) < chance for i, o in itertools.pairwise(widths)]


@settings(max_examples=100, deadline=None)
@given(widths, chances, st.integers(0, 10_000))
def test_perceptrons(widths, chance, seed):
    edges = random_edges(widths, chance, seed)
    layers = [nn.Linear(i, o) for i, o in itertools.pairwise(widths)]
    model = nn.Sequential(*(m for layer in layers for m in (layer, nn.BatchNorm1d(layer.out_features), nn.ReLU())))
    masks = {f"{3 * k}.weight": e for k, e in enumerate(edges)}
    expected = layers_on_paths(edges)
    found = prospr.inspect(model, masks, torch.randn(2, widths[0]))
    assert [layer.effective for layer in found.layers] == [int(e.sum()) for e in expected]
    assert [layer.dead_channels for layer in found.layers] == [int((~e.any(1)).sum()) for e in expected]
    assert found.connected is bool(expected[0].any())
    assert found.effective_density == sum(int(e.sum()) for e in expected) / sum(e.numel() for e in edges)
    positions = reach(model, masks, ((torch.randn(2, widths[0]),), {})).effective
    assert all(torch.equal(a, b) for a, b in zip(positions.values(), expected, strict=True))


@settings(max_examples=60, deadline=None)
@given(widths, chances, st.integers(0, 10_000))
def test_convolutions(widths, chance, seed):
    """A kernel is on a path if its pair of channels is: all its kept weights are then effective."""
    generator = torch.Generator().manual_seed(seed)
    kernels = [torch.rand(o, i, 3, 3, generator=generator) < chance / 4 for i, o in itertools.pairwise(widths)]
    layers = [nn.Conv2d(i, o, 3, padding=1) for i, o in itertools.pairwise(widths)]
    model = nn.Sequential(*(m for layer in layers for m in (layer, nn.BatchNorm2d(layer.out_channels), nn.ReLU())))
    masks = {f"{3 * k}.weight": m for k, m in enumerate(kernels)}
    expected = layers_on_paths([k.flatten(2).any(2) for k in kernels])
    positions = reach(model, masks, ((torch.randn(1, widths[0], 12, 12),), {})).effective
    for found, kernel, live in zip(positions.values(), kernels, expected, strict=True):
        assert torch.equal(found, kernel & live[..., None, None])


class Skips(nn.Module):
    """Every layer reads the sum of its predecessor and of the input."""

    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.out = nn.Linear(width, width)

    def forward(self, x):
        y = x
        for layer in self.layers:
            y = x + F.gelu(layer(y))
        return self.out(y)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), chances, st.integers(0, 10_000))
def test_skip_connections(width, depth, chance, seed):
    """Node (k, i) is unit i that layer k reads. The input feeds all of them, so only the way out can be cut."""
    edges = random_edges([width] * (depth + 2), chance, seed)
    leads_out = torch.ones(width, dtype=torch.bool)
    expected = []
    for e in reversed(edges):
        expected.insert(0, e & leads_out[:, None])
        leads_out = expected[0].any(0)
    model = Skips(width, depth)
    masks = {f"layers.{k}.weight": e for k, e in enumerate(edges[:-1])} | {"out.weight": edges[-1]}
    found = reach(model, masks, ((torch.randn(1, width),), {}))
    assert all(torch.equal(a, b) for a, b in zip(found.effective.values(), expected, strict=True))
    assert found.connected is bool(edges[-1].any())
