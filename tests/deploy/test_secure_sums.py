"""Secure sums over Flower: the bits and bytes of the simulation, dropouts at every stage, and messages that lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_growth
from flwr.app import ConfigRecord, Message
from memory_grid import Grid, tiny
from test_faults import events, is_work
from test_same_run import outcome
from test_simulated_sites import result
from test_sites import CLASSES, QUICK, TASKS, write_manifest, write_texts

from profcil.cli.main import main
from profcil.deploy.app_folder import settings_table
from profcil.deploy.run_config import sites_config
from profcil.deploy.server import entry
from profcil.deploy.sites.federation_file import read_federation
from profcil.deploy.status import status
from profcil.deploy.sum_messages import read_data, read_sum_head, sum_records
from profcil.deploy.wire import HEAD, read_request, read_response, request_records, response_records
from profcil.engine import run as engine
from profcil.privacy.secure_sum.collection import ROUNDS
from profcil.privacy.secure_sum.protocol import SumFailed

VICTIM = 101  # the node of client 1
MOST = 10**9  # bytes
OUTCOMES: dict[str, dict] = {}  # of runs that several tests compare with


def secure(method: str = "fedavg", **more: Any) -> Any:
    """Five clients, of which four take part in a round; warm-up with all of them."""
    usual = {"privacy__secure_sum": "true", "stream__clients": 5, "stream__participants": 4}
    return tiny(method, **{**usual, **more})


def quick(method: str = "fedavg", **more: Any) -> Any:
    """Five clients that take part in every round; two rounds, no warm-up. Three clients can open a sum."""
    usual = {"warmup__rounds": 0, "stream__participants": 5, "stream__task_size": 10, "setting": "homogeneous"}
    return secure(method, **{**usual, "privacy__sum_threshold": 0.5, "train__batch": 0, **more})


# -- the same run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedavg", {}),
        ("pro", {"covariance": "shared", "adapted_bank": True}),
        ("promax", {"transport": "global"}),
        ("promax", {"setting": "severe", "warmup__projector": "local"}),
        ("probayes", {"dictionary": 30}),
        ("prolin", {"dictionary": 30, "base_rounds": 1, "privacy__min_support": 40}),
        ("prolin", {"base_rounds": 0, "dictionary": 30, "privacy__sum_range": 1e4, "privacy__sum_bits": 20}),
    ],
)
def test_a_deployment_has_the_bits_and_the_ledger_of_the_simulation(deployed, tmp_path, method, more):
    """In the warm-up, the search for a dictionary, rounds and surveys. Afterwards no site has secrets."""
    config = secure(method, **more)
    serial = engine.start(config, tmp_path / "serial", tmp_path)
    for cached in (tmp_path / "cache" / "dictionary").glob("*"):
        cached.unlink()  # the clients of a deployment find the dictionary themselves
    folder, _ = deployed(config, nodes=5)
    found = outcome(folder)
    assert found == outcome(serial)
    assert all(f",up,{kind},".encode() in found["ledger.csv"] for kind in ROUNDS)
    assert not list((tmp_path / "sites").rglob("open-sum*"))


def write_three_sites(folder: Path) -> dict[int, dict]:
    tasks = {"north": (TASKS[0], TASKS[1]), "south": (["sprain"], TASKS[0]), "west": (TASKS[1], ["fever"])}
    for name, (first, second) in tasks.items():
        write_texts(write_manifest(folder / name, name, "data.csv", first, second) / "data.csv", [*first, *second])
    write_texts(folder / "test.csv", CLASSES)
    return {7 + i: {"site": str(folder / name), "home": str(folder / "home")} for i, name in enumerate(tasks)}


@pytest.mark.parametrize("method", ["promax", "prolin"])
def test_sites_with_their_own_data_have_the_bits_of_their_simulation(tmp_path, method):
    text = f'modality = "text"\ntasks = {json.dumps(TASKS)}\nsites = ["north", "south", "west"]\n'
    text += "length = 8\nvocabulary = 500\n"
    nodes = write_three_sites(tmp_path)
    sets = [*QUICK, "privacy.secure_sum=true"]
    config = sites_config(read_federation(text), None, {"method": method, "accelerate": "off"}, sets)
    settings = settings_table(config, tmp_path / "run", tmp_path / "test.csv", federation=text, deadline=0.5, join=0.5)
    deployed = entry.start(Grid(settings, nodes), settings)
    (tmp_path / "federation.toml").write_text(text)
    words = ["run", "--federation", str(tmp_path / "federation.toml"), "--method", method, "--quiet"]
    words += ["--sites", *(str(tmp_path / name) for name in ("north", "south", "west"))]
    words += ["--test", str(tmp_path / "test.csv"), "--out", str(tmp_path / "simulated")]
    assert main([*words, *(word for setting in sets for word in ("--set", setting))]) == 0
    assert result(tmp_path / "simulated") == result(deployed)


def test_a_site_that_joins_and_a_class_that_is_declared_are_in_later_sums(tmp_path, monkeypatch):
    monkeypatch.setitem(test_growth.WORDS, "burn", "skin blister")
    monkeypatch.setattr(test_growth, "QUICK", [*QUICK, "privacy.secure_sum=true", "privacy.sum_clients=2"])
    nodes = test_growth.write_three_sites(tmp_path)
    terms = test_growth.terms(test_growth.BURN)

    def happens(grid: Any) -> None:
        grid.nodes[9] = nodes[9]
        (tmp_path / "run" / "federation.toml").write_text(terms)

    folder = test_growth.deploy(tmp_path, test_growth.terms(), happens, {7: nodes[7], 8: nodes[8]})
    asked = [(e["position"], e["answered"]) for e in events(folder, "asked") if e["stage"] == "round"]
    assert asked == [(0, [0, 1])] * 2 + [(1, [0, 1, 2])] * 2 + [(2, [0, 2])] * 2
    test_growth.join_at(tmp_path / "west", 2)
    assert result(test_growth.simulate(tmp_path, terms)) == result(folder)


# -- what the server receives -----------------------------------------------------------------------------------------


def test_the_server_receives_keys_shares_and_masked_numbers_but_no_reply(deployed, tmp_path):
    """The numbers to be added are read from the site's folder; what is sent of them looks random."""
    received: dict[str, list[bytes]] = {stage: [] for stage in ROUNDS}
    own: dict[tuple[str, int], np.ndarray] = {}

    def look(grid: Grid, request: Message, reply: Message) -> list[Message]:
        if not is_work(request):
            return [reply]
        for path in (tmp_path / "sites").rglob("open-sum-vector"):
            state = json.loads(path.with_name("open-sum.json").read_text())
            own[state["id"], state["client"]] = np.frombuffer(path.read_bytes(), np.uint64)
        if request.metadata.message_type == "query.sum":
            head = read_sum_head(reply.content)
            data = read_data(reply.content, MOST)
            received[head.stage].append(data)
            if head.stage == "masked":
                sent = np.frombuffer(data, np.uint64)
                assert not np.any(sent == own[head.sum, head.client])
                assert abs(np.unpackbits(sent.view(np.uint8)).mean() - 0.5) < 0.01
        else:
            response = read_response(reply.content, 0)  # no array at all
            assert not response.reply.blocks and not response.reply.notes and not response.reply.samples
            received["keys"].append(response.sum_keys)
        return [reply]

    deployed(quick(), fault=look, nodes=5)
    assert {stage: len(found) for stage, found in received.items()} == dict.fromkeys(ROUNDS, 10)  # 5 clients, 2 rounds
    assert len(own) == 10


