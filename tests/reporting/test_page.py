"""The HTML page as a file: self-contained, without invented numbers, and safe for any name of a run."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_runs import command, unfinish

from profcil.errors import RunFolderError
from profcil.io.atomic_files import write_text
from profcil.metrics.scores import Scores
from profcil.protocol.plan_making import make_plan
from profcil.protocol.settings import StreamSettings
from profcil.reporting.looks import LOOKS
from profcil.reporting.page.data import MAX_CLIENT_ROWS, describe_plan, page_data, short_names
from profcil.reporting.page.page import HERE, LIVE_SCRIPTS, embed_json, render_page, write_page
from profcil.runs.reader import Run, load_run, summarise_run
from profcil.runs.results.store import add_runs, load_store

HOSTILE = "</script><script>alert(1)</script><!-- & \u2028 'quoted'"


@pytest.fixture(scope="module")
def loaded(runs: Path) -> list[Run]:
    return [load_run(path) for path in sorted(runs.glob("*-*"))]


def data_in(page: str) -> dict:
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0], parse_constant=pytest.fail)


def test_the_page_loads_nothing_else(loaded: list[Run]) -> None:
    page = render_page(loaded)
    assert re.findall(r"https?://[^\s\"']+", page) == ["http://www.w3.org/2000/svg"]  # a name, not an address
    assert not re.search(r"<link|@import|url\(|\bsrc=|fetch\(|XMLHttpRequest|import\(", page)
    assert "default-src 'none'" in page and "@@" not in page
    assert render_page(loaded) == page


def test_the_page_has_the_numbers_of_the_runs(loaded: list[Run]) -> None:
    data = data_in(render_page(loaded))
    assert data == json.loads(json.dumps(page_data(loaded)))
    for shown, run in zip(data["runs"], loaded, strict=True):
        expected = summarise_run(run)
        assert all(shown[key] == expected[key] for key in ("faa", "cta", "af", "bytes_up", "seconds"))
        both = [sum(e[part] for e in shown["ledger"]) for part in ("stream", "warmup")]
        assert both == [run.bytes("up") + run.bytes("down"), run.ledger.total(stage="warmup")]
        assert shown["config"]["stream.task_size"] == 3 and shown["environment"]["torch"]
    groups = {g["label"]: g for g in data["groups"]}
    mean = np.mean([summarise_run(run)["faa"] for run in loaded if run.config["method"] == "promax"])
    assert groups["PRO-MAX"]["seeds"] == [0, 1] and groups["PRO-MAX"]["seen"]["mean"][-1] == pytest.approx(
        mean, abs=1e-3
    )
    assert data["runs"][0]["norm_comm"] == 1.0 and len(data["plans"]) == 2  # one plan per seed, shared by methods


def test_groups_are_ranked_by_mean_accuracy_and_named_for_people(loaded: list[Run]) -> None:
    data = page_data(loaded)
    titles = [group["title"] for group in data["groups"]]
    means = [group["values"]["faa"]["mean"] for group in data["groups"]]
    assert sorted(titles) == ["FedAvg", "PRO-MAX"] and means == sorted(means, reverse=True)
    assert "faa" in data["groups"][0]["best"] and "faa" not in data["groups"][1]["best"]
    assert {name["short"] for name in data["names"].values()} == {"FAA", "CTA", "AF", "NormComm"}


def test_forgetting_by_task_is_the_best_accuracy_minus_the_final_one(loaded: list[Run]) -> None:
    runs = [run for run in loaded if run.config["method"] == "fedavg"]
    (group,) = page_data(runs)["groups"]
    lost = []
    for run in runs:
        percent = np.where(run.scores.correct >= 0, 100 * run.scores.correct / run.scores.total, np.nan)
        lost.append(np.nanmax(percent, axis=0) - percent[-1])
    assert group["forgetting"]["mean"] == pytest.approx(np.mean(lost, axis=0), abs=1e-3)
    assert max(group["forgetting"]["mean"]) > 10  # FedAvg forgets


def test_rows_imported_without_scores_are_ranked_too(loaded: list[Run], tmp_path: Path) -> None:
    add_runs(loaded, tmp_path)
    stored = load_store(tmp_path)
    bare = replace(stored[0], scores=Scores(np.zeros(0), np.zeros(0)), values={**stored[0].values, "scores": None})
    data = page_data([bare, *stored[1:]])
    assert data["runs"][0]["tasks"] == [] and data["runs"][0]["faa"] == stored[0].values["faa"]
    group = next(group for group in data["groups"] if 0 in group["members"])
    assert group["seen"] is None and group["values"]["faa"] is not None


def test_the_page_contains_no_path_of_the_machine(loaded: list[Run]) -> None:
    assert loaded[0].facts["data_dir"] not in render_page(loaded)


def test_names_cannot_inject_markup(loaded: list[Run]) -> None:
    run = replace(
        loaded[0], config={**loaded[0].config, "setting": HOSTILE, "params": {"note": HOSTILE, "@@DATA@@": 1}}
    )
    page, plain = render_page([run], HOSTILE, [HOSTILE]), render_page([loaded[0]])
    assert page.count("</script") == plain.count("</script") == 2
    assert page.count("<script") == 2 and "<!--" not in page.replace("&lt;!--", "")
    data = data_in(page)
    assert data["runs"][0]["config"]["params.note"] == HOSTILE and data["notes"] == [HOSTILE]
    assert data["runs"][0]["config"]["params.@@DATA@@"] == 1


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError):
        embed_json({"x": float("nan")})


def test_names_are_short_and_unique(loaded: list[Run]) -> None:
    paths = ["a/digits-seed0-0123456789abcdef", "a/x-0123456789abcdef", "b/x-fedcba9876543210", "a/same", "b/same"]
    named = short_names([replace(loaded[0], path=Path(p)) for p in paths])
    assert named == ["digits-seed0", "x-0123456789abcdef", "x-fedcba9876543210", "a/same", "b/same"]


def test_unfinished_runs_are_shown_without_results(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = unfinish(runs / "promax-0", tmp_path / "half")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.toml").write_text("method =")
    out = tmp_path / "page.html"
    line = [str(runs / "fedavg-0"), str(half), str(tmp_path / "broken"), "--out", str(out)]
    assert command("report", *line) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{out}: 2 runs\n" and printed.err.count("\n") == 1 and "broken/config.toml" in printed.err
    data = data_in(out.read_text())
    shown = data["runs"][1]
    assert (shown["done"], shown["played"], shown["faa"]) == (False, 2, None)
    assert shown["tasks"][-1] == [None] * 3 and shown["tasks"][0] != [None] * 3
    assert [g["label"] for g in data["groups"]] == ["FedAvg"] and data["notes"] == [printed.err.strip()]


def test_without_a_readable_run_there_is_an_error_and_no_file(tmp_path: Path, runs: Path) -> None:
    out = tmp_path / "page.html"
    with pytest.raises(RunFolderError, match="does not exist"):
        command("report", str(tmp_path / "nowhere"), "--out", str(out))
    with pytest.raises(RunFolderError, match="none of the 2 folders"):
        command("report", str(tmp_path / "nowhere"), str(tmp_path), "--out", str(out))
    with pytest.raises(RunFolderError, match="is a folder"):
        command("report", str(runs), "--out", str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be written"):
        command("report", str(runs), "--out", str(tmp_path / "file" / "page.html"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def severe(clients: int) -> StreamSettings:
    return StreamSettings(clients, 10, 2, support=0.4, coverage=0.5, disorder=0.6)


def test_the_stream_has_every_client_and_marks_idle_ones() -> None:
    plan = make_plan(np.arange(4000) % 10, 10, severe(100), 0)
    rows = np.array(describe_plan(plan)["rows"])
    assert rows.shape == (100, 5) and (np.where(rows < 0, -1 - rows, rows) == plan.orders).all()
    idle = sum(len(plan.samples(c, p)) == 0 for c in range(100) for p in range(5))
    assert (rows < 0).sum() == idle > 0
    assert len(json.dumps(describe_plan(plan))) < 3000


def test_many_clients_are_counted_instead_of_listed() -> None:
    plan = make_plan(np.arange(50_000) % 10, 10, severe(5000), 0)
    shown = describe_plan(plan)
    assert plan.clients > MAX_CLIENT_ROWS and "rows" not in shown and len(json.dumps(shown)) < 2000
    for position, tally in enumerate(shown["tally"]):
        assert sum(tally["busy"]) == len(plan.active(position)) and sum(tally["busy"]) + sum(tally["idle"]) == 5000
        assert np.array_equal(np.add(tally["busy"], tally["idle"]), np.bincount(plan.orders[:, position], minlength=5))


def schemes() -> dict[str, dict[str, str]]:
    css = (HERE / "style.css").read_text()
    light, dark = (
        dict(re.findall(r"--(\w+): (#\w{6});", block)) for block in re.findall(r":root \{(.*?)\}", css, re.S)
    )
    return {"light": light, "dark": dark}


def contrast(a: str, b: str) -> float:
    """The contrast ratio of two colours, as the WCAG defines it."""

    def luminance(colour: str) -> float:
        parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    low, high = sorted([luminance(a), luminance(b)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_enough_contrast(scheme: str) -> None:
    colours = schemes()[scheme]
    assert len(colours) == 16
    for text in ("ink", "soft", "accent", "warn", "good"):
        for background in ("paper", "panel"):
            assert contrast(colours[text], colours[background]) >= 4.5, (text, background)
    assert contrast(colours["ink"], colours["mark"]) >= 4.5
    assert all(contrast(colours[f"s{i}"], colours["paper"]) >= 3 for i in range(7))
    assert all(contrast(getattr(look, scheme), colours["paper"]) >= 3 for look in LOOKS.values())


def test_every_script_is_included() -> None:
    assert sorted(p.name for p in HERE.glob("*.js")) == sorted(LIVE_SCRIPTS)


@pytest.mark.parametrize("write", [write_page, write_text])
def test_a_device_or_a_pipe_is_written_to_and_not_replaced(tmp_path: Path, write) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # so that opening it for writing does not wait
    write(pipe, "<html>")
    assert pipe.is_fifo()
    assert os.read(reader, 100) == b"<html>"
    os.close(reader)
    assert list(tmp_path.iterdir()) == [pipe]


def test_budget_and_dropped_replies_are_on_the_page_where_a_run_has_them(loaded: list[Run]) -> None:
    private = replace(loaded[0], facts={**loaded[0].facts, "privacy": {"epsilon": 4.0}})
    data = page_data([private, *loaded[1:]])
    groups = {group["label"]: group["values"]["epsilon"] for group in data["groups"]}
    assert data["names"]["epsilon"]["short"] == "ε" and "dropped" not in data["names"]
    assert groups["PRO-MAX"] is None
    assert "epsilon" not in page_data(loaded)["names"]
