"""Minimum support over the clients of a secure sum, in deployments: counts are added before statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from memory_grid import Grid
from test_faults import events
from test_noised_sums import FEDERATION
from test_same_run import outcome
from test_secure_sums import VICTIM, at, gone, quick, secure, stage_of, write_three_sites
from test_simulated_sites import result
from test_site_budget import ask
from test_sites import QUICK

from profcil.cli.main import main
from profcil.deploy.app_folder import settings_table
from profcil.deploy.run_config import sites_config
from profcil.deploy.server import entry
from profcil.deploy.sites.federation_file import read_federation
from profcil.deploy.wire import read_request
from profcil.engine import run as engine

COUNTED = {"privacy__sum_support": "true", "warmup__rounds": 0}


def kind(request: Message) -> str:
    """What a message is about: the counts, or the statistics of a refresh."""
    return request.metadata.message_type


def during(action: str, fault: Callable) -> Callable:
    """A fault in the sums of counts, or of statistics, alone."""
    latest = [""]

    def only(grid: Grid, request: Message, reply: Message) -> list[Message]:
        if kind(request) in ("train.turn", "query.survey", "query.count"):
            latest[0] = kind(request)
        return fault(grid, request, reply) if latest[0] == action else [reply]

    return only


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("probayes", {"dictionary": 30}),
        ("prolin", {"base_rounds": 1, "dictionary": 20}),
        ("pro", {"covariance": "shared"}),
    ],
)
def test_a_deployment_has_the_bits_and_the_ledger_of_the_simulation(deployed, tmp_path, method, more):
    """Some classes have too few examples at the clients of a sum, and are in none of its statistics."""
    config = secure(method, **COUNTED, privacy__min_support=100, **more)
    serial = engine.start(config, tmp_path / "serial", tmp_path)
    withheld: list[tuple[int, ...]] = []

    def look(grid: Grid, request: Message, reply: Message) -> list[Message]:
        if kind(request) == "query.survey":
            withheld.append(read_request(request.content).withheld)
        return [reply]

    folder, _ = deployed(config, fault=look, nodes=5)
    assert outcome(folder) == outcome(serial)
    assert withheld and all(0 < len(found) < 5 for found in withheld)  # of five classes of a position


def test_what_is_rare_at_each_site_alone_is_used(deployed, tmp_path):
    """With the support of each site nothing would be left."""
    folder, _ = deployed(quick("probayes", **COUNTED, dictionary=30, privacy__min_support=100), nodes=5)
    alone, _ = deployed(quick("probayes", dictionary=30, privacy__min_support=100), nodes=5, out="alone")
    found, none = (outcome(path)["tensors"]["server/class_sums/count"] for path in (folder, alone))
    assert len(found) and not len(none)


def test_sites_with_their_own_data_have_the_bits_of_their_simulation(tmp_path):
    nodes = write_three_sites(tmp_path)
    sets = [*QUICK, "warmup.rounds=0", "privacy.secure_sum=true", "privacy.sum_support=true", "privacy.min_support=13"]
    config = sites_config(read_federation(FEDERATION), None, {"method": "prolin", "accelerate": "off"}, sets)
    test = tmp_path / "test.csv"
    settings = settings_table(config, tmp_path / "run", test, federation=FEDERATION, deadline=0.5, join=0.5)
    folder = entry.start(Grid(settings, nodes), settings)
    (tmp_path / "federation.toml").write_text(FEDERATION)
    words = ["run", "--federation", str(tmp_path / "federation.toml"), "--method", "prolin", "--quiet"]
    words += ["--sites", *(str(tmp_path / name) for name in ("north", "south", "west"))]
    words += ["--test", str(tmp_path / "test.csv"), "--out", str(tmp_path / "simulated")]
    assert main([*words, *(word for setting in sets for word in ("--set", setting))]) == 0
    assert result(tmp_path / "simulated") == result(folder)


# -- dropouts ---------------------------------------------------------------------------------------------------------


def asked_in(folder: Path, stage: str = "refresh") -> list[list[int]]:
    """Who was in the sums of a stage, one sum after another."""
    return [e["answered"] for e in events(folder, "asked") if e["stage"] == stage]


def counted(**more: Any) -> Any:
    usual = {**COUNTED, "dictionary": 30, "privacy__min_support": 10, "train__rounds": 1}
    return quick("probayes", **{**usual, **more})


@pytest.mark.parametrize("stage", ["keys", "shares", "masked"])
def test_a_client_that_is_not_in_the_counts_is_not_in_the_statistics(deployed, stage):
    folder, _ = deployed(counted(), fault=during("query.count", at(stage, gone)), nodes=5)
    assert asked_in(folder) == [[0, 2, 3, 4], [0, 2, 3, 4]]


def test_a_client_that_stops_after_its_counts_arrived_misses_the_statistics_alone(deployed):
    """It must answer a hello before it is asked again."""
    folder, _ = deployed(counted(), fault=during("query.count", at("recovery", gone)), nodes=5)
    assert asked_in(folder) == [[0, 1, 2, 3, 4], [0, 2, 3, 4]]


def test_another_attempt_counts_those_who_are_left(deployed, tmp_path):
    """The support of those who were there before says nothing about them."""
    withheld: list[Any] = []
    lose = at("masked", gone, (100, 101, 102), times=1)

    def fault(grid: Grid, request: Message, reply: Message) -> list[Message]:
        if kind(request) == "query.survey":
            withheld.append(read_request(request.content).withheld)
        found = during_survey(grid, request, reply)
        if not found and request.metadata.dst_node_id == 100:
            del grid.nodes[100]  # for good
        return found

    during_survey = during("query.survey", lose)
    config = counted(privacy__min_support=115)
    folder, _ = deployed(config, fault=fault, nodes=5)
    assert asked_in(folder) == [[0, 1, 2, 3, 4], [], [1, 2, 3, 4], [1, 2, 3, 4]]
    world = engine.make_world(config, tmp_path)
    counts = [Counter(world.labels[world.plan.samples(c, 0)].tolist()) for c in range(5)]
    rare = [tuple(y for y in range(10) if sum(count[y] for count in some) < 115) for some in (counts, counts[1:])]
    assert withheld[0] == rare[0] and withheld[-1] == rare[1] and set(rare[0]) < set(rare[1])


def test_if_too_few_are_counted_the_run_stops_and_is_resumed(deployed, tmp_path):
    with pytest.raises(Exception, match="refresh 1 of position 1 was given up: 2 clients sent a vector, 3 are needed"):
        deployed(counted(), fault=during("query.count", at("masked", gone, (100, 101, 102), times=9)), nodes=5)
    folder, _ = deployed(counted(), nodes=5)
    assert outcome(folder) == outcome(engine.start(counted(), tmp_path / "serial", tmp_path))


# -- a server that lies -----------------------------------------------------------------------------------------------


def test_a_site_sends_no_statistics_before_classes_are_counted(deployed):
    found: list[str] = []

    def fault(grid: Grid, request: Message, reply: Message) -> list[Message]:
        if stage_of(request) == "keys" and kind(request) == "query.survey" and not found:
            asked = replace(read_request(request.content), blocks={}, withheld=None)
            if request.metadata.dst_node_id == VICTIM:
                found.append(ask(grid, asked).error)
        return [reply]

    deployed(counted(), fault=fault, nodes=5)
    assert "asked for statistics of classes that were not counted, but privacy.sum_support = true" in found[0]


def test_a_site_counts_only_where_the_settings_say_so(deployed):
    found: list[str] = []

    def fault(grid: Grid, request: Message, reply: Message) -> list[Message]:
        if stage_of(request) == "keys" and request.metadata.dst_node_id == VICTIM and not found:
            asked = replace(read_request(request.content), blocks={}, digests={})
            for summed in (asked.sum, None):
                found.append(ask(grid, replace(asked, sum=summed), "query.count").error)
        return [reply]

    deployed(quick(train__rounds=1), fault=fault, nodes=5)
    assert "asked for its counts, but the settings of the app have none counted" in found[0]
    assert "asked for its own reply" in found[1]
