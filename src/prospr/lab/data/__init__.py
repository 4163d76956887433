"""Data sets by name, in memory or streamed, and batches of them that depend on the seed and the epoch alone.

>>> data = load("digits")
>>> batches = data.train.batches(batch_size=128, seed=0, augment=CropFlip(pad=1))
"""

from prospr.lab.data.augment import Augment, CropFlip, crop_flip
from prospr.lab.data.catalogue import Entry, datasets, load, root_folder
from prospr.lab.data.dataset import Dataset
from prospr.lab.data.embedded import DIGITS_COUNT, DIGITS_SHA256, digits
from prospr.lab.data.errors import DataError, DownloadError, MissingDataError
from prospr.lab.data.folders import Files, Stream
from prospr.lab.data.memory import IGNORE, Batches, Draws, Split, normalise

__all__ = [
    "DIGITS_COUNT",
    "DIGITS_SHA256",
    "IGNORE",
    "Augment",
    "Batches",
    "CropFlip",
    "DataError",
    "Dataset",
    "DownloadError",
    "Draws",
    "Entry",
    "Files",
    "MissingDataError",
    "Split",
    "Stream",
    "crop_flip",
    "datasets",
    "digits",
    "load",
    "normalise",
    "root_folder",
]
