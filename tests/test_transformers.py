"""A small GPT and a ViT by every method: exact counts, masks that hold, derivatives, embeddings, heads that go."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import next_token
from oracle import cross_entropy, relative_error, unrolled
from torch import Tensor, nn

import prospr
from prospr.lab.models import build
from prospr.meta import SGD, AdamW, metagrad, pure_loss

TEXT = "prune the network before it is trained, and train what is left of it as if nothing had happened. " * 4
LETTERS = sorted(set(TEXT))


def sentences(count: int, length: int = 9, size: int = 6) -> list[Tensor]:
    """Batches of pieces of the text, as numbers of its letters."""
    numbers = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    generator = torch.Generator().manual_seed(1)
    places = torch.randint(len(numbers) - length, (count, size), generator=generator)
    return [torch.stack([numbers[p : p + length] for p in row]) for row in places]


def pictures(count: int, size: int = 6) -> list[tuple[Tensor, Tensor]]:
    """Noise in one of three colours."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(count):
        images = 0.3 * torch.randn(size, 3, 8, 8, generator=generator)
        labels = torch.randint(3, (size,), generator=generator)
        images[torch.arange(size), labels] += 1
        batches.append((images, labels))
    return batches


@dataclass(frozen=True)
class Task:
    network: str
    settings: dict[str, Any]
    batches: Callable[[int], list[Any]]
    loss: Callable[[nn.Module, Any], Tensor]

    def model(self, **more: Any) -> nn.Module:
        return build(self.network, seed=0, **{**self.settings, **more})

    def in_double(self, count: int) -> list[Any]:
        double = lambda t: t.double() if t.is_floating_point() else t  # noqa: E731
        return [double(b) if isinstance(b, Tensor) else tuple(map(double, b)) for b in self.batches(count)]


_SMALL = {"width": 12, "depth": 1, "heads": 3, "mlp": 2}
TASKS = {
    "gpt": Task("gpt", {"vocabulary": len(LETTERS), "context": 8, **_SMALL}, sentences, next_token),
    "vit": Task("vit", {"num_classes": 3, "image": 8, **_SMALL}, pictures, cross_entropy),
}
OF_WEIGHTS = [name for name, method in prospr.methods().items() if method.granularity == "weight"]


def train(model: nn.Module, batches: list[Any], loss, rate: float = 1e-2, decay: float = 0.1) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()


def total_loss(model: nn.Module, batches: list[Any], loss) -> float:
    with torch.no_grad():
        return sum(loss(model, batch).item() for batch in batches)


def assert_zero(model: nn.Module, masks: prospr.Masks) -> None:
    named = dict(model.named_parameters(remove_duplicate=False))
    assert all(not named[name][~mask].any() for name, mask in masks.items())


@pytest.mark.filterwarnings("ignore::prospr.errors.CollapseWarning")
@pytest.mark.parametrize("sparsity", [0.5, 0.9])
@pytest.mark.parametrize("method", OF_WEIGHTS)
@pytest.mark.parametrize("name", TASKS)
def test_every_method(name, method, sparsity):
    task = TASKS[name]
    model, batches = task.model(), task.batches(12)
    total = sum(p.numel() for p in prospr.prunable(model).values())
    masks = prospr.prune(model, batches, sparsity, method=method, loss=task.loss)
    assert (masks.total, masks.kept) == (total, round((1 - sparsity) * total))
    before = total_loss(model, batches, task.loss)
    train(model, 3 * batches, task.loss)
    assert_zero(model, masks)
    assert total_loss(model, batches, task.loss) < 0.99 * before


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1, momentum=0.9), AdamW(lr=0.01, eps=1e-3)], ids=["sgd", "adamw"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [("gpt", {"depth": 2}), ("gpt", {"tied": False}), ("vit", {"depth": 2})],
    ids=["gpt", "gpt-untied", "vit"],
)
def test_meta_gradients_equal_the_unrolled_graph(name, settings, optimizer):
    task = TASKS[name]
    model, batches = task.model(**settings).double(), task.in_double(4)
    loss = pure_loss(model, task.loss)
    ours = metagrad(loss, loss.params(), batches, optimizer)
    theirs = unrolled(model, batches, optimizer, task.loss)
    assert relative_error(ours, theirs) < 1e-10
    for part in ("tokens.weight", "positions.weight", "attention.q.weight", "attention.k.weight"):  # each by itself
        some = {key: g for key, g in theirs.items() if key.endswith(part)}
        if some:
            assert relative_error({key: ours[key] for key in some}, some) < 1e-9, part


