"""The result of a run depends on its configuration and data, and on nothing else."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import outcome, tiny

from profcil.engine import run, world
from profcil.engine.executor import Executor
from profcil.engine.recorder import Progress
from profcil.engine.warmup import cache_key, cache_lock
from profcil.engine.world import make_world


def end(folder: Path, **more: Any) -> dict:
    return outcome(run.start(tiny(**more), folder, folder.parent))


@pytest.mark.parametrize("method", ["fedavg", "promax"])
def test_same_seed_same_bits_other_seed_other_bits(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a warm-up of its own each time, and for any state of the global generators."""
    results = []
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / f"cache {name}"))
        torch.manual_seed(len(results))
        results.append(end(tmp_path / name, method=method, seed=seed))
    assert results[0] == results[1]
    assert results[0]["tensors"] != results[2]["tensors"]


@pytest.mark.parametrize("accelerate", ["auto", "off"])
def test_the_order_of_execution_does_not_matter(
    accelerate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = {"method": "promax", "accelerate": accelerate, "stream__participants": 4, "stream__support": 1.0}
    forward = end(tmp_path / "forward", **same)
    original = Executor.__call__
    monkeypatch.setattr(Executor, "__call__", lambda self, turns, guard: original(self, _reversed(turns), guard))
    assert end(tmp_path / "backward", **same) == forward


def test_the_number_of_workers_does_not_matter(tmp_path: Path) -> None:
    same = {"method": "promax", "stream__participants": 4, "stream__support": 1.0}
    assert end(tmp_path / "one", workers=1, **same) == end(tmp_path / "three", workers=3, **same)


def _reversed(turns: Any) -> dict:
    return dict(reversed(list(turns.items())))


# -- the warm-up's cache ----------------------------------------------------------------------------------------------


def test_the_second_run_takes_the_warm_up_from_the_cache(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    original = Executor.run

    def noted(self: Executor, phases: Any) -> Any:
        names.extend(p.name for p in phases)
        return original(self, phases)

    monkeypatch.setattr(Executor, "run", noted)
    first = end(tmp_path / "first")
    assert "warmup" in names
    names.clear()
    assert end(tmp_path / "second") == first
    assert names and "warmup" not in names
    assert [cached(tmp_path / name) for name in ("first", "second")] == [False, True]


@pytest.mark.parametrize("harm", [lambda data: data[:-9], lambda data: b"", lambda data: data[:-9] + bytes(9)])
def test_a_damaged_cache_is_computed_again(harm: Any, tmp_path: Path, own_cache: Path) -> None:
    first = end(tmp_path / "first")
    (file,) = (own_cache / "warmup").iterdir()
    file.write_bytes(harm(file.read_bytes()))
    assert end(tmp_path / "second") == first
    assert not cached(tmp_path / "second")
    end(tmp_path / "third")
    assert cached(tmp_path / "third")


def test_a_run_waits_for_another_one_that_computes_the_same_warm_up(own_cache: Path) -> None:
    entered = {name: threading.Event() for name in ("same", "other")}

    def enter(name: str) -> None:
        with cache_lock(own_cache / "warmup" / f"{name}.safetensors"):
            entered[name].set()

    threads = [threading.Thread(target=enter, args=(name,)) for name in entered]
    with cache_lock(own_cache / "warmup" / "same.safetensors"):
        for thread in threads:
            thread.start()
        assert entered["other"].wait(20) and not entered["same"].wait(0.2)
    assert entered["same"].wait(20)


def test_the_streams_clock_leaves_waiting_for_a_warm_up_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited, warm, clock = [0.0], run.warm, time.perf_counter

    def slow(*what: Any) -> Any:
        waited[0] += 10_000.0
        return warm(*what)

    monkeypatch.setattr(run, "warm", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + waited[0])
    run.start(tiny(), tmp_path / "run", tmp_path)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["seconds"] < 10_000


def test_a_run_works_without_a_writable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = end(tmp_path / "first")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "file"))
    assert end(tmp_path / "second") == first


