"""Requests of any bytes to `profcil serve`, and pages about damaged run folders: an answer in time, and it goes on.

The server is on a free port of 127.0.0.1. A client that sends nothing more has its connection closed after it was
answered; each may take ten seconds at most.
"""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hostile import ODD, apply, edits, fuzz, read_files, write_files
from hypothesis import given
from hypothesis import strategies as st
from tally import attempt

from profcil.engine import run
from profcil.live.server import PAGES, PageServer, make_server
from profcil.live.watcher import Watcher
from profcil.resolve import resolve

SECONDS = 10
TOKEN = "a-token_of-enough-letters"
SECRET = b"a secret text"
TINY = ["clients=2", "participants=1", "train.rounds=1", "train.epochs=1", "warmup.rounds=0", "model.width=4"]
RUN_FILES = ("config.toml", "run.json", "scores.json", "ledger.csv", "events.jsonl", "plan.npz", "state.safetensors")
COUNT = iter(range(10**9))
GOOD = b"GET /live.json HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
VERBS = [b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"CONNECT", b"G" * 70_000, b"", b"\x16\x03\x01"]
PATHS = [
    *(b"/", b"/live.json", b"/data.json", b"/../secret", b"/%2e%2e/secret", b"//secret", b"/secret", b"*", b"http://["),
    *(
        b"/\xff\xfe",
        b"/?token=" + b"x" * 9000,
        b"/?" + b"&token=x" * 3000,
        b"/" + b"a/" * 20_000,
        b"/;%00",
        b"\\secret",
    ),
]
HEADERS = [
    *(
        b"Host: 127.0.0.1",
        b"Host: evil.example",
        b"Host: [",
        b"Host: [::1",
        b"Host:",
        b"Host: \xff",
        b"Host: 127.0.0.1:x",
    ),
    *(b"Content-Length: -1", b"Content-Length: 99999999999999", b"Transfer-Encoding: chunked", b"Expect: 100-continue"),
    *(
        b"Cookie: profcil_token=" + b"\xff" * 9,
        b'Cookie: ="";;;=',
        b"Authorization: Bearer \xe9",
        b"Connection: keep-alive",
    ),
    *(b"X: " + b"y" * 70_000, b"X", b": x", b" folded", b"\x00: \x00", b"Range: bytes=0-", b"Upgrade: h2c"),
]
REQUESTS = st.builds(
    lambda verb, path, version, headers, end: b"\r\n".join([b" ".join([verb, path, version]), *headers, b"", end]),
    st.sampled_from(VERBS) | st.binary(max_size=8),
    st.sampled_from(PATHS) | st.binary(max_size=20).map(lambda b: b"/" + b),
    st.sampled_from(
        [b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/9.9", b"HTTP/1.1.1", b"HTTP/" + b"9" * 5000, b"", b"x"]
    ),
    st.lists(st.sampled_from(HEADERS) | st.sampled_from(ODD), max_size=4) | st.just([b"a: b"] * 300),
    st.sampled_from([b"", GOOD, b"\0" * 3000, b"0\r\n\r\n"]),
)


@contextmanager
def serving(folder: Path, token: str = "") -> Iterator[PageServer]:
    server = make_server(Watcher([folder]), "127.0.0.1", 0, token)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROFCIL_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def finished(space: Path) -> dict[str, bytes]:
    config = resolve(None, {"dataset": "digits", "method": "prolin"}, [*TINY, "task_size=5"])
    return read_files(run.start(config, space / "run", space))


@pytest.fixture(scope="module", params=["", TOKEN], ids=["open", "token"])
def server(request, finished, space) -> Iterator[PageServer]:
    folder = space / f"served {request.param}"
    write_files(folder / "a run", finished)
    write_files(space, {"secret": SECRET})
    with serving(folder, request.param) as started:
        yield started


def exchange(port: int, sent: bytes) -> bytes:
    """What a server answers until it closes the connection; the other side sends no more."""
    found = b""
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                found += part
        except TimeoutError:
            raise
        except OSError:  # it need not read on after it has refused
            pass
    return found


def check_answer(sent: bytes, found: bytes) -> int:
    """The status of an answer; 0 where there is none."""
    assert SECRET not in found and b"Traceback" not in found, sent
    if not found.startswith(b"HTTP/"):  # closed, or HTTP/0.9, whose answers have no head
        return 0
    status = int(found.split()[1])
    assert status in (200, 303) or 400 <= status < 500 or status == 505, (sent, found[:300])
    return status


def is_alive(port: int, token: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request("GET", "/live.json", headers={"Authorization": f"Bearer {token}"} if token else {})
    answer = connection.getresponse()
    names = [run["name"] for run in json.loads(answer.read())["runs"]]
    connection.close()
    return answer.status == 200 and names == ["a run"]


@fuzz
@given(sent=REQUESTS)
def test_requests(server, sent, capfd):
    port = server.server_address[1]
    with attempt() as one:
        status = check_answer(sent, exchange(port, sent))
        assert is_alive(port, server.token)
        assert capfd.readouterr() == ("", "")
        one.refused = status not in (200, 303)


@fuzz
@given(changes=edits())
def test_damaged_requests(server, changes, capfd):
    port = server.server_address[1]
    sent = apply(GOOD, changes)
    with attempt() as one:
        status = check_answer(sent, exchange(port, sent))
        assert is_alive(port, server.token)
        assert capfd.readouterr() == ("", "")
        one.refused = status not in (200, 303)


@fuzz
@given(data=st.data())
def test_pages_about_damaged_runs(data, finished, space, capfd):
    """Every page is there. A run that cannot be read is said to be so."""
    names = data.draw(st.lists(st.sampled_from(RUN_FILES), min_size=1, max_size=2, unique=True))
    folder = space / str(next(COUNT))
    changed = {name: apply(finished[name], data.draw(edits())) for name in names}
    write_files(folder, {f"run/{name}": content for name, content in (finished | changed).items()})
    with serving(folder) as server, attempt() as one:
        answers = {
            path: exchange(server.server_address[1], GOOD.replace(b"/live.json", path.encode())) for path in PAGES
        }
        for path, answer in answers.items():
            assert answer.startswith(b"HTTP/1.0 200 "), (path, answer[:500])
        live = json.loads(answers["/live.json"].partition(b"\r\n\r\n")[2])
        page = json.loads(answers["/data.json"].partition(b"\r\n\r\n")[2])
        assert capfd.readouterr() == ("", "")
        one.refused = live["runs"][0]["state"] == "unreadable" or not page["runs"]
    shutil.rmtree(folder)


def test_the_command_survives_and_ends_as_it_should(finished, space):
    """The process of `profcil serve` itself, with requests that are cut off; Ctrl-C ends it with status 0."""
    write_files(space / "for the command" / "a run", finished)
    command = [sys.executable, "-m", "profcil", "serve", "--port", "0", str(space / "for the command")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = int(process.stdout.readline().split()[0].rstrip("/").rpartition(":")[2])
    for cut in range(0, len(GOOD), 9):
        with attempt() as one:
            one.refused = check_answer(GOOD[:cut], exchange(port, GOOD[:cut])) != 200
    for path in PATHS:
        with attempt() as one:
            one.refused = check_answer(path, exchange(port, GOOD.replace(b"/live.json", path))) != 200
    assert is_alive(port, "")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "") and "stopped" in out


def test_the_good_request_is_answered(server):
    """Else the tests above would test nothing."""
    found = exchange(
        server.server_address[1], GOOD.replace(b"\r\n\r\n", f"\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
    )
    assert check_answer(GOOD, found) == 200 and b"a run" in found
