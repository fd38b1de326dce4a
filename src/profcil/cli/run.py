"""Learn a dataset with a method and write a run folder.

Settings come from the built-in recipe of the dataset, RECIPE, --preset, --setting, flags and --set, in this order.
Later ones override earlier ones.

If a finished run under runs/ (or in --out) has the same settings, data and code, it is shown and nothing is computed.

Several values, separated by commas, are a sweep: --set noise=0.1,0.2 --seed 0,1 runs all four combinations (--dataset,
--method and --setting may have several, too). Finished runs are reused. A value that is a list has brackets: [1,2].

--federation, --sites and --test simulate a deployment of sites with their own data (docs/deployment.md), with the same
bits: plain PyTorch is used unless --accelerate auto is given.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from profcil.cli.parser import (
    MACHINE,
    SELECTION,
    Parser,
    announce,
    data_root,
    json_flag,
    machine_flags,
    print_json,
    progress_flags,
    resolve_args,
    selection_flags,
    selection_of,
    with_notes,
)
from profcil.config import OWN, SITES
from profcil.errors import ConfigError

SWEEPS = "runs/sweep"  # default folder of the runs of a sweep


def add(parser: Parser) -> None:
    selection_flags(parser)
    machine_flags(parser)
    parser.add_argument("--federation", metavar="FILE", help="sites: the federation.toml of a deployment")
    parser.add_argument("--sites", metavar="FOLDER", nargs="+", default=[], help="sites: the folders of the sites")
    parser.add_argument(
        "--test", metavar="PATH", help="sites: labelled test data, as the server of a deployment has it"
    )
    parser.add_argument("--out", metavar="DIR", help="run folder (runs/DATASET-SETTING-METHOD-seedN)")
    parser.add_argument("--jobs", type=int, default=1, help="sweep: number of runs at the same time, one core each")
    parser.add_argument("--again", action="store_true", help="repeat a run even if an equal one is finished")
    parser.add_argument("--dry-run", action="store_true", help="show settings and expected work without running")
    parser.add_argument(
        "--early-stop",
        metavar="ROUNDS",
        help="end a position's rounds after this many without a better validation FAA (docs/studies.md)",
    )
    progress_flags(parser)
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    announce("loading", args.quiet)
    if args.early_stop is not None:
        args.set.append(f"train.early_stop={args.early_stop}")
    if args.federation or args.sites or args.test:
        return run_sites(args)
    from profcil.studies.sweep import is_sweep

    if is_sweep(selection_of(args), args.set):
        return run_sweep(args)
    config = resolve_args(args)
    if config.dataset == SITES:
        raise ConfigError("the data of sites is in their folders; give --federation, --sites and --test")
    if args.dry_run:
        return dry_run(config, data_root(args), args.json)
    from profcil.api import default_folder
    from profcil.engine.run import start

    loggers_of(args)  # a wrong one is refused also where an equal run is reused
    if reused := find_reused(config, args):
        print(f"reused: {reused} has the same settings, data and code; --again repeats it", file=sys.stderr)
        show(reused, args.json)
        return 0
    out = Path(args.out) if args.out else default_folder(config)
    run_and_show(lambda observe: start(config, out, data_root(args), observe), out, args)
    return 0


def find_reused(config: Any, args: argparse.Namespace) -> Path | None:
    """A finished run that is the same as the one asked for: in --out, or else in any folder under runs/."""
    from profcil.api import equal_run

    if args.again or args.tensorboard:  # events are written while a run is computed
        return None
    return equal_run(config, args.out, data_root(args))


def run_sweep(args: argparse.Namespace) -> int:
    """Runs every combination of the values that were given, and prints one table."""
    from profcil.cli.study import STORE, check_jobs, run_missing
    from profcil.reporting.study_table import summarise, table_text
    from profcil.reporting.sweep_table import sweep_cells as cells_of
    from profcil.studies.sweep import sweep_cells

    check_jobs(args.jobs)
    if args.again:
        raise ConfigError("--again repeats one run; to repeat a sweep give another folder with --out DIR")
    if args.tensorboard:
        raise ConfigError("--tensorboard is for one run, but several values were given; leave it out")
    cells = with_notes(lambda: sweep_cells(args.recipe, selection_of(args), args.set))
    args.out = args.out or SWEEPS
    args.store = STORE
    failures = run_missing(cells, args)
    rows = summarise(cells, Path(args.out))
    if args.json:
        print_json(rows)
    else:
        print(f"{table_text(*cells_of(rows))}\n\nrun folders: {args.out}")
    return 1 if failures else 0


def run_sites(args: argparse.Namespace) -> int:
    """Simulates a deployment of sites with their own data."""
    from profcil.api import default_folder
    from profcil.deploy.run_config import sites_config
    from profcil.deploy.sites.federation_file import read_federation
    from profcil.deploy.sites.simulation import SimulatedSites, start

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

    loggers = loggers_of(args)
    try:
        with run_observer(out, loggers, quiet=args.quiet) as observe:
            work(observe)
    except Interrupted as stop:
        raise KeyboardInterrupt(str(stop)) from None
    show(out, args.json)


def loggers_of(args: argparse.Namespace) -> list[Any]:
    """The loggers that the command line names."""
    from profcil.loggers.observer import make_loggers

    return make_loggers([*args.log, *(["tensorboard"] if args.tensorboard else [])])


def show(path: Path, as_json: bool) -> None:
    """Prints the results of a finished run, and its folder."""
    from profcil.reporting.tables import RESULT_COLUMNS, format_row, text_table
    from profcil.runs.reader import load_run, summarise_run

    run = load_run(path)
    if left_out := run.facts.get("tally", {}).get("skipped_sums"):
        note = f"{left_out:.0f} sums were left out, because fewer clients than privacy.sum_clients could take part"
        print(f"profcil: note: {note}", file=sys.stderr)
    result = summarise_run(run)
    if as_json:
        return print_json(result)
    columns = RESULT_COLUMNS | ({"simulated_seconds": "simulated s"} if "simulated_seconds" in result else {})
    print(text_table(list(columns.values()), [format_row(result, columns)]))
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
    from profcil import registry
    from profcil.model.net import MODEL
    from profcil.protocol.participation import participants, warmup_participants

    method = registry.find("methods", config.method).METHOD(config.params)
    used = MODEL if method.has_base else ()
    positions = world.plan.positions
    rounds = config.train.rounds
    warmup = config.warmup.rounds
    counts = [len(participants(world.plan, p, 0)) for p in range(positions)]
    weights = [t for block in world.net.weights(used).values() for t in block.values()]
    warmup_turns = warmup * len(warmup_participants(world.plan, 0)) if warmup else 0
    parameters = sum(p.numel() for p in world.net.trainable(used))
    model_bytes = sum(t.numel() * t.element_size() for t in weights)
    bundle = world.bundle
    spending = {"privacy_spent_at_the_end": expected_spending(config, world)} if world.protection else {}
    sizes = {"classes": len(bundle.names), "training_examples": len(bundle.train), "test_examples": len(bundle.test)}
    return {
        **(sizes if config.dataset in (OWN, SITES) else {}),
        "positions": positions,
        "rounds": positions * rounds,
        "warmup_rounds": warmup,
        "participants_per_round": counts,  # by position: there may be fewer clients with data than requested
        **({"rounds_left_out_of_sums": left_out(config, counts)} if config.privacy.secure_sum else {}),
        "client_turns": rounds * sum(counts),
        "warmup_client_turns": warmup_turns,
        "model_parameters": parameters,
        "bytes_per_model_broadcast": model_bytes,
        **spending,
    }


def expected_spending(config: Any, world: Any) -> str:
    """ε and δ of a whole run if all clients answer as planned, and the noise."""
    from profcil.privacy.meter import Meter

    protection = world.protection
    releases = protection.releases
    epsilon = Meter(protection).planned(releases)
    unit = config.privacy.unit
    steps = f" of {protection.steps} step{'s' if protection.steps > 1 else ''}" if protection.steps else ""
    replies = "1 reply" if releases == 1 else f"{releases:.0f} replies"
    return (
        f"ε = {epsilon:.4g} at δ = {config.privacy.delta:g} for each {unit}, by at most {replies}{steps} "
        f"with noise multiplier {protection.multiplier:.4g}"
    )


def left_out(config: Any, counts: Sequence[int]) -> int:
    """The rounds with too few participants for a secure sum, from the participants of each position."""
    too_small = [0 < count < config.privacy.sum_clients for count in counts]
    return config.train.rounds * sum(too_small)
