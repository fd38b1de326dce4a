"""Sites with their own data and a server that takes replies as they come: one is slow, one joins while it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from flwr.app import Message
from paced_grid import PacedGrid
from test_buffered_run import events
from test_growth import BURN, config_of, terms, write_three_sites
from test_sites import WORDS

from profcil.deploy.app_folder import settings_table
from profcil.deploy.server import entry
from profcil.deploy.sites import simulation
from profcil.deploy.sites.simulation import SimulatedSites
from profcil.errors import ConfigError
from profcil.resolve import RunConfig, finish, values_of


@pytest.fixture(autouse=True)
def a_fifth_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORDS, "burn", "skin blister")


def buffered(text: str, method: str) -> RunConfig:
    values = dict(values_of(config_of(text, method)))
    return finish({**values, "clock": {"mode": "buffer", "statistics": 0.0}}, method, [])


@pytest.mark.parametrize("method", ["promax", "prolin"])
def test_a_slow_site_is_not_waited_for_and_another_joins(tmp_path, method):
    nodes = write_three_sites(tmp_path)
    west = {9: nodes.pop(9)}
    text = terms()

    def join(grid: PacedGrid) -> None:
        if grid.time == 2:
            grid.nodes.update(west)
            (tmp_path / "run" / "federation.toml").write_text(terms(BURN))

    config = buffered(text, method)
    rules = {"federation": text, "deadline": 60.0, "join": 0.3}
    settings = settings_table(config, tmp_path / "run", tmp_path / "test.csv", **rules)
    grid = SitesGrid(settings, nodes, paces={1: 5}, each_query=join)
    folder = entry.start(grid, settings)
    assert json.loads((folder / "run.json").read_text())["done"]
    [extended] = events(folder, "extended")
    assert (extended["sites"], extended["classes"]) == (["west"], ["burn"])
    found = [a for e in events(folder, "asked") for a in e.get("arrivals", [])]
    assert {a["client"] for a in found} == {0, 1, 2}
    assert any(a["age"] > 0 for a in found if a["client"] == 1)
    assert not [e for e in events(folder, "asked") if e["refused"]]


class SitesGrid(PacedGrid):
    """The nodes 7, 8 and 9 are the sites north, south and west."""

    def client_of(self, message: Message) -> int:
        return message.metadata.dst_node_id - 7


def test_the_simulation_of_sites_which_may_join_has_no_clocks(tmp_path):
    write_three_sites(tmp_path)
    sites = SimulatedSites(terms(), tuple(tmp_path / name for name in ("north", "south")), tmp_path / "test.csv")
    with pytest.raises(ConfigError, match="sites may join"):
        simulation.start(sites, buffered(terms(), "promax"), Path(tmp_path / "run"))
