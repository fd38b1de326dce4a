"""A server that takes replies as they come: slow, lost, late, doubled and wrong replies, and restarts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from memory_grid import tiny
from paced_grid import NEVER, PacedGrid, deploy_paced
from test_buffered_run import events
from test_faults import changed_by, nan
from test_same_run import outcome

from profcil.deploy.server.fleet import TooFewClients
from profcil.deploy.status import describe, status
from profcil.errors import Diverged
from profcil.io.atomic_files import read_tensors
from profcil.resolve import RunConfig

SLOW = 2  # a client
SLOWLY = {SLOW: 6}
STREAM = {"stream__clients": 3, "stream__participants": 3, "setting": "homogeneous", "warmup__rounds": 0}


def live(method: str = "fedavg", **more: Any) -> RunConfig:
    """All clients take part, one step per epoch; two replies per update."""
    usual = {"train__batch": 0, "train__rounds": 3, "clock__mode": "buffer", "clock__statistics": 0.0}
    return tiny(method, **{**STREAM, **usual, **more})


def arrivals(folder: Path, what: str = "turn") -> list[dict]:
    found = [{**a, "at": (e["position"], e["round"])} for e in events(folder, "asked") for a in e.get("arrivals", [])]
    return [a for a in found if a["what"] == what]


def run_facts(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())


def is_turn(message: Message) -> bool:
    return message.metadata.message_type == "train.turn"


def first_turn_of(client: int, action: Any) -> Any:
    """A change of the reply to a client's first turn."""
    seen: list[str] = []

    def change(grid: PacedGrid, request: Message, replies: list[Message]) -> list[Message]:
        if not is_turn(request) or grid.client_of(request) != client or seen:
            return replies
        seen.append(request.metadata.message_id)
        return action(grid, request, replies)

    return change


# -- slow clients ------------------------------------------------------------------------------------------------------


def test_fast_clients_do_not_wait_and_a_slow_ones_reply_is_used(tmp_path):
    folder, grid = deploy_paced(live(), tmp_path, paces=SLOWLY)
    rounds = events(folder, "round")
    assert len(rounds) == 6 and run_facts(folder)["done"]
    assert all(e["clients"] >= 2 for e in rounds)
    slow = [a for a in arrivals(folder) if a["client"] == SLOW]
    assert slow and all(a["age"] > 0 for a in slow)
    assert all(a["age"] == 0 for a in arrivals(folder) if a["client"] != SLOW)
    assert run_facts(folder)["tally"]["staleness"] == sum(a["age"] for a in slow)
    assert grid.time < 6 * SLOWLY[SLOW]  # what a server that waits for all would need


def test_a_reply_that_comes_after_its_position_is_used_and_fills_no_buffer(tmp_path):
    folder, _ = deploy_paced(live(), tmp_path, paces=SLOWLY)
    old = [a for a in arrivals(folder) if a["position"] < a["at"][0]]
    assert old
    for a in old:
        [at] = [e for e in events(folder, "round") if (e["position"], e["round"]) == a["at"]]
        assert at["clients"] == 3  # two of the present position, and this one


def test_late_replies_have_their_weight(tmp_path):
    """Otherwise the exponent would change nothing."""
    plain, _ = deploy_paced(live(), tmp_path, paces=SLOWLY)
    heavy, _ = deploy_paced(live(clock__staleness=0.0), tmp_path, out="heavy", paces=SLOWLY)
    none, _ = deploy_paced(live(clock__max_staleness=1), tmp_path, out="none", paces=SLOWLY)
    found = [outcome(folder)["tensors"] for folder in (plain, heavy, none)]
    assert found[0] != found[1] and found[0] != found[2]
    assert run_facts(none)["tally"]["expired_replies"] > 0


def test_a_node_computes_one_request_at_a_time(tmp_path):
    folder, grid = deploy_paced(live("promax", clock__buffer=1), tmp_path, paces={0: 2, 1: 3, SLOW: 7})
    assert grid.most_open == 1
    late = [a for a in arrivals(folder, "statistics") if a["age"]]
    assert late and run_facts(folder)["tally"]["late_statistics"] == len(late)


def test_the_statistics_of_all_are_in_the_memory_at_the_end(tmp_path):
    """PRO-LIN without training has the sums of all examples, whoever was late."""
    config = live("prolin", base_rounds=0)
    quick, _ = deploy_paced(config, tmp_path, out="quick")
    slow, _ = deploy_paced(config, tmp_path, out="slow", paces=SLOWLY)
    assert_same_sums(quick, slow)
    assert any(a["position"] < a["at"][0] for a in arrivals(slow, "statistics"))


def assert_same_sums(one: Path, other: Path) -> None:
    """The same examples, each once; rounding depends on the order in which sums are added."""
    tensors = [read_tensors(folder / "state.safetensors")[0] for folder in (one, other)]
    names = [name for name in tensors[0] if name.startswith("server/bank/")]
    assert names and torch.equal(*(found["server/bank/count"] for found in tensors))
    for name in names:
        assert torch.allclose(*(found[name].double() for found in tensors), atol=1e-4), name


