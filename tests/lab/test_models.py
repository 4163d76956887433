import copy
import inspect
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import prospr
from prospr.lab.models import (
    build,
    gpt,
    mobilenet,
    networks,
    resnet18,
    resnet20,
    resnet50,
    small_convnet,
    unet,
    vgg16,
    vgg19,
    vit,
)
from prospr.lab.models.init import truncated_
from prospr.lab.models.resnet import PadShortcut

# total and prunable parameters, and the side of the images the network is for
CASES = {
    "resnet20 A": (lambda: resnet20(shortcut="A"), 269_722, 268_336, 32),
    "resnet20 B": (lambda: resnet20(shortcut="B"), 272_474, 270_896, 32),
    "vgg16": (vgg16, 14_728_266, 14_715_584, 32),
    "vgg19": (vgg19, 20_040_522, 20_024_000, 32),
    "resnet18 3x3": (lambda: resnet18(200, stem="3x3"), 11_271_432, 11_261_632, 64),
    "resnet18 7x7": (lambda: resnet18(200, stem="7x7"), 11_279_112, 11_269_312, 64),
    "resnet50": (resnet50, 25_557_032, 25_502_912, 224),
    "small_convnet": (small_convnet, 16_794, 16_592, 8),
    "unet": (unet, 31_036_546, 31_023_808, 256),
    "unet without norm": (lambda: unet(norm=False), 31_030_658, 31_023_808, 256),
    "mobilenet": (mobilenet, 995_146, 974_912, 32),
    "vit": (vit, 2_693_194, 2_665_344, 32),
    "gpt": (gpt, 842_496, 819_200, 128),
    "gpt untied": (lambda: gpt(tied=False), 875_264, 819_200, 128),
}
ONE_CHANNEL = {"small_convnet", "unet", "unet without norm"}

# a narrow network of each kind, and the images it is run on
NARROW = {
    "small_convnet": ({"width": 2}, (1, 8, 8)),
    "resnet20": ({"width": 2}, (3, 16, 16)),
    "vgg16": ({"width": 2}, (3, 32, 32)),
    "vgg19": ({"width": 2}, (3, 32, 32)),
    "resnet18": ({"width": 2}, (3, 16, 16)),
    "resnet50": ({"width": 2}, (3, 64, 64)),
    "unet": ({"width": 2}, (1, 32, 16)),
    "mobilenet": ({"width": 2}, (3, 32, 32)),
    "vit": ({"width": 6, "depth": 2}, (3, 32, 32)),
    "gpt": ({"width": 8, "depth": 2, "heads": 2}, (12,)),
}


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_as_many_as_published(case):
    make, total, prunable, _ = CASES[case]
    with torch.device("meta"):  # shapes are enough, no memory or time for weights
        model = make()
    assert sum(p.numel() for p in model.parameters()) == total
    assert sum(p.numel() for p in prospr.prunable(model).values()) == prunable


@pytest.mark.parametrize("case", CASES)
def test_forward_gives_one_score_a_class(case):
    make, _, _, side = CASES[case]
    with torch.device("meta"):
        model = make()
        tokens = case.startswith("gpt")
        images = torch.empty(2, side, dtype=torch.long) if tokens else torch.empty(2, 3, side, side)
        logits = model(images[:, :1] if case in ONE_CHANNEL else images)
    if tokens:
        assert logits.shape == (2, side, 256)  # for every place
    elif case.startswith("unet"):
        assert logits.shape == (2, 2, side, side)  # for every pixel
    else:
        assert logits.shape == (2, {"resnet50": 1000}.get(case, 200 if "resnet18" in case else 10))


def narrow(name):
    settings, shape = NARROW[name]
    generator = torch.Generator().manual_seed(1)
    if name == "gpt":
        return build(name, seed=0, vocabulary=3, **settings), torch.randint(3, (2, *shape), generator=generator)
    return build(name, seed=0, num_classes=3, **settings), torch.randn(2, *shape, generator=generator)


@pytest.mark.parametrize("name", networks())
def test_a_narrow_one_trains_and_is_evaluated(name):
    model, images = narrow(name)
    out = model.train()(images)
    if name == "gpt":
        out = out.transpose(1, 2)  # (n, classes, places), as those of a segmentation
    targets = torch.arange(out[:, 0].numel()).reshape(out[:, 0].shape) % 3
    F.cross_entropy(out, targets).backward()
    for key, p in model.named_parameters():
        assert p.grad is not None, key
        assert p.grad.isfinite().all(), key
    grads = [p.grad for p in prospr.prunable(model).values()]
    assert sum(bool(g.any()) for g in grads) > 0.9 * len(grads)  # a ReLU of so few channels may be dead
    model.eval()
    with torch.no_grad():
        assert model(images).isfinite().all()
        assert torch.allclose(model(images)[:1], model(images[:1]), atol=1e-5)  # samples do not meet


