"""A run folder is used by one process; loss and damage are errors."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import at_call, holding, in_child, outcome, tiny

from profcil.cli.main import main
from profcil.engine import machine, recorder, run, steps
from profcil.errors import DataError, RunFolderError
from profcil.io import atomic_files
from profcil.resolve import resolve
from profcil.runs.folder import RunFolder


@pytest.fixture
def finished(tmp_path: Path, tracing: None) -> Path:
    return run.start(tiny(), tmp_path / "run", tmp_path)


@pytest.fixture
def half(tmp_path: Path, tracing: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was interrupted half-way."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(run.Interrupted):
        at_call("profcil.engine.loop:evaluate", 2, stop, patch.setattr)
        run.start(tiny(), tmp_path / "run", tmp_path)
    return tmp_path / "run"


def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("training has begun")

    monkeypatch.setattr(steps, "run", fail)


def refused(words: str, path: Path, starts: bool = False) -> None:
    """One sentence, that is one line with one full thought and what to do next."""
    with pytest.raises(RunFolderError, match=words) as raised:
        run.start(tiny(), path, path.parent) if starts else run.resume(path)
    assert "\n" not in str(raised.value) and "; " in str(raised.value)


# -- one process at a time ----------------------------------------------------------------------------------------


def test_a_folder_in_use_is_refused_and_a_dead_lock_is_not(half: Path, undisturbed: dict) -> None:
    ready = multiprocessing.get_context("forkserver").Event()
    child = in_child(holding, half, ready)
    assert ready.wait(30)
    refused("in use by another process", half)
    refused("in use by another process", half, starts=True)
    child.kill()
    child.join(30)
    assert (half / "lock").exists()
    assert outcome(run.resume(half)) == undisturbed


def test_a_folder_with_a_run_is_not_started_again(half: Path) -> None:
    before = (half / "state.safetensors").read_bytes()
    refused("already holds a run; use `profcil resume", half, starts=True)
    (half / "state.safetensors").rename(half / "elsewhere")
    refused("already holds a run", half, starts=True)
    assert (half / "elsewhere").read_bytes() == before


def test_not_a_run_folder(tmp_path: Path) -> None:
    refused("is not a run folder", tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


# -- disks ----------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_an_error_before_training(tmp_path: Path, half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_training(monkeypatch)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    refused("1 MB free", tmp_path / "new", starts=True)
    refused("1 MB free", half)


def test_an_impossible_path_is_an_error_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_training(monkeypatch)
    (tmp_path / "file").write_text("")
    refused("cannot be written", tmp_path / "file" / "run", starts=True)
    refused("cannot be written", tmp_path / "file", starts=True)


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_read_only_folder_is_an_error_before_training(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(*_: Any, **more: Any) -> None:
        raise OSError(code, "no writing here")

    no_training(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", deny)
        refused("no writing here", tmp_path / "run", starts=True)
    monkeypatch.setattr(atomic_files.os, "fsync", deny)
    refused("no writing here", tmp_path / "run", starts=True)


@pytest.mark.parametrize(
    "number", [9, 10, 13, 17, 20]
)  # renames: a state, its scores, the next state, the last one, its facts
def test_a_save_that_fails_leaves_the_state_before_it_whole(
    number: int, tmp_path: Path, undisturbed: dict, tracing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        at_call("os:replace", number, full, patch.setattr)
        refused("No space left on device.*`profcil resume", tmp_path / "run", starts=True)
    assert not list((tmp_path / "run").glob(".*.part"))
    assert outcome(run.resume(tmp_path / "run")) == undisturbed


@pytest.mark.parametrize(("brief", "states"), [(-1, 4), (3600, 2)], ids=["every position", "the first and the last"])
def test_positions_that_take_moments_are_not_saved_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brief: int, states: int
) -> None:
    saved: list[int] = []
    monkeypatch.setattr(recorder, "SAVE_SECONDS", 3600)
    monkeypatch.setattr(recorder, "MIN_SAVE_SECONDS", brief)
    save = RunFolder.save
    monkeypatch.setattr(
        RunFolder, "save", lambda self, state, *a: (saved.append(state.position), save(self, state, *a))
    )
    path = run.start(tiny(), tmp_path / "run", tmp_path)
    assert len(saved) == states and saved[-1] == max(saved)
    assert run.resume(path) == path  # finished, and found so


def test_a_state_is_written_as_it_was_while_the_run_goes_on(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, write = threading.Event(), atomic_files.write_bytes

    def held(path: Path, data: bytes) -> None:
        assert go_on.wait(30), "the run waits for its state to be written"
        write(path, data)

    monkeypatch.setattr(atomic_files, "write_bytes", held)
    with RunFolder(half) as folder:
        go_on.set()
        state, events, facts = folder.load(torch.device("cpu"))
        go_on.clear()
        weight = state.server.blocks["head"].tensors["weight"]
        before = weight.clone()
        folder.save(state, events, facts)  # returns though nothing can be written
        weight.add_(1)
        go_on.set()
        assert torch.equal(folder.load(torch.device("cpu"))[0].server.blocks["head"].tensors["weight"], before)


def test_an_interrupt_while_a_state_is_written_still_waits_for_it(half: Path) -> None:
    class Impatient:
        times = 0

        def exception(self) -> None:
            self.times += 1
            if self.times == 1:
                raise KeyboardInterrupt

    with RunFolder(half) as folder:
        folder.pending_write = writing = Impatient()
        with pytest.raises(KeyboardInterrupt):
            folder.wait_until_written()
        folder.wait_until_written()
        assert writing.times == 2 and folder.pending_write is None


def test_a_first_state_that_cannot_be_written_does_not_advise_to_resume(
    tmp_path: Path, tracing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    at_call("os:replace", 5, full, monkeypatch.setattr)
    refused("No space left on device.*start it again with the same command", tmp_path / "run", starts=True)


# -- damage ---------------------------------------------------------------------------------------------------------


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flip(where: int) -> Any:
    return lambda data: data[:where] + bytes([data[where] ^ 1]) + data[where + 1 :]


@pytest.mark.parametrize(
    "harm",
    [_cut, lambda data: b"", lambda data: b"garbage" * 100, _flip(2), _flip(40), _flip(-1000), lambda d: d + b"x"],
    ids=["cut", "empty", "garbage", "length", "header", "tensor", "longer"],
)
def test_a_damaged_state_is_refused(harm: Any, half: Path) -> None:
    state = half / "state.safetensors"
    state.write_bytes(harm(state.read_bytes()))
    refused("state.safetensors is missing or damaged", half)


def test_every_bit_of_a_tensor_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "t"
    atomic_files.write_tensors(
        path, {"a": torch.arange(3), "b": torch.ones(2, 0), "c": torch.tensor(True)}, {"x": [1, "é"]}
    )
    data = path.read_bytes()
    assert atomic_files.read_tensors(path) is not None
    for where in range(0, len(data), 3):
        path.write_bytes(_flip(where)(data))
        assert atomic_files.read_tensors(path) is None, where


def test_a_state_of_another_shape_is_refused(half: Path) -> None:
    tensors, record = atomic_files.read_tensors(half / "state.safetensors") or ({}, {})
    for key in ("blocks", "ledger", "facts", "held"):
        atomic_files.write_tensors(half / "state.safetensors", tensors, record | {key: 7})
        refused("missing or damaged", half)
    atomic_files.write_tensors(half / "state.safetensors", {}, record)
    refused("missing or damaged", half)


# -- another run than the one that began ------------------------------------------------------------------------------


@pytest.mark.parametrize(("was", "now"), [("disorder = 0.6", "disorder = 0.2"), ("lr = 0.01", "lr = 0.1")])
def test_an_edited_config_is_refused(was: str, now: str, half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_training(monkeypatch)
    text = (half / "config.toml").read_text()
    assert was in text
    (half / "config.toml").write_text(text.replace(was, now))
    refused(f"config.toml has .*{now}, but the run started with", half)


def test_where_it_runs_may_change(half: Path, undisturbed: dict) -> None:
    text = (half / "config.toml").read_text()
    (half / "config.toml").write_text(text.replace("workers = 1", "workers = 2"))
    assert outcome(run.resume(half)) == undisturbed


@pytest.mark.parametrize("part", ["x", "y"])
def test_changed_data_is_refused(part: str, half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single pixel, or two labels."""
    from profcil.data import digits

    load = digits.load

    def other(root: Path, seed: int) -> Any:
        bundle = load(root, seed)
        tensor = getattr(bundle.train, part).clone()
        tensor[0] = (tensor[0] + 1) % 10
        return replace(bundle, train=replace(bundle.train, **{part: tensor}))

    no_training(monkeypatch)
    monkeypatch.setattr(digits, "load", other)
    refused("is not what .* began with; give the same --data-dir", half)


