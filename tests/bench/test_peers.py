"""The bench beside other frameworks: what is exported is the same work, and what is missing is said."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from profcil.bench import flower, table
from profcil.bench.peers import case as peers
from profcil.bench.peers import export, rounds
from profcil.cli.main import main

TINY = ("train.rounds=2", "train.epochs=2", "clients=4", "participants=2", "model.width=4", "train.batch=8")
SETS = ("setting=homogeneous", "train.augment=false", *TINY)


class Reply:
    """A reply of Flower with a model and the number of its examples."""

    def __init__(self, model: dict[str, torch.Tensor], samples: int) -> None:
        record = SimpleNamespace(to_torch_state_dict=lambda: model)
        self.content = {"model": record, "facts": {"samples": samples}}

    def has_error(self) -> bool:
        return False


def computed_outside(work: rounds.PeerWork) -> dict[str, torch.Tensor]:
    """All rounds by the functions of the script."""
    weights = dict(work.network().state_dict())
    for r in range(work.rounds):
        turns = range(work.clients)
        weights = rounds.mean_of([Reply(rounds.turn(work, weights, r, t), work.samples(r, t)) for t in turns])
    return weights


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("work") / "work.npz"
    export.export(*flower.setup(SETS, 0), path)
    return path


def test_the_script_ends_with_our_model(exported: Path) -> None:
    work = rounds.PeerWork(str(exported))
    assert (work.rounds, work.clients) == (10, 2) and work.arrays["batches"].shape[1] == 8
    ours = export.to_plain(flower.run_here(SETS)[1])
    start = dict(work.network().state_dict())
    same = peers.same_work(ours, computed_outside(work), exported)
    assert same["largest_difference"] < 1e-5 < peers.same_work(ours, start, exported)["largest_difference"]
    assert same["accuracy"] == same["reference_accuracy"] > 5


@pytest.mark.parametrize("what", ["batches", "samples", "excluded"])
def test_other_work_ends_with_another_model(exported: Path, what: str) -> None:
    work = rounds.PeerWork(str(exported))
    change = {"batches": lambda a: a[::-1].copy(), "samples": lambda a: a * [1, 3], "excluded": lambda a: a & False}
    work.arrays[what] = change[what](work.arrays[what])
    ours = export.to_plain(flower.run_here(SETS)[1])
    assert peers.same_work(ours, computed_outside(work), exported)["largest_difference"] > 1e-4


@pytest.mark.parametrize("framework", ["pfl", "flower"])
def test_a_missing_framework_is_named_with_what_to_install(framework: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("pfl" if framework == "pfl" else "ray"):
        pytest.skip("the framework is installed")
    note = peers.case(framework, sets=TINY, repeats=1)["note"]
    assert f"pip install {peers.NEEDS[framework]}" in note and "--peer-python" in note and "No module named" in note
    assert "--peer-python" in str(peers.run_peer(framework, str(tmp_path / "no-python"), tmp_path, tmp_path))


def test_another_failure_is_shown() -> None:
    assert peers.why_not("pfl", "Traceback\nValueError: seven\n") == "pfl-research failed (ValueError: seven)"
    assert "no message" in peers.why_not("flower", "")


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["pfl", "flower"])
def test_the_framework_itself_does_the_same_work(framework: str) -> None:
    pytest.importorskip("pfl" if framework == "pfl" else "ray")
    row = peers.case(framework, sets=TINY, repeats=1)
    assert row["ours"] > 0 and row["reference"] > 0 and row["largest_difference"] < 1e-4


def test_the_flag_reaches_the_process_of_a_case(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    started = []
    process = SimpleNamespace(communicate=lambda: ('{"note": "seen"}', ""), pid=0, returncode=0)
    monkeypatch.setattr(table.subprocess, "Popen", lambda command, **more: started.append(command) or process)
    monkeypatch.setattr(table.os, "killpg", lambda *a: None)
    assert main(["bench", "peers", "--device", "cpu", "--peer-python", "/there/python"]) == 0
    assert len(started) == 4 and {command[0] for command in started} == {sys.executable}
    assert {command[-1] for command in started} == {"/there/python"}
    assert capsys.readouterr().out.count("seen") == 4
