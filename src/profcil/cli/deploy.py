"""Run a method on real machines with Flower: `deploy init`, `check`, `app`, `worker`, `certs`, `env` and `demo`.

init   writes a folder with federation.toml, certificates, and templates of containers and services:
       `deploy init DIR --host NAME --from SITE ... --test PATH`; with --test, the app too
check  says what the folder of a site has, what is wrong with it, and what would leave it; nothing is sent, and the exit
       status is 0 if the site can join, else 2: `deploy check SITE --federation FILE`; for the folder of an app it
       prints the app's digest, too, which `profcil-supernode --allow-apps FILE` compares
app    writes a folder that `flwr run` accepts; the server starts or resumes the run in the run folder --run
worker computes the messages of a SuperNode on this machine and stays up between them: `deploy worker --port N`, beside
       `flower-supernode ... --isolation process --port N`
certs  writes certificates and keys for tests
env    prints environment variables for Flower's programs: no telemetry, no downloads, no installation of packages
demo   runs separate processes on this machine, checks that the result has the same bits as the serial simulation, and
       prints the overhead per round; --ray uses Flower's simulation instead of SuperNodes
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
    machine_flags,
    print_json,
    resolve_args,
    selection_flags,
)
from profcil.errors import ConfigError, unknown

DEMO_SETTINGS = {"clients": 4, "participants": 2, "task_size": 4, "support": 1.0, "rounds": 3, "warmup.rounds": 1}
DEFAULT_NODES = 4


def add(parser: Parser) -> None:
    parser.add_argument(
        "action",
        metavar="ACTION",
        help="init, check, app, worker, certs, env or demo; init is followed by a new folder, check by that of a site",
    )
    parser.usage = "profcil deploy ACTION [DIR or RECIPE] [options]"
    parser.add_argument("--out", metavar="DIR", help="app, certs, demo: the folder that is written")
    json_flag(parser)
    add_site_flags(parser)
    add_machine_flags(parser)
    add_fault_flags(parser)
    selection_flags(parser)
    machine_flags(parser)


def add_site_flags(parser: Parser) -> None:
    sites = parser.add_argument_group("sites with their own data")
    sites.add_argument(
        "--federation", metavar="FILE", help="init, check, app: federation.toml; check also takes the folder of an app"
    )
    sites.add_argument("--from", dest="sites", metavar="SITE", nargs="+", default=[], help="init: folders of sites")
    sites.add_argument("--test", metavar="PATH", help="init, app: the server's labelled test data, with --federation")


def add_machine_flags(parser: Parser) -> None:
    machines = parser.add_argument_group("the machines")
    machines.add_argument("--run", metavar="DIR", help="init, app: run folder on the server (runs/deployed)")
    machines.add_argument(
        "--host", action="append", default=[], help="init, certs: name or address of the server; can be repeated"
    )
    machines.add_argument("--nodes", type=int, help="certs: number of node keys (4); demo: number of clients (4)")
    machines.add_argument(
        "--port", type=int, default=9094, help="worker: the port of the SuperNode on this machine (9094)"
    )
    machines.add_argument("--worker", action="store_true", help="demo: compute each node's messages by `deploy worker`")
    machines.add_argument("--ray", action="store_true", help="demo: use Flower's Ray simulation")


def add_fault_flags(parser: Parser) -> None:
    """A flag for every field of `Policy`."""
    from profcil.deploy.policy import Policy

    faults = parser.add_argument_group("app: clients that are late, absent or faulty")
    for name, setting in Policy.__dataclass_fields__.items():
        metavar = "SECONDS" if "seconds" in setting.metadata["help"] else "N"
        kind: dict[str, Any] = {"type": type(setting.default), "metavar": metavar}
        if isinstance(setting.default, bool):
            kind = {"action": "store_true", "default": None}
        faults.add_argument(f"--{name.replace('_', '-')}", **kind, help=setting.metadata["help"])


def run(args: argparse.Namespace) -> int:
    if args.action not in ACTIONS:
        raise unknown("deploy action", args.action, ACTIONS)
    return ACTIONS[args.action](args)


def init(args: argparse.Namespace) -> int:
    """Writes the folder of a new deployment."""
    from profcil.deploy.local.init_folder import Deployment, write_deployment

    if not args.recipe:
        raise ConfigError("`profcil deploy init` needs a new folder; give it as `profcil deploy init DIR`")
    require_packages("init", "cryptography")
    federation = first_federation(args)
    if args.test and not federation:
        raise ConfigError("an app needs the terms of the sites; give --federation FILE or --from SITE ... with --test")
    test = Path(args.test) if args.test else None
    deployment = Deployment(Path(args.recipe), args.host, federation, test)
    args.recipe = None  # it was the folder
    if test:
        sites_config_of(args, federation)  # raises an error before anything is written
    files = write_deployment(deployment)
    if test:
        files.append(write_first_app(args, deployment))
    names = [str(file) for file in files]
    print_result(args, {"files": names}, [*names, f"read {deployment.folder / 'README.md'} next"])
    return 0


def first_federation(args: argparse.Namespace) -> str:
    """The text of the federation.toml of a new deployment; empty if nothing is known about the sites."""
    from profcil.deploy.local.init_folder import federation_of_sites

    if args.federation and args.sites:
        raise ConfigError("--federation and --from both give the terms of the sites; give one of them")
    if args.sites:
        return federation_of_sites([Path(site) for site in args.sites])
    return read_text(Path(args.federation)) if args.federation else ""


def write_first_app(args: argparse.Namespace, deployment: Any) -> Path:
    """Writes the app of a new deployment."""
    from profcil.deploy.app_folder import write_app

    folder = Path(deployment.folder)
    args.federation = str(folder / "federation.toml")
    args.run = args.run or str(deployment.runs / "deployed")
    write_app(folder / "app", app_settings(args))
    return folder / "app"


def check(args: argparse.Namespace) -> int:
    """Checks the folder of a site."""
    from profcil.deploy.sites.site_check import check_site, describe, read_terms

    if not args.recipe:
        raise ConfigError("`profcil deploy check` needs the folder of a site; give it as `profcil deploy check SITE`")
    beside = Path(args.recipe) / "federation.toml"
    federation = Path(args.federation) if args.federation else beside
    terms = None
    method = ""
    if args.federation or beside.is_file():
        terms, method = read_terms(federation)
    found = check_site(Path(args.recipe), terms, args.method or method)
    if federation.is_dir() and find_spec("flwr"):
        from profcil.deploy.client.allowed_apps import app_digest

        found.app = app_digest(federation)
    print_result(args, found.as_json(), list(describe(found)))
    return 2 if found.faults else 0


def worker(args: argparse.Namespace) -> int:
    """Computes the messages of a SuperNode on this machine until it is stopped."""
    require_packages("worker", "flwr")
    from profcil.deploy.client.worker import work

    work(args.port)
    return 0


def app(args: argparse.Namespace) -> int:
    """Writes the app's folder."""
    from profcil.deploy.app_folder import write_app

    out = Path(args.out or "app")
    write_app(out, app_settings(args))
    print_result(args, {"app": str(out)}, [f"app written to {out}", f"start it with `flwr run {out} SUPERLINK`"])
    return 0


