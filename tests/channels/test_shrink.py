"""A network without channels computes what it computes with them masked, and holds what was kept as it was."""

import copy

import pytest
import torch
import torch.distributed as dist
from cases import CASES
from channels.networks import BY_NAME, NETWORKS, from_case
from channels.twins import assert_same, find, run, twins_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import prospr
from prospr.errors import MaskError, SettingError

ALL = [*NETWORKS, *map(from_case, CASES)]
NOTHING_GOES = [BY_NAME["one-group-norm"], BY_NAME["literal-chunks"]] + [
    n
    for n in ALL
    if n not in NETWORKS and n.name in ("group-and-layer-norm", "attention", "lstm", "gru", "weight-norm")
]  # of which all channels are mixed, or fixed by sizes that are written
SHRUNK = [n for n in ALL if n not in NOTHING_GOES]


@pytest.mark.filterwarnings("ignore:.*InstanceNorm.*:UserWarning")
@pytest.mark.parametrize("network", SHRUNK, ids=lambda n: n.name)
def test_same_outputs_gradients_and_statistics(network):
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        twins = twins_of(network, dtype)
        assert twins.removed
        for train in (True, False):
            if not (train and network.random):  # which draws other numbers for fewer channels
                twins.train(train)
                assert_same(run(twins.masked, twins.call), run(twins.small, twins.call), twins.plan, tolerance)


@pytest.mark.parametrize("name", ["resnet18", "unet", "mobilenet", "vit", "group-norm"])
def test_in_bfloat16(name):
    twins = twins_of(BY_NAME[name], torch.bfloat16).train(False)
    assert all(p.dtype == torch.bfloat16 for p in twins.small.parameters())
    a, b = run(twins.masked, twins.call), run(twins.small, twins.call)
    assert (a["output 0"] - b["output 0"]).abs().max() <= 0.05 * a["output 0"].abs().max()


