"""Loggers: what each receives and writes, resumed runs, and that a broken logger never ends a run."""

from __future__ import annotations

import csv
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import profcil
from profcil import registry
from profcil.cli.main import main
from profcil.engine.run import Interrupted
from profcil.errors import ConfigError
from profcil.extend import Logger
from profcil.loggers.observer import make_loggers

SMALL = {"train.rounds": 2, "train.epochs": 1, "warmup.rounds": 1, "clients": 3, "participants": 2, "task_size": 5}
NAMES = ["csv", "mlflow", "tensorboard", "wandb"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that every test has a warm-up."""
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "cache"))


class Recorder(Logger):
    """Keeps every call."""

    def __init__(self, target: str = "") -> None:
        super().__init__(target)
        self.calls: list[tuple[Any, ...]] = []

    def begin(self, settings: Any, folder: Path) -> None:
        self.calls.append(("begin", settings["method"], folder))

    def round(self, number: int, values: Any) -> None:
        self.calls.append(("round", number, dict(values)))

    def position(self, number: int, values: Any) -> None:
        self.calls.append(("position", number, dict(values)))

    def end(self) -> None:
        self.calls.append(("end",))


def small_run(out: Path, **given: Any) -> profcil.api.Run:
    return profcil.run("digits-severe", method=given.pop("method", "promax"), settings=SMALL, out=out, **given)


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# -- what a logger receives --------------------------------------------------------------------------------------------


def test_order_of_calls_and_their_values(tmp_path: Path) -> None:
    recorder = Recorder()
    run = small_run(tmp_path / "run", log=recorder)
    kinds = [call[0] for call in recorder.calls]
    assert kinds == ["begin", "round", *["round", "round", "position"] * 2, "end"]
    assert recorder.calls[0][1:] == ("promax", tmp_path / "run")
    assert [(n, "warmup/loss" in v) for k, n, v in recorder.calls[1:-1] if k == "round"] == [
        (1, True), (1, False), (2, False), (3, False), (4, False)
    ]  # fmt: skip
    last = recorder.calls[-2][2]
    assert run.metrics == {name: pytest.approx(last[f"results/{name}"]) for name in ("faa", "cta", "af")}
    assert last["results/bytes"] == run.bytes_total()
    for task in (0, 1):
        expected = 100 * run.scores.correct[-1][task] / run.scores.total[task]
        assert last[f"tasks/{task + 1}"] == pytest.approx(expected)
    totals = run.scores.total
    of_classes = [last[f"classes/{y}"] for y in range(10)]
    assert 0 <= min(of_classes) < max(of_classes) <= 100
    assert sum(of_classes) / 10 == pytest.approx(100 * run.scores.correct[-1].sum() / totals.sum(), abs=3)
    assert last["alignment/memory/centred"] == pytest.approx(run.final_alignment()["memory"]["centred"])


def test_seconds_of_a_server_that_trains(tmp_path: Path) -> None:
    recorder = Recorder()
    small_run(tmp_path / "run", method="hr", log=recorder)
    stream = [values for kind, _, values in recorder.calls[1:-1] if kind == "round" and "stream/loss" in values]
    assert len(stream) == 4 and sum(values["stream/server_seconds"] for values in stream) > 0


# -- the built-in loggers ----------------------------------------------------------------------------------------------


def test_csv_has_a_line_per_round_and_per_position(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", log="csv")
    rounds = read(tmp_path / "run" / "logs" / "rounds.csv")
    assert [(r["stage"], r["round"]) for r in rounds] == [("warmup", "1"), *(("stream", str(n)) for n in (1, 2, 3, 4))]
    assert all(float(row["loss"]) > 0 for row in rounds)
    positions = read(tmp_path / "run" / "logs" / "positions.csv")
    assert [row["position"] for row in positions] == ["1", "2"]
    assert float(positions[-1]["faa"]) == pytest.approx(run.metrics["faa"])
    assert positions[0]["classes/0"] == "" or positions[0]["classes/9"] == ""  # one of them comes later


def test_csv_writes_to_a_given_folder(tmp_path: Path) -> None:
    small_run(tmp_path / "run", log=f"csv={tmp_path / 'mine' / 'here'}")
    assert len(read(tmp_path / "mine" / "here" / "positions.csv")) == 2
    assert not (tmp_path / "run" / "logs").exists()


def test_csv_of_a_resumed_run_equals_that_of_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(progress: Any) -> None:
        if progress.what == "round" and progress.done == 3:
            raise KeyboardInterrupt

    small_run(tmp_path / "whole", log="csv")
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "another cache"))
    with pytest.raises(Interrupted):
        small_run(tmp_path / "run", log="csv", observe=stop)
    rounds = tmp_path / "run" / "logs" / "rounds.csv"
    with open(rounds, "a") as file:  # as of a round that was logged but not saved
        file.write(rounds.read_text().splitlines()[-1].replace("stream,2", "stream,3") + "\n")
    profcil.resume(tmp_path / "run", log="csv")
    for name in ("rounds.csv", "positions.csv"):
        assert read(tmp_path / "run" / "logs" / name) == read(tmp_path / "whole" / "logs" / name)


def test_a_run_that_was_killed_in_the_warm_up_starts_again(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "rounds.csv").write_text("stage,round,loss\nwarmup,1,2.5\n")
    small_run(tmp_path / "run", log="csv")
    assert len(read(tmp_path / "run" / "logs" / "rounds.csv")) == 5


class FakePackage(ModuleType):
    """A module that records every call of its functions; each returns the module itself."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = None
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kw: Any) -> FakePackage:
            self.calls.append((name, args, kw))
            return self

        return call

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kw) for called, args, kw in self.calls if called == name]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], FakePackage]:
    def install(name: str) -> FakePackage:
        package = FakePackage(name)
        monkeypatch.setitem(sys.modules, name, package)
        monkeypatch.setattr("profcil.loggers.observer.find_spec", lambda asked: object())
        return package

    return install


