import hashlib

import pytest

from prospr import PruningError
from prospr.lab.data import DownloadError
from prospr.lab.data import fetch as subject
from prospr.lab.data.fetch import download, hash_file, plain_lines

CONTENT = bytes(range(256)) * 400
MD5 = f"md5:{hashlib.md5(CONTENT).hexdigest()}"


@pytest.fixture
def served(web):
    web.files["/a.bin"] = CONTENT
    return web


def get(web, path, checksum=MD5, **settings):
    settings.setdefault("report", lambda *_: None)
    return download(f"{web.address}/a.bin", path, checksum, **settings)


def test_a_file_arrives_whole_and_leaves_no_part(served, tmp_path):
    path = get(served, tmp_path / "new" / "a.bin")
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in path.parent.iterdir()] == ["a.bin"]
    assert served.asked == [("/a.bin", None)]


def test_progress_ends_at_the_size(served, tmp_path, monkeypatch):
    monkeypatch.setattr(subject, "CHUNK", 1 << 14)
    told = []
    get(served, tmp_path / "a.bin", report=lambda *args: told.append(args))
    assert told[-1] == (len(CONTENT), len(CONTENT), "a.bin")
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert len(told) >= 7


def test_a_cut_download_asks_for_the_rest_only(served, tmp_path):
    served.cuts = [1000, 5000]
    assert get(served, tmp_path / "a.bin").read_bytes() == CONTENT
    assert [wanted for _, wanted in served.asked] == [None, "bytes=1000-", "bytes=6000-"]


def test_a_later_call_takes_up_what_an_earlier_one_left(served, tmp_path):
    served.cuts = [700, 800]
    with pytest.raises(DownloadError, match=r"a\.bin: cut after 1500 of 102400 bytes"):
        get(served, tmp_path / "a.bin", attempts=2)
    assert (tmp_path / "a.bin.part").read_bytes() == CONTENT[:1500]
    assert not (tmp_path / "a.bin").exists()
    assert get(served, tmp_path / "a.bin").read_bytes() == CONTENT
    assert served.asked[-1] == ("/a.bin", "bytes=1500-")


def test_a_server_without_ranges_sends_it_all_again(served, tmp_path):
    served.ranges = False
    served.cuts = [1000]
    assert get(served, tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_part_that_is_whole_already_is_used(served, tmp_path):
    (tmp_path / "a.bin.part").write_bytes(CONTENT)
    assert get(served, tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_part_of_a_longer_file_is_thrown_away(served, tmp_path):
    (tmp_path / "a.bin.part").write_bytes(CONTENT + b"more")
    assert get(served, tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_part_of_another_version_is_thrown_away(served, tmp_path):
    (tmp_path / "a.bin.part").write_bytes(b"x" * 1000)
    assert get(served, tmp_path / "a.bin").read_bytes() == CONTENT
    assert [wanted for _, wanted in served.asked] == ["bytes=1000-", None]


def test_a_range_that_was_not_asked_for_is_not_appended(served, tmp_path):
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:1000])
    served.shift = 7
    assert get(served, tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_server_that_does_not_say_the_length(served, tmp_path):
    served.lengths = False
    assert get(served, tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_nothing_behind(served, tmp_path):
    with pytest.raises(DownloadError, match=rf"a\.bin: the checksum is {MD5}, expected md5:00"):
        get(served, tmp_path / "a.bin", checksum="md5:00")
    assert list(tmp_path.iterdir()) == []
    assert len(served.asked) == 1


def test_a_missing_file_is_not_asked_for_twice(served, tmp_path):
    with pytest.raises(DownloadError, match=r"/b\.bin: the server answered 404 Not Found"):
        download(f"{served.address}/b.bin", tmp_path / "b.bin", report=lambda *_: None)
    assert len(served.asked) == 1


def test_a_busy_server_is_asked_again(served, tmp_path):
    served.answers = [503, 429]
    assert get(served, tmp_path / "a.bin").read_bytes() == CONTENT
    served.answers = [503] * 9
    with pytest.raises(DownloadError, match="503 Service Unavailable"):
        get(served, tmp_path / "b.bin")


def test_no_server_is_told_at_once(tmp_path):
    with pytest.raises(DownloadError, match=r"127\.0\.0\.1:9/a\.bin: .*refused") as caught:
        download("http://127.0.0.1:9/a.bin", tmp_path / "a.bin", timeout=5)
    assert isinstance(caught.value, PruningError)


def test_only_the_web_is_read(tmp_path):
    with pytest.raises(DownloadError, match="only http and https"):
        download("file:///etc/hostname", tmp_path / "a")


def test_plain_lines_are_few(capsys):
    report = plain_lines()
    for done in range(0, 1001, 10):
        report(done * 1000, 1_000_000, "a.bin")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[-1] == "a.bin: 1.0 of 1.0 MB"


def test_checksums_name_their_kind(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert hash_file(tmp_path / "a", "sha1") == "sha1:a9993e364706816aba3e25717850c26c9cd0d89d"
