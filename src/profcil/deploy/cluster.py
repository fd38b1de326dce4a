"""A whole federation on one machine, for trials: a SuperLink and its SuperNodes as processes that end with it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from profcil.errors import ConfigError, Failure
from profcil.io.interrupts import undisturbed

# Nothing is reported to anyone, nothing is downloaded or installed, and a started task is noticed at once.
FLOWER_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
PATIENCE = 60.0  # seconds for the SuperLink to come up
LOOK = 20.0  # seconds between two questions whether the run still runs
GRACE = 10.0  # seconds for a process to end by itself


class Trial:
    """Use as a context: whatever was started in it is ended with it, by its own process id."""

    def __init__(self, folder: Path, secure: Path | None = None) -> None:
        self.folder, self.secure = Path(folder).absolute(), secure
        self.port, self.look_again = free_port(), 0.0
        self.processes: dict[str, subprocess.Popen] = {}
        home = self.folder / "flower"
        home.mkdir(parents=True, exist_ok=True)
        (home / "config.toml").write_text(self.connection())
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        self.env = {**os.environ, **FLOWER_ENVIRONMENT, **threads, "FLWR_HOME": str(home), "PATH": search_path()}

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def connection(self) -> str:
        """Where `flwr` finds the SuperLink."""
        trust = f'root-certificates = "{self.secure / "ca.crt"}"' if self.secure else "insecure = true"
        return f'[superlink]\ndefault = "trial"\n\n[superlink.trial]\naddress = "{self.address}"\n{trust}\n'

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        with undisturbed():
            for name in reversed(list(self.processes)):
                self.stop(name)

    def superlink(self, *more: str) -> None:
        """Starts the SuperLink and waits until it listens."""
        trust: list[object] = ["--insecure"]
        if self.secure:
            s = self.secure
            trust = ["--ssl-ca-certfile", s / "ca.crt", "--ssl-certfile", s / "server.crt"]
            trust += ["--ssl-keyfile", s / "server.key", "--enable-supernode-auth"]
        self.start("superlink", "flower-superlink", *trust, "--port", self.port, *more)
        until = time.monotonic() + PATIENCE
        while not listening(self.port):
            if time.monotonic() > until or self.processes["superlink"].poll() is not None:
                raise Failure(f"the SuperLink did not come up; see {self.folder / 'superlink.log'}")
            time.sleep(0.1)

    def node(self, name: str, config: Mapping[str, Any], key: Path | None = None, trust: Path | None = None) -> None:
        """Starts a SuperNode."""
        pairs = " ".join(f'{k}="{v}"' if isinstance(v, str | Path) else f"{k}={v}" for k, v in config.items())
        safe: list[object] = ["--root-certificates", trust or self.secure / "ca.crt"] if self.secure else ["--insecure"]
        safe += ["--auth-supernode-private-key", key] if key else []
        where = ["--superlink", self.address, "--port", free_port()]
        self.start(name, "flower-supernode", *safe, *where, "--node-config", pairs)

    def flwr(self, *args: object, timeout: float = 120) -> subprocess.CompletedProcess:
        """A `flwr` command, to its end."""
        command = [program("flwr"), *map(str, args)]
        return subprocess.run(command, env=self.env, cwd=self.folder, timeout=timeout, capture_output=True, text=True)

    def run(self, app: Path, *more: str) -> None:
        """Hands an app to the SuperLink; it runs from here on by itself."""
        done = self.flwr("run", app, "trial", *more)
        if done.returncode:
            raise Failure(f"`flwr run` failed ({' '.join((done.stdout + done.stderr).split())[-300:]})")

    def ended(self) -> str:
        """Why nothing more is to be expected; empty while something is."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                return f"{name} ended with status {process.returncode}"
        if time.monotonic() < self.look_again:
            return ""
        self.look_again = time.monotonic() + LOOK
        said = self.flwr("ls", "trial", "--format", "json")
        try:
            runs = json.loads(said.stdout[said.stdout.index("{") :])["runs"]
            states = [f"{r['status']} {r.get('status-details', '')}".strip() for r in runs]
        except (ValueError, KeyError):
            return ""
        return states[0] if states and all(s.startswith("finished") for s in states) else ""

    def start(self, name: str, what: str, *args: object) -> None:
        command = [program(what), *map(str, args)]
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                command, env=self.env, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )

    def stop(self, name: str, how: int = signal.SIGTERM) -> None:
        """Ends a process that was started here, and what it has started itself."""
        process = self.processes.pop(name)
        below = descendants(process.pid)
        if process.poll() is None:
            process.send_signal(how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the session that `start` gave it, and nobody else's
        process.wait()
        now = running()
        for pid, (_, began) in below.items():  # Flower gives some of its processes sessions of their own
            if pid in now and now[pid][1] == began:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def running() -> dict[int, tuple[int, str]]:
    """Every process by its id: its parent's id, and when it began, which tells it from a later one of the same id.
    Nothing where the system does not say (it has no /proc)."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            parts = path.read_text().rpartition(")")[2].split()  # a name in brackets may hold anything
            found[int(path.parent.name)] = (int(parts[1]), parts[19])
    return found


def descendants(pid: int) -> dict[int, tuple[int, str]]:
    """The processes that a process has started, and those that these have."""
    every, found = running(), dict[int, tuple[int, str]]()
    wanted = {pid}
    while wanted:
        below = {p: facts for p, facts in every.items() if facts[0] in wanted and p not in found}
        found |= below
        wanted = set(below)
    return found


def search_path() -> str:
    """Where programs are looked for: beside this Python first."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def program(name: str) -> str:
    """One of Flower's programs."""
    found = shutil.which(name, path=search_path())
    if found is None:
        raise ConfigError(f"Flower's program {name} is not installed; `pip install 'profcil[deploy]'` brings it")
    return found


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def listening(port: int) -> bool:
    with socket.socket() as s:
        s.settimeout(0.5)
        return s.connect_ex(("127.0.0.1", port)) == 0


def wait_for(what: Any, seconds: float, every: float = 0.2) -> bool:
    """Whether something becomes true in time."""
    until = time.monotonic() + seconds
    while not what():
        if time.monotonic() > until:
            return False
        time.sleep(every)
    return True


def finished(run: Path) -> bool:
    """Whether a run folder says that its run is done."""
    from profcil.errors import ProfcilError
    from profcil.runs.reader import load_run

    try:
        return load_run(run).done
    except ProfcilError:
        return False


def federation(trial: Trial, app: Path, nodes: Sequence[Mapping[str, Any]]) -> None:
    """SuperLink, nodes and run, in this order."""
    trial.superlink()
    for i, config in enumerate(nodes):
        trial.node(f"node{i}", config)
    trial.run(app)
