"""A client that diverges ends the run with its name, or is left out by policy; it is never averaged."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import outcome, tiny

from profcil.engine import recorder, run
from profcil.engine.executor import Executor
from profcil.errors import Diverged
from profcil.io.atomic_files import read_tensors

NAN, HUGE = float("nan"), 1e9


def let_diverge(patch: pytest.MonkeyPatch, loss: float, clients: set[int], weights: bool = False) -> None:
    """Lets the fitting phases of some clients end with a bad loss, or with bad weights under a good one."""
    original = Executor.run

    def spoilt(self: Executor, phases: Any) -> dict[int, Any]:
        results = original(self, phases)
        for p in phases:
            if p.name == "fit" and p.client in clients:
                results[p.client] = bad(p, results[p.client])
        return results

    def bad(phase: Any, result: Any) -> Any:
        if not weights:
            return replace(result, loss=loss)
        head = {k: v * loss for k, v in result.weights["head"].items()}
        return replace(result, weights={**result.weights, "head": head})

    patch.setattr(Executor, "run", spoilt)


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "ledger.csv") as file:
        return [r for r in csv.DictReader(file) if r["stage"] != "warmup"]


@pytest.mark.parametrize(("loss", "weights"), [(NAN, False), (HUGE, False), (-HUGE, False), (NAN, True)])
def test_fail_names_client_position_and_round(
    loss: float, weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = run.start(tiny(), tmp_path / "clean", tmp_path)
    first = next(r for r in rows(clean) if r["position"] == "1")["client"]
    let_diverge(monkeypatch, loss, {int(first)}, weights)
    with pytest.raises(
        Diverged, match=rf"client {first} diverged at position \d, round \d \(fit.*skip-client"
    ) as raised:
        run.start(tiny(), tmp_path / "run", tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("accelerate", ["auto", "off"])
@pytest.mark.parametrize("method", ["fedavg", "promax"])
def test_skip_goes_on_without_the_client(
    method: str, accelerate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are not used, and the ledger has nothing sent by it in a training round."""
    config = tiny(method, train__on_divergence="skip-client", accelerate=accelerate)
    let_diverge(monkeypatch, NAN, {1}, weights=True)
    folder = run.start(config, tmp_path / "run", tmp_path)
    tensors, _ = read_tensors(folder / "state.safetensors") or ({}, {})
    assert tensors and all(bool(t.isfinite().all()) for t in tensors.values())
    up = {int(r["client"]) for r in rows(folder) if r["direction"] == "up" and r["stage"] == "round"}
    assert 1 not in up and up
    assert any(r["client"] == "1" and r["direction"] == "down" for r in rows(folder))


@pytest.mark.parametrize("method", ["fedavg", "promax"])
def test_with_all_skipped_the_model_stays(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(method, train__on_divergence="skip-client")
    let_diverge(monkeypatch, NAN, {0, 1, 2, 3})
    monkeypatch.setattr(recorder, "SAVE_SECONDS", -1)
    blocks: list[dict] = []
    monkeypatch.setattr(run.RunRecorder, "save", _noting(run.RunRecorder.save, blocks))
    run.start(config, tmp_path / "run", tmp_path)
    assert len(blocks) > 3 and all(b == blocks[0] for b in blocks)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["done"]


def _noting(save: Any, blocks: list[dict]) -> Any:
    def noting(recorder: Any) -> None:
        save(recorder)
        weights = recorder.state.server.weights()
        blocks.append({(b, k): t.numpy().tobytes() for b, own in weights.items() for k, t in own.items()})

    return noting


def test_a_skipping_run_is_as_repeatable_as_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_diverge(monkeypatch, HUGE, {1})
    config = tiny(train__on_divergence="skip-client")
    a, b = (outcome(run.start(config, tmp_path / name, tmp_path)) for name in "ab")
    assert a == b
