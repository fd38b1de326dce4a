"""The argument parser, and the groups of flags that several verbs share."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from profcil.errors import ConfigError, unknown

SELECTION = {
    "dataset": "dataset to learn (`profcil list datasets`)",
    "method": "method to learn it with (`profcil list methods`)",
    "setting": "heterogeneity of the stream: homogeneous or severe",
    "seed": "seed of all random numbers",
    "evaluate": "part of the dataset that is scored: test or validation",
    "preset": "settings that override the recipe: paper (the literal reading of the paper)",
}
OWN_DATA = ("data", "tasks")
MACHINE = {
    "device": "torch device: cpu, cuda or cuda:N",
    "threads": "torch threads; 0 = chosen by the data",
    "accelerate": "auto, or off for plain PyTorch: one client and one step after another (auto)",
    "transfer": "what is sent: changed (blocks that the receiver lacks) or full (as the paper counts)",
}


class Parser(argparse.ArgumentParser):
    """An argument parser without abbreviated flags. A mistake is a ConfigError that names the nearest valid flags."""

    def __init__(self, **kw: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kw)

    def read(self, args: list[str]) -> argparse.Namespace:
        """Parses the arguments. Names of flags are checked first: a misspelt flag may cause other errors."""
        before_dashes = args[: args.index("--")] if "--" in args else args
        for arg in before_dashes:
            flag = arg.partition("=")[0]
            if flag.startswith("--") and flag not in self._option_string_actions:
                raise unknown("option", flag, [o for o in self._option_string_actions if o.startswith("--")])
        return self.parse_args(args)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def selection_flags(parser: Parser) -> None:
    """Adds the recipe and the flags that override it. `profcil.resolve` parses and checks their values."""
    parser.add_argument("recipe", nargs="?", help="built-in recipe (NAME or NAME-severe) or a TOML file")
    for name, help in SELECTION.items():
        parser.add_argument(f"--{name}", help=help)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting (`profcil list settings`)"
    )
    parser.add_argument("--data", metavar="PATH", help="own data: a file or folder (docs/own-data.md)")
    parser.add_argument(
        "--tasks", metavar="N", help="own data: number of tasks, `arrival`, or a file with a task a line"
    )
    data_dir(parser)


def machine_flags(parser: Parser) -> None:
    """Adds the flags for device and threads."""
    for name, help in MACHINE.items():
        parser.add_argument(f"--{name}", help=help)


def data_dir(parser: Parser, *aliases: str) -> None:
    """Adds the flag for the folder of the datasets. With the alias --data it is also the path of own data."""
    parser.add_argument("--data-dir", *aliases, metavar="DIR", help="folder of the datasets ($PROFCIL_DATA, else data)")


def json_flag(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")


def progress_flags(parser: Parser) -> None:
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.add_argument("--tensorboard", action="store_true", help="also write scalars to RUN/tensorboard")


def resolve_args(args: argparse.Namespace) -> Any:
    """The complete configuration of the selection and machine flags."""
    import sys
    import warnings

    from profcil.errors import DataNote
    from profcil.resolve import resolve

    flags = {name: getattr(args, name, None) for name in (*SELECTION, *MACHINE, *OWN_DATA)}
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", DataNote)
        config = resolve(args.recipe, flags, args.set)
    for note in (w for w in notes if issubclass(w.category, DataNote)):
        print(f"profcil: note: {note.message}", file=sys.stderr)
    return config


def data_root(args: argparse.Namespace) -> Path:
    """The folder of the datasets, or the path of own data."""
    if getattr(args, "data", None):
        return Path(args.data)
    return Path(args.data_dir or os.environ.get("PROFCIL_DATA") or "data")


def count(number: int, what: str) -> str:
    """A number of things, e.g. 1 run or 2 runs."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=1))


def print_warning(sentence: str) -> None:
    print(sentence, file=sys.stderr)
