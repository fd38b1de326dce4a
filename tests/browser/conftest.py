"""One headless Chromium for all tests. Without Chromium or playwright the tests are skipped with a reason."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "reporting"))

from made_runs import make_runs, unfinish

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium is installed")
    with sync.sync_playwright() as play:
        opened = play.chromium.launch(executable_path=found, args=list(FLAGS))
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four finished runs, one unfinished, one with markup in a setting and a hundred clients, and a warning."""
    import numpy as np

    from profcil.protocol.plan_making import make_plan
    from profcil.protocol.settings import StreamSettings
    from profcil.reporting.page.page import render_page, write_page
    from profcil.runs.reader import Run, load_run

    root = tmp_path_factory.mktemp("browsed")
    make_runs(root)
    runs = [load_run(root / name) for name in ("fedavg-0", "fedavg-1", "promax-0", "promax-1")]
    half = load_run(unfinish(root / "promax-0", root / "half"))
    plan = make_plan(np.arange(3000) % 10, 10, StreamSettings(100, 10, 3, support=0.4, coverage=0.5, disorder=0.6), 0)
    hostile = {**runs[0].config, "setting": "</script><img src=x onerror=document.title='broken'>"}
    odd = Run(root / "<b>odd", hostile, runs[0].facts, runs[0].scores, runs[0].ledger, plan)
    write_page(root / "page.html", render_page([*runs, half, odd], "Runs & more", ["left out: <i>nothing</i>"]))
    return root / "page.html"
