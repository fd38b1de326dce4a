"""Checks a run folder completely: every file against its digest, and the files against each other."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from profcil.errors import ProfcilError, RunFolderError
from profcil.metrics.ledger import Ledger, stream_bytes
from profcil.runs.digests import KEY, changed_files, digest
from profcil.runs.folder import NOTHING_SEALED
from profcil.runs.reader import Run, load_run
from profcil.runs.run_files import advise_resume, changed_message, check_folder, is_locked, parse_file, parse_json_table

TOLERANCE = 1e-9  # of recomputed metrics; they are sums of whole numbers, divided


def find_faults(path: Path) -> list[str]:
    """What is wrong with a run folder, one sentence each; empty if nothing is."""
    path = Path(path)
    try:
        check_folder(path)
    except ProfcilError as error:
        return [str(error)]
    found: list[str] = []
    for check in CHECKS:
        try:
            found += check(path)
        except ProfcilError as error:
            found.append(str(error))
    return list(dict.fromkeys(found))


def digest_faults(path: Path) -> Iterator[str]:
    """Files that are not what the run wrote, and those that are missing."""
    facts = parse_file(path / "run.json", parse_json_table)
    for name in changed_files(path, facts):
        yield changed_message(path, name)
    for name in facts.get(KEY, {}):
        if not (path / name).exists():
            yield f"{path / name} is missing; {advise_resume(path)}"


def content_faults(path: Path) -> Iterator[str]:
    """Files that contradict each other: settings, plan, scores, metrics and bytes."""
    run = load_run(path)
    if not run.done:
        return
    yield from metric_faults(run)
    recorded = run.facts.get("bytes")
    found = stream_bytes(run.ledger.entries)
    if recorded is not None and recorded != found:
        yield f"{path}/ledger.csv sums to {found} bytes, but run.json records {recorded}; {advise_resume(path)}"


def metric_faults(run: Run) -> Iterator[str]:
    """Recorded metrics that do not follow from scores and plan."""
    recorded = run.facts.get("metrics") or {}
    for name, value in (run.metrics or {}).items():
        known = recorded.get(name, value)
        if not isinstance(known, int | float) or not is_close(known, value):
            yield f"{run.path}/run.json has {name} = {known}, but scores.json gives {value}; {advise_resume(run.path)}"


def is_close(one: float, other: float) -> bool:
    both_nan = math.isnan(one) and math.isnan(other)
    return both_nan or math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def state_faults(path: Path) -> Iterator[str]:
    """A damaged state, or one that the readable files of a finished run do not follow from. A state may be absent."""
    file = path / "state.safetensors"
    if not file.exists() or is_locked(path / "lock"):
        return
    record = stored_facts(file)
    if record is None:
        yield f"{file} is damaged; run it again with another --out, or remove the file to keep the results alone"
        return
    yield from client_file_faults(path, record)
    for name, text in readable_files(record).items():
        if (path / name).exists() and not holds(text, (path / name).read_bytes()):
            yield f"{path / name} does not follow from the saved state; {advise_resume(path)}"


def readable_files(record: dict[str, Any]) -> dict[str, Callable[[bytes], bool]]:
    """Tests of the readable files against the values of a state."""
    sealed = {name: record.get("sealed", {}).get(name, NOTHING_SEALED) for name in ("ledger", "events")}
    ledger = Ledger.from_csv(record["ledger"]).entries
    columns = record["ledger"].partition("\n")[0].encode() + b"\n" if sealed["ledger"][0] else b""
    return {
        "scores.json": lambda data: json.loads(data.decode()) == record["scores"],
        "ledger.csv": lambda data: (
            begins_as_sealed(data, sealed["ledger"])
            and Ledger.from_csv((columns + data[sealed["ledger"][0] :]).decode()).entries == ledger
        ),
        "events.jsonl": lambda data: (
            begins_as_sealed(data, sealed["events"])
            and data[sealed["events"][0] :].startswith(record["events"].encode())
        ),
    }


def holds(test: Callable[[bytes], bool], data: bytes) -> bool:
    """Whether a test of a file's content succeeds. Content that cannot be parsed fails it."""
    try:
        return test(data)
    except (ValueError, RecursionError, RunFolderError):
        return False


def begins_as_sealed(data: bytes, mark: Sequence[Any]) -> bool:
    length, known = mark
    return digest(data[:length]) == known


def client_file_faults(path: Path, record: dict[str, Any]) -> Iterator[str]:
    """Files of private tensors that the state needs and that are missing or damaged."""
    for _, name in record.get("parked", []):
        file = path / "clients" / name
        if stored_facts(file) is None:
            yield f"{file} is missing or damaged; run it again with another --out"


def model_faults(path: Path) -> Iterator[str]:
    """A damaged file with the trained model. There may be none."""
    file = path / "model.safetensors"
    if file.exists() and stored_facts(file) is None:
        yield f"{file} is damaged; remove it, the saved state has the model, too"


def stored_facts(file: Path) -> dict[str, Any] | None:
    """The facts in a file of tensors; None if the file is missing or its digest differs."""
    from profcil.io.atomic_files import read_tensors

    stored = read_tensors(file)
    return None if stored is None else stored[1]


CHECKS = (digest_faults, content_faults, state_faults, model_faults)
