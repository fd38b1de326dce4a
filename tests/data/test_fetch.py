from __future__ import annotations

import hashlib
import io
import tarfile
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from profcil import registry
from profcil.data import fetch
from profcil.data._unpack import unpack
from profcil.data.bundle import Facts, File
from profcil.errors import DataError, Failure

BODY = bytes(range(256)) * 40


class FileServer(BaseHTTPRequestHandler):
    """Serves `body`. Each of the first `faults` responses ends after 1000 bytes."""

    body = BODY
    faults = 0
    ranges = True  # whether range requests are supported
    requested: ClassVar[list[str | None]] = []  # the Range header of every request

    def do_GET(self) -> None:
        requested = self.headers.get("Range")
        type(self).requested.append(requested)
        if self.path == "/none":
            return self.send_error(404)
        start = int(requested[6:-1]) if requested and self.ranges else 0
        if start >= len(self.body):
            return self.send_error(416)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(self.body) - 1}/{len(self.body)}")
        self.send_header("Content-Length", str(len(self.body) - start))
        self.end_headers()
        broken = self.faults > 0
        type(self).faults -= 1
        self.wfile.write(self.body[start : start + 1000] if broken else self.body[start:])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[type[FileServer], str]]:
    monkeypatch.setattr(fetch, "PAUSE", 0)
    monkeypatch.setenv("no_proxy", "*")
    handler = type("Here", (FileServer,), {"requested": []})
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield handler, f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    http.server_close()


def official_file(url: str, path: str = "f.bin") -> File:
    return File(path, size=len(BODY), sha256=hashlib.sha256(BODY).hexdigest(), url=f"{url}/f")


def test_a_broken_download_resumes_where_it_stopped(server, tmp_path: Path) -> None:
    handler, url = server
    handler.faults = 2
    seen: list[tuple[str, int, int | None]] = []
    fetch.download(official_file(url), tmp_path / "f.bin", lambda *update: seen.append(update))
    assert (tmp_path / "f.bin").read_bytes() == BODY
    assert handler.requested == [None, "bytes=1000-", "bytes=2000-"]
    assert seen[-1] == ("f.bin", len(BODY), len(BODY))
    assert [p.name for p in tmp_path.iterdir()] == ["f.bin"]


def test_a_partial_file_of_an_earlier_run_is_continued(server, tmp_path: Path) -> None:
    handler, url = server
    handler.faults = 99
    with pytest.raises(Failure, match=r"stopped after 4000 bytes .* again to continue"):
        fetch.download(official_file(url), tmp_path / "f.bin")
    assert not (tmp_path / "f.bin").exists()
    handler.faults = 0
    handler.requested = []
    fetch.download(official_file(url), tmp_path / "f.bin")
    assert handler.requested == ["bytes=4000-"]
    assert (tmp_path / "f.bin").read_bytes() == BODY


def test_a_server_without_ranges_starts_over(server, tmp_path: Path) -> None:
    handler, url = server
    handler.faults = 1
    handler.ranges = False
    fetch.download(official_file(url), tmp_path / "f.bin")
    assert (tmp_path / "f.bin").read_bytes() == BODY


def test_a_partial_file_longer_than_the_file_is_deleted(server, tmp_path: Path) -> None:
    (tmp_path / "f.bin.part").write_bytes(BODY * 2)
    fetch.download(official_file(server[1]), tmp_path / "f.bin")
    assert (tmp_path / "f.bin").read_bytes() == BODY


def test_a_download_with_a_wrong_checksum_is_deleted(server, tmp_path: Path) -> None:
    handler, url = server
    handler.body = BODY[::-1]
    with pytest.raises(DataError, match=r"has sha256 .* was deleted"):
        fetch.download(official_file(url), tmp_path / "f.bin")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_and_an_unreachable_server_are_failures(server, tmp_path: Path) -> None:
    with pytest.raises(Failure, match="answered 404"):
        fetch.download(File("f", url=f"{server[1]}/none"), tmp_path / "f")
    with pytest.raises(Failure, match="stopped after 0 bytes"):
        fetch.download(File("f", url="http://127.0.0.1:9/f"), tmp_path / "f")


