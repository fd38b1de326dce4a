"""See, check or download datasets: `data status`, `data verify`, `data fetch NAME`."""

from __future__ import annotations

import argparse
from pathlib import Path

from profcil.cli.parser import Parser, data_dir, data_root, json_flag, print_json
from profcil.errors import ConfigError, unknown


def add(parser: Parser) -> None:
    parser.add_argument("action", metavar="ACTION", help="status, verify (checksums and counts) or fetch (download)")
    parser.add_argument("names", nargs="*", metavar="NAME", help="datasets; status and verify take all there are")
    data_dir(parser)
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from profcil import registry

    if args.action not in ACTIONS:
        raise unknown("data action", args.action, ACTIONS)
    for name in args.names:
        if name not in registry.names("data"):
            raise unknown("dataset", name, registry.names("data"))
    return ACTIONS[args.action](args.names, data_root(args), args.json)


def status(names: list[str], root: Path, as_json: bool) -> int:
    from profcil.data import loading

    rows = [row for row in loading.status(root) if not names or row["dataset"] in names]
    if as_json:
        print_json(rows)
    else:
        print(status_text(rows))
    return 0


def status_text(rows: list[dict]) -> str:
    from profcil.reporting.tables import text_table

    word = {
        (True, True): "complete",
        (True, None): "not known",
        (True, False): "not as it should be",
        (False, False): "not there",
    }
    lines = [
        [r["dataset"], r["modality"], word[r["present"], r["complete"]], r["where"], few(r["missing"]), r["how"]]
        for r in rows
    ]
    return text_table(["dataset", "modality", "state", "where", "what is missing", "how to get it"], lines)


def few(items: list[str]) -> str:
    return f"{items[0]} and {len(items) - 1} more" if len(items) > 1 else "".join(items)


def verify(names: list[str], root: Path, as_json: bool) -> int:
    """Without names: whatever is there. A dataset that was asked for and is not there is wrong."""
    from profcil.data import loading

    names = names or [row["dataset"] for row in loading.status(root) if row["present"]]
    rows = [{"dataset": name, "faults": loading.verify(root, name)} for name in names]
    if as_json:
        print_json([{**row, "ok": not row["faults"]} for row in rows])
    else:
        print("\n".join(f"{r['dataset']}: {fault}" for r in rows for fault in r["faults"] or ["as it should be"]))
    return int(any(row["faults"] for row in rows))


def fetch(names: list[str], root: Path, as_json: bool) -> int:
    from profcil import registry
    from profcil.cli.progress import downloading
    from profcil.data import fetch as fetching

    if not names:
        raise ConfigError(f"data fetch was given no dataset; name one or more of {', '.join(registry.names('data'))}")
    rows = []
    for facts in (registry.find("data", name).FACTS for name in names):
        with downloading() as progress:
            got = fetching.fetch(facts, root, progress) if facts.files else []
        rows.append({"dataset": facts.name, "files": [str(path) for path in got]})
    if as_json:
        print_json(rows)
    else:
        for row in rows:
            print(
                f"{row['dataset']}: {len(row['files'])} files under {root}"
                if row["files"]
                else f"{row['dataset']}: {unlisted(row['dataset'])}"
            )
    return 0


def unlisted(name: str) -> str:
    """Why nothing is fetched for a dataset without files."""
    from profcil import registry

    return "its FACTS list no files to fetch" if name in registry.plugins("data") else "built in"


ACTIONS = {"status": status, "verify": verify, "fetch": fetch}
