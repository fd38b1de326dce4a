"""list, data, compare and doctor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from profcil import registry
from profcil.cli.main import main
from profcil.cli.progress import plain_download
from profcil.resolve import preset_names, recipe_names

KEYS = {"method", "dataset", "setting", "seed", "faa", "cta", "af", "bytes_down", "bytes_up", "norm_comm", "seconds"}
KEYS |= {"warmup_seconds", "peak_memory_mb"}
EXTRA = {"done", "path", "computed", "bytes_total", "server_memory_bytes", "client_extra_bytes", "settings"}
EXTRA |= {"worst_client", "client_sd", "bwt", "fwt"}


def printed(capsys: pytest.CaptureFixture[str], *line: str, status: int = 0) -> str:
    assert main(list(line)) == status
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("methods", registry.names("methods")),
        ("datasets", registry.names("data")),
        ("encoders", registry.names("encoders")),
        ("recipes", recipe_names()),
        ("presets", preset_names()),
    ],
)
def test_list(capsys: pytest.CaptureFixture[str], kind: str, names: list[str]) -> None:
    rows = json.loads(printed(capsys, "list", kind, "--json"))
    assert [row["name"] for row in rows] == names and all(row["title"] for row in rows)
    lines = printed(capsys, "list", kind).splitlines()
    assert [line.split()[0] for line in lines[1:]] == names  # one line each, however wide


def test_data_status_and_verify(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(printed(capsys, "data", "status", "--data-dir", "empty", "--json"))
    assert [row["dataset"] for row in rows if row["complete"]] == ["digits"]
    assert "profcil data fetch cora" in printed(capsys, "data", "status", "cora", "--data-dir", "empty")
    assert "digits: ok" in printed(capsys, "data", "verify", "--data-dir", "empty")
    wrong = json.loads(printed(capsys, "data", "verify", "digits", "cora", "--data-dir", "empty", "--json", status=1))
    assert [(row["dataset"], row["ok"]) for row in wrong] == [("digits", True), ("cora", False)]


def test_data_dir_from_the_environment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROFCIL_DATA", "/elsewhere")
    assert main(["data", "verify", "cora"]) == 1
    assert "/elsewhere/cora" in capsys.readouterr().out


def test_data_fetch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(facts, root: Path, progress) -> list[Path]:
        progress("x.zip", 5, 10)
        progress("x.zip", 10, 10)
        return [root / "x"]

    monkeypatch.setattr("profcil.data.fetch.fetch", fetch)
    assert main(["data", "fetch", "cora", "digits", "--data-dir", "d", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == [{"dataset": "cora", "files": ["d/x"]}, {"dataset": "digits", "files": []}]
    assert err.count("\n") == 1 and "x.zip" in err


def test_download_lines_are_sparse(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    report = plain_download(lambda: now[0])
    for done in range(35):
        now[0] = float(done)
        report("big", done, None)
    assert capsys.readouterr().err.count("\n") == 3


def test_compare_json(capsys: pytest.CaptureFixture[str], runs: dict[str, Path]) -> None:
    rows = json.loads(printed(capsys, "compare", *map(str, runs.values()), "--json"))
    assert all(set(row) >= KEYS and set(row) - KEYS <= EXTRA for row in rows)
    fedavg, pro, pro1 = rows
    total = {row["path"]: row["bytes_down"] + row["bytes_up"] for row in rows}
    assert fedavg["norm_comm"] == 1.0
    assert pro["norm_comm"] == total[pro["path"]] / total[fedavg["path"]]
    assert pro1["norm_comm"] == total[pro1["path"]] / total[fedavg["path"]]  # no FedAvg of seed 1: the mean over seeds
    facts = json.loads((runs["pro"] / "run.json").read_text())
    assert {k: pro[k] for k in ("faa", "cta", "af")} == facts["metrics"]
    assert total[pro["path"]] == facts["bytes"]


def test_compare_text(capsys: pytest.CaptureFixture[str], runs: dict[str, Path]) -> None:
    lines = printed(capsys, "compare", *map(str, runs.values())).splitlines()
    assert len(lines) == 5 and lines[-1].startswith("PRO ") and "mean of 2" in lines[-1] and "±" in lines[-1]
    assert "\x1b" not in "".join(lines) and "…" not in "".join(lines)


def test_compare_without_reference(capsys: pytest.CaptureFixture[str], runs: dict[str, Path]) -> None:
    assert json.loads(printed(capsys, "compare", str(runs["pro"]), "--json"))[0]["norm_comm"] is None
    rows = json.loads(printed(capsys, "compare", str(runs["pro"]), "--json", "--reference", "pro"))
    assert rows[0]["norm_comm"] == 1.0


def test_compare_takes_a_folder_and_what_a_shell_pattern_matches(
    capsys: pytest.CaptureFixture[str], runs: dict[str, Path]
) -> None:
    for name in ("pro", "fedavg"):
        shutil.copytree(runs[name], Path("many") / name)
    Path("many/pro.toml").write_text("")
    wanted = ["many/fedavg", "many/pro"]
    assert [row["path"] for row in json.loads(printed(capsys, "compare", "many", "--json"))] == wanted
    every = sorted(map(str, Path("many").iterdir()))
    assert [row["path"] for row in json.loads(printed(capsys, "compare", *every, "--json"))] == wanted
    assert main(["compare", "many/pro.toml"]) == 2
    assert "is a file, not a run folder" in capsys.readouterr().err


def missing(folder: Path) -> None:
    shutil.rmtree(folder)


def no_config(folder: Path) -> None:
    (folder / "config.toml").unlink()


def truncated_plan(folder: Path) -> None:
    (folder / "plan.npz").write_bytes((folder / "plan.npz").read_bytes()[:100])


def no_scores(folder: Path) -> None:
    (folder / "scores.json").unlink()


def short_ledger_row(folder: Path) -> None:
    (folder / "ledger.csv").write_text("stage,position,round,client,direction,kind,bytes\nround,1\n")


def unscored(folder: Path) -> None:
    scores = json.loads((folder / "scores.json").read_text())
    scores["correct"][-1] = [-1] * len(scores["total"])
    (folder / "scores.json").write_text(json.dumps(scores))


def other_size(folder: Path) -> None:
    (folder / "scores.json").write_text('{"correct": [[1]], "total": [1]}')


def not_toml(folder: Path) -> None:
    (folder / "config.toml").write_text("= 1")


def empty_facts(folder: Path) -> None:
    (folder / "run.json").write_text("[]")


@pytest.mark.parametrize(
    "damage",
    [missing, no_config, truncated_plan, no_scores, short_ledger_row, unscored, other_size, not_toml, empty_facts],
)
def test_compare_on_a_damaged_folder(capsys: pytest.CaptureFixture[str], runs: dict[str, Path], damage) -> None:
    shutil.copytree(runs["pro"], "damaged")
    damage(Path("damaged"))
    assert main(["compare", str(runs["fedavg"]), "damaged"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("profcil: ") and "damaged" in err and err.count("\n") == 1


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["torch>=2.6", "no-such-dist>=1; extra == 'dream'", 'pytest>=8; extra == "dev"']
    monkeypatch.setattr("profcil.cli.doctor.metadata.requires", lambda name: lines)
    found = json.loads(printed(capsys, "doctor", "--json", "--data-dir", "empty"))
    assert [(p["name"], bool(p["version"])) for p in found["packages"]] == [("torch", True), ("no-such-dist", False)]
    assert "profcil[dream]" in found["missing"][0] and "cora" in found["missing"][1]
    assert "profcil[dream]" in printed(capsys, "doctor", "--data-dir", "empty")
    monkeypatch.setattr("profcil.accel.loader.compiler_version", lambda: None)  # cached, so $CC is not read again
    assert json.loads(printed(capsys, "doctor", "--json"))["acceleration"]["compiler"] is None
    assert "TorchScript" in printed(capsys, "doctor")
    lines[:] = ["no-such-dist"]
    printed(capsys, "doctor", status=1)  # a required package


def test_eval_without_data_scores_the_data_of_the_run(capsys, runs):
    assert main(["eval", str(runs["pro"]), "--json", "--confusion", "confusion.csv"]) == 0
    result = json.loads(capsys.readouterr().out)
    scores = json.loads((runs["pro"] / "scores.json").read_text())
    assert result["examples"] == sum(scores["total"]) == sum(map(sum, result["confusion"]))
    right = sum(row[number] for number, row in enumerate(result["confusion"]))
    assert right == sum(scores["correct"][-1]) and Path("confusion.csv").exists()
    assert main(["eval", str(runs["pro"]), "--calibrate"]) == 2
    assert "data other than the test data" in capsys.readouterr().err
