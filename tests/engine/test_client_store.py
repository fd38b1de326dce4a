"""Private tensors of clients: few in memory, the rest in files, and nothing that a saved state needs is lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from profcil.engine import client_store
from profcil.engine.channel import ServerState
from profcil.engine.client_store import EACH, ClientStore, sweep
from profcil.engine.run_state import RunState
from profcil.errors import RunFolderError
from profcil.metrics.ledger import Ledger
from profcil.metrics.scores import Scores
from profcil.runs.folder import RunFolder

CPU = torch.device("cpu")


def memory(value: float, n: int = 250) -> dict[str, Tensor]:
    return {"t": torch.full((n,), float(value)), "none": torch.zeros(0), "one": torch.tensor(int(value))}


def five(folder: Path) -> ClientStore:
    """Five clients; memory for the tensors of two."""
    own = ClientStore(folder, CPU, limit=2 * (1_000 + 8 + 3 * EACH))
    for client in range(5):
        own[client] = memory(client)
    return own


def test_only_the_latest_are_in_memory_and_all_can_be_read(tmp_path: Path) -> None:
    own = five(tmp_path / "clients")
    assert list(own.in_memory) == [3, 4] and sorted(own) == [0, 1, 2, 3, 4] and len(own) == 5
    for client in (0, 4, 2, 2, 3):
        assert own[client]["t"].eq(client).all() and int(own[client]["one"]) == client
        assert own[client]["none"].shape == (0,) and len(own.in_memory) <= 2
    assert own.bytes == sum(map(client_store.size, own.in_memory.values())) <= own.limit
    assert {c: float(m["t"][0]) for c, m in own.items()} == {c: float(c) for c in range(5)}
    assert own.get(9) is None and 9 not in own


def test_memory_does_not_grow_with_clients_that_once_took_part(tmp_path: Path) -> None:
    own = ClientStore(tmp_path, CPU, limit=10_000)
    largest = 0
    for client in range(40):
        own[client] = memory(client)
        largest = max(largest, own.bytes)
    assert largest <= 10_000 and len(own) == 40


def test_one_memory_larger_than_the_limit_is_still_kept(tmp_path: Path) -> None:
    own = ClientStore(tmp_path, CPU, limit=10)
    own[1] = memory(1)
    assert own[1]["t"].eq(1).all() and not own.in_files


def test_a_copy_keeps_what_it_was_taken_with(tmp_path: Path) -> None:
    own = five(tmp_path)
    before = own.copy()
    for client in range(5):
        own[client] = memory(10 + client)
    assert [float(before[c]["t"][0]) for c in range(5)] == [0, 1, 2, 3, 4]
    assert [float(own[c]["t"][0]) for c in range(5)] == [10, 11, 12, 13, 14]


def test_forgetting_and_sweeping(tmp_path: Path) -> None:
    own = five(tmp_path)
    del own[0], own[4]
    assert sorted(own) == [1, 2, 3] and own.bytes == client_store.size(own.in_memory[3])
    sweep(tmp_path, own.in_files.values())
    assert {p.name for p in tmp_path.iterdir()} == set(own.in_files.values()) and len(own.in_files) == 2


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    own = five(tmp_path)
    (tmp_path / own.in_files[0]).write_bytes(b"x")
    with pytest.raises(RunFolderError, match=own.in_files[0]):
        own[0]


def test_what_is_moved_to_files_while_a_state_is_written_stays(tmp_path: Path) -> None:
    def names() -> set[str]:
        return {p.name for p in (tmp_path / "run" / "clients").iterdir()}

    with RunFolder(tmp_path / "run") as folder:
        own = five(folder.clients)
        state = RunState(ServerState({}), Scores.empty(1, np.ones(1)), Ledger(), private=own)
        folder.save(state, "", {})
        first = set(own.in_files.values())
        own[0] = memory(10)  # client 3 is moved to a file
        own[1] = memory(11)  # client 4 is moved to a file
        folder.wait_until_written()
        assert names() == {*own.in_files.values(), *first} > first
        folder.save(state, "", {})
        assert names() == {*own.in_files.values(), *first}  # either state may be the one on the disk
    assert names() == set(own.in_files.values())
    with RunFolder(tmp_path / "run"):  # opened and closed
        pass
    assert names() == set(own.in_files.values())


def test_files_of_somebody_else_are_not_swept(tmp_path: Path) -> None:
    own = five(tmp_path)
    (tmp_path / "hospital").mkdir()
    (tmp_path / "list.txt").write_text("mine")
    sweep(tmp_path, [])
    assert {p.name for p in tmp_path.iterdir()} == {"hospital", "list.txt"} and own.in_files


def test_a_disk_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "clients").write_text("a file where the folder should be")
    with pytest.raises(RunFolderError, match="could not be written"):
        five(tmp_path / "clients")


def test_a_run_with_a_tiny_memory_limit_is_the_same_run_and_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from profcil.engine.recorder import Progress
    from profcil.engine.run import resume, start
    from profcil.resolve import resolve

    sets = ("warmup.rounds=1", "train.rounds=2", "train.epochs=1", "model.width=4", "clients=4", "participants=3")
    config = resolve(None, {"method": "fedssi", "dataset": "digits"}, sets)
    start(config, tmp_path / "wide", tmp_path)

    monkeypatch.setattr(ClientStore.__init__, "__defaults__", (None, None, 1_000))

    def broken(progress: Progress) -> None:
        if progress.what == "round" and progress.when.position == 2:
            raise KeyboardInterrupt

    with pytest.raises(Exception, match="profcil resume"):
        start(config, tmp_path / "narrow", tmp_path, broken)
    assert any((tmp_path / "narrow" / "clients").iterdir())
    resume(tmp_path / "narrow", tmp_path)
    states = []
    for name in ("wide", "narrow"):
        with RunFolder(tmp_path / name) as folder:
            states.append(folder.load(CPU)[0])
    wide, narrow = states
    assert len(narrow.private.in_memory) == 1 and len(narrow.private.in_files) == len(wide.private) - 1 > 0
    assert {p.name for p in (tmp_path / "narrow" / "clients").iterdir()} == set(narrow.private.in_files.values())
    for client, own in wide.private.items():
        assert own.keys() == narrow.private[client].keys()
        assert all(torch.equal(t, narrow.private[client][k]) for k, t in own.items())
    assert wide.scores.to_json() == narrow.scores.to_json()
