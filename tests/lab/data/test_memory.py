import gzip
from importlib import resources

import pytest
import torch

from prospr.lab.data import IGNORE, Batches, CropFlip, Dataset, Split, crop_flip, digits, normalise
from prospr.lab.data.dataset import hold_out
from prospr.lab.data.embedded import _unpack_digits
from prospr.lab.data.memory import statistics
from prospr.lab.seeds import generator


@pytest.fixture(scope="module")
def data():
    return digits()


def numbered(n, batch_size=4, **settings):
    """Batches whose labels tell the images' positions."""
    return Batches(torch.arange(n).float().view(n, 1, 1, 1), torch.arange(n), batch_size, **settings)


def order(batches, epoch):
    return torch.cat([labels for _, labels in batches.epoch(epoch)]).tolist()


def test_digits_are_split_1437_to_360_and_stratified(data):
    assert (len(data.train), len(data.test), data.num_classes) == (1437, 360, 10)
    everything = data.train.labels.bincount() + data.test.labels.bincount()
    assert everything.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # as scikit-learn counts them
    assert ((data.test.labels.bincount() - everything / 5).abs() < 1).all()


def test_digits_are_normalised_by_the_training_part(data):
    assert data.train.images.dtype == torch.float32
    assert data.train.images.mean().item() == pytest.approx(0, abs=1e-5)
    assert data.train.images.std().item() == pytest.approx(1, abs=1e-5)
    levels = torch.cat([data.train.images, data.test.images]).unique()
    assert len(levels) == 17  # 0 to 16


def test_the_first_digit_is_the_zero_everyone_knows():
    labels, pixels = _unpack_digits(_shipped())
    assert labels[:10].tolist() == list(range(10))
    assert pixels[0].view(8, 8)[0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]


def test_a_damaged_file_is_refused():
    raw = bytearray(_shipped())
    raw[5000] ^= 1
    with pytest.raises(ValueError, match=r"digits\.gz: SHA-256 is .* install"):
        _unpack_digits(bytes(raw))


def test_the_shipped_file_is_small_and_its_licence_beside_it():
    folder = resources.files("prospr.lab") / "data_files"
    assert len((folder / "digits.gz").read_bytes()) < 60_000
    assert "CC BY 4.0" in (folder / "NOTICE.md").read_text(encoding="utf-8")


def test_an_epoch_visits_every_image_once():
    batches = numbered(10, seed=0)
    assert [len(labels) for _, labels in batches] == [4, 4, 2]
    assert len(batches) == 3
    assert sorted(order(batches, 0)) == list(range(10))


def test_images_stay_with_their_labels():
    for images, labels in numbered(10, seed=0):
        assert torch.equal(images.flatten(), labels.float())


def test_the_order_depends_on_seed_and_epoch_alone():
    first, again, other = numbered(50, seed=7), numbered(50, seed=7), numbered(50, seed=8)
    order(first, 0)  # having been used before changes nothing
    assert order(first, 3) == order(again, 3)
    assert order(first, 3) != order(first, 4)
    assert order(first, 3) != order(other, 3)
    assert torch.cat([labels for _, labels in first]).tolist() == order(first, 0)


def test_batches_leave_the_global_random_state_alone(data):
    batches = Batches(data.train.images, data.train.labels, 64, seed=0, augment=CropFlip(2, flip=True))
    before = torch.get_rng_state()
    one = [images for images, _ in batches]
    torch.manual_seed(99)
    two = [images for images, _ in batches]
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    torch.set_rng_state(before)
    list(batches)
    assert torch.equal(torch.get_rng_state(), before)


def test_drop_last_leaves_out_the_short_batch():
    batches = numbered(10, seed=0, drop_last=True)
    assert [len(labels) for _, labels in batches] == [4, 4]
    assert len(batches) == 2


def test_bad_batches_are_told_why():
    with pytest.raises(ValueError, match="3 images but 2 labels"):
        Batches(torch.zeros(3, 1), torch.zeros(2), 1, seed=0)
    with pytest.raises(ValueError, match="batch_size is 0"):
        numbered(3, batch_size=0, seed=0)
    with pytest.raises(ValueError, match=r"3 images make no batch of 4.*drop_last=False"):
        numbered(3, seed=0, drop_last=True)


def test_crop_moves_a_pixel_by_at_most_pad_and_flip_mirrors():
    image = torch.zeros(200, 1, 5, 5)
    image[:, 0, 2, 1] = 1
    moved = CropFlip(pad=1)(image, generator("test"))
    places = {tuple(place) for place in moved.nonzero()[:, 2:].tolist()}
    assert places == {(row, column) for row in (1, 2, 3) for column in (0, 1, 2)}
    mirrored = CropFlip(pad=0, flip=True)(image, generator("test"))
    columns = mirrored.nonzero()[:, 3].bincount(minlength=5).tolist()
    assert columns[1] + columns[3] == 200
    assert min(columns[1], columns[3]) > 70


