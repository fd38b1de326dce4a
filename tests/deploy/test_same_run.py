"""A deployment computes the same bits as the serial simulation: scores, model and ledger."""

from __future__ import annotations

from pathlib import Path

import pytest
from memory_grid import tiny

from profcil.engine import run
from profcil.io.atomic_files import read_tensors


def outcome(folder: Path) -> dict:
    """The result of a run. Private tensors are left out: a deployment's server has none."""
    found = read_tensors(folder / "state.safetensors")
    assert found is not None
    tensors = {k: t.numpy().tobytes() for k, t in found[0].items() if k.startswith("server/")}
    return {"tensors": tensors, **{n: (folder / n).read_bytes() for n in ("scores.json", "ledger.csv", "plan.npz")}}


@pytest.mark.parametrize("method", ["promax", "fedcbdr", "fedspace"])
def test_a_deployment_has_the_same_bits_as_the_serial_simulation(deployed, tmp_path, method):
    config = tiny(method)
    serial = run.start(config, tmp_path / "serial", tmp_path)
    folder, grid = deployed(config)
    assert outcome(serial) == outcome(folder)
    has_private = any("private" in p.name for p in (tmp_path / "sites").rglob("*"))
    assert has_private == (method != "promax")
    assert {node for node, _ in grid.sent} == {100, 101, 102}
