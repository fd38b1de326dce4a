"""The part of a run that saves, with a made-up ledger and events: memory and disk of very long runs.

python tests/engine/long_run.py --rounds 100000 --participants 1000

Nothing is trained. A round records a message down and one up for each participant, and an event of about 2,000
characters; every `--every` rounds the state is saved. What is printed is the memory of the process and the size of the
state, which must not grow, and of the files that do.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from profcil.engine.channel import ServerState
from profcil.engine.recorder import RunRecorder
from profcil.engine.run_state import RunState
from profcil.metrics.ledger import Entry, Ledger
from profcil.metrics.scores import Scores
from profcil.runs.folder import RunFolder

LINES = 12  # of the table


class LongRun:
    """Records and saves rounds as a run does."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        self.state = RunState(ServerState({}, 0), Scores.empty(1, np.array([1])), Ledger())
        (path / "events.jsonl").write_bytes(b"")
        self.recorder: Any = SimpleNamespace(folder=self.folder, state=self.state, whole=(self.state, ""))

    def round(self, number: int, participants: int) -> None:
        """Two messages for each participant, and an event."""
        for direction in ("down", "up"):
            entries = [Entry("round", 0, number, c, direction, "model", 1000 + c) for c in range(participants)]
            self.state.ledger.entries.extend(entries)
        line = f'{{"event": "round", "round": {number}, "note": "{"x" * 2_000}"}}\n'
        self.folder.append(line)
        RunRecorder.hold(self.recorder, self.state, self.recorder.whole[1] + line)

    def save(self) -> None:
        RunRecorder.seal(self.recorder)
        state, events = self.recorder.whole
        self.folder.save(state, events, {"bytes": state.ledger.stream_bytes})
        self.folder.wait_until_written()


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def measured(path: Path, rounds: int, participants: int, every: int) -> Iterator[dict[str, float]]:
    """Memory, sizes and the seconds of a save, at some rounds."""
    path.mkdir()
    long = LongRun(path)
    shown = {round(rounds * share / LINES / every) * every for share in range(1, LINES + 1)} | {every}
    largest = 0.0
    for number in range(1, rounds + 1):
        long.round(number, participants)
        if number % every and number != rounds:
            continue
        began = time.process_time()
        long.save()
        seconds = time.process_time() - began
        largest = max(largest, resident_mb())
        if number in shown or number == rounds:
            sizes = {n: (path / n).stat().st_size for n in ("state.safetensors", "ledger.csv", "events.jsonl")}
            yield {"round": number, "MB": largest, "save": seconds, **sizes}
            largest = 0.0
    long.folder.__exit__()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--participants", type=int, default=1_000)
    parser.add_argument("--every", type=int, default=20, help="rounds between two saves")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        print("| round | largest MB since the line before | state, MB | ledger, MB | events, MB | CPU s of a save |")
        for row in measured(folder / "run", args.rounds, args.participants, args.every):
            sizes = [f"{row[name] / 1e6:.1f}" for name in ("state.safetensors", "ledger.csv", "events.jsonl")]
            print(f"| {row['round']:,} | {row['MB']:.0f} | {' | '.join(sizes)} | {row['save']:.2f} |", flush=True)
        began = time.process_time()
        with RunFolder(folder / "run") as opened:
            sent = opened.load(torch.device("cpu"))[0].ledger.stream_bytes
        seconds = time.process_time() - began
        print(f"loaded: {sent:,} bytes were sent; {resident_mb():.0f} MB, {seconds:.0f} CPU s")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
