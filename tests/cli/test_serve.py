"""`profcil serve`, on a loopback port: it shows runs, changes nothing and reads no path from a request."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from profcil.cli.main import main
from profcil.live.server import PageServer, make_server
from profcil.live.watcher import Watcher
from profcil.runs.folder import RunFolder
from profcil.runs.run_files import is_locked

TOKEN = "a-token_of-enough-letters"


@pytest.fixture
def serve() -> Iterator[Callable[..., PageServer]]:
    """Starts servers that end with the test."""
    servers: list[PageServer] = []

    def start(*folders: Path, host: str = "127.0.0.1", token: str = "") -> PageServer:
        server = make_server(Watcher(list(folders)), host, 0, token)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def root(runs: dict[str, Path], tmp_path: Path) -> Path:
    """Copies of three finished runs, one of them in a folder of its own."""
    for name, path in runs.items():
        shutil.copytree(path, tmp_path / "served" / ("inner" if name == "fedavg" else "") / name)
    return tmp_path / "served"


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    """Status, headers and text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, dict(answer.getheaders()), text


def live(server: PageServer) -> dict[str, dict[str, Any]]:
    """The live state of the runs by name."""
    return {run["name"]: run for run in json.loads(ask(server, "/live.json")[2])["runs"]}


# -- what it shows -----------------------------------------------------------------------------------------------------


def test_the_page_and_its_data(serve: Callable[..., PageServer], root: Path, runs: dict[str, Path]) -> None:
    server = serve(root)
    status, headers, page = ask(server, "/")
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    assert 'id="now"' in page and 'id="answer"' in page and "fetch(" in page
    data = json.loads(ask(server, "/data.json")[2])
    assert len(data["runs"]) == 3 and [g["title"] for g in data["groups"]]
    shown = live(server)
    assert {name: run["state"] for name, run in shown.items()} == dict.fromkeys(runs, "done")
    metrics = json.loads((runs["pro"] / "run.json").read_text())
    assert shown["pro"]["faa"] == pytest.approx(metrics["metrics"]["faa"]) and shown["pro"]["bytes"] == metrics["bytes"]
    assert json.loads(ask(server, "/live.json")[2])["version"] == data["version"]


