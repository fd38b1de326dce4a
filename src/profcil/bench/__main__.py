"""Run one case: `python -m profcil.bench NAME DATA-DIR DEVICE [PEER-PYTHON]`. Its last line is its row as JSON."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from profcil.bench.cases import cases

if __name__ == "__main__":
    name, data, device, *peer_python = sys.argv[1:]
    row = cases(Path(data), device, *peer_python)[name]()
    if "ours" in row:
        unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux KiB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        row.setdefault("peak_memory_mb", peak / 1e6)
    print(json.dumps(row), flush=True)