def test_the_status_shows_how_old_replies_are(tmp_path):
    folder, _ = deploy_paced(live(), tmp_path, paces=SLOWLY)
    shown = describe(status(folder))
    ages = [a["age"] for a in arrivals(folder)]
    assert f"age of replies in updates: 0: {ages.count(0)}, " in shown
    assert f"oldest reply of each late client: {SLOW}: {max(ages)}\n" in shown
    assert "at work" not in shown  # the run is done


def test_a_status_while_it_runs_shows_who_is_at_work(tmp_path):
    def stop(grid: PacedGrid) -> None:
        if grid.time == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        deploy_paced(live(), tmp_path, paces={SLOW: 50}, each_query=stop)
    assert f"at work: client {SLOW} for 4 updates\n" in describe(status(tmp_path / "run"))


# -- faults ------------------------------------------------------------------------------------------------------------


def test_a_node_that_vanishes_is_not_waited_for(tmp_path):
    """Another client takes its place at once, although the deadline is far away."""

    def vanish(grid: PacedGrid) -> None:
        if grid.time == 3:
            grid.nodes.pop(100 + SLOW, None)

    config = live(stream__clients=4, stream__participants=2, clock__buffer=2)
    folder, _ = deploy_paced(config, tmp_path, paces={SLOW: NEVER}, each_query=vanish)
    silent = [c for e in events(folder, "asked") for c in e["silent"]]
    assert silent == [SLOW] and run_facts(folder)["tally"]["silent_clients"] == 1
    assert [e["client"] for e in events(folder, "left")] == [SLOW]
    assert run_facts(folder)["tally"]["lost_replies"] == 1
    assert [e["clients"] for e in events(folder, "round")] == [2] * 6


def test_a_reply_after_the_deadline_is_dropped_and_its_client_asked_again(tmp_path):
    held: list[tuple[str, list[Message]]] = []

    def hold(grid: PacedGrid, request: Message, replies: list[Message]) -> list[Message]:
        held.append((request.metadata.message_id, replies))
        return []

    def release(grid: PacedGrid) -> None:
        if held and grid.work_count(100 + SLOW) == 2:  # it has been asked again
            id, replies = held.pop()
            grid.mail[id] = replies

    folder, _ = deploy_paced(
        live(clock__buffer=3), tmp_path, policy={"deadline": 0.3}, change=first_turn_of(SLOW, hold), each_query=release
    )
    first = events(folder, "asked")[0]
    assert (sorted(first["answered"]), first["silent"]) == ([0, 1], [SLOW])
    [dropped] = events(folder, "late reply dropped")
    assert (dropped["client"], dropped["position"], dropped["round"]) == (SLOW, 0, 0)
    assert [e["client"] for e in events(folder, "joined")].count(SLOW) == 2
    assert sum(a["client"] == SLOW for a in arrivals(folder)) == 5


def test_a_second_reply_changes_nothing_and_is_counted(tmp_path):
    plain, _ = deploy_paced(live(), tmp_path, out="plain", paces=SLOWLY)
    twice = first_turn_of(SLOW, lambda grid, request, replies: replies * 2)
    folder, _ = deploy_paced(live(), tmp_path, paces=SLOWLY, change=twice)
    assert [e["client"] for e in events(folder, "second reply dropped")] == [SLOW]
    assert outcome(folder) == outcome(plain)


def test_a_wrong_reply_is_refused_and_counts_for_nothing(tmp_path):
    """The others fill the buffer, and the client takes part again later."""
    wrong = first_turn_of(0, lambda grid, request, replies: changed_by(nan)(grid, request, replies[0]))
    folder, _ = deploy_paced(live(), tmp_path, paces=SLOWLY, change=wrong)
    refused = [e["refused"] for e in events(folder, "asked")]
    assert list(refused[0]) == ["0"] and "not finite" in refused[0]["0"] and not any(refused[1:])
    assert run_facts(folder)["tally"]["refused_replies"] == 1
    assert run_facts(folder)["tally"]["lost_replies"] == 1
    first = events(folder, "round")[0]
    assert first["clients"] == 2  # client 1, and the slow one, for which the server had to wait now
    assert [a["client"] for a in arrivals(folder)].count(0) == 5


def test_lost_statistics_are_asked_for_again(tmp_path):
    """Of a client whose reply was refused; no example is missing or counted twice at the end."""
    seen: list[int] = []

    def refuse(grid: PacedGrid, request: Message, replies: list[Message]) -> list[Message]:
        if is_turn(request) or grid.client_of(request) != 1 or seen:
            return replies
        seen.append(1)
        return changed_by(lambda response: object.__setattr__(response, "error", "broken"))(grid, request, replies[0])

    config = live("probayes")
    quick, _ = deploy_paced(config, tmp_path, out="quick")
    folder, _ = deploy_paced(config, tmp_path, change=refuse)
    assert [list(e["refused"]) for e in events(folder, "asked") if e["refused"]] == [["1"]]
    assert counts_of(quick) == counts_of(folder)


