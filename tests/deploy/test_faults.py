"""Clients that are silent, late, double, stale or wrong: the run goes on by its policy, and its folder says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from flwr.app import Message
from memory_grid import tiny
from test_same_run import essence

from profcil.deploy.client import answer
from profcil.deploy.fleet import TooFew
from profcil.deploy.identity import Share
from profcil.deploy.run_config import write_recipe
from profcil.deploy.wire import Ask, answer_records, read_answer
from profcil.engine import run as engine
from profcil.engine.channel import When
from profcil.engine.payload import Block
from profcil.errors import Diverged, ProfcilError

VICTIM = 101  # the node of client 1
SILENT: dict = {}


def work(message: Message) -> bool:
    return message.metadata.message_type != "query.hello"


def events(folder: Path, *kinds: str) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [e for e in lines if e["event"] in kinds]


def tally(folder: Path) -> dict[str, float]:
    return json.loads((folder / "run.json").read_text())["tally"]


def at(number: int, do, node: int = VICTIM):
    """A fault at the n-th time that a node is given work."""

    def fault(grid, ask, answer):
        hit = work(ask) and ask.metadata.dst_node_id == node and grid.work(node) == number
        return do(grid, ask, answer) if hit else [answer]

    return fault


def altered(change):
    """The answer with its reply changed, as a broken or hostile client would send it."""

    def do(grid, ask, answer):
        said = read_answer(answer.content)
        change(said)
        return [Message(answer_records(said), reply_to=ask)]

    return do


@pytest.fixture
def silent(deployed) -> dict:
    """What a run comes to whose client 1 says nothing in its second round; played once."""
    if not SILENT:
        SILENT.update(essence(deployed(everyone(), fault=at(2, lambda *_: []), out="silent")[0]))
    return SILENT


def everyone(**more):
    """Three clients, all of them in every round, no warm-up, one step an epoch."""
    usual = {"warmup.rounds": 0, "stream.participants": 3, "setting": "homogeneous", "train.batch": 0}
    return tiny(more.pop("method", "fedavg"), **{k.replace(".", "__"): v for k, v in (usual | more).items()})


def test_a_silent_client_is_left_out_greeted_and_back_again(deployed):
    folder, _ = deployed(everyone(), fault=at(2, lambda *_: []))
    asked = events(folder, "asked")
    assert [e["silent"] for e in asked] == [[], [1], [], []]
    assert asked[1]["answered"] == [0, 2]
    assert [e["client"] for e in events(folder, "joined")].count(1) == 2  # greeted anew before it was asked again
    assert tally(folder)["silent_clients"] == 1
    assert [e["skipped"] for e in events(folder, "round")] == [[], [1], [], []]


def test_a_late_reply_changes_nothing_and_is_counted(deployed, silent):
    def late(grid, ask, answer):
        grid.kept = (ask.metadata.message_id, answer)
        return []

    def then(grid, ask, answer):
        if work(ask) and hasattr(grid, "kept") and grid.work(100) == 4:  # two rounds later
            id, old = grid.kept
            grid.mail[id] = [old]
        return at(2, late)(grid, ask, answer)

    folder, _ = deployed(everyone(), fault=then, out="late")
    [dropped] = events(folder, "late reply dropped")
    assert (dropped["client"], dropped["position"], dropped["round"]) == (1, 0, 1)
    assert tally(folder)["late_replies"] == 1
    assert essence(folder) == silent


def test_a_second_reply_to_the_same_ask_is_dropped(deployed, tmp_path):
    folder, _ = deployed(everyone(), fault=at(1, lambda grid, ask, answer: [answer, answer]))
    assert [e["client"] for e in events(folder, "second reply dropped")] == [1]
    assert essence(folder) == essence(engine.start(everyone(), tmp_path / "alone", tmp_path))


def stale(said) -> None:
    object.__setattr__(said, "when", type(said.when)("round", 0, 0, said.when.rounds))


def impostor(said) -> None:
    object.__setattr__(said.reply, "client", 2)


def nan(said) -> None:
    said.reply.blocks["head"].tensors["weight"].fill_(torch.nan)


def huge(said) -> None:
    said.reply.blocks["head"].tensors["weight"].mul_(1e9)


def shorn(said) -> None:
    del said.reply.blocks["base"]


def grown(said) -> None:
    said.reply.blocks["more"] = Block("model", {})


def boastful(said) -> None:
    object.__setattr__(said.reply, "samples", 10**6)


@pytest.mark.parametrize("change", [stale, impostor, nan, huge, shorn, grown, boastful])
def test_a_reply_that_cannot_be_used_is_refused_counted_and_never_aggregated(deployed, silent, change):
    folder, _ = deployed(everyone(), fault=at(2, altered(change)), out="bad")
    refused = [e["refused"] for e in events(folder, "asked")]
    assert [list(r) for r in refused] == [[], ["1"], [], []]
    assert len(refused[1]["1"]) > 10
    assert tally(folder)["refused_replies"] == 1
    assert essence(folder)["tensors"] == silent["tensors"]


def test_garbage_is_refused(deployed):
    from flwr.app import ConfigRecord, RecordDict

    rubbish = RecordDict({"x": ConfigRecord({"y": 1})})
    folder, _ = deployed(everyone(), fault=at(1, lambda grid, ask, answer: [Message(rubbish, reply_to=ask)]))
    assert "cannot be read" in events(folder, "asked")[0]["refused"]["1"]


def test_a_refused_client_keeps_its_old_private_memory(deployed, tmp_path):
    """Its turn did not happen: the next one starts from the memory that the last accepted reply left behind."""
    config = everyone(method="fedssi")
    silent, _ = deployed(config, fault=at(2, lambda *_: []), out="silent")
    folder, _ = deployed(config, fault=at(2, altered(nan)), out="bad")
    assert essence(folder)["tensors"] == essence(silent)["tensors"]


def test_too_few_replies_are_asked_for_again(deployed, tmp_path):
    """Nothing is lost where the second attempt succeeds."""
    folder, _ = deployed(everyone(), fault=at(2, lambda *_: []), min_replies=3)
    assert [e["answered"] for e in events(folder, "asked")] == [[0, 1, 2], [0, 2], [1], [0, 1, 2], [0, 1, 2]]
    alone = engine.start(everyone(), tmp_path / "alone", tmp_path)
    assert essence(folder)["tensors"] == essence(alone)["tensors"]
    assert tally(folder)["resent_bytes"] > 0


def test_the_run_stops_where_too_few_answer_and_goes_on_from_there(deployed, tmp_path):
    config = everyone(method="fedcbdr")

    def gone(grid, ask, answer):
        return [] if work(ask) and grid.work(VICTIM) >= 3 and ask.metadata.dst_node_id == VICTIM else [answer]

    with pytest.raises(TooFew, match="run the same app again"):
        deployed(config, fault=gone, min_replies=3)
    assert not json.loads((tmp_path / "run" / "run.json").read_text())["done"]
    folder, _ = deployed(config, min_replies=3)
    assert [e["round"] for e in events(folder, "resumed")] == [1]
    assert essence(folder)["tensors"] == essence(engine.start(config, tmp_path / "alone", tmp_path))["tensors"]


def test_a_deployment_is_not_resumed_as_a_simulation(deployed, tmp_path):
    with pytest.raises(TooFew):
        deployed(everyone(), fault=at(3, lambda *_: []), min_replies=3, attempts=1)
    with pytest.raises(ProfcilError, match="flower"):
        engine.resume(tmp_path / "run")


def test_nobody_there_is_told_in_one_sentence(deployed):
    with pytest.raises(TooFew, match="0 of 3 clients are there"):
        deployed(everyone(), nodes=0)


def test_a_client_that_joins_late_takes_part_from_then_on(deployed):
    def join(grid, ask, answer):
        if grid.work(100) == 2:
            grid.nodes.setdefault(102, {"client": 2, "home": grid.nodes[100]["home"]})
        return [answer]

    folder, _ = deployed(everyone(), fault=join, nodes=2)
    assert [e["answered"] for e in events(folder, "asked")] == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]
    assert [e["clients"] for e in events(folder, "absent")] == [[2], [2]]


def test_of_two_nodes_that_claim_a_client_the_first_speaks(deployed, tmp_path):
    def rival(grid, ask, answer):
        grid.nodes.setdefault(200, {"client": 1, "home": str(tmp_path / "rival")})
        return at(3, lambda *_: [])(grid, ask, answer)

    folder, grid = deployed(everyone(), fault=rival)
    assert {e["client"] for e in events(folder, "claimed twice")} == {1}
    assert grid.work(VICTIM) == 3  # until it misses a deadline,
    assert grid.work(200) == 1  # and then the other one


def test_a_node_that_leaves_is_missed(deployed):
    def leave(grid, ask, answer):
        if grid.work(102) == 2:  # the last one to be asked
            grid.nodes.pop(VICTIM, None)
        return [answer]

    folder, _ = deployed(everyone(), fault=leave)
    assert [e["client"] for e in events(folder, "left")] == [1]
    assert events(folder, "asked")[-1]["answered"] == [0, 2]


def test_a_site_that_lost_its_folder_is_sent_everything_again(deployed, tmp_path):
    """PRO's base does not travel in frozen rounds, so a client without its folder lacks it once."""

    def lose(grid, ask, answer):
        if grid.work(VICTIM) == 2 and ask.metadata.dst_node_id == VICTIM:
            shutil.rmtree(tmp_path / "sites", ignore_errors=True)
        return [answer]

    folder, _ = deployed(everyone(method="pro", base_rounds=1, refresh_at="final"), fault=lose)
    reasons = [r for e in events(folder, "asked") for r in e["refused"].values()]
    assert reasons
    assert all("does not hold block" in r for r in reasons)
    assert json.loads((folder / "run.json").read_text())["done"]


