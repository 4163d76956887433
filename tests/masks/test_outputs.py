"""Outputs of the network and entries of embeddings: none goes for being rare."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import prospr
from prospr import Iterative, ProsPr
from prospr.granularity import Mapped, Weights
from prospr.lab.models import build
from prospr.masks.outputs import LEAST, MOST, entries, evened, outputs


def made(model, *inputs, **kwargs):
    return outputs(model, (inputs, kwargs), list(prospr.prunable(model)))


def test_by_hand():
    """100 and five fours become 40 and five fours, of which an even part is 10: none has more than four of them."""
    scores = torch.tensor([[60.0, -40.0], *[[1.0, 3.0]] * 5])
    new = evened({"w": scores, "other": scores}, {"w": 0})
    torch.testing.assert_close(new["w"], torch.tensor([[24.0, -16.0], *[[1.0, 3.0]] * 5]))
    assert new["other"] is scores
    turned = evened({"w": scores.T.reshape(2, 6, 1)}, {"w": 1})["w"]
    torch.testing.assert_close(turned, new["w"].T.reshape(2, 6, 1))


def test_a_rare_row_is_raised():
    """Of 63, 63, 63 and 1, an even part e has 189 + e / 16 = 4 e, so e = 48 and the row has 3."""
    new = evened({"w": torch.tensor([[63.0], [63.0], [63.0], [1.0]])}, {"w": 0})["w"]
    torch.testing.assert_close(new, torch.tensor([[63.0], [63.0], [63.0], [3.0]]))


def test_what_is_even_enough_is_the_same_tensor():
    scores = torch.rand(10, 7) + 0.1
    assert evened({"w": scores}, {"w": 0})["w"] is scores


def test_rows_of_zeros_stay_and_do_not_count():
    scores = torch.cat([torch.zeros(50, 2), torch.tensor([[60.0, 40.0], *[[1.0, 3.0]] * 5])])
    new = evened({"w": scores}, {"w": 0})["w"]
    assert not new[:50].any()
    torch.testing.assert_close(new[50:].sum(1), torch.tensor([40.0, 4, 4, 4, 4, 4]))
    nothing = torch.zeros(3, 2)
    assert evened({"w": nothing}, {"w": 0})["w"] is nothing


@given(st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=40))
def test_within_the_limits_and_in_the_same_order(totals):
    before = torch.tensor(totals, dtype=torch.float64)
    after = evened({"w": before[:, None]}, {"w": 0})["w"].flatten()
    even = after.mean()
    assert (after <= MOST * even * (1 + 1e-6)).all()
    assert (after >= LEAST * even * (1 - 1e-6)).all()
    assert (after[before.argsort()].diff() >= -1e-9 * after.max()).all()


def test_half_precision_has_room_for_it():
    """What 120,000 beside 999 of 0.0002 is multiplied by is less than float16 has numbers for."""
    scores = torch.full((1000, 2), 1e-4, dtype=torch.float16)
    scores[0] = 60000.0
    new = evened({"w": scores}, {"w": 0})["w"]
    assert new.dtype == torch.float32
    assert new.isfinite().all()
    assert new[0].sum().item() == pytest.approx(MOST * new.sum().item() / 1000, rel=1e-5)


class Heads(nn.Module):
    """Two outputs, one through a softmax, and a layer between that is read by both."""

    def __init__(self):
        super().__init__()
        self.body, self.left, self.right = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 5)

    def forward(self, x):
        x = self.body(x).relu()
        return {"left": F.log_softmax(self.left(x), 1), "right": self.right(x)}


def test_which_layers_make_outputs():
    assert made(Heads(), torch.zeros(2, 4)) == {"left.weight": 0, "right.weight": 0}
    assert made(build("resnet20", seed=0, width=4), torch.zeros(1, 3, 32, 32)) == {"fc.weight": 0}
    assert made(build("gpt", seed=0, context=8, width=12, tied=False), torch.zeros(1, 8, dtype=torch.long)) == {
        "head.weight": 0
    }
    turned = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ConvTranspose2d(4, 3, 3))
    assert made(turned, torch.zeros(1, 1, 8, 8)) == {"1.weight": 1}  # its outputs are the second dimension
    one = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    assert made(one, torch.zeros(2, 4)) == {}  # one output has nothing to share with


def test_a_bias_has_no_rows_to_even():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    names = [name for name, _ in model.named_parameters()]
    assert outputs(model, ((torch.zeros(2, 4),), {}), names) == {"1.weight": 0}


def test_what_the_network_reads_itself_is_no_output():
    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x):
            features = self.body(x)
            return features, self.head(features)

    assert made(Features(), torch.zeros(2, 4)) == {"head.weight": 0}


def test_which_weights_are_looked_up():
    tied, untied = (build("gpt", seed=0, context=8, width=12, depth=1, tied=tied) for tied in (True, False))
    assert entries(tied, list(prospr.prunable(tied))) == {"tokens.weight": 0}
    assert entries(untied, list(prospr.prunable(untied))) == {}
    every = [name for name, p in untied.named_parameters() if p.dim() > 1]
    assert entries(untied, every) == {"tokens.weight": 0}


def text():
    """Tokens 0 to 39, of which two are nine in ten of all, and half never occur."""
    rng = torch.Generator().manual_seed(0)
    common, rare = torch.randint(0, 2, (8, 16, 17), generator=rng), torch.randint(2, 20, (8, 16, 17), generator=rng)
    return list(torch.where(torch.rand(8, 16, 17, generator=rng) < 0.9, common, rare))


def next_token(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("tied", [True, False])
def test_no_token_is_left_out(tied):
    """With balanced layers the rows of frequent tokens are full, and those of others are empty."""
    rounds, kept = Iterative(ProsPr(lr=0.01), rounds=5, redraw=True), {}
    for scope in ("balanced", "mapped"):
        model = build("gpt", seed=0, vocabulary=40, context=16, width=24, depth=1, tied=tied)
        masks = prospr.prune(model, text(), 0.9, loss=next_token, method=rounds, scope=scope)
        kept[scope] = masks["tokens.weight" if tied else "head.weight"].sum(1)
    empty = {scope: int((rows == 0).sum()) for scope, rows in kept.items()}
    assert empty["balanced"] > 5
    assert empty["mapped"] < empty["balanced"] / 4, (kept, empty)
    assert kept["mapped"].sum() > kept["balanced"].sum()


def test_it_is_part_of_the_default():
    data = text()
    model = lambda: build("gpt", seed=0, vocabulary=40, context=16, width=12, depth=1)  # noqa: E731
    said = prospr.prune(
        model(), data, 0.8, loss=next_token, method=Iterative(ProsPr(), rounds=20, redraw=True), scope="mapped"
    )
    assert prospr.prune(model(), data, 0.8, loss=next_token) == said


def test_equal_outputs_change_nothing():
    """Where all are within the limits, and maps are large, layers are balanced."""
    model = build("resnet20", seed=0, width=8)
    rows = made(model, torch.zeros(1, 3, 32, 32))
    scores = {name: torch.rand(w.shape) for name, w in prospr.prunable(model).items()}
    scores["fc.weight"] *= torch.tensor([0.2, 3.0, *[1.0] * 8])[:, None]
    balanced = Weights("balanced").select(scores, 0.9)
    assert Mapped(dict.fromkeys(scores, 1.0), 0, rows).select(scores, 0.9) == balanced
    scores["fc.weight"][0] /= 100
    assert Mapped(dict.fromkeys(scores, 1.0), 0, rows).select(scores, 0.9) != balanced


def test_where_the_outputs_are_not_known():
    """A loss that calls a model's parts: said, and embeddings are evened all the same."""
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
    data = [(torch.randn(20, 6), torch.arange(20) % 4) for _ in range(4)]

    def loss(model, batch):
        return F.cross_entropy(model[2](model[1](model[0](batch[0]))), batch[1])

    with pytest.warns(UserWarning, match=r"the network\'s outputs are not known \(.*pass example="):
        masks = prospr.prune(model, data, 0.5, loss=loss)
    masks.remove(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prospr.prune(model, data, 0.5, loss=loss, example=data[0][0])


def test_the_model_is_as_it_was():
    model = nn.Sequential(nn.Embedding(9, 6), nn.Flatten(), nn.BatchNorm1d(12), nn.Dropout(), nn.Linear(12, 9))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert made(model, torch.zeros(3, 2, dtype=torch.long)) == {"4.weight": 0}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
