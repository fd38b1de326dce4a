"""Draws every figure and photographs the page and the live view: `python docs/gallery.py build/gallery`.

The runs are small ones on digits, computed here (about two minutes on two cores) and kept, so that nothing is a made-up
number. The screenshots need Chromium; without it only the figures are drawn.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import profcil
from profcil.cli.main import main
from profcil.engine.recorder import Progress
from profcil.engine.run import Interrupted, start
from profcil.live.server import make_server
from profcil.live.watcher import Watcher
from profcil.reporting.figures import FIGURES, make_figure
from profcil.reporting.page.page import render_page, write_page
from profcil.resolve import resolve
from profcil.runs.gather import load_runs

METHODS = ["fedavg", "fedcbdr", "pro", "promax", "prolin"]
SHORT = {"train.rounds": 4, "train.epochs": 2, "warmup.rounds": 3}
WIDTHS = (1280, 420)
SCHEMES = ("light", "dark")
WEAK: dict[str, Any] = {
    "title": "A weak task, for the figures about memories",
    "datasets": ["digits"],
    "methods": ["pro", "promax"],
    "seeds": [0, 1],
    "diagnose": True,
    "set": ["keep_memories=true", "train.rounds=3", "train.epochs=1", "warmup.rounds=2"],
    "variants": [
        {"name": "clean"},
        {"name": "mild", "set": ["weak_task=2", "weak_strength=mild"]},
        {"name": "severe", "set": ["weak_task=2", "weak_strength=severe"]},
    ],
}
SHOWN = {"page": ("profcil report", "the page"), "live": ("profcil serve", "the page while a run is computed")}
OF_ONE_RUN = {"snapshots": "snapshots.npz", "embedding": "replay.npz"}  # figure: what it is drawn from


def make_gallery(out: Path) -> None:
    """Runs, figures, screenshots, and a list of the pictures. Finished runs are reused."""
    runs = compute_runs(out / "runs")
    pictures = draw_figures(runs, out)
    pictures += take_screenshots(runs, out)
    (out / "pictures.json").write_text(json.dumps(pictures, indent=1) + "\n", encoding="utf-8")
    print(f"{out}: {len(pictures)} pictures")


def compute_runs(out: Path) -> Path:
    """A comparison of five methods, and a study with a weak task."""
    several = {"method": METHODS, "setting": ["severe", "homogeneous"], "seed": [0, 1, 2]}
    methods = profcil.sweep("digits", settings=SHORT, out=out / "methods", jobs=2, **several)
    weak = profcil.study(WEAK, out=out / "weak", jobs=2)
    if failed := {**methods.failures, **weak.failures}:
        raise SystemExit(f"{len(failed)} runs of the gallery failed: {failed}")
    one = next((out / "methods").glob("digits-homogeneous-promax-seed0-*/run.json"))
    main(["eval", str(one.parent), "--confusion", str(out / "PRO-MAX.csv")])
    return out


def draw_figures(runs: Path, out: Path) -> list[dict[str, str]]:
    """Every figure as PNG."""
    pictures = []
    for name, (_, about) in FIGURES.items():
        make_figure(name, [str(path) for path in inputs_of(name, runs)], out, ["png"], print)
        pictures.append({"file": f"{name}.png", "title": f"profcil figure {name}", "about": about})
    return pictures


def inputs_of(name: str, runs: Path) -> list[Path]:
    if name == "mismatch":
        return [runs / "weak"]
    if name == "confusion":
        return [runs / "PRO-MAX.csv"]
    if name in OF_ONE_RUN:
        files = sorted((runs / "weak").glob(f"*-promax-*/{OF_ONE_RUN[name]}"))
        return [files[0].parent]
    return [runs / "methods"]


def take_screenshots(runs: Path, out: Path) -> list[dict[str, str]]:
    """The page and the live view, wide and narrow, light and dark. Nothing without Chromium."""
    with chromium() as browser:
        if browser is None:
            print("no screenshots: they need playwright and Chromium")
            return []
        page = out / "page.html"
        write_page(page, render_page(load_runs([str(runs / "methods")], print), "Five methods on digits", []))
        pictures = photograph(browser, page.as_uri(), "page", ".ranked tbody tr", out)
        with live_view(runs) as address:
            return pictures + photograph(browser, address, "live", "article.now .value", out)


@contextmanager
def chromium() -> Iterator[Any]:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        found = None
    if found is None:
        yield None
        return
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def photograph(browser: Any, address: str, name: str, visible: str, out: Path) -> list[dict[str, str]]:
    """The whole page in every width and colour scheme, once something is visible."""
    pictures = []
    for width in WIDTHS:
        for scheme in SCHEMES:
            tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            tab.goto(address)
            tab.wait_for_selector(visible)
            tab.wait_for_timeout(500)
            file = f"{name}-{width}-{scheme}.png"
            tab.screenshot(path=out / file, full_page=True)
            tab.close()
            title, about = SHOWN[name]
            how = f"{width} pixels wide, {scheme}"
            pictures.append({"file": file, "title": f"{title}, {how}", "about": f"{about}, {how}"})
    return pictures


@contextmanager
def live_view(runs: Path) -> Iterator[str]:
    """The address of a live view of the runs and of one that is being computed."""
    folder = runs / "methods" / "digits-severe-promax-seed7"
    shutil.rmtree(folder, ignore_errors=True)
    reached = threading.Event()
    leave = threading.Event()

    def observe(progress: Progress) -> None:
        if progress.what == "round" and progress.when.position >= 2:
            reached.set()
            leave.wait()
            raise KeyboardInterrupt

    def compute() -> None:
        config = resolve(None, {"dataset": "digits", "method": "promax", "seed": 7}, [])
        with suppress(Interrupted):
            start(config, folder, runs, observe)

    worker = threading.Thread(target=compute)
    worker.start()
    reached.wait(300)
    server = make_server(Watcher([runs / "methods"], "Runs on digits"), "127.0.0.1", 0, "")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.address
    server.shutdown()
    server.server_close()
    leave.set()
    worker.join()
    shutil.rmtree(folder)


if __name__ == "__main__":
    make_gallery(Path(sys.argv[1] if len(sys.argv) > 1 else "build/gallery").resolve())