def test_keys_and_masks_are_new_in_every_sum_and_in_every_run(deployed, tmp_path):
    """They come from the operating system, not from the run's seed."""
    keys: list[str] = []

    def look(grid: Grid, request: Message, reply: Message) -> list[Message]:
        if request.metadata.message_type == "train.turn":
            keys.append(read_response(reply.content, 0).sum_keys.hex())
        return [reply]

    folders = [deployed(quick(), fault=look, nodes=5, out=out)[0] for out in ("one", "two")]
    assert len(keys) == 20 and len(set(keys)) == 20
    assert outcome(folders[0]) == outcome(folders[1])


def test_a_site_keeps_secrets_only_as_long_as_it_needs_them(deployed, tmp_path):
    kept: dict[str, set[tuple[bool, ...]]] = {}

    def look(grid: Grid, request: Message, reply: Message) -> list[Message]:
        if is_work(request):
            is_sum = request.metadata.message_type == "query.sum"
            stage = read_sum_head(reply.content).stage if is_sum else "keys"
            folder = next((tmp_path / "sites").glob(f"*/{request.metadata.dst_node_id - 100}"))
            file = folder / "open-sum.json"
            state = json.loads(file.read_text()) if file.exists() else dict.fromkeys(("seed", "mask_key", "held"), "")
            vector = (folder / "open-sum-vector").exists()
            kept.setdefault(stage, set()).add((vector, *(bool(state[n]) for n in ("seed", "mask_key", "held"))))
            assert folder.stat().st_mode & 0o077 == 0
        return [reply]

    deployed(quick(), fault=look, nodes=5)
    assert kept == {
        "keys": {(True, True, True, False)},
        "shares": {(True, True, True, True)},
        "masked": {(False, False, False, True)},
        "recovery": {(False, False, False, False)},
    }