def app_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The app's settings from the flags, checked here so that a mistake is not found on the server."""
    from profcil.deploy.app_folder import settings_table
    from profcil.deploy.policy import Policy

    rules = {n: getattr(args, n) for n in Policy.__dataclass_fields__ if getattr(args, n) is not None}
    Policy(**rules)  # raises an error if a value is out of range
    federation = read_text(Path(args.federation)) if args.federation else ""
    if bool(federation) != bool(args.test):
        raise ConfigError("sites with their own data need both --federation FILE and --test PATH; give both or none")
    args.accelerate = args.accelerate or "off"  # the bits of a simulation on the reference path
    config = sites_config_of(args, federation) if federation else resolve_args(args)
    data = Path(args.test) if args.test else data_root(args)
    return settings_table(config, Path(args.run or "runs/deployed"), data, federation=federation, **rules)


def sites_config_of(args: argparse.Namespace, federation: str) -> Any:
    """The configuration of a run on the sites' own data."""
    from profcil.deploy.run_config import sites_config
    from profcil.deploy.sites.federation_file import read_federation

    flags = {name: getattr(args, name, None) for name in (*SELECTION, *MACHINE)}
    return sites_config(read_federation(federation), args.recipe, flags, args.set)


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from None


def certs(args: argparse.Namespace) -> int:
    """Writes certificates and keys."""
    from profcil.deploy.local.certs import write_certs

    require_packages("certs", "cryptography")
    nodes = DEFAULT_NODES if args.nodes is None else args.nodes
    files = [str(path) for path in write_certs(Path(args.out or "certs"), args.host, nodes)]
    print_result(args, {"files": files}, [*files, "keep *.key and node-N secret"])
    return 0


def env(args: argparse.Namespace) -> int:
    """Prints the environment variables as shell commands."""
    from profcil.deploy.local.cluster import FLOWER_ENVIRONMENT

    lines = [f"export {name}={value}" for name, value in FLOWER_ENVIRONMENT.items()]
    print_result(args, dict(FLOWER_ENVIRONMENT), lines)
    return 0


def demo(args: argparse.Namespace) -> int:
    """Runs a federation on this machine and compares it with the simulation."""
    require_packages("demo", "flwr", *(["ray"] if args.ray else []))
    from profcil.deploy.local.demo import report, run_demo
    from profcil.engine.run import Interrupted
    from profcil.io.interrupts import stop_signals_as_interrupt

    settings = DEMO_SETTINGS | ({"clients": args.nodes} if args.nodes else {})
    args.set = [f"{k}={v}" for k, v in settings.items()] + args.set
    args.accelerate = args.accelerate or "off"
    out = Path(args.out) if args.out else unused_folder(Path("runs/deploy-demo"))
    if (out / "run").exists():
        raise ConfigError(f"{out} already has a demo; choose another --out")
    try:
        with stop_signals_as_interrupt():
            found = run_demo(resolve_args(args), out, data_root(args), ray=args.ray, worker=args.worker)
    except (Interrupted, KeyboardInterrupt):
        raise KeyboardInterrupt(f"interrupted; all started processes are stopped, the files in {out} remain") from None
    print_result(args, found, report(found))
    return 0 if found["same_bits"] else 1


def require_packages(action: str, *packages: str) -> None:
    """Raises an error if a package that an action needs is not installed."""
    for name in packages:
        if find_spec(name) is None:
            raise ConfigError(
                f"`profcil deploy {action}` needs {name}, which is not installed; "
                "install it with `pip install 'profcil[deploy]'`"
            )


def unused_folder(path: Path) -> Path:
    """The path, with a number at its end if it already exists."""
    candidate = path
    number = 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def print_result(args: argparse.Namespace, values: dict[str, Any], lines: list[str]) -> None:
    """Prints the values as JSON with --json, else the lines."""
    if args.json:
        print_json(values)
    else:
        print("\n".join(lines))


ACTIONS = {"init": init, "check": check, "app": app, "worker": worker, "certs": certs, "env": env, "demo": demo}
