from __future__ import annotations

import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from profcil.data import fetch
from profcil.data._unpack import unpack
from profcil.data.bundle import Facts, File
from profcil.errors import DataError, Failure

BODY = bytes(range(256)) * 40


class Shop(BaseHTTPRequestHandler):
    """Serves `body`; breaks the connection after `breaks` bytes of each of the first `faults` answers."""

    body, faults, ranges, asked = BODY, 0, True, []

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        type(self).asked.append(asked)
        if self.path == "/none":
            return self.send_error(404)
        start = int(asked[6:-1]) if asked and self.ranges else 0
        if start >= len(self.body):
            return self.send_error(416)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(self.body) - 1}/{len(self.body)}")
        self.send_header("Content-Length", str(len(self.body) - start))
        self.end_headers()
        broken, type(self).faults = self.faults > 0, self.faults - 1
        self.wfile.write(self.body[start : start + 1000] if broken else self.body[start:])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[type[Shop], str]]:
    monkeypatch.setattr(fetch, "PAUSE", 0)
    monkeypatch.setenv("no_proxy", "*")
    handler = type("Here", (Shop,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def whole(url: str, path: str = "f.bin") -> File:
    return File(path, size=len(BODY), sha256=hashlib.sha256(BODY).hexdigest(), url=f"{url}/f")


def test_a_broken_download_resumes_where_it_stopped(shop, tmp_path: Path) -> None:
    handler, url = shop
    handler.faults = 2
    seen: list[tuple[str, int, int | None]] = []
    fetch.download(whole(url), tmp_path / "f.bin", lambda *news: seen.append(news))
    assert (tmp_path / "f.bin").read_bytes() == BODY
    assert handler.asked == [None, "bytes=1000-", "bytes=2000-"]
    assert seen[-1] == ("f.bin", len(BODY), len(BODY))
    assert [p.name for p in tmp_path.iterdir()] == ["f.bin"]


def test_what_an_earlier_run_left_is_continued(shop, tmp_path: Path) -> None:
    handler, url = shop
    handler.faults = 99
    with pytest.raises(Failure, match=r"stopped after 4000 bytes .* again to continue"):
        fetch.download(whole(url), tmp_path / "f.bin")
    assert not (tmp_path / "f.bin").exists()
    handler.faults, handler.asked = 0, []
    fetch.download(whole(url), tmp_path / "f.bin")
    assert handler.asked == ["bytes=4000-"]
    assert (tmp_path / "f.bin").read_bytes() == BODY


def test_a_server_without_ranges_starts_over(shop, tmp_path: Path) -> None:
    handler, url = shop
    handler.faults, handler.ranges = 1, False
    fetch.download(whole(url), tmp_path / "f.bin")
    assert (tmp_path / "f.bin").read_bytes() == BODY


def test_a_part_longer_than_the_file_is_dropped(shop, tmp_path: Path) -> None:
    (tmp_path / "f.bin.part").write_bytes(BODY * 2)
    fetch.download(whole(shop[1]), tmp_path / "f.bin")
    assert (tmp_path / "f.bin").read_bytes() == BODY


def test_a_wrong_checksum_never_gets_the_name(shop, tmp_path: Path) -> None:
    handler, url = shop
    handler.body = BODY[::-1]
    with pytest.raises(DataError, match=r"has sha256 .* was deleted"):
        fetch.download(whole(url), tmp_path / "f.bin")
    assert list(tmp_path.iterdir()) == []


def test_an_absent_file_and_a_dead_server_are_failures(shop, tmp_path: Path) -> None:
    with pytest.raises(Failure, match="answered 404"):
        fetch.download(File("f", url=f"{shop[1]}/none"), tmp_path / "f")
    with pytest.raises(Failure, match="stopped after 0 bytes"):
        fetch.download(File("f", url="http://127.0.0.1:9/f"), tmp_path / "f")


def tar(path: Path, *members: tuple[str, bytes | bytes], kind: bytes = tarfile.REGTYPE) -> bytes:
    with tarfile.open(path, "w:gz") as box:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname = kind, len(content), "/etc/passwd"
            box.addfile(info, io.BytesIO(content))
    return path.read_bytes()


def facts(*files: File) -> Facts:
    return Facts("toy", "Toy", "image", 2, 1, 1, files=files, get="asking")


def test_fetch_downloads_unpacks_and_then_has_nothing_to_do(shop, tmp_path: Path) -> None:
    handler, url = shop
    handler.body = tar(tmp_path / "t.tgz", ("box/a.bin", b"a"), ("box/deep/b.bin", b"b"))
    toy = facts(File("box.tgz", url=url, archive=True), File("box/a.bin", size=1), File("box/deep/b.bin"))
    found = fetch.fetch(toy, tmp_path / "root")
    assert [path.read_bytes() for path in found] == [b"a", b"b"]
    assert not (tmp_path / "root/toy/box.tgz").exists()
    fetch.fetch(toy, tmp_path / "root")
    assert len(handler.asked) == 1
    found[0].write_bytes(b"damaged")
    fetch.fetch(toy, tmp_path / "root")
    assert len(handler.asked) == 2 and found[0].read_bytes() == b"a"


def test_fetch_without_an_address_says_how(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="get it with asking"):
        fetch.fetch(facts(File("a")), tmp_path)


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil-profcil", "a/../../evil", "a\\..\\evil", "C:evil"])
def test_members_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    tar(tmp_path / "t.tgz", ("good", b"x"), (name, b"x"))
    with zipfile.ZipFile(tmp_path / "t.zip", "w") as box:
        box.writestr("good", b"x")
        box.writestr(zipfile.ZipInfo(name), b"x")
    for archive in ("t.tgz", "t.zip"):
        with pytest.raises(DataError, match="outside the target folder"):
            unpack(tmp_path / archive, tmp_path / "in/to")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.tgz", "t.zip"]  # nothing written, not even the good one


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes) -> None:
    tar(tmp_path / "t.tgz", ("link", b""), kind=kind)
    with pytest.raises(DataError, match="a link or a device"):
        unpack(tmp_path / "t.tgz", tmp_path / "into")


def test_zip_links_bombs_and_rubbish_are_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "link.zip", "w") as box:
        box.writestr(link, "/etc/passwd")
    with pytest.raises(DataError, match="a link or a device"):
        unpack(tmp_path / "link.zip", tmp_path / "into")
    tar(tmp_path / "big.tgz", ("zeros", bytes(5000)))
    with pytest.raises(DataError, match="more than 4999 bytes"):
        unpack(tmp_path / "big.tgz", tmp_path / "into", cap=4999)
    (tmp_path / "rubbish").write_bytes(b"<html>")
    with pytest.raises(DataError, match="is damaged"):
        unpack(tmp_path / "rubbish", tmp_path / "into")
    (tmp_path / "short.tgz").write_bytes((tmp_path / "big.tgz").read_bytes()[:40])
    with pytest.raises(DataError, match="is damaged"):
        unpack(tmp_path / "short.tgz", tmp_path / "into")


def test_a_link_already_in_the_folder_does_not_lead_out(tmp_path: Path) -> None:
    (tmp_path / "into").mkdir()
    (tmp_path / "into/door").symlink_to(tmp_path)
    tar(tmp_path / "t.tgz", ("door/evil", b"x"))
    with pytest.raises(DataError, match="outside the target folder"):
        unpack(tmp_path / "t.tgz", tmp_path / "into")
