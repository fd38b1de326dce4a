"""A federation on one machine: a SuperLink and SuperNodes as child processes, which are stopped at the end."""

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
from profcil.io.interrupts import ignore_interrupts

# No telemetry, no update check, no installation of packages, and a short interval to look for new tasks.
FLOWER_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
CONNECTION = "local-cluster"  # the name of the SuperLink in Flower's configuration
START_SECONDS = 60.0  # time limit for the SuperLink to start
CHECK_SECONDS = 20.0  # between two queries of the run's status
STOP_SECONDS = 10.0  # time limit for a process to end by itself
Process = tuple[int, str]  # the parent's id and the start time


class LocalCluster:
    """A context manager that stops, by process id, every process that was started in it."""

    def __init__(self, folder: Path, secure: Path | None = None) -> None:
        self.folder = Path(folder).absolute()
        self.secure = secure  # the folder with certificates and keys; None = no TLS
        self.port = free_port()
        self.next_check = 0.0
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
        """Flower's configuration file, which says where the SuperLink is."""
        trust = f'root-certificates = "{self.secure / "ca.crt"}"' if self.secure else "insecure = true"
        return (
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{self.address}"\n{trust}\n'
        )

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        with ignore_interrupts():
            for name in reversed(list(self.processes)):
                self.stop(name)

    def start_superlink(self, *options: str) -> None:
        """Starts the SuperLink and waits until it listens."""
        trust: list[object] = ["--insecure"]
        if self.secure:
            trust = ["--ssl-ca-certfile", self.secure / "ca.crt", "--ssl-certfile", self.secure / "server.crt"]
            trust += ["--ssl-keyfile", self.secure / "server.key", "--enable-supernode-auth"]
        self.start("superlink", "flower-superlink", *trust, "--port", self.port, *options)
        end = time.monotonic() + START_SECONDS
        while not is_listening(self.port):
            if time.monotonic() > end or self.processes["superlink"].poll() is not None:
                raise Failure(f"the SuperLink did not start; see {self.folder / 'superlink.log'}")
            time.sleep(0.1)

    def start_node(
        self,
        name: str,
        config: Mapping[str, Any],
        key: Path | None = None,
        trust: Path | None = None,
        worker: bool = False,
        allow: Path | None = None,
    ) -> None:
        """Starts a SuperNode. `trust` is the root certificate; by default the cluster's own. With `worker`, its
        messages are computed by a worker that stays up. `allow` is a list of the apps that it runs; by default it runs
        all."""
        pairs = " ".join(f'{k}="{v}"' if isinstance(v, str | Path) else f"{k}={v}" for k, v in config.items())
        options: list[object] = ["--insecure"]
        if self.secure:
            options = ["--root-certificates", trust or self.secure / "ca.crt"]
        if key:
            options += ["--auth-supernode-private-key", key]
        port = free_port()
        options += ["--superlink", self.address, "--port", port]
        if worker:
            options += ["--isolation", "process"]
            self.start(f"{name}-worker", "profcil", "deploy", "worker", "--port", port)
        program: list[object] = ["flower-supernode"]
        if allow:
            program = [sys.executable, "-m", "profcil.deploy.client.supernode", "--allow-apps", allow]
        self.start(name, *map(str, [*program, *options, "--node-config", pairs]))

    def flwr(self, *args: object, timeout: float = 120) -> subprocess.CompletedProcess:
        """Runs a `flwr` command and waits for its end."""
        command = [find_program("flwr"), *map(str, args)]
        return subprocess.run(command, env=self.env, cwd=self.folder, timeout=timeout, capture_output=True, text=True)

    def submit(self, app: Path, *options: str) -> None:
        """Submits an app to the SuperLink, which runs it in the background."""
        result = self.flwr("run", app, CONNECTION, *options)
        if result.returncode:
            output = " ".join((result.stdout + result.stderr).split())
            raise Failure(f"`flwr run` failed ({output[-300:]}); see the logs in {self.folder}")

    def end_reason(self) -> str:
        """Why the run has ended: a process that exited, or Flower's status of the run. Empty while it runs."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                return f"{name} ended with status {process.returncode}"
        if time.monotonic() < self.next_check:
            return ""
        self.next_check = time.monotonic() + CHECK_SECONDS
        states = self.run_states()
        return states[0] if states and all(s.startswith("finished") for s in states) else ""

    def run_states(self) -> list[str]:
        """Flower's status of each run. Empty if Flower's output cannot be read."""
        output = self.flwr("ls", CONNECTION, "--format", "json").stdout
        try:
            runs = json.loads(output[output.index("{") :])["runs"]
            return [f"{r['status']} {r.get('status-details', '')}".strip() for r in runs]
        except (ValueError, KeyError):
            return []

    def start(self, name: str, program: str, *args: object) -> None:
        """Starts a program in a new session, with its output in a log file."""
        command = [find_program(program), *map(str, args)]
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                command, env=self.env, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )

    def stop(self, name: str, how: int = signal.SIGTERM) -> None:
        """Stops a process that was started here, and all processes that it started."""
        process = self.processes.pop(name)
        children = descendants(process.pid)
        if process.poll() is None:
            process.send_signal(how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the session that `start` created for this process
        process.wait()
        kill_remaining(children)  # Flower starts some of its processes in other sessions


def kill_remaining(processes: Mapping[int, Process]) -> None:
    """Kills those of some processes that still run. A new process with the same id has another start time."""
    running = running_processes()
    for pid, (_, started) in processes.items():
        if pid in running and running[pid][1] == started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def running_processes() -> dict[int, Process]:
    """All running processes by id. Empty on systems without /proc."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            fields = path.read_text().rpartition(")")[2].split()  # the name in brackets may contain spaces
            found[int(path.parent.name)] = (int(fields[1]), fields[19])
    return found


def descendants(pid: int) -> dict[int, Process]:
    """The children of a process, their children, and so on."""
    running = running_processes()
    found: dict[int, Process] = {}
    parents = {pid}
    while parents:
        children = {p: facts for p, facts in running.items() if facts[0] in parents and p not in found}
        found |= children
        parents = set(children)
    return found


def search_path() -> str:
    """The PATH for programs, with the folder of this Python first."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def find_program(name: str) -> str:
    """The path of one of Flower's programs."""
    found = shutil.which(name, path=search_path())
    if found is None:
        raise ConfigError(f"Flower's program {name} is not installed; install it with `pip install 'profcil[deploy]'`")
    return found


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def is_listening(port: int) -> bool:
    with socket.socket() as s:
        s.settimeout(0.5)
        return s.connect_ex(("127.0.0.1", port)) == 0


def is_finished(run: Path) -> bool:
    """Whether the run in a run folder is done."""
    from profcil.errors import ProfcilError
    from profcil.runs.reader import load_run

    try:
        return load_run(run).done
    except ProfcilError:
        return False


def start_federation(
    cluster: LocalCluster, app: Path, nodes: Sequence[Mapping[str, Any]], worker: bool = False
) -> None:
    """Starts the SuperLink and the nodes, and submits the app."""
    cluster.start_superlink()
    for i, config in enumerate(nodes):
        cluster.start_node(f"node{i}", config, worker=worker)
    cluster.submit(app)
