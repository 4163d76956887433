"""BYOL: views, the target, the loss, pretraining, probing, and pruning from where it leads."""

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import prospr
from prospr.errors import LossError, ModelError
from prospr.lab import byol as lab
from prospr.lab.byol import views as ops
from prospr.lab.byol.network import without
from prospr.lab.data import Split, digits
from prospr.lab.models import build

WHOLE = lab.View(area=(0.5, 1.0), flip=0.0, gray=0.0)
QUICK = lab.Pretraining(epochs=3, batch_size=64, lr=0.1, hidden=64, warmup=0.05, views=(WHOLE, WHOLE))
EVERYTHING = lab.View(gray=0.5, blur=0.5, solarize=0.5)


@pytest.fixture(scope="module")
def data():
    return digits()


@pytest.fixture(scope="module")
def pretrained(data):
    return lab.pretrain(build("small_convnet", seed=0, width=8), data, replace(QUICK, epochs=8))


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def photographs(n=6, channels=3, size=16):
    return torch.randint(0, 256, (n, channels, size, size), generator=rng(), dtype=torch.uint8)


def part_of(images):
    channels = images.shape[1]
    return Split(images, torch.zeros(len(images)), torch.full((channels,), 100.0), torch.full((channels,), 50.0))


def pixel(*values):
    return torch.tensor(values).view(1, -1, 1, 1)


def one(value):
    return torch.tensor([value])


# Views


@pytest.mark.parametrize("channels", [1, 3])
def test_views_are_normalised_floats_and_depend_on_the_generator_alone(channels):
    images = photographs(channels=channels)
    settings = (EVERYTHING, EVERYTHING)
    first, second = lab.two_views(images, part_of(images), settings, rng(3))
    again = lab.two_views(images, part_of(images), settings, rng(3))
    other = lab.two_views(images, part_of(images), settings, rng(4))
    assert first.shape == second.shape == images.shape
    assert first.dtype == torch.float32
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])
    assert not torch.equal(first, other[0])
    assert not torch.equal(first, second)
    low, high = (0 - 100) / 50, (255 - 100) / 50
    assert first.min() >= low - 1e-4
    assert first.max() <= high + 1e-4


def test_a_view_without_changes_is_the_image():
    images = photographs(size=8)
    still = lab.View(area=(1.0, 1.0), ratio=(1.0, 1.0), flip=0.0, jitter=0.0, gray=0.0)
    part = part_of(images)
    for made in lab.two_views(images, part, (still, still), rng()):
        torch.testing.assert_close(made, part.inputs(), rtol=0, atol=1e-4)


def test_numbers_that_change_nothing_change_nothing_at_all():
    images = torch.rand(3, 3, 8, 8, generator=rng())
    ones, zeros = torch.ones(3), torch.zeros(3)
    assert torch.equal(ops.scale_brightness(images, ones), images)
    assert torch.equal(ops.scale_contrast(images, ones), images)
    assert torch.equal(ops.scale_saturation(images, ones), images)
    assert torch.equal(ops.shift_hue(images, zeros), images)
    assert torch.equal(ops.blur(images, zeros), images)


def test_draws_lie_where_the_settings_say():
    settings = lab.View(area=(0.3, 0.5), blur=0.5, solarize=0.2)
    draws = settings.draw(4000, rng())
    fits = (draws.height < 1) & (draws.width < 1)
    area, ratio = (draws.height * draws.width)[fits], (draws.width / draws.height)[fits]
    assert 0.3 <= area.min() < 0.31 < 0.49 < area.max() <= 0.5 + 1e-6
    assert 0.75 - 1e-6 <= ratio.min() < 0.76 < 1.32 < ratio.max() <= 4 / 3 + 1e-6
    assert (draws.top + draws.height <= 1 + 1e-6).all()
    assert (draws.left + draws.width <= 1 + 1e-6).all()
    shares = {"mirrored": 0.5, "gray": 0.2, "solarized": 0.2}
    for name, share in shares.items():
        assert getattr(draws, name).float().mean().item() == pytest.approx(share, abs=0.03)
    assert (draws.sigma == 0).float().mean().item() == pytest.approx(0.5, abs=0.03)
    assert (draws.hue == 0).float().mean().item() == pytest.approx(0.2, abs=0.03)  # not jittered
    assert torch.equal(draws.hue == 0, draws.brightness == 1)
    assert draws.brightness.min() >= 0.6
    assert draws.brightness.max() <= 1.4
    assert sorted(draws.order) == [0, 1, 2, 3]


