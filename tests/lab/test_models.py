import pytest
import torch

import prospr
from prospr.lab.models import build, networks, resnet18, resnet20, resnet50, small_convnet, vgg16, vgg19
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
        channels = 1 if case == "small_convnet" else 3
        logits = model(torch.empty(2, channels, side, side))
    assert logits.shape == (2, {"resnet50": 1000}.get(case, 200 if "resnet18" in case else 10))


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


def test_convolutions_are_kaiming_normal_by_fan_out():
    weight = build("resnet20", seed=0).layer3[1].conv1.weight  # 64 channels of 3x3
    assert weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)
    assert weight.mean().item() == pytest.approx(0, abs=1e-3)


def test_same_seed_same_weights_and_the_global_state_stays():
    before = torch.get_rng_state()
    a, b, c = (build("small_convnet", seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.conv1.weight, c.conv1.weight)


def test_unknown_names_are_told_the_known_ones():
    with pytest.raises(ValueError, match=r"'resnet21'.*small_convnet, resnet20, vgg16"):
        build("resnet21")
    with pytest.raises(ValueError, match=r"shortcut 'C'; known: A, B"):
        resnet20(shortcut="C")
    with pytest.raises(ValueError, match=r"stem '5x5'; known: 3x3, 7x7"):
        resnet18(stem="5x5")
    assert set(networks()) == {"small_convnet", "resnet20", "vgg16", "vgg19", "resnet18", "resnet50"}
