"""A run killed by SIGKILL at any point continues and ends with the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_runs import (
    TRAIN,
    events,
    in_child,
    killed_run,
    outcome,
    path_of,
    sigkill,
    sigkill_in_mid_file,
    sigkill_in_mid_line,
    tiny,
)

from profcil.engine import recorder, run
from profcil.errors import RunFolderError

RENAME = "os:replace"  # 1 plan, 2 config, 3 events, 4 warm-up cache, then per save: state, scores, ledger, run
WATCH = "profcil.engine.run:RunRecorder.watch"  # 1 warm-up, then per position: round, round, position
ROUND = "profcil.engine.executor:Executor.run"  # where acceleration is on: 1 warm-up, then one a round

BEFORE_A_STATE = [*((RENAME, n, sigkill) for n in (1, 2, 3, 4)), (RENAME, 5, sigkill_in_mid_file)]
BEFORE_A_STATE += [(TRAIN, 2, sigkill), (ROUND, 1, sigkill)]  # in the warm-up
AFTER = [
    (RENAME, 6, sigkill),  # the first state is there, its scores are not
    (RENAME, 9, sigkill_in_mid_file),  # the second state is half written
    (RENAME, 10, sigkill),  # between a state and its readable files
    (RENAME, 12, sigkill),
    (TRAIN, 4, sigkill),  # 1-2 warm-up, then one a client and round: between the two clients of a round
    (ROUND, 3, sigkill),  # in the second round, whose messages are sent
    (WATCH, 4, sigkill),  # a position is over, but not recorded
    ("profcil.runs.folder:RunFolder.append", 5, sigkill_in_mid_line),
    ("profcil.engine.loop:evaluate", 3, sigkill),
    ("profcil.engine.run:RunRecorder.save", 10, sigkill),  # all is done but the last save
]


def kill(out: Path, cache: Path, spot: str, number: int, do: Callable) -> None:
    child = in_child(killed_run, out, cache, spot, number, do)
    child.join(60)
    assert child.exitcode == -9


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize(("spot", "number", "do"), AFTER)
def test_goes_on_to_the_same_bits(
    spot: str, number: int, do: Callable, tmp_path: Path, own_cache: Path, undisturbed_by: Callable[[str], dict]
) -> None:
    kill(tmp_path / "run", own_cache, spot, number, do)
    assert outcome(run.resume(tmp_path / "run")) == undisturbed_by(path_of(spot))
    assert not list((tmp_path / "run").glob(".*.part"))


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize(("spot", "number", "do"), BEFORE_A_STATE)
def test_before_the_first_state_it_can_be_started_again(
    spot: str, number: int, do: Callable, tmp_path: Path, own_cache: Path, undisturbed_by: Callable[[str], dict]
) -> None:
    kill(tmp_path / "run", own_cache, spot, number, do)
    with pytest.raises(RunFolderError, match=r"same `profcil run` command|is not a run folder"):
        run.resume(tmp_path / "run")
    config = tiny(accelerate=path_of(spot))
    assert outcome(run.start(config, tmp_path / "run", tmp_path)) == undisturbed_by(path_of(spot))


@pytest.mark.usefixtures("tracing")
def test_killed_again_and_again(tmp_path: Path, own_cache: Path, undisturbed_by: Callable[[str], dict]) -> None:
    kill(tmp_path / "run", own_cache, RENAME, 11, sigkill)
    for _ in range(2):
        child = in_child(_resume_and_die, tmp_path / "run", own_cache)
        child.join(60)
        assert child.exitcode == -9
    assert outcome(run.resume(tmp_path / "run")) == undisturbed_by(path_of(RENAME))


def _resume_and_die(out: Path, cache: Path) -> None:
    import os

    from tiny_runs import TracingMethod, at_call

    from profcil.methods import fedavg

    os.environ["PROFCIL_CACHE"] = str(cache)
    recorder.SAVE_SECONDS, fedavg.METHOD = -1, TracingMethod
    at_call(WATCH, 2, sigkill)
    run.resume(out)


@pytest.mark.usefixtures("tracing")
def test_readable_files_follow_the_state(tmp_path: Path, undisturbed: dict) -> None:
    """Whatever happened to them; and a finished run is otherwise left as it is."""
    folder = run.start(tiny(), tmp_path / "run", tmp_path)
    state, about = (folder / "state.safetensors").read_bytes(), (folder / "run.json").read_bytes()
    (folder / "scores.json").write_text("{}")
    (folder / "run.json").write_text(json.dumps({"done": False}))
    (folder / "ledger.csv").unlink()
    (folder / "events.jsonl").write_text('{"event": "round", "posi')
    run.resume(folder)
    assert outcome(folder) == undisturbed
    assert (folder / "run.json").read_bytes() == about
    assert (folder / "state.safetensors").read_bytes() == state


def test_events_are_each_round_once(undisturbed: dict) -> None:
    moments = [(e["event"], e["position"], e["round"]) for e in undisturbed["events"]]
    assert moments == [e for p in range(3) for e in (("round", p, 0), ("round", p, 1), ("position", p, 1))]


@pytest.mark.usefixtures("tracing")
def test_events_can_be_followed_while_the_run_goes_on(tmp_path: Path) -> None:
    seen: list[int] = []
    folder = tmp_path / "run"
    run.start(tiny(), folder, tmp_path, lambda p: seen.append(len(events(folder))) if p.what != "warmup" else None)
    assert seen == list(range(9))