# Embeddings


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_embedding_counts_once(tied):
    task = TASKS["gpt"]
    model = task.model(tied=tied)
    inside = [f"blocks.0.{key}.weight" for key in ("attention.q", "attention.k", "attention.v", "attention.proj")]
    inside += ["blocks.0.mlp.0.weight", "blocks.0.mlp.2.weight"]
    assert list(prospr.prunable(model)) == (["tokens.weight", *inside] if tied else [*inside, "head.weight"])
    every = [name for name, p in model.named_parameters() if p.dim() > 1]
    assert len(every) == len(inside) + (2 if tied else 3)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_pruned_where_asked_for(tied):
    task = TASKS["gpt"]
    batches = task.batches(12)
    model = task.model(tied=tied).double()
    which = lambda name, p: name in ("tokens.weight", "positions.weight")  # noqa: E731
    method = prospr.ProsPr(steps=3, lr=0.1)
    scores = prospr.score(model, batches, method=method, loss=task.loss, prunable=which)
    theirs = unrolled(model, batches[:4], SGD(lr=0.1), task.loss)
    theirs = {name: (model.get_parameter(name) * theirs[name]).detach().abs() for name in scores}
    whole = sum(s.sum() for s in theirs.values())
    assert relative_error(scores, {name: s / whole for name, s in theirs.items()}) < 1e-10
    masks = prospr.prune(model, batches, 0.75, method=method, loss=task.loss, prunable=which)
    assert list(masks) == ["tokens.weight", "positions.weight"]
    assert masks.total == 12 * (len(LETTERS) + 8)
    assert masks.kept == masks.total // 4
    before = copy.deepcopy(model.state_dict())
    train(model, batches, task.loss)
    assert_zero(model, masks)
    assert (model.head.weight is model.tokens.weight) == tied
    assert not torch.equal(model.tokens.weight, before["tokens.weight"])


class Looked(nn.Module):
    """An embedding that gives sparse gradients, of the rows that were looked up."""

    def __init__(self, sparse: bool):
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), 6, sparse=sparse)
        self.head = nn.Linear(6, len(LETTERS))

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)))


def looked(sparse: bool) -> Looked:
    torch.manual_seed(0)
    return Looked(sparse)


@pytest.mark.parametrize("method", ["prospr", "snip", "grasp", "synflow", "ntk-sap"])
def test_sparse_gradients_score_as_dense_ones(method):
    both = []
    for sparse in (True, False):
        model = looked(sparse)
        which = ["embed.weight", "head.weight"]
        both.append(prospr.prune(model, sentences(4), 0.5, method=method, loss=next_token, prunable=which))
        assert model.embed.sparse == sparse
    assert both[0] == both[1]


