"""Runs the golden runs on two commits on this machine and compares what they end with.

    python tests/golden/compare.py BASE [--device cuda]     compares BASE with the working tree
    python tests/golden/compare.py --record                 writes this machine's digests of the working tree

The scripts of the working tree are used for both, so BASE may be older than they are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PATHS = ("reference", "default")


def played(source: Path, path: str, device: str) -> dict[str, Any]:
    env = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "golden_runs.py"), "--path", path, "--device", device]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """One line for every run that differs."""
    lines = [f"{name}: only on one side" for name in sorted(old.keys() ^ new.keys())]
    for name in sorted(old.keys() & new.keys()):
        parts = [k for k in ("weights", "scores", "ledger") if old[name][k] != new[name][k]]
        if parts:
            lines.append(f"{name}: {', '.join(parts)}; norm {old[name]['norm']:.9g} -> {new[name]['norm']:.9g}")
    return lines


def compare(base: str, device: str) -> int:
    different = 0
    with tempfile.TemporaryDirectory(prefix="profcil-base-") as folder:
        archive = subprocess.run(["git", "archive", base, "src"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        for path in PATHS:
            old = played(Path(folder) / "src", path, device)["runs"]
            new = played(ROOT / "src", path, device)["runs"]
            lines = changes(old, new)
            print(f"{path} path on {device}: {len(new) - len(lines)} of {len(new)} runs equal to the bit")
            print("\n".join(f"  {line}" for line in lines))
            different += len(lines)
    return different


def record(device: str) -> None:
    file = HERE / "digests.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    for path in PATHS:
        found = played(ROOT / "src", path, device)
        known.setdefault(f"{device} {path}", {})[found["key"]] = found["runs"]
    file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", nargs="?", help="commit to compare with")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    if args.record:
        return record(args.device)
    if not args.base:
        parser.error("name a commit to compare with, as in `make golden-compare BASE=HEAD~1`")
    sys.exit(1 if compare(args.base, args.device) else 0)


if __name__ == "__main__":
    main()
