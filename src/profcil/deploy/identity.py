"""Who a node is: a client of a simulated plan, with its share of a dataset, or a site with data of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from profcil.deploy.federation import read_federation
from profcil.deploy.node_registry import Hello
from profcil.deploy.run_config import read_recipe
from profcil.deploy.site import Site, read_site
from profcil.deploy.store import Keep, home
from profcil.deploy.wire import Ask
from profcil.engine.client import Client
from profcil.engine.world import World, furnish, make_world
from profcil.errors import ConfigError, DataError


@dataclass(frozen=True)
class Share:
    """A client of the plan: everyone loads the same dataset and takes their share of it."""

    client: int
    data_dir: Path
    home: Path
    recipe: str

    def hello(self, run: str) -> Hello:
        return Hello(self.client, Keep(self.home, run, self.client).holds())

    def world(self) -> World:
        return shared_world(self.recipe, self.data_dir)

    def check(self, world: World, facts: Mapping[str, str]) -> None:
        """Both ends must mean the same plan and the same data."""
        for what, mine in {"plan": world.plan.digest, "data": world.bundle.fingerprint}.items():
            if facts[what] != mine:
                raise DataError(
                    f"client {self.client} has another {what} than the server; give it the same data and version"
                )

    def sit(self, world: World, ask: Ask, private: dict[str, Tensor] | None) -> Client:
        return world.client(ask.client, ask.when, private)


@dataclass(frozen=True)
class Desk:
    """A site: its plan is its own, and what the others have met is told by the server."""

    folder: Path
    home: Path
    recipe: str
    terms: str

    def site(self) -> Site:
        return read_site(self.folder, read_federation(self.terms))

    def hello(self, run: str) -> Hello:
        site = self.site()
        return Hello(site.client, Keep(self.home, run, site.client).holds(), site.declared())

    def world(self) -> World:
        config, terms, site = read_recipe(self.recipe), read_federation(self.terms), self.site()
        return furnish(config, terms.bundle(site.examples), site.plan(terms, config.stream, config.seed))

    def check(self, world: World, facts: Mapping[str, str]) -> None:
        """Nobody else knows a site's data; what it declared is checked where its replies arrive."""

    def sit(self, world: World, ask: Ask, private: dict[str, Tensor] | None) -> Client:
        return replace(world.client(0, ask.when, private), id=ask.client, seen=ask.seen)


@lru_cache(maxsize=1)
def shared_world(recipe: str, data_dir: Path) -> World:
    """Kept for the next message, where the process lives that long."""
    return make_world(read_recipe(recipe), data_dir)


def seat_of(node: Mapping[str, Any], settings: Mapping[str, Any]) -> Share | Desk:
    """By the node's own configuration; in Flower's simulation by its partition."""
    kept, recipe = Path(str(node.get("home") or home())), str(settings["recipe"])
    if "site" in node:
        return Desk(Path(str(node["site"])), kept, recipe, str(settings["federation"]))
    number = node.get("client", node.get("partition-id"))
    if not isinstance(number, int) or number < 0:
        raise ConfigError(
            f"this node's configuration gives client = {number!r}, allowed is a whole number from 0; "
            f"start it with --node-config 'client=N' or 'site=\"FOLDER\"'"
        )
    here = settings["data-dir"] if "partition-id" in node else "data"  # a simulation shares the server's machine
    return Share(number, Path(str(node.get("data-dir") or os.environ.get("PROFCIL_DATA") or here)), kept, recipe)
