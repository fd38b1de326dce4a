"""What joins a deployment between two positions: sites that have connected, and classes that are declared.

The run folder has federation.toml, a copy of the app's. The operator may append [[later]] tables to it while the run
goes on. The server reads it before each position. Where classes are declared, all sites are asked for a new
declaration.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from profcil.data.bundle import Bundle
from profcil.deploy.policy import Policy
from profcil.deploy.server.node_registry import NodeRegistry
from profcil.deploy.sites.declarations import declaration_error, joint_plan
from profcil.deploy.sites.enrolment import Enrolment, extend_scores, record_growth, replace_plan
from profcil.deploy.sites.federation import Federation
from profcil.deploy.sites.federation_file import read_federation
from profcil.deploy.sites.readers import read_test_examples
from profcil.engine.run_state import RunState
from profcil.engine.world import World
from profcil.errors import ConfigError, ProfcilError

FILE = "federation.toml"  # in the run folder
POLL_SECONDS = 0.2


@dataclass
class SiteGrowth:
    """The sites and classes of a deployment, and how they grow."""

    text: str  # of the federation, as it is in force
    file: Path
    test: Path
    registry: NodeRegistry
    policy: Policy
    enrolment: Enrolment
    reported: set[str] = field(default_factory=set)  # what was refused already

    @property
    def federation(self) -> Federation:
        return read_federation(self.text)

    def __call__(self, world: World, state: RunState) -> dict[str, Any]:
        """Takes what is new before a position into the plan. Returns what is new, for the log; empty if nothing is."""
        position = state.position
        if position <= self.enrolment.position:
            return {}
        bundle = self.read_terms(world, position)
        terms = self.federation.at(position)
        self.ask_sites(position, again=bundle is not None)
        before = self.enrolment
        after = before.extended(terms, self.offers(terms, position), position)
        if bundle is None and after.is_like(before):
            return {}
        self.enrolment = after
        config = world.config
        plan = joint_plan(terms, after.declarations, config.stream, config.seed, after.order_array())
        replace_plan(world, plan, bundle or world.bundle)
        extend_scores(world, state)
        self.registry.enrolled = sorted(after.declarations)
        return record_growth(state, before, after, terms)

    def read_terms(self, world: World, position: int) -> Bundle | None:
        """The server's data, if classes are declared at this position. Terms that cannot be used are refused: the run
        goes on under those before."""
        try:
            text = self.file.read_text(encoding="utf-8") if self.file.is_file() else self.text
            given = read_federation(text, str(self.file))
            check_extends(given, self.federation, position)
            if given.at(position).tasks == given.at(position - 1).tasks:
                self.text = text
                return None
            bundle = self.read_test(world, given, position)
        except (ProfcilError, OSError, UnicodeDecodeError) as error:
            self.refuse(f"the terms of {self.file} are refused: {error}")
            return None
        self.text = text
        return bundle

    def read_test(self, world: World, given: Federation, position: int) -> Bundle:
        """The test data under new terms. That of the old classes must be what it was."""
        before = given.at(position - 1)
        old = before.bundle(read_test_examples(self.test, before))
        if old.fingerprint != world.bundle.fingerprint:
            raise ConfigError(f"{self.test} has other examples of the first classes than before; only add examples")
        terms = given.at(position)
        return terms.bundle(read_test_examples(self.test, terms))

    def ask_sites(self, position: int, again: bool) -> None:
        """Reads the hellos that have arrived. Under new terms every site is asked again, and its answer awaited."""
        self.registry.terms = {"federation": self.text, "position": position}
        if again:
            self.registry.ask_again()
        end = time.monotonic() + self.policy.join
        self.registry.update()
        while again and self.registry.pending and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            self.registry.update()

    def offers(self, terms: Federation, position: int) -> dict[int, Mapping[str, Any]]:
        """The valid declarations of the sites that are connected."""
        found: dict[int, Mapping[str, Any]] = {}
        for hello in self.registry.hellos.values():
            if not 0 <= hello.client < len(terms.sites) or hello.client in found:
                continue
            if reason := declaration_error(hello.site, terms):
                self.refuse(reason, site=terms.sites[hello.client])
            else:
                found[hello.client] = hello.site
        return found

    def refuse(self, reason: str, **who: str) -> None:
        """Says once why terms or a declaration are not used."""
        if f"{who}{reason}" not in self.reported:
            self.reported.add(f"{who}{reason}")
            print(f"REFUSED: {' '.join(who.values())} {reason}", flush=True)
            self.registry.record_event({"event": "refused", "reason": reason, **who})


def check_extends(given: Federation, known: Federation, position: int) -> None:
    """Checks that what was in force before a position is still so."""
    before = replace(given.at(position - 1), later=())
    if before != replace(known.at(position - 1), later=()):
        raise ConfigError(
            f"it changes what holds before position {position + 1}; leave that as it was, and append [[later]] tables "
            f"with position = {position + 1} or a later one"
        )