# -- dropouts ---------------------------------------------------------------------------------------------------------


def stage_of(request: Message) -> str:
    """The exchange of a request."""
    if request.metadata.message_type == "query.sum":
        return read_sum_head(request.content).stage
    return "keys" if is_work(request) else "hello"


def at(stage: str, action: Callable, nodes: tuple[int, ...] = (VICTIM,), times: int = 1) -> Callable:
    """A fault in the answers of some nodes to their first messages of a stage."""
    left = dict.fromkeys(nodes, times)

    def fault(grid: Grid, request: Message, reply: Message) -> list[Message]:
        node = request.metadata.dst_node_id
        if stage_of(request) != stage or not left.get(node):
            return [reply]
        left[node] -= 1
        return action(grid, request, reply)

    return fault


def gone(grid: Grid, request: Message, reply: Message) -> list[Message]:
    return []


def without_victim(deployed: Callable) -> dict:
    """The outcome of a run without client 1 in its first round. It is computed once."""
    if "without" not in OUTCOMES:
        OUTCOMES["without"] = outcome(deployed(quick(), fault=at("keys", gone), nodes=5, out="without")[0])
    return OUTCOMES["without"]


@pytest.mark.parametrize("stage", ROUNDS)
def test_a_client_may_stop_at_every_stage(deployed, tmp_path, stage):
    """Before its numbers have arrived it is not in the sum; afterwards it is. It takes part in the next round."""
    folder, _ = deployed(quick(), fault=at(stage, gone), nodes=5)
    first, second = events(folder, "asked")
    assert first["silent"] == [1] and second["silent"] == []
    assert second["answered"] == [0, 1, 2, 3, 4]
    if stage == "recovery":
        assert first["answered"] == [0, 1, 2, 3, 4]
        assert outcome(folder)["tensors"] == outcome(engine.start(quick(), tmp_path / "serial", tmp_path))["tensors"]
    else:
        assert first["answered"] == [0, 2, 3, 4]
        assert outcome(folder)["tensors"] == without_victim(deployed)["tensors"]
    answered = [5 - (ROUNDS.index(stage) <= i) for i in range(4)]
    assert list(first["sum"].values()) == answered


def test_different_clients_may_stop_at_different_stages(deployed):
    def fault(grid: Grid, request: Message, reply: Message) -> list[Message]:
        lost = {"shares": 100, "masked": 104}.get(stage_of(request))
        first = grid.work_count(102) <= 4
        return [] if first and request.metadata.dst_node_id == lost else [reply]

    folder, _ = deployed(quick(), fault=fault, nodes=5)
    assert events(folder, "asked")[0]["answered"] == [1, 2, 3]
    assert events(folder, "asked")[0]["sum"] == {"keys": 5, "shares": 4, "masked": 3, "recovery": 3}


