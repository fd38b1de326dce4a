"""Do the tests fail where the source is wrong? Each mutation breaks one thing; the tests named beside it must fail.

    python tests/mutation/mutate.py              all mutations; exit status 1 if one survives
    python tests/mutation/mutate.py transport    those whose name contains a word
    python tests/mutation/mutate.py --check      only whether every mutation can be applied

The source is copied to a temporary folder, one text in it is replaced, and pytest runs with the copy. The unchanged
copy must pass the same tests. The mutations are in `mutations.py`, those of the attacks in `attack_faults.py`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from attack_faults import ATTACK_FAULTS
from mutations import MUTATIONS as OTHERS
from mutations import Mutation

MUTATIONS = (*OTHERS, *ATTACK_FAULTS)
ROOT = Path(__file__).resolve().parents[2]
TIME = 1200  # seconds for the tests of one mutation, or for all tests on the unchanged source
PASSED = 0  # pytest's exit status
FAILED = 1

# Runs pytest on the copy; has an exit status that pytest does not know where another copy was imported.
PROGRAM = """
import sys
import profcil
import pytest
if not profcil.__file__.startswith(sys.argv[1]):
    print(f"the tests would run on {profcil.__file__}")
    sys.exit(100)
sys.exit(pytest.main(sys.argv[2:]))
"""


class Broken(Exception):
    """A mutation that says nothing about the tests."""


def mutated(mutation: Mutation, source: Path = ROOT / "src") -> str:
    """The text of the file with the mutation in it."""
    path = source / "profcil" / mutation.file
    if not path.is_file():
        raise Broken(f"mutation '{mutation.name}': there is no file {mutation.file}")
    text = path.read_text()
    if (found := text.count(mutation.old)) != 1:
        raise Broken(f"mutation '{mutation.name}': {mutation.old!r} occurs {found} times in {mutation.file}, not once")
    if missing := [name for name in mutation.tests if not (ROOT / "tests" / name.partition("::")[0]).is_file()]:
        raise Broken(f"mutation '{mutation.name}': there is no test file {missing[0]}")
    return text.replace(mutation.old, mutation.new)


def passes(tests: Sequence[str], mutation: Mutation | None = None) -> tuple[bool, str]:
    """Whether these tests pass on a copy of the source, mutated or as it is; and what pytest printed."""
    with tempfile.TemporaryDirectory(prefix="profcil-mutation-") as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        if mutation is not None:
            (copy / "profcil" / mutation.file).write_text(mutated(mutation))
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header", "--tb=line"]
        command = [sys.executable, "-c", PROGRAM, str(copy), *options, *(f"tests/{name}" for name in tests)]
        more = {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        own = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        try:
            done = subprocess.run(command, cwd=ROOT, env=own | more, capture_output=True, text=True, timeout=TIME)
        except subprocess.TimeoutExpired:
            raise Broken(f"the tests {', '.join(tests)} took longer than {TIME} s") from None
    if done.returncode not in (PASSED, FAILED):
        raise Broken(f"the tests {', '.join(tests)} did not run\n{done.stdout}{done.stderr}")
    return done.returncode == PASSED, done.stdout


def killer(output: str) -> str:
    """The test that failed, from pytest's summary."""
    lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0].split(" - ")[0].split("::")[-1] if lines else ""


def chosen(words: Sequence[str]) -> list[Mutation]:
    return [m for m in MUTATIONS if not words or any(word in m.name for word in words)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Runs the tests on mutated copies of the source.")
    parser.add_argument("words", nargs="*", help="parts of the names of the mutations to run; all without one")
    parser.add_argument("--check", action="store_true", help="only look whether every mutation can be applied")
    given = parser.parse_args(arguments)
    todo = chosen(given.words)
    wrong = [error for mutation in todo if (error := trouble(mutation))]
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 2
    if given.check:
        print(f"{len(todo)} mutations can be applied")
        return 0
    try:
        return report(todo)
    except Broken as error:
        print(error, file=sys.stderr)
        return 2


def trouble(mutation: Mutation) -> str:
    """Why a mutation cannot be applied; empty where it can."""
    try:
        mutated(mutation)
    except Broken as error:
        return str(error)
    return ""


def report(todo: Sequence[Mutation]) -> int:
    """Runs the mutations and prints one line each."""
    tests = sorted({name for mutation in todo for name in mutation.tests})
    passed, output = passes(tests)
    if not passed:
        raise Broken(f"the tests fail on the unchanged source\n{output}")
    killed = 0
    print("| mutation | what it breaks | result | failed test |\n|---|---|---|---|", flush=True)
    for mutation in todo:
        survived, output = passes(mutation.tests, mutation)
        killed += not survived
        result = "survived" if survived else "killed"
        print(f"| {mutation.name} | {mutation.breaks} | {result} | {killer(output)} |", flush=True)
    share = killed / len(todo) if todo else 1.0
    print(f"\n{killed} of {len(todo)} killed, {share:.0%}")
    return int(killed < len(todo))


if __name__ == "__main__":
    sys.exit(main())