def test_the_lock_is_given_back(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(run, "make_world", broken)
    with pytest.raises(RuntimeError, match="broken"):
        run.resume(half)
    with RunFolder(half):
        pass


@pytest.mark.parametrize("stranger", ["notes.txt", "clients/list.txt", ".thing.part", "config.toml"])
def test_a_folder_with_foreign_files_is_refused_and_not_changed(
    stranger: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_training(monkeypatch)
    (tmp_path / "run" / stranger).parent.mkdir(parents=True)
    (tmp_path / "run" / stranger).write_text("mine")
    refused("which does not belong to a run; choose another --out", tmp_path / "run", starts=True)
    assert (tmp_path / "run" / stranger).read_text() == "mine"


@pytest.mark.parametrize("name", ["plan.npz", "events.jsonl", "scores.json"])
@pytest.mark.parametrize("state", ["half", "finished"])
def test_resuming_writes_what_is_missing(
    state: str, name: str, undisturbed: dict, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = request.getfixturevalue(state)
    (folder / name).unlink()
    assert main(["resume", str(folder), "--quiet"]) == 0
    assert outcome(folder) == undisturbed and (folder / name).exists()
    assert main(["compare", str(folder)]) == 0


def test_a_mistake_leaves_no_folder_behind(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        run.start(resolve(None, {"dataset": "cifar100"}), tmp_path / "run", tmp_path / "nowhere")
    assert not (tmp_path / "run").exists()


def test_reserved_gpu_memory_is_reported(monkeypatch):
    """Recorded steps hold memory that torch does not count as allocated."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3_000_000)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 7_000_000)
    assert machine.peak_memory_mb(SimpleNamespace(device=torch.device("cuda"))) == 7.0


def test_the_new_name_of_a_file_is_written_to_the_disk_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_ino), real(handle)))
    atomic_files.write_files({tmp_path / "a": b"1", tmp_path / "b": b"2"})
    inodes = [(tmp_path / name).stat().st_ino for name in ("a", "b")]
    assert synced == [*inodes, tmp_path.stat().st_ino]


# -- long runs --------------------------------------------------------------------------------------------------------


def test_a_ledger_longer_than_the_header_of_safetensors_allows_is_saved(tmp_path: Path) -> None:
    """The format limits its header to 100 MB."""
    ledger = "round,0,0,1,up,model,1234\n" * 4_000_000
    assert len(ledger) > 100_000_000
    facts = {"ledger": ledger, "events": "é" * 1_000_000, "position": 3}
    atomic_files.write_tensors(tmp_path / "state", {"w": torch.ones(3)}, facts)
    tensors, found = atomic_files.read_tensors(tmp_path / "state") or ({}, {})
    assert found == facts
    assert list(tensors) == ["w"]


@pytest.mark.usefixtures("tracing")
def test_a_run_with_long_texts_resumes_to_the_same_bits(
    tmp_path: Path, undisturbed: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_files, "LONG_TEXT", 10)
    monkeypatch.setattr(recorder, "SAVE_SECONDS", -1)
    with pytest.MonkeyPatch.context() as patch:
        at_call("profcil.engine.loop:evaluate", 2, stop, patch.setattr)
        with pytest.raises(run.Interrupted):
            run.start(tiny(), tmp_path / "run", tmp_path)
    from safetensors import safe_open

    with safe_open(tmp_path / "run/state.safetensors", framework="pt") as file:
        assert {"text/ledger", "text/events"} <= set(file.keys())
        assert "round,0" not in file.metadata()["facts"]
    assert outcome(run.resume(tmp_path / "run")) == undisturbed


def stop(*_: Any) -> None:
    raise KeyboardInterrupt
