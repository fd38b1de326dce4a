"""Own data from the command line: every command of docs/own-data.md, accuracy, resuming, and mistakes."""

from __future__ import annotations

import csv
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from profcil import api
from profcil.cli.main import main
from profcil.engine import recorder
from profcil.engine import run as engine
from profcil.errors import RunFolderError
from profcil.runs.reader import load_run

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "data"))  # for the module `own_files`

from own_files import CLASSES, write_graph, write_images, write_table, write_texts  # noqa: E402

PAGE = (ROOT / "docs" / "own-data.md").read_text(encoding="utf-8")
QUICK = [part for item in ("train.rounds=1", "train.epochs=1", "warmup.rounds=1") for part in ("--set", item)]
MINE = """
from dataclasses import dataclass
from profcil.extend import Method, Params, cross_entropy, setting


@dataclass(frozen=True)
class MyParams(Params):
    scale: float = setting(2.0, "factor of the logits", low=0.0)


class Mine(Method):
    Params = MyParams

    def fit_loss(self, net, batch):
        logits = net(*net.weak(batch["inputs"], batch["rng"]))
        return cross_entropy(logits * self.params.scale, batch["y"], batch["allowed"])


METHOD = Mine
"""


def write_sklearn(name: str, path: Path) -> Path:
    from sklearn import datasets

    raw = getattr(datasets, f"load_{name}")()
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*raw.feature_names, "label"])
        writer.writerows([*x, raw.target_names[y]] for x, y in zip(raw.data, raw.target, strict=True))
    return path


