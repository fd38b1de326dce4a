"""Learn a dataset with a method and write a run folder.

Settings come from the built-in recipe of the dataset, RECIPE, --preset, --setting, flags and --set, in this order.
Later ones override earlier ones.

--federation, --sites and --test simulate a deployment of sites with their own data (docs/deployment.md), with the same
bits: plain PyTorch is used unless --accelerate auto is given.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from profcil.cli.parser import (
    MACHINE,
    SELECTION,
    Parser,
    data_root,
    json_flag,
    machine_flags,
    print_json,
    progress_flags,
    resolve_args,
    selection_flags,
)
from profcil.config import OWN, SITES
from profcil.errors import ConfigError


def add(parser: Parser) -> None:
    selection_flags(parser)
    machine_flags(parser)
    parser.add_argument("--federation", metavar="FILE", help="sites: the federation.toml of a deployment")
    parser.add_argument("--sites", metavar="FOLDER", nargs="+", default=[], help="sites: the folders of the sites")
    parser.add_argument(
        "--test", metavar="PATH", help="sites: labelled test data, as the server of a deployment has it"
    )
    parser.add_argument("--out", metavar="DIR", help="run folder (runs/DATASET-SETTING-METHOD-seedN)")
    parser.add_argument("--dry-run", action="store_true", help="show settings and expected work without running")
    progress_flags(parser)
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    if args.federation or args.sites or args.test:
        return run_sites(args)
    config = resolve_args(args)
    if config.dataset == SITES:
        raise ConfigError("the data of sites is in their folders; give --federation, --sites and --test")
    if args.dry_run:
        return dry_run(config, data_root(args), args.json)
    from profcil.api import default_folder
    from profcil.engine.run import start

    out = Path(args.out) if args.out else default_folder(config)
    run_and_show(lambda observe: start(config, out, data_root(args), observe), out, args)
    return 0


def run_sites(args: argparse.Namespace) -> int:
    """Simulates a deployment of sites with their own data."""
    from profcil.api import default_folder
    from profcil.deploy.federation import read_federation
    from profcil.deploy.run_config import sites_config
    from profcil.deploy.simulation import SimulatedSites, start

    if not (args.federation and args.sites and args.test):
        raise ConfigError("sites need --federation FILE, --sites FOLDER ... and --test PATH; give all three")
    if args.dataset or args.data or args.tasks:
        raise ConfigError("the data is that of the sites; leave out --dataset, --data and --tasks")
    text = Path(args.federation).read_text(encoding="utf-8")
    args.accelerate = args.accelerate or "off"  # the bits of the deployment
    flags = {name: getattr(args, name, None) for name in (*SELECTION, *MACHINE)}
    config = sites_config(read_federation(text, args.federation), args.recipe, flags, args.set)
    sites = SimulatedSites(text, tuple(map(Path, args.sites)), Path(args.test))
    if args.dry_run:
        return show_dry_run(config, lambda: expected_work(config, sites.make_world(config)), args.json)
    out = Path(args.out) if args.out else default_folder(config)
    run_and_show(lambda observe: start(sites, config, out, observe), out, args)
    return 0


def run_and_show(work: Callable[[Any], Any], out: Path, args: argparse.Namespace) -> None:
    """Runs or resumes with progress on stderr, then prints the result."""
    from profcil.cli.progress import run_observer
    from profcil.engine.run import Interrupted

    try:
        with run_observer(out, quiet=args.quiet, tensorboard=args.tensorboard) as observe:
            work(observe)
    except Interrupted as stop:
        raise KeyboardInterrupt(str(stop)) from None
    show(out, args.json)


def show(path: Path, as_json: bool) -> None:
    """Prints the results of a finished run, and its folder."""
    from profcil.reporting.tables import RESULT_COLUMNS, format_row, text_table
    from profcil.runs.reader import load_run, summarise_run

    result = summarise_run(load_run(path))
    if as_json:
        return print_json(result)
    print(text_table(list(RESULT_COLUMNS.values()), [format_row(result, RESULT_COLUMNS)]))
    print(f"run folder: {path}")


def dry_run(config: Any, data: Path, as_json: bool) -> int:
    """Prints the settings and the expected work of a run on a dataset or on own data."""
    from profcil.engine.world import make_world

    return show_dry_run(config, lambda: expected_work(config, make_world(config, data)), as_json)


def show_dry_run(config: Any, find_work: Callable[[], dict[str, Any]], as_json: bool) -> int:
    """Prints the settings as a recipe, and the expected work. Without the data only the settings are known."""
    from profcil.errors import DataError
    from profcil.resolve import to_toml, values_of

    work = None
    missing = None
    try:
        work = find_work()
    except DataError as error:
        missing = str(error)
    if as_json:
        print_json({"settings": values_of(config), "work": work, "lacking": missing})
        return 0
    facts = [f"{name.replace('_', ' ')}: {value}" for name, value in (work or {}).items()]
    lines = facts or [f"the expected work is unknown without the data: {missing}"]
    print(to_toml(config) + "\n" + "\n".join(f"# {line}" for line in lines))
    return 0


def expected_work(config: Any, world: Any) -> dict[str, Any]:
    """Rounds, client turns and model size, counted from the plan and the model of the run."""
    from profcil.model.net import MODEL
    from profcil.protocol.participation import participants, warmup_participants

    positions = world.plan.positions
    rounds = config.train.rounds
    warmup = config.warmup.rounds
    counts = [len(participants(world.plan, p, 0)) for p in range(positions)]
    weights = [t for block in world.net.weights(MODEL).values() for t in block.values()]
    warmup_turns = warmup * len(warmup_participants(world.plan, 0)) if warmup else 0
    parameters = sum(p.numel() for p in world.net.trainable(MODEL))
    model_bytes = sum(t.numel() * t.element_size() for t in weights)
    bundle = world.bundle
    sizes = {"classes": len(bundle.names), "training_examples": len(bundle.train), "test_examples": len(bundle.test)}
    return {
        **(sizes if config.dataset in (OWN, SITES) else {}),
        "positions": positions,
        "rounds": positions * rounds,
        "warmup_rounds": warmup,
        "participants_per_round": counts,  # by position: there may be fewer clients with data than requested
        "client_turns": rounds * sum(counts),
        "warmup_client_turns": warmup_turns,
        "model_parameters": parameters,
        "bytes_per_model_broadcast": model_bytes,
    }
