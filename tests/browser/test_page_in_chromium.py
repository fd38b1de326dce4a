"""The page in a real browser: it renders, sorts, filters, reacts to mouse and keyboard, and makes no request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profcil.protocol.plan_making import make_plan
from profcil.protocol.settings import StreamSettings
from profcil.reporting.page.page import render_page, write_page
from profcil.runs.reader import load_run
from profcil.runs.results.store import add_runs, load_store

WIDE = (1280, 900)
NARROW = (420, 900)
SEEN = ".chart[data-which=seen][data-setting=severe]"
CURRENT = ".chart[data-which=current][data-setting=severe]"
BYTES = ".chart[data-which=bytes][data-setting=severe]"


@contextmanager
def opened(browser: Any, file: Path) -> Iterator[Any]:
    """An open page. Console messages, errors and requests fail the test."""
    tab = browser.new_page(viewport={"width": WIDE[0], "height": WIDE[1]})
    problems: list[str] = []
    tab.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("request", lambda request: request.url.startswith("file://") or problems.append(request.url))
    tab.goto(file.as_uri())
    tab.wait_for_selector("#summary tbody tr, #summary tbody:empty", state="attached")
    yield tab
    tab.close()
    assert problems == []


@pytest.fixture
def page(browser: Any, page_file: Path) -> Iterator[Any]:
    with opened(browser, page_file) as tab:
        tab.wait_for_selector(f"{SEEN} svg")
        yield tab


def column(page: Any, title: str) -> list[str]:
    heads = page.locator("#summary thead th").all_inner_texts()
    at = [head.strip() for head in heads].index(title) + 1
    return [text.strip() for text in page.locator(f"#summary tbody td:nth-child({at})").all_inner_texts()]


def known(texts: list[str]) -> list[float]:
    return [float(text) for text in texts if text != "–"]


def test_all_parts_are_rendered(page: Any) -> None:
    assert page.title() == "Runs & more" and page.inner_text("#counts").startswith(
        "6 runs, 1 of them unfinished: 2 methods"
    )
    assert page.locator("#summary tbody tr").count() == 6
    assert all(page.locator(f"{chart} g[data-label]").count() == 2 for chart in (SEEN, CURRENT, BYTES))
    assert page.locator("#heatmap tbody tr").count() == 3
    assert page.locator("#ledger .bar").count() == 2 and "model" in page.inner_text("#ledger")
    assert page.locator("#stream svg path").count() == 6  # busy and idle for three tasks
    assert "stream.task_size" in page.inner_text("#settings") and "torch" in page.inner_text("#environment")
    assert "half" in page.inner_text("#summary") and "unfinished: 2 of 3" in page.inner_text("#summary")


def ranking(page: Any, setting: str) -> list[list[str]]:
    rows = page.locator(f"article.ranked[data-setting='{setting}'] tbody tr")
    return rows.evaluate_all("rows => rows.map(row => [...row.cells].map(cell => cell.innerText.trim()))")


def test_the_page_begins_with_a_ranking(page: Any) -> None:
    rows = ranking(page, "severe")
    means = [float(row[2].split(" ± ")[0]) for row in rows]
    assert sorted(row[1] for row in rows) == ["FedAvg", "PRO-MAX"] and means == sorted(means, reverse=True)
    assert [row[0] for row in rows] == ["1", "2"] and {row[6] for row in rows} == {"2"}
    bold = page.locator("article.ranked[data-setting=severe] td.faa b").all_inner_texts()
    assert [float(text) for text in bold] == [max(means)]
    first = page.locator("main h2").first
    assert first.inner_text() == "Which method is best?" and first.bounding_box()["y"] < 300
    assert rows[0][1] in page.inner_text("article.ranked[data-setting=severe] .verdict")


def test_metrics_are_explained_on_hover_and_in_a_line(page: Any) -> None:
    for name in ("FAA", "CTA", "AF", "NormComm"):
        about = page.locator(".ranked abbr", has_text=name).first.get_attribute("title")
        assert len(about) > 30 and about in page.inner_text("#definitions")


def test_a_method_has_one_colour_in_all_charts(page: Any) -> None:
    fills = page.evaluate(
        "[...document.querySelectorAll('.chart g[data-label=\\'PRO-MAX\\']')]"
        ".map(g => getComputedStyle(g.querySelector('path:last-child')).stroke)"
    )
    assert len(fills) >= 4 and len(set(fills)) == 1  # bytes, seen, current and alignment
    others = page.evaluate(
        "[...document.querySelectorAll('.chart g[data-label=FedAvg]')]"
        ".map(g => getComputedStyle(g.querySelector('path:last-child')).stroke)"
    )
    assert len(set(others)) == 1 and set(others) != set(fills)


def test_two_runs_are_chosen_by_clicking(page: Any) -> None:
    page.get_by_label("compare promax-0 as A").click()
    page.get_by_label("compare fedavg-1 as B").click()
    assert page.inner_text("#picked").startswith("A: promax-0, B: fedavg-1")
    assert page.inner_text("#first-name").startswith("A: promax-0") and "fedavg-1" in page.inner_text("#second-name")
    assert page.locator("#first-heatmap tbody tr").count() == page.locator("#second-heatmap tbody tr").count() == 3
    assert page.get_by_label("compare promax-0 as A").get_attribute("aria-pressed") == "true"


def test_the_stream_has_axes(page: Any) -> None:
    page.select_option("#run-choice", label="<b>odd")
    texts = page.locator("#stream svg text").all_text_contents()
    assert "client" in texts and {"1", "2", "3"} <= set(texts)


def test_accuracy_is_visible_on_a_telephone(page: Any) -> None:
    page.set_viewport_size({"width": NARROW[0], "height": NARROW[1]})
    for cell in ("article.ranked td.faa", "#summary tbody td:nth-child(2)"):
        box = page.locator(cell).first.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= NARROW[0]


def test_tables_are_not_clipped_at_1280(page: Any) -> None:
    clipped = page.evaluate(
        "[...document.querySelectorAll('#rankings .scroll, #runs .scroll')]"
        ".filter(e => e.scrollWidth > e.clientWidth).map(e => e.getAttribute('aria-label'))"
    )
    assert clipped == []


def test_labels_of_points_are_inside_the_chart(page: Any) -> None:
    for size in (WIDE, NARROW):
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.wait_for_timeout(200)
        outside = page.evaluate(
            "[...document.querySelectorAll('.chart[data-which=bytes] svg')].flatMap(s => {"
            " const frame = s.getBoundingClientRect();"
            " return [...s.querySelectorAll('text')].filter(t => { const b = t.getBoundingClientRect();"
            " return b.left < frame.left - 1 || b.right > frame.right + 1; }).map(t => t.textContent); })"
        )
        assert outside == []


def test_markup_in_the_data_is_shown_as_text(page: Any) -> None:
    assert page.locator("img, #notes i, #summary b").count() == 0
    assert "<b>odd" in page.inner_text("#summary")
    assert "</script><img src=x" in page.inner_text("#summary") and "<i>nothing</i>" in page.inner_text("#notes")


def test_a_click_sorts_and_a_second_reverses(page: Any) -> None:
    head = page.locator("#summary th[data-key=faa]")
    assert head.get_attribute("aria-sort") == "none"
    head.locator("button").click()
    down = column(page, "FAA")
    assert head.get_attribute("aria-sort") == "descending" and known(down) == sorted(known(down), reverse=True)
    assert down[-1] == "–"  # unknown values come last
    head.locator("button").click()
    up = column(page, "FAA")
    assert head.get_attribute("aria-sort") == "ascending" and known(up) == sorted(known(up)) and up[-1] == "–"
    page.locator("#summary th[data-key=method] button").click()
    assert column(page, "method") == sorted(column(page, "method")) and head.get_attribute("aria-sort") == "none"


def test_columns_can_be_sorted_by_keyboard(page: Any) -> None:
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.closest('th')?.dataset.key") == "cta":
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    assert page.locator("#summary th[data-key=cta]").get_attribute("aria-sort") == "descending"
    assert known(column(page, "CTA")) == sorted(known(column(page, "CTA")), reverse=True)
    page.keyboard.press("Space")
    assert page.locator("#summary th[data-key=cta]").get_attribute("aria-sort") == "ascending"


def test_all_words_of_the_filter_must_match(page: Any) -> None:
    page.fill("#filter", "PROMAX")
    assert set(column(page, "method")) == {"PRO-MAX"} and page.inner_text("#shown") == "3 of 6 shown"
    page.fill("#filter", "promax seed1")
    assert column(page, "run") == ["promax-1"]
    page.fill("#filter", "unfinished")
    assert column(page, "run") == ["half"]
    page.fill("#filter", "no such run")
    assert column(page, "run") == [] and page.inner_text("#shown") == "0 of 6 shown"
    page.fill("#filter", "")
    assert len(column(page, "run")) == 6


def test_seeds_can_be_averaged(page: Any) -> None:
    page.fill("#filter", "promax seed0")
    one = float(column(page, "FAA")[0])
    page.fill("#filter", "promax seed1")
    other = float(column(page, "FAA")[0])
    page.fill("#filter", "promax")
    page.check("#average")
    (text,) = column(page, "FAA")
    mean, spread = (float(part) for part in text.split(" ± "))
    assert mean == pytest.approx((one + other) / 2, abs=0.11)
    assert spread == pytest.approx(abs(one - other) / 2**0.5, abs=0.15)


def test_curves_show_values_by_mouse_and_keyboard(page: Any) -> None:
    chart = page.locator(f"{SEEN} svg")
    box = chart.bounding_box()
    chart.hover(position={"x": box["width"] - 20, "y": 80})
    tip = page.locator(f"{SEEN} .tip")
    assert "position 3" in tip.inner_text() and "PRO-MAX" in tip.inner_text() and "±" in tip.inner_text()
    page.mouse.move(0, 0)
    assert not tip.is_visible()
    chart.focus()
    page.keyboard.press("ArrowRight")
    assert "position 1" in tip.inner_text()
    page.keyboard.press("End")
    assert "position 3" in tip.inner_text()
    final = page.evaluate("DATA.groups.find(g => g.label === 'PRO-MAX').seen.mean.at(-1)")
    assert f"{final:.1f}" in tip.inner_text()
    page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_the_legend_hides_and_shows_lines(page: Any) -> None:
    button = page.locator("#legend button", has_text="FedAvg")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    for chart in (CURRENT, BYTES):
        shown = page.locator(f"{chart} g[data-label]").evaluate_all("all => all.map(g => g.dataset.label)")
        assert shown == ["PRO-MAX"]
    button.click()
    assert page.locator(f"{CURRENT} g[data-label]").count() == 2


def test_a_run_can_be_opened_from_the_table(page: Any) -> None:
    page.locator("#summary tbody button", has_text="half").click()
    assert page.locator("#run-choice").evaluate("s => s.selectedOptions[0].text") == "half"
    assert "2 of 3 positions" in page.inner_text("#run-state")
    assert page.locator("#heatmap td.none").count() >= 3
    assert page.evaluate("scrollY") > 0


def test_the_stream_describes_a_cell(page: Any) -> None:
    page.select_option("#run-choice", label="<b>odd")
    plan = page.evaluate("({ rows: plan.rows, tasks: plan.tasks })")
    assert len(plan["rows"]) == 100 and page.locator("#stream svg *").count() < 60  # light for a hundred clients
    page.locator("#stream svg").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    code = plan["rows"][1][1]
    task = code if code >= 0 else -1 - code
    text = page.inner_text("#stream-readout")
    assert f"client 1, position 2: task {task + 1} (classes {', '.join(map(str, plan['tasks'][task]))})" in text
    assert ("idle" in text) == (code < 0)


def test_two_runs_are_compared(page: Any) -> None:
    page.select_option("#first", label="promax-0")
    page.select_option("#second", label="promax-1")
    rows = {r.split("\t")[1]: r.split("\t")[2:] for r in page.locator("#difference tbody tr").all_inner_texts()}
    assert rows["seed"] == ["0", "1"] and "params.noise" not in rows and "FAA" in rows
    page.check("#same")
    assert "params.noise" in page.inner_text("#difference")
    assert page.locator("#difference tr.changed").count() == len(rows)


@pytest.mark.parametrize("size", [WIDE, NARROW])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_the_window(page: Any, size: tuple[int, int], scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": size[0], "height": size[1]})
    page.select_option("#run-choice", label="<b>odd")
    page.wait_for_function("w => document.querySelector('.chart svg').clientWidth <= w", arg=size[0])
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    assert dark == (scheme == "dark")
    small = page.evaluate(
        "[...document.querySelectorAll('td, th, button, p, svg text')].filter(e => e.textContent.trim())"
        ".filter(e => parseFloat(getComputedStyle(e).fontSize) < 12).length"
    )
    assert small == 0


def test_a_page_of_one_unfinished_run_with_many_clients(browser: Any, page_file: Path, tmp_path: Path) -> None:
    plan = make_plan(np.arange(9000) % 10, 10, StreamSettings(1000, 10, 3, support=0.4, coverage=0.5, disorder=0.6), 0)
    write_page(tmp_path / "one.html", render_page([replace(load_run(page_file.parent / "half"), plan=plan)]))
    with opened(browser, tmp_path / "one.html") as tab:
        assert "No run is finished yet" in tab.inner_text("#no-answer") and not tab.is_visible("#bytes")
        assert tab.inner_text("#counts") == "1 run, 1 of them unfinished: 1 method, 1 dataset, 1 seed"
        cells = tab.locator("#stream rect").count()
        assert 3 <= cells <= 18 and "shares of 1000 clients" in tab.inner_text("#stream-readout")
        widths = tab.locator("#stream rect").evaluate_all("all => all.map(r => r.width.baseVal.value)")
        box = tab.locator("#stream svg").bounding_box()["width"] - 44
        assert sum(widths) == pytest.approx(3 * box, rel=0.01)  # every client in every row
        tab.check("#average")
        assert tab.inner_text("#shown") == "0 of 0 shown"


def test_rows_of_a_results_store_are_shown_without_their_stream(browser: Any, page_file: Path, tmp_path: Path) -> None:
    folders = [load_run(page_file.parent / name) for name in ("fedavg-0", "promax-1")]
    add_runs(folders, tmp_path / "store")
    fedavg, promax = load_store(tmp_path / "store")
    write_page(tmp_path / "page.html", render_page([folders[0], promax, fedavg]))
    with opened(browser, tmp_path / "page.html") as tab:
        assert tab.locator("#summary tbody tr").count() == 3 and tab.locator("#stream svg path").count() == 6
        tab.select_option("#run-choice", "1")
        assert tab.locator("#stream svg").count() == 0
        assert "results store, which has no plan" in tab.inner_text("#stream-readout")
        assert tab.locator("#heatmap tbody tr").count() == 3 and "model" in tab.inner_text("#ledger")
        tab.set_viewport_size({"width": NARROW[0], "height": NARROW[1]})  # a resize draws the stream again
        tab.select_option("#run-choice", "2")
        assert tab.locator("#stream svg path").count() == 6  # a folder on the page has the same plan


def test_the_ranking_is_not_clipped_on_a_telephone(page: Any) -> None:
    page.set_viewport_size({"width": NARROW[0], "height": NARROW[1]})
    page.wait_for_timeout(200)
    for card in page.locator("#rankings .scroll").all()[:1]:
        assert card.evaluate("e => e.scrollWidth <= e.clientWidth + 1")
        assert "NormComm" in card.inner_text()


def test_a_privacy_budget_has_a_column_and_an_explanation(browser: Any, page_file: Path, tmp_path: Path) -> None:
    runs = [load_run(page_file.parent / name) for name in ("fedavg-0", "promax-0")]
    runs[1] = replace(runs[1], facts={**runs[1].facts, "privacy": {"epsilon": 4.0}})
    write_page(tmp_path / "private.html", render_page(runs))
    with opened(browser, tmp_path / "private.html") as tab:
        table = tab.locator(".ranked table").first
        heads = table.locator("th").all_inner_texts()
        row = table.locator("tbody tr", has_text="PRO-MAX").locator("td").all_inner_texts()
        assert row[heads.index("ε")].strip() == "4.00" and "dropped" not in heads
        assert "budget" in tab.inner_text("#definitions")
