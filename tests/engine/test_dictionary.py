"""The stage before the stream in which a federation agrees on a dictionary: metered, cached, and without labels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import TINY, outcome
from torch import Tensor

from profcil import registry
from profcil.engine import dictionary, recorder, run
from profcil.engine.channel import When
from profcil.engine.client import Client
from profcil.engine.dictionary import DictionaryResult, cache_key, dictionary_of, find_entries, prepare_dictionary
from profcil.engine.world import World, make_world
from profcil.io.atomic_files import read_tensors
from profcil.metrics.ledger import Ledger, stream_bytes
from profcil.protocol.participation import dictionary_participants
from profcil.resolve import RunConfig, resolve

WIDTH = 24
CENTRES, NUMBERS = 6, 16  # of a digit: a quarter of the width, and 4 x 4 pixels


def config(method: str = "prolin", **more: Any) -> RunConfig:
    """A small configuration; `a__b=1` sets a.b."""
    own = {"params__dictionary": WIDTH, "params__base_rounds": 1} if method == "prolin" else {}
    sets = TINY | {k.replace("__", "."): v for k, v in (own | more).items()}
    return resolve(flags={"dataset": "digits", "method": method}, sets=[f"{k}={v}" for k, v in sets.items()])


def world_of(folder: Path, **more: Any) -> World:
    return make_world(config(**more), folder)


def method_of(world: World) -> Any:
    return registry.find("methods", world.config.method).METHOD(world.config.params)


def search(world: World, watch: Any = lambda *a: None) -> DictionaryResult:
    return prepare_dictionary(world, method_of(world), watch, find_entries)


def key(world: World) -> str:
    made = dictionary_of(world, method_of(world))
    assert made is not None
    return cache_key(world, made)


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def cached(cache: Path) -> list[Path]:
    return list((cache / "dictionary").glob("*.safetensors"))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that grows with every search that is computed."""
    calls: list[None] = []
    original = dictionary.compute

    def compute(*args: Any) -> DictionaryResult:
        calls.append(None)
        return original(*args)

    monkeypatch.setattr(dictionary, "compute", compute)
    return calls


# -- the ledger ---------------------------------------------------------------------------------------------------


def test_every_client_sends_its_sums_in_every_round_and_each_byte_is_recorded(tmp_path):
    world = world_of(tmp_path)
    ledger = search(world).ledger
    clients = dictionary_participants(world.plan)
    assert len(clients) > world.config.stream.participants  # more than a round of the stream has
    assert {e.stage for e in ledger.entries} == {"dictionary"}
    assert {(e.client, e.round) for e in ledger.entries} == {(c, r) for c in clients for r in range(4)}
    entries = 4 * (CENTRES * NUMBERS + NUMBERS**2 + NUMBERS)  # centres, whitening and mean
    first = 4 * (NUMBERS + NUMBERS**2 + 1)  # sum, second moments and count
    later = 4 * (CENTRES * NUMBERS + CENTRES)
    for c in clients:
        for r in range(4):
            where = {"client": c, "round": r, "position": 0}
            assert ledger.total(direction="down", kind="memory", **where) == entries
            assert ledger.total(direction="up", kind="statistics", **where) == (later if r else first)


def test_its_bytes_count_as_bytes_of_the_stream(tmp_path):
    folder = run.start(config(), tmp_path / "run", tmp_path)
    ledger = Ledger.from_csv((folder / "ledger.csv").read_text())
    stages = {stage: ledger.total(stage=stage) for stage in ("warmup", "dictionary", "round", "refresh")}
    assert all(stages.values())
    assert stream_bytes(ledger.entries) == sum(stages.values()) - stages["warmup"]


def test_a_method_without_a_dictionary_has_no_such_stage(tmp_path, own_cache):
    for name, settings in (("fedavg", {}), ("prolin", {"params__dictionary": 0})):
        world = world_of(tmp_path, method=name, **settings)
        assert dictionary_of(world, method_of(world)) is None
        none = search(world)
        assert (none.entries, none.ledger.entries) == ({}, [])
        assert none.added_to({"base": {}}) == {"base": {}}
        folder = run.start(world.config, tmp_path / f"run-{name}", tmp_path)
        assert "dictionary," not in (folder / "ledger.csv").read_text()
    assert not cached(own_cache)


def test_an_observer_hears_of_every_round(tmp_path):
    messages: list[Any] = []
    run.start(config(), tmp_path / "run", tmp_path, lambda p: messages.append((p.what, p.when, p.done, p.total)))
    stage = [h for h in messages if h[0] == "dictionary"]
    assert [when for _, when, _, _ in stage] == [When("dictionary", 0, r, 4) for r in range(4)]
    assert [(done, total) for *_, done, total in stage] == [(r, 4) for r in range(1, 5)]
    kinds = [h[0] for h in messages]
    assert kinds.index("dictionary") > kinds.index("warmup")
    assert max(i for i, kind in enumerate(kinds) if kind == "dictionary") < kinds.index("round")