def write_digits(path: Path) -> Path:
    """The digits as class folders of PNG files, with the pixels of the built-in dataset."""
    image = pytest.importorskip("PIL.Image")
    from sklearn.datasets import load_digits

    raw = load_digits()
    for i, (x, y) in enumerate(zip(raw.images, raw.target, strict=True)):
        (path / str(y)).mkdir(parents=True, exist_ok=True)
        image.fromarray((x.astype(np.int64) * 255 // 16).astype(np.uint8)).save(path / str(y) / f"{i:04}.png")
    return path


def faa(folder: str | Path) -> float:
    return load_run(folder).metrics["faa"]


# -- the page ---------------------------------------------------------------------------------------------------------


def blocks(language: str = "") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_every_command_of_the_page_works(tmp_path, capsys):
    pytest.importorskip("torch_geometric")
    write_sklearn("wine", Path("wine.csv"))
    write_digits(Path("digits"))
    write_texts(Path("reviews.csv"))
    write_texts(Path("reviews.jsonl"))
    write_graph(Path("papers"))
    Path("tasks.txt").write_text("ant, bee\ncat, dog\n")
    Path("mine.py").write_text(MINE)
    lines = [line.partition("#")[0] for block in blocks() for line in block.splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith("profcil ")]
    assert len(commands) >= 11
    for _, *command in commands:
        assert main([*command, *(["--quiet"] if command[0] == "run" else [])]) == 0, command
        assert capsys.readouterr().err == "", command
    assert faa("runs/digits-severe-prolin-seed0") > 98 and faa("runs/wine-severe-prolin-seed0") > 90
    assert faa("runs/reviews-severe-prolin-seed0") > 90 and faa("runs/papers-severe-prolin-seed0") > 90
    assert [list(task) for task in load_run("runs/papers-severe-prolin-seed0").plan.tasks] == [[0, 1], [2, 3]]


def test_the_python_of_the_page_runs(tmp_path, monkeypatch):
    write_sklearn("wine", Path("wine.csv"))
    Path("mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    (block,) = blocks("python")
    exec(compile(block, "docs/own-data.md", "exec"), {})
    sys.modules.pop("mine", None)
    assert len(list(Path("runs").iterdir())) == 3


def test_every_setting_that_the_page_names_exists():
    from profcil.config import OwnSettings

    named = set(re.findall(r"\bown\.(\w+)", PAGE))
    assert named and all(hasattr(OwnSettings(), name) for name in named)


# -- accuracy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["wine", "breast_cancer"])
def test_prolin_on_tables(name, tmp_path):
    write_sklearn(name, tmp_path / "m.csv")
    found = []
    for seed in ("0", "1", "2"):
        assert main(["run", "--data", "m.csv", "--method", "prolin", "--seed", seed, "--out", seed, "--quiet"]) == 0
        found.append(faa(seed))
    assert min(found) > 90


def test_images_in_folders_score_near_the_built_in_dataset(tmp_path):
    write_digits(tmp_path / "mine")
    assert main(["run", "--data", "mine", "--method", "prolin", "--out", "own", "--quiet"]) == 0
    assert main(["run", "--dataset", "digits", "--method", "prolin", "--out", "known", "--quiet"]) == 0
    assert abs(faa("own") - faa("known")) < 3
    assert load_run("own").config["stream"] == load_run("known").config["stream"]


# -- a run can be resumed, examined and compared ---------------------------------------------------------------------


class Stopped(Exception):
    pass


@pytest.mark.parametrize(("write", "name"), [(write_table, "m.csv"), (write_texts, "m.jsonl"), (write_images, "m")])
def test_a_stopped_run_on_own_data_is_resumed_to_the_same_bits(write, name, tmp_path, monkeypatch):
    write(tmp_path / name)
    line = ["run", "--data", name, "--method", "promax", "--tasks", "arrival", "--quiet", *QUICK]
    assert main([*line, "--out", "whole"]) == 0

    def stop(progress):
        if progress.what == "position":
            raise Stopped

    config = engine.resolve("whole/config.toml")
    monkeypatch.setattr(recorder, "MIN_SAVE_SECONDS", 0)
    with pytest.raises(Stopped):
        engine.start(config, Path("part"), tmp_path / name, stop)
    assert not load_run("part").done
    assert main(["resume", "part", "--quiet"]) == 0
    assert np.array_equal(load_run("part").scores.correct, load_run("whole").scores.correct)
    assert load_run("part").config == load_run("whole").config


def test_changed_data_is_refused_when_resuming(tmp_path, monkeypatch, capsys):
    write_table(tmp_path / "m.csv")
    assert main(["run", "--data", "m.csv", "--method", "fedavg", "--out", "r", "--quiet", *QUICK]) == 0
    write_table(tmp_path / "m.csv", 11)
    assert main(["diagnose", "r"]) == 2
    assert "is not what r began with; give the same --data-dir" in capsys.readouterr().err


def test_runs_on_own_data_are_compared_by_the_name_of_their_file(tmp_path, capsys):
    for name in ("first", "second"):
        write_table(tmp_path / f"{name}.csv")
        assert main(["run", "--data", f"{name}.csv", "--method", "fedavg", "--quiet", *QUICK]) == 0
    capsys.readouterr()
    assert main(["compare", "runs"]) == 0
    shown = capsys.readouterr().out
    assert "own first" in shown and "own second" in shown and "mean of" not in shown
    assert main(["diagnose", "runs/first-severe-fedavg-seed0"]) == 0
    assert main(["report", "runs", "--out", "page.html"]) == 0
    assert "own second" in Path("page.html").read_text()


def test_dry_run_shows_what_was_found(tmp_path, capsys):
    write_table(tmp_path / "m.csv")
    assert main(["run", "--data", "m.csv", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for line in ('modality = "table"', "# classes: 4", "# training examples: 40", "# test examples: 8"):
        assert line in shown


# -- methods from files ----------------------------------------------------------------------------------------------


def test_a_method_from_a_file_is_recorded_and_needed_unchanged(tmp_path, capsys):
    write_table(tmp_path / "m.csv")
    Path("mine.py").write_text(MINE)
    assert main(["run", "--data", "m.csv", "--method", "./mine.py", "--quiet", *QUICK]) == 0
    run = load_run("runs/m-severe-mine-seed0")
    assert run.config["method"] == str(tmp_path / "mine.py") and run.config["params"]["scale"] == 2.0
    assert len(run.facts["plugins"]["methods"]["source"]) == 32
    capsys.readouterr()
    assert main(["compare", "runs"]) == 0 and "\nmine " in capsys.readouterr().out
    Path("mine.py").write_text(MINE.replace("2.0", "4.0"))
    with pytest.raises(RunFolderError, match=r"has changed since .* began; restore it"):
        engine.check_method_source(run.path, engine.resolve(str(run.path / "config.toml")), run.facts)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (None, "method file nowhere.py does not exist"),
        ("x = (", "cannot be executed (SyntaxError"),
        ("x = 1", "is a module without METHOD"),
        ("METHOD = int", "derive it from profcil.extend.Method"),
    ],
)
def test_a_file_that_is_no_method(source, sentence, tmp_path, capsys):
    if source is not None:
        Path("nowhere.py").write_text(source)
    assert main(["run", "--method", "nowhere.py"]) == 2
    shown = capsys.readouterr().err
    assert sentence.replace("nowhere.py", str(tmp_path / "nowhere.py")) in shown and shown.count("\n") == 1


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_mistakes_are_one_sentence_and_status_2(tmp_path, capsys):
    write_table(tmp_path / "m.csv")
    Path("empty").mkdir()
    for line, part in (
        (["--data", "nowhere"], "nowhere does not exist"),
        (["--data", "empty"], "is not data that can be read"),
        (["--data", "m.csv", "--set", "own.label=lable"], "did you mean label?"),
        (["--data", "m.csv", "--set", "clients=99"], "40 training examples for 99 clients"),
        (["--data", "m.csv", "--tasks", "9"], "4 classes; give at most as many tasks"),
        (["--data", "m.csv", "--method", "target"], "not applicable: TARGET needs BatchNorm statistics"),
        (["--data", "m.csv", "--method", "power"], "not applicable"),
        (["--dataset", "digits", "--tasks", "2"], "--tasks divides own data"),
    ):
        assert main(["run", *line, "--quiet"]) == 2, line
        shown = capsys.readouterr().err
        assert part in shown and shown.count("\n") == 1, shown
    assert not list(Path("runs").rglob("*"))


def test_resized_images_are_said(tmp_path, capsys):
    write_images(tmp_path / "m", size=12, classes=CLASSES[:3])
    write_images(tmp_path / "m", size=20, classes=CLASSES[3:])
    assert main(["plan", "--data", "m"]) == 0
    assert "profcil: note: m has images of 2 sizes; all are resized" in capsys.readouterr().err


def test_data_of_a_python_call_stays_with_its_run(tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 3))
    run = api.run(data=(x, x[:, 0] > 0), method="fedavg", out="r", settings={"train.rounds": 1, "warmup.rounds": 1})
    assert run.done and Path("r/data.npz").exists() and main(["diagnose", "r"]) == 0