def test_a_run_on_its_way(serve: Callable[..., PageServer], root: Path) -> None:
    """Its lock is held and its last position is missing."""
    path = root / "pro"
    facts = json.loads((path / "run.json").read_text())
    lines = (path / "events.jsonl").read_text().splitlines(keepends=True)
    (path / "run.json").write_text(json.dumps({**facts, "done": False, "metrics": {}}))
    (path / "events.jsonl").write_text("".join(lines[:2]) + '{"event": "rou')  # a line that is being written
    server = serve(root)
    before = json.loads(ask(server, "/live.json")[2])["version"]
    stopped = live(server)["pro"]
    assert stopped["state"] == "stopped" and stopped["advice"] == f"profcil resume {path}" and stopped["left"] is None
    with open(path / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        running = live(server)["pro"]
        assert json.loads(ask(server, "/live.json")[2])["version"] != before
    first = json.loads(lines[1])
    assert running["state"] == "running" and (running["done"], running["total"]) == (1, 2)
    assert running["faa"] == pytest.approx(first["faa"]) and running["curve"] == [first["faa"]]
    assert running["left"] == pytest.approx(first["seconds"])  # one round of two is done
    (path / "state.safetensors").unlink()
    assert "nothing was saved" in live(server)["pro"]["advice"]


def test_what_cannot_be_read_is_said(serve: Callable[..., PageServer], root: Path) -> None:
    (root / "pro" / "config.toml").write_text("method = [")
    (root / "pro1" / "scores.json").write_text("{}")
    with open(root / "inner" / "fedavg" / "events.jsonl", "a") as file:
        file.write('{"event": "asked"}\n')
    server = serve(root)
    shown = live(server)
    assert shown["fedavg"]["state"] == "unreadable"
    assert shown["pro"]["state"] == "unreadable" and "config.toml" in shown["pro"]["reason"]
    data = json.loads(ask(server, "/data.json")[2])
    assert len(data["notes"]) == 3 and data["runs"] == []


@pytest.mark.parametrize("name", ["plan.npz", "events.jsonl"])
def test_a_damaged_file_of_one_run_does_not_hide_the_others(
    serve: Callable[..., PageServer], root: Path, name: str
) -> None:
    with open(root / "pro" / name, "ab" if name == "events.jsonl" else "r+b") as file:
        file.write(b"\0")
    data = json.loads(ask(serve(root), "/data.json")[2])
    assert sorted(run["name"] for run in data["runs"]) == ["fedavg", "pro1"] and len(data["notes"]) == 1


def test_a_report_leaves_out_a_run_with_a_damaged_plan(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "pro" / "plan.npz").write_bytes(b"\0")
    assert main(["report", *map(str, (root / "pro", root / "pro1")), "--out", str(root / "page.html")]) == 0
    assert "left out" in capsys.readouterr().err


def test_new_runs_appear(serve: Callable[..., PageServer], runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    server = serve(tmp_path / "empty")
    assert ask(server, "/")[0] == 200 and live(server) == {}
    shutil.copytree(runs["pro"], tmp_path / "empty" / "study" / "pro")
    assert list(live(server)) == ["pro"] and len(json.loads(ask(server, "/data.json")[2])["groups"]) == 1
    shutil.rmtree(tmp_path / "empty" / "study")
    assert live(server) == {} and json.loads(ask(server, "/data.json")[2])["groups"] == []


def test_settings_that_differ_are_named(serve: Callable[..., PageServer], root: Path) -> None:
    config = root / "pro1" / "config.toml"
    config.write_text(re.sub(r"(?m)^lr = .*$", "lr = 0.5", config.read_text(), count=1))
    assert live(serve(root))["pro1"]["label"] == "PRO (lr=0.5)"


def test_looking_at_a_lock_does_not_stop_a_run_that_starts(tmp_path: Path) -> None:
    """A reader holds the lock for an instant while a run takes it."""
    (tmp_path / "run").mkdir()
    reader = open(tmp_path / "run" / "lock", "w")  # noqa: SIM115 - closed by the timer
    fcntl.flock(reader, fcntl.LOCK_EX)
    timer = threading.Timer(0.03, reader.close)
    timer.start()
    with RunFolder(tmp_path / "run") as folder:
        assert is_locked(folder.path / "lock")
    timer.join()


# -- what it refuses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/../config.toml", "/%2e%2e/etc/passwd", "/pro/run.json", "//etc/passwd", "/live.json/"]
)
def test_no_file_can_be_asked_for(serve: Callable[..., PageServer], root: Path, path: str) -> None:
    status, _, text = ask(serve(root), path)
    assert status == 404 and "etc" not in text and "pro" not in text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_only_get_and_head_are_allowed(serve: Callable[..., PageServer], root: Path, method: str) -> None:
    status, headers, _ = ask(serve(root), "/", method)
    assert status == 405 and headers["Allow"] == "GET, HEAD"


def test_head_has_no_body(serve: Callable[..., PageServer], root: Path) -> None:
    server = serve(root)
    status, headers, text = ask(server, "/live.json", "HEAD")
    assert status == 200 and text == "" and int(headers["Content-Length"]) > 100


@pytest.mark.parametrize("path", ["/", "/live.json", "/nothing"])
def test_headers_are_strict(serve: Callable[..., PageServer], root: Path, path: str) -> None:
    _, headers, _ = ask(serve(root), path)
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "connect-src 'self'" in policy
    assert re.search(r"script-src 'sha256-[^']+'(;|$)", policy) and "http" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store" and headers["X-Frame-Options"] == "DENY"
    assert "Python" not in headers["Server"]


def test_another_name_of_this_machine_is_refused(serve: Callable[..., PageServer], root: Path) -> None:
    """A foreign page whose name leads here (DNS rebinding) must not read the runs."""
    server = serve(root)
    assert ask(server, "/live.json", Host="evil.example")[0] == 403
    assert ask(server, "/live.json", Host="localhost:1")[0] == ask(server, "/live.json", Host="[::1]")[0] == 200


@pytest.mark.parametrize(("path", "host"), [("http://[", "localhost"), ("/", "[::1"), ("/", "")])
def test_an_odd_address_is_refused(serve: Callable[..., PageServer], root: Path, path: str, host: str) -> None:
    assert ask(serve(root), path, Host=host)[0] in (400, 403)


def test_a_fault_is_said_and_the_server_goes_on(
    serve: Callable[..., PageServer], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(root)
    with monkeypatch.context() as patch:
        patch.setattr(server.watcher, "live", lambda: 1 / 0)
        status, _, text = ask(server, "/live.json")
        assert status == 500 and "ZeroDivisionError" in text and "Traceback" not in text
    assert ask(server, "/live.json")[0] == 200


def test_a_token_is_asked_for(serve: Callable[..., PageServer], root: Path) -> None:
    server = serve(root, token=TOKEN)
    for wrong in ({}, {"Cookie": "profcil_token=other"}, {"Authorization": "Bearer "}, {"Cookie": "ü=;;"}):
        status, _, text = ask(server, "/live.json", **wrong)
        assert status == 401 and "pro" not in text.replace("profcil", "")
    assert ask(server, "/?token=wrong")[0] == 401 and ask(server, f"/live.json?token={TOKEN}x")[0] == 401
    status, headers, _ = ask(server, server.address.partition(str(server.server_address[1]))[2])
    assert status == 303 and headers["Location"] == "/"
    cookie = headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert ask(server, "/", Cookie=cookie.partition(";")[0])[0] == 200
    assert ask(server, "/live.json", Authorization=f"Bearer {TOKEN}", Host="machine.example")[0] == 200


def test_serving_changes_no_file(serve: Callable[..., PageServer], root: Path) -> None:
    def snapshot() -> dict[str, tuple[int, int]]:
        return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in root.rglob("*")}

    before = snapshot()
    server = serve(root)
    for path in ("/", "/live.json", "/data.json"):
        assert ask(server, path)[0] == 200
    assert snapshot() == before


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (["nowhere"], "nowhere is not a folder"),
        ([".", "--host", "0.0.0.0"], "give --token TEXT"),
        ([".", "--host", "0.0.0.0", "--token", "short"], "at least 16"),
        ([".", "--token", "with spaces and more"], "at least 16"),
        ([".", "--port", "99999"], "give another --host or --port"),
        ([".", "--host", "no.such.host.invalid", "--token", TOKEN], "give another --host or --port"),
    ],
)
def test_mistakes_are_one_sentence(line: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *line]) == 2
    err = capsys.readouterr().err
    assert err.startswith("profcil: ") and sentence in err and err.count("\n") == 1


def test_a_port_in_use(serve: Callable[..., PageServer], root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(root), "--port", str(serve(root).server_address[1])]) == 2
    assert "give another --host or --port" in capsys.readouterr().err


def test_the_command_serves_until_it_is_stopped(root: Path) -> None:
    command = [sys.executable, "-m", "profcil", "serve", str(root), "--port", "0"]
    environment = {**os.environ, "PROFCIL_TOKEN": TOKEN}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        port = int(re.match(rf"http://127\.0\.0\.1:(\d+)/\?token={TOKEN} shows", first)[1])  # type: ignore[index]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/live.json", headers={"Authorization": f"Bearer {TOKEN}"})
        assert len(json.loads(connection.getresponse().read())["runs"]) == 3
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert process.returncode == 0 and "the runs go on" in out and err == ""
    finally:
        process.kill()
