from pathlib import Path

import numpy as np
import pytest
import torch

from prospr.lab.data import CropFlip, DataError, MissingDataError, load
from prospr.lab.seeds import generator

Image = pytest.importorskip("PIL.Image")
SHARED = Path(__file__).parents[4] / "shared" / "data" / "isbi2012"


def draw(number, height=52, width=70, wide=False):
    """Bright discs on a dark ground, and the mask that numbers them."""
    rng = generator("cells", number)
    rows, columns = np.mgrid[:height, :width]
    mask = np.zeros((height, width), np.uint16)
    for cell in range(1, 4):
        y, x = torch.rand(2, generator=rng).tolist()
        mask[(rows - y * height) ** 2 + (columns - x * width) ** 2 < 64] = cell + 300  # more than a byte holds
    image = np.where(mask > 0, 180, 40)
    return (image * 200).astype(np.uint16) if wide else image.astype(np.uint8), mask


def recording(root, frames=5, truth="ST", wide=False, sequences=("01", "02")):
    for number, sequence in enumerate(sequences):
        (root / sequence).mkdir(parents=True)
        (root / f"{sequence}_{truth}" / "SEG").mkdir(parents=True)
        for frame in range(frames):
            image, mask = draw(100 * number + frame, wide=wide)
            Image.fromarray(image).save(root / sequence / f"t{frame:03}.tif")
            Image.fromarray(mask).save(root / f"{sequence}_{truth}" / "SEG" / f"man_seg{frame:03}.tif")
    return root


@pytest.mark.parametrize(("name", "folder"), [("phc-c2dh-u373", "PhC-C2DH-U373"), ("dic-c2dh-hela", "DIC-C2DH-HeLa")])
def test_frames_and_masks_become_256_x_256(tmp_path, name, folder):
    recording(tmp_path / folder)
    data = load(name, tmp_path, download=False)
    assert data.train.images.shape == (7, 1, 256, 256)
    assert data.test.images.shape == (3, 1, 256, 256)
    assert data.test.labels.shape == (3, 256, 256)
    assert (data.train.images.dtype, data.train.labels.dtype) == (torch.uint8, torch.int64)
    assert data.train.labels.unique().tolist() == [0, 1]
    assert data.classes == ("background", "cell")
    for part in (data.train, data.test):
        bright = part.images.squeeze(1) > 110
        assert (bright == part.labels.bool()).float().mean() > 0.98  # but for the discs' edges
    again = load(name, tmp_path / folder)
    assert torch.equal(again.test.images, data.test.images)


def test_every_frame_is_in_one_part_and_the_size_can_be_chosen(tmp_path):
    recording(tmp_path / "PhC-C2DH-U373")
    data = load("phc-c2dh-u373", tmp_path, size=32)
    assert data.train.images.shape == (7, 1, 32, 32)
    everything = torch.cat([data.train.images, data.test.images]).flatten(1)
    assert len(everything.unique(dim=0)) == 10


def test_sixteen_bits_are_spread_over_a_byte(tmp_path):
    recording(tmp_path / "PhC-C2DH-U373", wide=True)
    train = load("phc-c2dh-u373", tmp_path).train
    images, cell = train.images.squeeze(1), train.labels.bool()
    assert (int(images.min()), int(images.max())) == (0, 255)
    assert (images[cell] == 255).float().mean() > 0.7  # the rest is the discs' edges
    assert (images[~cell] == 0).float().mean() > 0.9


def test_silver_truth_is_preferred_and_gold_will_do(tmp_path):
    root = recording(tmp_path / "PhC-C2DH-U373", frames=4)
    for sequence in ("01", "02"):
        (root / f"{sequence}_GT" / "SEG").mkdir(parents=True)
        gold = np.zeros((52, 70), np.uint16)
        Image.fromarray(gold).save(root / f"{sequence}_GT" / "SEG" / "man_seg002.tif")
    assert len(load("phc-c2dh-u373", tmp_path).train) == 6
    for sequence in ("01", "02"):
        (root / f"{sequence}_ST").rename(root / f"{sequence}_unused")
    data = load("phc-c2dh-u373", tmp_path)
    assert (len(data.train), len(data.test)) == (1, 1)
    assert data.train.labels.unique().tolist() == [0]


