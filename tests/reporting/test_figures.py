"""Figures: correct numbers, legible, safe for the colour-blind, reproducible files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
from made_runs import command, unfinish

pytest.importorskip("matplotlib")

from matplotlib import rc_context
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from profcil.errors import ConfigError, RunFolderError
from profcil.reporting.figures import (
    FIGURES,
    confusion,
    embedding,
    inputs,
    make_figure,
    mismatch,
    ranking,
    snapshots,
    style,
    tradeoff,
)
from profcil.reporting.groups import group_runs
from profcil.reporting.looks import LOOKS, method_look
from profcil.runs.gather import load_runs
from profcil.runs.reader import Run, load_run, summarise_run
from profcil.runs.results.store import add_runs

FROM_RUNS = ("heatmap", "final", "accuracy", "cta", "explain", "ranking", "bytes", "clients", "communication")


def numbers_of(name: str, path: Path, out: Path) -> dict:
    """The numbers behind a figure."""
    make_figure(name, [str(path)], out, ["svg"], pytest.fail)
    return json.loads((out / f"{name}.json").read_text())


def draw(name: str, path: Path) -> Figure:
    """The matplotlib figure, laid out."""
    import importlib

    module, function = FIGURES[name][0].split(":")
    with rc_context(style.STYLE):
        figure, _ = getattr(importlib.import_module(f"profcil.reporting.figures.{module}"), function)(
            [str(path)], print
        )
        figure.draw_without_rendering()
    return figure


@pytest.fixture(scope="module")
def study(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all files that figures read in addition to scores and ledger."""
    folder = tmp_path_factory.mktemp("study")
    np.savez(folder / "snapshots.npz", **memory())
    rng = np.random.default_rng(0)
    replay = {"real": rng.normal(size=(30, 5)), "replay": rng.normal(size=(20, 5)) + 4}
    labels = {"real_label": np.arange(30) % 2, "replay_label": np.arange(20) % 2}
    np.savez(folder / "replay.npz", **replay, **labels, attrs=json.dumps({"method": "promax", "space": "base"}))
    (folder / "mismatch.json").write_text(json.dumps(gaps()))
    return folder


def memory() -> dict[str, np.ndarray]:
    """Stale means are off by 2 along one axis, aligned ones by 0.5, refreshed ones are correct."""
    rows = []
    for p in range(6):
        for label in range(p + 1):
            true = np.array([3.0 * label, p, 0, 0])
            kinds = {"refreshed": 0.0} if label == p else {"stale": 2.0, "aligned": 0.5}
            rows += [(p, kind, label, true - [0, off, 0, 0], true) for kind, off in kinds.items()]
    position, kind, labels, means, oracle = (np.array(column) for column in zip(*rows, strict=True))
    real = {"real": oracle + 0.01, "real_position": position}
    return {"position": position, "kind": kind, "labels": labels, "means": means, "oracle": oracle, **real}


def gaps() -> list[dict]:
    """One method whose drop increases with the gap, and one with a single run."""
    kinds = [(0.1, "mild"), (0.2, "medium"), (0.3, "severe")]
    one = [{"method": "a", "strength": s, "seed": i, "task": 1, "mmd2": g + i / 50, "drop": (g + i / 50) ** 2}
           for i in range(3) for g, s in kinds]  # fmt: skip
    return [*one, {"method": "b", "strength": "mild", "seed": 0, "task": 1, "mmd2": 0.1, "drop": 1.0}]


def test_the_explanation_shows_accuracy_and_the_alignment_of_methods_with_a_memory(runs, tmp_path):
    shown = numbers_of("explain", runs, tmp_path)["digits, severe"]
    assert shown["accuracy"] == numbers_of("accuracy", runs, tmp_path)["digits, severe"]
    noted = {}
    for path in runs.glob("promax-*"):
        events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
        noted[path.name] = [e.get("alignment", {}) for e in events if e["event"] == "position"][-1]["memory"]["centred"]
    assert shown["centred"]["PRO-MAX"]["mean"][-1] == pytest.approx(fmean(noted.values()), abs=1e-3)
    assert "FedAvg" in shown["accuracy"]
    assert "FedAvg" not in shown["centred"]


