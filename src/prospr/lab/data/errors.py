"""What can go wrong with data, by name."""

from __future__ import annotations

from prospr.errors import PruningError


class DataError(PruningError, ValueError):
    """A file of a data set is damaged, hostile, or not of the form it should have."""


class DownloadError(PruningError, OSError):
    """A file could not be downloaded."""


class MissingDataError(PruningError, FileNotFoundError):
    """A data set is not on this machine, and could not be brought here."""
