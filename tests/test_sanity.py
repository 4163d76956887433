"""The checks themselves: what they keep, what they change, and that they leave the model alone."""

import pytest
import torch
from cases import BY_NAME
from torch import nn

import prospr
from prospr.errors import SettingError


def pruned(name="residual"):
    case = BY_NAME[name]
    model = case.model()
    return case, model, prospr.prune(model, case.batches(4), 0.7, method="snip")


def test_shuffled_masks_keep_every_layers_count():
    _, _, masks = pruned()
    moved = prospr.sanity.shuffle(masks, seed=3)
    assert moved.densities() == masks.densities()
    assert moved != masks
    assert moved == prospr.sanity.shuffle(masks, seed=3)
    assert moved != prospr.sanity.shuffle(masks, seed=4)


def test_a_shuffled_place_is_as_likely_as_any_other():
    masks = prospr.Masks({"w": torch.arange(8) < 2})
    counts = sum(prospr.sanity.shuffle(masks, seed=s)["w"].int() for s in range(2000))
    assert (counts.float() / 2000 - 0.25).abs().max() < 0.04  # four standard deviations


def test_inverted_scores_keep_the_others():
    case = BY_NAME["mlp"]
    scores = prospr.score(case.model(), case.batches(1), method="snip")
    best = prospr.select(scores, 0.5)
    worst = prospr.select(prospr.sanity.invert(scores), 0.5)
    assert best.overlap(worst) == 0


def test_redrawn_weights_are_new_and_masked_and_the_model_is_not_touched():
    case, model, masks = pruned()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    state = torch.get_rng_state()
    twin = prospr.sanity.redraw(model, seed=5)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in before.items())
    for name, mask in masks.items():
        w = twin.get_parameter(name)
        assert not w[~mask].any()
        assert not torch.equal(w[mask], model.get_parameter(name)[mask])
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for x, y in case.batches(3):
        nn.functional.cross_entropy(twin(x), y).backward()
        optimizer.step()
    assert prospr.Masks.of(twin) == masks
    assert not any(bool(twin.get_parameter(n)[~m].any()) for n, m in masks.items())


def test_redraw_by_the_models_own_initialization():
    model = nn.Linear(4, 3)
    twin = prospr.sanity.redraw(model, init=lambda m: nn.init.constant_(m.weight, 2.0))
    assert (twin.weight == 2.0).all()
    assert not (model.weight == 2.0).any()


def test_a_parameter_that_nothing_redraws_is_named():
    with pytest.raises(SettingError, match="token: Attention has no reset_parameters"):
        prospr.sanity.redraw(BY_NAME["attention"].model())


def test_the_widest_network_within_a_budget():
    from prospr.lab.models import resnet20

    size = lambda m: sum(p.numel() for p in m.parameters())  # noqa: E731
    net = prospr.sanity.narrow(lambda width: resnet20(width=width), budget=20_000)
    width = net.state_dict()["conv1.weight"].shape[0]
    assert size(net) <= 20_000 < size(resnet20(width=width + 1))
    with pytest.raises(SettingError, match="even build"):
        prospr.sanity.narrow(lambda width: resnet20(width=width), budget=10)


def stack(width):
    """A convolution of 1 -> width channels on 4x4 images, a norm, a depthwise one, and a Linear layer to 3."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False),
        nn.Flatten(),
        nn.Linear(16 * width, 3),
    )


def test_the_widest_network_within_a_budget_of_flops():
    # a channel: 2 x 9 x 16 in each convolution, 2 x 16 x 3 in the Linear layer; 672 in all
    example = torch.zeros(1, 1, 4, 4)
    width = lambda budget, **more: len(prospr.sanity.narrow(stack, budget, **more)[0].weight)  # noqa: E731
    assert width(6720, example=example) == 10
    assert width(6719, example=example) == 9
    assert width(6720, example=(example,)) == 10
    assert width(6720, example=torch.zeros(2, 1, 4, 4)) == 5  # of the whole batch
    assert width(6720) == 98  # parameters: 9 + 2 + 9 + 48 a channel, and 3; 6667 in all
    with pytest.raises(SettingError, match=r"budget=671: even build\(1\) has 672 FLOPs; raise the budget"):
        prospr.sanity.narrow(stack, 671, example=example)


@pytest.mark.parametrize("widest", [1, 5, 8, 9])
def test_no_width_above_the_widest_is_built(widest):
    built = []
    net = prospr.sanity.narrow(lambda width: built.append(width) or nn.Linear(1, width), 10**6, widest)
    assert net.out_features == widest == max(built)
    with pytest.raises(SettingError, match="widest=0: a width is at least 1"):
        prospr.sanity.narrow(lambda width: nn.Linear(1, width), 10, widest=0)


@pytest.mark.parametrize("example", [None, torch.zeros(1, 1, 4, 4)])
def test_networks_that_are_only_measured_draw_nothing(example):
    state = torch.get_rng_state()
    net = prospr.sanity.narrow(stack, 4000, example=example)
    torch.set_rng_state(state)
    twin = stack(len(net[0].weight))
    torch.set_rng_state(state)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))


class Gain(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.gain = nn.Parameter(torch.rand(3))

    def forward(self, x):
        return super().forward(x) * self.gain


class ByData(nn.Linear):
    def reset_parameters(self):  # as older code does it: nothing counts what is written by .data
        self.weight.data.uniform_(-1, 1)
        self.bias.data.zero_()


@pytest.mark.parametrize("make", [lambda: Gain(3, 3), lambda: nn.utils.spectral_norm(nn.Linear(3, 3))])
def test_weights_that_a_reset_leaves_alone_are_an_error(make):
    net = nn.Sequential(make())
    before = {name: p.clone() for name, p in net.state_dict().items()}
    with pytest.raises(SettingError, match="does not draw it anew"):
        prospr.sanity.redraw(net, seed=1)
    assert all(torch.equal(p, before[name]) for name, p in net.state_dict().items())


def test_a_reset_that_writes_by_data_is_one():
    net = nn.Sequential(ByData(3, 3))
    twin = prospr.sanity.redraw(net, seed=1)
    assert not torch.equal(twin[0].weight, net[0].weight)
    assert (twin[0].bias == 0).all()