# -- the cache ----------------------------------------------------------------------------------------------------


def test_a_second_run_takes_the_dictionary_from_the_cache(tmp_path, own_cache, monkeypatch):
    calls = counted(monkeypatch)
    one, two = (outcome(run.start(config(), tmp_path / name, tmp_path)) for name in ("one", "two"))
    assert len(calls) == len(cached(own_cache)) == 1
    assert one == two  # with the ledger of the search that was computed once


def test_the_cache_returns_what_was_computed(tmp_path):
    one, two = search(world_of(tmp_path)), search(world_of(tmp_path))
    assert same(one.entries, two.entries)
    assert one.ledger.to_csv() == two.ledger.to_csv()
    assert one.seconds == two.seconds


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty"])
def test_a_damaged_cache_file_is_computed_again(tmp_path, own_cache, monkeypatch, damage):
    calls = counted(monkeypatch)
    before = search(world_of(tmp_path)).entries
    (file,) = cached(own_cache)
    whole = file.read_bytes()
    file.write_bytes({"cut": whole[: len(whole) // 2], "garbage": b"not a tensor" * 50, "empty": b""}[damage])
    after = search(world_of(tmp_path)).entries
    assert len(calls) == 2
    assert same(before, after)
    assert read_tensors(file) is not None  # it is written anew


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, own_cache):
    before = search(world_of(tmp_path)).entries
    for file in cached(own_cache):
        file.unlink()
    (own_cache / "dictionary").rmdir()
    (own_cache / "dictionary").write_text("in the way")
    assert same(search(world_of(tmp_path)).entries, before)


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"params__dictionary": WIDTH + 1},
        {"params__min_support": 2},
        {"stream__clients": 5},
        {"stream__support": 1.0},
        {"transfer": "full"},
    ],
    ids=str,
)
def test_what_the_entries_depend_on_changes_the_key(tmp_path, other):
    assert key(world_of(tmp_path)) != key(world_of(tmp_path, **other))


@pytest.mark.parametrize(
    "other",
    [{"params__base_rounds": 0}, {"train__lr": 0.5}, {"warmup__rounds": 0}, {"params__keep_scores": 0}],
    ids=str,
)
def test_what_they_do_not_depend_on_does_not(tmp_path, other):
    assert key(world_of(tmp_path)) == key(world_of(tmp_path, **other))


def test_another_seed_gives_other_entries(tmp_path):
    one, two = (search(world_of(tmp_path, seed=seed)).entries for seed in (0, 1))
    assert not same(one, two)


# -- resuming, and what clients show ------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [1, 3])
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(tmp_path, own_cache, monkeypatch, calls):
    whole = outcome(run.start(config(), tmp_path / "whole", tmp_path))
    monkeypatch.setattr(recorder, "SAVE_SECONDS", -1)
    left = [calls]

    def stop(progress: recorder.Progress) -> None:
        left[0] -= progress.what == "round"
        if not left[0]:
            raise KeyboardInterrupt

    with pytest.raises(run.Interrupted):
        run.start(config(), tmp_path / "run", tmp_path, stop)
    for file in cached(own_cache):
        file.unlink()
    computed = counted(monkeypatch)
    assert outcome(run.resume(tmp_path / "run", tmp_path)) == whole
    assert not computed  # the state holds the dictionary


def test_an_interrupted_search_is_an_interruption(tmp_path):
    def stop(progress: recorder.Progress) -> None:
        if progress.what == "dictionary":
            raise KeyboardInterrupt

    with pytest.raises(run.Interrupted, match="before the stream"):
        run.start(config(), tmp_path / "run", tmp_path, stop)


def test_labels_are_never_read(tmp_path, monkeypatch):
    usual = search(world_of(tmp_path)).entries
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "another cache"))
    world = world_of(tmp_path)

    def refuse(self: Client) -> Any:
        raise AssertionError("a label was read")

    for name in ("y", "y_list", "labels", "rank"):
        monkeypatch.setattr(Client, name, property(refuse))
    assert same(search(world).entries, usual)


def test_entries_do_not_depend_on_labels(tmp_path, monkeypatch):
    """All labels of the examples are replaced by zero after the division of the data."""
    usual = search(world_of(tmp_path)).entries
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "another cache"))
    world = world_of(tmp_path)
    train = world.bundle.train
    world.bundle = replace(world.bundle, train=replace(train, y=torch.zeros_like(train.y)))
    assert same(search(world).entries, usual)


def test_clients_use_all_their_examples_of_all_positions(tmp_path):
    world = world_of(tmp_path)
    when = When("dictionary", 0, 0, 4)
    clients = dictionary_participants(world.plan)
    used = [len(world.client(c, when).current) for c in clients]
    assert used == [len(world.plan.owned(c)) for c in clients]
    assert sum(used) > sum(len(world.plan.samples(c, 0)) for c in clients)
    assert world.client(clients[0], when).seen == ()