def test_curves_end_at_faa_and_average_to_cta(runs: Path, tmp_path: Path) -> None:
    seen, current = (numbers_of(name, runs, tmp_path)["digits, severe"]["PRO-MAX"] for name in ("accuracy", "cta"))
    rows = [summarise_run(load_run(runs / f"promax-{seed}")) for seed in (0, 1)]
    assert seen["seeds"] == [0, 1] and len(seen["mean"]) == 3
    assert seen["mean"][-1] == pytest.approx(fmean(r["faa"] for r in rows), abs=1e-3)
    assert seen["sd"][-1] == pytest.approx(stdev(r["faa"] for r in rows), abs=1e-3)
    assert fmean(current["mean"]) == pytest.approx(fmean(r["cta"] for r in rows), abs=1e-3)


def test_heatmaps_have_the_scores_and_no_value_for_unscored_tasks(runs: Path, tmp_path: Path) -> None:
    whole, last = numbers_of("heatmap", runs, tmp_path)["FedAvg"], numbers_of("final", runs, tmp_path)["FedAvg"]
    scores = [load_run(runs / f"fedavg-{seed}").scores for seed in (0, 1)]
    expected = np.mean([100 * s.correct / s.total for s in scores], axis=0)
    scored = np.all([s.correct >= 0 for s in scores], axis=0)
    for position in range(3):
        for task in range(3):
            value = whole[position][task]
            assert (
                value == pytest.approx(expected[position, task], abs=1e-3) if scored[position, task] else value is None
            )
    assert last == whole[-1]


def test_communication_sums_to_the_ledger(runs: Path, tmp_path: Path) -> None:
    numbers = numbers_of("communication", runs, tmp_path)
    for method, title in (("fedavg", "FedAvg"), ("promax", "PRO-MAX")):
        loaded = [load_run(runs / f"{method}-{seed}") for seed in (0, 1)]
        for way in ("down", "up"):
            total = sum(v for k, v in numbers[title].items() if k.endswith(f", {way}"))
            assert total == pytest.approx(fmean(run.bytes(way) for run in loaded))
    assert "memory, down" in numbers["PRO-MAX"] and "memory, down" not in numbers["FedAvg"]


@pytest.mark.parametrize("name", [*FROM_RUNS, "snapshots", "mismatch"])
def test_labels_are_legible_and_the_figure_fits_a_page(runs: Path, study: Path, name: str) -> None:
    figure = draw(name, runs if name in FROM_RUNS else study)
    texts = [t for t in figure.findobj(Text) if t.get_text() and t.get_visible()]
    assert texts and min(t.get_fontsize() for t in texts) >= 7
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert width <= style.PAGE
    assert box.x0 > -0.05 and box.y0 > -0.05 and box.x1 < width + 0.05 and box.y1 < height + 0.05  # nothing is cut off


@pytest.mark.parametrize("name", ["accuracy", "heatmap"])
def test_figure_files_are_reproducible(runs: Path, tmp_path: Path, name: str) -> None:
    first, second = (make_figure(name, [str(runs)], tmp_path / at, ["svg", "pdf"], pytest.fail) for at in ("a", "b"))
    assert [p.name for p in first] == [f"{name}.svg", f"{name}.pdf", f"{name}.json"]
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


# Machado, Oliveira and Fernandes 2009, full severity, in linear RGB.
COLOUR_BLINDNESS = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


@pytest.mark.parametrize("kind", COLOUR_BLINDNESS)
def test_colours_are_distinct_for_the_colour_blind(kind: str) -> None:
    linear = np.array([to_rgb(c) for c in style.COLOURS]) ** 2.2
    seen = np.clip(linear @ np.array(COLOUR_BLINDNESS[kind]).T, 0, 1) ** (1 / 2.2)
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 0.1


def test_more_series_than_colours_have_different_looks() -> None:
    looks = [json.dumps(style.look(i)) for i in range(14)]
    assert len(set(looks)) == 14


def changed(run: Run, **params: object) -> Run:
    return replace(run, config={**run.config, "params": {**run.config["params"], **params}})


