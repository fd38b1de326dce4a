"""The results store: rows hold what reporting needs of a run, and nothing contradictory or damaged gets in or out."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from made_runs import SIZE, SMALL, command, unfinish
from test_page import data_in

from profcil.cli.main import main
from profcil.engine.run import start
from profcil.errors import RunFolderError
from profcil.reporting import series
from profcil.reporting.figures import make_figure
from profcil.reporting.groups import group_runs
from profcil.reporting.table_metrics import measure_runs
from profcil.reporting.tables import compare
from profcil.resolve import resolve
from profcil.runs.gather import find_run_folders
from profcil.runs.reader import FURTHER, Run, load_run
from profcil.runs.results.store import add_runs, comparable_rows, load_store
from profcil.runs.results.stored_run import COLUMNS, KEY
from profcil.runs.results.stored_settings import apply_differences, describe_differences, format_value, parse_value

WHEN = ("date", "seconds", "warmup_seconds", "machine", "peak_memory_mb", "device", "torch", "python")


@pytest.fixture(scope="session")
def folders(runs: Path) -> list[Run]:
    return [load_run(path) for path in find_run_folders([runs])]


@pytest.fixture
def store(folders: list[Run], tmp_path: Path) -> Path:
    add_runs(folders, tmp_path / "store")
    return tmp_path / "store"


def rows_of(store: Path) -> list[dict[str, str]]:
    with open(store / "digits.csv", newline="") as file:
        return list(csv.DictReader(file))


def write_rows(store: Path, rows: list[dict[str, str]]) -> None:
    with open(store / "digits.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(COLUMNS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def copy_run(source: Path, target: Path, **facts: object) -> Path:
    """A copy of a run folder, with other facts in its run.json."""
    shutil.copytree(source, target)
    known = json.loads((target / "run.json").read_text())
    known.pop("digests")
    (target / "run.json").write_text(json.dumps(known | facts))
    return target


def error_of(capsys: pytest.CaptureFixture[str], *line: object) -> str:
    assert main([str(part) for part in line]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    return err


# -- from a folder to a row and back ----------------------------------------------------------------------------------


def test_a_row_has_the_results_of_its_run(folders, store):
    stored = load_store(store)
    assert [(r.config["method"], r.config["seed"]) for r in stored] == [
        ("fedavg", 0), ("fedavg", 1), ("promax", 0), ("promax", 1),
    ]  # fmt: skip
    for run, row in zip(folders, stored, strict=True):
        assert row.metrics == run.metrics and row.done
        assert np.array_equal(row.scores.correct, run.scores.correct)
        assert np.array_equal(row.scores.total, run.scores.total)
        assert row.ledger.by("stage", "kind", "direction") == run.ledger.by("stage", "kind", "direction")
        for values in (series.seen_accuracy, series.current_accuracy, series.alignment, series.task_accuracy):
            assert np.array_equal(values(row), values(run), equal_nan=True)
        assert (row.bytes("up"), row.bytes("down")) == (run.bytes("up"), run.bytes("down"))
    assert measure_runs(stored) == measure_runs(folders)


def test_a_row_has_the_settings_of_its_run(folders, store):
    for run, row in zip(folders, load_store(store), strict=True):
        without_effect = ("threads", "workers", "accelerate", "keep_states", "regime")
        shown = {key: value for key, value in run.config.items() if key not in without_effect}
        assert row.config == shown
        assert row.values["settings"].split() == sorted(
            pair.replace("clients", "stream.clients")
            .replace("participants", "stream.participants")
            .replace("task_size", "stream.task_size")
            for pair in (*SMALL, SIZE[0])
        )


def test_a_row_says_where_and_when_its_run_was_computed(folders, store):
    facts = folders[0].facts
    row = rows_of(store)[0]
    assert row["date"] == facts["date"] and len(row["date"]) == 10
    assert row["machine"] == facts["environment"]["processor"] != ""
    assert (row["profcil"], row["torch"]) == (facts["version"], facts["environment"]["torch"])
    assert row["execution"].startswith("accelerated cpu float32") and row["origin"] == "run"
    assert float(row["peak_memory_mb"]) == facts["peak_memory_mb"] > 0


def test_stripped_and_old_folders_are_enough(runs, store, tmp_path):
    """Without the model and the lock, and with a run.json that records neither date nor processor."""
    bare = tmp_path / "bare"
    shutil.copytree(runs / "promax-0", bare)
    for name in ("state.safetensors", "lock", "events.jsonl"):
        (bare / name).unlink()
    facts = json.loads((bare / "run.json").read_text())
    facts.pop("date")
    facts.pop("digests")
    facts["environment"].pop("processor")
    (bare / "run.json").write_text(json.dumps(facts))
    add_runs([load_run(bare)], tmp_path / "other")
    (row,) = rows_of(tmp_path / "other")
    whole = rows_of(store)[2]
    assert row["digest"] == whole["digest"] and row["scores"] == whole["scores"]
    assert row["date"] == row["machine"] == row["align"] == row["centred_by_position"] == ""


def test_equal_runs_have_equal_digests_and_other_seeds_have_not(runs, store, tmp_path):
    flags = {"dataset": "digits", "setting": "severe", "method": "promax", "seed": 0}
    again = start(resolve(None, flags, [*SMALL, *SIZE]), tmp_path / "again", tmp_path)
    add_runs([load_run(again)], tmp_path / "other")
    first = rows_of(store)[2]
    (second,) = rows_of(tmp_path / "other")
    assert {key for key in first if first[key] != second[key]} <= set(WHEN)
    assert first["seconds"] != second["seconds"]
    assert len({row["digest"] for row in rows_of(store)}) == 4


@pytest.mark.parametrize(
    "value",
    ["own", "", "two words", "1", "true", "null", "a=b", "ü x", 1, 1.0, -0.5, True, False, None, [1, "a b"], {}],
)
def test_a_differing_setting_is_read_back_as_it_was(value):
    text = format_value(value)
    assert " " not in text and parse_value(text) == value and type(parse_value(text)) is type(value)
    recipe = {"a": 1, "gone": 2, "params.x": "other"}
    settings = {"a": 1, "new": 3, "params.x": value}
    differences = describe_differences(settings, recipe)
    assert differences == f"gone= new=3 params.x={text}"
    assert apply_differences(recipe, differences) == settings


# -- adding -----------------------------------------------------------------------------------------------------------


def test_the_same_run_again_changes_nothing_and_says_so(runs, store, capsys):
    before = snapshot(store)
    times = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    assert main(["results", "add", str(runs), "--store", str(store)]) == 0
    out = capsys.readouterr().out
    assert out.count("already there: ") == 4 and "0 rows added, 4 were already there" in out
    assert snapshot(store) == before and {path: path.stat().st_mtime_ns for path in store.rglob("*")} == times


def test_the_rows_of_another_store_can_be_added(folders, store, tmp_path, capsys):
    """Two machines gather runs in stores of their own."""
    add_runs(folders[:1], tmp_path / "here")
    assert main(["results", "add", str(store), "--store", str(tmp_path / "here")]) == 0
    assert f"{len(folders) - 1} rows added, 1 were already there" in capsys.readouterr().out
    assert snapshot(tmp_path / "here") == snapshot(store)


def test_a_contradicting_or_damaged_row_of_another_store_is_refused(folders, store, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(store, other)
    rows = rows_of(other)
    write_rows(other, [{**rows[0], "faa": "99.9"}, *rows[1:]])
    before = snapshot(store)
    assert main(["results", "add", str(other), "--store", str(store)]) == 2
    assert "digits.csv line 2" in capsys.readouterr().err
    assert snapshot(store) == before


def test_runs_and_stores_are_added_by_two_commands(runs, store, tmp_path, capsys):
    assert main(["results", "add", str(store), str(runs), "--store", str(tmp_path / "new")]) == 2
    assert "two commands" in capsys.readouterr().err


def test_the_order_of_adding_does_not_matter(folders, store, tmp_path):
    for run in reversed(folders):
        add_runs([run], tmp_path / "other")
    assert snapshot(tmp_path / "other") == snapshot(store)


def test_a_contradicting_run_is_refused_and_nothing_is_written(runs, store, tmp_path, capsys):
    new = copy_run(runs / "fedavg-0", tmp_path / "given" / "a-new", version="9.9.9")  # alone it would be added
    other = copy_run(runs / "promax-1", tmp_path / "given" / "b-other")
    scores = json.loads((other / "scores.json").read_text())
    scores["correct"][-1][0] += 1
    (other / "scores.json").write_text(json.dumps(scores))
    before = snapshot(store)
    error = error_of(capsys, "results", "add", tmp_path / "given", "--store", store)
    digest = rows_of(store)[3]["digest"][:8]
    assert f"{other} (digest " in error and "row of promax" in error and f"(digest {digest})" in error
    assert snapshot(store) == before
    add_runs([load_run(new)], store)
    assert len(rows_of(store)) == 5


@pytest.mark.parametrize("column", [key for key in KEY if key not in ("dataset", "setting")])
def test_rows_that_differ_in_a_key_are_both_kept(runs, tmp_path, column):
    """Each column of the key keeps a run with other scores from contradicting."""
    run = load_run(runs / "promax-0")
    changed: dict[str, dict] = {
        "method": {"config": run.config | {"method": "pro"}},
        "seed": {"config": run.config | {"seed": 7}},
        "part": {"config": run.config | {"evaluate": "validation"}},
        "settings": {"config": run.config | {"params": run.config["params"] | {"noise": 0.5}}},
        "profcil": {"facts": run.facts | {"version": "9.9.9"}},
        "execution": {"facts": run.facts | {"execution": [{"path": "reference", "device": "cpu"}]}},
    }
    fields = {name: getattr(run, name) for name in ("path", "config", "facts", "scores", "ledger", "plan")}
    add_runs([run, Run(**fields | changed[column])], tmp_path / "store")
    assert len(load_store(tmp_path / "store")) == 2


def test_an_unfinished_run_is_refused_with_all_others(runs, tmp_path, capsys):
    shutil.copytree(runs / "fedavg-0", tmp_path / "given" / "a")
    half = unfinish(runs / "promax-0", tmp_path / "given" / "b")
    error = error_of(capsys, "results", "add", tmp_path / "given", "--store", tmp_path / "store")
    assert f"{half} is not finished; continue it with `profcil resume {half}`" in error
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_changes_no_file(folders, store, monkeypatch, call):
    """The disk is full when the second of two files is written."""
    before = snapshot(store)
    real = getattr(os, call)
    seen = []

    def fail(*arguments):
        seen.append(arguments)
        if call == "fsync" and len(seen) < 2:
            return real(*arguments)
        raise OSError(28, "No space left on device")

    fields = {name: getattr(folders[0], name) for name in ("path", "config", "scores", "ledger", "plan")}
    newer = Run(facts=folders[0].facts | {"version": "9.9.9"}, **fields)
    monkeypatch.setattr(f"profcil.io.atomic_files.os.{call}", fail)
    with pytest.raises(OSError, match="No space left"):
        add_runs([newer], store)
    assert seen and snapshot(store) == before


def test_two_additions_at_the_same_time_lose_no_row(folders, tmp_path, monkeypatch):
    """The second addition begins while the first has read the store and not yet written it."""
    from profcil.runs.results import store as module

    store = tmp_path / "store"
    second = threading.Thread(target=add_runs, args=(folders[2:], store))
    real = module.write_contents

    def write(contents, path):
        if threading.current_thread() is threading.main_thread():
            second.start()
            second.join(0.3)  # it waits for the lock; without one it would write its rows now, to be overwritten
        return real(contents, path)

    monkeypatch.setattr(module, "write_contents", write)
    add_runs(folders[:2], store)
    second.join()
    assert len(load_store(store)) == 4


def test_probes_that_were_measured_later_are_filled_in(runs, store, tmp_path):
    later = copy_run(runs / "promax-0", tmp_path / "later")
    probes = {"probe_warm": {"ridge": 70.5}, "probe_final": {"ridge": 80.25}}
    (later / "diagnostics.json").write_text(json.dumps(probes))
    result = add_runs([load_run(later)], store)
    assert not result.added and len(result.unchanged) == 1
    rows = rows_of(store)
    assert (rows[2]["probe_warm"], rows[2]["probe_end"]) == ("70.5", "80.25") and rows[3]["probe_warm"] == ""


def test_a_recipe_that_changed_without_a_new_version_is_refused(folders, tmp_path, monkeypatch, capsys):
    from profcil.runs.results import store as module

    store = tmp_path / "store"
    add_runs(folders[:1], store)
    before = snapshot(store)
    real = module.recipe_settings
    noisy = {"params.extra": 5}
    monkeypatch.setattr(module, "recipe_settings", lambda *names: real(*names) | noisy)
    fields = {name: getattr(folders[1], name) for name in ("path", "facts", "scores", "ledger", "plan")}
    config = folders[1].config | {"params": folders[1].config["params"] | {"extra": 5}}
    with pytest.raises(Exception, match=r"the recipe of version .* has changed since; remove the rows"):
        add_runs([Run(config=config, **fields)], store)
    assert snapshot(store) == before


def test_a_folder_of_a_study_can_be_added_as_it_is(tmp_path, capsys):
    study = tmp_path / "mine.toml"
    sets = ", ".join(f'"{item}"' for item in (*SMALL, SIZE[0]))
    study.write_text(f'methods = ["fedavg", "prolin"]\nseeds = [0, 1]\nset = [{sets}]\ndiagnose = true\n')
    assert main(["study", str(study), "--out", str(tmp_path / "cells")]) == 0
    capsys.readouterr()
    assert main(["results", "add", str(tmp_path / "cells"), "--store", str(tmp_path / "store"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["added"]) == 4
    by_method = {row["method"]: row for row in rows_of(tmp_path / "store")}
    assert float(by_method["fedavg"]["probe_end"]) > 0
    assert by_method["prolin"]["probe_end"] == ""  # it uses no base
    assert "dictionary" in json.loads(by_method["prolin"]["bytes"])
    assert load_store(tmp_path / "store")


# -- a damaged store --------------------------------------------------------------------------------------------------

DAMAGE = {
    "a bad number": ({"faa": "12,5"}, "line 3: faa is '12,5', allowed is a number"),
    "a number that is none": ({"cta": "nan"}, "line 3: cta is 'nan', allowed is a number"),
    "a seed in words": ({"seed": "one"}, "line 3: seed is 'one', allowed is a whole number"),
    "an edited metric": ({"faa": "99.0"}, "line 3: settings, scores and bytes do not have the digest of the row"),
    "an edited setting": ({"settings": "train.rounds=3"}, "do not have the digest"),
    "a broken pair": ({"settings": "train.rounds"}, "settings cannot be read ('train.rounds' is not a pair"),
    "no scores": ({"scores": ""}, "line 3: scores is empty"),
    "half of the scores": ({"scores": '{"correct": [[1'}, "allowed is JSON"),
    "an unknown recipe": ({"recipe": "0" * 16, "profcil": "9.9"}, "the store has no recipe"),
    "another recipe than other seeds": ({"recipe": "0" * 16}, "line 3 has another recipe than other seeds"),
    "another total": ({"bytes_total": "5"}, "bytes_total is not the sum of bytes"),
    "an unknown part": ({"part": "train"}, "part is 'train', allowed is test or validation"),
    "another dataset": ({"dataset": "cora"}, "is of dataset 'cora'; move it"),
    "a row twice": ({"seed": "0"}, "as an earlier line; remove one of them"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_row_is_one_sentence_that_names_it(store, capsys, name):
    cells, expected = DAMAGE[name]
    rows = rows_of(store)
    write_rows(store, [rows[0], rows[1] | cells, *rows[2:]])
    for line in (["list", "--store", str(store)], ["page", "page.md", "--store", str(store)]):
        if line[0] == "page":
            (store / "page.md").write_text("<!-- table: dataset=digits -->\n<!-- end -->\n")
            line[1] = str(store / "page.md")
        assert expected in error_of(capsys, "results", *line)
    assert expected in error_of(capsys, "table", "severe", store)


def test_a_wrong_header_and_a_short_line_are_refused(runs, store, capsys):
    file = store / "digits.csv"
    text = file.read_text()
    file.write_text(text.replace("dataset,method", "method,dataset", 1))
    before = snapshot(store)
    assert "its first line has other columns" in error_of(capsys, "results", "list", "--store", store)
    assert "its first line has other columns" in error_of(capsys, "results", "add", runs, "--store", store)
    assert snapshot(store) == before
    file.write_text(text + "digits,pro\n")
    assert "line 6 has 2 cells, allowed is" in error_of(capsys, "figure", "accuracy", file)


def test_missing_and_edited_recipes_are_refused(store, capsys):
    file = store / "recipes" / "digits.json"
    text = file.read_text()
    file.write_text(text.replace('"train.batch": 32', '"train.batch": 33', 1))
    assert "a recipe does not have the hash" in error_of(capsys, "results", "list", "--store", store)
    file.unlink()
    assert f"{file} cannot be read" in error_of(capsys, "results", "list", "--store", store)


def test_mistakes_of_the_command_line(store, runs, tmp_path, capsys):
    assert "did you mean add" in error_of(capsys, "results", "ad", runs)
    assert "name run folders" in error_of(capsys, "results", "add", "--store", store)
    assert "leave the path out" in error_of(capsys, "results", "list", runs)
    assert "leave it out" in error_of(capsys, "results", "add", runs, "--dataset", "digits")
    assert "unknown dataset in the store 'core'" in error_of(
        capsys, "results", "list", "--dataset", "core", "--store", store
    )
    assert "does not exist" in error_of(capsys, "results", "list", "--store", tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    assert "is a file" in error_of(capsys, "results", "add", runs, "--store", tmp_path / "file")


# -- reporting from a store -------------------------------------------------------------------------------------------


def test_the_list_has_seeds_and_mean_faa(folders, store, capsys):
    assert main(["results", "list", "--store", str(store), "--dataset", "digits", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["method"], row["seeds"]) for row in rows] == [("fedavg", [0, 1]), ("promax", [0, 1])]
    values = [run.metrics["faa"] for run in folders[:2]]
    assert rows[0]["faa"] == pytest.approx(np.mean(values)) and rows[0]["sd"] == pytest.approx(np.std(values, ddof=1))
    assert main(["results", "list", "--store", str(store)]) == 0
    assert f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}" in capsys.readouterr().out


def test_compare_and_its_groups_are_those_of_the_folders(folders, store):
    stored = load_store(store)
    of_the_folder = ("path", *FURTHER)  # a store has no plan, which the further metrics need
    expected = [{key: row[key] for key in row if key not in of_the_folder} for row in compare(folders)]
    assert [{key: row[key] for key in row if key not in of_the_folder} for row in compare(stored)] == expected
    assert {row[name] for row in compare(stored) for name in FURTHER} == {None}
    labels = [(group.stream, group.label, len(group.runs)) for group in group_runs(folders)]
    assert [(group.stream, group.label, len(group.runs)) for group in group_runs(stored)] == labels


def test_a_table_from_the_store_is_the_table_from_the_folders(tmp_path, capsys):
    """Runs of the table's study; other runs have their settings in the row."""
    out = tmp_path / "cells"
    chosen = ["--scale", "smoke", "--methods", "fedavg,promax", "--seeds", "0", "--out", str(out)]
    assert main(["study", "severe", *chosen]) == 0
    cells = [str(path.parent) for path in sorted(out.glob("*/config.toml"))]
    assert main(["results", "add", str(out), "--store", str(tmp_path / "store")]) == 0
    capsys.readouterr()
    for name in ("severe", "cost"):
        for form in ("markdown", "csv"):
            assert main(["table", name, *cells, "--format", form]) == 0
            from_folders = capsys.readouterr().out
            assert main(["table", name, str(tmp_path / "store"), "--format", form]) == 0
            assert capsys.readouterr().out == from_folders
    assert "PRO-MAX" in from_folders or "promax" in from_folders


