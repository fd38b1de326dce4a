"""The argument parser, and the groups of flags that several verbs share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from profcil.errors import ConfigError, unknown
from profcil.errors import count as count  # for the verbs

SELECTION = {
    "dataset": "dataset to learn (`profcil list datasets`)",
    "method": "method to learn it with (`profcil list methods`)",
    "setting": "heterogeneity of the stream: homogeneous or severe",
    "seed": "seed of all random numbers",
    "evaluate": "part of the dataset that is scored: test or validation",
    "preset": "settings that override the recipe: paper (its literal reading), plus (PRO-MAX+, beyond the paper), or "
    "chosen (baselines as chosen on validation data)",
}
OWN_DATA = ("data", "tasks")
MACHINE = {
    "device": "torch device: cpu, cuda or cuda:N",
    "threads": "torch threads; 0 = chosen by the data",
    "accelerate": "auto, or off for plain PyTorch: one client and one step after another (auto)",
    "transfer": "what is sent: changed (blocks that the receiver lacks) or full (as the paper counts)",
}

Flags = argparse._ActionsContainer  # a parser, or a group of flags in one


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
    group = parser.add_argument_group("what is learned")
    for name, help in SELECTION.items():
        group.add_argument(f"--{name}", help=help)
    group.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting (`profcil list settings`)"
    )
    group.add_argument("--data", metavar="PATH", help="own data: a file or folder (docs/own-data.md)")
    group.add_argument(
        "--tasks", metavar="N", help="own data: number of tasks, `arrival`, or a file with a task a line"
    )
    data_dir(group)


def machine_flags(parser: Parser) -> None:
    """Adds the flags for device and threads."""
    group = parser.add_argument_group("how it is computed")
    for name, help in MACHINE.items():
        group.add_argument(f"--{name}", help=help)


def data_dir(parser: Flags, *aliases: str) -> None:
    """Adds the flag for the folder of the datasets. With the alias --data it is also the path of own data."""
    parser.add_argument("--data-dir", *aliases, metavar="DIR", help="folder of the datasets ($PROFCIL_DATA, else data)")


def json_flag(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")


def reading_flag(parser: Parser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="own.KEY=VALUE",
        help="read files otherwise than the training data: own.label, own.text, own.ignore, own.encoding",
    )


def progress_flags(parser: Parser) -> None:
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.add_argument(
        "--log", action="append", default=[], metavar="NAMES", help="also write values, e.g. csv,tensorboard"
    )
    parser.add_argument("--tensorboard", action="store_true", help="the same as --log tensorboard")


def resolve_args(args: argparse.Namespace) -> Any:
    """The complete configuration of the selection and machine flags."""
    from profcil.resolve import resolve

    return with_notes(lambda: resolve(args.recipe, selection_of(args), args.set))


def selection_of(args: argparse.Namespace) -> dict[str, Any]:
    """The values of the selection and machine flags."""
    return {name: getattr(args, name, None) for name in (*SELECTION, *MACHINE, *OWN_DATA)}


def with_notes(read: Callable[[], Any]) -> Any:
    """What `read` returns. Notes about data and code are printed, each once."""
    import warnings

    from profcil.errors import CodeNote, DataNote

    with warnings.catch_warnings(record=True) as notes:
        for kind in (CodeNote, DataNote):
            warnings.simplefilter("always", kind)
        found = read()
    for text in dict.fromkeys(str(note.message) for note in notes if issubclass(note.category, (CodeNote, DataNote))):
        print(f"profcil: note: {text}", file=sys.stderr)
    return found


def data_root(args: argparse.Namespace) -> Path:
    """The folder of the datasets, or the path of own data."""
    if getattr(args, "data", None):
        return Path(args.data)
    return Path(args.data_dir or os.environ.get("PROFCIL_DATA") or "data")


def print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=1))


def announce(what: str, quiet: bool = False) -> None:
    """Prints at once, on a terminal, what is being done: torch and the data take some seconds to load."""
    if sys.stderr.isatty() and not quiet:
        print(f"{what} ...", file=sys.stderr, flush=True)


def print_warning(sentence: str) -> None:
    print(sentence, file=sys.stderr)