def assert_knows_its_sizes(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        assert module.weight.shape == (module.out_features, module.in_features)
    elif isinstance(module, nn.modules.conv._ConvNd):
        sizes = (module.out_channels, module.in_channels)
        rows, columns = reversed(sizes) if module.transposed else sizes
        assert module.weight.shape[:2] == (rows, columns // module.groups)
    elif isinstance(module, nn.modules.batchnorm._NormBase) and module.affine:
        assert module.num_features == len(module.weight)
    elif isinstance(module, nn.GroupNorm):
        assert module.num_channels == len(module.weight)
    elif isinstance(module, nn.PReLU):
        assert module.num_parameters == len(module.weight)


@pytest.mark.parametrize("network", SHRUNK, ids=lambda n: n.name)
def test_what_is_kept_is_as_it_was_and_nothing_else_is_left(network):
    twins = twins_of(network)
    before, after = dict(twins.model.named_parameters()), dict(twins.small.named_parameters())
    assert list(before) == list(after)
    assert [type(m) for m in twins.model.modules()] == [type(m) for m in twins.small.modules()]
    for name, p in before.items():
        mask = twins.masks.get(name, torch.ones_like(p, dtype=torch.bool))
        shape = [int(mask.movedim(d, 0).reshape(n, -1).any(1).sum()) for d, n in enumerate(p.shape)]
        assert list(after[name].shape) == shape, name
        assert torch.equal(after[name].flatten(), p[mask]), name
        assert after[name].requires_grad == p.requires_grad
    assert twins.plan.masks(twins.masks).sparsity == 0
    assert sum(p.numel() for p in after.values()) == twins.plan.after.parameters
    named = dict(twins.small.named_buffers())
    assert not any(name.endswith("_mask") for name in named)
    for name, buffer in twins.model.named_buffers():
        assert torch.equal(named[name], twins.plan.cut(name, buffer))
        weight = name.replace("running_mean", "weight").replace("running_var", "weight")
        assert weight == name or weight not in after or named[name].shape == after[weight].shape
    for module in twins.small.modules():
        assert_knows_its_sizes(module)


# Masks of every kind


def mlp() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).double()


X = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(4, 5)


def masks_of(model: nn.Module, **masked) -> prospr.Masks:
    masks = {name: torch.ones_like(p, dtype=torch.bool) for name, p in model.named_parameters() if p.dim() > 1}
    for name, where in masked.items():
        masks[name.replace("_", ".")][where] = False
    return prospr.Masks(masks)


def test_dead_channels_of_unstructured_masks_go_and_the_rest_stays_sparse():
    model = mlp()
    masks = {name: torch.rand(p.shape) < 0.5 for name, p in model.named_parameters() if p.dim() > 1}
    masks["2.weight"][:, [1, 4]] = False  # nothing reads channels 1 and 4 of the first layer
    masks["4.weight"][:, 2] = False  # nor 2 of the second
    masks["2.weight"][:, 6] = False
    masks["2.weight"][2, 6] = True  # channel 6 is read by that one only
    masks["2.weight"][0] = True
    masks["2.weight"][0, [1, 4, 6]] = False
    masks["4.weight"][0, [0, 1, 3, 4, 5]] = True
    small = prospr.shrink(model, masks, X)
    prospr.Masks(masks).apply(model)
    assert (small[0].out_features, small[2].out_features) == (5, 5)
    assert torch.allclose(model(X), small(X), rtol=1e-12, atol=0)
    rest = prospr.Masks.of(small)
    assert 0 < rest.sparsity < 1
    sgd = torch.optim.SGD(small.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        sgd.zero_grad()
        small(X).square().sum().backward()
        sgd.step()
    for name, mask in rest.items():
        assert not small.get_parameter(name)[~mask].any()
        assert small.get_parameter(name)[mask].all()


def test_a_bias_that_reaches_a_channel_keeps_it():
    """All weights into it are masked, but it is read: it is a constant, not nothing."""
    model = mlp()
    masks = masks_of(model, **{"0_weight": 3})
    small = prospr.shrink(model, masks, X)
    masks.apply(model)
    assert small[0].out_features == 8
    assert torch.equal(model(X), small(X))


def test_a_channel_that_is_read_by_nothing_goes_with_all_that_only_it_reads():
    model = mlp()
    masks = masks_of(model, **{"4_weight": (slice(None), 0), "2_weight": (slice(1, None), 5)})
    small = prospr.shrink(model, masks, X)  # channel 0 of the second layer, the only reader of 5 of the first
    masks.apply(model)
    assert (small[0].out_features, small[2].out_features) == (7, 5)
    assert torch.allclose(model(X), small(X), rtol=1e-12)


def test_masks_of_a_layer_alone_are_followed_through_layers_without_masks():
    model = mlp()
    masks = prospr.Masks({"4.weight": torch.ones(3, 6, dtype=torch.bool)})
    masks["4.weight"][:, 1:] = False
    small = prospr.shrink(model, masks, X)
    assert small[2].out_features == 1
    masks.apply(model)
    assert torch.allclose(model(X), small(X), rtol=1e-12)


def test_a_layer_that_is_masked_whole_keeps_one_channel():
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).double()
    masks = masks_of(model, **{"1_weight": slice(None)})
    small = prospr.shrink(model, masks, X)
    assert small[0].out_features == 1
    masks.apply(model)
    assert torch.equal(model(X), small(X))
    assert torch.equal(small(X), model[1].bias.expand(4, 3))


@pytest.mark.parametrize("name", ["plain-attention", "tied"])
def test_channels_that_meet_in_a_product_go_only_where_all_of_them_is_masked(name):
    network = BY_NAME[name]
    model, example = network.model(), network.example()
    weight = "q.weight" if name == "plain-attention" else "one.weight"
    mask = torch.ones_like(model.get_parameter(weight), dtype=torch.bool)
    mask[:, 0] = False
    mask[0] = False
    masks = prospr.Masks({weight: mask})
    small = prospr.shrink(model, masks, example)
    masks.apply(model)
    assert model.get_parameter(weight).shape == small.get_parameter(weight).shape
    assert torch.equal(model(*example), small(*example))


def test_a_model_whose_masks_are_on_and_its_wrappers(tmp_path):
    network = BY_NAME["resnet18"]
    model, example = network.model(), network.example()
    masks = prospr.prune(model, None, 0.5, method="magnitude", granularity="channel", example=example)
    assert prospr.Masks.of(model) == masks
    small = prospr.shrink(model, masks, example)
    assert prospr.Masks.of(model) == masks
    assert torch.allclose(small.eval()(*example), copy.deepcopy(model).eval()(*example), rtol=1e-10)
    with pytest.raises(MaskError, match="no masks"):
        prospr.Masks.of(small)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        for wrapped in (torch.compile(model, backend="eager"), DistributedDataParallel(model), nn.DataParallel(model)):
            again = prospr.shrink(wrapped, masks, example)
            assert type(again) is type(model)
            assert all(torch.equal(t, again.state_dict()[key]) for key, t in small.state_dict().items())
    finally:
        dist.destroy_process_group()


# What becomes of the weights


def four_to_two() -> tuple[nn.Sequential, prospr.Masks]:
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    with torch.no_grad():
        model[2].weight.copy_(torch.arange(1.0, 17.0).reshape(2, 8))
    masks = masks_of(model, **{"2_weight": (slice(None), slice(2, None))})
    return model, masks


def test_rescale():
    """Of eight inputs two are left: their weights are doubled, and the first layer has lost none of its inputs."""
    model, masks = four_to_two()
    small = prospr.shrink(model, masks, torch.zeros(1, 2).double(), weights="rescale")
    assert small[2].weight.tolist() == [[2, 4], [18, 20]]
    assert torch.equal(small[2].bias, model[2].bias)
    assert torch.equal(small[0].weight, model[0].weight[:2])


def test_rescale_counts_the_inputs_of_one_group_of_a_convolution():
    network = BY_NAME["few-large-groups"]
    twins = twins_of(network)
    small = prospr.shrink(twins.model, twins.masks, twins.example, weights="rescale")
    ratio = (8 / (small[2].in_channels / 2)) ** 0.5  # 16 channels in two groups
    assert ratio != 1
    assert torch.allclose(small[2].weight, ratio * twins.small[2].weight, rtol=1e-14)
    depthwise = twins_of(BY_NAME["depthwise-multiplier"])
    small = prospr.shrink(depthwise.model, depthwise.masks, depthwise.example, weights="rescale")
    assert torch.equal(small[1].weight, depthwise.small[1].weight)


def test_redraw():
    model, masks = four_to_two()
    example = torch.zeros(1, 2).double()
    state = torch.get_rng_state()
    one, same, other = (prospr.shrink(model, masks, example, weights="redraw", seed=seed) for seed in (3, 3, 4))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(one[2].weight, same[2].weight)
    assert not torch.equal(one[2].weight, other[2].weight)
    assert one[2].weight.abs().max() <= 2**-0.5  # of the two inputs that are left, not of eight
    ones = prospr.shrink(model, masks, example, weights="redraw", init=lambda m: [nn.init.ones_(m[0].weight)])
    assert ones[0].weight.tolist() == [[1, 1], [1, 1]]


def test_redrawn_weights_inside_the_channels_that_stay_are_pruned_too():
    model, masks = four_to_two()
    masks["0.weight"][0, 0] = False
    small = prospr.shrink(model, masks, torch.zeros(1, 2).double(), weights="redraw")
    assert small[0].weight[0, 0] == 0
    assert int(small[0].weight.count_nonzero()) == 3


# Errors


def test_settings_that_cannot_be():
    model, masks = four_to_two()
    example = torch.zeros(1, 2).double()
    with pytest.raises(SettingError, match=r"weights='new': use 'keep', 'rescale' or 'redraw'"):
        prospr.shrink(model, masks, example, weights="new")
    with pytest.raises(SettingError, match=r"init= draws weights anew; pass weights='redraw'"):
        prospr.shrink(model, masks, example, init=lambda m: None)
    with pytest.raises(MaskError, match=r"5\.weight: .*no such parameter"):
        prospr.shrink(model, {"5.weight": torch.ones(2, 2, dtype=torch.bool)}, example)
    with pytest.raises(MaskError, match=r"0\.weight: a mask of shape \(3, 3\), and the network has \(8, 2\)"):
        prospr.shrink(model, {"0.weight": torch.ones(3, 3, dtype=torch.bool)}, example)
    with pytest.raises(MaskError, match=r"0\.weight: a mask must be a tensor of torch.bool, and is torch.float32"):
        prospr.shrink(model, {"0.weight": torch.ones(8, 2)}, example)


@pytest.mark.parametrize("network", NOTHING_GOES, ids=lambda n: n.name)
def test_a_network_of_which_nothing_can_go_comes_back_whole(network):
    model, example = network.model(), network.example()
    assert len(find(model, example)) == 0
    masks = prospr.Masks({n: torch.ones_like(p, dtype=torch.bool) for n, p in model.named_parameters()})
    small = prospr.shrink(model, masks, example)
    assert [p.shape for p in small.parameters()] == [p.shape for p in model.parameters()]


# Models that are not the same in train and in eval mode


class Auxiliary(nn.Module):
    """A second head that is used in training alone."""

    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Linear(5, 8), nn.BatchNorm1d(8)
        self.head, self.extra = nn.Linear(8, 3), nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x):
        h = torch.relu(self.norm(self.body(x)))
        return (self.head(h), self.extra(h)) if self.training else self.head(h)


