"""Collect finished runs in a results store: `results add`, `results list`, `results page`.

add RUN ...    adds a row per run to DATASET.csv of the store; a folder of runs (a study's) stands for all runs in it,
               and another store, e.g. of another machine, for all its rows
list           shows which methods and settings the store has, with the number of seeds and their FAA
page FILE ...  writes the tables of Markdown pages anew, between `<!-- table: dataset=cora -->` and `<!-- end -->`

A run needs its folder without state.safetensors. The same run again changes nothing. A run with the settings, version
and execution of a row but another result is refused. `table`, `figure`, `report` and `compare` accept a store, too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from profcil.cli.parser import Parser, json_flag, print_json
from profcil.errors import ConfigError, count, unknown


def add(parser: Parser) -> None:
    parser.add_argument("action", metavar="ACTION", help="add, list or page")
    parser.add_argument("paths", nargs="*", metavar="PATH", help="add: runs, folders of runs, or stores; page: files")
    parser.add_argument("--store", default="results", metavar="DIR", help="folder of the store (results)")
    parser.add_argument("--dataset", help="list: only this dataset")
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    if args.action not in ACTIONS:
        raise unknown("results action", args.action, ACTIONS)
    if bool(args.paths) == (args.action == "list"):
        needed = {"add": "name run folders", "list": "leave the path out", "page": "name a file, e.g. docs/results.md"}
        raise ConfigError(f"`results {args.action}` was given {len(args.paths)} paths; {needed[args.action]}")
    if args.dataset and args.action != "list":
        raise ConfigError(f"--dataset was given with `results {args.action}`, it is for `results list`; leave it out")
    return ACTIONS[args.action](args)


def add_to_store(args: argparse.Namespace) -> int:
    from profcil.runs.gather import find_run_folders
    from profcil.runs.reader import load_run
    from profcil.runs.results.store import add_runs, add_stores, is_store

    stores = [path for path in args.paths if is_store(path)]
    if stores and len(stores) < len(args.paths):
        raise ConfigError(f"{stores[0]} is a results store and other paths are runs; add them by two commands")
    if stores:
        result = add_stores(stores, Path(args.store))
    else:
        runs = [load_run(path) for path in find_run_folders(args.paths)]
        result = add_runs(runs, Path(args.store))
    if args.json:
        files = [str(path) for path in result.files]
        print_json({"added": result.added, "unchanged": result.unchanged, "files": files})
        return 0
    for text in result.added:
        print(f"added: {text}")
    for text in result.unchanged:
        print(f"already there: {text}")
    print(f"{args.store}: {count(len(result.added), 'row')} added, {len(result.unchanged)} were already there")
    return 0


def show_list(args: argparse.Namespace) -> int:
    from profcil.reporting.store_tables import list_store
    from profcil.reporting.tables import text_table

    rows = list_store(Path(args.store), args.dataset)
    if args.json:
        print_json(rows)
        return 0
    heads = ["dataset", "method", "setting", "part", "seeds", "FAA", "profcil", "settings"]
    lines = []
    for row in rows:
        spread = "" if row["sd"] is None else f" ± {row['sd']:.2f}"
        faa = f"{row['faa']:.2f}{spread}"
        names = [row[key] for key in ("dataset", "method", "setting", "part")]
        lines.append([*names, str(len(row["seeds"])), faa, row["profcil"], row["settings"]])
    print(text_table(heads, lines))
    return 0


def write_pages(args: argparse.Namespace) -> int:
    from profcil.reporting.results_page import update

    counts = {path: update(Path(path), Path(args.store)) for path in args.paths}
    if args.json:
        print_json(counts)
    else:
        print("\n".join(f"{path}: {count(tables, 'table')}" for path, tables in counts.items()))
    return 0


ACTIONS = {"add": add_to_store, "list": show_list, "page": write_pages}
