"""Arguments: argparse whose mistakes are our errors, and the groups of flags that several verbs share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, NoReturn

from profcil.errors import ConfigError, unknown

SELECTION = {
    "dataset": "dataset to learn (`profcil list datasets`)",
    "method": "method to learn it with (`profcil list methods`)",
    "setting": "heterogeneity of the stream: homogeneous or severe",
    "seed": "seed of everything random",
    "evaluate": "which part is scored: test or validation",
    "preset": "settings above the recipe's: paper, the literal reading of the paper",
}
MACHINE = {
    "device": "torch device: cpu, cuda or cuda:N",
    "threads": "torch threads; 0 = a sensible number for the data",
    "accelerate": "auto, or off for plain PyTorch: one client and one step after another (auto)",
    "transfer": "what travels: changed (what the receiver lacks) or full (the paper's accounting)",
}


class Parser(argparse.ArgumentParser):
    """Never guesses an abbreviated flag; a mistake is a ConfigError that names the nearest valid flags."""

    def __init__(self, **kw: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kw)

    def read(self, args: list[str]) -> argparse.Namespace:
        """Flags are checked first: a misspelt one explains whatever else seems to be wrong."""
        for arg in args[: args.index("--")] if "--" in args else args:
            flag = arg.partition("=")[0]
            if flag.startswith("--") and flag not in self._option_string_actions:
                raise unknown("option", flag, [o for o in self._option_string_actions if o.startswith("--")])
        return self.parse_args(args)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def selection(parser: Parser) -> None:
    """What to learn: a recipe and what overrides it. Values are read and checked where the settings live."""
    parser.add_argument("recipe", nargs="?", help="built-in recipe (NAME or NAME-severe) or a TOML file")
    for name, help in SELECTION.items():
        parser.add_argument(f"--{name}", help=help)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting (`profcil list settings`)"
    )
    data_dir(parser)


def machine(parser: Parser) -> None:
    for name, help in MACHINE.items():
        parser.add_argument(f"--{name}", help=help)


def data_dir(parser: Parser) -> None:
    parser.add_argument("--data-dir", metavar="DIR", help="where the datasets lie ($PROFCIL_DATA, else data)")


def json_flag(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")


def progress_flags(parser: Parser) -> None:
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.add_argument("--tensorboard", action="store_true", help="also write scalars to RUN/tensorboard")


def resolved(args: argparse.Namespace) -> Any:
    """The complete configuration behind the selection flags."""
    from profcil.resolve import resolve

    return resolve(args.recipe, {name: getattr(args, name, None) for name in (*SELECTION, *MACHINE)}, args.set)


def data_root(args: argparse.Namespace) -> Path:
    return Path(args.data_dir or os.environ.get("PROFCIL_DATA") or "data")


def print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=1))
