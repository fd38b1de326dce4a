"""Run a method on real machines with Flower: `deploy app`, `deploy certs`, `deploy env`, `deploy demo`.

env    prints what Flower's programs should find in their environment: no telemetry, nothing downloaded or installed
app    writes a folder that `flwr run` takes; the server starts or goes on with the run folder --run
certs  writes certificates and keys for a trial
demo   plays a run with separate processes on this machine, compares it with the serial simulation to the bit, and
       prints what a round costs more than there; --ray uses Flower's simulation instead of SuperNodes
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from profcil.cli.parser import (
    MACHINE,
    SELECTION,
    Parser,
    data_root,
    json_flag,
    machine,
    print_json,
    resolved,
    selection,
)
from profcil.errors import ConfigError, unknown

DEMO = {"clients": 4, "participants": 2, "task_size": 4, "support": 1.0, "rounds": 3, "warmup.rounds": 1}


def add(parser: Parser) -> None:
    from profcil.deploy.policy import Policy

    parser.add_argument("action", metavar="ACTION", help="app, certs, env or demo")
    selection(parser)
    machine(parser)
    parser.add_argument("--out", metavar="DIR", help="where to write: the app, the certificates, or the demo")
    parser.add_argument("--run", metavar="DIR", help="app: run folder on the server (runs/deployed)")
    parser.add_argument("--federation", metavar="FILE", help="app: federation.toml, where sites bring their own data")
    parser.add_argument("--test", metavar="PATH", help="app: the server's labelled test data, with --federation")
    parser.add_argument("--host", action="append", default=[], help="certs: name or address of the server; may repeat")
    parser.add_argument("--nodes", type=int, help="certs: how many node keys (4); demo: how many clients (4)")
    parser.add_argument("--ray", action="store_true", help="demo: under Flower's Ray simulation")
    for name, setting in Policy.__dataclass_fields__.items():
        kind = type(setting.default)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=f"app: {setting.metadata['help']}")
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    if args.action not in ACTIONS:
        raise unknown("deploy action", args.action, ACTIONS)
    return ACTIONS[args.action](args)


def app(args: argparse.Namespace) -> int:
    """The app's folder, and what to do with it."""
    from profcil.deploy.app_folder import write_app

    out = Path(args.out or "app")
    write_app(out, settings(args))
    say(args, {"app": str(out)}, [f"app written to {out}", f"start it with `flwr run {out} SUPERLINK`"])
    return 0


def settings(args: argparse.Namespace) -> dict[str, Any]:
    from profcil.deploy.app_folder import settings_table
    from profcil.deploy.federation import read_federation
    from profcil.deploy.policy import Policy
    from profcil.deploy.run_config import sites_recipe

    rules = {n: getattr(args, n) for n in Policy.__dataclass_fields__ if getattr(args, n) is not None}
    Policy(**rules)  # a mistake shows here, not on the server
    terms = text_of(Path(args.federation)) if args.federation else ""
    if bool(terms) != bool(args.test):
        raise ConfigError("sites with data of their own need both --federation FILE and --test PATH; give both or none")
    flags = {n: getattr(args, n, None) for n in (*SELECTION, *MACHINE)}
    config = sites_recipe(read_federation(terms), args.recipe, flags, args.set) if terms else resolved(args)
    data = Path(args.test) if args.test else data_root(args)
    return settings_table(config, Path(args.run or "runs/deployed"), data, federation=terms, **rules)


def text_of(federation: Path) -> str:
    try:
        return federation.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{federation} cannot be read as TOML: {error}") from None


def certs(args: argparse.Namespace) -> int:
    from profcil.deploy.certs import write_certs

    needs("certs", "cryptography")
    out = Path(args.out or "certs")
    made = write_certs(out, args.host, 4 if args.nodes is None else args.nodes)
    say(args, {"files": [str(p) for p in made]}, [f"{p}" for p in made] + ["keep *.key and node-N secret"])
    return 0


def env(args: argparse.Namespace) -> int:
    from profcil.deploy.cluster import FLOWER_ENVIRONMENT

    say(args, dict(FLOWER_ENVIRONMENT), [f"export {name}={value}" for name, value in FLOWER_ENVIRONMENT.items()])
    return 0


def demo(args: argparse.Namespace) -> int:
    """A federation on this machine, and how it compares with the simulation."""
    needs("demo", "flwr", *(["ray"] if args.ray else []))
    from profcil.deploy.demo import play, report
    from profcil.engine.run import Interrupted
    from profcil.io.interrupts import ended_by_a_scheduler

    sized = DEMO | ({"clients": args.nodes} if args.nodes else {})
    args.set = [f"{k}={v}" for k, v in sized.items()] + args.set
    args.executor = "serial"
    out = Path(args.out) if args.out else unused(Path("runs/deploy-demo"))
    if (out / "run").exists():
        raise ConfigError(f"{out} holds a demo already; choose another --out")
    try:
        with ended_by_a_scheduler():
            found = play(resolved(args), out, data_root(args), ray=args.ray)
    except (Interrupted, KeyboardInterrupt):
        raise KeyboardInterrupt(f"interrupted; what was started is ended, {out} stays as it is") from None
    say(args, found, report(found))
    return 0 if found["same_bits"] else 1


def needs(action: str, *packages: str) -> None:
    """What an action cannot do without is there before it begins."""
    for name in packages:
        if find_spec(name) is None:
            raise ConfigError(
                f"`profcil deploy {action}` needs {name}, which is not installed; "
                "`pip install 'profcil[deploy]'` brings it"
            )


def unused(path: Path) -> Path:
    """The folder, numbered where something lies there already."""
    number = 1
    while (free := path if number == 1 else path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return free


def say(args: argparse.Namespace, values: dict[str, Any], lines: list[str]) -> None:
    if args.json:
        print_json(values)
    else:
        print("\n".join(lines))


ACTIONS = {"app": app, "certs": certs, "env": env, "demo": demo}
