import io
import stat
import tarfile
import zipfile

import pytest

from prospr.lab.data import DataError
from prospr.lab.data.archives import unpack


def tar_of(path, *members):
    with tarfile.open(path, "w:gz") as tar:
        for name, content, kind in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.linkname = "/etc/passwd"
            info.size = len(content)
            info.mode = 0o4777
            tar.addfile(info, io.BytesIO(content))
    return path


def zip_of(path, *members, mode=0):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members:
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = mode << 16
            file.writestr(info, content)
    return path


def test_plain_files_and_folders_come_out(tmp_path):
    tar = tar_of(tmp_path / "a.tgz", ("d", b"", tarfile.DIRTYPE), ("d/x", b"one", tarfile.REGTYPE))
    archive = zip_of(tmp_path / "a.zip", ("d/", b""), ("d/e/x", b"two"))
    for path, file in ((tar, "d/x"), (archive, "d/e/x")):
        out = tmp_path / path.suffix
        unpack(path, out)
        assert (out / file).read_bytes() in (b"one", b"two")
        assert not (out / file).stat().st_mode & (stat.S_ISUID | stat.S_IXUSR)


@pytest.mark.parametrize("name", ["/abs", "../up", "a/../../up", "C:/x", "a\\..\\up"])
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_a_name_that_leaves_the_folder_is_refused(tmp_path, name, kind):
    path = tmp_path / "bad"
    if kind == "tar":
        tar_of(path, (name, b"x", tarfile.REGTYPE))
    else:
        zip_of(path, (name, b"x"))
    with pytest.raises(DataError, match="would leave the folder; refused"):
        unpack(path, tmp_path / "out" / "deep")
    assert not list(tmp_path.rglob("up"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_a_tar_are_refused(tmp_path, kind):
    with pytest.raises(DataError, match="'x' is a link or a device; refused"):
        unpack(tar_of(tmp_path / "bad.tgz", ("x", b"", kind)), tmp_path / "out")


@pytest.mark.parametrize("mode", [stat.S_IFLNK | 0o777, stat.S_IFCHR | 0o666])
def test_links_and_devices_in_a_zip_are_refused(tmp_path, mode):
    with pytest.raises(DataError, match="is a link or a device; refused"):
        unpack(zip_of(tmp_path / "bad.zip", ("x", b"/etc/passwd"), mode=mode), tmp_path / "out")


def test_more_bytes_than_allowed_are_refused(tmp_path):
    archive = zip_of(tmp_path / "bomb.zip", *((f"x{number}", bytes(1 << 20)) for number in range(4)))
    assert archive.stat().st_size < 10_000
    with pytest.raises(DataError, match="unpacks to more than 2097152 bytes"):
        unpack(archive, tmp_path / "out", limit=2 << 20)
    written = sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    assert written <= 2 << 20


def test_a_name_given_twice_is_refused(tmp_path):
    archive = tar_of(tmp_path / "bad.tgz", ("x", b"1", tarfile.REGTYPE), ("x", b"2", tarfile.REGTYPE))
    with pytest.raises(DataError, match="is there twice"):
        unpack(archive, tmp_path / "out")


def test_a_damaged_archive_is_named(tmp_path):
    whole = tar_of(tmp_path / "a.tgz", ("x", bytes(range(256)) * 99, tarfile.REGTYPE)).read_bytes()
    for number, content in enumerate((b"not an archive", whole[: len(whole) // 2], b"")):
        (tmp_path / "bad.tgz").write_bytes(content)
        with pytest.raises(DataError, match=r"bad\.tgz: damaged or not an archive"):
            unpack(tmp_path / "bad.tgz", tmp_path / f"out{number}")


def test_a_damaged_zip_is_named(tmp_path):
    path = zip_of(tmp_path / "a.zip", ("x", bytes(range(256)) * 99))
    content = bytearray(path.read_bytes())
    content[60] ^= 255
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.zip: damaged"):
        unpack(path, tmp_path / "out")