def cached(folder: Path) -> bool:
    import json

    return json.loads((folder / "run.json").read_text())["warmup_cached"]


INGREDIENTS = {
    "seed": 1,
    "warmup__rounds": 2,
    "warmup__epochs": 2,
    "warmup__batch": 32,
    "warmup__temperature": 0.4,
    "warmup__optimiser": "adam",
    "warmup__lr": 0.02,
    "warmup__momentum": 0.5,
    "warmup__weight_decay": 0.1,
    "warmup__decay": "coupled",
    "warmup__clip": 1.0,
    "warmup__projector": "local",
    "train__on_divergence": "skip-client",
    "train__loss_limit": 10.0,
    "model__norm": "none",
    "model__width": 8,
    "stream__clients": 5,
    "stream__support": 1.0,
    "evaluate": "validation",
    "transfer": "full",
}


def test_the_key_holds_every_ingredient(tmp_path: Path) -> None:
    """And nothing else is one: adapter and head do not take part in the warm-up."""
    plain = make_world(tiny(), tmp_path)
    keys = {name: cache_key(make_world(tiny(**{name: value}), tmp_path)) for name, value in INGREDIENTS.items()}
    other_data = replace(plain, bundle=replace(plain.bundle, fingerprint="other"))
    keys |= {"nothing": cache_key(plain), "data": cache_key(other_data)}
    shared = sorted(name for name in keys if list(keys.values()).count(keys[name]) > 1)
    assert not shared


def test_the_method_and_its_training_are_no_ingredients(tmp_path: Path) -> None:
    others = [tiny("promax"), tiny(train__rounds=9), tiny(params__label_space="local"), tiny(workers=2)]
    others += [tiny(train__lr=0.02), tiny(train__optimiser="adam"), tiny(train__clip=1.0)]
    assert {cache_key(make_world(c, tmp_path)) for c in [tiny(), *others]} == {cache_key(make_world(tiny(), tmp_path))}


def test_accelerated_and_reference_runs_do_not_share_a_warm_up(tmp_path: Path) -> None:
    """Their rounding differs. Without the package accel, `auto` is the reference."""
    auto, off = (make_world(tiny(accelerate=path), tmp_path) for path in ("auto", "off"))
    assert (cache_key(auto) == cache_key(off)) == (auto.executor.acceleration is None)


# -- what a run may read, and what it may store ------------------------------------------------------------------------


class Untouchable:
    """Test data that must not be read; it may only be moved to a device."""

    def to(self, device: Any) -> Untouchable:
        return self

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the test part was asked for its {name}")


@pytest.mark.parametrize("method", ["fedavg", "promax"])
def test_a_validation_run_never_touches_test_data(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = end(tmp_path / "clean", method=method, evaluate="validation")
    load = world.load_bundle
    monkeypatch.setattr(world, "load_bundle", lambda *a: replace(load(*a), test=Untouchable()))
    assert end(tmp_path / "untouchable", method=method, evaluate="validation") == clean
    with pytest.raises(AssertionError, match="the test part was asked"):
        end(tmp_path / "test", method=method)


@pytest.mark.parametrize("method", ["fedavg", "promax"])
def test_memory_stays_flat(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features of this round's participants and of one base version, nothing once a position is over."""
    recorders, sizes, original = [], [], run.RunRecorder
    monkeypatch.setattr(run, "RunRecorder", lambda *a: recorders.append(original(*a)) or recorders[-1])

    def look(p: Progress) -> None:
        if p.what != "warmup":
            k = recorders[0]
            sizes.append((p.what, len(k.world.features), len(k.state.private), sum(map(len, k.state.held.values()))))

    run.start(tiny(method, train__rounds=4), tmp_path / "run", tmp_path, look)
    assert len(sizes) == 15
    assert all(features <= 2 * 2 for what, features, *_ in sizes)  # two participants, before and after averaging
    assert all(features == 0 for what, features, *_ in sizes if what == "position")
    assert all(private == 0 and held <= 4 * 6 for *_, private, held in sizes)
