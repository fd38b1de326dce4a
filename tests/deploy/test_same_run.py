"""A deployment computes what the serial simulation computes: scores, model and ledger, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from memory_grid import tiny

from profcil.engine import run
from profcil.io.atomic_files import read_tensors


def essence(folder: Path) -> dict:
    """What a run came to; private memories are nowhere on a deployment's server."""
    tensors = read_tensors(folder / "state.safetensors")
    assert tensors is not None
    kept = {k: t.numpy().tobytes() for k, t in tensors[0].items() if k.startswith("server/")}
    return {"tensors": kept, **{n: (folder / n).read_bytes() for n in ("scores.json", "ledger.csv", "plan.npz")}}


@pytest.mark.parametrize("method", ["promax", "fedcbdr", "fedspace"])
def test_the_same_bits_as_the_serial_simulation(deployed, tmp_path, method):
    config = tiny(method)
    alone = run.start(config, tmp_path / "alone", tmp_path)
    together, grid = deployed(config)
    assert essence(alone) == essence(together)
    assert any("private" in p.name for p in (tmp_path / "sites").rglob("*")) == (method != "promax")
    assert {node for node, _ in grid.asked} == {100, 101, 102}