def test_mlflow_adapter(tmp_path: Path, fake: Callable[[str], FakePackage]) -> None:
    package = fake("mlflow")
    run = small_run(tmp_path / "run", log="mlflow")
    assert [name for name, *_ in package.calls[:4]] == ["set_tracking_uri", "set_experiment", "start_run", "log_params"]
    (((address,), _),) = package.of("set_tracking_uri")
    assert address == f"sqlite:///{tmp_path}/run/logs/mlflow.db"
    (((params,), _),) = package.of("log_params")
    assert params["method"] == "promax" and params["train.rounds"] == 2
    metrics = package.of("log_metrics")
    assert [kw["step"] for _, kw in metrics] == [1, 1, 2, 1, 3, 4, 2]
    assert metrics[-1][0][0]["results/faa"] == pytest.approx(run.metrics["faa"])
    assert package.calls[-1][0] == "end_run"


def test_mlflow_at_another_address(tmp_path: Path, fake: Callable[[str], FakePackage]) -> None:
    package = fake("mlflow")
    small_run(tmp_path / "run", log="mlflow=http://127.0.0.1:5000")
    assert package.of("set_tracking_uri") == [(("http://127.0.0.1:5000",), {})]


def test_wandb_adapter_is_offline(tmp_path: Path, fake: Callable[[str], FakePackage]) -> None:
    package = fake("wandb")
    run = small_run(tmp_path / "run", log="wandb=mine")
    ((_, init),) = package.of("init")
    assert init["mode"] == "offline" and init["project"] == "mine" and init["name"] == "run"
    assert init["dir"] == str(tmp_path / "run" / "logs") and Path(init["dir"]).is_dir()
    assert init["config"]["train.rounds"] == 2
    steps = {args[0]: kw["step_metric"] for args, kw in package.of("define_metric")}
    assert steps["stream/*"] == "stream/round" and steps["results/*"] == "position"
    logged = [args[0] for args, _ in package.of("log")]
    assert [values.get("stream/round") for values in logged] == [None, 1, 2, None, 3, 4, None]
    assert logged[-1]["position"] == 2 and logged[-1]["results/faa"] == pytest.approx(run.metrics["faa"])
    assert all(name.partition("/")[0] + "/*" in steps for values in logged for name in values if name != "position")
    assert package.calls[-1][0] == "finish"


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_missing_package_is_said_before_the_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("profcil.loggers.observer.find_spec", lambda asked: None)
    assert main(["run", "--log", name, "--out", str(tmp_path / "run")]) == 2
    assert f"pip install 'profcil[{name}]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# -- names and plug-ins ------------------------------------------------------------------------------------------------


