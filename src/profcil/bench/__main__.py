"""One case of the bench, by name: `python -m profcil.bench NAME DATA-DIR DEVICE`. The last line printed is its row."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from profcil.bench.cases import cases

if __name__ == "__main__":
    name, data, device = sys.argv[1:]
    row = cases(Path(data), device)[name]()
    if "ours" in row:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
        row.setdefault("peak_memory_mb", peak)
    print(json.dumps(row), flush=True)
