"""Starts a run from the settings of a Flower app: chooses the data, the plan and the run folder."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profcil.deploy.bounds import bound_arrays
from profcil.deploy.policy import Policy, read_policy
from profcil.deploy.run_config import config_from_text
from profcil.deploy.server.bindings import Bindings
from profcil.deploy.server.fleet import POLL_SECONDS, RESUME_ADVICE, TooFewClients
from profcil.deploy.server.growth import FILE, SiteGrowth
from profcil.deploy.server.node_registry import NodeRegistry
from profcil.deploy.server.serve import EventBuffer, serve
from profcil.deploy.sites.declarations import declaration_error, joint_plan
from profcil.deploy.sites.enrolment import Enrolment, enrolment_of_json
from profcil.deploy.sites.federation import Federation
from profcil.deploy.sites.federation_file import read_federation
from profcil.deploy.sites.readers import read_test_examples
from profcil.engine.recorder import Progress
from profcil.engine.world import World, build_world, make_world
from profcil.errors import ProfcilError, RunFolderError
from profcil.io.atomic_files import read_tensors, write_text
from profcil.resolve import RunConfig


def start(grid: Any, settings: Mapping[str, Any]) -> Path:
    """Starts or resumes the run that an app describes."""
    config = config_from_text(str(settings["recipe"]))
    policy = read_policy(settings)
    bound_arrays(policy.max_message_mb * 1e6)
    out = Path(str(settings["out"]))
    data = Path(str(settings["data-dir"]))
    events = EventBuffer()
    registry = NodeRegistry(grid, run_name(out), events.record, Bindings(rebind=policy.rebind))
    if settings.get("federation"):
        world = make_sites_world(config, str(settings["federation"]), out, data, registry, policy)
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
    config: RunConfig, federation: str, out: Path, test: Path, registry: NodeRegistry, policy: Policy
) -> World:
    """The server's world for sites with their own data: it has test data only, and the plan that sites declare."""
    file = out / FILE
    text = file.read_text(encoding="utf-8") if file.is_file() else federation
    terms = read_federation(text)
    registry.bindings.expected = {terms.sites.index(site): key for site, key in terms.keys.items()}
    saved = read_tensors(out / "state.safetensors")
    enrolment = saved_enrolment(out, saved[1]["facts"]) if saved else enrol_sites(terms, registry, policy)
    if enrolment.position or text != federation:
        registry.terms = {"federation": text, "position": enrolment.position}
    terms = terms.at(enrolment.position)
    bundle = terms.bundle(read_test_examples(test, terms))
    plan = joint_plan(terms, enrolment.declarations, config.stream, config.seed, enrolment.order_array())
    registry.enrolled = sorted(enrolment.declarations)
    world = build_world(config, bundle, plan)
    world.growth = SiteGrowth(text, file, test, registry, policy, enrolment)
    if not file.exists():
        write_text(file, text)
    return world


def saved_enrolment(out: Path, facts: Mapping[str, Any]) -> Enrolment:
    """Which sites take part in a run that is resumed, and what they declared."""
    if "enrolment" not in facts:
        raise RunFolderError(
            f"{out} was begun by a version that did not record the declarations of sites; resume it with that version, "
            "or start a new run in another folder"
        )
    return enrolment_of_json(facts["enrolment"])


def enrol_sites(federation: Federation, registry: NodeRegistry, policy: Policy) -> Enrolment:
    """Waits for the sites. One that does not connect in time may join at a later position."""
    declarations = wait_for_declarations(federation, registry, policy)
    left_out = reasons_to_leave_out(federation, declarations, registry, policy)
    for site, reason in left_out.items():
        print(f"LEFT OUT: site {site}: {reason}", flush=True)
        registry.record_event({"event": "left out", "site": site, "reason": reason})
    valid = {c: declaration for c, declaration in declarations.items() if federation.sites[c] not in left_out}
    enrolment = Enrolment().extended(federation.at(0), valid, 0)
    clients = sorted(enrolment.declarations)
    if len(clients) < policy.min_replies:
        reasons = "; ".join(f"site {site}: {reason}" for site, reason in left_out.items())
        raise TooFewClients(
            f"{len(clients)} of {len(federation.sites)} sites are connected, {policy.min_replies} are needed "
            f"({reasons}); {RESUME_ADVICE}"
        )
    names = [federation.sites[c] for c in clients]
    registry.record_event({"event": "enrolled", "sites": names, "clients": clients})
    return enrolment


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
        declarations = {hello.client: hello.site for hello in reversed(hellos)}  # the first claim counts
        if len(declarations) == len(federation.sites) or time.monotonic() > end:
            return declarations
        time.sleep(POLL_SECONDS)


def print_progress(progress: Progress) -> None:
    """Prints one line per round into the app's log."""
    when = progress.when
    place = f"position {when.position + 1}, round {when.round + 1}"
    loss = progress.facts.get("loss")
    print(f"{progress.what} done: {place} ({progress.done} of {progress.total}), loss {loss}", flush=True)
