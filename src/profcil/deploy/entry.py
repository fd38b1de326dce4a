"""Starts a run from the settings of a Flower app: chooses the data, the plan and the run folder."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from profcil.deploy.federation import Federation, declaration_error, joint_plan, read_federation
from profcil.deploy.fleet import POLL_SECONDS, RESUME_ADVICE, TooFewClients
from profcil.deploy.node_registry import NodeRegistry
from profcil.deploy.policy import Policy, read_policy
from profcil.deploy.readers import read_test_examples
from profcil.deploy.run_config import config_from_text
from profcil.deploy.server import EventBuffer, serve
from profcil.engine.run import Progress
from profcil.engine.world import World, build_world, make_world
from profcil.errors import ProfcilError
from profcil.protocol.plan import Plan
from profcil.resolve import RunConfig


def start(grid: Any, settings: Mapping[str, Any]) -> Path:
    """Starts or resumes the run that an app describes."""
    config = config_from_text(str(settings["recipe"]))
    policy = read_policy(settings)
    out = Path(str(settings["out"]))
    data = Path(str(settings["data-dir"]))
    events = EventBuffer()
    registry = NodeRegistry(grid, run_name(out), events.record)
    if settings.get("federation"):
        federation = read_federation(str(settings["federation"]))
        world = make_sites_world(config, federation, out, data, registry, policy)
    else:
        world = make_world(config, data)
    try:
        return serve(world, out, data, registry, events, policy, print_progress)
    except ProfcilError as error:
        events.record({"event": "stopped", "reason": str(error)})
        raise


def run_name(out: Path) -> str:
    """The name of the run in a folder, or a new one. Sites store a run's files under it, so it must be unique.

    It is not derived from the seed: two runs with one seed need different names.
    """
    try:
        return str(json.loads((out / "run.json").read_text(encoding="utf-8"))["run"])
    except (OSError, ValueError, KeyError):
        return secrets.token_hex(8)


def make_sites_world(
    config: RunConfig, federation: Federation, out: Path, test: Path, registry: NodeRegistry, policy: Policy
) -> World:
    """The server's world for sites with their own data: it has test data only, and the plan that sites declare."""
    bundle = federation.bundle(read_test_examples(test, federation))
    resumed = (out / "state.safetensors").exists()
    plan = Plan.load(out / "plan.npz") if resumed else enrol_sites(config, federation, registry, policy)
    registry.enrolled = np.flatnonzero(plan.counts.any(axis=1)).tolist()
    return build_world(config, bundle, plan)


def enrol_sites(config: RunConfig, federation: Federation, registry: NodeRegistry, policy: Policy) -> Plan:
    """Waits for the sites and makes the plan. A site that does not connect in time is left out of the run."""
    declarations = wait_for_declarations(federation, registry, policy)
    left_out = reasons_to_leave_out(federation, declarations, registry, policy)
    for site, reason in left_out.items():
        print(f"LEFT OUT: site {site}: {reason}", flush=True)
        registry.record_event({"event": "left out", "site": site, "reason": reason})
    valid = {c: declaration for c, declaration in declarations.items() if federation.sites[c] not in left_out}
    if len(valid) < policy.min_replies:
        reasons = "; ".join(f"site {site}: {reason}" for site, reason in left_out.items())
        raise TooFewClients(
            f"{len(valid)} of {len(federation.sites)} sites are connected, {policy.min_replies} are needed "
            f"({reasons}); {RESUME_ADVICE}"
        )
    clients = sorted(valid)
    names = [federation.sites[c] for c in clients]
    registry.record_event({"event": "enrolled", "sites": names, "clients": clients})
    return joint_plan(federation, valid, config.stream, config.seed)


def reasons_to_leave_out(
    federation: Federation, declarations: Mapping[int, Mapping[str, Any]], registry: NodeRegistry, policy: Policy
) -> dict[str, str]:
    """Why each site that cannot take part is left out, by its name."""
    reasons = {}
    for client, site in enumerate(federation.sites):
        if client in declarations:
            reason = declaration_error(declarations[client], federation)
        else:
            absent = f"it did not connect within {policy.join:g} seconds"
            reason = registry.faults.get(site, absent)
        if reason:
            reasons[site] = reason
    return reasons


def wait_for_declarations(
    federation: Federation, registry: NodeRegistry, policy: Policy
) -> dict[int, Mapping[str, Any]]:
    """The declarations of all sites, or of those that connected in time."""
    end = time.monotonic() + policy.join
    while True:
        registry.update()
        hellos = [h for h in registry.hellos.values() if 0 <= h.client < len(federation.sites)]
        declarations = {hello.client: hello.site for hello in hellos}
        if len(declarations) == len(federation.sites) or time.monotonic() > end:
            return declarations
        time.sleep(POLL_SECONDS)


def print_progress(progress: Progress) -> None:
    """Prints one line per round into the app's log."""
    when = progress.when
    place = f"position {when.position + 1}, round {when.round + 1}"
    loss = progress.facts.get("loss")
    print(f"{progress.what} done: {place} ({progress.done} of {progress.total}), loss {loss}", flush=True)
