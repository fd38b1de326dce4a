"""The status of a deployment, read from its run folder alone. The run may be running, stopped or done."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from profcil.errors import count
from profcil.io.texts import one_line
from profcil.runs.run_files import (
    check_folder,
    explain_read_errors,
    is_locked,
    parse_event,
    parse_file,
    parse_json_table,
)

Made = TypeVar("Made")
LONGEST_LINE = 10_000  # characters; a line lists every client
PROBLEMS = (
    *("absent", "left", "late reply dropped", "second reply dropped", "claimed twice", "refused", "resumed"),
    "unreadable",
)


def status(path: Path) -> dict[str, Any]:
    """Position, round, replies by client, bytes, last scores and problems."""
    path = Path(path)
    check_folder(path)
    with explain_read_errors(path / "events.jsonl"):
        return read_status(path)


def read_status(path: Path) -> dict[str, Any]:
    config = parse_file(path / "config.toml", parse_config)
    facts: dict[str, Any] = read_if_exists(path / "run.json", lambda found: found, {})
    events = read_events(path / "events.jsonl")
    asked = [e for e in events if e["event"] == "asked"]
    return {
        "run": str(path),
        "method": config["method"],
        "dataset": config["dataset"],
        "state": state_name(path, facts),
        "simulated": bool(facts) and "deployed" not in facts.get("config", {}),
        "rounds": config["train"]["rounds"],
        **{k: facts.get(k) for k in ("position", "round", "seconds", "bytes", "metrics")},
        "last": asked[-1] if asked else None,
        "accuracy": read_if_exists(path / "scores.json", accuracy, None),
        "flower_bytes": sum(sum(e["wire"].values()) for e in asked),
        "payload_bytes": sum(sum(e["payload"].values()) for e in asked),
        "left_out": left_out(events),
        "trouble": count_problems(events),
        "dropped": count_dropped(events),
        "quarantined": sorted({c for e in events for c in e.get("quarantined", [])}),
        "clients": count_replies(asked),
        "ages": count_ages(asked),
        "at_work": asked[-1].get("at_work", []) if asked else [],
        "sites": facts.get("sites", {}),
    }


def state_name(path: Path, facts: dict[str, Any]) -> str:
    if facts.get("done"):
        return "done"
    return "running" if is_locked(path / "lock") else "stopped"


def parse_config(text: str) -> dict[str, Any]:
    """The run's settings. Raises an error if method, dataset or train is missing."""
    config = tomllib.loads(text)
    return config | {"method": config["method"], "dataset": config["dataset"], "train": dict(config["train"])}


def count_problems(events: list[dict[str, Any]]) -> dict[str, int]:
    """How often each kind of problem occurred."""
    counts = Counter(e["event"] for e in events if e["event"] in PROBLEMS)
    for e in events:
        if e["event"] == "asked":
            counts["silent"] += len(e["silent"])
            counts["reply refused"] += len(e["refused"])
            counts["sum given up"] += bool(e.get("given_up"))
    return {k: n for k, n in sorted(counts.items()) if n}