def test_a_label_names_all_differing_settings_and_no_equal_ones(runs: Path) -> None:
    run, fedavg = load_run(runs / "promax-0"), load_run(runs / "fedavg-0")
    quota, noise = run.config["params"]["quota"], run.config["params"]["noise"]
    other = changed(run, noise=9.0, quota=3)
    labels = [g.label for g in group_runs([run, other, fedavg])]
    assert labels == ["FedAvg", "PRO-MAX (quota=3, noise=9.0)", f"PRO-MAX (quota={quota}, noise={noise})"]
    assert [g.label for g in group_runs([run, fedavg])] == ["FedAvg", "PRO-MAX"]  # nothing differs, nothing is named
    weak = {**run.config["stream"], "weak_task": 3, "weak_strength": "mild"}
    labels = [g.label for g in group_runs([run, replace(run, config={**run.config, "stream": weak})])]
    assert labels == ["PRO-MAX (weak=mild)", "PRO-MAX (weak=none)"]
    weaker = [{**run.config, "stream": weak | {"weak_task": task}} for task in (1, 2)]
    labels = [g.label for g in group_runs([replace(run, config=config) for config in weaker])]
    assert labels == ["PRO-MAX (weak=mild, task 2)", "PRO-MAX (weak=mild, task 3)"]
    assert len(group_runs(load_runs([runs], pytest.fail))) == 2  # seeds and machines do not make a group


def test_a_setting_without_effect_makes_no_group_and_is_not_named(runs: Path) -> None:
    first, second = (load_run(runs / f"promax-{seed}") for seed in (0, 1))
    kept = replace(second, config={**second.config, "keep_memories": True, "threads": 7})
    (group,) = group_runs([first, kept])
    assert group.label == "PRO-MAX" and len(group.runs) == 2


def test_runs_on_other_data_are_not_in_the_same_panel(runs: Path) -> None:
    run = load_run(runs / "promax-0")
    chosen = replace(run, config={**run.config, "evaluate": "validation"})
    assert [g.stream for g in group_runs([run, chosen])] == ["digits, severe", "digits, severe, validation data"]


def test_groups_have_a_fixed_order_whatever_the_order_of_folders(runs: Path) -> None:
    given = load_runs([runs], pytest.fail)
    given += [replace(run, config={**run.config, "setting": "homogeneous"}) for run in given]
    given += [changed(run, noise=noise) for run in given if run.config["method"] == "promax" for noise in (10.0, 2.0)]
    expected = [(g.stream, g.label) for g in group_runs(given)]
    assert [(g.stream, g.label) for g in group_runs(given[::-1])] == expected
    noises = [label for stream, label in expected if stream == "digits, severe"]
    assert noises == ["FedAvg", "PRO-MAX (noise=1.0)", "PRO-MAX (noise=2.0)", "PRO-MAX (noise=10.0)"]
    assert expected[0][0] == "digits, severe"


def test_a_method_has_one_look_whatever_is_beside_it(runs: Path) -> None:
    run, fedavg = load_run(runs / "promax-0"), load_run(runs / "fedavg-0")
    alone = style.group_look(group_runs([run])[0])
    beside = {g.method: style.group_look(g) for g in group_runs([fedavg, run])}
    assert beside["promax"] == alone and beside["fedavg"]["color"] != alone["color"]
    variants = [style.group_look(g) for g in group_runs([run, changed(run, noise=9.0)])]
    assert {look["color"] for look in variants} == {alone["color"]}
    assert variants[0]["linestyle"] != variants[1]["linestyle"]
    assert method_look("a_plugin") == method_look("a_plugin")


def test_methods_have_different_colours_and_markers_where_colours_are_near() -> None:
    assert len({look.light for look in LOOKS.values()}) == len({look.dark for look in LOOKS.values()}) == len(LOOKS)
    linear = {name: np.array(to_rgb(look.light)) ** 2.2 for name, look in LOOKS.items()}
    for one, other in combinations(LOOKS, 2):
        distances = [float(np.linalg.norm(to_seen(linear[one], kind) - to_seen(linear[other], kind))) for kind in SEEN]
        assert min(distances) > 0.1 or LOOKS[one].marker != LOOKS[other].marker, (one, other)


