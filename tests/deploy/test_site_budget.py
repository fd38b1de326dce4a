"""What a site sends with noise is counted at the site: a server that asks for more than planned is refused, and a run
that is resumed is not."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from memory_grid import Grid, tiny
from test_noised_sums import CLIENT, EXAMPLE, FEDERATION, noisy, seven
from test_same_run import outcome
from test_secure_sums import VICTIM, at, gone, quick, stage_of, write_three_sites
from test_sites import QUICK

from profcil.deploy.client.identity import SiteIdentity
from profcil.deploy.client.spent import Release
from profcil.deploy.run_config import config_to_text, sites_config
from profcil.deploy.server.sum_collector import SumCollector
from profcil.deploy.sites.federation_file import read_federation
from profcil.deploy.wire import Request, Response, read_request, read_response, request_records
from profcil.engine import run as engine
from profcil.errors import Failure, ProfcilError
from profcil.privacy.accountant import multiplier_of
from profcil.privacy.protection import digest
from profcil.privacy.secure_sum.protocol import SumFailed

TOO_MUCH = "it has sent as much as the settings of the app plan"


def counted(tmp_path: Path, client: int = 1) -> list[dict]:
    """What a site has counted."""
    (path,) = (tmp_path / "sites").glob(f"*/{client}/spent.jsonl")
    return read_lines(path)


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ask(grid: Grid, request: Request, action: str = "query.survey") -> Response:
    """The response of client 1 to a request that the loop did not make."""
    other = Message(request_records(request), VICTIM, action)
    other.metadata.__dict__["_message_id"] = "other"
    return read_response(grid.reply(other).content)


# -- the count --------------------------------------------------------------------------------------------------------


def release(name: str, position: int = 0, by_client: bool = False, most: int = 1, **more: Any) -> Release:
    return Release(name, 1, "refresh", position, 0, by_client, most, **more)


def test_an_example_is_counted_by_position_and_a_client_in_all(tmp_path):
    path = tmp_path / "spent.jsonl"
    release("a").note(path)
    release("a").note(path)  # the same again
    release("b", position=1).note(path)
    with pytest.raises(Failure, match=rf"refresh 1 of position 1, but {TOO_MUCH} for one example \(1 noised replies\)"):
        release("c").note(path)
    release("c", most=2).note(path)
    with pytest.raises(Failure, match="for one client"):
        release("d", position=5, by_client=True, most=3).check(path)
    release("d", position=5, by_client=True, most=4).check(path)
    assert len(path.read_text().splitlines()) == 3


def test_what_was_sent_before_the_stream_is_added_to_every_position(tmp_path):
    path = tmp_path / "spent.jsonl"
    replace(release("a"), stage="dictionary").note(path)
    with pytest.raises(Failure, match=TOO_MUCH):
        release("b", position=3).note(path)
    release("b", position=3, most=2).note(path)


def test_a_sum_that_comes_again_must_be_the_same(tmp_path):
    path = tmp_path / "spent.jsonl"
    part = release("a", sum="s", most=9)
    part.note(path, [3, 1, 2])
    part.note(path, (1, 2, 3))
    with pytest.raises(Failure, match=r"with the clients \[1, 2, 3\].*the same ones must take part"):
        part.note(path, [1, 2])
    with pytest.raises(Failure, match="before, with other numbers"):
        release("b", sum="s", most=9).check(path)
    release("b", sum="t", most=9).note(path, [1, 2])


def test_messages_at_the_same_moment_are_counted_one_after_another(tmp_path):
    path = tmp_path / "spent.jsonl"

    def note(name: str) -> bool:
        try:
            release(name, most=3).note(path)
        except Failure:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(note, map(str, range(64)))) == 3


def test_a_damaged_count_stops_the_site(tmp_path):
    path = tmp_path / "spent.jsonl"
    path.write_text('{"name": ')
    with pytest.raises(Failure, match="is damaged, so it is unknown what the site has spent"):
        release("a").check(path)


# -- plain replies ----------------------------------------------------------------------------------------------------

PLAIN = {"warmup__rounds": 0, "base_rounds": 0, "dictionary": 30, "privacy__unit": "example", "privacy__epsilon": 2.0}


def test_a_server_that_asks_for_more_reports_is_refused(deployed, tmp_path):
    """The same report again has the same noise. Another one about the same examples does not leave the site; at the
    next position there are other examples."""
    found: list[Any] = []

    def fault(grid: Grid, request: Message, reply: Message) -> list[Message]:
        if request.metadata.message_type == "query.survey" and request.metadata.dst_node_id == VICTIM and not found:
            asked = read_request(request.content)
            asked = replace(asked, blocks={})  # the site holds them
            found.extend([read_response(reply.content), ask(grid, asked)])
            found.append(ask(grid, replace(asked, when=replace(asked.when, round=asked.when.round + 1))))
        return [reply]

    config = tiny("prolin", **PLAIN)
    serial = engine.start(config, tmp_path / "serial", tmp_path)
    folder, _ = deployed(config, fault=fault)
    first, same, more = found
    assert first.reply.blocks and digest(first.reply.blocks) == digest(same.reply.blocks)
    assert TOO_MUCH in more.error and not more.reply.blocks
    assert outcome(folder) == outcome(serial)
    assert sorted({entry["position"] for entry in counted(tmp_path)}) == [0, 1]


def test_a_budget_with_room_allows_more(deployed):
    """With noise that is twice as large as ε needs for one report, four are within it."""
    found: list[str] = []

    def fault(grid: Grid, request: Message, reply: Message) -> list[Message]:
        if request.metadata.message_type == "query.survey" and request.metadata.dst_node_id == VICTIM and not found:
            asked = replace(read_request(request.content), blocks={})
            for round in range(10, 14):
                found.append(ask(grid, replace(asked, when=replace(asked.when, round=round))).error)
        return [reply]

    deployed(tiny("prolin", **PLAIN, privacy__noise_multiplier=multiplier_of(2.0, 1e-5, 4)), fault=fault)
    assert found[:3] == [""] * 3 and TOO_MUCH in found[3]


def test_a_server_that_asks_for_more_training_is_refused(deployed):
    """With noise on gradients a turn counts, and the same turn again does not."""
    found: list[Any] = []

    def fault(grid: Grid, request: Message, reply: Message) -> list[Message]:
        if request.metadata.message_type == "train.turn" and request.metadata.dst_node_id == VICTIM and not found:
            asked = replace(read_request(request.content), blocks={})  # the site holds them
            found.extend([read_response(reply.content), ask(grid, asked, "train.turn")])
            for round in range(10, 13):
                found.append(ask(grid, replace(asked, when=replace(asked.when, round=round)), "train.turn"))
        return [reply]

    noise = {"privacy__unit": "example", "privacy__epsilon": 2.0, "privacy__gradient_bound": 1.0}
    deployed(tiny("fedavg", warmup__rounds=0, train__rounds=2, **noise, model__norm="group"), fault=fault)
    first, same, second, *others = found
    assert first.reply.blocks and digest(first.reply.blocks) == digest(same.reply.blocks)
    assert second.reply.blocks
    assert all(TOO_MUCH in response.error and not response.reply.blocks for response in others)


def test_that_training_with_noise_diverged_is_counted(deployed, tmp_path):
    """It follows from the noised steps, so it reveals something."""
    noise = {"privacy__unit": "example", "privacy__epsilon": 2.0, "privacy__gradient_bound": 1.0}
    with pytest.raises(ProfcilError, match="diverged"):
        deployed(tiny("fedavg", warmup__rounds=0, train__epochs=3, train__lr=1e38, **noise, model__norm="group"))
    assert [entry["round"] for path in tmp_path.rglob("spent.jsonl") for entry in read_lines(path)].count(0) >= 1


# -- secure sums ------------------------------------------------------------------------------------------------------


def test_a_server_that_asks_again_with_another_id_is_refused(deployed, tmp_path):
    """The same sum of the same clients is the same again; of other clients it is another one, which is not planned."""
    found: list[Any] = []

    def fault(grid: Grid, request: Message, reply: Message) -> list[Message]:
        if stage_of(request) == "keys" and read_request(request.content).when.stage == "refresh":
            found.append(read_request(request.content))
        return [reply]

    _, grid = deployed(seven(train__rounds=1), fault=fault, nodes=7)
    asked = replace(next(r for r in found if r.client == 1), blocks={})
    again = replace(asked, sum=replace(asked.sum, id="1" * 32))
    assert ask(grid, again).sum_keys
    others = ask(grid, replace(asked, sum=replace(asked.sum, id="2" * 32, members=(0, 1, 2))))
    assert TOO_MUCH in others.error and not others.sum_keys
    assert len(counted(tmp_path)) == 1


def test_a_sum_counts_when_the_site_helps_to_take_off_masks(deployed, tmp_path):
    deployed(seven(train__rounds=1), fault=at("masked", gone), nodes=7)
    (entry,) = counted(tmp_path, client=0)
    assert entry["clients"] == [0, 2, 3, 4, 5, 6]
    assert not list((tmp_path / "sites").glob("*/1/spent.jsonl")) or not counted(tmp_path)


def test_all_rounds_count_for_a_client(deployed, tmp_path):
    """Two are planned, so a third is refused, wherever it is."""
    found: list[Any] = []

    def fault(grid: Grid, request: Message, reply: Message) -> list[Message]:
        if stage_of(request) == "keys" and request.metadata.dst_node_id == VICTIM:
            found.append(read_request(request.content))
        return [reply]

    _, grid = deployed(noisy(), fault=fault, nodes=5)
    assert [entry["round"] for entry in counted(tmp_path)] == [0, 1]
    asked = replace(found[-1], blocks={}, when=replace(found[-1].when, round=7))
    assert f"{TOO_MUCH} for one client (2 noised replies)" in ask(grid, asked, "train.turn").error


class Killed(BaseException):
    """The end of the server's process."""