def test_crop_of_a_quarter_by_hand():
    image = torch.tensor([[0.0, 1.0], [2.0, 3.0]]).view(1, 1, 2, 2)
    half = one(0.5)
    # Pixels lie at 1/4 and 3/4; the lower right quarter is sampled at 5/8, three quarters of the way to the second of
    # them, and at 7/8, beyond it. The image is 2 row + column.
    made = ops.crop_resize(image, half, half, half, half, torch.tensor([False]))
    torch.testing.assert_close(made.view(2, 2), torch.tensor([[2.25, 2.5], [2.75, 3.0]]))
    mirrored = ops.crop_resize(image, half, half, half, half, torch.tensor([True]))
    assert torch.equal(mirrored, made.flip(3))


def test_colours_by_hand():
    orange = pixel(0.8, 0.4, 0.2)
    grey = 0.299 * 0.8 + 0.587 * 0.4 + 0.114 * 0.2
    assert ops.luma(orange).item() == pytest.approx(grey)
    torch.testing.assert_close(ops.scale_brightness(orange, one(1.5)), pixel(1.0, 0.6, 0.3))
    wanted = pixel(*(0.5 * value + 0.5 * grey for value in (0.8, 0.4, 0.2)))
    torch.testing.assert_close(ops.scale_saturation(orange, one(0.5)), wanted)
    torch.testing.assert_close(ops.shift_hue(orange, one(1 / 3)), pixel(0.2, 0.8, 0.4))
    torch.testing.assert_close(ops.shift_hue(orange, one(-1 / 3)), pixel(0.4, 0.2, 0.8))
    torch.testing.assert_close(ops.shift_hue(orange, one(1.0)), orange)


def test_contrast_by_hand():
    image = torch.tensor([0.2, 0.6]).view(1, 1, 1, 2)
    torch.testing.assert_close(ops.scale_contrast(image, one(0.5)), torch.tensor([0.3, 0.5]).view(1, 1, 1, 2))
    torch.testing.assert_close(ops.scale_contrast(image, one(3.0)), torch.tensor([0.0, 1.0]).view(1, 1, 1, 2))


def test_hue_is_that_of_colorsys():
    import colorsys

    images, turn = torch.rand(1, 3, 4, 4, generator=rng()), 0.17
    made = ops.shift_hue(images, one(turn))
    for row in range(4):
        for column in range(4):
            hue, saturation, value = colorsys.rgb_to_hsv(*images[0, :, row, column].tolist())
            wanted = colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)
            assert made[0, :, row, column].tolist() == pytest.approx(wanted, abs=1e-5)


def test_blur_is_a_convolution_with_a_gaussian():
    image = torch.rand(2, 1, 16, 16, generator=rng())
    sigma = torch.tensor([0.7, 1.6])
    made = ops.blur(image, sigma)
    for index in range(2):
        taps = torch.tensor([math.exp(-(k**2) / (2 * sigma[index].item() ** 2)) for k in (-1, 0, 1)])
        kernel = torch.outer(taps, taps) / taps.sum() ** 2
        wanted = F.conv2d(F.pad(image[index : index + 1], (1, 1, 1, 1), mode="reflect"), kernel.view(1, 1, 3, 3))
        torch.testing.assert_close(made[index : index + 1], wanted)


def test_grey_and_solarized_views_where_drawn():
    images = torch.rand(40, 3, 8, 8, generator=rng())
    settings = lab.View(area=(1.0, 1.0), ratio=(1.0, 1.0), flip=0.0, jitter=0.0, gray=0.5, solarize=0.5)
    draws = settings.draw(40, rng(1))
    made = ops.view(images, settings, draws)
    for image, result, grey, inverted in zip(images, made, draws.gray, draws.solarized, strict=True):
        wanted = ops.luma(image.unsqueeze(0))[0].expand(3, 8, 8) if grey else image
        wanted = torch.where(wanted >= 0.5, 1 - wanted, wanted) if inverted else wanted
        near = (wanted - 0.5).abs() > 1e-3  # resampling may carry a pixel over the threshold
        torch.testing.assert_close(result[near], wanted[near], rtol=0, atol=1e-4)


@pytest.mark.parametrize("wrong", [{"flip": 1.5}, {"hue": 0.6}, {"area": (0.0, 1.0)}, {"sigma": (2.0, 1.0)}])
def test_impossible_views_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        lab.View(**wrong)


# The network, the loss and the target