SEEN = ("all", *COLOUR_BLINDNESS)


def to_seen(linear: np.ndarray, kind: str) -> np.ndarray:
    """A colour as people with a kind of colour-blindness, or without one, see it."""
    matrix = np.eye(3) if kind == "all" else np.array(COLOUR_BLINDNESS[kind])
    return np.clip(matrix @ linear, 0, 1) ** (1 / 2.2)


def test_accuracy_against_bytes_has_means_and_deviations(runs: Path, tmp_path: Path) -> None:
    point = numbers_of("bytes", runs, tmp_path)["digits, severe"]["PRO-MAX"]
    rows = [summarise_run(load_run(runs / f"promax-{seed}")) for seed in (0, 1)]
    assert point["faa"]["mean"] == pytest.approx(fmean(r["faa"] for r in rows))
    assert point["faa"]["sd"] == pytest.approx(stdev(r["faa"] for r in rows))
    assert point["bytes_total"]["mean"] == pytest.approx(fmean(r["bytes_total"] for r in rows))


def test_accuracy_against_bytes_of_a_store_is_that_of_its_runs(runs: Path, tmp_path: Path) -> None:
    add_runs([load_run(path) for path in sorted(runs.glob("*-*"))], tmp_path / "store")
    assert numbers_of("bytes", tmp_path / "store", tmp_path / "b") == numbers_of("bytes", runs, tmp_path / "a")


def test_ranking_has_all_seeds_and_the_best_first(runs: Path, tmp_path: Path) -> None:
    (found,) = numbers_of("ranking", runs, tmp_path).values()
    assert list(found) == sorted(found, key=lambda label: -found[label]["mean"])
    for label, numbers in found.items():
        method = {"FedAvg": "fedavg", "PRO-MAX": "promax"}[label]
        seeds = [summarise_run(load_run(runs / f"{method}-{seed}"))["faa"] for seed in (0, 1)]
        assert list(numbers["seeds"].values()) == pytest.approx(seeds) and numbers["mean"] == pytest.approx(
            fmean(seeds)
        )
        assert numbers["p"] is None  # two seeds are too few
    texts = [text.get_text() for text in draw("ranking", runs).findobj(Text)]
    assert "–" in texts and "*" not in texts


@pytest.mark.parametrize(("p", "mark"), [(None, "–"), (0.2, "n.s."), (0.04, "*"), (0.004, "**"), (1e-5, "***")])
def test_marks_of_a_test(p: float | None, mark: str) -> None:
    assert ranking.mark(p) == mark


def test_the_axis_of_bytes_has_few_ticks_whatever_its_range() -> None:
    for low, high in ((1.5e9, 1.6e9), (1e3, 9e7), (7.0, 8.0)):
        with rc_context(style.STYLE):
            figure, (ax,) = style.panels(1, 1, style.COLUMN, 2.0)
            style.bytes_axis(ax, low, high, steps=(1, 2, 5) if high < 100 * low else (1,))
            figure.draw_without_rendering()
        inside = [t for t in ax.get_xticklabels() if t.get_text()]
        boxes = [t.get_window_extent() for t in inside]
        assert 2 <= len(boxes) <= 8 and not any(a.overlaps(b) for a, b in combinations(boxes, 2))
        assert ax.get_xlim()[0] <= low and high <= ax.get_xlim()[1]


def test_rows_of_the_final_heatmap_are_equally_high(runs: Path, tmp_path: Path) -> None:
    """One method on one stream, two on another: the single row is not stretched."""
    for name in ("fedavg-0", "promax-0"):
        shutil.copytree(runs / name, tmp_path / name)
    other = shutil.copytree(runs / "fedavg-0", tmp_path / "other")
    config = (other / "config.toml").read_text()
    (other / "config.toml").write_text(config.replace('setting = "severe"', 'setting = "homogeneous"'))
    facts = json.loads((other / "run.json").read_text())
    facts["config"]["setting"] = "homogeneous"
    facts.pop("digests")
    (other / "run.json").write_text(json.dumps(facts))
    panels = [ax for ax in draw("final", tmp_path).axes if ax.get_xlabel() == "task"]
    heights = [ax.get_window_extent().height / len(ax.get_yticklabels()) for ax in panels]
    assert len(heights) == 2 and heights[0] == pytest.approx(heights[1], rel=0.1)