@pytest.mark.parametrize("stage", ROUNDS)
def test_below_the_threshold_the_run_stops_reveals_nothing_and_is_resumed(deployed, tmp_path, stage):
    revealed = []

    def fault(grid: Grid, request: Message, reply: Message) -> list[Message]:
        late = grid.work_count(100) > 4  # in the second round
        found = at(stage, gone, (100, 101, 102), times=9)(grid, request, reply) if late else [reply]
        if late and stage_of(request) == "recovery":
            revealed.extend(found)
        return found

    with pytest.raises(SumFailed, match=r"round 2 of position 1 was given up: 2 clients .*, 3 are needed; no reply"):
        deployed(quick(), fault=fault, nodes=5)
    assert len(revealed) == (4 if stage == "recovery" else 0)  # two clients in two attempts: fewer than the threshold
    assert not json.loads((tmp_path / "run" / "run.json").read_text())["done"]
    assert [bool(e.get("given_up")) for e in events(tmp_path / "run", "asked")] == [False, True, True]
    assert status(tmp_path / "run")["trouble"]["sum given up"] == 2
    assert (tmp_path / "run" / "ledger.csv").read_bytes().count(b",masked,") == 5
    folder, _ = deployed(quick(), nodes=5)
    assert outcome(folder) == outcome(engine.start(quick(), tmp_path / "serial", tmp_path))


