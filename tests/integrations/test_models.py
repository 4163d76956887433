"""Models of Hugging Face through `loss=lambda model, batch: model(**batch).loss`."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from oracle import relative_error, unrolled
from torch import nn

import prospr
from prospr.errors import InexactWarning, LossError, SettingError
from prospr.meta import SGD, AdamW, metagrad, pure_loss

pytest.importorskip("transformers")
from integrations.hf import KINDS, gpt2, llama, made, sequences
from transformers import BatchEncoding
from transformers.pytorch_utils import Conv1D

from prospr.integrations import huggingface


def own_loss(model, batch):
    return model(**batch).loss


CONV1D = [f"transformer.h.{i}.{key}.weight" for i in (0, 1) for key in ("attn.c_attn", "attn.c_proj", "mlp.c_fc")]


@pytest.mark.filterwarnings("ignore::prospr.errors.CollapseWarning")
@pytest.mark.parametrize("name", KINDS)
def test_pruned_by_default(name):
    make, batches = KINDS[name]
    model, data = made(make), batches(12)
    before = [copy.deepcopy(dict(batch)) for batch in data]
    masks = prospr.prune(model, data, 0.9, loss=own_loss)
    assert masks.kept == round(0.1 * masks.total)
    for batch, was in zip(data, before, strict=True):
        assert list(batch) == list(was)
        assert all(torch.equal(batch[key], was[key]) for key in was)
    if name == "gpt2":
        assert set(CONV1D) <= set(masks)
        assert "transformer.wte.weight" in masks  # the head's weight, once
        assert "transformer.wpe.weight" not in masks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for batch in 3 * data:
        optimizer.zero_grad()
        losses.append(own_loss(model, batch))
        losses[-1].backward()
        optimizer.step()
    named = dict(model.named_parameters(remove_duplicate=False))
    assert all(not named[key][~mask].any() for key, mask in masks.items())
    assert sum(losses[-12:]) < sum(losses[:12])


@pytest.mark.filterwarnings("ignore::prospr.errors.CollapseWarning", "ignore::prospr.errors.InexactWarning")
@pytest.mark.parametrize("method", ["snip", "grasp", "synflow", "ntk-sap", "phew", "magnitude", "random", "erk"])
@pytest.mark.parametrize("name", KINDS)
def test_by_every_kind_of_score(name, method):
    make, batches = KINDS[name]
    if method == "synflow":
        method = prospr.Iterative(prospr.SynFlow(), rounds=5)
    if method == "ntk-sap":
        method = prospr.Iterative(prospr.NtkSap(init=huggingface.initial_weights, redraws=2), rounds=2)
    masks = prospr.prune(made(make), batches(2), 0.5, method=method, loss=own_loss)
    assert masks.kept == round(0.5 * masks.total)


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1, momentum=0.9), AdamW(lr=0.01, eps=1e-3)], ids=["sgd", "adamw"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_meta_gradients_equal_the_unrolled_graph(make, attention, optimizer):
    """GPT-2 with dropout and a tied head; Llama with rotary positions; both with a cache of keys and values."""
    model = made(make, attn_implementation=attention, use_cache=True).double()
    loss = pure_loss(model, own_loss)
    ours = metagrad(loss, loss.params(), sequences(4), optimizer)
    assert relative_error(ours, unrolled(model, sequences(4), optimizer, own_loss)) < 1e-10


def test_the_cache_changes_nothing():
    method = prospr.ProsPr(steps=2, lr=0.1)
    cached, plain = (
        prospr.score(made(gpt2, use_cache=cache).double(), sequences(3), method=method, loss=own_loss)
        for cache in (True, False)
    )
    assert relative_error(cached, plain) < 1e-12


def test_batches_in_pieces():
    """The mean of the losses of two halves, which have as many labels each."""
    model = made(gpt2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).double()
    whole, pieces = (
        prospr.score(model, sequences(3), method=prospr.ProsPr(steps=2, lr=0.1, micro_batch=size), loss=own_loss)
        for size in (None, 2)
    )
    assert relative_error(pieces, whole) < 1e-10


def test_graspable_only_by_the_outputs():
    """A temperature divides outputs; a loss that the model computes itself is beyond it, which is told."""
    model, batches = made(gpt2), sequences(2)

    def of_outputs(model, batch):
        scores = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    with pytest.warns(InexactWarning, match=r"computes its own loss, so its outputs cannot be divided by .*=200"):
        own = prospr.score(model, batches, method="grasp", loss=own_loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cold = prospr.score(model, batches, method="grasp", loss=of_outputs)
        warm = prospr.score(model, batches, method=prospr.Grasp(temperature=1), loss=of_outputs)
        same = prospr.score(model, batches, method=prospr.Grasp(temperature=1), loss=own_loss)
    assert relative_error(own, warm) < 1e-4
    assert relative_error(same, warm) < 1e-4
    assert relative_error(cold, {name: t / 200**2 for name, t in warm.items()}) > 0.01  # not a mere factor


def test_a_loss_is_no_output():
    """SynFlow's flow is of the outputs alone, with labels or without."""
    model, batches = made(gpt2).double(), sequences(1)
    bare = [BatchEncoding({"input_ids": batches[0]["input_ids"], "attention_mask": batches[0]["attention_mask"]})]
    with_labels = prospr.score(model, batches, method=prospr.SynFlow(), loss=own_loss)
    without = prospr.score(model, bare, method=prospr.SynFlow(), loss=lambda model, batch: model(**batch).logits.sum())
    assert relative_error(with_labels, without) < 1e-12


