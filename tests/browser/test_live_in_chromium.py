"""The served page follows a run: the folder is written step by step, and the page is never loaded again."""

from __future__ import annotations

import queue
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "reporting"))

from made_runs import SIZE, SMALL

from profcil.engine.recorder import Progress
from profcil.engine.run import Interrupted, resume, start
from profcil.live.server import PageServer, make_server
from profcil.live.watcher import Watcher
from profcil.resolve import resolve

SECONDS = 20_000  # in which the page must show a change, in milliseconds
CARD = "article.now"
NUMBER = re.compile(r"\d")


class SteppedRun:
    """A run in a thread that waits before each message of the engine until it may go on or has to stop."""

    def __init__(self, work: Callable[[Callable[[Progress], None]], Any]) -> None:
        self.orders: queue.Queue[str] = queue.Queue()
        self.reached: queue.Queue[str] = queue.Queue()
        self.thread = threading.Thread(target=self.compute, args=(work,), daemon=True)
        self.thread.start()

    def compute(self, work: Callable[[Callable[[Progress], None]], Any]) -> None:
        try:
            work(self.wait)
        except Interrupted:
            pass
        finally:
            self.reached.put("end")

    def wait(self, progress: Progress) -> None:
        self.reached.put(progress.what)
        if self.orders.get(timeout=60) == "stop":
            raise KeyboardInterrupt

    def go(self, steps: int) -> list[str]:
        """Lets some messages pass. Returns what the run has reached then; the last is not recorded yet."""
        found = [self.reached.get(timeout=60)]
        for _ in range(steps):
            self.orders.put("go")
            found.append(self.reached.get(timeout=60))
        self.reached.put(found[-1])  # it waits there still
        return found

    def finish(self, order: str = "go") -> None:
        for _ in range(20):
            self.orders.put(order)
        self.thread.join(timeout=60)
        assert not self.thread.is_alive()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PageServer]:
    (tmp_path / "runs").mkdir()
    made = make_server(Watcher([tmp_path / "runs"], "My runs"), "127.0.0.1", 0, "")
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def page(browser: Any, server: PageServer) -> Iterator[Any]:
    """The served page. Console messages, errors and requests elsewhere fail the test."""
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    problems: list[str] = []
    tab.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("request", lambda request: request.url.startswith(server.address) or problems.append(request.url))
    tab.goto(server.address)
    tab.evaluate("window.neverLoadedAgain = true")
    yield tab
    assert tab.evaluate("window.neverLoadedAgain") is True
    tab.close()
    assert problems == []


def begin(folder: Path, method: str = "promax", seed: int = 0) -> SteppedRun:
    """A run of three positions of two rounds; the first message is that of its warm-up."""
    flags = {"dataset": "digits", "setting": "severe", "method": method, "seed": seed}
    config = resolve(None, flags, [*SMALL, *SIZE])
    return SteppedRun(lambda observe: start(config, folder, folder.parent, observe))


def wait_for_text(page: Any, selector: str, text: str | re.Pattern[str]) -> None:
    page.locator(selector, has_text=text).first.wait_for(timeout=SECONDS)


def overflows(page: Any) -> bool:
    return page.evaluate("document.documentElement.scrollWidth") > page.viewport_size["width"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "cache"))


def test_a_run_is_followed_from_its_warm_up_to_its_end(page: Any, tmp_path: Path) -> None:
    assert page.locator("#now-empty").is_visible() and page.locator("#runs").is_hidden()
    folder = tmp_path / "runs" / "one"
    run = begin(folder)
    assert run.go(0) == ["warmup"]
    wait_for_text(page, CARD, "warm-up")
    assert page.inner_text(f"{CARD} .badge") == "running" and page.inner_text(f"{CARD} .value") == "–"
    assert page.inner_text("#count-running") == "1" and page.title() == "1 running · My runs"
    assert run.go(2) == ["warmup", "round", "round"]
    wait_for_text(page, f"{CARD} .where", "position 1 of 3, round 1 of 2")
    wait_for_text(page, f"{CARD} .left", "left")
    assert run.go(2)[-1] == "round"  # the first position is scored
    wait_for_text(page, f"{CARD} .value", NUMBER)
    assert 0 <= float(page.inner_text(f"{CARD} .value")) <= 100 and "kB" in page.inner_text(f"{CARD} .facts")
    run.finish("stop")
    wait_for_text(page, f"{CARD} .badge", "stopped")
    assert page.inner_text(f"{CARD} .advice code") == f"profcil resume {folder}"
    assert page.inner_text("#count-stopped") == "1" and page.locator(".ranked").count() == 0
    again = SteppedRun(lambda observe: resume(folder, None, observe))
    again.go(0)
    wait_for_text(page, f"{CARD} .badge", "running")
    again.finish()
    page.wait_for_selector(".ranked tbody tr", timeout=SECONDS)
    assert page.locator(CARD).count() == 0 and page.inner_text("#count-done") == "1"
    finished = page.inner_text("#now-finished-runs li b")
    assert finished == page.inner_text(".ranked td.faa b, .ranked td.faa span")
    assert page.locator("#summary tbody tr").count() == 1 and page.title() == "My runs"


def test_choices_stay_when_another_run_ends(page: Any, tmp_path: Path) -> None:
    for seed in (0, 1):
        begin(tmp_path / "runs" / f"fedavg-{seed}", "fedavg", seed).finish()
    wait_for_text(page, "#count-done", "2")
    page.locator("#summary tbody tr").nth(1).wait_for(timeout=SECONDS)
    page.select_option("#run-choice", label="fedavg-1")
    page.fill("#filter", "fedavg")
    page.locator("#summary th[data-key=faa] button").click()
    begin(tmp_path / "runs" / "another").finish()
    wait_for_text(page, ".ranked", "PRO-MAX")
    assert page.locator("#run-choice").evaluate("s => s.selectedOptions[0].text") == "fedavg-1"
    assert (
        page.locator("#summary tbody tr").count() == 2
        and page.locator("#summary th[data-key=faa]").get_attribute("aria-sort") == "descending"
    )
    assert page.locator("#run-choice option").count() == 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_live_view_fits_a_telephone(page: Any, tmp_path: Path, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    run = begin(tmp_path / "runs" / "a-run-with-quite-a-long-name-of-its-folder-that-must-not-widen-the-page")
    run.go(5)
    wait_for_text(page, f"{CARD} .value", NUMBER)
    for width in (420, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        box = page.locator(f"{CARD} .value").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["y"] < 900
        assert not overflows(page)
    run.finish("stop")
    wait_for_text(page, f"{CARD} .advice", "profcil resume")
    page.set_viewport_size({"width": 420, "height": 900})
    assert not overflows(page)


def test_a_server_that_is_gone_is_said(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    made = make_server(Watcher([tmp_path / "runs"]), "127.0.0.1", 0, "")
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    tab = browser.new_page()
    tab.goto(made.address)
    wait_for_text(tab, "#connection", "live")
    made.shutdown()
    made.server_close()
    wait_for_text(tab, "#connection", "has not answered")
    tab.close()