def test_rows_with_different_settings_stay_apart(runs, store, tmp_path, capsys):
    flags = {"dataset": "digits", "setting": "severe", "method": "promax", "seed": 0}
    for name, sets in (("noise", ["noise=0.5"]), ("validation", ["evaluate=validation"])):
        run = start(resolve(None, flags, [*SMALL, *SIZE, *sets]), tmp_path / name, tmp_path)
        add_runs([load_run(run)], store)
    capsys.readouterr()
    assert main(["table", "severe", str(store)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| digits | PRO-MAX")]
    assert len(lines) == 3
    assert sum("| 2 |" in line for line in lines) == 1  # the two seeds that share all settings
    assert sum("params.noise=0.5" in line for line in lines) == 1 and sum("validation" in line for line in lines) == 1
    assert len(group_runs(load_store(store))) == 4


@pytest.mark.parametrize("name", ["accuracy", "cta", "explain", "heatmap", "final", "communication"])
def test_a_figure_from_the_store_has_the_numbers_of_the_folders(runs, store, tmp_path, name):
    pytest.importorskip("matplotlib")
    make_figure(name, [str(runs)], tmp_path / "folders", ["svg"], print)
    make_figure(name, [str(store / "digits.csv")], tmp_path / "stored", ["svg"], print)
    numbers = [json.loads((tmp_path / place / f"{name}.json").read_text()) for place in ("folders", "stored")]
    assert numbers[0] == numbers[1] and numbers[0]


@pytest.mark.parametrize("name", ["embedding", "snapshots", "mismatch"])
def test_a_figure_of_what_a_store_has_not_says_so(store, tmp_path, name):
    pytest.importorskip("matplotlib")
    with pytest.raises(RunFolderError, match=r"is a results store, which has no .*; give "):
        make_figure(name, [str(store)], tmp_path / "out", ["svg"], print)


def test_the_page_shows_rows_and_folders(runs, store, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert command("report", str(store), str(runs / "fedavg-0"), "--out", str(out)) == 0
    data = data_in(out.read_text())
    assert len(data["runs"]) == 5 and len(data["plans"]) == 1  # a store has no plans
    stored = next(run for run in data["runs"] if run["method"] == "promax" and run["seed"] == 1)
    assert stored["plan"] not in data["plans"] and stored["ledger"] and stored["tasks"]


def test_imported_rows_are_in_tables_and_not_in_figures(store, tmp_path, capsys):
    rows = rows_of(store)
    unknown = ("scores", "bytes", "digest", "bytes_down", "bytes_up", "execution", "centred_by_position")
    empty = dict.fromkeys(unknown, "")
    write_rows(store, [row | empty | {"origin": "imported"} for row in rows])
    assert main(["table", "severe", str(store)]) == 0
    assert "PRO-MAX" in capsys.readouterr().out
    assert main(["compare", str(store), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert compared[2]["bytes_up"] is None and compared[2]["norm_comm"] > 0
    pytest.importorskip("matplotlib")
    assert "has no row with scores by task" in error_of_figure(capsys, store)


def error_of_figure(capsys: pytest.CaptureFixture[str], store: Path) -> str:
    assert main(["figure", "accuracy", str(store), "--out", str(store / "figures")]) == 2
    return capsys.readouterr().err


def as_version(run: Run, version: str, seed: int | None = None) -> Run:
    """A finished run as if another version, or another seed, had computed it."""
    config = run.config if seed is None else run.config | {"seed": seed}
    fields = {name: getattr(run, name) for name in ("path", "scores", "ledger", "plan")}
    return Run(config=config, facts=run.facts | {"version": version}, **fields)


def versions_shown(store: Path, sentences: list[str]) -> list[tuple[str, int, str]]:
    kept = comparable_rows(load_store(store), sentences.append)
    return [(run.config["method"], run.values["seed"], run.values["profcil"]) for run in kept]


def test_of_versions_with_as_many_seeds_the_newest_is_shown(folders, store):
    seeds = [run.config["seed"] for run in folders[2:]]
    add_runs([as_version(folders[2], "0.10.0", seed) for seed in seeds], store)
    sentences: list[str] = []
    shown = versions_shown(store, sentences)
    assert [row for row in shown if row[0] == "promax"] == [("promax", seed, "0.10.0") for seed in seeds]
    assert f"left out: {len(seeds)} rows" in sentences[0]


def test_a_version_with_other_results_and_fewer_seeds_does_not_hide_the_others(folders, store):
    before = versions_shown(store, [])
    add_runs([as_version(folders[2], "0.2.0")], store)
    assert len(folders) - 2 > 1
    assert versions_shown(store, []) == before


def test_seeds_of_versions_with_the_same_results_are_shown_together(folders, store, capsys):
    present = versions_shown(store, [])
    add_runs([as_version(folders[2], "0.4.0", seed=7), as_version(folders[2], "0.2.0", seed=8)], store)
    assert versions_shown(store, []) == sorted([*present, ("promax", 7, "0.4.0")])
    capsys.readouterr()
    assert main(["results", "list", "--store", str(store), "--json"]) == 0
    rows = [row for row in json.loads(capsys.readouterr().out) if row["method"] == "promax"]
    together = next(row for row in rows if 7 in row["seeds"])
    assert len(together["seeds"]) > 1 and together["profcil"].startswith("0.4.0, ")
    assert [row["seeds"] for row in rows if row["profcil"] == "0.2.0"] == [[8]]


def test_rows_with_settings_that_no_longer_exist_are_shown_with_them(folders, store, capsys):
    fields = {name: getattr(folders[2], name) for name in ("path", "facts", "scores", "ledger", "plan")}
    old = folders[2].config | {"params": {**folders[2].config["params"], "removed": 3}}
    old["params"].pop("shrink")
    add_runs([Run(config=old, **fields)], store)
    assert main(["table", "severe", str(store)]) == 0
    out = capsys.readouterr().out
    assert "params.removed=3 params.shrink= stream.clients=6" in out and out.count("| PRO-MAX") == 2


def test_other_csv_files_beside_folders_are_skipped(runs, store, tmp_path, capsys):
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    assert main(["compare", str(runs / "fedavg-0"), str(other), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1
    assert main(["compare", str(runs / "fedavg-0"), str(store / "digits.csv"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 5
    assert "its first line has other columns" in error_of(capsys, "compare", other)


def test_the_store_is_read_without_torch(store):
    code = (
        "import sys; from profcil.cli.main import main; "
        f"assert main(['results', 'list', '--store', {str(store)!r}]) == 0; "
        f"assert main(['compare', {str(store)!r}]) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