@pytest.mark.parametrize("name", networks())
def test_every_network_has_a_width(name):
    default = inspect.signature(networks()[name]).parameters["width"].default
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in build(name, width=default // k).parameters()) for k in (1, 2, 4)]
    assert sizes[0] > 2 * sizes[1] > 4 * sizes[2]


@pytest.mark.parametrize("name", networks())
def test_fx_can_trace_it(name):
    model, images = narrow(name)
    traced = torch.fx.symbolic_trace(model.eval())
    assert torch.equal(traced(images), model(images))


@pytest.mark.parametrize("name", networks())
def test_weights_can_be_drawn_anew(name):
    model, _ = narrow(name)
    twin = prospr.sanity.redraw(model, seed=1)
    assert not any(torch.equal(p, twin.get_parameter(key)) for key, p in prospr.prunable(model).items())


@pytest.mark.parametrize(("stem", "side"), [("3x3", 8), ("7x7", 2)])
def test_resnet18_stems_shrink_a_64_pixel_image_to(stem, side):
    with torch.device("meta"):
        model = resnet18(stem=stem)
        x = model.maxpool(model.conv1(torch.empty(1, 3, 64, 64)))
        for stage in model.stages:
            x = model.get_submodule(stage)(x)
    assert x.shape[2:] == (side, side)


def test_resnet50_has_its_strides_on_the_3x3():
    with torch.device("meta"):
        first = resnet50().layer2[0]
    assert (first.conv1.stride, first.conv2.stride) == ((1, 1), (2, 2))


def test_option_a_takes_every_second_pixel_and_pads_channels():
    x = torch.tensor([[[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]], [[0.0] * 3] * 3]])
    out = PadShortcut(2, 4, stride=2)(x)
    corners = torch.tensor([[1.0, 3.0], [7.0, 9.0]])
    zeros = torch.zeros(2, 2)
    assert torch.equal(out, torch.stack([zeros, corners, zeros, zeros]).unsqueeze(0))


@pytest.mark.parametrize(("channels", "padding"), [((16, 32), (8, 8)), ((2, 5), (1, 2))])
def test_option_a_pads_by_a_module_that_can_be_changed(channels, padding):
    shortcut = PadShortcut(*channels, stride=2)
    x = torch.randn(2, channels[0], 6, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(shortcut(x), F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, *padding)))
    shortcut.pad.padding = (0, 0, 0, 0, 0, 1)
    assert torch.equal(shortcut(x), F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, 1)))


def test_convolutions_are_kaiming_normal_by_fan_out():
    weight = build("resnet20", seed=0).layer3[1].conv1.weight  # 64 channels of 3x3
    assert weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)
    assert weight.mean().item() == pytest.approx(0, abs=1e-3)


def test_transposed_convolutions_keep_the_size_of_their_inputs():
    up = build("unet", seed=0, width=16).up[1]  # 128 to 64 channels of 2x2
    assert up.weight.std().item() == pytest.approx((2 / (64 * 4)) ** 0.5, rel=0.02)
    assert not up.bias.any()
    x = torch.randn(2, 128, 8, 8, generator=torch.Generator().manual_seed(0)).relu()
    assert up(x).square().mean().item() == pytest.approx(x.square().mean().item(), rel=0.05)


