"""Counts the attacks of each test and prints them at the end, also where several processes run the tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import tally

found: dict[str, tally.Counts] = {}


@pytest.fixture(autouse=True)
def counted(request: pytest.FixtureRequest) -> Iterator[None]:
    counts = tally.begin()
    yield
    if counts.tried:
        request.node.user_properties.append((tally.PROPERTY, {tally.kind_of(request.node.name): asdict(counts)}))


def pytest_runtest_logreport(report: Any) -> None:
    """The report of a test's end comes from the process that ran it."""
    if report.when != "teardown":
        return
    for name, value in report.user_properties:
        for kind, counts in value.items() if name == tally.PROPERTY else ():
            found[kind] = found.get(kind, tally.Counts()) + tally.Counts(**counts)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if found:
        terminalreporter.section("attacks")
        for line in tally.described(found):
            terminalreporter.line(line)
