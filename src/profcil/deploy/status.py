"""Where a deployment stands, from its run folder alone; it may be running, stopped or done."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from profcil.runs.reader import check_folder, event, held, read, readable, table

Made = TypeVar("Made")
TROUBLE = ("absent", "left", "late reply dropped", "second reply dropped", "claimed twice", "refused", "resumed")


def status(path: Path) -> dict[str, Any]:
    """Position, round, who answered, bytes, last scores and whatever went wrong."""
    path = Path(path)
    check_folder(path)
    with readable(path / "events.jsonl"):
        return gathered(path)


def gathered(path: Path) -> dict[str, Any]:
    config = read(path / "config.toml", named)
    facts: dict[str, Any] = read_if(path / "run.json", lambda found: found, {})
    events = read_events(path / "events.jsonl")
    state = "done" if facts.get("done") else "running" if held(path / "lock") else "stopped"
    return {
        "run": str(path),
        "method": config["method"],
        "dataset": config["dataset"],
        "state": state,
        "rounds": config["train"]["rounds"],
        **{k: facts.get(k) for k in ("position", "round", "seconds", "bytes", "metrics")},
        "last": next((e for e in reversed(events) if e["event"] == "asked"), None),
        "accuracy": read_if(path / "scores.json", accuracy, None),
        "flower_bytes": sum(sum(e["wire"].values()) for e in events if e["event"] == "asked"),
        "payload_bytes": sum(sum(e["payload"].values()) for e in events if e["event"] == "asked"),
        "trouble": troubles(events),
        "clients": answers(events),
    }


def named(text: str) -> dict[str, Any]:
    """The settings, where they say what the run is."""
    config = tomllib.loads(text)
    return config | {"method": config["method"], "dataset": config["dataset"], "train": dict(config["train"])}


def troubles(events: list[dict[str, Any]]) -> dict[str, int]:
    """What happened beside the plan, and how often."""
    counted = Counter(e["event"] for e in events if e["event"] in TROUBLE)
    for e in events:
        if e["event"] == "asked":
            counted["silent"] += len(e["silent"])
            counted["reply refused"] += len(e["refused"])
    return {k: n for k, n in sorted(counted.items()) if n}


def answers(events: list[dict[str, Any]]) -> dict[str, int]:
    """How often each client gave a reply that was taken."""
    counted = Counter(c for e in events if e["event"] == "asked" for c in e["answered"])
    return {str(c): counted[c] for c in sorted(counted)}


def accuracy(scores: dict[str, Any]) -> list[float | None] | None:
    """Per task at the last scored position, in percent; None for a task not introduced yet."""
    rows = [row for row in scores.get("correct", []) if any(v >= 0 for v in row)]
    if not rows:
        return None
    return [round(100 * v / n, 2) if v >= 0 and n else None for v, n in zip(rows[-1], scores["total"], strict=True)]


def describe(s: dict[str, Any]) -> str:
    """The same for people."""
    lines = [f"{s['run']}: {s['method']} on {s['dataset']}, {s['state']}"]
    where = "in the warm-up" if s["position"] is None else f"position {s['position']}, round {s['round']}"
    lines.append(
        f"next: {where}, of {s['rounds']} rounds a position" if s["state"] != "done" else "all positions scored"
    )
    if s["last"]:
        e = s["last"]
        silent, refused = e["silent"] or "none", "; ".join(f"{c}: {r}" for c, r in e["refused"].items()) or "none"
        lines.append(
            f"last asked ({e['stage']} {e['position']}.{e['round']}): answered {e['answered']}, silent {silent}"
        )
        lines.append(f"refused then: {refused}")
    lines.append("replies taken by client: " + (", ".join(f"{c}: {n}" for c, n in s["clients"].items()) or "none yet"))
    more = s["flower_bytes"] - s["payload_bytes"]
    lines.append(f"payload {s['payload_bytes']:,} bytes, and {more:,} that Flower's envelope adds")
    if s["accuracy"]:
        lines.append("accuracy by task: " + ", ".join("–" if a is None else f"{a:.1f}" for a in s["accuracy"]))
    if s["metrics"]:
        lines.append(", ".join(f"{k.upper()} {v:.2f}" for k, v in sorted(s["metrics"].items())))
    lines.append("beside the plan: " + (", ".join(f"{k} {n}" for k, n in s["trouble"].items()) or "nothing"))
    return "\n".join(lines)


def read_if(path: Path, make: Callable[[dict[str, Any]], Made], default: Made) -> Made:
    """What is made of a table; the default where a run has not come that far."""
    return read(path, lambda text: make(table(text))) if path.exists() else default


def read_events(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: the last one may be in the making."""
    if not path.exists():
        return []
    return read(path, lambda text: [event(line) for line in text[: text.rfind("\n") + 1].splitlines()])
