"""From a Flower app's settings to a run: which data, which plan, which folder."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profcil.deploy.federation import Federation, joint_plan, read_federation, unsound
from profcil.deploy.fleet import ADVICE, POLL, TooFew
from profcil.deploy.node_registry import Roster
from profcil.deploy.policy import Policy, read_policy
from profcil.deploy.readers import read_examples
from profcil.deploy.run_config import read_recipe
from profcil.deploy.server import Notes, serve
from profcil.engine.run import Progress
from profcil.engine.world import World, furnish, make_world
from profcil.errors import DataError, ProfcilError
from profcil.protocol.plan import Plan
from profcil.resolve import RunConfig


def start(grid: Any, settings: Mapping[str, Any]) -> Path:
    """Starts or resumes the run that an app describes."""
    config, policy = read_recipe(str(settings["recipe"])), read_policy(settings)
    out, data, notes = Path(str(settings["out"])), Path(str(settings["data-dir"])), Notes()
    roster = Roster(grid, run_name(out), notes)
    if settings.get("federation"):
        world = joint_world(config, read_federation(str(settings["federation"])), out, data, roster, policy)
    else:
        world = make_world(config, data)
    try:
        return serve(world, out, data, roster, notes, policy, say)
    except ProfcilError as error:
        notes({"event": "stopped", "reason": str(error)})
        raise


def run_name(out: Path) -> str:
    """The name under which sites keep what belongs to this run: that of a run to go on with, or a new one. It is a
    name, not a draw: two runs must never share it."""
    try:
        return str(json.loads((out / "run.json").read_text(encoding="utf-8"))["run"])
    except (OSError, ValueError, KeyError):
        return secrets.token_hex(8)


def joint_world(config: RunConfig, terms: Federation, out: Path, test: Path, roster: Roster, policy: Policy) -> World:
    """The server of real sites has a labelled test set and no other data; the plan is what the sites declare."""
    bundle = terms.bundle(read_examples(test, terms))
    if lacking := sorted(set(range(len(terms.classes))) - set(bundle.test.y.tolist())):
        raise DataError(f"{test} has no example of class '{terms.classes[lacking[0]]}'; every class must be tested")
    began = (out / "state.safetensors").exists()
    plan = Plan.load(out / "plan.npz") if began else enrol(config, terms, roster, policy)
    return furnish(config, bundle, plan)


def enrol(config: RunConfig, terms: Federation, roster: Roster, policy: Policy) -> Plan:
    """Waits for the sites; one that does not come in time has no data in this run."""
    until = time.monotonic() + policy.join
    while True:
        roster.look()
        said = {h.client: h.site for h in roster.there.values() if 0 <= h.client < len(terms.sites)}
        if len(said) == len(terms.sites) or time.monotonic() > until:
            break
        time.sleep(POLL)
    for client, reason in {c: unsound(site, terms) for c, site in said.items()}.items():
        if reason:
            roster.note({"event": "refused", "client": client, "reason": reason})
            del said[client]
    if len(said) < policy.min_replies:
        raise TooFew(f"{len(said)} of {len(terms.sites)} sites are there, {policy.min_replies} are needed; {ADVICE}")
    roster.note({"event": "enrolled", "sites": [terms.sites[c] for c in sorted(said)]})
    return joint_plan(terms, said, config.stream, config.seed)


def say(progress: Progress) -> None:
    """One line a round, for the app's log."""
    w, loss = progress.when, progress.facts.get("loss")
    print(f"{progress.what} {w.position}.{w.round} ({progress.done} of {progress.total}), loss {loss}", flush=True)
