"""Missing, late, duplicate, stale and invalid replies: the run follows its policy and records them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from flwr.app import Message
from memory_grid import tiny
from test_same_run import outcome

from profcil.deploy.client.identity import PartitionIdentity
from profcil.deploy.client.respond import respond
from profcil.deploy.run_config import config_to_text
from profcil.deploy.server.fleet import TooFewClients
from profcil.deploy.status import describe, status
from profcil.deploy.wire import Request, pack, read_response, response_records, unpack
from profcil.engine import run as engine
from profcil.engine.channel import Block, When
from profcil.errors import Diverged, ProfcilError

VICTIM = 101  # the node of client 1
OUTCOME_WITHOUT_REPLY: dict = {}  # filled by the fixture `without_reply`


def is_work(message: Message) -> bool:
    return message.metadata.message_type != "query.hello"


def events(folder: Path, *kinds: str) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [e for e in lines if e["event"] in kinds]


def tally(folder: Path) -> dict[str, float]:
    return json.loads((folder / "run.json").read_text())["tally"]


def fault_at(number: int, action, node: int = VICTIM):
    """A fault that replaces the n-th reply of a node by the messages that `action` returns."""

    def fault(grid, request, reply):
        hit = is_work(request) and request.metadata.dst_node_id == node and grid.work_count(node) == number
        return action(grid, request, reply) if hit else [reply]

    return fault


def no_reply(grid, request, reply):
    return []


def changed_by(change):
    """The reply with a change, as a broken or malicious client would send it."""

    def action(grid, request, reply):
        response = read_response(reply.content)
        change(response)
        return [Message(response_records(response), reply_to=request)]

    return action


@pytest.fixture
def without_reply(deployed) -> dict:
    """The outcome of a run in which client 1 does not reply in its second round. It is computed once."""
    if not OUTCOME_WITHOUT_REPLY:
        folder, _ = deployed(all_clients(), fault=fault_at(2, no_reply), out="without-reply")
        OUTCOME_WITHOUT_REPLY.update(outcome(folder))
    return OUTCOME_WITHOUT_REPLY


def all_clients(**more):
    """Three clients that take part in every round, no warm-up, one step per epoch."""
    usual = {"warmup.rounds": 0, "stream.participants": 3, "setting": "homogeneous", "train.batch": 0}
    return tiny(more.pop("method", "fedavg"), **{k.replace(".", "__"): v for k, v in (usual | more).items()})


def test_a_client_without_a_reply_is_left_out_and_rejoins_after_a_hello(deployed):
    folder, _ = deployed(all_clients(), fault=fault_at(2, no_reply))
    asked = events(folder, "asked")
    assert [e["silent"] for e in asked] == [[], [1], [], []]
    assert asked[1]["answered"] == [0, 2]
    assert [e["client"] for e in events(folder, "joined")].count(1) == 2  # a second hello before it was asked again
    assert tally(folder)["silent_clients"] == 1
    assert [e["skipped"] for e in events(folder, "round")] == [[], [1], [], []]


def test_a_late_reply_changes_nothing_and_is_counted(deployed, without_reply):
    def hold_back(grid, request, reply):
        grid.held_back = (request.metadata.message_id, reply)
        return []

    def deliver_later(grid, request, reply):
        if is_work(request) and hasattr(grid, "held_back") and grid.work_count(100) == 4:  # two rounds later
            id, old = grid.held_back
            grid.mail[id] = [old]
        return fault_at(2, hold_back)(grid, request, reply)

    folder, _ = deployed(all_clients(), fault=deliver_later, out="late")
    [dropped] = events(folder, "late reply dropped")
    assert (dropped["client"], dropped["position"], dropped["round"]) == (1, 0, 1)
    assert tally(folder)["late_replies"] == 1
    assert outcome(folder) == without_reply


def test_a_second_reply_to_the_same_request_is_dropped(deployed, tmp_path):
    folder, _ = deployed(all_clients(), fault=fault_at(1, lambda grid, request, reply: [reply, reply]))
    assert [e["client"] for e in events(folder, "second reply dropped")] == [1]
    assert outcome(folder) == outcome(engine.start(all_clients(), tmp_path / "serial", tmp_path))


def earlier_round(response) -> None:
    object.__setattr__(response, "when", type(response.when)("round", 0, 0, response.when.rounds))


def malformed_round(response) -> None:
    object.__setattr__(response, "when", type(response.when)("round", None, "x", response.when.rounds))


def other_client(response) -> None:
    object.__setattr__(response.reply, "client", 2)


def nan(response) -> None:
    response.reply.blocks["head"].tensors["weight"].fill_(torch.nan)


def huge_values(response) -> None:
    response.reply.blocks["head"].tensors["weight"].mul_(1e9)


def missing_block(response) -> None:
    del response.reply.blocks["base"]


def extra_block(response) -> None:
    response.reply.blocks["more"] = Block("model", {})


def too_many_examples(response) -> None:
    object.__setattr__(response.reply, "samples", 10**6)


@pytest.mark.parametrize(
    "change",
    [
        earlier_round,
        malformed_round,
        other_client,
        nan,
        huge_values,
        missing_block,
        extra_block,
        too_many_examples,
    ],
)
def test_an_invalid_reply_is_refused_counted_and_not_aggregated(deployed, without_reply, change):
    folder, _ = deployed(all_clients(), fault=fault_at(2, changed_by(change)), out="invalid")
    refused = [e["refused"] for e in events(folder, "asked")]
    assert [list(r) for r in refused] == [[], ["1"], [], []]
    assert len(refused[1]["1"]) > 10
    assert tally(folder)["refused_replies"] == 1
    assert outcome(folder)["tensors"] == without_reply["tensors"]


def test_a_client_with_false_replies_is_not_asked_again(deployed):
    """Each is refused, in the only attempt of a round; the second one leads to quarantine."""
    count = changed_by(lambda response: object.__setattr__(response.reply, "samples", 2**31 - 1))

    def always(grid, request, reply):
        lies = is_work(request) and request.metadata.dst_node_id == VICTIM
        return count(grid, request, reply) if lies else [reply]

    robust = {"robust.aggregation": "clipped", "robust.quarantine": 2}
    folder, _ = deployed(all_clients(**robust), fault=always)
    rounds = events(folder, "round")
    assert [list(e.get("dropped", {})) for e in rounds] == [["1"], ["1"], [], []]
    assert [e.get("quarantined") for e in rounds] == [None, [1], None, None]
    assert "2147483647 examples" in rounds[0]["dropped"]["1"]
    assert [e["answered"] for e in events(folder, "asked")] == [[0, 2]] * 4
    assert [sorted(e["refused"]) for e in events(folder, "asked")] == [["1"], ["1"], [], []]
    assert "client 1: 2 replies dropped" in describe(status(folder))


def test_a_refusal_counts_positions_and_rounds_from_one(deployed):
    folder, _ = deployed(all_clients(), fault=fault_at(2, changed_by(earlier_round)))
    assert events(folder, "asked")[1]["refused"]["1"] == "the reply is for round 1 of position 1"


def test_a_message_of_another_form_is_refused(deployed):
    from flwr.app import ConfigRecord, RecordDict

    other = RecordDict({"x": ConfigRecord({"y": 1})})
    folder, _ = deployed(
        all_clients(), fault=fault_at(1, lambda grid, request, reply: [Message(other, reply_to=request)])
    )
    assert "cannot be read" in events(folder, "asked")[0]["refused"]["1"]


def test_after_a_refusal_a_client_starts_from_its_old_private_tensors(deployed, tmp_path):
    """The next turn starts from the private tensors of the last accepted reply."""
    config = all_clients(method="fedssi")
    without, _ = deployed(config, fault=fault_at(2, no_reply), out="without-reply")
    folder, _ = deployed(config, fault=fault_at(2, changed_by(nan)), out="invalid")
    assert outcome(folder)["tensors"] == outcome(without)["tensors"]


def test_with_too_few_replies_the_other_clients_are_asked_again(deployed, tmp_path):
    """If the second attempt succeeds, the result is that of a run without faults."""
    folder, _ = deployed(all_clients(), fault=fault_at(2, no_reply), min_replies=3)
    assert [e["answered"] for e in events(folder, "asked")] == [[0, 1, 2], [0, 2], [1], [0, 1, 2], [0, 1, 2]]
    serial = engine.start(all_clients(), tmp_path / "serial", tmp_path)
    assert outcome(folder)["tensors"] == outcome(serial)["tensors"]
    assert tally(folder)["resent_bytes"] > 0


def test_a_run_stops_with_too_few_replies_and_can_be_resumed(deployed, tmp_path):
    config = all_clients(method="fedcbdr")

    def no_more_replies(grid, request, reply):
        is_victim = is_work(request) and request.metadata.dst_node_id == VICTIM
        return [] if is_victim and grid.work_count(VICTIM) >= 3 else [reply]

    with pytest.raises(TooFewClients, match="run the same app again"):
        deployed(config, fault=no_more_replies, min_replies=3)
    assert not json.loads((tmp_path / "run" / "run.json").read_text())["done"]
    folder, _ = deployed(config, min_replies=3)
    assert [e["round"] for e in events(folder, "resumed")] == [1]
    serial = engine.start(config, tmp_path / "serial", tmp_path)
    assert outcome(folder)["tensors"] == outcome(serial)["tensors"]


def test_a_deployment_cannot_be_resumed_as_a_simulation(deployed, tmp_path):
    with pytest.raises(TooFewClients):
        deployed(all_clients(), fault=fault_at(3, no_reply), min_replies=3, attempts=1)
    with pytest.raises(ProfcilError, match="flower"):
        engine.resume(tmp_path / "run")


def test_without_any_node_the_error_is_one_sentence(deployed):
    with pytest.raises(TooFewClients, match="0 of 3 clients are connected"):
        deployed(all_clients(), nodes=0)


def test_a_client_that_joins_late_takes_part_from_then_on(deployed):
    def add_node(grid, request, reply):
        if grid.work_count(100) == 2:
            grid.nodes.setdefault(102, {"client": 2, "home": grid.nodes[100]["home"]})
        return [reply]

    folder, _ = deployed(all_clients(), fault=add_node, nodes=2)
    assert [e["answered"] for e in events(folder, "asked")] == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]
    assert [e["clients"] for e in events(folder, "absent")] == [[2], [2]]


def test_without_keys_a_second_node_takes_the_place_of_a_lost_one(deployed, tmp_path):
    def add_rival(grid, request, reply):
        grid.nodes.setdefault(200, {"client": 1, "home": str(tmp_path / "rival")})
        return fault_at(3, no_reply)(grid, request, reply)

    folder, grid = deployed(all_clients(), fault=add_rival, rebind=True)
    assert {e["client"] for e in events(folder, "claimed twice")} == {1}
    assert grid.work_count(VICTIM) == 3  # until it misses a deadline
    assert grid.work_count(200) == 1  # then the second node is used


def test_a_run_continues_without_a_node_that_disconnects(deployed):
    def disconnect(grid, request, reply):
        if grid.work_count(102) == 2:  # the last node that is asked in a round
            grid.nodes.pop(VICTIM, None)
        return [reply]

    folder, _ = deployed(all_clients(), fault=disconnect)
    assert [e["client"] for e in events(folder, "left")] == [1]
    assert events(folder, "asked")[-1]["answered"] == [0, 2]


def test_a_site_that_lost_its_folder_is_sent_all_blocks_again(deployed, tmp_path):
    """PRO does not send the frozen base again, so a client without its folder lacks it in one round."""

    def delete_folder(grid, request, reply):
        if grid.work_count(VICTIM) == 2 and request.metadata.dst_node_id == VICTIM:
            shutil.rmtree(tmp_path / "sites", ignore_errors=True)
        return [reply]

    folder, _ = deployed(all_clients(method="pro", base_rounds=1, refresh_at="final"), fault=delete_folder)
    reasons = [r for e in events(folder, "asked") for r in e["refused"].values()]
    assert reasons
    assert all("does not hold block" in r for r in reasons)
    assert json.loads((folder / "run.json").read_text())["done"]


def test_lost_private_tensors_are_counted(deployed, tmp_path):
    def delete_private(grid, request, reply):
        if grid.work_count(VICTIM) == 1 and request.metadata.dst_node_id == VICTIM:
            for path in (tmp_path / "sites").rglob("*/1/private-*"):
                path.unlink()
        return [reply]

    folder, _ = deployed(all_clients(method="fedspace"), fault=delete_private)
    assert tally(folder)["memories_lost"] == 1


def test_a_diverged_client_ends_the_run_or_is_skipped(deployed):
    with pytest.raises(Diverged, match="client"):
        deployed(all_clients(lr=1e9, clip=0, batch=32), out="fail")
    with pytest.raises(TooFewClients):  # all clients diverge
        deployed(all_clients(lr=1e9, clip=0, batch=32, on_divergence="skip-client"), out="skip")


@pytest.mark.parametrize("what", ["plan", "data"])
def test_a_client_with_another_plan_or_other_data_reports_an_error(tmp_path, what):
    identity = PartitionIdentity(1, tmp_path, tmp_path, config_to_text(all_clients()))
    world = identity.make_world()
    facts = {"run": "x", "plan": world.plan.digest, "data": world.bundle.fingerprint}
    request = Request(1, When("round", 0, 0, 2), {}, {}, 0, 1, (), {**facts, what: "other"})
    response = respond("turn", request, identity)
    assert response.error_kind == "broken"
    assert f"another {what}" in response.error


def test_a_node_with_an_invalid_client_number_is_refused_once(deployed, tmp_path):
    def add_invalid_node(grid, request, reply):
        grid.nodes.setdefault(300, {"client": -4})
        return [reply]

    folder, grid = deployed(all_clients(), fault=add_invalid_node)
    [refused] = events(folder, "refused")
    assert "whole number from 0" in refused["reason"]
    assert grid.sent.count((300, "query.hello")) == 1


def hostile_notes(response) -> None:
    object.__setattr__(response.reply, "notes", {"event": 0.0, "position": 99.0, "seconds": -1.0, "loss": 0.5})


def hostile_text(response) -> None:
    object.__setattr__(response, "error", "\x1b]0;owned\x07\x1b[2J\r\nall is well\u202e" + "x" * 1_000_000)


def test_a_client_cannot_write_fields_of_the_servers_log(deployed, without_reply):
    folder, _ = deployed(all_clients(), fault=fault_at(2, changed_by(hostile_notes)), out="hostile")
    rounds = events(folder, "round")
    assert [(e["position"], e["round"]) for e in rounds] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert "field of the log" in events(folder, "asked")[1]["refused"]["1"]
    assert outcome(folder)["tensors"] == without_reply["tensors"]


def test_a_clients_text_reaches_log_and_terminal_as_one_short_printable_line(deployed):
    folder, _ = deployed(all_clients(), fault=fault_at(4, changed_by(hostile_text)), out="hostile")
    reason = events(folder, "asked")[3]["refused"]["1"]
    assert "owned" in reason and reason.isprintable() and len(reason) <= 300
    assert (folder / "events.jsonl").stat().st_size < 10_000
    shown = describe(status(folder))
    assert "owned" in shown and all(c.isprintable() or c == "\n" for c in shown)


def test_the_status_of_an_older_run_shows_no_control_characters(deployed):
    folder, _ = deployed(all_clients(), out="plain")
    asked = events(folder, "asked")[-1] | {"refused": {"1": "\x1b[2Jgone"}}
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(asked) + "\n")
    assert "\x1b" not in describe(status(folder)) and "gone" in describe(status(folder))


def test_a_hello_for_an_impossible_client_is_refused(deployed):
    def add_invalid_node(grid, request, reply):
        if request.metadata.dst_node_id != 300:
            grid.nodes.setdefault(300, {"client": 0})
            return [reply]
        head, _ = unpack(reply.content)
        return [Message(pack(head | {"client": 10**30}, {}), reply_to=request)]

    folder, _ = deployed(all_clients(), fault=add_invalid_node, out="hello")
    [refused] = events(folder, "refused")
    assert "client must be from 0" in refused["reason"]
