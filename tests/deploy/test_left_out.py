"""A site that is left out is named with the reason: in the status, in the server's log and on the site's own screen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from memory_grid import Grid
from test_faults import all_clients, events
from test_sites import fedavg_config, federation_text, write_manifest, write_sites

from profcil.cli.main import main
from profcil.deploy.app_folder import settings_table
from profcil.deploy.client import screen
from profcil.deploy.hello import SiteFault, fault_response, read_hello
from profcil.deploy.server import entry
from profcil.deploy.server.fleet import TooFewClients
from profcil.deploy.server.node_registry import NodeRegistry
from profcil.deploy.status import left_out, status
from profcil.engine.channel import When


def deploy(tmp_path: Path, nodes: dict, **policy) -> Path:
    text = federation_text("text")
    rules = {"federation": text, "deadline": 0.5, "join": 0.3, **policy}
    settings = settings_table(fedavg_config(), tmp_path / "run", tmp_path / "test" / "data.csv", **rules)
    return entry.start(Grid(settings, nodes), settings)


def test_a_misconfigured_site_is_named_first_with_its_reason(tmp_path, capsys):
    nodes = write_sites(tmp_path, "text")
    write_manifest(tmp_path / "south", "south", "data.csv", ["spraiin"])
    folder = deploy(tmp_path, nodes)
    output = capsys.readouterr().out
    assert "profcil: LEFT OUT: unknown class 'spraiin'; did you mean sprain" in output  # on the site's screen
    assert "\nLEFT OUT: site south: unknown class 'spraiin'" in output  # in the server's log
    assert main(["status", str(folder)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("LEFT OUT: site south: unknown class 'spraiin'; did you mean sprain")
    [entry] = status(folder)["left_out"]
    assert entry["who"] == "site south"


def test_a_site_that_does_not_connect_is_named(tmp_path, capsys):
    nodes = write_sites(tmp_path, "text")
    folder = deploy(tmp_path, {7: nodes[7]})
    assert status(folder)["left_out"] == [{"who": "site south", "reason": "it did not connect within 0.3 seconds"}]
    assert "LEFT OUT: site south: it did not connect" in capsys.readouterr().out


def test_too_few_sites_are_explained_one_by_one(tmp_path):
    nodes = write_sites(tmp_path, "text")
    (tmp_path / "south" / "data.csv").unlink()
    with pytest.raises(TooFewClients, match=r"1 of 2 sites are connected, 2 are needed \(site south: .*does not exist"):
        deploy(tmp_path, nodes, min_replies=2)


def test_a_site_that_connects_after_the_start_gets_a_message(tmp_path, capsys):
    nodes = write_sites(tmp_path, "text")
    text = federation_text("text")
    settings = settings_table(fedavg_config(), tmp_path / "run", tmp_path / "test", federation=text)
    registry = NodeRegistry(Grid(settings, {8: nodes[8]}), "run", lambda event: None)
    registry.enrolled = [0]
    registry.update()
    assert "the run has begun without it, and it takes part from the next position on" in capsys.readouterr().out


def test_a_run_in_which_all_take_part_names_no_site(tmp_path, capsys):
    folder = deploy(tmp_path, write_sites(tmp_path, "text"))
    assert status(folder)["left_out"] == []
    assert "LEFT OUT" not in capsys.readouterr().out


def test_a_client_whose_replies_are_all_refused_is_named(deployed, tmp_path):
    asked = [{"event": "asked", "answered": [0], "silent": [2], "refused": {"1": "another plan"}}]
    enrolled = {"event": "enrolled", "sites": ["north", "south"], "clients": [0, 1]}
    found = {entry["who"]: entry["reason"] for entry in left_out([enrolled, *asked])}
    assert found == {
        "site south": "none of its replies could be used (another plan)",
        "client 2": "it has not replied to any request",
    }
    later = {"event": "asked", "answered": [1, 2], "silent": [], "refused": {}}
    assert left_out([enrolled, *asked, later]) == []
    folder, _ = deployed(all_clients())
    assert status(folder)["left_out"] == []


def test_a_site_that_was_refused_and_came_back_takes_part():
    refused = {"event": "refused", "node": 5, "site": "south", "reason": "no manifest"}
    enrolled = {"event": "enrolled", "sites": ["north", "south"], "clients": [0, 1]}
    assert left_out([refused, enrolled]) == []
    assert left_out([enrolled, refused])[0]["who"] == "site south"
    assert left_out([enrolled, refused, {"event": "joined", "client": 1}]) == []


def test_a_fault_from_the_network_is_short_and_printable():
    with pytest.raises(SiteFault) as caught:
        read_hello(fault_response("so\x1buth\n" * 300, "no\nmanifest\x1b[2J" * 300))
    assert caught.value.site.isprintable() and len(caught.value.site) <= 500
    assert str(caught.value).isprintable() and len(str(caught.value)) <= 500


def test_a_site_prints_what_it_does_in_plain_words(tmp_path, capsys):
    folder = deploy(tmp_path, {7: write_sites(tmp_path, "text")[7]})
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("profcil: ")]
    plain = [line.split(" in ")[0] for line in lines]
    assert plain[:3] == [
        "profcil: connected as site north; waiting",
        "profcil: training round 1 of 1 (warm-up)",
        "profcil: done",
    ]
    assert plain[3::2] == [f"profcil: training round {r} of 2 (position {p} of 2)" for p in (1, 2) for r in (1, 2)]
    assert lines[-1].endswith("this was the last round of training")
    assert lines[-3].endswith("; waiting")
    assert len(lines) == 1 + 2 * (len(events(folder, "asked")))


def test_statistics_and_failures_are_said_too(capsys):
    screen.begins("survey", When("refresh", 1, 0, 3), 5)
    screen.ends("survey", When("refresh", 4, 2, 3), 5, 1.25)
    screen.failed("another plan")
    screen.connected(3, "", None)
    assert capsys.readouterr().out.splitlines() == [
        "profcil: computing statistics, round 1 of 3 (position 2 of 5)",
        "profcil: done in 1.2 s; waiting",
        "profcil: this turn could not be computed: another plan",
        "profcil: connected as client 3; waiting",
    ]


def test_the_status_as_json_has_the_reasons(tmp_path, capsys):
    folder = deploy(tmp_path, {7: write_sites(tmp_path, "text")[7]})
    capsys.readouterr()
    assert main(["status", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"][0]["who"] == "site south"
