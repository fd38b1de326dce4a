"""The sites of a federation in one process: a simulation of a deployment, with the same bits.

The run folder has sites.toml, which names the federation, the folders of the sites and the test data. So the run can be
resumed and diagnosed as long as these exist.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from profcil.config import SITES
from profcil.data.bundle import Bundle, Examples, Nodes, Rows
from profcil.deploy.sites.declarations import declaration_error, joined_positions
from profcil.deploy.sites.enrolment import Enrolment, extend_scores, record_growth, replace_plan
from profcil.deploy.sites.federation import LAST_POSITION, Federation
from profcil.deploy.sites.federation_file import parse_toml, read_federation
from profcil.deploy.sites.readers import read_test_examples
from profcil.deploy.sites.site import Site, read_site
from profcil.engine import run as engine
from profcil.engine.device import device_of
from profcil.engine.executor import prepare
from profcil.engine.recorder import Observer
from profcil.engine.run_state import RunState
from profcil.engine.world import World, build_world
from profcil.engine.world import make_world as make_dataset_world
from profcil.errors import ConfigError, DataError
from profcil.io.atomic_files import write_text
from profcil.protocol.plan import Plan
from profcil.protocol.plan_making import assemble
from profcil.resolve import RunConfig

FILE = "sites.toml"


@dataclass(frozen=True)
class SimulatedSites:
    """Where the data of a simulated deployment is."""

    federation: str  # the text of federation.toml
    folders: tuple[Path, ...]
    test: Path

    def to_toml(self) -> str:
        values = {
            "federation": self.federation,
            "sites": [str(folder.absolute()) for folder in self.folders],
            "test": str(self.test.absolute()),
        }
        return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())

    def make_world(self, config: RunConfig) -> World:
        """The world of the server, with the data of all sites."""
        if config.clock.mode != "off":
            raise ConfigError(
                "simulated clocks are made for a plan that does not grow, and sites may join; leave out clock.mode, or "
                "deploy the run, where clients take real time"
            )
        if config.path == "auto":
            prepare(device_of(config.device).type)
        federation = read_federation(self.federation)
        sites = read_sites(self.folders, federation.at(LAST_POSITION))
        growth = SimulatedGrowth(self.test, federation, sites, config)
        world = build_world(config, growth.bundle(), growth.plan())
        world.growth = growth
        return world


def read_simulated_sites(path: Path) -> SimulatedSites:
    """Reads the sites.toml of a run folder."""
    if not path.is_file() or path.name != FILE:
        raise DataError(
            f"{path} is not the {FILE} of a simulated deployment; give it with --data-dir RUN/{FILE} (the data of a "
            "real deployment is at its sites)"
        )
    values = parse_toml(path.read_text(encoding="utf-8"), path)
    folders = tuple(Path(folder) for folder in values["sites"])
    return SimulatedSites(values["federation"], folders, Path(values["test"]))


def start(sites: SimulatedSites, config: RunConfig, out: Path, observe: Observer = lambda p: None) -> Path:
    """Starts a simulation in a new run folder and computes it to its end."""

    def make_world_and_note_its_data(config: RunConfig, path: Path) -> World:
        world = sites.make_world(config)
        write_text(path, sites.to_toml())
        return world

    return engine.start(config, out, Path(out) / FILE, observe, make_world_and_note_its_data)


def make_world(config: RunConfig, data: Path) -> World:
    """The world of a run that has begun: of sites, or of a dataset. `data` is what its run.json gives as `data_dir`."""
    if config.dataset != SITES:
        return make_dataset_world(config, data)
    world = read_simulated_sites(data).make_world(config)
    run = Path(data).with_name("run.json")
    position = (
        json.loads(run.read_text(encoding="utf-8")).get("enrolment", {}).get("position", 0) if run.exists() else 0
    )
    assert isinstance(world.growth, SimulatedGrowth)
    for earlier in range(1, position + 1):
        world.growth.advance(world, earlier)
    return world


class SimulatedGrowth:
    """What joins and is declared between the positions of a simulation: as the federation and the manifests say."""

    def __init__(self, test: Path, federation: Federation, sites: Mapping[int, Site], config: RunConfig) -> None:
        self.test = test
        self.federation = federation
        self.sites = sites
        self.config = config
        self.examples = joined([sites[client].examples for client in sorted(sites)])
        self.terms = federation.at(0)
        self.enrolment = Enrolment().extended(self.terms, self.offers(), 0)
        if not self.enrolment.declarations:
            raise ConfigError("no site takes part from the first position on; correct `joins` in a manifest")

    def __call__(self, world: World, state: RunState) -> dict[str, Any]:
        before = self.enrolment
        if state.position <= before.position or not self.advance(world, state.position):
            return {}
        extend_scores(world, state)
        return record_growth(state, before, self.enrolment, self.terms)

    def advance(self, world: World, position: int) -> bool:
        """Takes what is new at a position into the plan. Returns whether anything is."""
        self.terms = self.federation.at(position)
        before = self.enrolment
        after = before.extended(self.terms, self.offers(), position)
        if after.is_like(before):
            return False
        self.enrolment = after
        replace_plan(world, self.plan(), self.bundle())
        return True

    def offers(self) -> dict[int, dict[str, Any]]:
        """What the sites declare under the present terms."""
        return {client: site.restricted(self.terms).declaration() for client, site in self.sites.items()}

    def bundle(self) -> Bundle:
        return self.terms.bundle(self.examples, read_test_examples(self.test, self.terms))

    def plan(self) -> Plan:
        return sites_plan(self.terms, self.sites, self.enrolment, self.config)


def read_sites(folders: Sequence[Path], federation: Federation) -> dict[int, Site]:
    """The sites in some folders, by client. A site of the federation without a folder is left out of the run."""
    found: dict[int, Site] = {}
    for folder in folders:
        site = read_site(folder, federation)
        if reason := declaration_error(site.declaration(), federation):
            raise DataError(f"the site in {folder} cannot take part: {reason}; correct its manifest")
        if site.client in found:
            name = federation.sites[site.client]
            raise ConfigError(f"two folders of --sites belong to the site {name}; give one folder for each site")
        found[site.client] = site
    if not found:
        raise ConfigError("no site is given; name the folders of the sites with --sites FOLDER ...")
    return found


def sites_plan(federation: Federation, sites: Mapping[int, Site], enrolment: Enrolment, config: RunConfig) -> Plan:
    """The plan that the server of a deployment makes, with the numbers of the real examples."""
    labels = []
    owners = []
    for client in sorted(sites):
        y = sites[client].examples.y.numpy()
        counts = enrolment.declarations.get(client, {}).get("counts", {})
        is_declared = np.isin(y, [int(label) for label in counts])
        labels.append(y)
        owners.append(np.where(is_declared, client, -1))
    joined_at = joined_positions(federation, enrolment.declarations)
    y = np.concatenate(labels)
    owner = np.concatenate(owners)
    orders = enrolment.order_array()
    tasks = federation.task_ids()
    return assemble(y, owner, tasks, orders, config.stream, config.seed, joined_at, federation.declared)


def joined(parts: Sequence[Examples]) -> Examples:
    """The examples of all sites, one site after another. Graphs stay apart: no edge joins two sites."""
    graphs = [part for part in parts if isinstance(part, Nodes)]
    y = torch.cat([part.y for part in parts])
    x = torch.cat([part.x for part in parts])
    if not graphs:
        return Rows(x, y)
    sizes = [len(graph.x) for graph in graphs]
    offsets = [sum(sizes[:i]) for i in range(len(graphs))]
    edges = torch.cat([graph.edges + offset for graph, offset in zip(graphs, offsets, strict=True)], dim=1)
    nodes = torch.cat([graph.nodes + offset for graph, offset in zip(graphs, offsets, strict=True)])
    return Nodes(x, edges, y, nodes)