def write_tar(path: Path, *members: tuple[str, bytes], kind: bytes = tarfile.REGTYPE) -> bytes:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.size = len(content)
            info.linkname = "/etc/passwd"
            archive.addfile(info, io.BytesIO(content))
    return path.read_bytes()


def facts(*files: File) -> Facts:
    return Facts("toy", "Toy", "image", 2, 1, 1, files=files, get="asking")


def test_fetch_downloads_and_unpacks_only_what_is_missing(server, tmp_path: Path) -> None:
    handler, url = server
    handler.body = write_tar(tmp_path / "t.tgz", ("box/a.bin", b"a"), ("box/deep/b.bin", b"b"))
    toy = facts(File("box.tgz", url=url, archive=True), File("box/a.bin", size=1), File("box/deep/b.bin"))
    found = fetch.fetch(toy, tmp_path / "root")
    assert [path.read_bytes() for path in found] == [b"a", b"b"]
    assert not (tmp_path / "root/toy/box.tgz").exists()
    fetch.fetch(toy, tmp_path / "root")
    assert len(handler.requested) == 1
    found[0].write_bytes(b"damaged")
    fetch.fetch(toy, tmp_path / "root")
    assert len(handler.requested) == 2 and found[0].read_bytes() == b"a"


def test_fetch_without_an_address_says_how_to_get_the_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="get it with asking"):
        fetch.fetch(facts(File("a")), tmp_path)


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil-profcil", "a/../../evil", "a\\..\\evil", "C:evil"])
def test_members_outside_the_target_folder_are_refused(tmp_path: Path, name: str) -> None:
    write_tar(tmp_path / "t.tgz", ("good", b"x"), (name, b"x"))
    with zipfile.ZipFile(tmp_path / "t.zip", "w") as archive:
        archive.writestr("good", b"x")
        archive.writestr(zipfile.ZipInfo(name), b"x")
    for name in ("t.tgz", "t.zip"):
        with pytest.raises(DataError, match="outside the target folder"):
            unpack(tmp_path / name, tmp_path / "in/to")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "t.tgz",
        "t.zip",
    ]  # nothing was written, not even the valid member


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes) -> None:
    write_tar(tmp_path / "t.tgz", ("link", b""), kind=kind)
    with pytest.raises(DataError, match="a link or a device"):
        unpack(tmp_path / "t.tgz", tmp_path / "into")


def test_zip_links_oversized_and_damaged_archives_are_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "link.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(DataError, match="a link or a device"):
        unpack(tmp_path / "link.zip", tmp_path / "into")
    write_tar(tmp_path / "big.tgz", ("zeros", bytes(5000)))
    with pytest.raises(DataError, match="more than 4999 bytes"):
        unpack(tmp_path / "big.tgz", tmp_path / "into", max_bytes=4999)
    (tmp_path / "not-an-archive").write_bytes(b"<html>")
    with pytest.raises(DataError, match="is damaged"):
        unpack(tmp_path / "not-an-archive", tmp_path / "into")
    (tmp_path / "short.tgz").write_bytes((tmp_path / "big.tgz").read_bytes()[:40])
    with pytest.raises(DataError, match="is damaged"):
        unpack(tmp_path / "short.tgz", tmp_path / "into")


def test_an_existing_symlink_in_the_target_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "into").mkdir()
    (tmp_path / "into/link").symlink_to(tmp_path)
    write_tar(tmp_path / "t.tgz", ("link/evil", b"x"))
    with pytest.raises(DataError, match="outside the target folder"):
        unpack(tmp_path / "t.tgz", tmp_path / "into")


class OddServer(BaseHTTPRequestHandler):
    """Answers with headers, and a body, that no honest server sends."""

    headers_to_send: ClassVar[dict[str, str]] = {}
    status = 200
    body = b""

    def do_GET(self) -> None:
        self.send_response(self.status)
        for name, value in self.headers_to_send.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[type[OddServer], str]]:
    monkeypatch.setattr(fetch, "PAUSE", 0)
    monkeypatch.setenv("no_proxy", "*")
    handler = type("Odd", (OddServer,), {})
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield handler, f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    http.server_close()


