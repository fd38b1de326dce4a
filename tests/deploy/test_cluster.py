"""A cluster on this machine: a missing program is one sentence, and every started process is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from profcil.cli import deploy
from profcil.cli.main import main

# Programs that only wait, each with a child process; one child has its own session. All write their ids to $PIDS.
SUPERNODE = """#!/bin/sh
trap '' TERM INT
sleep 600 &
touch $PIDS/$$ $PIDS/$!
wait
"""
SUPERLINK = """#!{python}
import os, socket, subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
for pid in (os.getpid(), child.pid):
    open(os.environ["PIDS"] + f"/{{pid}}", "w").close()
server = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
while True:
    server.accept()
"""
DEMO = """
import sys
from profcil.cli import main
from profcil.deploy.local import cluster, demo
sys.executable, cluster.STOP_SECONDS, demo.start = sys.argv[1], 0.5, lambda *_: None
sys.exit(main.main(["deploy", "demo", "--nodes", "2", "--out", sys.argv[2]]))
"""


@pytest.mark.parametrize(
    ("action", "package"), [(["demo"], "flwr"), (["demo", "--ray"], "ray"), (["certs"], "cryptography")]
)
def test_a_missing_package_is_one_sentence(tmp_path, monkeypatch, capsys, action, package):
    monkeypatch.chdir(tmp_path)
    find_spec = deploy.find_spec
    monkeypatch.setattr(deploy, "find_spec", lambda name: None if name == package else find_spec(name))
    assert main(["deploy", *action]) == 2
    message = capsys.readouterr().err
    assert f"needs {package}" in message and "pip install 'profcil[deploy]'" in message and message.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_missing_program_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert main(["deploy", "demo"]) == 2
    message = capsys.readouterr().err
    assert "flower-superlink is not installed" in message and "profcil[deploy]" in message and message.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_demo_and_all_its_processes(tmp_path, number):
    programs = tmp_path / "bin"
    pids = tmp_path / "pids"
    programs.mkdir()
    pids.mkdir()
    for name, text in {
        "flower-superlink": SUPERLINK.format(python=sys.executable),
        "flower-supernode": SUPERNODE,
        "flwr": "#!/bin/sh\n",
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    line = [sys.executable, "-c", DEMO, str(programs / "python"), str(tmp_path / "demo")]
    demo_process = subprocess.Popen(line, env={**os.environ, "PIDS": str(pids)}, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 60
        while len(list(pids.iterdir())) < 6 and time.monotonic() < end and demo_process.poll() is None:
            time.sleep(0.1)
        assert len(started := [int(p.name) for p in pids.iterdir()]) == 6
        demo_process.send_signal(number)
        time.sleep(0.2)
        demo_process.send_signal(number)  # a second signal changes nothing
        assert demo_process.wait(30) == 128 + number
        assert "interrupted; all started processes are stopped" in demo_process.stderr.read()
        assert not [pid for pid in started if alive(pid)]
    finally:
        demo_process.kill()
        for pid in map(int, (p.name for p in pids.iterdir())):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Whether a process still runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
