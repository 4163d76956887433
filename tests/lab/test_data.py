import gzip
from importlib import resources

import pytest
import torch

from prospr.lab.data import Batches, CropFlip, digits
from prospr.lab.data.embedded import _unpack_digits
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


def _shipped():
    return gzip.decompress((resources.files("prospr.lab") / "data_files" / "digits.gz").read_bytes())
