"""Several values on one command line are a sweep."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from profcil.cli.main import main
from profcil.config import setting
from profcil.errors import ConfigError
from profcil.methods.base import Method, Params
from profcil.studies.sweep import is_sweep, split_text, sweep_cells


@dataclass(frozen=True)
class Listed(Params):
    taus: tuple[float, ...] = setting((1.0,), "temperatures")
    cap: float | None = setting(None, "a limit")


class Plugin(Method):
    """A method of another package."""

    Params = Listed


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("0.1", ["0.1"]),
        ("0.1, 0.2,0.5", ["0.1", "0.2", "0.5"]),
        ("[1,2]", ["[1,2]"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ("[[1,2],[3]],[[4]]", ["[[1,2],[3]]", "[[4]]"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("", [""]),
    ],
)
def test_commas_outside_brackets_and_quotes_separate_values(text, parts):
    assert split_text(text) == parts


def test_a_grid_has_every_combination_and_names_what_differs():
    cells = sweep_cells("digits", {"method": "promax", "seed": "0,1"}, ["noise=0.1,0.2", "lr=0.5", "sampler=derange"])
    found = [(c.config.seed, c.config.params.noise, c.config.train.lr) for c in cells]
    assert found == [(0, 0.1, 0.5), (0, 0.2, 0.5), (1, 0.1, 0.5), (1, 0.2, 0.5)]
    assert [c.settings for c in cells] == [{"params.noise": 0.1}, {"params.noise": 0.2}] * 2
    assert [c.label for c in cells[:2]] == ["promax (noise=0.1)", "promax (noise=0.2)"]


def test_equal_combinations_are_one_run():
    assert len(sweep_cells(None, {"seed": "0,0"}, ["lr=0.5,0.50"])) == 1


def test_methods_datasets_and_settings_can_be_swept():
    flags = {"dataset": "digits,cora", "method": "fedavg,mfcl", "setting": "severe,homogeneous"}
    cells = sweep_cells(None, flags, [])
    assert len({c.name for c in cells}) == 8
    assert {(c.config.dataset, c.config.method) for c in cells if not c.applicable} == {("cora", "mfcl")}


def test_one_value_is_no_sweep():
    assert not is_sweep({"seed": "0", "method": "pro", "data": "a,b.csv"}, ["noise=0.1", "own.label=a,b"])
    assert is_sweep({"seed": "0,1"}, []) and is_sweep({}, ["noise=0.1,0.2"])
    Path("a,b.py").write_text("")
    assert not is_sweep({"method": "a,b.py"}, []) and not is_sweep({}, {"encoder": "a,b"})
    assert is_sweep({"seed": [0, 1]}, {}) and not is_sweep({"seed": 0}, {"taus": (1.0, 2.0)})


def test_a_list_is_one_value_and_lists_are_several(register_method: Callable[[type], None]):
    register_method(Plugin)
    flags = {"method": "registered"}
    assert not is_sweep(flags, ["taus=[1.0, 2.0]"])
    assert [c.config.params.taus for c in sweep_cells(None, flags, ["taus=[1,2],[3]"])] == [(1.0, 2.0), (3.0,)]
    assert [c.config.params.taus for c in sweep_cells(None, flags, {"taus": [(1, 2), (3,)]})] == [(1.0, 2.0), (3.0,)]
    assert [c.config.params.cap for c in sweep_cells(None, flags, ["cap=none,0.5"])] == [None, 0.5]
    for sets in (["taus=1,2"], {"taus": [1, 2]}):
        with pytest.raises(ConfigError, match=r"may mean one list or 2 values; write taus=\[1,2\] for one list"):
            sweep_cells(None, flags, sets)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--seed", "0,,1"], "has an empty value"),
        (["--set", "noise=0.1,"], "has an empty value"),
        (["--seed", "0,x"], "seed = 'x' is not a whole number"),
        (["--method", "pro,fedavg", "--set", "noise=0.1,0.2"], "unknown setting 'noise'"),
        (["--set", "nois=0.1,0.2"], "did you mean noise"),
        (["--seed", "0,1", "--jobs", "0"], "at least 1"),
        (["--seed", "0,1", "--again"], "--again repeats one run"),
        (["--seed", "0,1", "--tensorboard"], "--tensorboard is for one run"),
    ],
)
def test_mistakes_are_one_sentence(line, words, capsys):
    assert main(["run", *line]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1 and not Path("runs").exists()


def test_a_sweep_is_planned_run_and_reused(capsys, small):
    line = ["run", "--method", "fedavg", "--seed", "0,1", "--set", "lr=0.01,0.02", *small]
    assert main([*line, "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert "4 runs, 4 of them to do, in runs/sweep" in err and not Path("runs").exists()
    assert out.splitlines()[:3] == ["| lr | seeds |", "| --- | --- |", "| 0.01 | 0 of 2 |"]
    assert main(line) == 0
    head, _, first, second, *_ = capsys.readouterr().out.splitlines()
    assert head.split(" | ")[:3] == ["| lr", "seeds", "FAA"] and "method" not in head and "dataset" not in head
    assert first.startswith("| 0.01 | 2 | ") and second.startswith("| 0.02 | 2 | ") and " ± " in first
    made = {p: p.stat().st_mtime_ns for p in Path("runs").rglob("*")}
    assert main([*line, "--json"]) == 0
    out, err = capsys.readouterr()
    assert [row["settings"] for row in json.loads(out)] == [{"train.lr": 0.01}, {"train.lr": 0.02}]
    assert "4 runs, 0 of them to do" in err
    assert {p: p.stat().st_mtime_ns for p in Path("runs").rglob("*")} == made


def test_own_data_and_a_method_file_can_be_swept(capsys, small, tmp_path):
    rows = [f"{i % 7},{i % 5},{'ab'[i % 2]}" for i in range(60)]
    (tmp_path / "mine.csv").write_text("\n".join(["x,y,label", *rows]) + "\n")
    (tmp_path / "mine.py").write_text(
        "from profcil.extend import Method\n\n\nclass Mine(Method):\n    pass\n\n\nMETHOD = Mine\n"
    )
    sets = ["--set", "train.rounds=1,2", "--set", "clients=2", "--set", "participants=2", "--set", "warmup.rounds=0"]
    assert main(["run", "--data", "mine.csv", "--method", "./mine.py", *sets, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["method"], row["seeds"]) for row in rows] == [("mine (rounds=1)", 1), ("mine (rounds=2)", 1)]