def test_a_head_for_training_alone():
    model = Auxiliary().double()
    found = find(model, X)
    assert {name: len(ids) for name, ids in found.sets.items()} == {"body.weight": 8, "extra.0.weight": 6}
    assert found.axes["extra.0.weight", 1] == found.sets["body.weight"]
    assert found.size().flops == 2 * (5 * 8 + 8 * 3)
    masks = found.masks({0, 3, 5, 9, 10})
    small = prospr.shrink(model, masks, X)
    masks.apply(model)
    call = (X,), {}
    assert_same(run(model, call), run(small, call), prospr.channels.plan(model, masks, X), 1e-10)
    assert torch.allclose(model.eval()(X), small.eval()(X), rtol=1e-12)


def test_a_head_for_training_with_a_size_that_is_written():
    class Written(Auxiliary):
        def forward(self, x):
            h = torch.relu(self.norm(self.body(x)))
            return (self.head(h), self.extra(h.reshape(-1, 8))) if self.training else self.head(h)

    found = find(Written().double(), X)
    assert list(found.sets) == ["extra.0.weight"]
    assert "does not run" in found.kept_whole["body.weight"]


def test_a_model_that_wants_targets_in_train_mode():
    class Wanting(Auxiliary):
        def forward(self, x, targets=None):
            if self.training:
                return targets["boxes"] + super().forward(x)[0]
            return self.head(torch.relu(self.norm(self.body(x))))

    model = Wanting().double()
    found = find(model, X)
    assert list(found.sets) == ["body.weight"]
    assert model.training
    assert all(m.training for m in model.modules())


