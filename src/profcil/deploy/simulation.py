"""The sites of a federation in one process: a simulation of a deployment, with the same bits.

The run folder has sites.toml, which names the federation, the folders of the sites and the test data. So the run can be
resumed and diagnosed as long as these exist.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from profcil.config import SITES
from profcil.data.bundle import Examples, Nodes, Rows
from profcil.deploy.federation import Federation, complete_orders, declaration_error, parse_toml, read_federation
from profcil.deploy.readers import read_test_examples
from profcil.deploy.site import Site, read_site
from profcil.engine import run as engine
from profcil.engine.device import device_of
from profcil.engine.executor import prepare
from profcil.engine.run import Observer
from profcil.engine.world import World, build_world
from profcil.engine.world import make_world as make_dataset_world
from profcil.errors import ConfigError, DataError
from profcil.io.atomic_files import write_text
from profcil.protocol.plan import Plan, assemble
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
        if config.accelerate == "auto":
            prepare(device_of(config.device).type)
        federation = read_federation(self.federation)
        sites = read_sites(self.folders, federation)
        clients = sorted(sites)
        examples = joined([sites[client].examples for client in clients])
        bundle = federation.bundle(examples, read_test_examples(self.test, federation))
        return build_world(config, bundle, sites_plan(federation, sites, config))


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
    if config.dataset == SITES:
        return read_simulated_sites(data).make_world(config)
    return make_dataset_world(config, data)


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


def sites_plan(federation: Federation, sites: Mapping[int, Site], config: RunConfig) -> Plan:
    """The plan that the server of a deployment makes, with the numbers of the real examples."""
    labels = []
    owners = []
    for client in sorted(sites):
        y = sites[client].examples.y.numpy()
        is_declared = np.isin(y, list(sites[client].counts))
        labels.append(y)
        owners.append(np.where(is_declared, client, -1))
    orders = [sites[c].order if c in sites else {} for c in range(len(federation.sites))]
    complete = complete_orders(orders, len(federation.tasks))
    y = np.concatenate(labels)
    owner = np.concatenate(owners)
    return assemble(y, owner, federation.task_ids(), complete, config.stream, config.seed)


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
