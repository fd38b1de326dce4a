"""Reading own data: a CSV of many texts, as `profcil run --data` reads it."""

from __future__ import annotations

import csv
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from profcil.randomness import generator

WORDS = 30_000  # different words, frequent ones far more often than rare ones
LENGTH = 36  # words of a text
CLASSES = 50


def case(texts: int) -> dict[str, Any]:
    """Processor seconds to find the defaults and to load the data, and the peak memory of the process with torch."""
    from profcil.config import OwnSettings
    from profcil.data.loading import load_bundle
    from profcil.data.own import recipe

    with tempfile.TemporaryDirectory() as folder:
        path = write_texts(Path(folder) / "texts.csv", texts)
        began = time.process_time()
        recipe(path, OwnSettings())
        load_bundle("own", path, 0, OwnSettings())
        seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"ours": seconds, "unit": "s of processor", "peak_memory_mb": peak}


def write_texts(path: Path, texts: int) -> Path:
    """A CSV of texts of random words."""
    random = generator(0, "bench", "texts")
    ranks = (WORDS ** random.random((texts, LENGTH))).astype(int)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("text", "label"))
        for number, row in enumerate(ranks.tolist()):
            writer.writerow((" ".join(f"w{rank}" for rank in row), f"class {number % CLASSES}"))
    return path