def counts_of(folder: Path) -> dict[str, list[float]]:
    """How many examples of each class the server has sums of."""
    found = read_tensors(folder / "state.safetensors")
    assert found is not None
    return {name: t.tolist() for name, t in found[0].items() if name.startswith("server/") and name.endswith("/count")}


def test_without_nodes_the_run_stops_and_can_be_resumed(tmp_path):
    def vanish(grid: PacedGrid) -> None:
        if grid.time == 4:
            grid.nodes.clear()

    with pytest.raises(TooFewClients, match="run the same app again"):
        deploy_paced(live(), tmp_path, paces=SLOWLY, each_query=vanish)
    assert not run_facts(tmp_path / "run")["done"]
    folder, _ = deploy_paced(live(), tmp_path, paces=SLOWLY)
    assert run_facts(folder)["done"] and len(events(folder, "round")) == 6


def test_clients_that_diverge_end_the_run(tmp_path):
    with pytest.raises(Diverged, match="client"):
        deploy_paced(live(lr=1e9, clip=0, batch=32), tmp_path)


def test_too_few_usable_replies_stop_the_run(tmp_path):
    """After as many attempts as the policy allows; until then, clients whose replies were refused are asked again."""

    def refuse(grid: PacedGrid, request: Message, replies: list[Message]) -> list[Message]:
        return changed_by(nan)(grid, request, replies[0]) if grid.client_of(request) else replies

    turns: list[int] = []

    def count(grid: PacedGrid, request: Message, replies: list[Message]) -> list[Message]:
        turns.append(grid.client_of(request))
        return refuse(grid, request, replies)

    with pytest.raises(TooFewClients, match="1 clients sent a usable reply, 2 are needed"):
        deploy_paced(live(), tmp_path, change=count, policy={"min_replies": 2, "attempts": 3})
    assert sorted(turns) == [0, 1, 1, 1, 2, 2, 2]


# -- restarts of the server --------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The server's process has ended."""


def run_with_restarts(config: RunConfig, tmp_path: Path, out: str, **grid: Any) -> Path:
    """Kills the server after 3 queries, and once more after 4, and so on. Each start has a grid of its own, as Flower's
    runs have."""
    for queries in range(3, 30):
        try:
            return deploy_paced(config, tmp_path, out=out, each_query=killer(queries), **grid)[0]
        except Killed:
            continue
    raise AssertionError("the run did not get on")


def killer(queries: int) -> Any:
    def kill(grid: PacedGrid) -> None:
        if grid.time >= queries:
            raise Killed

    return kill


@pytest.mark.parametrize(
    ("method", "more"), [("prolin", {"base_rounds": 0}), ("prolin", {"base_rounds": 1}), ("probayes", {})]
)
def test_a_server_that_is_restarted_counts_no_example_twice_and_none_is_missing(tmp_path, method, more):
    config = live(method, **more)
    quick, _ = deploy_paced(config, tmp_path, out="quick")
    folder = run_with_restarts(config, tmp_path, "restarted", paces={0: 1, 1: 2, SLOW: 4})
    assert len(events(folder, "resumed")) > 2
    assert counts_of(folder) == counts_of(quick) != {}


def test_what_was_on_its_way_is_asked_for_again(tmp_path):
    """A turn of this position starts anew, from the model of now, before others start."""
    config = live(stream__clients=4, stream__participants=2)
    with pytest.raises(Killed):
        deploy_paced(config, tmp_path, paces={SLOW: 50}, each_query=killer(3))
    last = [e for e in events(tmp_path / "run", "asked") if e["stage"] == "round"][-1]
    assert [client for client, _ in last["at_work"]] == [SLOW]
    folder, grid = deploy_paced(config, tmp_path)
    turns = [node - 100 for node, what in grid.sent if what == "train.turn"]
    assert turns[0] == SLOW
    again = next(a for a in arrivals(folder) if a["client"] == SLOW)
    assert again["age"] == 0
    assert [e["position"] for e in events(folder, "round")] == [0, 0, 0, 1, 1, 1]


def test_a_reply_that_waits_for_the_next_update_is_saved_and_used(tmp_path):
    """It arrives while the server waits for statistics, and is not asked for again."""
    config = live("promax", clock__statistics=1.0)
    paces = {SLOW: 3}
    with pytest.raises(Killed):
        deploy_paced(config, tmp_path, paces=paces, each_query=killer(4))
    assert [e["round"] for e in events(tmp_path / "run", "round")] == [0, 1]
    folder, _ = deploy_paced(config, tmp_path, paces=paces)
    at = events(folder, "round")[2]
    assert (at["position"], at["used_replies"], at["staleness"]) == (0, 3, 2)
    whole, _ = deploy_paced(config, tmp_path, out="whole", paces=paces)
    assert events(whole, "round")[2]["loss"] == at["loss"]