def count_dropped(events: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """How many replies of each client were dropped by robust aggregation, and the last reason."""
    found: dict[str, dict[str, Any]] = {}
    for e in events:
        for client, reason in e.get("dropped", {}).items():
            earlier = found.get(client, {"replies": 0})
            found[client] = {"replies": earlier["replies"] + 1, "reason": reason}
    return {client: found[client] for client in sorted(found, key=int)}


def left_out(events: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Who takes no part in the run, and why: sites, nodes that were refused, and clients without a usable reply."""
    found: dict[str, str] = {}
    names: dict[int, str] = {}  # of the sites that take part, by client
    for e in events:
        if e["event"] in ("left out", "refused", "claimed twice") and "reason" in e:
            who = f"site {e['site']}" if e.get("site") else f"node {e.get('node')}"
            found[who] = e["reason"]
        elif e["event"] in ("enrolled", "extended"):
            names |= dict(zip(e.get("clients", []), e["sites"], strict=False))
            for name in e["sites"]:
                found.pop(f"site {name}", None)
        elif e["event"] == "joined":  # the site has come back
            found.pop(f"site {names.get(e['client'])}", None)
    asked = [e for e in events if e["event"] == "asked"]
    found |= {client_name(c, names): reason for c, reason in without_usable_reply(asked).items()}
    return [{"who": who, "reason": reason} for who, reason in found.items()]


def client_name(client: str, names: dict[int, str]) -> str:
    """A client for people: the site's name where it is known."""
    name = names.get(int(client))
    return f"site {name}" if name else f"client {client}"


def without_usable_reply(asked: list[dict[str, Any]]) -> dict[str, str]:
    """The clients that were asked and never sent a usable reply, each with the last reason."""
    reasons: dict[str, str] = {}
    for e in asked:
        reasons |= {str(c): "it has not replied to any request" for c in e["silent"]}
        reasons |= {str(c): f"none of its replies could be used ({why})" for c, why in e["refused"].items()}
    accepted = {str(c) for e in asked for c in e["answered"]}
    return {c: reason for c, reason in reasons.items() if c not in accepted}


def count_replies(asked: list[dict[str, Any]]) -> dict[str, int]:
    """The number of accepted replies by client."""
    counts = Counter(c for e in asked for c in e["answered"])
    return {str(c): counts[c] for c in sorted(counts)}


def count_ages(asked: list[dict[str, Any]]) -> dict[str, dict[int, int]]:
    """Of a server that does not wait for all: how many replies of each client, to turns, were how many updates old."""
    found: dict[str, Counter[int]] = {}
    for arrival in (a for e in asked for a in e.get("arrivals", []) if a["what"] == "turn"):
        found.setdefault(str(arrival["client"]), Counter())[arrival["age"]] += 1
    return {client: dict(sorted(found[client].items())) for client in sorted(found, key=int)}


def age_lines(s: dict[str, Any]) -> Iterator[str]:
    """How old replies were when they were used, and who is at work."""
    if not s["ages"]:
        return
    total = sum((Counter(ages) for ages in s["ages"].values()), Counter())
    yield "age of replies in updates: " + ", ".join(f"{age}: {total[age]}" for age in sorted(total))
    if late := {client: max(ages) for client, ages in s["ages"].items() if max(ages)}:
        yield "oldest reply of each late client: " + ", ".join(f"{client}: {age}" for client, age in late.items())
    if s["at_work"] and s["state"] != "done":
        yield "at work: " + ", ".join(f"client {client} for {count(age, 'update')}" for client, age in s["at_work"])


def site_lines(sites: dict[str, dict[str, str]]) -> Iterator[str]:
    """How most sites compute, and each site that computes differently."""
    if not sites:
        return
    kinds = Counter(tuple(facts.items()) for facts in sites.values())
    usual = dict(kinds.most_common(1)[0][0])
    yield f"execution at {count(kinds.total(), 'site')}: " + ", ".join(
        f"{k} {v}" for k, v in usual.items() if v != "none"
    )
    for client, facts in sites.items():
        if others := [f"{k} {v}" for k, v in facts.items() if v != usual.get(k)]:
            yield f"client {client} computes differently, so that bits may differ: {', '.join(others)}"


def accuracy(scores: dict[str, Any]) -> list[float | None] | None:
    """Accuracy per task at the last scored position, in percent. None for a task that has not arrived yet."""
    rows = [row for row in scores.get("correct", []) if any(v >= 0 for v in row)]
    if not rows:
        return None
    return [round(100 * v / n, 2) if v >= 0 and n else None for v, n in zip(rows[-1], scores["total"], strict=True)]


def describe(status: dict[str, Any]) -> str:
    """The status as text. Positions and rounds are counted from 1 here."""
    return "\n".join(one_line(line, LONGEST_LINE) for line in description_lines(status))


def description_lines(s: dict[str, Any]) -> Iterator[str]:
    for entry in s["left_out"]:
        yield f"LEFT OUT: {entry['who']}: {entry['reason']}"
    yield f"{s['run']}: {s['method']} on {s['dataset']}, {s['state']}"
    yield next_step(s)
    if s["last"]:
        yield from last_request_lines(s["last"])
    if s["simulated"]:
        yield f"a simulation in one process; {s['bytes'] or 0:,} bytes sent in the stream"
    else:
        yield from reply_lines(s)
    for client, facts in s["dropped"].items():
        ending = "; it is not asked again" if int(client) in s["quarantined"] else ""
        yield f"client {client}: {facts['replies']} replies dropped, last because {facts['reason']}{ending}"
    if s["accuracy"]:
        yield "accuracy by task: " + ", ".join("–" if a is None else f"{a:.1f}" for a in s["accuracy"])
    if s["metrics"]:
        yield ", ".join(f"{k.upper()} {v:.2f}" for k, v in sorted(s["metrics"].items()))
    if not s["simulated"]:
        yield "problems: " + (", ".join(f"{k} {n}" for k, n in s["trouble"].items()) or "none")


def reply_lines(s: dict[str, Any]) -> Iterator[str]:
    """The replies, the sites and the bytes of a deployment."""
    yield "accepted replies by client: " + (", ".join(f"{c}: {n}" for c, n in s["clients"].items()) or "none yet")
    yield from age_lines(s)
    yield from site_lines(s["sites"])
    envelope = s["flower_bytes"] - s["payload_bytes"]
    yield f"payload {s['payload_bytes']:,} bytes; Flower's envelope adds {envelope:,} bytes"


def next_step(s: dict[str, Any]) -> str:
    """What the run does next."""
    if s["state"] == "done":
        return "all positions are scored"
    if s["position"] is None:
        return f"next: in the warm-up, then {s['rounds']} rounds per position"
    return f"next: position {from_one(s['position'])}, round {from_one(s['round'])} of {s['rounds']}"


def last_request_lines(e: dict[str, Any]) -> Iterator[str]:
    """The outcome of the last requests to clients."""
    yield f"last request ({moment(e)}): answered {e['answered']}, silent {e['silent'] or 'none'}"
    yield "refused: " + ("; ".join(f"{c}: {reason}" for c, reason in e["refused"].items()) or "none")


def moment(e: dict[str, Any]) -> str:
    """When an event happened, for people."""
    return f"{e['stage']}, position {from_one(e['position'])}, round {from_one(e['round'])}"


def from_one(number: Any) -> Any:
    """A number counted from 1. Any other value, as a file or a message may have it, stays as it is."""
    return number + 1 if isinstance(number, int) else number


def read_if_exists(path: Path, make: Callable[[dict[str, Any]], Made], default: Made) -> Made:
    """A value made from a JSON file, or the default if the run has not written the file yet."""
    return parse_file(path, lambda text: make(parse_json_table(text))) if path.exists() else default


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a run. An incomplete last line is left out: it may be being written."""
    if not path.exists():
        return []
    return parse_file(path, lambda text: [parse_event(line) for line in text[: text.rfind("\n") + 1].splitlines()])
