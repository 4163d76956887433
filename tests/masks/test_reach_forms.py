"""Tracing paths through networks of any form: inputs and outputs, types, depth, and what cannot be traced."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from masks.graphs import ALL, Net, cut, look
from torch import nn
from torch.utils.checkpoint import checkpoint

import prospr

OUTPUTS = {
    "tuple": lambda a, b: (a, b),
    "dict": lambda a, b: {"a": a, "rest": [b, None, 3]},
    "object": lambda a, b: SimpleNamespace(a=a, b=b, loss=None),
    "indices": lambda a, b: (a, b, b.argmax(1)),
}


@pytest.mark.parametrize("form", OUTPUTS)
def test_outputs_of_any_form(form):
    model = Net(lambda m, x: OUTPUTS[form](m.a(x), m.b(x)), a=nn.Linear(3, 2), b=nn.Linear(3, 2))
    assert look(model, cut(model, a__weight=ALL), torch.ones(1, 3)) == ({"a": 0, "b": 6}, True)


def test_inputs_of_any_form():
    model = Net(lambda m, x: m.a(x["x"]) + m.b(x["more"][0]), a=nn.Linear(3, 2), b=nn.Linear(2, 2))
    example = {"x": torch.ones(1, 3), "more": [torch.ones(1, 2), "text"]}
    assert look(model, cut(model, a__weight=0), example) == ({"a": 3, "b": 4}, True)


def test_an_output_without_tensors_is_not_known():
    model = Net(lambda m, x: m.a(x).tolist(), a=nn.Linear(3, 2))
    assert look(model, cut(model), torch.ones(1, 3)) == ({"a": None}, None)


def test_checkpointing_and_writing_into_the_input():
    def forward(m, x):
        x += 1
        return m.b(checkpoint(lambda y: F.relu(m.a(y)), x, use_reentrant=False))

    model = Net(forward, a=nn.Linear(3, 2), b=nn.Linear(2, 2))
    assert look(model, cut(model, a__weight=1), torch.ones(1, 3)) == ({"a": 3, "b": 2}, True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types(dtype):
    model = Net(lambda m, x: m.b(m.a(x).to(dtype)), a=nn.Linear(3, 2), b=nn.Linear(2, 2)).to(dtype)
    assert look(model, cut(model, a__weight=1), torch.ones(1, 3, dtype=dtype))[0] == {"a": 3, "b": 2}


def test_a_deep_network_does_not_underflow():
    model = nn.Sequential(*(nn.Linear(30, 30) for _ in range(200)))
    masks = {f"{i}.weight": torch.rand(30, 30) > 0.5 for i in range(200)}
    assert prospr.inspect(model, masks, torch.ones(1, 30)).effective_density == prospr.Masks(masks).density


def test_a_deep_network_does_not_overflow():
    layers = {f"l{i}": nn.Linear(30, 30) for i in range(200)}

    def forward(m, x, skip):
        for name in layers:
            x = m.get_submodule(name)(x) + (x if skip else 0)
        return x

    masks = {"l0.weight": torch.eye(30, dtype=torch.bool)}  # the other layers are not masked
    for skip in (False, True):
        found = prospr.inspect(Net(forward, **layers), masks, (torch.ones(1, 30), skip))
        assert found.layers[0].effective == 30


def test_what_cannot_be_traced_is_not_known():
    def forward(m, x):
        return m.b(m.a(x).detach().to(torch.int64).float() / (0 * x.sum()))

    model = Net(forward, a=nn.Linear(3, 2), b=nn.Linear(2, 2))
    assert look(model, cut(model), torch.ones(1, 3)) == ({"a": None, "b": None}, None)


CANCELLING = {
    "centred": lambda m, x: (z := m.b(m.a(x).relu())) - z.mean(1, keepdim=True),
    "dueling": lambda m, x: m.v(h := m.a(x).relu()) + (z := m.b(h)) - z.mean(1, keepdim=True),
    "maxout": lambda m, x: m.v(m.a(x).unflatten(1, (4, 2)).max(2).values.repeat(1, 2)) + m.b(m.a(x)).amax(1, True),
    "maximum": lambda m, x: torch.maximum(m.v(h := m.a(x)).expand(-1, 4), torch.max(m.b(h), other=m.b(h) + 1)),
    "mean over the batch": lambda m, x: m.b((h := m.a(x).relu()) - h.mean(0)) + m.v(m.a(x).sub_(m.a(x).mean(0))),
    "less twice itself": lambda m, x: m.b(torch.rsub(h := m.a(x), h)) + m.v(torch.sub(h, h, alpha=2) - h.mean()),
    "by keyword": lambda m, x: F.linear(input=F.relu(input=m.a(x)), weight=m.b.weight) + m.v(m.a(x)),
}


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("form", CANCELLING)
def test_what_a_network_subtracts_or_compares_is_no_cut(form, samples):
    model = Net(CANCELLING[form], a=nn.Linear(3, 8), b=nn.Linear(8, 4), v=nn.Linear(8, 1))
    effective, connected = look(model, cut(model), torch.ones(samples, 3))
    assert connected
    assert effective == {"a": 24, "b": 32, "v": 0 if form == "centred" else 8}
    assert look(model, cut(model, a__weight=ALL), torch.ones(samples, 3)) == ({"a": 0, "b": 0, "v": 0}, False)
