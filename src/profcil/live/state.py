"""How far a run is and how well it does, read from its folder while it is computed."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from profcil.deploy.status import count_problems, left_out, read_events, read_if_exists, state_name
from profcil.errors import RunFolderError
from profcil.reporting.looks import look_number, method_look
from profcil.reporting.paper import method_title
from profcil.runs.reader import dataset_title, finite_or_none
from profcil.runs.run_files import READ_ERRORS, parse_file

Events = Sequence[Mapping[str, Any]]
METRICS = ("faa", "cta", "af")


def describe_folder(path: Path) -> dict[str, Any]:
    """One run as plain values for the page. A folder that cannot be read is described by the reason."""
    try:
        return read_folder(path)
    except (RunFolderError, *READ_ERRORS) as error:
        return {"state": "unreadable", "reason": f"{path}: {error}"}


def read_folder(path: Path) -> dict[str, Any]:
    config = parse_file(path / "config.toml", tomllib.loads)
    facts: dict[str, Any] = read_if_exists(path / "run.json", lambda found: found, {})
    total: list[int] = read_if_exists(path / "scores.json", lambda found: found["total"], [])
    events = read_events(path / "events.jsonl")
    state = state_name(path, facts)
    described = describe_names(config) | describe_results(events, facts) | describe_sites(events)
    described |= describe_progress(config, events, len(total), state)
    return described | {"state": state, "advice": advise(path, facts) if state == "stopped" else ""}


def describe_names(config: Mapping[str, Any]) -> dict[str, Any]:
    method = config["method"]
    look = method_look(method)
    described = {"method": method, "title": method_title(method), "look": look_number(method), "marker": look.marker}
    described |= {"dataset": dataset_title(config), "setting": config["setting"], "seed": config["seed"]}
    return described | {"config": dict(config)}


def describe_results(events: Events, facts: Mapping[str, Any]) -> dict[str, Any]:
    """FAA, CTA and AF after the last position, FAA after each, the bytes sent and the last loss."""
    positions = [event for event in events if event["event"] == "position"]
    losses = [event.get("loss") for event in events if event["event"] == "round"]
    last = dict(positions[-1]) if positions else {}
    last |= {name: value for name, value in facts.items() if name == "bytes" and facts.get("done")}
    last |= facts.get("metrics", {})
    found = {name: known_number(last.get(name)) for name in (*METRICS, "bytes")}
    curve = [known_number(event.get("faa")) for event in positions]
    return found | {"curve": curve, "loss": known_number(losses[-1] if losses else None)}


def describe_progress(config: Mapping[str, Any], events: Events, positions: int, state: str) -> dict[str, Any]:
    """Rounds done and in all, the seconds of the stream so far, and those that are left at the mean speed so far."""
    rounds = int(config["train"]["rounds"])
    played = [event for event in events if event["event"] in ("round", "position")]
    last = played[-1] if played else None
    done = last["position"] * rounds + last["round"] + 1 if last else 0
    seconds = last["seconds"] if last else 0.0
    total = positions * rounds
    left = seconds / done * (total - done) if done and state == "running" else None
    scored = sum(event["event"] == "position" for event in played)
    described = {"done": done, "total": total, "rounds": rounds, "positions": positions, "scored": scored}
    return described | {"seconds": seconds, "left": left, "stage": stage_of(events, last)}


def stage_of(events: Events, last: Mapping[str, Any] | None) -> str:
    """The stage of a run that has not begun its stream: only a deployment says more than that it prepares."""
    if last is not None:
        return "stream"
    asked = [event["stage"] for event in events if event["event"] == "asked"]
    return str(asked[-1]) if asked else "before the stream"


def advise(path: Path, facts: Mapping[str, Any]) -> str:
    """How to continue a run that has stopped."""
    if "deployed" in facts.get("config", {}):
        return "flwr run, with the same app"
    if (path / "state.safetensors").exists():
        return f"profcil resume {shlex.quote(str(path))}"
    return "profcil run, with the same options as before; nothing was saved yet"


def describe_sites(events: Events) -> dict[str, Any]:
    """For a deployment: how many sites replied to the last request, who is left out, and the problems by kind."""
    asked = [event for event in events if event["event"] == "asked"]
    if not asked:
        return {"sites": None}
    last = asked[-1]
    silent = len(last["silent"]) + len(last["refused"])
    out = [f"{entry['who']}: {entry['reason']}" for entry in left_out([dict(event) for event in events])]
    problems = count_problems([dict(event) for event in events])
    return {"sites": {"answered": len(last["answered"]), "silent": silent, "left_out": out, "problems": problems}}


def known_number(value: Any) -> float | None:
    """A finite number, or None."""
    return finite_or_none(float(value)) if isinstance(value, int | float) else None
