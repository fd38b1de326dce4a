"""Updates that point against all others are left out, as long as few clients have had one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from attacks import ATTACKS
from liars import lying_world
from test_quarantine import config

from profcil.engine import run
from profcil.engine.admission import without_opposed
from profcil.engine.channel import Block, Channel, Reply
from profcil.io.atomic_files import read_tensors
from profcil.metrics.ledger import Ledger
from profcil.robust import directions
from profcil.robust.directions import are_few, opposed

FLIP = next(a for a in ATTACKS if a.name == "update with its sign flipped")
COMMON = torch.linspace(-1, 1, 40)
BROADCAST = {"base": Block("model", {"w": torch.ones(6, 5), "b": torch.ones(10)})}


def reply(client: int, direction: float = 1.0, length: float = 0.1) -> Reply:
    """A model moved along a common direction, and by noise of the same length."""
    noise = torch.randn(40, generator=torch.Generator().manual_seed(client))
    update = length * (direction * COMMON / COMMON.norm() + 0.5 * noise / noise.norm())
    tensors = {"w": 1 + update[:30].view(6, 5), "b": 1 + update[30:]}
    return Reply(client, 10, {"base": Block("model", tensors)})


def inboxes(replies: list[Reply]) -> dict[int, dict[str, Block]]:
    return {r.client: BROADCAST for r in replies}


@pytest.mark.parametrize("number", [3, 5, 10])
def test_an_update_with_its_sign_flipped_is_found_whoever_sends_it(number):
    honest = [reply(c) for c in range(number)]
    assert opposed(honest, inboxes(honest)) == []
    for liar in range(number):
        replies = [reply(c, -1.0 if c == liar else 1.0) for c in range(number)]
        assert opposed(replies, inboxes(replies)) == [liar]


def test_a_fifth_of_liars_do_not_hide_each_other():
    replies = [reply(c, -1.0 if c in (2, 7) else 1.0) for c in range(11)]
    assert opposed(replies, inboxes(replies)) == [2, 7]


def test_of_two_updates_neither_is_against_all_others():
    replies = [reply(0), reply(1, -1.0)]
    assert opposed(replies, inboxes(replies)) == []


def test_no_update_and_no_model_are_not_opposed():
    replies = [reply(0), reply(1), reply(2, -1.0), reply(3, length=0.0), Reply(4, 10)]
    assert opposed(replies, inboxes(replies)) == [2]


def test_parts_of_tensors_are_compared_as_the_whole(monkeypatch):
    replies = [reply(c) for c in range(4)]
    whole = directions.products(replies, inboxes(replies))
    monkeypatch.setattr(directions, "COMPARED_AT_ONCE", 12)  # three numbers of each client
    assert torch.allclose(directions.products(replies, inboxes(replies)), whole, rtol=1e-12)


def test_a_block_that_a_client_did_not_change_is_an_update_of_zero():
    two = {**BROADCAST, "head": Block("model", {"w": torch.zeros(3)})}
    replies = [reply(c) for c in range(3)]
    more = replace(replies[0], blocks={**replies[0].blocks, "head": Block("model", {"w": torch.ones(3)})})
    gram = directions.products([more, *replies[1:]], {c: two for c in range(3)})
    without = directions.products(replies, inboxes(replies))
    assert float(gram[0, 0] - without[0, 0]) == pytest.approx(3)
    assert torch.equal(gram[1:, :], without[1:, :])


def channel() -> Channel:
    return Channel(Ledger())


def test_the_update_of_a_liar_is_left_out():
    replies = [reply(c, -1.0 if c == 2 else 1.0) for c in range(5)]
    found = channel()
    kept = without_opposed(found, replies, inboxes(replies), clients=10)
    assert torch.equal(kept[2].blocks["base"].tensors["w"], BROADCAST["base"].tensors["w"])
    assert [a is b for a, b in zip(kept, replies, strict=True)] == [True, True, False, True, True]
    assert found.opposed == {2} and found.pulled_back == [2]


def test_where_many_clients_have_such_updates_nothing_is_left_out():
    """They then are of the stream, e.g. of the two classes of a softmax."""
    found = channel()
    for client in range(5):
        replies = [reply(c, -1.0 if c == client else 1.0) for c in range(5)]
        kept = without_opposed(found, replies, inboxes(replies), clients=10)
        assert (kept[client] is replies[client]) == (client >= 2)
    assert are_few(1, 3) and are_few(2, 10) and not are_few(3, 10)


def test_a_failed_round_is_forgotten():
    found = channel()
    with pytest.raises(ValueError), found.round([0]):
        found.opposed.add(3)
        raise ValueError
    assert found.opposed == set()


def test_a_run_stores_its_identity_and_logs_every_round(tmp_path):
    folder = run.start(config(), tmp_path / "run", tmp_path, make=lying_world(FLIP, (2,)))
    state = read_tensors(folder / "state.safetensors")
    assert state is not None and state[1]["opposed"] == [2]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert {tuple(e["opposed"]) for e in events if "opposed" in e} == {(2,)}
    assert "dropped" not in {key for e in events for key in e}  # it is no proof of a lie