@pytest.mark.parametrize("name", ["resnet18", "resnet20", "vgg16", "vit", "mobilenet"])
def test_the_classifier_is_found_in_every_classification_network(name):
    width = {"vit": 12}.get(name, 4)
    network = build(name, seed=0, width=width)
    network.eval()
    images = torch.randn(2, 3, 32, 32, generator=rng())
    before = {key: value.clone() for key, value in network.state_dict().items()}
    found = lab.find_classifier(network, images)
    encoder, features = without(network, found)
    classifier = network.get_submodule(found)
    assert features == classifier.in_features
    torch.testing.assert_close(classifier(encoder(images)), network(images))
    assert all(torch.equal(before[key], value) for key, value in network.state_dict().items())


def test_the_classifier_is_the_one_that_runs_last_not_the_one_listed_last():
    class Reversed(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(6, 2)
            self.inside = nn.Linear(4, 6)

        def forward(self, x):
            return self.out(self.inside(x))

    assert lab.find_classifier(Reversed(), torch.zeros(1, 4)) == "out"


@pytest.mark.parametrize(
    ("network", "example"),
    [
        (nn.Sequential(nn.Conv2d(1, 2, 1)), torch.zeros(1, 1, 4, 4)),
        (nn.Sequential(nn.Linear(4, 2), nn.Tanh()), torch.ones(1, 4)),
        (nn.Linear(4, 2), torch.zeros(1, 4)),
    ],
    ids=["no Linear", "not last", "nothing else"],
)
def test_a_network_without_a_classifier_is_refused(network, example):
    with pytest.raises(ModelError):
        lab.find_classifier(network, example)


def small_byol(momentum=0.9):
    return lab.Byol(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.zeros(1, 3), 5, 6, momentum)


def test_the_target_follows_by_a_moving_mean():
    byol = small_byol()
    online = [*byol.encoder.parameters(), *byol.projector.parameters()]
    before = [p.clone() for p in byol.target.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, online, strict=True))
    with torch.no_grad():
        for p in online:
            p.add_(1.0)
    byol.follow()
    for was, now in zip(before, byol.target.parameters(), strict=True):
        torch.testing.assert_close(now, was + 0.1)
    byol.follow(momentum=1.0)
    for was, now in zip(before, byol.target.parameters(), strict=True):
        torch.testing.assert_close(now, was + 0.1)
    assert [byol.momentum_at(0), byol.momentum_at(1)] == pytest.approx([0.9, 1.0])


def test_the_loss_by_hand_and_no_gradient_at_the_target():
    byol = small_byol()
    with torch.no_grad():
        for p in byol.target.parameters():
            p.mul_(0.7)
    first, second = torch.randn(2, 8, 3, generator=rng())
    value = lab.loss(byol, (first, second))
    wanted = 0.0
    for a, b in ((byol(first), byol.target(second)), (byol(second), byol.target(first))):
        for p, z in zip(a, b, strict=True):
            wanted += (p / p.norm() - z / z.norm()).square().sum().item() / 8
    assert value.item() == pytest.approx(wanted, rel=1e-5)
    for p in byol.target.parameters():
        p.requires_grad_()  # even then
    lab.loss(byol, (first, second)).backward()
    assert all(p.grad is None for p in byol.target.parameters())
    online = [*byol.encoder.parameters(), *byol.projector.parameters(), *byol.predictor.parameters()]
    assert all(p.grad is not None for p in online)


def test_the_loss_refuses_another_model():
    with pytest.raises(TypeError, match="Byol"):
        lab.loss(nn.Linear(3, 3), torch.zeros(2, 4, 3))


# Pretraining and probing


def test_the_loss_falls_and_the_probe_beats_a_random_networks(pretrained, data):
    assert pretrained.losses[-1] < 0.85 * pretrained.losses[0]  # 0.49 to 0.78 with seeds 0 to 2
    random = lab.linear_probe(build("small_convnet", seed=0, width=8), data)
    assert lab.linear_probe(pretrained.network, data) > random + 0.1  # + 0.14 to 0.32


def test_pretraining_depends_on_the_seed_alone_and_leaves_everything_else_as_it_was(data):
    network = build("small_convnet", seed=0, width=4)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    told = []
    first = lab.pretrain(network, data, QUICK, epochs=1, progress=lambda *now: told.append(now))
    lab.linear_probe(network, data)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    again = lab.pretrain(network, data, QUICK, epochs=1)
    other = lab.pretrain(network, data, QUICK, epochs=1, seed=1)
    assert told == [(1, first.losses[0])]
    assert first.losses == again.losses != other.losses
    for key, value in first.network.state_dict().items():
        assert torch.equal(value, again.network.state_dict()[key])
        assert torch.equal(before[key], network.state_dict()[key])
    assert not torch.equal(first.network.fc.weight, network.fc.weight)  # drawn anew
    assert torch.equal(first.network.conv1.weight, first.byol.encoder.conv1.weight)