def test_masks_hold_under_sparse_gradients():
    ends = []
    for sparse in (True, False):
        model = looked(sparse)
        masks = prospr.prune(model, None, 0.5, method="random", prunable=["embed.weight"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for batch in sentences(5):
            optimizer.zero_grad()
            next_token(model, batch).backward()
            grad = model.embed.weight.grad
            assert grad.is_sparse == sparse
            assert not (grad.to_dense() if sparse else grad)[~masks["embed.weight"]].any()
            optimizer.step()
        assert_zero(model, masks)
        ends.append(model.embed.weight.detach())
    assert torch.allclose(*ends, atol=1e-6)


def test_masks_hold_under_sparse_adam():
    model = looked(True)
    masks = prospr.prune(model, None, 0.5, method="random", prunable=["embed.weight"])
    before = model.embed.weight.detach().clone()
    optimizer = torch.optim.SparseAdam([model.embed.weight], lr=0.1)
    for batch in sentences(5):
        optimizer.zero_grad()
        next_token(model, batch).backward()
        optimizer.step()
    assert_zero(model, masks)
    assert not torch.equal(before, model.embed.weight)


# Heads and neurons


@pytest.mark.parametrize("method", ["prospr", "3sp", "magnitude"])
@pytest.mark.parametrize("name", TASKS)
def test_heads_and_neurons_go(name, method):
    task = TASKS[name]
    model, batches = task.model(depth=2).double(), task.in_double(5)
    example = batches[0][:, :-1] if name == "gpt" else batches[0][0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", prospr.errors.KeptWholeWarning)
        masks = prospr.prune(model, batches, 0.4, method=method, loss=task.loss, granularity="channel")
    small = prospr.shrink(model, masks, example)
    assert torch.allclose(small(example), model(example), rtol=1e-10, atol=1e-12)
    count = lambda m: sum(p.numel() for p in m.parameters())  # noqa: E731
    assert count(small) <= 0.6 * count(model)
    for block in small.blocks:
        assert block.attention.q.out_features % block.attention.head_dim == 0  # heads go whole
        assert block.attention.q.out_features == block.attention.v.out_features == block.attention.proj.in_features
    pairs = list(zip(small.blocks, model.blocks, strict=True))
    assert any(after.mlp[0].out_features < before.mlp[0].out_features for after, before in pairs)
    train(small, batches, task.loss)  # and it trains like any other
    assert total_loss(small, batches, task.loss) < total_loss(model, batches, task.loss)


# The network itself


def test_no_token_sees_a_later_one():
    model = TASKS["gpt"].model().eval()
    tokens = sentences(1)[0][:, :8]
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % len(LETTERS)
    with torch.no_grad():
        assert torch.allclose(model(tokens)[:, :5], model(changed)[:, :5], atol=1e-6)
        assert not torch.allclose(model(tokens)[:, 5:], model(changed)[:, 5:], atol=1e-3)
        assert torch.allclose(model(tokens[:, :3]), model(tokens)[:, :3], atol=1e-6)  # shorter sequences, too


def test_it_learns_the_text():
    model = build("gpt", seed=0, vocabulary=len(LETTERS), context=16, width=24, depth=2, heads=3)
    batches = sentences(80, length=17, size=16)
    prospr.prune(model, batches, 0.5, method="magnitude", loss=next_token)
    train(model, batches, next_token, rate=5e-3)
    assert total_loss(model, sentences(4, length=17), next_token) / 4 < 1.6  # guessing: log 20 = 3.0


def test_residual_layers_start_smaller():
    model = build("gpt", seed=0, depth=2)
    block = model.blocks[0]
    for weight, deviation in ((block.mlp[0].weight, 0.02), (block.mlp[2].weight, 0.01), (model.tokens.weight, 0.02)):
        assert weight.std().item() == pytest.approx(deviation, rel=0.03)
    assert block.attention.proj.weight.std().item() == pytest.approx(0.01, rel=0.03)


def test_what_does_not_fit_is_named():
    model = TASKS["gpt"].model()
    with pytest.raises(ValueError, match=r"9 tokens, and the network has positions for 8; build it with context="):
        model(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(ValueError, match=r"got torch.float32 of shape \(1, 3, 8, 8\); it is not for images"):
        model(torch.zeros(1, 3, 8, 8))
    with pytest.raises(ValueError, match=r"width=10 is not a multiple of heads=4; take 12"):
        build("gpt", width=10)


def test_loss_is_the_mean_over_all_places():
    model, tokens = TASKS["gpt"].model(), sentences(1)[0]
    scores = model(tokens[:, :-1])
    by_hand = -torch.log_softmax(scores, -1).gather(-1, tokens[:, 1:, None]).mean()
    assert torch.allclose(next_token(model, tokens), by_hand)
    assert F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()).item() == pytest.approx(by_hand.item())
