"""The commands study, table and diagnose, on tiny digits streams."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from threading import Timer

import numpy as np
import pytest

from profcil import registry
from profcil.cli.main import main
from profcil.cli.study import selected_studies
from profcil.reporting.layouts import LAYOUTS
from profcil.reporting.study_table import COLUMNS, best_variants, markdown, mean_and_deviation, paper_metrics, summarise
from profcil.resolve import resolve
from profcil.runs.folder import RunFolder
from profcil.runs.identity import hash_settings
from profcil.runs.run_files import is_locked
from profcil.studies.definition import Cell, expand_methods, list_cells, load_study, study_names, study_values
from profcil.studies.estimates import estimate_seconds, measure_speeds
from profcil.studies.selection import narrow_study

SMALL = '["train.rounds=1", "train.epochs=1", "warmup.rounds=1", "clients=4", "participants=2", "task_size=5"]'
STUDY = f"""
datasets = ["digits"]
methods = ["fedavg", "promax"]
seeds = [0, 1]
set = {SMALL}
diagnose = true

[[variants]]
name = ""

[[variants]]
name = "no noise"
methods = ["promax"]
set = ["noise=0.0"]
"""


@pytest.fixture
def study(tmp_path: Path) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(STUDY)
    return str(path)


def test_a_study_runs_missing_cells_and_reuses_finished_ones(study, capsys):
    assert main(["study", study, "--out", "cells", "--seeds", "0", "--json"]) == 0
    rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == {"fedavg", "promax", "promax (no noise)"}
    assert all(row["seeds"] == 1 and 0 <= row["faa"][0] <= 100 for row in rows.values())
    assert rows["fedavg"]["norm_comm"] == [1.0, None, 1] and rows["fedavg"]["centred"] is None
    assert rows["promax"]["probe_final"][0] > 20 and -1 <= rows["promax"]["centred"][0] <= 1
    made = {p: p.stat().st_mtime_ns for p in Path("cells").rglob("*")}
    assert main(["study", study, "--out", "cells", "--seeds", "0"]) == 0
    out, err = capsys.readouterr()
    assert "3 runs, 0 of them to do" in err and "promax (no noise)" in out and "run folders: cells" in out
    assert {p: p.stat().st_mtime_ns for p in Path("cells").rglob("*")} == made


def test_finished_runs_on_other_data_are_refused(study, capsys):
    only = ["study", study, "--out", "cells", "--seeds", "0,1", "--methods", "fedavg"]
    assert main(only) == 0
    kept = sorted(Path("cells").glob("*/run.json"))[0]
    facts = json.loads(kept.read_text())
    facts.pop("digests")
    kept.write_text(json.dumps(facts | {"data": "0" * 32}))
    assert main(only) == 2
    assert "finished runs on digits in cells were made from other data" in capsys.readouterr().err
    assert main([*only, "--dry-run"]) == 0  # a dry run only shows what is done


def test_on_a_terminal_the_table_is_aligned_and_not_markdown(study, capsys, monkeypatch):
    small = ["study", study, "--out", "cells", "--dry-run"]
    assert main(small) == 0
    assert "| dataset |" in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(small) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["dataset", "setting", "method"] and "|" not in "".join(lines)


def test_values_of_some_seeds_only_are_shown_with_their_number():
    assert mean_and_deviation([None, 0.5, None]) == (0.5, None, 1) and mean_and_deviation([None]) is None
    mean, deviation, known = mean_and_deviation([0.5, None, 1.5])
    assert (mean, known) == (1.0, 2) and deviation == pytest.approx(0.7071, abs=1e-4)
    row = candidate("pro", 50.0) | dict.fromkeys(COLUMNS) | {"applicable": True, "paper": None}
    text = markdown([row | {"faa": (50.0, 1.0, 3), "align": (0.5, None, 1), "centred": (0.7, 0.1, 2)}])
    assert "| 50.0 ± 1.0 |" in text and "| 0.50 (n = 1) |" in text and "| 0.70 ± 0.10 (n = 2) |" in text


def test_paper_values_are_shown_for_the_papers_stream_only():
    def cora_cell(*sets: str) -> Cell:
        return Cell(resolve(None, {"dataset": "cora", "method": "promax"}, sets), "")

    assert paper_metrics(cora_cell())["faa"] > 0
    assert paper_metrics(replace(cora_cell(), variant="no noise")) is None
    assert paper_metrics(cora_cell("stream.task_size=7")) is None
    assert paper_metrics(cora_cell("noise=0.5"))  # settings of the method may differ


def candidate(method: str, faa: float, seeds: int = 3, dataset: str = "digits") -> dict:
    return {"dataset": dataset, "setting": "severe", "method": method, "seeds": seeds, "faa": (faa, 1.0)}


def test_best_variants_have_the_number_of_variants_tried():
    rows = [candidate("pro (a)", 50.0), candidate("pro (b)", 60.0), candidate("promax (a)", 55.0)]
    rows += [candidate("pro (a)", 70.0, dataset="cora"), candidate("pro (c)", 99.0, seeds=1)]
    rows += [candidate("pro (d)", 0.0) | {"faa": None, "seeds": 0}]
    found = {(r["dataset"], r["method"]): r["tried"] for r in best_variants(rows)}
    assert found == {("digits", "pro (b)"): 3, ("digits", "promax (a)"): 1, ("cora", "pro (a)"): 1}


def test_a_study_can_show_the_best_variants_only(study, capsys):
    assert main(["study", study, "--out", "cells", "--seeds", "0", "--best", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["method"].split(" ")[0]: row["tried"] for row in rows} == {"fedavg": 1, "promax": 2}
    assert main(["study", study, "--out", "cells", "--seeds", "0", "--best"]) == 0
    assert "| tried |" in capsys.readouterr().out


def test_warm_up_traffic_is_shown_if_warm_ups_differ(study, capsys):
    only = ["--out", "cells", "--seeds", "0", "--methods", "promax"]
    assert main(["study", study, *only]) == 0
    assert "MB warm-up" not in capsys.readouterr().out
    Path(study).write_text(STUDY.replace('"noise=0.0"', '"warmup.rounds=2"'))
    assert main(["study", study, *only]) == 0
    head, _, *rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    sent = [float(row.split("|")[head.split("|").index(" MB warm-up ")]) for row in rows]
    assert sent[1] == pytest.approx(2 * sent[0], abs=1)


def test_a_failed_run_does_not_stop_the_others_and_has_no_values(study, capsys):
    text = Path(study).read_text().replace('["noise=0.0"]', '["noise=0.0", "train.loss_limit=0.0"]')
    Path(study).write_text(text)
    assert main(["study", study, "--out", "cells", "--seeds", "0", "--methods", "promax", "--json"]) == 1
    out, err = capsys.readouterr()
    rows = {row["method"]: row for row in json.loads(out)}
    assert "diverged" in err
    assert rows["promax"]["seeds"] == 1 and rows["promax (no noise)"]["seeds"] == 0
    assert rows["promax (no noise)"]["faa"] is None


def test_a_dry_run_counts_and_writes_nothing(study, capsys):
    assert main(["study", study, "--out", "cells", "--dry-run"]) == 0
    assert "6 runs, 6 of them to do" in capsys.readouterr().err
    assert not Path("cells").exists()


def test_cell_names_depend_only_on_settings_that_affect_results(study):
    planned = list_cells(load_study(study))
    assert len({cell.name for cell in planned}) == 6
    Path(study).write_text(STUDY.replace('"train.rounds=1"', '"train.rounds=1", "workers=2"'))
    assert [cell.name for cell in list_cells(load_study(study))] == [cell.name for cell in planned]
    on = [hash_settings(replace(planned[0].config, device=device)) for device in ("cpu", "cuda", "cuda:1")]
    assert on[0] == planned[0].key != on[1] == on[2]  # a GPU draws other random numbers


def test_a_variant_can_be_limited_to_some_settings(tmp_path):
    path = tmp_path / "mine.toml"
    variants = '[[variants]]\nname = "a"\nsettings = ["severe"]\n[[variants]]\nname = "b"\n'
    path.write_text(f'methods = ["fedavg"]\nsettings = ["severe", "homogeneous"]\n{variants}')
    found = sorted((c.variant, c.config.setting) for c in list_cells(load_study(str(path))))
    assert found == [("a", "severe"), ("b", "homogeneous"), ("b", "severe")]


def test_smoke_is_a_smaller_study_with_additional_settings(study):
    Path(study).write_text('set = ["lr=0.1"]\n' + STUDY.replace(f"set = {SMALL}", "")
                           + '\n[smoke]\nseeds = [7]\nset = ["train.rounds=2"]\n')  # fmt: skip
    small, large = list_cells(load_study(study, "smoke")), list_cells(load_study(study))
    assert {c.config.seed for c in small} == {7} and {c.config.seed for c in large} == {0, 1}
    assert {(c.config.train.lr, c.config.train.rounds) for c in small} == {(0.1, 2)}
    assert {c.config.train.rounds for c in large} == {10}


def test_method_groups_are_found_by_capability():
    assert set(expand_methods("all")) == set(registry.names("methods"))
    assert {"pro", "promax"} <= set(expand_methods("replay")) and "fedavg" not in expand_methods("replay")


def test_a_study_can_be_narrowed_and_changed(study):
    planned = list_cells(
        narrow_study(load_study(study), seeds=[5], methods=["promax"], datasets=["cora"], sets=["lr=0.3"])
    )
    assert {(c.config.method, c.config.seed, c.config.dataset, c.config.train.lr) for c in planned} == {
        ("promax", 5, "cora", 0.3)
    }
    assert [c.variant for c in planned] == ["", "no noise"]


@pytest.fixture
def several(study: str, tmp_path: Path) -> str:
    """A file that names two studies, which share a run."""
    fedavg = tmp_path / "fedavg.toml"
    fedavg.write_text(f'title = "FedAvg alone"\nmethods = ["fedavg", "fedprox"]\nseeds = [0, 1]\nset = {SMALL}\n')
    path = tmp_path / "several.toml"
    path.write_text(f'title = "Two studies"\nstudies = ["{study}", "{fedavg}"]\n')
    return str(path)


def test_a_file_may_name_several_studies_whose_shared_runs_are_run_once(several, capsys):
    line = ["study", several, "--out", "cells", "--scale", "short", "--methods", "fedavg"]
    assert main(line) == 0
    out, err = capsys.readouterr()
    assert "1 run, 1 of them to do" in err and "FedAvg alone:" in err and out.count("| fedavg | 1 |") == 2
    assert len(list(Path("cells").glob("*/run.json"))) == 1
    assert main([*line, "--json"]) == 0
    assert [row["method"] for row in json.loads(capsys.readouterr().out)] == ["fedavg", "fedavg"]


def test_of_several_studies_only_those_with_the_methods_asked_for_are_run(several, capsys):
    assert main(["study", several, "--methods", "promax", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert "4 runs, 4 of them to do" in err and "FedAvg alone" not in out + err
    assert main(["study", several, "--datasets", "cora", "--dry-run"]) == 2
    assert "none of the studies has cora" in capsys.readouterr().err
    assert main(["study", several, "--methods", "fedavgg"]) == 2
    assert "did you mean fedavg" in capsys.readouterr().err


def test_the_whole_paper_is_one_study(capsys):
    assert main(["study", "paper", "--scale", "short", "--dry-run", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"cifar100", "tinyimagenet", "ogbn_arxiv"} <= {row["dataset"] for row in rows}
    named = {name for layout in LAYOUTS.values() for name in layout.studies}
    assert named <= set(study_values("paper")["studies"])


def test_the_device_of_all_runs(study):
    flags = {"scale": "short", "seeds": None, "methods": "fedavg", "datasets": None, "set": ["lr=0.3"]}
    (one,) = selected_studies(study, Namespace(**flags, device="cuda:1"))
    assert [(c.config.device, c.config.train.lr) for c in list_cells(one)] == [("cuda:1", 0.3)]
    (one,) = selected_studies(study, Namespace(**flags, device=None))
    assert [c.config.device for c in list_cells(one)] == ["cpu"]


def test_short_is_the_first_seed(study):
    found = list_cells(load_study(study, "short"))
    first = [cell for cell in list_cells(load_study(study)) if cell.config.seed == 0]
    assert [cell.name for cell in found] == [cell.name for cell in first]


def test_a_method_of_another_modality_is_not_applicable(study, capsys, monkeypatch):
    monkeypatch.setattr(registry.find("methods", "fedavg").METHOD, "modalities", frozenset({"text"}))
    assert main(["study", study, "--out", "cells", "--dry-run", "--seeds", "0"]) == 0
    out, err = capsys.readouterr()
    assert "2 runs, 2 of them to do, in cells; 1 not applicable" in err and "| fedavg | 0 | not applicable |" in out


def record(folder: Path, method: str, seconds: float, rounds: int, dataset: str = "digits") -> None:
    config = {"dataset": dataset, "method": method, "train.rounds": rounds, "train.epochs": 1}
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"done": True, "seconds": seconds, "config": config}))


def test_time_is_estimated_from_the_same_method_or_dataset(study, tmp_path):
    planned = list_cells(
        narrow_study(load_study(study), seeds=[0])
    )  # fedavg, promax, promax without noise: one round each
    assert estimate_seconds(planned, tmp_path) == (0, 3)
    record(tmp_path / "a", "fedavg", 12.0, rounds=4)
    assert estimate_seconds(planned, tmp_path) == (9.0, 0)
    record(tmp_path / "b", "promax", 20.0, rounds=2)
    assert estimate_seconds(planned, tmp_path) == (3.0 + 2 * 10.0, 0) and estimate_seconds(
        planned, tmp_path, jobs=2
    ) == (
        11.5,
        0,
    )
    record(tmp_path / "c", "promax", 1.0, rounds=1, dataset="cora")
    for name, text in (("d", "[]"), ("e", '{"done": true}'), ("f", '{"done": true, "seconds": 1, "config": []}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    assert measure_speeds(tmp_path)["digits", "promax", "cpu"] == 10.0
    far = list_cells(narrow_study(load_study(study), seeds=[0], datasets=["clinc150"]))
    assert estimate_seconds(far, tmp_path) == (0, 3)


def test_time_is_estimated_from_a_results_store_where_the_folder_has_none(study, tmp_path, capsys):
    tiny = ["train.rounds=2", "train.epochs=1", "warmup.rounds=1", "task_size=5", "model.width=4"]
    sets = [part for item in tiny for part in ("--set", item)]
    assert main(["run", "--method", "fedavg", "--out", "one", "--quiet", *sets]) == 0
    assert main(["results", "add", "one", "--store", "store"]) == 0
    took = json.loads(Path("one/run.json").read_text())["seconds"]
    planned = list_cells(narrow_study(load_study(study), seeds=[0]))  # three runs of a round each, one of them fedavg
    assert estimate_seconds(planned, tmp_path / "none", store=Path("store")) == (pytest.approx(took / 2), 2)
    on_a_gpu = [replace(cell, config=replace(cell.config, device="cuda:0")) for cell in planned]
    assert estimate_seconds(on_a_gpu, tmp_path / "none", store=Path("store")) == (0, 3)
    record(tmp_path / "runs" / "a", "fedavg", 40.0, rounds=4)
    # The folder of the study counts first.
    assert estimate_seconds(planned[:1], tmp_path / "runs", store=Path("store")) == (
        10.0,
        0,
    )  # this folder counts first
    capsys.readouterr()
    assert main(["study", study, "--out", "cells", "--dry-run", "--seeds", "0", "--store", "store"]) == 0
    assert "for 1 of them; no estimate for 2" in capsys.readouterr().err
    Path("store/digits.csv").write_text("damaged")
    assert estimate_seconds(planned, tmp_path / "none", store=Path("store")) == (0, 3)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_study_prints_one_sentence_and_can_continue(study, ending):
    """Ctrl-C during a run: it saves, no other run starts, and the same command completes the study."""
    Path(study).write_text(STUDY.replace('"train.rounds=1"', '"train.rounds=40"').replace("diagnose = true", ""))
    line = [sys.executable, "-m", "profcil", "study", study, "--out", "cells", "--seeds", "0", "--methods", "fedavg"]
    default_sigint = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 - background jobs of a shell ignore it
    job = subprocess.Popen(
        line, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, preexec_fn=default_sigint
    )
    started = time.monotonic()
    while not list(Path("cells").glob("*/run.json")) and time.monotonic() - started < 100:
        time.sleep(0.05)
    job.send_signal(ending)
    lines = job.communicate(timeout=100)[1].strip().splitlines()
    assert job.returncode == 128 + ending and lines[-1].startswith("profcil: interrupted; 0 of 1 runs are done")
    (folder,) = (p for p in Path("cells").iterdir() if p.is_dir())
    assert not json.loads((folder / "run.json").read_text())["done"]
    assert main(line[3:]) == 0
    assert json.loads((folder / "run.json").read_text())["done"]


def test_runs_of_a_killed_study_save_and_end(study):
    """SIGKILL cannot be forwarded: the run detects it, saves and ends, and the same command continues it."""
    Path(study).write_text(STUDY.replace('"train.rounds=1"', '"train.rounds=400"').replace("diagnose = true", ""))
    line = ["study", study, "--out", "cells", "--seeds", "0", "--methods", "fedavg", "--jobs", "2"]
    ignore_sigint = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)  # noqa: E731 - like a background job of a shell
    job = subprocess.Popen(
        [sys.executable, "-m", "profcil", *line], stderr=subprocess.DEVNULL, preexec_fn=ignore_sigint
    )
    started = time.monotonic()
    while not list(Path("cells").glob("*/run.json")) and time.monotonic() - started < 100:
        time.sleep(0.05)
    (folder,) = (p for p in Path("cells").iterdir() if p.is_dir())
    assert is_locked(folder / "lock")
    job.kill()
    job.wait()
    while is_locked(folder / "lock") and time.monotonic() - started < 100:
        time.sleep(0.05)
    facts = json.loads((folder / "run.json").read_text())
    assert not facts["done"] and "interrupted" in (Path("cells") / f"{folder.name}.log").read_text()


def test_a_study_waits_for_a_run_that_is_saving(study):
    """The case of a command that is repeated right after it was killed."""
    (cell,) = list_cells(narrow_study(load_study(study), seeds=[0], methods=["fedavg"]))
    other = RunFolder(Path("cells") / cell.name)
    Timer(1.0, other.lock.close).start()
    assert main(["study", study, "--out", "cells", "--seeds", "0", "--methods", "fedavg"]) == 0


WEAK = """
methods = ["pro"]
set = ["task_size=3", "train.rounds=1", "train.epochs=1", "warmup.rounds=1", "clients=4", "participants=4",
       "support=1.0", "keep_memories=true"]