def test_a_cut_pretraining_goes_on_bit_for_bit(data, tmp_path):
    network, file = build("small_convnet", seed=0, width=4), tmp_path / "deep" / "byol.pt"

    class Cut(Exception):
        pass

    def cut(done, loss):
        if done == 2:
            raise Cut

    whole = lab.pretrain(network, data, QUICK)
    with pytest.raises(Cut):
        lab.pretrain(network, data, QUICK, progress=cut, checkpoint=file)
    epochs = []
    rest = lab.pretrain(network, data, QUICK, progress=lambda done, loss: epochs.append(done), checkpoint=file)
    assert epochs == [3]
    assert rest.losses == whole.losses
    assert all(
        torch.equal(a, b)
        for a, b in zip(rest.byol.state_dict().values(), whole.byol.state_dict().values(), strict=True)
    )
    assert [path.name for path in file.parent.iterdir()] == ["byol.pt"]
    with pytest.raises(ValueError, match="another pretraining"):
        lab.pretrain(network, data, QUICK, seed=1, checkpoint=file)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match="damaged"):
        lab.pretrain(network, data, QUICK, checkpoint=file)


def test_half_precision_loses_little(data):
    network = build("small_convnet", seed=0, width=4)
    plain = lab.pretrain(network, data, QUICK, epochs=1)
    short = lab.pretrain(network, data, replace(QUICK, bf16=True), epochs=1)
    assert short.losses[0] == pytest.approx(plain.losses[0], rel=0.05)
    assert short.losses != plain.losses
    assert short.network.conv1.weight.dtype == torch.float32


def test_impossible_pretrainings_are_refused(data):
    network = build("small_convnet", seed=0, width=4)
    with pytest.raises(ValueError, match="make no batch of 5000"):
        lab.pretrain(network, data, replace(QUICK, batch_size=5000))
    with pytest.raises(TypeError, match="streamed"):
        lab.pretrain(network, replace(data, train=[]), QUICK)
    with pytest.raises(ValueError, match="epochs"):
        lab.pretrain(network, data, epochs=0)
    with pytest.raises(LossError, match="learning rate"):
        lab.pretrain(network, data, replace(QUICK, lr=1e30, warmup=0.0))


def test_the_probe_is_a_ridge_that_separates_what_can_be_separated():
    """A network whose features are its input: the probe must find the line between the two classes."""
    images = torch.randn(200, 2, 1, 1, generator=rng())
    labels = (images[:, 0, 0, 0] > images[:, 1, 0, 0]).long()
    made = Split(images, labels)
    network = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(2), nn.Linear(2, 2))
    data = replace(digits(), train=made, test=made, num_classes=2)
    assert lab.linear_probe(network, data) > 0.97
    assert torch.equal(network[1].running_mean, torch.zeros(2))


# Pruning from there


def scoring_batches(data, count=4):
    return [(data.train.images[i::count][:64], data.train.labels[i::count][:64]) for i in range(count)]


@pytest.mark.parametrize("method", ["prospr", "snip"])
def test_pruning_from_the_pretrained_start_keeps_the_exact_count(pretrained, data, method):
    network = lab.Byol.network(pretrained.byol, pretrained.network, seed=0)
    masks = prospr.prune(network, scoring_batches(data), 0.95, method=method)
    assert masks.total == sum(p.numel() for p in prospr.prunable(network).values()) == 4264
    assert masks.kept == 4264 - round(0.95 * 4264)
    assert sum(int(network.get_parameter(name).count_nonzero()) for name in masks) == masks.kept


def test_pruning_by_the_loss_of_byol_leaves_the_target_alone(pretrained, data):
    byol = lab.Byol(pretrained.network, data.train.images[:2], 16, 32)
    part = lab.as_bytes(data.train)
    pairs = [lab.two_views(part.images[i * 64 : i * 64 + 64], part, (WHOLE, WHOLE), rng(i)) for i in range(4)]
    target = {name: p.clone() for name, p in byol.target.named_parameters()}
    kept = [name for name in prospr.prunable(byol) if name.startswith("encoder.")]
    masks = prospr.prune(byol, pairs, 0.9, loss=lab.loss, prunable=kept)
    assert list(masks) == [f"encoder.conv{index}.weight" for index in range(1, 5)]
    assert masks.kept == masks.total - round(0.9 * masks.total)
    assert all(torch.equal(target[name], p) for name, p in byol.target.named_parameters())
    of_network = prospr.Masks({name.removeprefix("encoder."): mask for name, mask in masks.items()})
    network = build("small_convnet", seed=0, width=8)
    of_network.apply(network)
    assert sum(int(network.get_parameter(name).count_nonzero()) for name in of_network) == masks.kept