def test_names_of_points_do_not_overlap() -> None:
    panel = (0.0, 0.0, 300.0, 200.0)
    taken = [tradeoff.box_around(150.0, 100.0, 3.0)]
    for _ in range(6):  # six methods at one point
        box, _ = tradeoff.place("FedAvg", 150.0, 100.0, taken, panel)
        assert not any(tradeoff.overlap(box, other) for other in taken)
        taken.append(box)


def test_an_unfinished_run_is_left_out_with_a_warning(runs: Path, tmp_path: Path) -> None:
    half, warnings = unfinish(runs / "promax-0", tmp_path / "half"), []
    make_figure("accuracy", [str(half), str(runs / "fedavg-0")], tmp_path, ["svg"], warnings.append)
    assert len(warnings) == 1 and "half is not finished" in warnings[0]
    assert list(json.loads((tmp_path / "accuracy.json").read_text())["digits, severe"]) == ["FedAvg"]
    with pytest.raises(RunFolderError, match="none of the runs given is finished"):
        make_figure("accuracy", [str(half)], tmp_path, ["svg"], warnings.append)


def test_snapshots_share_one_pca_and_measure_the_gap(study: Path, tmp_path: Path) -> None:
    found = numbers_of("snapshots", study, tmp_path)
    assert found["gap"] == {"refreshed": 0.0, "stale": 2.0, "aligned": 0.5}
    assert found["positions"] == [0, 2, 3, 5]
    pca = pytest.importorskip("sklearn.decomposition").PCA(2)
    data = memory()
    parts = [data["means"], data["oracle"], data["real"]]
    theirs = pca.fit_transform(np.concatenate(parts))
    ours = np.concatenate(snapshots.shared_pca(*parts)[0])
    assert np.allclose(np.abs(ours), np.abs(theirs), atol=1e-9)
    assert np.allclose(found["explained_percent"], 100 * pca.explained_variance_ratio_, atol=1e-3)


def test_snapshots_work_without_real_features(tmp_path: Path) -> None:
    np.savez(tmp_path / "snapshots.npz", **{k: v for k, v in memory().items() if not k.startswith("real")})
    figure = draw("snapshots", tmp_path)
    assert "real feature" not in {t.get_text() for t in figure.legends[0].get_texts()}


def test_snapshots_have_a_mark_for_every_kind(study: Path) -> None:
    figure = draw("snapshots", study)
    marks = {t.get_text() for t in figure.legends[0].get_texts()}
    assert marks == {"real feature", "true mean", "refreshed", "stale", "aligned"}
    assert all(ax.get_xlim() == figure.axes[0].get_xlim() for ax in figure.axes)


def test_mismatch_has_the_rank_correlation_of_each_method(study: Path, tmp_path: Path) -> None:
    found = numbers_of("mismatch", study, tmp_path)
    assert found["a"]["runs"] == 9 and found["a"]["rho"] == 1.0 and found["a"]["interval"] == [1.0, 1.0]
    assert found["a"]["slope"] > 0
    assert found["b"] == {"runs": 1, "rho": None, "interval": None, "slope": None}


def test_a_trend_has_runs_of_one_dataset_only() -> None:
    rows = [row | {"dataset": name} for name in ("x", "y") for row in gaps()[:9]]
    _, found = mismatch.draw_rows(rows)
    assert list(found) == ["a, x", "a, y"] and found["a, x"]["runs"] == 9


def test_mismatch_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    x, y = np.random.default_rng(3).normal(size=(2, 12))
    rho, low, high = mismatch.correlation(x, y) or pytest.fail("no correlation")
    assert rho == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-6) and low < rho < high