def test_names_of_loggers(capsys: pytest.CaptureFixture[str]) -> None:
    assert registry.names("loggers") == NAMES
    assert main(["list", "loggers", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == NAMES


def test_mistakes_are_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", "--log", "cvs", "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert "unknown logger 'cvs'; did you mean csv?" in err and err.count("\n") == 1
    with pytest.raises(ConfigError, match=r"profcil\.extend\.Logger"):
        make_loggers([3])  # type: ignore[list-item]


PLUGIN = """
from profcil.extend import Logger

class Mine(Logger):
    def position(self, number, values):
        print(f"{self.target} {number}: {values['results/faa']:.1f}")

LOGGER = Mine
"""


def test_plug_in(install_plugin: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    install_plugin(loggers={"mine": PLUGIN})
    sets = [part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")]
    line = ["run", "digits-severe", "--method", "fedavg", "--quiet", "--out", str(tmp_path / "run"), *sets]
    assert main([*line, "--log", "mine=position,csv"]) == 0
    out = capsys.readouterr().out
    faa = read(tmp_path / "run" / "logs" / "positions.csv")[-1]["faa"]
    assert f"position 2: {float(faa):.1f}" in out


@pytest.mark.parametrize("reused", [False, True])
def test_plug_in_without_a_logger(
    reused: bool, install_plugin: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    install_plugin(loggers={"mine": "LOGGER = 3"})
    sets = [part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")]
    line = ["run", "digits-severe", "--method", "fedavg", "--quiet", "--out", str(tmp_path / "run"), *sets]
    assert not reused or main(line) == 0
    assert main([*line, "--log", "mine"]) == 2
    assert "derive it from profcil.extend.Logger" in capsys.readouterr().err


# -- broken loggers ----------------------------------------------------------------------------------------------------


def failing(function: str, error: BaseException) -> Logger:
    def fail(self: Logger, *args: Any) -> None:
        raise error

    return type("Failing", (Recorder,), {function: fail})()


@pytest.mark.parametrize("function", ["begin", "round", "position", "end"])
@pytest.mark.parametrize("error", [ValueError("not\nso"), SystemExit(3)], ids=["error", "exit"])
def test_a_failing_logger_is_one_warning(tmp_path: Path, function: str, error: BaseException) -> None:
    good = Recorder()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = small_run(tmp_path / "run", log=[failing(function, error), good], method="fedavg")
    (warning,) = [str(w.message) for w in caught if "logger" in str(w.message)]
    assert warning.startswith(f"the logger Failing failed ({type(error).__name__}: ") and "\n" not in warning
    assert run.done and good.calls[-1] == ("end",)


def test_on_the_command_line_it_is_one_line(
    install_plugin: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    install_plugin(loggers={"mine": PLUGIN.replace("results/faa", "nothing")})
    sets = [part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")]
    line = ["run", "digits-severe", "--method", "fedavg", "--quiet", "--out", str(tmp_path / "run"), *sets]
    assert main([*line, "--log", "mine"]) == 0
    assert capsys.readouterr().err == "the logger Mine failed (KeyError: 'nothing'); the run goes on without it\n"


def test_results_do_not_depend_on_loggers(tmp_path: Path) -> None:
    class Meddling(Logger):
        def position(self, number: int, values: Any) -> None:
            values.clear()

    plain = small_run(tmp_path / "plain")
    logged = small_run(tmp_path / "logged", log=[Meddling(), "csv"])
    assert (tmp_path / "plain/scores.json").read_bytes() == (tmp_path / "logged/scores.json").read_bytes()
    assert plain.metrics == logged.metrics and len(read(tmp_path / "logged/logs/positions.csv")[0]) > 5


def test_loggers_end_when_a_run_is_interrupted(tmp_path: Path) -> None:
    def stop(progress: Any) -> None:
        if progress.what == "position":
            raise KeyboardInterrupt

    recorder = Recorder()
    with pytest.raises(Interrupted):
        small_run(tmp_path / "run", log=recorder, observe=stop)
    assert recorder.calls[-1] == ("end",)