def test_no_padding_and_no_flip_change_nothing():
    images = torch.randn(6, 3, 5, 4, generator=generator("test"))
    assert torch.equal(CropFlip(pad=0)(images, generator("test")), images)


def bytes_split(n=37, channels=3, size=6, classes=5):
    rng = generator("test")
    images = torch.randint(256, (n, channels, size, size), generator=rng, dtype=torch.uint8)
    return Split(images, torch.arange(n) % classes, *statistics(images))


def by_hand(image, top, left, mirrored, pad):
    """One crop, pixel by pixel."""
    _, height, width = image.shape
    out = torch.zeros_like(image)
    for row in range(height):
        for column in range(width):
            y = row + int(top) - pad
            x = (width - 1 - column if mirrored else column) + int(left) - pad
            if 0 <= y < height and 0 <= x < width:
                out[:, row, column] = image[:, y, x]
    return out


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16, torch.int64])
def test_crop_flip_pixel_by_pixel(dtype):
    images = torch.randint(200, (24, 2, 5, 7), generator=generator("test")).to(dtype)
    top, left, mirrored = CropFlip(3, flip=True).draw(24, generator("crops"))
    assert 0 < mirrored.sum() < 24
    moved = crop_flip(images, top, left, mirrored, 3)
    assert moved.dtype == dtype
    expected = [by_hand(*one, 3) for one in zip(images, top, left, mirrored, strict=True)]
    assert torch.equal(moved, torch.stack(expected))
    assert torch.equal(moved, CropFlip(3, flip=True)(images, generator("crops")))