def test_a_second_attempt_gives_the_sum_of_a_run_without_faults(deployed, tmp_path):
    folder, _ = deployed(quick(), fault=at("masked", gone, (100, 101, 102)), nodes=5)
    assert [e["answered"] for e in events(folder, "asked")] == [[], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert outcome(folder)["tensors"] == outcome(engine.start(quick(), tmp_path / "serial", tmp_path))["tensors"]


def test_too_few_connected_clients_stop_the_run(deployed):
    """A sum of two would not hide them. Without secure sums the round would go on."""
    with pytest.raises(Exception, match="2 of 5 clients are connected, 3 are needed"):
        deployed(quick(), nodes=2)


# -- clients that lie -------------------------------------------------------------------------------------------------


def with_data(change: Callable[[bytes], bytes]) -> Callable:
    """The answer with other data."""

    def action(grid: Grid, request: Message, reply: Message) -> list[Message]:
        message = replace(read_sum_head(reply.content), data=change(read_data(reply.content, MOST)))
        return [Message(sum_records(message), reply_to=request)]

    return action


def with_head(**change: Any) -> Callable:
    def action(grid: Grid, request: Message, reply: Message) -> list[Message]:
        message = replace(read_sum_head(reply.content), data=read_data(reply.content, MOST), **change)
        return [Message(sum_records(message), reply_to=request)]

    return action


def with_keys(change: Callable[[bytes], bytes]) -> Callable:
    def action(grid: Grid, request: Message, reply: Message) -> list[Message]:
        response = read_response(reply.content, 0)
        return [Message(response_records(replace(response, sum_keys=change(response.sum_keys))), reply_to=request)]

    return action


def no_records(grid: Grid, request: Message, reply: Message) -> list[Message]:
    reply.content.array_records.clear()
    return [reply]


def unknown_client(data: bytes) -> bytes:
    return (99).to_bytes(4, "big") + data[4:]


@pytest.mark.parametrize(
    ("stage", "action", "sentence"),
    [
        ("keys", with_keys(lambda keys: keys[:-1]), "it has keys of 95 bytes"),
        ("keys", with_keys(lambda keys: bytes(96)), "none that a secret can be agreed on"),
        ("shares", with_data(lambda data: data[:-1]), "no multiple of 86"),
        ("shares", with_data(lambda data: data + bytes(1000)), "allowed are"),
        ("shares", with_data(unknown_client), "entries of other clients"),
        ("shares", with_data(lambda data: data[:86] * 4), "a client occurs twice"),
        ("masked", with_data(lambda data: data[:-8]), "bytes of masked numbers where"),
        ("masked", with_head(client=2), "the answer is of client 2 to another message"),
        ("masked", with_head(sum="0" * 32), "to another message of a secure sum"),
        ("masked", with_head(stage="shares"), "to another message of a secure sum"),
        ("masked", no_records, "cannot be read"),
    ],
)
def test_a_wrong_answer_is_refused_and_its_client_left_out(deployed, stage, action, sentence):
    folder, _ = deployed(quick(), fault=at(stage, action), nodes=5, out="lies")
    first = events(folder, "asked")[0]
    assert first["answered"] == [0, 2, 3, 4]
    assert sentence in first["refused"]["1"]
    assert outcome(folder)["tensors"] == without_victim(deployed)["tensors"]


def test_a_wrong_share_is_noticed_and_the_sum_collected_again(deployed, tmp_path):
    wrong = with_data(lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    folder, _ = deployed(quick(), fault=at("recovery", wrong, (100, 101, 102, 103, 104)), nodes=5)
    first, second, _ = events(folder, "asked")
    assert "do not fit its keys" in first["given_up"] and second["answered"] == [0, 1, 2, 3, 4]
    assert outcome(folder)["tensors"] == outcome(engine.start(quick(), tmp_path / "serial", tmp_path))["tensors"]


def test_a_repeated_answer_is_dropped(deployed, tmp_path):
    folder, _ = deployed(quick(), fault=at("masked", lambda grid, request, reply: [reply, reply]), nodes=5)
    assert [e["client"] for e in events(folder, "second reply dropped")] == [1]
    assert outcome(folder) == outcome(engine.start(quick(), tmp_path / "serial", tmp_path))


# -- a server that lies -----------------------------------------------------------------------------------------------


def asked_again(grid: Grid, request: Message, **change: Any) -> str:
    """The sentence with which a node refuses a changed message."""
    data = change.pop("data", None)
    message = replace(read_sum_head(request.content), **change)
    message = replace(message, data=read_data(request.content, MOST) if data is None else data)
    other = Message(sum_records(message), request.metadata.dst_node_id, "query.sum")
    other.metadata.__dict__["_message_id"] = "again"
    reply = grid.reply(other)
    return reply.error.reason if reply.has_error() else read_sum_head(reply.content).error


def ids(*clients: int) -> bytes:
    return b"".join(c.to_bytes(4, "big") for c in clients)


def test_a_site_answers_each_message_once_and_reveals_one_set_of_shares(deployed):
    """So the server cannot get both secrets of a client."""
    refusals: dict[str, str] = {}

    def fault(grid: Grid, request: Message, reply: Message) -> list[Message]:
        stage = stage_of(request)
        if request.metadata.dst_node_id == VICTIM and stage in ROUNDS[1:] and stage not in refusals:
            refusals[stage] = asked_again(grid, request)
            if stage == "recovery":
                refusals["others"] = asked_again(grid, request, data=ids(0, 1, 2))
        return [reply]

    folder, _ = deployed(quick(), fault=fault, nodes=5)
    assert "asked for its shares in a secure sum, but its next answer is its masked" in refusals["shares"]
    assert "its next answer is its recovery" in refusals["masked"]
    assert all("takes part in no such secure sum" in refusals[name] for name in ("recovery", "others"))
    assert [e["answered"] for e in events(folder, "asked")] == [[0, 1, 2, 3, 4]] * 2


def lie_before(stage: str, lie: Callable[[Grid, Message], str], found: list[str]) -> Callable:
    """A grid in which client 1 gets a false message before the true one of a stage."""

    class Lying(Grid):
        def deliver(self, message: Message) -> str:
            if message.metadata.dst_node_id == VICTIM and stage_of(message) == stage and not found:
                found.append(lie(self, message))
            return super().deliver(message)

    return Lying


@pytest.mark.parametrize(
    ("stage", "change", "sentence"),
    [
        ("recovery", {"data": ids(1, 2)}, "2 clients sent a vector, 3 are needed"),
        ("recovery", {"data": ids(1, 2, 77)}, "numbers of client 77, which sent no shares"),
        ("recovery", {"data": ids(1, 2, 2)}, "a client occurs twice"),
        ("recovery", {"data": ids(*range(9))}, "cannot be read"),
        ("masked", {"data": b""}, "1 clients sent shares, 3 are needed"),
        ("shares", {"data": bytes(100) + bytes([0, 0, 0, 9]) + bytes(96)}, "keys of client 9, which was not asked"),
        ("shares", {"data": b"\0\0\0\1" + bytes(96)}, "other keys of client 1 than it has sent"),
        ("shares", {"sum": "f" * 32}, "takes part in no such secure sum"),
        ("shares", {"stage": "recovery", "data": ids(0, 1, 2)}, "but its next answer is its shares"),
        ("shares", {"stage": "all"}, "cannot be read"),
    ],
)
def test_a_site_refuses_a_false_message_of_the_server(tmp_path, stage, change, sentence):
    found: list[str] = []
    config = quick()
    settings = settings_table(config, tmp_path / "run", tmp_path, deadline=0.3, join=0.3)
    nodes = {100 + i: {"client": i, "home": str(tmp_path / "sites")} for i in range(5)}

    def lie(grid: Grid, message: Message) -> str:
        return asked_again(grid, message, **change)

    entry.start(lie_before(stage, lie, found)(settings, nodes), settings)
    assert sentence in found[0]


def test_a_message_of_an_earlier_sum_is_refused(deployed):
    stored: list[Message] = []
    refusals = []

    def fault(grid: Grid, request: Message, reply: Message) -> list[Message]:
        if request.metadata.dst_node_id == VICTIM and stage_of(request) == "masked":
            stored.append(request)
            refusals.append(asked_again(grid, stored[0]))
        return [reply]

    deployed(quick(), fault=fault, nodes=5)
    assert "its next answer is its recovery" in refusals[0] and "takes part in no such" in refusals[1]


def test_a_site_sends_no_reply_of_its_own(tmp_path):
    """A server that asks for a plain turn, or for a sum of too few, gets one sentence."""
    found: list[str] = []
    settings = settings_table(quick(), tmp_path / "run", tmp_path, deadline=0.3, join=0.3)
    nodes = {100 + i: {"client": i, "home": str(tmp_path / "sites")} for i in range(5)}

    def lie(grid: Grid, message: Message) -> str:
        request = read_request(message.content)
        assert request.sum is not None
        for asked in (None, replace(request.sum, members=(1, 2)), replace(request.sum, members=(0, 2, 3, 4))):
            other = Message(request_records(replace(request, sum=asked)), VICTIM, "train.turn")
            other.metadata.__dict__["_message_id"] = "other"
            response = read_response(grid.reply(other).content)
            assert not response.reply.blocks and not response.sum_keys
            found.append(response.error)
        return ""

    entry.start(lie_before("keys", lie, [])(settings, nodes), settings)
    assert "asked for its own reply, but privacy.secure_sum = true" in found[0]
    assert "a secure sum of 2 clients, and privacy.sum_clients = 3" in found[1]
    assert "is asked for a secure sum of the clients [0, 2, 3, 4]" in found[2]


def test_a_hello_ends_an_open_sum(deployed, tmp_path):
    """A client that was lost keeps its secrets until the server greets it again."""
    seen: list[tuple[str, int]] = []

    def fault(grid: Grid, request: Message, reply: Message) -> list[Message]:
        node, stage = request.metadata.dst_node_id, stage_of(request)
        if (node == VICTIM and stage == "hello") or (node == 104 and stage == "recovery"):
            seen.append((stage, len(list((tmp_path / "sites").rglob("1/open-sum*")))))
        return lost(grid, request, reply)

    lost = at("shares", gone)
    deployed(quick(), fault=fault, nodes=5)
    assert seen == [("hello", 0), ("recovery", 2), ("hello", 0), ("recovery", 0)]


def test_a_header_that_is_none_is_refused(deployed):
    def broken(grid: Grid, request: Message, reply: Message) -> list[Message]:
        reply.content.config_records[HEAD] = ConfigRecord({"json": "[" * 100})
        return [reply]

    folder, _ = deployed(quick(), fault=at("masked", broken), nodes=5)
    assert "cannot be read" in events(folder, "asked")[0]["refused"]["1"]
