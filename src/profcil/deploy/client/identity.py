"""Which client a node is: a client of a simulated plan with its part of a dataset, or a site with its own data."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from profcil.deploy.client.store import SiteStore, default_home
from profcil.deploy.execution import execution_facts
from profcil.deploy.hello import Hello
from profcil.deploy.run_config import config_from_text
from profcil.deploy.sites.declarations import declaration_error
from profcil.deploy.sites.federation import LAST_POSITION, Federation
from profcil.deploy.sites.federation_file import read_federation
from profcil.deploy.sites.site import Site, read_site
from profcil.deploy.wire import Request
from profcil.engine.client import Client
from profcil.engine.world import World, build_world, make_world
from profcil.errors import ConfigError, DataError


@dataclass(frozen=True)
class PartitionIdentity:
    """A client of the plan. All nodes load the same dataset, and each uses its own part of it."""

    client: int
    data_dir: Path
    home: Path
    recipe: str

    def with_facts(self, facts: Mapping[str, Any], position: int) -> PartitionIdentity:
        """Nothing changes: the plan of a dataset is complete at the start."""
        return self

    def hello(self, run: str) -> Hello:
        store = SiteStore(self.home, run, self.client)
        store.forget_sum()  # the server that sends a hello has none open with this node
        return Hello(self.client, store.stored_digests(), execution=execution_facts(config_from_text(self.recipe)))

    def make_world(self) -> World:
        return cached_world(self.recipe, self.data_dir)

    def check_matches_server(self, world: World, facts: Mapping[str, str]) -> None:
        """Client and server must have the same plan and the same data."""
        for what, mine in {"plan": world.plan.digest, "data": world.bundle.fingerprint}.items():
            if facts[what] != mine:
                raise DataError(
                    f"client {self.client} has another {what} than the server; "
                    "give it the same data and the same version of profcil"
                )

    def noise_secret(self, store: SiteStore) -> int | None:
        """None: noise is drawn from the seed, as in the simulation. All nodes have all data, so there is no secret."""
        return None

    def make_client(self, world: World, request: Request, private: dict[str, Tensor] | None) -> Client:
        return world.client(request.client, request.when, private)


@dataclass(frozen=True)
class SiteIdentity:
    """A site with its own data. Its plan has one client. The server sends the classes seen so far."""

    folder: Path
    home: Path
    recipe: str
    federation: str
    position: int = 0  # the terms are those at this position
    joined: int = 0  # the position from which the site takes part
    agreed: str = ""  # the terms in the app, where the server has given others since

    def with_facts(self, facts: Mapping[str, Any], position: int) -> SiteIdentity:
        """The identity under the terms that the server gives."""
        federation = str(facts.get("federation") or self.federation)
        joined = int(facts.get("joined", 0))
        return replace(self, federation=federation, position=position, joined=joined, agreed=self.federation)

    def terms(self) -> Federation:
        return read_federation(self.federation).at(self.position)

    def site(self) -> Site:
        terms = self.terms()
        return read_site(self.folder, terms).restricted(terms, self.joined)

    def hello(self, run: str) -> Hello:
        site = self.site()
        if reason := declaration_error(site.declaration(), self.terms()):
            raise DataError(f"{self.folder} cannot take part: {reason}; correct its manifest")
        store = SiteStore(self.home, run, site.client)
        store.forget_sum()
        execution = execution_facts(config_from_text(self.recipe))
        return Hello(site.client, store.stored_digests(), site.declaration(), execution)

    def make_world(self) -> World:
        config = config_from_text(self.recipe)
        federation = self.terms()
        site = self.site()
        plan = site.plan(federation, config.stream, config.seed)
        return build_world(config, federation.bundle(site.examples), plan)

    def check_matches_server(self, world: World, facts: Mapping[str, str]) -> None:
        """The server does not have the site's data, and checks replies against the declaration. It may declare classes
        later, but without a budget ε each position more is one more that nobody has planned to spend on a client."""
        protection = world.protection
        if protection is None or not protection.by_client or protection.settings.epsilon:
            return
        planned = len(read_federation(self.agreed or self.federation).at(LAST_POSITION).tasks)
        if world.plan.positions > planned:
            raise DataError(
                f"the server has {world.plan.positions} positions where the app plans {planned}, and without "
                "privacy.epsilon a site sends nothing about a client in the others; give the budget"
            )

    def noise_secret(self, store: SiteStore) -> int | None:
        return store.noise_secret()

    def make_client(self, world: World, request: Request, private: dict[str, Tensor] | None) -> Client:
        client = world.client(0, request.when, private)
        return replace(client, id=request.client, seen=request.seen)


def site_name(node: Mapping[str, Any]) -> str:
    """The name in the manifest of a node's site, also if the rest of the folder is wrong. Empty if there is none."""
    if "site" not in node:
        return ""
    try:
        manifest = (Path(str(node["site"])) / "manifest.toml").read_text(encoding="utf-8")
        return str(tomllib.loads(manifest).get("site", ""))
    except (OSError, ValueError):
        return ""


@lru_cache(maxsize=1)
def cached_world(recipe: str, data_dir: Path) -> World:
    """The world, reused for the next message if the same process handles it."""
    return make_world(config_from_text(recipe), data_dir)


def identity_of(node: Mapping[str, Any], settings: Mapping[str, Any]) -> PartitionIdentity | SiteIdentity:
    """The identity that a node's configuration gives. In Flower's simulation it is the partition id."""
    home = Path(str(node.get("home") or default_home()))
    recipe = str(settings["recipe"])
    if "site" in node:
        return SiteIdentity(Path(str(node["site"])), home, recipe, str(settings["federation"]))
    number = node.get("client", node.get("partition-id"))
    if not isinstance(number, int) or number < 0:
        raise ConfigError(
            f"this node's configuration gives client = {number!r}, allowed is a whole number from 0; "
            f"start it with --node-config 'client=N' or 'site=\"FOLDER\"'"
        )
    # A simulation runs on the server's machine, so the server's data folder is the default there.
    default_data = settings["data-dir"] if "partition-id" in node else "data"
    data_dir = node.get("data-dir") or os.environ.get("PROFCIL_DATA") or default_data
    return PartitionIdentity(number, Path(str(data_dir)), home, recipe)