@pytest.mark.parametrize("augment", [None, CropFlip(2, flip=True), CropFlip(0, flip=True), CropFlip(1)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_draws_make_the_batches_of_the_epoch(augment, drop_last):
    split = bytes_split()
    batches = split.batches(8, seed=3, augment=augment, drop_last=drop_last)
    draws = batches.draws(5)
    used = 32 if drop_last else 37
    assert [len(drawn) for drawn in (draws.order, draws.top, draws.left, draws.mirrored)] == [used] * 4
    assert (draws.order.dtype, draws.mirrored.dtype) == (torch.int64, torch.bool)
    count = 0
    for index, (images, labels) in enumerate(batches.epoch(5)):
        now = draws[index * 8 : index * 8 + 8]
        moved = crop_flip(split.images[now.order], now.top, now.left, now.mirrored, batches.pad)
        assert torch.equal(images, normalise(moved, split.mean, split.std))
        assert torch.equal(labels, split.labels[now.order])
        count += 1
    assert count == len(batches)


def test_an_augmentation_of_ones_own_is_called_batch_by_batch():
    def darken(images, rng):
        return images * torch.rand(len(images), 1, 1, 1, generator=rng)

    batches = numbered(10, seed=0, augment=darken)
    assert order(batches, 2) == order(numbered(10, seed=0), 2)
    first, again = (torch.cat([images for images, _ in batches.epoch(2)]) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first.flatten(), torch.tensor(order(batches, 2)).float())
    with pytest.raises(ValueError, match=r"darken.*nothing is known ahead; use CropFlip or None"):
        batches.draws(0)


def test_label_maps_move_with_their_images():
    n, size = 16, 6
    labels = torch.randint(2, (n, size, size), generator=generator("test"))
    images = (labels.unsqueeze(1) * 200 + 50).to(torch.uint8)
    batches = Split(images, labels).batches(5, seed=0, augment=CropFlip(2, flip=True))
    seen = 0
    for moved, maps in batches:
        inside = moved.squeeze(1) > 0
        assert torch.equal(maps == IGNORE, ~inside)
        assert torch.equal(maps[inside], (moved.squeeze(1)[inside].long() - 50) // 200)
        seen += int((~inside).sum())
    assert seen > 0
    with pytest.raises(ValueError, match="moves images but not their label maps"):
        Batches(images, labels, 4, seed=0, augment=lambda images, rng: images)


def test_bytes_are_normalised_after_augmentation():
    split = bytes_split()
    plain = split.inputs()
    assert plain.dtype == torch.float32
    assert torch.allclose(plain.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(plain.std((0, 2, 3), unbiased=False), torch.ones(3), atol=1e-5)
    black = -split.mean / split.std
    images, _ = next(split.batches(37, seed=0, augment=CropFlip(6)).epoch(0))
    corner = images[:, :, 0, 0]  # moved by six of six pixels, some images show nothing but padding there
    assert (corner - black).abs().sum(1).min() == 0


def test_normalised_numbers_take_the_dtype_of_training():
    split = bytes_split()
    exact = (split.images.double() - split.mean.double().view(3, 1, 1)) / split.std.double().view(3, 1, 1)
    half = split.inputs(dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, exact.float().bfloat16())
    assert torch.equal(split.inputs(3, 5), split.inputs()[3:5])
    ready = digits().test
    assert torch.equal(ready.inputs(0, 4), ready.images[:4])


def test_statistics_are_those_of_the_pixels_and_never_zero():
    images = bytes_split(n=11).images
    mean, std = statistics(images)
    assert torch.allclose(mean, images.float().mean((0, 2, 3)))
    assert torch.allclose(std, images.float().std((0, 2, 3), unbiased=False))
    assert torch.equal(mean, statistics(images.flip(0))[0])
    assert statistics(torch.full((2, 1, 3, 3), 9, dtype=torch.uint8))[1].tolist() == [1.0]


def test_validation_is_stratified_disjoint_and_depends_on_the_seed_alone(data):
    first, again, other = (data.split_validation(0.2, seed=seed) for seed in (4, 4, 5))
    assert (len(first.train), len(first.validation)) == (1437 - 287, 287)
    assert torch.equal(first.validation.images, again.validation.images)
    assert not torch.equal(first.validation.images, other.validation.images)
    assert first.test is data.test
    counts = data.train.labels.bincount()
    assert ((first.validation.labels.bincount() - counts * 287 / 1437).abs() < 1).all()
    rest, held_out = hold_out(data.train.labels, 287, seed=4)
    assert sorted([*rest.tolist(), *held_out.tolist()]) == list(range(1437))
    assert torch.equal(first.train.images, data.train.images[rest])
    assert len(data.split_validation(count=7).validation) == 7


def test_validation_of_label_maps():
    maps = torch.zeros(10, 4, 4, dtype=torch.long)
    split = Split(torch.arange(10).view(10, 1, 1, 1).expand(10, 1, 4, 4).to(torch.uint8), maps)
    data = Dataset("maps", split, split, 2).split_validation(0.3, seed=1)
    assert (len(data.train), len(data.validation)) == (7, 3)


def test_impossible_validation_parts_are_refused(data):
    with pytest.raises(ValueError, match="share is None and count is None; give one"):
        data.split_validation()
    with pytest.raises(ValueError, match=r"share is 1\.5"):
        data.split_validation(1.5)
    with pytest.raises(ValueError, match="1437 of 1437 training images"):
        data.split_validation(count=1437)


def test_other_statistics():
    split = bytes_split()
    data = Dataset("bytes", split, split, 5).split_validation(0.2).normalised_by((0.5, 0.5, 0.5), (0.25, 0.5, 1))
    assert data.mean.tolist() == [127.5] * 3
    assert data.std.tolist() == [63.75, 127.5, 255]
    assert data.validation.mean.tolist() == data.test.mean.tolist() == [127.5] * 3
    with pytest.raises(ValueError, match="give 3 numbers each"):
        data.normalised_by((0.5,), (0.5,))
    with pytest.raises(ValueError, match="digits: the images are normalised already"):
        digits().normalised_by((0.5,), (0.5,))


def test_a_negative_pad_is_refused():
    with pytest.raises(ValueError, match="pad is -1"):
        CropFlip(pad=-1)


@pytest.mark.gpu
def test_crop_and_normalisation_run_inside_a_cuda_graph():
    split = bytes_split(n=64)
    batches = split.batches(16, seed=0, augment=CropFlip(2, flip=True))
    there = split.to("cuda")
    now = batches.draws(0)[:16].to("cuda")
    make = lambda: normalise(  # noqa: E731
        crop_flip(there.images[now.order], now.top, now.left, now.mirrored, 2), there.mean, there.std, torch.bfloat16
    )
    make()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = make()
    for epoch in range(3):
        fresh = batches.draws(epoch)[:16]
        for buffer, drawn in zip(
            (now.order, now.top, now.left, now.mirrored),
            (fresh.order, fresh.top, fresh.left, fresh.mirrored),
            strict=True,
        ):
            buffer.copy_(drawn)
        graph.replay()
        expected = next(batches.epoch(epoch))[0].bfloat16()
        assert torch.equal(out.cpu(), expected)
        assert torch.equal(
            next(there.batches(16, 0, CropFlip(2, flip=True)).epoch(epoch))[0].bfloat16().cpu(), expected
        )


def _shipped():
    return gzip.decompress((resources.files("prospr.lab") / "data_files" / "digits.gz").read_bytes())


@pytest.mark.parametrize(
    "augment", [None, CropFlip(2, flip=True), lambda images, rng: images + torch.rand(1, generator=rng)]
)
def test_the_parts_of_a_batch_are_the_batch(data, augment):
    """Of the last, which has two images, the third part is empty."""
    batches = Batches(data.train.images[:10], data.train.labels[:10], 4, seed=0, augment=augment)
    parts = [list(batches.epoch(1, (i, 3))) for i in range(3)]
    assert [len(labels) for _, labels in parts[2]] == [1, 1, 0]
    for step, (images, labels) in enumerate(batches.epoch(1)):
        assert torch.equal(torch.cat([part[step][0] for part in parts]), images)
        assert torch.equal(torch.cat([part[step][1] for part in parts]), labels)