diagnose = true

[[variants]]
name = "clean"

[[variants]]
name = "severe"
set = ["weak_task=1", "weak_strength=severe"]
"""


def test_a_weak_task_study_writes_points_trends_snapshots_and_replay(tmp_path, capsys):
    (tmp_path / "weak.toml").write_text(WEAK)
    assert main(["study", "weak.toml", "--out", "cells"]) == 0
    (row,) = json.loads(Path("cells/mismatch.json").read_text())
    assert (row["method"], row["strength"], row["task"], row["seed"]) == ("pro", "severe", 1, 0)
    assert all(isinstance(row[key], float) for key in ("mmd2", "w1", "cosine", "weak_accuracy", "drop"))
    (trend,) = json.loads(Path("cells/mismatch-trends.json").read_text())
    assert trend["rho"] is None and "at least 3" in trend["why"]
    folders = [str(p) for p in Path("cells").iterdir() if p.is_dir()]
    assert len(folders) == 2
    for folder in folders:
        shots, replay = (np.load(Path(folder) / name) for name in ("snapshots.npz", "replay.npz"))
        assert {"refreshed", "stale", "aligned"} == set(shots["kind"].tolist())
        assert json.loads(str(replay["attrs"]))["method"] == "pro" and len(replay["real"]) == len(
            replay["replay_label"]
        )
    capsys.readouterr()
    assert main(["table", "weak-task", *folders, "--json"]) == 0
    found = {(r["strength"], r["metric"]): r["mean"] for r in json.loads(capsys.readouterr().out)}
    assert found["severe", "mmd2"] == row["mmd2"] and found["severe", "drop"] == row["drop"]
    assert found["clean", "mmd2"] is None and found["clean", "faa"] is not None


def test_tables_are_printed_from_a_study_and_from_folders(runs, capsys):
    assert main(["table", "severe", *map(str, runs.values())]) == 0
    out = capsys.readouterr().out
    assert "| digits | PRO | 2 |" in out and "| digits | FedAvg | 1 |" in out and "**1.000**" in out
    assert main(["table", "severe", "--out", "nowhere", "--scale", "smoke", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows and all(row["mean"] is None and row["planned"] == [0, 1] for row in rows)
    assert main(["table", "homogeneous", str(runs["pro"])]) == 0
    assert "do not belong" in capsys.readouterr().err
    assert main(["table", "list"]) == 0
    assert "support-sweep:" in capsys.readouterr().out


def test_every_table_has_studies_with_a_smoke_scale():
    named = {name for layout in LAYOUTS.values() for name in layout.studies}
    assert named <= set(study_names()) and named <= set(LAYOUTS)
    for name in named:
        small = list_cells(load_study(name, "smoke"))
        assert small and {c.config.dataset for c in small} == {"digits"}, name
        assert all(c.config.train.rounds <= 3 for c in small), name


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["study", "demmo"], "demo"),
        (["study", "missing.toml"], "does not exist"),
        (["study"], "study"),
        (["study", "demo", "--scale", "smoke"], "no [smoke] table"),
        (["study", "severe", "--scale", "tiny"], "paper, short, smoke"),
        (["study", "demo", "--seeds", "a"], "whole numbers"),
        (["study", "demo", "--jobs", "0"], "at least 1"),
        (
            ["study", "demo", "--methods", "fedprox"],
            "choose among its methods: fedavg, prolin, promax",
        ),
        (["study", "demo", "--methods", "fedavg,fedprox"], "method 'fedprox' is not in the study"),
        (["study", "demo", "--methods", "fedavg,fedporx"], "did you mean fedprox"),
        (["table", "severe", "--methods", "fedavg,fedporx"], "did you mean fedprox"),
        (["table", "seveer"], "severe"),
        (["table", "severe", "--format", "html"], "latex"),
        (["table", "severe", "nowhere"], "does not exist"),
        (["diagnose", "nowhere"], "does not exist"),
    ],
)
def test_errors_are_sentences(line, message, capsys):
    assert main(line) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeds = []", "has no seeds"),
        ("studies = []", "allowed are a list of names of studies"),
        ('studies = ["demo"]\nseeds = [0]', "has seeds, studies, allowed are a list"),
        ('studies = ["demmo"]', "did you mean demo?"),
        ("smoke = 3", "smoke = 3, which is not a table"),
        ("variants = [3]", "is not a table"),
        ('[[variants]]\ndatasets = ["corra"]', "unknown dataset 'corra'; did you mean cora?"),
        ('[[variants]]\nsettings = ["sever"]', "unknown setting 'sever'"),
    ],
)
def test_a_study_with_wrong_types_is_refused(text, message, tmp_path, capsys):
    (tmp_path / "mine.toml").write_text(text + "\n")
    assert main(["study", str(tmp_path / "mine.toml"), "--dry-run"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "train = 5",
        "params = 3",
        "methods = 3",
        "stream = []",
        "dataset = 5",
        "setting = [1]",
        'train = "abc"',
        "method = 4",
        "[methods]\npromax = 4",
        'dataset = ""',
    ],
)
def test_a_recipe_with_wrong_types_is_refused(text, tmp_path, capsys):
    (tmp_path / "mine.toml").write_text(text + "\n")
    assert main(["run", str(tmp_path / "mine.toml"), "--dry-run"]) == 2
    message = capsys.readouterr().err
    assert "unexpected" not in message and len(message.splitlines()) == 1


def test_missing_data_is_said_once_before_the_first_run(study, capsys):
    line = ["study", study, "--out", "cells", "--data-dir", "empty", "--datasets", "digits,cora,clinc150"]
    assert main([*line, "--dry-run"]) == 0
    assert capsys.readouterr().err.count("was not found") == 1
    assert main(line) == 2
    _, message = capsys.readouterr().err.splitlines()
    assert message.startswith("profcil: 12 runs cannot start: ") and message.count("was not found") == 1
    assert "profcil data fetch cora" in message and message.endswith("also missing: clinc150")
    assert not Path("cells").exists()


def test_a_method_that_no_variant_runs_is_refused(tmp_path, capsys):
    text = 'methods = ["fedavg", "pro"]\n[[variants]]\nmethods = ["pro"]\n'
    (tmp_path / "mine.toml").write_text(text)
    assert main(["study", str(tmp_path / "mine.toml"), "--dry-run"]) == 2
    assert "names the method fedavg, but every variant has methods of its own" in capsys.readouterr().err
    (tmp_path / "mine.toml").write_text(text + "[[variants]]\n")
    assert main(["study", str(tmp_path / "mine.toml"), "--dry-run"]) == 0


def test_plug_ins_in_a_group_of_methods_are_named(tmp_path, capsys, register_method):
    register_method(type("Other", (registry.find("methods", "fedavg").METHOD,), {}))
    for methods, said in (('"all"', True), ('["fedavg"]', False)):
        (tmp_path / "mine.toml").write_text(f"methods = {methods}\n")
        assert main(["study", str(tmp_path / "mine.toml"), "--dry-run"]) == 0
        assert ('"all" includes plug-ins: registered' in capsys.readouterr().err) == said


def test_variants_without_a_name_are_named_by_the_settings_that_differ(tmp_path):
    variants = '[[variants]]\nset = ["noise=0.1"]\n[[variants]]\nset = ["noise=0.2"]\n'
    (tmp_path / "mine.toml").write_text(f'methods = ["pro"]\nset = ["lr=0.3"]\nseeds = [0, 1]\n{variants}')
    cells = list_cells(load_study(str(tmp_path / "mine.toml")))
    assert [cell.label for cell in cells] == ["pro (noise=0.1)"] * 2 + ["pro (noise=0.2)"] * 2
    rows = summarise(cells, tmp_path)
    assert [(row["method"], row["planned"]) for row in rows] == [("pro (noise=0.1)", 2), ("pro (noise=0.2)", 2)]


def test_an_unknown_key_of_a_study_is_reported(tmp_path, capsys):
    (tmp_path / "mine.toml").write_text('method = ["pro"]\n')
    assert main(["study", str(tmp_path / "mine.toml")]) == 2
    assert "methods" in capsys.readouterr().err


def test_diagnose_prints_and_saves_probe_and_alignment(runs, capsys):
    assert main(["diagnose", str(runs["pro"]), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((runs["pro"] / "diagnostics.json").read_text())
    assert report["probe_warm"]["ridge"] > 20 and len(report["alignment"]) == 2
    assert main(["diagnose", str(runs["pro"])]) == 0
    text = capsys.readouterr().out
    assert "warmed base: ridge" in text and "input of predictions" not in text


def test_diagnose_probes_all_features_that_predictions_use(tmp_path, capsys):
    small = ["train.rounds=2", "train.epochs=1", "warmup.rounds=1", "stream.task_size=5", "dictionary=30"]
    sets = [part for s in [*small, "anchor=true"] for part in ("--set", s)]
    assert main(["run", "--dataset", "digits", "--method", "prolin", "--out", str(tmp_path / "run"), *sets]) == 0
    assert main(["diagnose", str(tmp_path / "run"), "--json"]) == 0
    out = capsys.readouterr().out
    report = json.loads(out[out.index("{") :])
    assert report["probe_seen"]["ridge"] != report["probe_final"]["ridge"]
    assert main(["diagnose", str(tmp_path / "run")]) == 0
    assert f"input of predictions: ridge {report['probe_seen']['ridge']:.1f} %" in capsys.readouterr().out


def test_diagnose_has_no_probe_of_a_base_that_is_not_used(tmp_path, capsys):
    """With the recipe of PRO-LIN no network is used."""
    sets = ["--set=train.rounds=1", "--set=stream.task_size=5", "--set=dictionary=30"]
    assert main(["run", "--dataset", "digits", "--method", "prolin", "--out", str(tmp_path / "run"), *sets]) == 0
    capsys.readouterr()
    assert main(["diagnose", str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert "base: ridge" not in text and "input of predictions: ridge" in text


def test_every_built_in_study_is_listed_and_resolves(capsys):
    assert main(["list", "studies", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["demo"]["runs"] == 3 and all(row["runs"] > 0 and row["title"] for row in rows.values())
