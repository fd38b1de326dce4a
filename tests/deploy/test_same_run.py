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


@pytest.mark.parametrize("more", [{"base_rounds": 0}, {"base_rounds": 1}], ids=["frozen", "moving"])
def test_a_deployment_with_a_dictionary_has_the_same_bits_as_the_simulation(deployed, tmp_path, more):
    config = tiny("prolin", dictionary=30, **more)
    serial = run.start(config, tmp_path / "serial", tmp_path)
    for cached in (tmp_path / "cache" / "dictionary").glob("*"):
        cached.unlink()  # the clients of a deployment find the dictionary themselves
    folder, grid = deployed(config)
    found = outcome(folder)
    assert found == outcome(serial)
    assert b"\ndictionary,0,0," in found["ledger.csv"]
    assert any("dictionary" in name for name in found["tensors"])
    assert {node for node, _ in grid.sent} == {100, 101, 102}
    assert not list((tmp_path / "cache" / "dictionary").glob("*"))  # and keep it out of the cache


@pytest.mark.parametrize("least", [55, 10_000], ids=["some report", "none reports"])
def test_a_deployment_accepts_clients_with_too_few_examples_to_report(deployed, tmp_path, least):
    config = tiny("prolin", base_rounds=0, min_support=least)
    serial = run.start(config, tmp_path / "serial", tmp_path)
    folder, _ = deployed(config)
    assert outcome(folder) == outcome(serial)


@pytest.mark.parametrize("rule", ["clipped", "median"])
def test_robust_aggregation_has_the_same_bits_in_a_deployment(deployed, tmp_path, rule):
    config = tiny("promax", robust__aggregation=rule, stream__participants=3)
    serial = run.start(config, tmp_path / "serial", tmp_path)
    folder, _ = deployed(config)
    assert outcome(serial) == outcome(folder)
    plain = run.start(tiny("promax", stream__participants=3), tmp_path / "plain", tmp_path)
    assert outcome(plain)["tensors"] != outcome(folder)["tensors"]


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("prolin", {"params__base_rounds": 0, "params__dictionary": 30, "privacy__unit": "example"}),
        ("pro", {"privacy__unit": "client", "privacy__update_bound": 0.01}),
        ("fedavg", {"privacy__unit": "example", "privacy__gradient_bound": 1.0, "model__norm": "group"}),
    ],
)
def test_a_deployment_of_simulated_clients_has_the_noise_of_the_simulation(deployed, tmp_path, method, more):
    config = tiny(method, warmup__rounds=0, privacy__epsilon=2.0, **more)
    serial = run.start(config, tmp_path / "serial", tmp_path)
    folder, _ = deployed(config)
    assert outcome(folder) == outcome(serial)
