"""A trial on this machine: what it lacks is one sentence, and whatever it started ends with it."""

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

# Programs that do nothing, each with a child, one of these in a session of its own. All leave their numbers in $PIDS.
NODE = """#!/bin/sh
trap '' TERM INT
sleep 600 &
touch $PIDS/$$ $PIDS/$!
wait
"""
LINK = """#!{python}
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
from profcil.deploy import demo
from profcil.deploy import cluster
sys.executable, cluster.GRACE, demo.start = sys.argv[1], 0.5, lambda *_: None
sys.exit(main.main(["deploy", "demo", "--nodes", "2", "--out", sys.argv[2]]))
"""


@pytest.mark.parametrize(
    ("action", "package"), [(["demo"], "flwr"), (["demo", "--ray"], "ray"), (["certs"], "cryptography")]
)
def test_what_is_not_installed_is_one_sentence(tmp_path, monkeypatch, capsys, action, package):
    monkeypatch.chdir(tmp_path)
    there = deploy.find_spec
    monkeypatch.setattr(deploy, "find_spec", lambda name: None if name == package else there(name))
    assert main(["deploy", *action]) == 2
    said = capsys.readouterr().err
    assert f"needs {package}" in said and "pip install 'profcil[deploy]'" in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_program_that_is_nowhere_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert main(["deploy", "demo"]) == 2
    said = capsys.readouterr().err
    assert "flower-superlink is not installed" in said and "profcil[deploy]" in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_demo_and_all_it_started(tmp_path, number):
    programs, pids = tmp_path / "bin", tmp_path / "pids"
    programs.mkdir()
    pids.mkdir()
    for name, text in {
        "flower-superlink": LINK.format(python=sys.executable),
        "flower-supernode": NODE,
        "flwr": "#!/bin/sh\n",
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    line = [sys.executable, "-c", DEMO, str(programs / "python"), str(tmp_path / "demo")]
    began = subprocess.Popen(line, env={**os.environ, "PIDS": str(pids)}, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 60
        while len(list(pids.iterdir())) < 6 and time.monotonic() < until and began.poll() is None:
            time.sleep(0.1)
        assert len(started := [int(p.name) for p in pids.iterdir()]) == 6
        began.send_signal(number)
        time.sleep(0.2)
        began.send_signal(number)  # a second one changes nothing
        assert began.wait(30) == 130
        assert "interrupted; what was started is ended" in began.stderr.read()
        assert not [pid for pid in started if alive(pid)]
    finally:
        began.kill()
        for pid in map(int, (p.name for p in pids.iterdir())):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Whether a process of ours still runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