def test_embedding_records_its_settings_and_works_without_umap(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(embedding, "find_spec", lambda name: None)
    warnings: list[str] = []
    make_figure("embedding", [str(study)], tmp_path, ["svg"], warnings.append)
    (found,) = json.loads((tmp_path / "embedding.json").read_text()).values()
    assert "profcil[report]" in warnings[0] and "UMAP" not in found
    assert (found["real"], found["replay"], found["space"]) == (30, 20, "base")
    assert found["t-SNE"]["perplexity"] == pytest.approx(49 / 3) and found["t-SNE"]["random_state"] > 0


def test_embedding_is_reproducible_and_separates_distant_features(study: Path) -> None:
    pytest.importorskip("sklearn")
    data, _ = inputs.read_replay(study)
    pooled = np.concatenate([data["real"], data["replay"]])
    points = embedding.tsne(pooled)[0]
    assert np.array_equal(points, embedding.tsne(pooled)[0])
    centre = [points[:30].mean(0), points[30:].mean(0)]
    assert np.linalg.norm(centre[0] - centre[1]) > points[:30].std()


@pytest.mark.slow
def test_umap_separates_distant_features(study: Path) -> None:
    pytest.importorskip("umap")
    data, _ = inputs.read_replay(study)
    points, settings = embedding.umap(np.concatenate([data["real"], data["replay"]]))
    gap = np.linalg.norm(points[:30].mean(0) - points[30:].mean(0))
    assert settings["n_neighbors"] == 15 and gap > points[:30].std()


def test_a_run_with_a_weak_task_shows_only_that_task(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "weak"
    shutil.copytree(runs / "promax-0", run)
    plan = load_run(run).plan
    labels = np.arange(10)
    data = {
        "real": labels[:, None] * 1.0,
        "replay": labels[:, None] + 0.5,
        "real_label": labels,
        "replay_label": labels,
    }
    assert embedding.select_weak_task(data, run) is data
    config = (run / "config.toml").read_text().replace("[stream]", "[stream]\nweak_task = 1", 1)
    config = re.sub(r"\nweak_task = -1", "", config)
    (run / "config.toml").write_text(config)
    facts = json.loads((run / "run.json").read_text())
    facts["config"]["stream.weak_task"] = 1
    facts.pop("digests")
    (run / "run.json").write_text(json.dumps(facts))
    shown = embedding.select_weak_task(data, run)
    assert set(shown["real_label"]) == set(shown["replay_label"]) == set(plan.tasks[1])
    assert np.array_equal(shown["real"][:, 0], shown["real_label"])


def test_large_samples_are_thinned_reproducibly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "MAX_FEATURES", 10)
    data = {"real": np.arange(50.0)[:, None], "replay": np.arange(4.0)[:, None]}
    data |= {"real_label": np.arange(50), "replay_label": np.arange(4)}
    first = embedding.thin_out(data)
    assert len(first["real"]) == 10 and len(first["replay"]) == 4
    assert np.array_equal(first["real"][:, 0], first["real_label"])
    assert np.array_equal(first["real"], embedding.thin_out(data)["real"])


@pytest.mark.parametrize(("name", "file"), [("snapshots", "snapshots.npz"), ("embedding", "replay.npz")])
def test_a_missing_or_broken_file_is_one_sentence(runs: Path, tmp_path: Path, name: str, file: str) -> None:
    with pytest.raises(RunFolderError, match=rf"{file} cannot be read .*profcil diagnose") as error:
        make_figure(name, [str(runs / "promax-0")], tmp_path, ["svg"], pytest.fail)
    assert error.value.exit_status == 2 and not list(tmp_path.iterdir())
    (tmp_path / file).write_bytes(b"no archive")
    with pytest.raises(RunFolderError, match="is not a valid input of this figure"):
        make_figure(name, [str(tmp_path)], tmp_path, ["svg"], pytest.fail)


def test_a_file_with_other_content_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "snapshots.npz", **memory() | {"kind": np.array(["new"] * len(memory()["kind"]))})
    with pytest.raises(RunFolderError, match="kind 'new', allowed are refreshed, stale, aligned"):
        inputs.read_snapshots(tmp_path)
    np.savez(tmp_path / "snapshots.npz", **memory() | {"labels": np.arange(2)})
    with pytest.raises(RunFolderError, match="same number of rows"):
        inputs.read_snapshots(tmp_path)
    (tmp_path / "mismatch.json").write_text(json.dumps([{**gaps()[0], "strength": "huge"}]))
    with pytest.raises(RunFolderError, match="strength 'huge'"):
        inputs.read_mismatch(tmp_path)
    (tmp_path / "mismatch.json").write_text('[{"method": "a"}]')
    with pytest.raises(RunFolderError, match="list of runs"):
        inputs.read_mismatch(tmp_path)
    with pytest.raises(RunFolderError, match="weak-task"):
        inputs.read_mismatch(tmp_path / "nowhere")