def test_recordings_that_do_not_fit_are_told_why(tmp_path):
    with pytest.raises(MissingDataError, match=r"01_ST/SEG/man_seg000\.tif"):
        load("phc-c2dh-u373", tmp_path, download=False)
    root = recording(tmp_path / "PhC-C2DH-U373", frames=2)
    (root / "01" / "t001.tif").unlink()
    with pytest.raises(MissingDataError, match=r"t001\.tif: there is no such file, but .*man_seg001\.tif is its mask"):
        load("phc-c2dh-u373", tmp_path)
    image, _ = draw(0)
    Image.fromarray(image).save(root / "01" / "t001.tif", save_all=True, append_images=[Image.fromarray(image)])
    with pytest.raises(DataError, match=r"t001\.tif: .*2 images in one file"):
        load("phc-c2dh-u373", tmp_path)
    (root / "01" / "t001.tif").write_bytes(b"II*")
    with pytest.raises(DataError, match=r"t001\.tif: not an image that can be decoded"):
        load("phc-c2dh-u373", tmp_path)
    recording(tmp_path / "one" / "PhC-C2DH-U373", frames=1, sequences=("01",))
    with pytest.raises(DataError, match="1 labelled image; two are needed"):
        load("phc-c2dh-u373", tmp_path / "one")


def membranes(root, count=10, size=24):
    for part in ("image", "label"):
        (root / part).mkdir(parents=True)
    for number in range(count):
        grey = torch.randint(256, (size, size), generator=generator("isbi", number), dtype=torch.uint8).numpy()
        Image.fromarray(grey).save(root / "image" / f"{number}.png")
        Image.fromarray(np.where(grey < 60, 0, 255).astype(np.uint8)).save(root / "label" / f"{number}.png")
    return root


def test_membranes_are_class_one(tmp_path):
    membranes(tmp_path / "isbi2012")
    data = load("isbi2012", tmp_path)
    assert (len(data.train), len(data.test), data.num_classes) == (7, 3, 2)
    for part in (data.train, data.test):
        assert torch.equal(part.labels, (part.images.squeeze(1) < 60).long())
    assert load("isbi2012", tmp_path, size=12).train.labels.shape == (7, 12, 12)
    images, labels = next(iter(data.train.batches(4, seed=0, augment=CropFlip(0, flip=True))))
    dark = (images * data.std.view(1, 1, 1) + data.mean.view(1, 1, 1)).squeeze(1).round() < 60
    assert torch.equal(dark.long(), labels)


def test_membranes_that_do_not_fit_are_told_why(tmp_path):
    root = membranes(tmp_path / "isbi2012", count=3)
    (root / "label" / "1.png").unlink()
    with pytest.raises(MissingDataError, match=r"label/1\.png: there is no such file"):
        load("isbi2012", tmp_path)
    Image.new("L", (9, 9)).save(root / "label" / "1.png")
    with pytest.raises(DataError, match=r"1\.png: \(9, 9\) pixels, and its image has \(24, 24\)"):
        load("isbi2012", tmp_path)
    Image.new("L", (9, 9)).save(root / "image" / "1.png")
    with pytest.raises(DataError, match=r"several sizes: .*give size=256"):
        load("isbi2012", tmp_path)
    with pytest.raises(MissingDataError, match=r"image/0\.png"):
        load("isbi2012", tmp_path / "elsewhere")


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the ISBI 2012 images in ../shared/data")
def test_the_real_membranes():
    data = load("isbi2012", SHARED.parent, download=False)
    assert data.train.images.shape == (21, 1, 512, 512)
    assert data.test.labels.shape == (9, 512, 512)
    assert 0.15 < data.train.labels.float().mean() < 0.3