def test_a_lost_private_memory_is_noticed(deployed, tmp_path):
    def lose(grid, ask, answer):
        if grid.work(VICTIM) == 1 and ask.metadata.dst_node_id == VICTIM:
            for path in (tmp_path / "sites").rglob("*/1/private-*"):
                path.unlink()
        return [answer]

    folder, _ = deployed(everyone(method="fedspace"), fault=lose)
    assert tally(folder)["memories_lost"] == 1


def test_a_diverged_client_ends_the_run_or_is_skipped(deployed):
    with pytest.raises(Diverged, match="client"):
        deployed(everyone(lr=1e9, clip=0, batch=32), out="fail")
    with pytest.raises(TooFew):  # all of them diverge
        deployed(everyone(lr=1e9, clip=0, batch=32, on_divergence="skip-client"), out="skip")


@pytest.mark.parametrize("what", ["plan", "data"])
def test_a_client_with_another_plan_or_other_data_says_so(tmp_path, what):
    seat = Share(1, tmp_path, tmp_path, write_recipe(everyone()))
    world = seat.world()
    facts = {"run": "x", "plan": world.plan.digest, "data": world.bundle.fingerprint}
    said = answer("turn", Ask(1, When("round", 0, 0, 2), {}, {}, 0, 1, (), {**facts, what: "other"}), seat)
    assert said.kind == "broken"
    assert f"another {what}" in said.trouble


def test_a_node_that_cannot_say_who_it_is_is_refused_once(deployed, tmp_path):
    def lost(grid, ask, answer):
        grid.nodes.setdefault(300, {"client": -4})
        return [answer]

    folder, grid = deployed(everyone(), fault=lost)
    [refused] = events(folder, "refused")
    assert "whole number from 0" in refused["reason"]
    assert grid.asked.count((300, "query.hello")) == 1
