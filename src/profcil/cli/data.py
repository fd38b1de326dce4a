"""Show, check or download datasets: `data status`, `data verify`, `data fetch NAME`, `data examples NAME --out DIR`."""

from __future__ import annotations

import argparse
from pathlib import Path

from profcil.cli.parser import Parser, data_dir, data_root, json_flag, print_json
from profcil.errors import ConfigError, count, unknown


def add(parser: Parser) -> None:
    parser.add_argument(
        "action", metavar="ACTION", help="status, verify (checksums and counts), fetch (download) or examples"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="datasets (status: all; verify: all that are present)")
    parser.add_argument("--out", metavar="DIR", help="examples: folder for test images, one folder per class")
    parser.add_argument("--count", default="3", metavar="N", help="examples: how many images (3)")
    parser.add_argument("--seed", default="0", metavar="N", help="examples: seed of a split that is drawn (0)")
    data_dir(parser)
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from profcil import registry

    if args.action not in (*ACTIONS, "examples"):
        raise unknown("data action", args.action, (*ACTIONS, "examples"))
    for name in args.names:
        if name not in registry.names("data"):
            raise unknown("dataset", name, registry.names("data"))
    if args.action == "examples":
        return examples(args)
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

    states = {
        (True, True): "complete",
        (True, None): "unknown",
        (True, False): "damaged",
        (False, False): "missing",
    }
    lines = []
    for row in rows:
        state = states[row["present"], row["complete"]]
        missing = shorten(row["missing"])
        lines.append([row["dataset"], row["modality"], state, row["where"], missing, row["how"]])
    return text_table(["dataset", "modality", "state", "where", "what is missing", "how to get it"], lines)


def shorten(items: list[str]) -> str:
    """The first item and the number of the others."""
    if len(items) > 1:
        return f"{items[0]} and {len(items) - 1} more"
    return "".join(items)


def verify(names: list[str], root: Path, as_json: bool) -> int:
    """Checks the named datasets, or all that are present. A named dataset that is missing is a fault."""
    from profcil.data import loading

    names = names or [row["dataset"] for row in loading.status(root) if row["present"]]
    rows = [{"dataset": name, "faults": loading.verify(root, name)} for name in names]
    if as_json:
        print_json([{**row, "ok": not row["faults"]} for row in rows])
    else:
        for row in rows:
            for fault in row["faults"] or ["ok"]:
                print(f"{row['dataset']}: {fault}")
    return int(any(row["faults"] for row in rows))


def fetch(names: list[str], root: Path, as_json: bool) -> int:
    from profcil import registry
    from profcil.cli.progress import download_observer
    from profcil.data import fetch as fetching

    if not names:
        raise ConfigError(f"data fetch needs a dataset; name one or more of {', '.join(registry.names('data'))}")
    rows = []
    for name in names:
        facts = registry.find("data", name).FACTS
        with download_observer() as progress:
            fetched = fetching.fetch(facts, root, progress) if facts.files else []
        rows.append({"dataset": facts.name, "files": [str(path) for path in fetched]})
    if as_json:
        print_json(rows)
    else:
        for row in rows:
            result = f"{count(len(row['files']), 'file')} in {root}" if row["files"] else why_nothing(row["dataset"])
            print(f"{row['dataset']}: {result}")
    return 0


def why_nothing(name: str) -> str:
    """Why there is nothing to download for a dataset."""
    from profcil import registry

    return "its FACTS list no files to fetch" if name in registry.plugins("data") else "built in"


def examples(args: argparse.Namespace) -> int:
    """Writes test images of one dataset as files, to try a model on them."""
    if len(args.names) != 1 or not args.out:
        raise ConfigError("data examples needs one dataset and a folder; give NAME --out DIR")
    if not args.count.isdecimal() or not args.seed.isdecimal() or int(args.count) < 1:
        raise ConfigError(f"--count {args.count} --seed {args.seed} is not possible; give whole numbers")
    from profcil.data._examples import write_images
    from profcil.data.loading import load_bundle

    bundle = load_bundle(args.names[0], data_root(args), int(args.seed))
    paths = [str(path) for path in write_images(bundle, Path(args.out), int(args.count))]
    print_json(paths) if args.json else print("\n".join(paths))
    return 0


ACTIONS = {"status": status, "verify": verify, "fetch": fetch}