def test_what_goes_wrong_says_what_to_do():
    model, batches = made(gpt2), sequences(2)
    with pytest.raises(SettingError, match=r"Conv1D has no reset_parameters.*huggingface.initial_weights"):
        prospr.prune(model, batches, 0.5, method="ntk-sap", loss=own_loss)
    with pytest.raises(SettingError, match=r"c_attn.weight of a Conv1D is \(inputs, outputs\); leave such layers out"):
        prospr.prune(model, batches, 0.5, method="magnitude", loss=own_loss, granularity="2:4")
    prospr.prune(made(llama), batches, 0.5, method="magnitude", loss=own_loss, granularity="2:4")
    with pytest.raises(LossError, match=r"GPT2LMHeadModel gave no loss; its batch has input_ids, and needs labels"):
        prospr.score(model, [{"input_ids": batches[0]["input_ids"]}], method="snip", loss=huggingface.loss)


def test_weights_are_drawn_anew_as_the_class_does():
    model = made(gpt2, n_inner=480)
    before = copy.deepcopy(model.state_dict())
    twin = prospr.sanity.redraw(model, init=huggingface.initial_weights, seed=1)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    block = twin.transformer.h[0]
    assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mlp.c_proj.weight.std().item() == pytest.approx(0.01, rel=0.05)  # two layers a block of two blocks
    assert not torch.equal(block.mlp.c_fc.weight, before["transformer.h.0.mlp.c_fc.weight"])
    assert twin.lm_head.weight is twin.transformer.wte.weight
    assert (block.ln_1.weight == 1).all()


# A Conv1D is a Linear layer lying on its side


def twins() -> tuple[nn.Module, nn.Module]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(6, 10), (10, 8), (8, 3)]
    turned = nn.Sequential(*(Conv1D(out, into) for into, out in sizes)).double()
    plain = nn.Sequential(*(nn.Linear(into, out) for into, out in sizes)).double()
    with torch.no_grad():
        for a, b, (into, out) in zip(turned, plain, sizes, strict=True):
            b.weight.copy_(torch.randn(out, into, generator=generator))
            b.bias.zero_()
            a.weight.copy_(b.weight.T)
    return turned, plain


@pytest.mark.parametrize("method", ["prospr-one-shot", "snip", "phew", "synflow", "magnitude"])
def test_conv1d_is_scored_as_linear(method):
    generator = torch.Generator().manual_seed(2)
    batches = [(torch.randn(8, 6, generator=generator).double(), torch.arange(8) % 3) for _ in range(4)]
    turned, plain = (prospr.prune(model, batches, 0.8, method=method) for model in twins())
    assert all(torch.equal(turned[name].T, plain[name]) for name in plain)


def test_conv1d_is_inspected_as_linear():
    turned, plain = twins()
    mask = torch.rand(10, 6, generator=torch.Generator().manual_seed(1)) > 0.5
    mask[[2, 5, 7]] = False
    on_plain = prospr.inspect(plain, {"0.weight": mask}, torch.ones(1, 6).double())
    on_turned = prospr.inspect(turned, {"0.weight": mask.T}, torch.ones(1, 6).double())
    assert on_turned.layers[0].dead_channels == on_plain.layers[0].dead_channels == 3
    assert on_turned.layers[0].channels == 10
    assert on_turned.layers[0].effective == on_plain.layers[0].effective


def test_conv1d_shrinks_as_linear():
    batches = [(torch.randn(8, 6, generator=torch.Generator().manual_seed(2)).double(), torch.arange(8) % 3)]
    small = []
    for model in twins():
        masks = prospr.prune(model, batches, 0.5, method="3sp", budget="channels")
        small += [prospr.shrink(model, masks, batches[0][0], weights=weights) for weights in ("keep", "rescale")]
    kept, rescaled, kept_plain, rescaled_plain = (net(batches[0][0]) for net in small)
    assert torch.allclose(kept, kept_plain)
    assert torch.allclose(rescaled, rescaled_plain)
    assert (small[0][0].nx, small[0][0].nf) == (6, small[2][0].out_features)


@pytest.mark.filterwarnings("ignore::prospr.errors.KeptWholeWarning")
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_neurons_go(name):
    make, batches = KINDS[name]
    model, data = made(make).double(), batches(4)
    data = [{k: t.double() if t.is_floating_point() else t for k, t in batch.items()} for batch in data]
    masks = prospr.prune(model, data, 0.2, loss=own_loss, granularity="channel", method="snip")
    example = {key: t for key, t in data[0].items() if key != "labels"}
    small = prospr.shrink(model, masks, example)
    assert sum(p.numel() for p in small.parameters()) <= 0.8 * sum(p.numel() for p in model.parameters())
    model.eval(), small.eval()
    assert torch.allclose(small(**example).logits, model(**example).logits, rtol=1e-9, atol=1e-12)


def test_weights_come_back_with_their_masks(tmp_path):
    from safetensors.torch import load_file

    model = made(gpt2)
    masks = prospr.prune(model, sequences(4), 0.9, loss=own_loss, method="magnitude")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    found = prospr.Masks.from_state_dict(load_file(tmp_path / "model.safetensors"))
    assert {name: int(m.sum()) for name, m in found.items()} == {name: int(m.sum()) for name, m in masks.items()}
    found.apply(again)
    assert prospr.Masks.of(again) == masks
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())
