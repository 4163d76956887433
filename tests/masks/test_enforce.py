"""A pruned weight stays exactly zero, whoever trains the model."""

import pytest
import torch
import torch.nn.functional as F
from masks.training import OPTIMIZERS, STEPS, assert_held, assert_same, batch, mlp, random_masks, train, weights
from torch import nn

from prospr.errors import MaskError

# Every optimizer of torch.optim that takes dense gradients, with settings that move a weight whose gradient is zero.
EVERY = {
    **OPTIMIZERS,
    "sgd foreach": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.01, foreach=True),
    "sgd fused": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.01, fused=True),
    "adam fused": lambda ps: torch.optim.Adam(ps, lr=0.01, weight_decay=0.1, fused=True),
    "adam amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "adamax": lambda ps: torch.optim.Adamax(ps, lr=0.01),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, lr=1.0),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05),
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=0.05, weight_decay=0.01),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=0.01),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.9, centered=True),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.01),
    # its updates mix all entries of a matrix, so a zero gradient does not mean a zero update
    "muon": lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2], lr=0.05),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hundred_steps(name):
    model = mlp()
    masks, before = random_masks(model), weights(model)
    masks.apply(model)
    train(model, OPTIMIZERS[name](model.parameters()))
    assert_held(model, masks, before)


@pytest.mark.parametrize("name", EVERY)
def test_momentum_from_before_the_masks(name):
    model = mlp()
    optimizer = EVERY[name](model.parameters())
    train(model, optimizer, steps=5)
    masks, before = random_masks(model), weights(model)
    masks.apply(model)
    train(model, optimizer, steps=20, start=5)
    assert_held(model, masks, before)


def test_momentum_from_before_the_masks_would_bring_weights_back():
    """The test above can fail: there is momentum on the pruned weights when the masks are put on."""
    model = mlp()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    train(model, optimizer, steps=5)
    masks = random_masks(model)
    masks.apply(model)
    momentum = optimizer.state[model[0].weight]["momentum_buffer"]
    assert bool((momentum[~masks["0.weight"]] != 0).all())


def test_lbfgs():
    model = mlp()
    masks, before = random_masks(model), weights(model)
    masks.apply(model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
    inputs, targets = batch(0)

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    for _ in range(10):
        optimizer.step(closure)
    assert_held(model, masks, before)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("foreach", [True, False])
def test_gradient_clipping(name, foreach):
    model = mlp()
    masks, before = random_masks(model), weights(model)
    masks.apply(model)
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.02, foreach=foreach)
        assert norm > 0.02  # it clips
        optimizer.step()
    assert_held(model, masks, before)