@pytest.mark.parametrize(("method", "more"), [("fedavg", CLIENT), ("probayes", {**EXAMPLE, "dictionary": 30})])
def test_a_resumed_run_is_not_refused(deployed, tmp_path, monkeypatch, method, more):
    """The server is killed when a sum is complete and not yet saved. Its sum is collected again, and is the same."""
    config = quick(method=method, **more)
    take = SumCollector.take
    left = [True]

    def sigkill(self: Any, *args: Any) -> Any:
        if left and self.reply is not None and self.reply.blocks:
            left.clear()
            raise Killed
        return take(self, *args)

    monkeypatch.setattr(SumCollector, "take", sigkill)
    with pytest.raises(Killed):
        deployed(config, nodes=5)
    before = counted(tmp_path)
    assert len(before) == 1 and before[0]["clients"] == [0, 1, 2, 3, 4]
    folder, _ = deployed(config, nodes=5)
    assert outcome(folder) == outcome(engine.start(config, tmp_path / "serial", tmp_path))
    assert len(counted(tmp_path)) == (2 if method == "fedavg" else 1)


def test_a_resumed_sum_is_of_the_same_clients(deployed, tmp_path, monkeypatch):
    """Without one of them the difference of the two sums would be its numbers, with its own share of the noise."""
    take = SumCollector.take
    left = [True]

    def sigkill(self: Any, *args: Any) -> Any:
        if left:
            left.clear()
            raise Killed
        return take(self, *args)

    monkeypatch.setattr(SumCollector, "take", sigkill)
    with pytest.raises(Killed):
        deployed(noisy(train__rounds=1), nodes=5)
    with pytest.raises(SumFailed, match="0 clients helped to remove the masks, 3 are needed"):
        deployed(noisy(train__rounds=1), fault=at("masked", gone, times=9), nodes=5)


# -- terms that the server changes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0, 4])
def test_positions_that_the_app_did_not_plan_need_a_budget(tmp_path, epsilon):
    write_three_sites(tmp_path)
    text = FEDERATION + "reserve = 1\n"
    grown = text + '[[later]]\nposition = 2\ntasks = [["burn"]]\n'
    sets = ["privacy.unit=client", "privacy.noise_multiplier=1", f"privacy.epsilon={epsilon}"]
    config = sites_config(read_federation(text), None, {"method": "fedavg"}, [*QUICK, *sets])
    identity = SiteIdentity(tmp_path / "north", tmp_path / "home", config_to_text(config), text)
    identity.check_matches_server(identity.with_facts({}, 0).make_world(), {})
    later = identity.with_facts({"federation": grown}, 1)
    world = later.make_world()
    assert world.plan.positions == 3
    if epsilon:
        later.check_matches_server(world, {})
    else:
        with pytest.raises(ProfcilError, match="3 positions where the app plans 2"):
            later.check_matches_server(world, {})