def test_a_model_that_cannot_take_one_sample():
    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

        def forward(self, x):
            if len(x) < 2:
                raise ValueError("pairs only")
            return self.head(torch.relu(self.body(x)))

    model = Pairs().double()
    found = find(model, X)
    assert list(found.sets) == ["body.weight"]
    with pytest.raises(ValueError, match="pairs only"):
        find(model, X[:1])


def test_groups_that_were_found_serve_as_the_example():
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    x = torch.randn(4, 8)
    found = prospr.channels.groups(net, x)
    masks = found.select(found.sum({n: p.detach().abs() for n, p in net.named_parameters()}), 0.5)
    one, other = prospr.shrink(net, masks, found), prospr.shrink(net, masks, x)
    assert torch.equal(one(x), other(x))
    assert one[0].out_features == other[0].out_features < 16


def test_a_shortcut_that_goes_by_shapes_is_found_out():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.body = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
            self.side, self.head = nn.Conv2d(16, 32, 1), nn.Linear(32, 4)

        def forward(self, x):
            x = self.stem(x).relu()
            y = self.body(x)
            if x.shape != y.shape:
                x = self.side(x)
            return self.head((x + y).relu().mean((2, 3)))

    torch.manual_seed(0)
    model, x = Net(), torch.randn(2, 3, 8, 8)
    masks = prospr.prune(model, None, 0.8, method="magnitude", granularity="channel", round_to=8, example=x)
    widths = {int(masks[name].flatten(1).any(1).sum()) for name in ("stem.weight", "body.weight")}
    assert widths == {8}  # so that nothing calls `side` any more
    with pytest.raises(prospr.errors.PlanError, match="would not be what the masked one is"):
        prospr.shrink(model, masks, x)