def test_clipping_sees_the_sparse_gradient():
    """The gradient that is clipped is that of the kept weights alone."""
    model = mlp()
    masks = random_masks(model)
    dense = mlp()
    with torch.no_grad():
        for name, p in dense.named_parameters():
            if name in masks:
                p.mul_(masks[name])
    masks.apply(model)
    inputs, targets = batch(0)
    for net in (model, dense):
        F.cross_entropy(net(inputs), targets).backward()
    squares = 0.0
    for (name, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
        mask = masks.get(name, torch.ones_like(p, dtype=torch.bool))
        assert torch.equal(p.grad, torch.where(mask, q.grad, 0.0))
        squares += q.grad[mask].double().square().sum().item()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.item() == pytest.approx(squares**0.5, rel=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_mixed_precision(name):
    model = mlp()
    masks, before = random_masks(model), weights(model)
    masks.apply(model)
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(inputs)
            loss = F.cross_entropy(out, targets)
        assert out.dtype == torch.bfloat16
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert_held(model, masks, before)


def test_a_scaled_gradient_that_overflows_skips_the_step():
    model = mlp()
    masks = random_masks(model)
    masks.apply(model)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    before = weights(model)
    inputs, targets = batch(0)
    scaler.scale(1000 * F.cross_entropy(model(inputs), targets)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_same(before, weights(model))
    assert scaler.get_scale() == 2.0**126


def test_nan_gradients_do_not_reach_a_pruned_weight():
    """clip_grad_norm_ multiplies every gradient, those of the pruned weights too, by a norm that is NaN."""
    model = mlp()
    masks = random_masks(model)
    masks.apply(model)
    for p in model.parameters():
        p.grad = torch.full_like(p, float("nan"))
    OPTIMIZERS["sgd"](model.parameters()).step()
    for name, p in model.named_parameters():
        if name in masks:
            assert bool((p[~masks[name]] == 0).all())
            assert bool(p[masks[name]].isnan().all())


def test_an_update_by_hand():
    """The gradient itself is masked, so an optimizer that is not torch's holds the masks too."""
    model = mlp()
    masks, before = random_masks(model), weights(model)
    masks.apply(model)
    for step in range(20):
        inputs, targets = batch(step)
        model.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    assert_held(model, masks, before)


def test_parameters_keep_their_identity():
    model = mlp()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    names, parameters = zip(*model.named_parameters(), strict=True)
    pointers = [p.data_ptr() for p in parameters]
    masks, before = random_masks(model), weights(model)
    masks.apply(model)
    assert [name for name, _ in model.named_parameters()] == list(names)
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in model.parameters())
    train(model, optimizer, steps=10)
    assert_held(model, masks, before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_mask_of_ones_leaves_training_bit_identical(name):
    plain, masked = mlp(), mlp()
    masks = random_masks(masked, sparsity=0.0)
    assert masks.kept == masks.total == 6 * 8 + 8 * 3
    masks.apply(masked)
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (plain, masked)]
    assert train(plain, optimizers[0]) == train(masked, optimizers[1])
    assert_same(weights(plain), weights(masked))
    a, b = (o.state_dict()["state"] for o in optimizers)
    for key in a:
        assert_same(
            {k: v for k, v in a[key].items() if v is not None}, {k: v for k, v in b[key].items() if v is not None}
        )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_training_with_zeros_written_back(name):
    """The faster way of the lab's trainer: no hooks, pruned weights zeroed after each step."""
    masked, written = mlp(), mlp()
    masks = random_masks(masked)
    masks.apply(masked)

    def write() -> None:
        with torch.no_grad():
            for parameter, p in written.named_parameters():
                if parameter in masks:
                    p.mul_(masks[parameter])

    write()
    by_hand = OPTIMIZERS[name](written.parameters())
    losses = []
    for step in range(STEPS):
        losses += train(written, by_hand, steps=1, start=step)
        write()
    assert train(masked, OPTIMIZERS[name](masked.parameters())) == losses
    assert_same(weights(masked), weights(written))


def test_a_frozen_layer_that_thaws():
    model = mlp()
    model[0].weight.requires_grad_(False)
    masks = random_masks(mlp())
    masks.apply(model)
    before = weights(model)
    model[0].weight.requires_grad_(True)
    train(model, OPTIMIZERS["sgd"](model.parameters()), steps=20)
    assert_held(model, masks, before)


def test_a_parameter_that_the_user_replaces():
    model = mlp()
    masks = random_masks(model)
    masks.apply(model)
    model[0].weight = nn.Parameter(torch.ones(8, 6))
    before = weights(model)
    train(model, OPTIMIZERS["sgd"](model.parameters()), steps=20)
    assert_held(model, masks, before)


@pytest.mark.parametrize("normed", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_weight_that_is_computed_from_now_on_is_an_error(normed):
    """weight_norm makes two parameters of the weight, which no mask is on."""
    model, other = mlp(), mlp()
    random_masks(model).apply(model)
    normed(model[0])
    before = weights(model)
    with pytest.raises(MaskError, match=r"Linear\.weight: .* put it on before the pruning"):
        train(model, OPTIMIZERS["sgd"](model.parameters()), steps=1)
    assert_same(weights(model), before)
    train(other, OPTIMIZERS["sgd"](other.parameters()), steps=1)  # nothing of its is masked


def test_masks_of_torch_on_top_are_an_error():
    """They have the same name."""
    model = mlp()
    random_masks(model).apply(model)
    torch.nn.utils.prune.identity(model[0], "weight")
    with pytest.raises(MaskError, match=r"^Linear\.weight: the buffer weight_mask .* masks\.to_torch"):
        train(model, OPTIMIZERS["sgd"](model.parameters()), steps=1)


@pytest.mark.parametrize("put_on", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_a_weight_that_is_computed_from_the_masked_one(put_on):
    model = mlp()
    masks = random_masks(model)
    masks.apply(model)
    put_on(model[0])
    model.eval()  # spectral_norm's own vectors rest
    before = model[0].weight.detach().clone()
    train(model, OPTIMIZERS["sgd"](model.parameters()), steps=20)
    model(batch(0)[0])  # the old ones compute it while they run
    now, kept = model[0].weight, masks["0.weight"]
    assert not now[~kept].any()
    assert bool((now[kept] != before[kept]).any())
