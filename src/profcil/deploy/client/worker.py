"""A site's worker process, which runs on between messages: each message is computed by a fork of it.

Flower starts a new Python process for each message, which imports torch again. With `flower-supernode --isolation
process` it leaves that to another process: this one has imported everything, and forks. It uses Flower's own loop and
replaces only how a task is started. That is no stable interface of Flower: it is tested with the release that
`profcil[deploy]` asks for.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module

from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult, SubprocessExecutor
from flwr.supernode.runtime.run_clientapp import run_clientapp


class ForkingExecutor(SubprocessExecutor):
    """Starts each ClientApp as a fork of this process."""

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        if spec.task_type != TaskType.CLIENT_APP:
            return super().launch(spec)
        if os.fork() == 0:
            compute(spec)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Removes children that have ended."""
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def compute(spec: ExecutionSpec) -> None:
    """Computes one message in a fork, and ends it. Nothing of the parent is closed on the way out."""
    status = 1
    try:
        run_clientapp(spec.runtime_api_address, spec.token, insecure=True, parent_pid=spec.parent_pid)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def work(port: int) -> None:
    """Computes the messages of the SuperNode that listens at a port of this machine, until it is stopped."""
    for module in ("profcil.deploy.app", "profcil.deploy.client.respond", "profcil.deploy.wire", "profcil.registry"):
        import_module(module)  # what a fork need not import again; no thread of torch is started by it
    loop = import_module("flwr.supercore.superexec.run_superexec")
    loop.get_executor = lambda *_, **__: ForkingExecutor()  # type: ignore[attr-defined]
    loop.run_superexec(runtime_api_address=f"127.0.0.1:{port}", insecure=True)