def test_layer_norms_are_the_norms_of_gradient_and_metagrad(data):
    network, batches = build("small_convnet", seed=0, width=4).double(), scoring_batches(data)
    batches = [(images.double(), labels) for images, labels in batches]
    before = {key: value.clone() for key, value in network.state_dict().items()}
    norms = lab.layer_norms(network, batches, steps=3, lr=0.1)
    assert list(norms) == list(prospr.prunable(network))
    parameters = dict(network.named_parameters())
    F.cross_entropy(network(batches[3][0]), batches[3][1]).backward()
    network.load_state_dict(before)
    meta = prospr.meta.metagrad(
        prospr.meta.pure_loss(network), {n: p.detach() for n, p in parameters.items()}, batches, prospr.meta.SGD(0.1)
    )
    for name, pair in norms.items():
        assert pair.gradient == pytest.approx(parameters[name].grad.norm().item())
        assert pair.metagradient == pytest.approx(meta[name].norm().item())
    none = lab.layer_norms(network, batches[3:], steps=0, lr=0.1)
    assert all(pair.gradient == pytest.approx(pair.metagradient) for pair in none.values())
    assert {name: pair.gradient for name, pair in none.items()} == pytest.approx(
        {n: p.gradient for n, p in norms.items()}
    )


def test_the_figure_shows_every_norm(tmp_path):
    from xml.etree import ElementTree

    norms = {"a<b.weight": lab.Norms(0.01, 1.0), "dead.weight": lab.Norms(0.0, 0.5)}
    path = lab.write_norms(norms, tmp_path / "new" / "norms.svg", "Norms & layers")
    root = ElementTree.parse(path).getroot()
    space = {"s": "http://www.w3.org/2000/svg"}
    told = [element.text for element in root.iterfind(".//s:title", space)]
    assert told == [
        "Norms & layers",
        "a<b.weight, gradient: 0.01",
        "a<b.weight, meta-gradient: 1",
        "dead.weight, meta-gradient: 0.5",
    ]
    circle = root.find(".//s:g[@class='series-0']/s:circle", space)
    assert float(circle.get("cy")) == pytest.approx(76 + 260)  # 0.01 is the lowest power of ten
    assert path.with_suffix(".csv").read_text().splitlines()[1] == "a<b.weight,0.01,1.0"
    with pytest.raises(ValueError, match="nothing to draw"):
        lab.norms_figure({"dead.weight": lab.Norms(0.0, 0.0)})


def test_the_example_runs(tmp_path, capsys):
    path = Path(__file__).parents[2] / "examples" / "byol.py"
    spec = importlib.util.spec_from_file_location("byol_example", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(["--epochs", "1", "--images", "256", "--width", "4", "--train", "1", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert said.count("linear probe") == said.count("test accuracy") == 2
    names = {"norms-random.svg", "norms-byol.svg", "norms-random.csv", "norms-byol.csv"}
    assert names | {"masks-random.safetensors", "masks-byol.safetensors"} == {p.name for p in tmp_path.iterdir()}


@pytest.mark.gpu
def test_on_a_gpu_the_views_and_the_loss_are_the_cpus(data):
    images = photographs(64)
    part = part_of(images)
    here = lab.two_views(images, part, (EVERYTHING, EVERYTHING), rng())
    there = lab.two_views(images.cuda(), part.to("cuda"), (EVERYTHING, EVERYTHING), rng())
    for a, b in zip(here, there, strict=True):
        close = (a - b.cpu()).abs() < 1e-3
        assert close.float().mean() > 0.999  # solarize has a threshold
    network = build("small_convnet", seed=0)
    once = replace(QUICK, epochs=1)
    on_cpu, on_gpu = (lab.pretrain(network.to(device), data, once).losses[0] for device in ("cpu", "cuda"))
    assert on_gpu == pytest.approx(on_cpu, rel=0.05)
    fast = lab.pretrain(network.cuda(), data, replace(QUICK, bf16=True))
    assert fast.losses[-1] < fast.losses[0]
    assert next(fast.network.parameters()).is_cuda
