"""Long runs save in constant memory: the beginning of ledger and events is in their files alone, with a digest."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest
import torch
from long_run import LongRun
from tiny_runs import at_call, outcome, tiny

from profcil.cli.main import main
from profcil.engine import run
from profcil.errors import RunFolderError
from profcil.metrics.ledger import Ledger, stream_bytes
from profcil.runs import folder as run_folder
from profcil.runs.reader import load_run
from profcil.runs.verify import find_faults

ROUNDS = 18
EACH = 400  # entries of one round, two for each participant


@pytest.fixture
def sealing(monkeypatch: pytest.MonkeyPatch, tracing: None) -> None:
    """Texts are sealed as soon as they are saved."""
    monkeypatch.setattr(run_folder, "SEAL_BYTES", 0)


def sealed_bytes(folder: Path) -> int:
    from profcil.io.atomic_files import read_facts

    return (read_facts(folder / "state.safetensors") or {}).get("sealed", {"ledger": [0]})["ledger"][0]


def test_a_sealed_run_has_the_bits_of_another(tmp_path, sealing, undisturbed):
    folder = run.start(tiny(), tmp_path / "run", tmp_path)
    assert sealed_bytes(folder) > 1000
    assert outcome(folder) == undisturbed
    assert find_faults(folder) == []
    assert main(["compare", str(folder)]) == 0


def test_a_sealed_run_goes_on_after_an_interrupt(tmp_path, sealing, undisturbed, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(run.Interrupted):
        at_call("profcil.engine.loop:evaluate", 2, stop, patch.setattr)
        run.start(tiny(), tmp_path / "run", tmp_path)
    assert sealed_bytes(tmp_path / "run")
    for name in ("ledger.csv", "events.jsonl"):
        with open(tmp_path / "run" / name, "ab") as file:
            file.write(b"half a li")  # as a crash leaves it
    assert not load_run(tmp_path / "run").done
    assert outcome(run.resume(tmp_path / "run")) == undisturbed


def test_a_changed_beginning_is_noticed(tmp_path, sealing):
    folder = run.start(tiny(), tmp_path / "run", tmp_path)
    for name in ("ledger.csv", "events.jsonl"):
        data = (folder / name).read_bytes()
        for harmed in (data.replace(b"0", b"1", 1), data[:100], None):
            (folder / name).write_bytes(harmed or b"")
            if harmed is None:
                (folder / name).unlink()
            assert find_faults(folder)
            with pytest.raises(RunFolderError, match=f"first .* bytes of .*{name} are not what the run wrote"):
                run.resume(folder)
        (folder / name).write_bytes(data)
    assert find_faults(folder) == []


def test_a_sealed_run_can_be_rolled_back(tmp_path, sealing, undisturbed):
    folder = run.start(tiny(keep_states=3), tmp_path / "run", tmp_path)
    assert main(["rollback", str(folder), "--to", "1"]) == 0
    assert find_faults(folder) == []
    assert outcome(run.resume(folder)) == undisturbed


def test_memory_to_save_does_not_grow_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "SEAL_BYTES", 50_000)
    (tmp_path / "run").mkdir()
    long = LongRun(tmp_path / "run")
    peaks: list[int] = []
    sizes: list[int] = []
    tracemalloc.start()
    for number in range(ROUNDS):
        tracemalloc.reset_peak()
        long.round(number, EACH // 2)
        long.save()
        peaks.append(tracemalloc.get_traced_memory()[1])
        sizes.append((tmp_path / "run" / "state.safetensors").stat().st_size)
    tracemalloc.stop()
    third = ROUNDS // 3
    assert max(peaks[-third:]) < 1.2 * max(peaks[third : 2 * third])
    assert max(sizes) < 3 * run_folder.SEAL_BYTES
    ledger = Ledger.from_csv((tmp_path / "run" / "ledger.csv").read_text())
    assert len(ledger.entries) == ROUNDS * EACH
    assert [e.round for e in ledger.entries] == sorted(e.round for e in ledger.entries)
    with long.folder as folder:
        state, _, facts = folder.load(torch.device("cpu"))
    assert state.ledger.stream_bytes == stream_bytes(ledger.entries) == facts["bytes"]
    assert (tmp_path / "run" / "events.jsonl").read_text().count("\n") == ROUNDS


# -- power loss -------------------------------------------------------------------------------------------------------


class Disk:
    """What a disk has if the power fails: files as they were when they were last synced, under the names that their
    folder had when it was last synced. Everything else is dropped."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.content: dict[int, bytes] = {}  # inode → bytes
        self.names: dict[str, int] = {}  # path within the root → inode
        self.alive: list[object] = []  # keeps inodes from being used again
        self.images: list[dict[str, bytes]] = []

    def sync(self, handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.is_dir() and path.is_relative_to(self.root):
            for name in [name for name in self.names if (self.root / name).parent == path]:
                del self.names[name]
            inodes = {str(file.relative_to(self.root)): file.stat().st_ino for file in path.iterdir() if file.is_file()}
            self.names |= inodes
        elif path.is_relative_to(self.root):
            self.content[os.fstat(handle).st_ino] = path.read_bytes()
            self.alive.append(os.dup(handle))
        self.images.append({name: self.content.get(inode, b"") for name, inode in self.names.items()})


def restore(image: dict[str, bytes], folder: Path) -> Path:
    for name, data in image.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("seal_bytes", [0, 1_000_000], ids=["sealed", "whole"])
def test_after_a_power_loss_at_any_moment_a_saved_state_is_there(tmp_path, tracing, monkeypatch, seal_bytes):
    """Unsynced writes and names are dropped. What is left must load, and never be older than what was left before."""
    monkeypatch.setattr(run_folder, "SEAL_BYTES", seal_bytes)
    disk = Disk(tmp_path / "run")
    real = os.fsync
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: (real(handle), disk.sync(handle)))
        run.start(tiny(keep_states=2), tmp_path / "run", tmp_path)
    for handle in disk.alive:
        os.close(handle)
    distinct = [image for one, image in zip([{}, *disk.images], disk.images, strict=False) if image != one]
    assert len(distinct) > 20
    places = []
    for number, image in enumerate(distinct):
        if "state.safetensors" not in image:
            assert not places  # it never disappears again
            continue
        with run_folder.RunFolder(restore(image, tmp_path / str(number))) as folder:
            state, _, _ = folder.load(torch.device("cpu"))
            places.append((state.position, state.round))
    assert places == sorted(places) and places[-1][0] == 3


def test_a_run_goes_on_after_a_power_loss(tmp_path, sealing, undisturbed, monkeypatch):
    disk = Disk(tmp_path / "run")
    real = os.fsync
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: (real(handle), disk.sync(handle)))
        run.start(tiny(), tmp_path / "run", tmp_path)
    for handle in disk.alive:
        os.close(handle)
    usable = [image for image in disk.images if "state.safetensors" in image and "config.toml" in image]
    for number in (len(usable) // 3, len(usable) // 2):
        folder = restore(usable[number], tmp_path / str(number))
        assert outcome(run.resume(folder)) == undisturbed
