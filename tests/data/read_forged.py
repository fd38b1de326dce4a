"""Reads each given file as a CIFAR-100 file in a process of its own, and prints one line for each: what happened.

    python read_forged.py FILE ...

The processes are forks of this one, so that torch is imported once.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from profcil.data import cifar100
from profcil.errors import DataError


def read(path: Path) -> int:
    try:
        cifar100.read_python(path)
    except DataError:
        return 0
    return 1


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name in sys.argv[1:]:
        child = os.fork()
        if child == 0:
            os._exit(read(Path(name)))
        _, status = os.waitpid(child, 0)
        print("refused" if status == 0 else f"ended with {os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    main()