ODD_ANSWERS = [
    (200, {"Content-Length": "many"}, b"x"),
    (200, {"Content-Length": "-5"}, b"x"),
    (200, {"Transfer-Encoding": "chunked"}, b"-5\r\nabc\r\n0\r\n\r\n"),
    (200, {"Transfer-Encoding": "chunked"}, b"zz\r\nabc\r\n0\r\n\r\n"),
    (302, {"Location": "http://[::1/f"}, b""),
    (302, {"Location": "http://127.0.0.1:port/f"}, b""),
    (302, {"Location": "file:///etc/passwd"}, b""),
    (302, {"Location": "http://exa mple\u00e9/".encode().decode("latin1")}, b""),
    (302, {}, b""),
]


@pytest.mark.parametrize("status, headers, body", ODD_ANSWERS)
def test_an_odd_answer_of_a_server_is_a_failure_of_one_sentence(
    odd, status: int, headers: dict[str, str], body: bytes, tmp_path: Path
) -> None:
    handler, url = odd
    handler.status = status
    handler.headers_to_send = headers
    handler.body = body
    with pytest.raises((Failure, DataError)) as raised:
        fetch.download(official_file(url), tmp_path / "f.bin")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "f.bin").exists()


@pytest.mark.parametrize("says_length", [True, False])
def test_a_download_ends_where_it_exceeds_the_official_size(odd, says_length: bool, tmp_path: Path) -> None:
    handler, url = odd
    handler.body = bytes(50 * fetch.CHUNK)
    handler.headers_to_send = {"Content-Length": str(len(handler.body))} if says_length else {}
    seen: list[int] = []
    with pytest.raises(DataError, match=f"more than the {len(BODY)} bytes"):
        fetch.download(official_file(url), tmp_path / "f.bin", lambda name, done, total: seen.append(done))
    assert max(seen, default=0) <= len(BODY) + fetch.CHUNK
    assert list(tmp_path.iterdir()) == []


def test_a_download_of_unknown_size_has_a_limit(odd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handler, url = odd
    monkeypatch.setattr(fetch, "MAX_UNKNOWN", 1000)
    handler.body = bytes(1001)
    with pytest.raises(DataError, match="more than the 1000 bytes"):
        fetch.download(File("f", url=f"{url}/f"), tmp_path / "f.bin")


def test_a_redirect_from_https_to_http_is_refused() -> None:
    request = urllib.request.Request("https://example.org/f")
    with pytest.raises(urllib.error.URLError, match="not encrypted"):
        fetch.SafeRedirects().redirect_request(request, None, 302, "Found", {}, "http://example.org/f")


def test_addresses_without_encryption_have_a_checksum() -> None:
    for name in registry.names("data"):
        for file in registry.find("data", name).FACTS.files:
            if file.url and not file.url.startswith("https://"):
                assert file.sha256 or file.sha1 or file.md5, file.url


def damaged_archives() -> Iterator[tuple[str, bytes]]:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:xz") as archive:
        archive.addfile(tarfile.TarInfo("a"), io.BytesIO())
    for at in (5, 20, len(out.getvalue()) // 2, -20):
        data = bytearray(out.getvalue())
        data[at] ^= 0xFF
        yield f"xz{at}", bytes(data)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("a", bytes(3000))
    plain = out.getvalue()
    for at in range(0, len(plain), 3):
        data = bytearray(plain)
        data[at] ^= 0xFF
        yield f"zip{at}", bytes(data)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:bz2") as archive:
        archive.addfile(tarfile.TarInfo("a"), io.BytesIO())
    yield "bz2", out.getvalue()[:30] + b"\0" + out.getvalue()[31:]


def test_damaged_archives_are_refused_in_one_sentence(tmp_path: Path) -> None:
    refused = 0
    for name, data in damaged_archives():
        (tmp_path / name).write_bytes(data)
        try:
            unpack(tmp_path / name, tmp_path / "into")
        except DataError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 20


def test_a_tar_header_without_bound_is_refused_before_it_is_read(tmp_path: Path) -> None:
    info = tarfile.TarInfo("header")
    info.type = tarfile.XHDTYPE
    info.size = 400 << 20
    (tmp_path / "pax.tar").write_bytes(info.tobuf() + b"\0" * 10240)
    with pytest.raises(DataError, match="header of 419430400 bytes"):
        unpack(tmp_path / "pax.tar", tmp_path / "into")