def test_transformers_start_truncated_normal():
    model = build("vit", seed=0, depth=1)
    for weight in (model.blocks[0].attention.q.weight, model.patches.weight, model.positions.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert not model.blocks[0].mlp[0].bias.any()
    assert (model.norm.weight == 1).all()
    twin = prospr.sanity.redraw(model, init=truncated_, seed=3)
    assert twin.positions.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert not torch.equal(twin.positions.weight, model.positions.weight)


@pytest.mark.parametrize("name", networks())
def test_same_seed_same_weights_and_the_global_state_stays(name):
    before = torch.get_rng_state()
    a, b, c = (build(name, seed=seed, **NARROW[name][0]) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not any(torch.equal(p, c.get_parameter(key)) for key, p in prospr.prunable(a).items())


def test_unet_joins_each_level_to_its_twin():
    model = build("unet", seed=0, width=2, depth=2).eval()
    images = torch.randn(1, 1, 12, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        top = model.down[0](images)
        middle = model.down[1](F.max_pool2d(top, 2))
        bottom = model.down[2](F.max_pool2d(middle, 2))
        x = model.join[0](torch.cat([middle, model.up[0](bottom)], 1))
        x = model.join[1](torch.cat([top, model.up[1](x)], 1))
        assert torch.equal(model(images), model.head(x))


def test_unet_names_the_sizes_it_cannot_halve():
    with pytest.raises(ValueError, match=r"images of 250x256 cannot be halved 4 times; pad them to 256x256"):
        unet(width=1)(torch.zeros(1, 1, 250, 256))
    with pytest.raises(ValueError, match=r"8x9 .* 3 times; pad them to 8x16 \(multiples of 8\)"):
        torch.fx.symbolic_trace(unet(width=1, depth=3))(torch.zeros(1, 1, 8, 9))


def test_mobilenet_filters_each_channel_alone_and_skips_where_shapes_agree():
    model = mobilenet(width=4)
    middle = [conv for block in model.blocks for conv in block.layers if getattr(conv, "kernel_size", 0) == (3, 3)]
    assert all(conv.groups == conv.in_channels == conv.out_channels for conv in middle)
    assert [block.residual for block in model.blocks] == [
        *[True, True, True, False, True, True],
        *[False, True, True, False, True],
    ]
    block = model.blocks[1].eval()
    x = torch.randn(1, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(block(x), x + block.layers(x))


def test_heads_can_be_taken_away_without_changing_code():
    model = build("vit", seed=0, width=12, heads=3, depth=1).eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    attention = model.blocks[0].attention
    kept = torch.tensor([0, 1, 2, 3, 8, 9, 10, 11])  # heads 0 and 2, of four each
    silenced = copy.deepcopy(model)
    with torch.no_grad():
        value = silenced.blocks[0].attention.v
        value.weight[4:8], value.bias[4:8] = 0, 0  # head 1 gives nothing
        for layer in (attention.q, attention.k, attention.v):
            layer.weight, layer.bias = nn.Parameter(layer.weight[kept]), nn.Parameter(layer.bias[kept])
        attention.proj.weight = nn.Parameter(attention.proj.weight[:, kept])
        assert torch.allclose(model(images), silenced(images), atol=1e-6)


def test_vit_names_what_does_not_fit():
    with pytest.raises(ValueError, match=r"image=30 is not a multiple of patch=4"):
        vit(image=30)
    with pytest.raises(ValueError, match=r"width=100 is not a multiple of heads=3; take 102"):
        vit(width=100)
    with pytest.raises(ValueError, match=r"256 patches, and the network has positions for 64; build it with image="):
        vit(width=6, depth=1)(torch.zeros(1, 3, 64, 64))


def test_unknown_names_are_told_the_known_ones():
    with pytest.raises(ValueError, match=r"'resnet21'.*small_convnet, resnet20, vgg16"):
        build("resnet21")
    with pytest.raises(ValueError, match=r"shortcut 'C'; known: A, B"):
        resnet20(shortcut="C")
    with pytest.raises(ValueError, match=r"stem '5x5'; known: 3x3, 7x7"):
        resnet18(stem="5x5")
    assert set(networks()) == set(NARROW)


def test_a_function_of_an_installed_package():
    settings = {"embed_dim": 8, "num_heads": 2}
    before = torch.get_rng_state()
    a, b, c = (build("torch.nn.modules.activation:MultiheadAttention", seed=s, **settings) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(a, nn.MultiheadAttention)
    assert torch.equal(a.in_proj_weight, b.in_proj_weight)
    assert not torch.equal(a.in_proj_weight, c.in_proj_weight)


def test_a_function_of_a_file_on_the_path(tmp_path, monkeypatch):
    (tmp_path / "mynets.py").write_text("import torch\ndef tiny(n): return torch.nn.Linear(n, 2)\nSIZE = 3\n")
    (tmp_path / "broken.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert build("mynets:tiny", n=5).weight.shape == (2, 5)
        with pytest.raises(ValueError, match=r"mynets has no 'tinny'; check the spelling"):
            build("mynets:tinny")
        with pytest.raises(ValueError, match=r"mynets has no function or class, but a int, 'SIZE'"):
            build("mynets:SIZE")
        with pytest.raises(TypeError, match=r"'builtins:dict': it made a dict, not a torch.nn.Module"):
            build("builtins:dict")
        with pytest.raises(ModuleNotFoundError, match="No module named 'surely_not_installed'"):
            build("broken:net")  # the package is there: its own error says more
    finally:
        sys.modules.pop("mynets", None)


@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:resnet18", "torchvision.models:resnet18"])
def test_a_package_that_is_not_there_is_told_how_to_get_it(name, monkeypatch):
    package = name.partition(":")[0].partition(".")[0]

    class Missing:
        def find_spec(self, wanted, path=None, target=None):
            if wanted.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    for loaded in [key for key in sys.modules if key.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match=rf"'{name}': {package} is not installed; pip install {package}"):
        build(name)


def test_names_that_lead_nowhere():
    with pytest.raises(ModuleNotFoundError, match=r"torch is installed and has no module torch.nets; check"):
        build("torch.nets:resnet")
    with pytest.raises(ModuleNotFoundError, match=r"surely_not_installed is not installed; pip install"):
        build("surely_not_installed.nets:resnet")
    for name in ("timm:", ":resnet18"):
        with pytest.raises(ValueError, match=r"expected 'timm:NAME', 'torchvision:NAME' or"):
            build(name)


def test_timm_by_name():
    pytest.importorskip("timm")
    assert build("timm:resnet18", num_classes=7).get_submodule("fc").out_features == 7
    with pytest.raises(ValueError, match=r"timm has no 'resnet17'"):
        build("timm:resnet17")


def test_torchvision_by_name():
    pytest.importorskip("torchvision")
    assert build("torchvision:resnet18", num_classes=7).get_submodule("fc").out_features == 7
    with pytest.raises(ValueError, match=r"torchvision has no 'resnet17'"):
        build("torchvision:resnet17")
