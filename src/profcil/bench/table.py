"""Run cases one after another, each in a separate process, and report them as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from profcil import __version__
from profcil.bench.cases import Case, cases
from profcil.errors import ConfigError
from profcil.reporting.tables import text_table

Row = dict[str, Any]
COLUMNS = {
    "what": "what",
    "ours": "ours",
    "unit": "",
    "reference": "reference",
    "ratio": "ratio",
    "accuracy": "our accuracy",
    "reference_accuracy": "its accuracy",
    "largest_difference": "largest difference of weights",
    "peak_memory_mb": "peak MB",
    "images_per_second": "images/s",
    "share_of_matmul_peak": "of peak",
    "resident_first_mb": "MB, first position",
    "resident_last_mb": "MB, last position",
    "against": "reference is",
    "note": "",
}


def select(words: Sequence[str], data: Path, device: str, peer_python: str = "") -> dict[str, Case]:
    """The cases whose name contains one of the words; all cases if no word is given."""
    known = cases(data, device, peer_python)
    for word in words:
        if not any(word in name for name in known):
            names = "; ".join(known)
            raise ConfigError(f"no case of the bench contains '{word}'; choose from: {names}")
    if not words:
        return known
    selected = [name for name in known if any(word in name for word in words)]
    return {name: known[name] for name in selected}


def measure(words: Sequence[str], data: Path, device: str, peer_python: str = "") -> Iterator[Row]:
    """Run the selected cases and yield the row of each as soon as it is measured."""
    done: dict[str, Row] = {}
    for name, case in select(words, data, device, peer_python).items():
        row = {"what": name, **run_case(name, data, device, peer_python)}
        base = done.get(case.base, {})
        if "ours" in base:
            row |= {"reference": base["ours"], "against": case.base}
        if row.get("ours") and row.get("reference"):
            row["ratio"] = row["reference"] / row["ours"]
        done[name] = row
        yield row


def run_case(name: str, data: Path, device: str, peer_python: str = "") -> Row:
    """Run one case in a new process. All processes that it started are killed when it ends."""
    command = [sys.executable, "-m", "profcil.bench", name, str(data), device, peer_python]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        out, err = child.communicate()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # only the session that was created for this case
    if child.returncode:
        lines = err.strip().splitlines()
        last = lines[-1] if lines else f"status {child.returncode}"
        return {"failed": True, "note": f"this case failed ({last})"}
    return json.loads(out.splitlines()[-1])


def render(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows as text, with the columns that at least one row has."""
    rows = list(rows)
    used = [key for key in COLUMNS if any(key in row for row in rows)]
    header = [COLUMNS[key] for key in used]
    lines = []
    for row in rows:
        lines.append([format_value(key, row.get(key)) for key in used])
    return text_table(header, lines)


def format_value(key: str, value: Any) -> str:
    """A value of a row as text."""
    if value is None or isinstance(value, str):
        return value or ""
    if key == "share_of_matmul_peak":
        return f"{value:.1%}"
    is_large = key.endswith(("_mb", "_second"))
    return f"{value:,.0f}" if is_large else f"{value:.3g}"


def report(rows: Sequence[Row]) -> dict[str, Any]:
    """The rows with the date, the machine and the versions."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    machine = {"cpu": processor(), "cores": os.cpu_count(), "gpu": gpu, "system": platform.platform()}
    versions = {"profcil": __version__, "torch": torch.__version__, "python": platform.python_version()}
    today = datetime.now(UTC).date()
    return {"date": today.isoformat(), "machine": machine, "versions": versions, "rows": list(rows)}


def processor() -> str:
    """The name of the processor, as reported by the system."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("model name"))
        return line.partition(": ")[2]
    return platform.processor()
