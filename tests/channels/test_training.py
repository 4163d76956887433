"""Masked and without channels, a network trains alike."""

import copy

import pytest
import torch
from channels.networks import BY_NAME
from channels.twins import run, twins_of

import prospr
from prospr.errors import PlanError

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.01, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda ps: torch.optim.SGD(ps, 0.01, momentum=0.9, nesterov=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, 1e-3, weight_decay=0.1),
    "groups": lambda ps: torch.optim.RMSprop([{"params": (ps := list(ps))[:2], "lr": 1e-4}, {"params": ps[2:]}], 1e-3),
}
NETWORKS = ["vgg19", "resnet18", "resnet20-a", "resnet20-b", "resnet50", "unet", "mobilenet", "vit", "group-norm"]


def train(model, optimizer, call, steps):
    model.train()
    for _ in range(steps):
        run(model, call)
        optimizer.step()


def assert_same_weights(twins, masked, small, tolerance=1e-8):
    after = dict(small.named_parameters())
    for name, p in masked.named_parameters():
        kept = twins.plan.cut(name, p.detach())
        assert (kept - after[name]).abs().max() <= tolerance * max(kept.abs().max().item(), 1e-2), name


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("name", NETWORKS)
def test_steps_of_training(name, kind):
    twins = twins_of(BY_NAME[name])
    if kind == "adamw":  # where a gradient is zero but for rounding, Adam takes whole steps in the direction of noise
        if name == "resnet50":
            pytest.skip("has norms behind a single channel, so that such weights are among its convolutions")
        for model in (twins.masked, twins.small):
            for key, p in model.named_parameters():
                p.requires_grad_(not key.endswith("bias"))
    optimizers = [OPTIMIZERS[kind](model.parameters()) for model in (twins.masked, twins.small)]
    for steps, tolerance in ((1, 1e-9), (2, 1e-7)):
        for model, optimizer in zip((twins.masked, twins.small), optimizers, strict=True):
            train(model, optimizer, twins.call, steps)
        assert_same_weights(twins, twins.masked, twins.small, tolerance)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_in_the_middle_of_training_with_the_optimizers_state(kind):
    """Two steps of the whole network; then it is pruned and shrunk, and both go on."""
    network = BY_NAME["resnet20-a"]
    twins = twins_of(network)
    masked = network.model()
    optimizer = OPTIMIZERS[kind](masked.parameters())
    train(masked, optimizer, twins.call, 2)
    twins.masks.apply(masked)
    small = twins.plan.shrink(masked)
    settings = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    new = twins.plan.optimizer(optimizer, masked, small)
    assert type(new) is type(optimizer)
    assert [{k: v for k, v in g.items() if k != "params"} for g in new.param_groups] == settings
    assert {id(p) for g in new.param_groups for p in g["params"]} == {id(p) for p in small.parameters()}
    assert len(new.state) == len(optimizer.state) > 0
    before = copy.deepcopy(optimizer.state_dict())
    train(small, new, twins.call, 2)
    after = optimizer.state_dict()  # not shared with the new one's
    for key, state in before["state"].items():
        for k, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(after["state"][key][k]))
    train(masked, optimizer, twins.call, 2)
    assert_same_weights(twins, masked, small)


def test_an_optimizer_of_another_model():
    twins = twins_of(BY_NAME["resnet20-a"])
    other = torch.optim.SGD(BY_NAME["resnet20-a"].model().parameters(), 0.1)
    with pytest.raises(PlanError, match=r"parameter of shape .* that is not of this model; pass the model"):
        twins.plan.optimizer(other, twins.masked, twins.small)


def test_pruned_at_the_start_and_trained_whole_or_small():
    """The whole way, by the public names."""
    network = BY_NAME["resnet18"]
    model = network.model()
    x = network.example()[0]
    batches = [(x, torch.tensor([1, 2]))] * 4
    masks = prospr.prune(model, batches, 0.8, granularity="channel")
    small = prospr.shrink(model, masks, x)
    plan = prospr.channels.plan(model, masks, x)
    for net in (model, small):
        train(net, OPTIMIZERS["sgd"](net.parameters()), ((x,), {}), 3)
    for name, p in model.named_parameters():
        assert torch.allclose(plan.cut(name, p), small.get_parameter(name), rtol=1e-7, atol=1e-9)
        if name in masks:
            assert not p[~masks[name]].any()
