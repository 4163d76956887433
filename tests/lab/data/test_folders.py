import dataclasses
import math

import pytest
import torch

from prospr.lab.data import DataError, MissingDataError, datasets, load, tiny
from prospr.lab.data.folders import _random_box, random_crop
from prospr.lab.data.pictures import square, to_tensor
from prospr.lab.seeds import generator

Image = pytest.importorskip("PIL.Image")


def picture(seed, width=40, height=30, mode="RGB"):
    pixels = torch.randint(256, (height, width, len(mode)), generator=generator("picture", seed), dtype=torch.uint8)
    return Image.frombytes(mode, (width, height), pixels.numpy().tobytes())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three classes, eleven images to train on and six to test on, of several sizes and kinds."""
    root = tmp_path_factory.mktemp("pictures")
    for part, count in (("train", 11), ("val", 6)):
        for number in range(count):
            place = root / part / ("cat", "dog", "eel")[number % 3]
            place.mkdir(parents=True, exist_ok=True)
            mode, suffix = (("RGB", "png"), ("L", "PNG"), ("RGBA", "webp"))[number % 3]
            picture((part == "val") * 100 + number, 20 + number, 31 - number, mode).save(place / f"{number}.{suffix}")
    (root / "train" / "cat" / "notes.txt").write_text("not an image")
    (root / "train" / ".hidden").mkdir()
    (root / "train" / "dog" / "._1.PNG").write_bytes(b"what some systems leave beside an image")
    return root


@pytest.fixture
def files(folder):
    return dataclasses.replace(load("folder", folder).train, size=8, resize=10)


def test_classes_are_the_folders_names_sorted(folder):
    data = load("folder", folder)
    assert data.classes == ("cat", "dog", "eel")
    assert data.train.labels.bincount().tolist() == [4, 4, 3]
    assert (len(data.train), len(data.test), data.num_classes) == (11, 6, 3)
    assert all(
        f"/{data.classes[label]}/" in path for path, label in zip(data.train.paths, data.train.labels, strict=True)
    )
    again = load("imagenet", folder)
    assert again.train.paths == data.train.paths
    assert again.mean.tolist() == pytest.approx([123.675, 116.28, 103.53])


def test_an_epoch_depends_on_seed_and_epoch_alone(files):
    def epoch(number, **settings):
        images, labels = zip(*files.batches(4, **settings).epoch(number), strict=True)
        return torch.cat(images), torch.cat(labels)

    images, labels = epoch(1, seed=3)
    assert images.shape == (11, 3, 8, 8)
    assert sorted(labels.tolist()) == sorted(files.labels.tolist())
    assert all(torch.equal(a, b) for a, b in zip((images, labels), epoch(1, seed=3), strict=True))
    assert not torch.equal(images, epoch(2, seed=3)[0])
    assert not torch.equal(images, epoch(1, seed=4)[0])


@pytest.mark.parametrize("workers", [1, 2])
def test_the_number_of_workers_changes_nothing_nor_the_global_random_state(files, workers):
    before = torch.get_rng_state()
    alone = list(files.batches(4, seed=0).epoch(2))
    shared = list(files.batches(4, seed=0, workers=workers).epoch(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) and torch.equal(x, y) for (a, x), (b, y) in zip(alone, shared, strict=True))


def test_the_order_does_not_depend_on_the_crops(files):
    stream = files.batches(4, seed=0, augment=False)
    order = stream.order(3)
    images = torch.cat([images for images, _ in stream.epoch(3)])
    in_order = torch.cat([images for images, _ in files.in_order(5)])
    assert torch.equal(images, in_order[order])
    assert torch.equal(torch.cat([labels for _, labels in files.batches(4, seed=0).epoch(3)]), files.labels[order])


def test_testing_takes_the_centre_in_order(files):
    stream = files.in_order(4)
    images = torch.cat([images for images, _ in stream])
    assert torch.equal(torch.cat([labels for _, labels in stream]), files.labels)
    with Image.open(files.paths[2]) as image:
        centre = to_tensor(square(image.convert("RGB"), 8, 10)).float()
    mean, std = files.mean.view(3, 1, 1), files.std.view(3, 1, 1)
    assert torch.equal(images[2], (centre - mean) / std)


def test_drop_last_and_impossible_streams(files):
    assert [len(labels) for _, labels in files.batches(4, seed=0, drop_last=True)] == [4, 4]
    with pytest.raises(ValueError, match="11 images make no batch of 12"):
        files.batches(12, seed=0, drop_last=True)
    with pytest.raises(ValueError, match="batch_size is 0"):
        files.batches(0, seed=0)
    with pytest.raises(ValueError, match="workers is -1"):
        files.batches(1, seed=0, workers=-1)


def test_the_square_is_the_centre_of_the_shorter_side():
    image = Image.new("RGB", (40, 20))
    image.paste((255, 0, 0), (10, 0, 30, 20))
    assert to_tensor(square(image, 20)).float().mean((1, 2)).tolist() == [255, 0, 0]
    assert square(image, 8, 10).size == (8, 8)
    same = picture(0, 16, 16)
    assert torch.equal(to_tensor(square(same, 16)), to_tensor(same))


def test_random_crops_have_the_areas_and_shapes_they_should():
    rng = generator("test")
    boxes = [_random_box(300, 200, rng) for _ in range(2000)]
    areas, ratios = [], []
    for left, top, width, height in boxes:
        assert left >= 0
        assert top >= 0
        assert left + width <= 300
        assert top + height <= 200
        areas.append(width * height / 60_000)
        ratios.append(width / height)
    assert 0.078 < min(areas) < 0.1
    assert 0.8 < max(areas) < 8 / 9 + 0.01  # 200 x 267 is the largest that is not too wide
    assert min(ratios) == pytest.approx(3 / 4, abs=0.03)
    assert max(ratios) == pytest.approx(4 / 3, abs=0.03)
    of_a_square = [_random_box(200, 200, rng) for _ in range(2000)]
    mean = sum(math.log(width / height) for _, _, width, height in of_a_square) / 2000
    assert abs(mean) < 0.012  # as often upright as lying: three deviations
    assert _random_box(1000, 10, rng) == (493, 0, 13, 10)  # too long for any: the centre
    assert _random_box(10, 1000, rng) == (0, 493, 10, 13)


def test_half_of_the_crops_are_mirrored():
    image = Image.new("RGB", (32, 32))
    image.paste((255, 255, 255), (16, 0, 32, 32))  # bright on the right
    seen = {"left": 0, "right": 0}
    for number in range(200):
        crop = to_tensor(random_crop(image, 8, generator("test", number))).float()[0]
        left, right = float(crop[:, 0].mean()), float(crop[:, -1].mean())
        if left != right:
            seen["left" if left > right else "right"] += 1
    assert min(seen.values()) > 0.35 * sum(seen.values())
    assert sum(seen.values()) > 50


def test_a_folder_in_memory(folder, files):
    data = load("folder", folder, size=16)
    assert data.train.images.shape == (11, 3, 16, 16)
    assert data.train.images.dtype == torch.uint8
    assert torch.equal(data.train.labels, files.labels)
    assert torch.equal(data.test.mean, data.train.mean)
    assert torch.allclose(data.train.inputs().mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    with Image.open(files.paths[4]) as image:
        assert torch.equal(data.train.images[4], to_tensor(square(image.convert("RGB"), 16)))


def test_validation_of_a_folder(folder):
    data = load("folder", folder).split_validation(count=3, seed=0)
    assert (len(data.train), len(data.validation)) == (8, 3)
    assert data.validation.labels.tolist() == [0, 1, 2]
    assert not set(data.train.paths) & set(data.validation.paths)


def test_folders_that_do_not_fit_are_told_why(tmp_path):
    with pytest.raises(MissingDataError, match=r"train/<class>"):
        load("folder", tmp_path)
    for place in ("train/cat", "val/dog"):
        (tmp_path / place).mkdir(parents=True)
    with pytest.raises(DataError, match=r"folders in val/ are not those of train/ \(1: cat\)"):
        load("folder", tmp_path)
    (tmp_path / "val" / "dog").rename(tmp_path / "val" / "cat")
    with pytest.raises(DataError, match="train/cat: no image in it"):
        load("folder", tmp_path)
    picture(0).save(tmp_path / "train" / "cat" / "0.png")
    with pytest.raises(DataError, match="val: no image below it"):
        load("folder", tmp_path)
    (tmp_path / "val" / "cat" / "0.jpg").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"0\.jpg: not an image that can be decoded"):
        load("folder", tmp_path, size=8)


@pytest.fixture
def tiny_root(tmp_path):
    """Tiny-ImageNet's layout with two classes."""
    root = tmp_path / "tiny-imagenet-200"
    for number in range(6):
        place = root / "train" / ("n01", "n02")[number % 2] / "images"
        place.mkdir(parents=True, exist_ok=True)
        picture(number, 64, 64, ("RGB", "L")[number == 3]).save(place / f"{number}.JPEG")
    (root / "val" / "images").mkdir(parents=True)
    lines = []
    for number in range(4):
        picture(10 + number, 64, 64).save(root / "val" / "images" / f"val_{number}.JPEG")
        lines.append(f"val_{number}.JPEG\t{('n02', 'n01', 'n02', 'n02')[number]}\t0\t0\t9\t9\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    return tmp_path


def test_tiny_imagenet_is_decoded_once(tiny_root):
    told = []
    data = load("tiny-imagenet", tiny_root, progress=lambda *args: told.append(args))
    assert told[-1] == (4, 4, "images decoded")
    assert data.train.images.shape == (6, 3, 64, 64)
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.test.labels.tolist() == [1, 0, 1, 1]
    assert data.classes == ("n01", "n02")
    cache = tiny.cache_of(tiny_root / "tiny-imagenet-200")
    assert {path.name for path in tiny_root.iterdir()} == {"tiny-imagenet-200", cache.name}
    for path in sorted((tiny_root / "tiny-imagenet-200").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    again = load("tiny-imagenet", tiny_root, download=False)
    for part in ("train", "test"):
        one, two = getattr(data, part), getattr(again, part)
        assert torch.equal(one.images, two.images)
        assert torch.equal(one.labels, two.labels)
        assert torch.equal(one.mean, two.mean)
    assert (again.classes, again.num_classes) == (data.classes, 2)


def test_decoded_images_that_cannot_be_kept_are_used_all_the_same(tiny_root, monkeypatch):
    def refuse(*args):
        raise PermissionError("read-only")

    monkeypatch.setattr("os.replace", refuse)
    monkeypatch.chdir(tiny_root)
    with pytest.warns(UserWarning, match=r"tiny-imagenet-200\.safetensors: .* could not be kept \(read-only\)"):
        assert len(load("tiny-imagenet", ".").train) == 6
    assert [path.name for path in tiny_root.iterdir()] == ["tiny-imagenet-200"]


def test_a_damaged_cache_is_named(tiny_root):
    load("tiny-imagenet", tiny_root)
    cache = tiny.cache_of(tiny_root / "tiny-imagenet-200")
    cache.write_bytes(cache.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"tiny-imagenet-200\.safetensors: damaged .* delete it"):
        load("tiny-imagenet", tiny_root)


def test_an_annotation_of_no_class_is_named(tiny_root):
    path = tiny_root / "tiny-imagenet-200" / "val" / "val_annotations.txt"
    path.write_text(path.read_text() + "val_0.JPEG\tn99\t0\t0\t1\t1\n")
    with pytest.raises(DataError, match=r"line 5: 'n99' is not a class of train/"):
        load("tiny-imagenet", tiny_root)
    assert datasets()["tiny-imagenet"].missing(tiny_root) == [
        "train/<class>/images/*.JPEG",
        "val/images/*.JPEG",
        "val/val_annotations.txt",
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_parts_of_a_batch_are_the_batch(files, workers):
    """Of the last, which has three images, the fourth part is empty."""
    batches = files.batches(4, seed=0, workers=workers)
    parts = [list(batches.epoch(2, (i, 4))) for i in range(4)]
    assert [len(labels) for _, labels in parts[3]] == [1, 1, 0]
    assert parts[3][2][0].shape == (0, 3, 8, 8)
    for step, (images, labels) in enumerate(batches.epoch(2)):
        assert torch.equal(torch.cat([part[step][0] for part in parts]), images)
        assert torch.equal(torch.cat([part[step][1] for part in parts]), labels)
