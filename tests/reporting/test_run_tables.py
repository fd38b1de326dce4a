"""Rows and tables of runs, on synthetic runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
from made_runs import unfinish

from profcil.errors import ConfigError
from profcil.metrics.ledger import Ledger
from profcil.metrics.scores import Scores
from profcil.protocol.plan_making import make_plan
from profcil.protocol.settings import StreamSettings
from profcil.reporting.tables import compare, execution_lines, render, text_table
from profcil.runs import reader
from profcil.runs.reader import Run, load_run, summarise_run
from profcil.runs.results.store import add_runs, load_store


def make_run(method: str, seed: int = 0, up: int = 100, done: bool = True, right: int = 4, **config: object) -> Run:
    plan = make_plan(np.arange(40) % 4, 4, StreamSettings(2, 2, 2), seed)
    ledger = Ledger()
    ledger.record("warmup", 0, 0, 0, "up", {"model": 10**9})
    ledger.record("round", 0, 0, 0, "up", {"model": up})
    ledger.record("refresh", 0, 0, 0, "down", {"memory": 50})
    scores = Scores(np.array([[right, -1], [2, right]]), np.array([10, 10]))
    names = {"method": method, "dataset": "d", "setting": "severe", "seed": seed}
    names |= {"stream": {"clients": 2}, "train": {"rounds": 1}, "model": {}, **config}
    facts = {"done": done, "seconds": 1.5, "warmup_seconds": 0.5, "peak_memory_mb": 7.0}
    return Run(Path(f"{method}{seed}"), names, facts, scores, ledger, plan)


def test_a_summary_excludes_the_warm_up_and_recomputes_the_metrics() -> None:
    r = summarise_run(make_run("pro"))
    assert (r["bytes_up"], r["bytes_down"]) == (100, 50)
    assert (r["faa"], r["cta"], r["af"]) == pytest.approx((30.0, 40.0, 20.0))
    assert r["server_memory_bytes"] is None  # unknown, not zero


def test_an_unfinished_run_has_no_numbers_and_is_no_reference() -> None:
    rows = compare([make_run("fedavg", done=False), make_run("pro")])
    assert all(rows[0][key] is None for key in ("faa", "cta", "af", "bytes_up", "seconds", "norm_comm"))
    assert rows[1]["norm_comm"] is None and rows[1]["faa"] is not None


def test_norm_comm_prefers_the_same_seed_to_the_mean() -> None:
    runs = [
        make_run("fedavg", 0, up=50),
        make_run("fedavg", 1, up=250),
        make_run("pro", 1, up=550),
        make_run("pro", 2, up=350),
    ]
    assert [r["norm_comm"] for r in compare(runs)] == [1.0, 1.0, 2.0, 2.0]
    other = make_run("fedavg", 1, setting="homogeneous")
    assert compare([other, make_run("pro", 1)])[1]["norm_comm"] is None
    longer = make_run("fedavg", 1, train={"rounds": 2})
    assert compare([longer, make_run("pro", 1)])[1]["norm_comm"] is None


def test_settings_without_effect_on_traffic_do_not_hide_norm_comm() -> None:
    cosine, wide = ({"width": w, "head": head} for w, head in ((8, "cosine"), (16, "linear")))
    runs = [
        make_run("fedavg", model=cosine),
        make_run("pro", model={"width": 8, "head": "linear"}),
        make_run("pro", model=wide),
    ]
    assert [r["norm_comm"] for r in compare(runs)] == [1.0, 1.0, None]


def test_a_setting_of_the_stream_that_an_older_version_lacks_does_not_hide_norm_comm() -> None:
    older = make_run("pro", stream={"clients": 2})
    rare = make_run("pro", stream={"clients": 2, "rare": 0.5})
    runs = [make_run("fedavg", stream={"clients": 2, "rare": 0.0, "rare_examples": 3}), older, rare]
    assert [r["norm_comm"] for r in compare(runs)] == [1.0, 1.0, None]


def test_only_seeds_of_the_same_settings_are_averaged() -> None:
    runs = [
        make_run("pro", 0, right=4),
        make_run("pro", 1, right=6),
        make_run("pro", 1, right=9, params={"noise": 1.0}),
    ]
    lines = render(runs).splitlines()
    values = [summarise_run(run)["faa"] for run in runs[:2]]
    assert len(lines) == 5 and f"{fmean(values):.2f} ± {stdev(values):.2f}" in lines[-1]


def test_the_same_seed_twice_has_no_mean_row() -> None:
    assert "mean of" not in render([make_run("pro"), make_run("pro")])


def test_clients_and_transfer_are_shown_on_demand() -> None:
    runs = [make_run("pro", 0), make_run("pro", 1)]
    assert "worst client" not in render(runs)
    head, *lines = render(runs, further=True).splitlines()
    titles = ["FAA", "CTA", "AF", "worst client", "client sd", "BWT", "FWT", "NormComm"]
    assert [head.index(title) for title in titles] == sorted(head.index(title) for title in titles)
    assert f"{runs[0].further_metrics['worst_client']:.2f}" in lines[0] and "mean of 2" in lines[-1]


def test_unfinished_runs_are_shown_and_not_averaged() -> None:
    text = render([make_run("pro", 0), make_run("pro", 1, done=False)])
    assert text.count("unfinished") == 1 and "mean of" not in text


def test_tables_are_never_cut_and_markup_is_shown_as_text() -> None:
    lines = text_table(["a", "[b]"], [["x" * 500, "[red]y[/red]"]]).splitlines()
    assert lines[1].split() == ["x" * 500, "[red]y[/red]"] and "[b]" in lines[0]


def test_on_a_terminal_only_long_texts_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    lines = text_table(["method", "title"], [["fedavg", "word " * 40]]).splitlines()
    assert len(lines) > 3 and max(map(len, lines)) <= 60
    names = [f"column{i}" for i in range(13)]
    assert text_table(names, [names]).splitlines()[1].split() == names


def test_folding_loses_no_character_and_breaks_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    row = [
        "params.shrink_deployed",
        '"decoupled"',
        "decoupled, coupled or neither",
        "how old memory follows the base " * 3,
    ]
    lines = text_table(["setting", "default", "allowed", "help"], [row]).splitlines()[1:]
    assert max(map(len, lines)) <= 80
    assert sorted(" ".join(lines).split()) == sorted(" ".join(row).split())


def test_on_a_narrow_terminal_some_columns_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run("pro", seed, right=4 + seed) for seed in (0, 1)]
    assert "peak MB" in render(runs).splitlines()[0]  # all columns in a pipe
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    lines = render(runs).splitlines()
    assert max(map(len, lines)) <= 80 and lines[0] == "d, severe"
    assert "FAA" in lines[1] and "peak MB" not in lines[1] and "peak MB" in lines[-1]
    assert f"{fmean([summarise_run(run)['faa'] for run in runs]):.2f} ±" in lines[-2]


def test_a_run_prints_a_few_lines(runs: Path) -> None:
    run = load_run(runs / "promax-0")
    text = repr(run)
    assert len(text) < 500 and len(text.splitlines()) == 6
    assert "promax on digits, severe, seed 0" in text and f"FAA {run.metrics['faa']:.2f}" in text
    assert str(run.path) in text and "MB down" in text
    html = replace(run, path=Path("<b>"))._repr_html_()
    assert html.startswith("<table>") and "&lt;b&gt;" in html and "<b>" not in html


def test_an_unfinished_run_prints_how_far_it_got(runs: Path, tmp_path: Path) -> None:
    assert "2 of 3 positions" in repr(load_run(unfinish(runs / "promax-0", tmp_path / "half")))


def test_a_stored_run_prints_a_few_lines_too(runs: Path, tmp_path: Path) -> None:
    add_runs([load_run(runs / "promax-0")], tmp_path)
    (stored,) = load_store(tmp_path)
    assert len(repr(stored)) < 500 and "finished" in repr(stored)


def test_scores_as_a_frame(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pandas one sentence; with it, here a stand-in, percent by position and task from 1."""
    run = load_run(runs / "promax-0")
    monkeypatch.setattr(reader, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="install it with `pip install pandas`"):
        run.to_frame()
    stand_in = types.SimpleNamespace(
        RangeIndex=lambda start, stop, name: (name, start, stop),
        DataFrame=lambda values, index, columns: (values, index, columns),
    )
    monkeypatch.setattr(reader, "find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "pandas", stand_in)
    values, index, columns = run.to_frame()
    assert index == ("position", 1, 4) and columns == ("task", 1, 4)
    assert np.allclose(values[-1], 100 * run.scores.correct[-1] / run.scores.total)
    assert np.isnan(values[run.scores.correct < 0]).all()


def test_reading_runs_does_not_import_torch() -> None:
    code = "import profcil.reporting.tables, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_deployed_run_can_be_read(runs: Path, tmp_path: Path) -> None:
    """A deployment records a key that config.toml does not have, so that the run is not resumed as a simulation."""
    shutil.copytree(runs / "fedavg-0", tmp_path / "run")
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    facts["config"]["deployed"] = "flower"
    facts.pop("digests")
    (tmp_path / "run" / "run.json").write_text(json.dumps(facts))
    assert load_run(tmp_path / "run").done


def test_runs_that_were_computed_in_different_ways_say_so():
    """The comparison lists which code computed each run only if the runs differ in it."""
    same = [{"path": "a", "computed": "reference cpu float32"}, {"path": "b", "computed": "reference cpu float32"}]
    assert execution_lines(same) == []
    other = [*same, {"path": "c", "computed": "accelerated cuda bf16 H200"}, {"path": "d", "computed": None}]
    text = "\n".join(execution_lines(other))
    assert "c: accelerated cuda bf16 H200" in text
    assert "d: not recorded" in text


def with_facts(run: Run, **facts: object) -> Run:
    return replace(run, facts={**run.facts, **facts})


def test_budget_and_dropped_replies_are_shown_where_a_run_has_them() -> None:
    private = [with_facts(make_run("pro", seed), privacy={"epsilon": 2.5 + seed}) for seed in (0, 1)]
    attacked = with_facts(make_run("promax"), tally={"dropped_replies": 3.0})
    table = render([*private, attacked])
    header, *rows = [line.split() for line in table.splitlines()]
    assert header[-2:] == ["ε", "dropped"]
    assert rows[0][-2:] == ["2.50", "-"] and rows[2][-2:] == ["-", "3"]
    assert "3.00 ± 0.71" in table  # the mean over seeds
    assert "dropped" not in render([make_run("pro")]) and "ε" not in render([make_run("pro")])


def test_a_robust_run_without_dropped_replies_says_zero() -> None:
    assert summarise_run(make_run("pro", robust={"aggregation": "median"}))["dropped"] == 0
    assert "dropped" not in summarise_run(make_run("pro", robust={"aggregation": "mean"}))