def test_the_command_lists_the_files_it_wrote(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("figure", "cta", str(runs), "--out", str(tmp_path / "deep" / "er")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [Path(line).name for line in lines] == ["cta.svg", "cta.pdf", "cta.json"]
    assert all(Path(line).stat().st_size > 100 for line in lines)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["heatmpa", "."], "did you mean heatmap"),
        (["cta", ".", "--format", "svg,gif"], "format 'gif' is not supported"),
        (["cta", "nowhere"], "nowhere does not exist"),
        (["snapshots", "a", "b"], "2 runs were given"),
    ],
)
def test_errors_are_sentences(line: list[str], message: str) -> None:
    with pytest.raises((ConfigError, RunFolderError), match=message):
        command("figure", *line)


def test_drawing_from_runs_does_not_import_torch(runs: Path, tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from profcil.reporting.figures import make_figure; "
    code += "make_figure('final', [sys.argv[1]], Path(sys.argv[2]), ['svg'], print); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(runs), str(tmp_path)], check=True)


def test_clients_have_the_accuracies_of_their_runs_and_the_worst_is_marked(runs: Path, tmp_path: Path) -> None:
    (found,) = numbers_of("clients", runs, tmp_path).values()
    for label, method in {"FedAvg": "fedavg", "PRO-MAX": "promax"}.items():
        own = [load_run(runs / f"{method}-{seed}") for seed in (0, 1)]
        worst = fmean(run.further_metrics["worst_client"] for run in own)
        assert found[label]["worst"] == pytest.approx(worst)
        assert len(found[label]["clients"]) == 2 and found[label]["worst"] <= found[label]["mean"]


def test_a_legend_is_read_line_by_line_and_evenly_filled() -> None:
    assert style.by_column(["a", "b", "c", "d", "e"], 3) == ["a", "d", "b", "e", "c"]
    with rc_context(style.STYLE):
        figure, (ax,) = style.panels(1, 1, style.PAGE, 2.0)
        for number in range(8):
            ax.plot([0, 1], [0, number], label=f"method {number}")
        style.legend_below(figure, [ax], columns=7)
    (legend,) = figure.legends
    assert legend._ncols == 4


def test_rows_with_long_labels_are_higher() -> None:
    assert style.row_height(["PRO"], 0.24) == 0.24
    assert style.row_height(["PRO", "a\nb\nc\nd"], 0.24) > 4 * style.SMALL / 72


def test_the_confusion_matrix_is_that_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "model.csv"
    file.write_text("class,cat,dog\ncat,3,1\ndog,0,0\n")
    with rc_context(style.STYLE):
        figure, numbers = confusion.draw([str(file)], pytest.fail)
    assert numbers == {"model": {"classes": ["cat", "dog"], "counts": [[3, 1], [0, 0]]}}
    written = [text.get_text() for text in figure.findobj(Text)]
    assert {"75", "25", "cat", "dog"} <= set(written) and "nan" not in written  # a class without examples has no share


@pytest.mark.parametrize("text", ["", "class,a\n", "class,a,b\na,1\n", "class,a\na,x\n", "class,a\na,-1\n"])
def test_a_confusion_matrix_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "model.csv"
    file.write_text(text)
    for path in (file, tmp_path, tmp_path / "absent.csv"):
        with pytest.raises(RunFolderError, match="profcil eval RUN --confusion FILE"):
            confusion.draw([str(path)], pytest.fail)
