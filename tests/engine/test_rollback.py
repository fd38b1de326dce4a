"""States kept at the ends of positions, and the way back to them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import outcome, tiny

from profcil.cli.main import main
from profcil.engine import run
from profcil.runs.verify import find_faults

pytestmark = pytest.mark.usefixtures("tracing")


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return run.start(tiny(keep_states=3), tmp_path / "run", tmp_path)


def states(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("states/*"))


@pytest.mark.parametrize(("words", "position"), [(["--to", "1"], 1), (["--to", "2"], 2), ([], 2)])
def test_a_run_that_went_back_ends_with_the_same_bits(kept, undisturbed, capsys, words, position):
    assert outcome(kept) == undisturbed
    assert main(["rollback", str(kept), *words]) == 0
    assert f"after position {position};" in capsys.readouterr().out
    assert not (kept / "model.safetensors").exists()
    assert states(kept) == [f"position-{p}.safetensors" for p in range(1, position + 1)]
    assert find_faults(kept) == []
    assert main(["resume", str(kept), "--quiet"]) == 0
    assert outcome(kept) == undisturbed and (kept / "model.safetensors").exists()


def test_states_beyond_the_number_are_removed(tmp_path):
    folder = run.start(tiny(keep_states=1), tmp_path / "run", tmp_path)
    assert states(folder) == ["position-3.safetensors"]


def test_by_default_nothing_is_kept(tmp_path, capsys):
    folder = run.start(tiny(), tmp_path / "run", tmp_path)
    assert not (folder / "states").exists()
    before = outcome(folder)
    assert main(["rollback", str(folder)]) == 2
    assert "keep_states=3" in capsys.readouterr().err
    assert outcome(folder) == before


def test_a_kept_state_takes_no_second_write(kept):
    assert (kept / "states" / "position-3.safetensors").samefile(kept / "state.safetensors")


def test_a_damaged_last_state_can_be_left_behind(kept, undisturbed):
    damage(kept / "state.safetensors")
    assert main(["rollback", str(kept), "--to", "2"]) == 0
    assert outcome(run.resume(kept)) == undisturbed


def test_a_damaged_kept_state_is_refused_and_the_run_stays(kept, undisturbed, capsys):
    file = kept / "states" / "position-1.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert main(["rollback", str(kept), "--to", "1"]) == 2
    assert "is damaged; choose another" in capsys.readouterr().err
    assert outcome(kept) == undisturbed


def test_private_tensors_in_files_are_kept_with_the_states(tmp_path, monkeypatch, undisturbed):
    """Each client's tensors are in a file of their own here. Those of kept states must not be swept away."""
    from profcil.engine import client_store

    monkeypatch.setattr(client_store.ClientStore.__init__, "__defaults__", with_limit_zero(client_store))
    folder = run.start(tiny(keep_states=3), tmp_path / "run", tmp_path)
    assert list((folder / "clients").glob("*"))
    assert main(["rollback", str(folder), "--to", "1"]) == 0
    again = outcome(run.resume(folder))
    assert again["scores"] == undisturbed["scores"] and again["ledger"] == undisturbed["ledger"]


def with_limit_zero(module) -> tuple:
    *others, _ = module.ClientStore.__init__.__defaults__
    return (*others, 0)


def damage(file: Path) -> None:
    """Replaces a file by a cut copy. The old content stays under its other name."""
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data[: len(data) // 2])
