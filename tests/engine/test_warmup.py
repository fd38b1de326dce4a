"""The warm-up: an optimiser of its own, and a projector that is averaged or stays on its client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import tiny
from torch import Tensor

from profcil.config import TrainSettings, WarmupSettings
from profcil.engine.channel import Block, When
from profcil.engine.executor import make_guard
from profcil.engine.warmup import OPTIMISER, WarmupResult, warm, warmup_setup
from profcil.engine.world import make_world
from profcil.metrics.ledger import Ledger
from profcil.resolve import RECIPES, resolve

WHEN = When("warmup", 0, 0, 2)


def warmed(folder: Path, **more: Any) -> WarmupResult:
    return warm(make_world(tiny(**{"warmup__rounds": 2, **more}), folder), lambda *a: None)


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def size(tensors: dict[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())


def model_bytes(ledger: Ledger) -> set[int]:
    """What a client gets or sends of the model in a warm-up round."""
    return {e.bytes for e in ledger.entries if e.stage == "warmup" and e.kind == "model"}


def test_it_moves_the_base(tmp_path: Path) -> None:
    world = make_world(tiny(), tmp_path)
    start = world.net.weights(("base",))["base"]
    assert not same(start, warm(world, lambda *a: None).weights["base"])


TRAIN = {"lr": 0.5, "optimiser": "adam", "momentum": 0.1, "weight_decay": 0.2, "decay": "coupled", "clip": 0.01}


def test_the_streams_optimiser_does_not_change_the_warmed_base(tmp_path: Path) -> None:
    assert TRAIN.keys() == set(OPTIMISER)
    usual = warmed(tmp_path).weights["base"]
    other = warmed(tmp_path, **{f"train__{k}": v for k, v in TRAIN.items()})
    assert other.cached  # the key does not hold what the base does not depend on
    assert same(usual, other.weights["base"])


def test_the_streams_optimiser_has_no_part_in_computing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = warmed(tmp_path).weights["base"]
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "another cache"))
    other = warmed(tmp_path, **{f"train__{k}": v for k, v in TRAIN.items()})
    assert not other.cached
    assert same(usual, other.weights["base"])


@pytest.mark.parametrize("name", ["lr", "optimiser", "momentum", "weight_decay", "clip"])
def test_its_own_optimiser_changes_the_warmed_base(tmp_path: Path, name: str) -> None:
    usual = warmed(tmp_path).weights["base"]
    assert not same(usual, warmed(tmp_path, **{f"warmup__{name}": TRAIN[name]}).weights["base"])


@pytest.mark.parametrize("recipe", sorted(p.stem for p in RECIPES.glob("*.toml")))
def test_recipes_warm_up_with_the_optimiser_of_their_stream(recipe: str) -> None:
    config = resolve(recipe)
    assert {k: getattr(config.warmup, k) for k in OPTIMISER} == {k: getattr(config.train, k) for k in OPTIMISER}


def test_its_defaults_are_those_of_the_stream() -> None:
    assert all(getattr(WarmupSettings(), k) == getattr(TrainSettings(), k) for k in OPTIMISER)


def test_a_local_projector_is_never_sent(tmp_path: Path) -> None:
    averaged, local = warmed(tmp_path), warmed(tmp_path, warmup__projector="local")
    world = make_world(tiny(), tmp_path)
    base, projector = (size(world.net.weights((name,))[name]) for name in ("base", "projector"))
    assert model_bytes(averaged.ledger) == {base + projector}
    assert model_bytes(local.ledger) == {base}
    assert not same(averaged.weights["base"], local.weights["base"])


def test_a_local_projector_goes_on_from_where_its_client_left_it(tmp_path: Path) -> None:
    world = make_world(tiny(warmup__projector="local"), tmp_path)
    inner, method = warmup_setup(world)
    inbox = {"base": Block("model", inner.net.weights(("base",))["base"])}

    def asked(client: int, private: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        return next(method.turn(inner.client(client, WHEN, private), inbox)).weights["projector"]

    first = asked(0)
    assert same(first, asked(0))
    assert not same(first, asked(1))
    reply = inner.executor({0: method.turn(inner.client(0, WHEN), inbox)}, make_guard(inner.config.train, WHEN))[0]
    assert set(reply.blocks) == {"base"}
    assert not same(first, dict(reply.private))
    assert same(asked(0, dict(reply.private)), dict(reply.private))
