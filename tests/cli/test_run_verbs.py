"""run, resume and plan: what they write and print."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from profcil.cli import progress
from profcil.cli.main import main
from profcil.resolve import resolve, to_toml


def printed(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    assert main(list(line)) == 0
    return capsys.readouterr().out


def test_run_prints_a_row_and_the_folder(capsys: pytest.CaptureFixture[str], small: list[str]) -> None:
    out = printed(capsys, "run", "--method", "fedavg", "--setting", "homogeneous", *small)
    header, row, where = out.splitlines()
    assert header.split() == ["FAA", "CTA", "AF", "MB", "down", "MB", "up", "seconds"] and len(row.split()) == 6
    assert where == "run folder: runs/digits-homogeneous-fedavg-seed0"
    again = printed(capsys, "run", "--again", "--method", "fedavg", "--setting", "homogeneous", *small)
    assert again.splitlines()[-1].endswith("fedavg-seed0-2")
    assert again.split()[:13] == out.split()[:13]  # same command, same accuracies and traffic


def test_an_equal_run_is_reused_and_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, small: list[str]
) -> None:
    line = ["run", "--method", "fedavg", *small]
    first = printed(capsys, *line)
    assert main([*line, "--set", "workers=1"]) == 0  # does not change a bit
    out, err = capsys.readouterr()
    folder = "runs/digits-severe-fedavg-seed0"
    assert out == first and err == f"reused: {folder} has the same settings, data and code; --again repeats it\n"
    for other in (["--seed", "1"], ["--set", "lr=0.3"], ["--accelerate", "off"], ["--again"], ["--out", "elsewhere"]):
        assert main([*line, *other, "--quiet"]) == 0
        assert "reused" not in capsys.readouterr().err, other
    assert main([*line, "--out", "elsewhere"]) == 0
    assert capsys.readouterr().err.startswith("reused: elsewhere has")
    monkeypatch.setattr("profcil.runs.identity.source_digest", lambda: "edited")
    assert main([*line, "--quiet"]) == 0
    assert "reused" not in capsys.readouterr().err


def test_a_run_on_other_data_or_unfinished_or_deployed_is_not_reused(
    capsys: pytest.CaptureFixture[str], small: list[str]
) -> None:
    line = ["run", "--method", "fedavg", "--quiet", *small]
    assert main(line) == 0
    file = Path("runs/digits-severe-fedavg-seed0/run.json")
    facts = json.loads(file.read_text())
    changes: tuple[dict, ...] = (
        {"data": "0" * 32},
        {"done": False},
        {"identity": {}},
        {"config": {**facts["config"], "deployed": "flower"}},
    )
    scores = file.with_name("scores.json")
    right = scores.read_bytes()
    scores.write_text("{}")  # an edited run is not shown as the result of this one
    assert main([*line, "--out", str(file.parent)]) == 2
    assert "already holds a run" in capsys.readouterr().err
    scores.write_bytes(right)
    for change in changes:
        file.write_text(json.dumps(facts | change))
        assert main([*line, "--out", "runs/digits-severe-fedavg-seed0"]) == 2, change
        assert "already holds a run" in capsys.readouterr().err


def test_progress_without_terminal_is_a_few_plain_lines(capsys: pytest.CaptureFixture[str], small: list[str]) -> None:
    assert main(["run", "--method", "fedavg", "--json", *small]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["done"] is True
    assert [line.split(" done")[0] for line in err.splitlines()] == ["position 1 of 2", "position 2 of 2"]
    assert "\x1b" not in err
    result = json.loads(out)
    shown = f"FAA {result['faa']:.1f}, CTA {result['cta']:.1f}, AF {result['af']:.1f}"
    last = err.splitlines()[-1]  # so far is then the result
    assert f"{shown}, {result['bytes_total'] / 1e6:.1f} MB sent" in last
    assert all("FAA" in line and "left" in line for line in err.splitlines())


def test_quiet(capsys: pytest.CaptureFixture[str], small: list[str]) -> None:
    assert main(["run", "--method", "fedavg", "--quiet", *small]) == 0
    assert capsys.readouterr().err == ""


def test_tensorboard_events(capsys: pytest.CaptureFixture[str], small: list[str]) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    printed(capsys, "run", "--method", "promax", "--tensorboard", "--quiet", "--out", "watched", *small)
    events = accumulator.EventAccumulator("watched/logs/tensorboard").Reload()
    tags = set(events.Tags()["scalars"])
    assert {"stream/loss", "tasks/1", "tasks/2", "classes/0", "classes/9", "alignment/memory/centred"} <= tags
    scores = json.loads(Path("watched/scores.json").read_text())
    assert events.Scalars("tasks/1")[-1].value == pytest.approx(100 * scores["correct"][-1][0] / scores["total"][0])
    assert [e.step for e in events.Scalars("stream/loss")] == [1, 2]
    facts = json.loads(Path("watched/run.json").read_text())
    for name in ("faa", "cta", "af"):
        assert events.Scalars(f"results/{name}")[-1].value == pytest.approx(facts["metrics"][name], abs=1e-4)
    assert events.Scalars("results/bytes")[-1].value == pytest.approx(facts["bytes"], rel=1e-6)


def test_dry_run_writes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path, small: list[str]) -> None:
    out = printed(capsys, "run", "--dry-run", "--method", "pro", "--seed", "3", *small)
    Path(tmp_path / "again.toml").write_text(out)
    sets = small[1::2]
    assert to_toml(resolve("again.toml")) == to_toml(resolve(None, {"method": "pro", "seed": "3"}, sets))
    assert "# positions: 2" in out and "# model parameters: " in out
    assert [p.name for p in tmp_path.iterdir()] == ["again.toml"]


def test_dry_run_counts_the_work_of_a_run(
    capsys: pytest.CaptureFixture[str], runs: dict[str, Path], small: list[str]
) -> None:
    work = json.loads(printed(capsys, "run", "--dry-run", "--json", "--method", "fedavg", *small))["work"]
    events = [json.loads(line) for line in (runs["fedavg"] / "events.jsonl").read_text().splitlines()]
    rounds = [e for e in events if e["event"] == "round"]
    assert (work["rounds"], work["client_turns"]) == (len(rounds), sum(e["clients"] for e in rounds))
    first = (runs["fedavg"] / "ledger.csv").read_text().split("\nround,0,0,")[1].splitlines()[0]
    assert int(first.split(",")[-1]) <= work["bytes_per_model_broadcast"]


def test_dry_run_counts_no_model_where_no_network_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    work = json.loads(printed(capsys, "run", "--dry-run", "--json", "--method", "prolin"))["work"]
    assert (work["model_parameters"], work["bytes_per_model_broadcast"], work["warmup_rounds"]) == (0, 0, 0)


def test_dry_run_without_data_shows_settings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = printed(capsys, "run", "cora-homogeneous", "--dry-run", "--data-dir", "empty")
    assert tomllib.loads(out)["setting"] == "homogeneous" and "profcil data fetch cora" in out
    found = json.loads(printed(capsys, "run", "cora", "--dry-run", "--data-dir", "empty", "--json"))
    assert found["work"] is None and found["settings"]["dataset"] == "cora" and not list(tmp_path.iterdir())


def test_resume_after_interrupt_equals_an_uninterrupted_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, runs: dict[str, Path], small: list[str]
) -> None:
    def stop(self: progress.Lines, p: object) -> None:
        if p.what == "position":  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(progress.Lines, "__call__", stop)
        assert main(["run", "--method", "pro", "--out", "cut", *small]) == 130
    assert "profcil resume cut" in capsys.readouterr().err
    row = json.loads(printed(capsys, "compare", "cut", "--json"))[0]
    assert row["done"] is False and row["faa"] is None and row["bytes_up"] is None and row["seconds"] is None
    assert "unfinished" in printed(capsys, "compare", "cut")
    resumed = json.loads(printed(capsys, "resume", "cut", "--json"))
    whole = json.loads(printed(capsys, "resume", str(runs["pro"]), "--json"))  # finished: the results are only printed
    same = ("faa", "cta", "af", "bytes_down", "bytes_up")
    assert [resumed[k] for k in same] == [whole[k] for k in same]


def test_resume_rewrites_damaged_files(capsys: pytest.CaptureFixture[str], small: list[str]) -> None:
    before = json.loads(printed(capsys, "run", "--method", "fedavg", "--out", "damaged", "--json", *small))
    Path("damaged/scores.json").write_text("{")
    assert main(["compare", "damaged"]) == 2
    capsys.readouterr()
    assert json.loads(printed(capsys, "resume", "damaged", "--json"))["faa"] == before["faa"]


def test_plan(capsys: pytest.CaptureFixture[str], runs: dict[str, Path], small: list[str]) -> None:
    found = json.loads(printed(capsys, "plan", "--json", *small))
    assert set(found) == {"tasks", "orders", "audit", "digest"}
    assert sorted(y for task in found["tasks"] for y in task) == list(range(10)) and len(found["orders"]) == 4
    recorded = json.loads((runs["pro"] / "run.json").read_text())["plan"]
    assert found["digest"] == recorded  # the plan does not depend on the method
    text = printed(capsys, "plan", "--limit", "1", *small)
    assert found["digest"] in text and "... and 3 more clients" in text and "support assumption" in text


@pytest.mark.parametrize("resumed", [False, True])
def test_time_left_counts_only_this_session(capsys: pytest.CaptureFixture[str], resumed: bool) -> None:
    from profcil.engine.channel import When
    from profcil.engine.recorder import Progress

    now = [0.0]
    lines = progress.Lines(lambda: now[0])
    first = 60 if resumed else 0
    for done in range(first + 1, first + 41):
        now[0] += 1.0
        lines(Progress("round", When("round", 0, done - 1, 100), done, 100, {"loss": 1.0, "clients": 2}))
    lines_printed = capsys.readouterr().err.splitlines()
    assert len(lines_printed) == 4  # one in ten seconds
    assert lines_printed[0].endswith(f"about 0:{1 if not resumed else 0:02d}:30 left")
