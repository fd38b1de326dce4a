"""What the sites of a federation agree on before a run: modality, classes, tasks, and which sites take part.

federation.toml is part of the app. Each site also has a manifest.toml, which names its data and says which classes
arrive at which position. The server learns how many examples of each class a site has. It receives no examples.

Classes may be declared later than the start: `reserve` is the number of them that the model has outputs for, and each
[[later]] table names a position and the tasks that are known from it on (`Federation.at`).
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from profcil.config import SITES
from profcil.data.bundle import Bundle, Examples, Facts
from profcil.data.input_format import InputFormat
from profcil.data.loading import check_bundle, fingerprint
from profcil.data.own.assemble import ENCODERS, VIEWS
from profcil.errors import ConfigError, nearest, unknown
from profcil.protocol.plan import Plan, assemble
from profcil.protocol.settings import StreamSettings

LISTS = "sites, views, columns and tasks"
FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")
MAX_SIZE = 10_000_000  # of a text's length, a vocabulary, a side of an image or the features of a node
LAST_POSITION = 10_000_000  # later than any position


@dataclass(frozen=True)
class Later:
    """Tasks that are declared after the start."""

    position: int  # from which they are known, counted from 1
    tasks: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Federation:
    """The agreed terms. Class ids follow the order in which the tasks name the classes."""

    modality: str
    tasks: tuple[tuple[str, ...], ...]
    sites: tuple[str, ...]
    length: int = 32  # texts: number of tokens read from each
    vocabulary: int = 10_000  # texts: number of token ids; a word's id is a hash, so no site shares its words
    shape: tuple[int, ...] = (1, 28, 28)  # images: channels, height, width
    features: int = 0  # graphs: number of features of a node
    columns: tuple[str, ...] = ()  # tables: names of the columns that are inputs
    mean: tuple[float, ...] = ()  # tables: the mean of each column, about; empty = 0
    std: tuple[float, ...] = ()  # tables: the deviation of each column, about; empty = 1
    views: tuple[str, ...] | None = None  # augmentations that keep the label; None = the modality's default
    encoder: str = ""  # empty = the modality's default
    max_examples: int = 1_000_000  # that one site may declare; they are its weight in averages
    keys: Mapping[str, str] = field(default_factory=dict)  # site → fingerprint of its node's key
    reserve: int = 0  # classes that may be declared later
    later: tuple[Later, ...] = ()
    declared: tuple[int, ...] = ()  # the position from which each task is known; not part of the file

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(name for task in self.tasks for name in task)

    @property
    def grows(self) -> bool:
        """Whether classes may be declared later, or have been."""
        return self.reserve > 0 or any(self.declared)

    def at(self, position: int) -> Federation:
        """The terms at a position, counted from 0. Reserved classes are used by the tasks declared until then."""
        due = [entry for entry in self.later if entry.position - 1 <= position]
        tasks = [(entry.position - 1, task) for entry in due for task in entry.tasks]
        used = sum(len(task) for _, task in tasks)
        first = self.declared or (0,) * len(self.tasks)
        return replace(
            self,
            tasks=(*self.tasks, *(task for _, task in tasks)),
            declared=(*first, *(p for p, _ in tasks)),
            later=self.later[len(due) :],
            reserve=self.reserve - used,
        )

    def task_ids(self) -> tuple[tuple[int, ...], ...]:
        """The tasks, with class ids instead of names."""
        ids = {name: i for i, name in enumerate(self.classes)}
        return tuple(tuple(ids[name] for name in task) for task in self.tasks)

    def facts(self) -> Facts:
        views = VIEWS[self.modality] if self.views is None else self.views
        encoder = self.encoder or ENCODERS[self.modality]
        classes = len(self.classes) + self.reserve
        return Facts(SITES, "the federation", self.modality, classes, None, None, views=views, encoder=encoder)

    def input_format(self) -> InputFormat:
        """How a raw input becomes tensors, the same at every site."""
        if self.modality == "text":
            return InputFormat("text", (self.length,), splitter="words", vocabulary=self.vocabulary)
        if self.modality == "table":
            return InputFormat("table", (len(self.columns),), columns=self.columns)
        shape = self.shape if self.modality == "image" else (self.features,)
        return InputFormat(self.modality, shape)

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The means and deviations by which inputs are scaled, the same at every site."""
        if self.modality == "table":
            count = len(self.columns)
            mean = tuple(map(float, self.mean)) or (0.0,) * count
            return mean, tuple(map(float, self.std)) or (1.0,) * count
        channels = self.shape[0] if self.modality == "image" else 0
        return (0.5,) * channels, (0.25,) * channels

    def bundle(self, examples: Examples, test: Examples | None = None) -> Bundle:
        """Examples as a dataset. Without test examples, the examples are both parts."""
        mean, std = self.statistics()
        vocabulary = self.vocabulary if self.modality == "text" else 0
        form = self.input_format()
        scored = examples if test is None else test
        names = (*self.classes, *(f"(reserved {i + 1})" for i in range(self.reserve)))
        bundle = Bundle(self.facts(), examples, scored, None, names, vocabulary, mean, std, input_format=form)
        check_bundle(bundle)
        return replace(bundle, fingerprint=fingerprint(bundle))


def read_federation(text: str, source: str = "federation.toml") -> Federation:
    """The terms from the text of a federation.toml. Any mistake in it raises a ConfigError."""
    values = parse_toml(text, source)
    known = {f.name for f in fields(Federation)} - {"declared"}
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown setting '{key}' in {source}; {nearest(key, known)}")
    try:
        later = read_later(values.pop("later", []), source)
        federation = Federation(**{key: lists_to_tuples(value) for key, value in values.items()}, later=later)
    except TypeError:
        raise ConfigError(f"{source} must give modality, tasks and sites; docs/deployment.md describes them") from None
    check_types(federation, source)
    if federation.modality not in ENCODERS:
        raise unknown("modality", str(federation.modality), ENCODERS)
    check_columns(federation, source)
    check_keys(federation, source)
    for names in (federation.sites, federation.classes):
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"{source} must name at least one site and one class, and none of them twice")
    check_later(federation, source)
    return federation


def read_later(tables: Any, source: str) -> tuple[Later, ...]:
    """The [[later]] tables."""
    found = []
    for table in tables if isinstance(tables, list) else [tables]:
        is_table = isinstance(table, dict) and table.keys() == {"position", "tasks"}
        tasks = lists_to_tuples(table["tasks"]) if is_table else ()
        are_lists = isinstance(tasks, tuple) and bool(tasks) and all(isinstance(task, tuple) for task in tasks)
        if not are_lists or not is_count(table["position"], 2):
            raise wrong_type(source, "a [[later]] table", "position = N (from 2 on) and tasks = [[...]]")
        if not all(isinstance(name, str) for task in tasks for name in task):
            raise wrong_type(source, "the tasks of a [[later]] table", "lists of texts")
        found.append(Later(table["position"], tasks))
    return tuple(found)


def check_later(federation: Federation, source: str) -> None:
    """Checks that later tasks come in order, before the last position begins, and within the reserve."""
    if not is_count(federation.reserve, 0):
        raise wrong_type(source, "reserve", "a whole number of at least 0")
    positions = len(federation.tasks)
    before = 2
    for entry in federation.later:
        if not before <= entry.position <= positions:
            raise ConfigError(
                f"{source} declares tasks from position {entry.position} on, allowed is {before} to {positions}: in "
                "order, and before the last position of the tasks known until then begins"
            )
        before = entry.position
        positions += len(entry.tasks)
    names = [name for entry in federation.later for task in entry.tasks for name in task]
    if len(names) > federation.reserve:
        raise ConfigError(
            f"{source} declares {len(names)} classes later, but reserve = {federation.reserve}; a run has room for its "
            "reserve only, so raise it before the run starts"
        )
    if len({*names, *federation.classes}) < len(names) + len(federation.classes):
        raise ConfigError(f"{source} names a class twice; name each class once, at the start or later")


def check_types(federation: Federation, source: str) -> None:
    """Refuses values of a wrong type, and sizes below 1."""
    texts = (federation.modality, federation.encoder)
    tasks = checked_list(federation.tasks, source, "tasks", "lists")
    lists = (federation.sites, federation.views or (), federation.columns, *tasks)
    for name, value in zip(("modality", "encoder"), texts, strict=True):
        if not isinstance(value, str):
            raise wrong_type(source, name, "a text")
    for value in lists:
        if not all(isinstance(item, str) for item in checked_list(value, source, LISTS, "texts")):
            raise wrong_type(source, LISTS, "lists of texts")
    for numbers in (federation.mean, federation.std):
        if not all(is_number(item) for item in checked_list(numbers, source, "mean and std", "numbers")):
            raise wrong_type(source, "mean and std", "lists of finite numbers")
    if not all(is_count(size, 1) for size in (federation.length, federation.vocabulary)):
        raise wrong_type(source, "length and vocabulary", "whole numbers of at least 1")
    if not is_count(federation.max_examples, 1):
        raise wrong_type(source, "max_examples", f"a whole number from 1 to {MAX_SIZE}")
    if not is_count(federation.features, 0):
        raise wrong_type(source, "features", "a whole number of at least 0")
    shape = checked_list(federation.shape, source, "shape", "whole numbers")
    if len(shape) != 3 or not all(is_count(size, 1) for size in shape):
        raise wrong_type(source, "shape", "three whole numbers: channels, height and width")


def checked_list(value: Any, source: str, name: str, of: str) -> tuple[Any, ...]:
    if not isinstance(value, tuple):
        raise wrong_type(source, name, f"a list of {of}")
    return value


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def is_count(value: Any, low: int) -> bool:
    return type(value) is int and low <= value <= MAX_SIZE


def wrong_type(source: str, name: str, expected: str) -> ConfigError:
    return ConfigError(f"{source} gives {name} in a wrong form, it must be {expected}; docs/deployment.md shows one")


def check_columns(federation: Federation, source: str) -> None:
    """Checks that a table has columns, and one mean and one deviation of each or none."""
    count = len(federation.columns)
    if federation.modality == "table" and not count:
        raise ConfigError(f"{source} must name the columns of the table; write columns = [...]")
    for name in ("mean", "std"):
        given = len(getattr(federation, name))
        if given not in (0, count):
            raise ConfigError(f"{source} has {given} values in {name} for {count} columns; give one for each column")
    if any(value <= 0 for value in federation.std):
        raise ConfigError(f"{source} has a deviation (std) that is not above 0; give positive numbers")


def check_keys(federation: Federation, source: str) -> None:
    """Checks that keys are fingerprints of sites, each of one site only."""
    keys = federation.keys
    if not isinstance(keys, Mapping) or not all(FINGERPRINT.fullmatch(str(key)) for key in keys.values()):
        raise wrong_type(source, "keys", "a table of sites with fingerprints SHA256:... as `ssh-keygen -l` prints them")
    for site in keys:
        if site not in federation.sites:
            raise unknown("site", site, federation.sites)
    if len(set(keys.values())) < len(keys):
        raise ConfigError(f"{source} gives one key to two sites; each site has a key of its own")


def lists_to_tuples(value: Any) -> Any:
    """A TOML value in which lists, and lists within them, are tuples."""
    if not isinstance(value, list):
        return value
    return tuple(tuple(inner) if isinstance(inner, list) else inner for inner in value)


def parse_toml(text: str, source: object) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} cannot be read as TOML: {error}") from None


def declaration_error(declaration: Mapping[str, Any], federation: Federation) -> str:
    """What is wrong with a site's declaration, which comes over the network. Empty if it is valid."""
    tasks = federation.task_ids()
    try:
        order = {int(p): int(t) for p, t in declaration["order"].items()}
        counts = {int(y): int(n) for y, n in declaration["counts"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        return "the declaration cannot be read"
    if not {*order, *order.values()} <= set(range(len(tasks))) or len(set(order.values())) < len(order):
        return "the declared order names positions or tasks that do not exist, or one task twice"
    if not counts or not set(counts) <= {y for t in order.values() for y in tasks[t]}:
        return "the declaration names no class, or a class whose task never arrives"
    if min(counts.values()) < 1 or sum(counts.values()) > federation.max_examples:
        return (
            f"the declared counts are not from 1 of each class to {federation.max_examples} in all; "
            "max_examples in federation.toml sets the limit"
        )
    if not is_count(declaration.get("joins", 0), 0):
        return "the position from which the site takes part is not a whole number"
    return ""


def complete_orders(
    orders: Sequence[Mapping[int, int]], tasks: int, before: Sequence[Sequence[int]] = ()
) -> np.ndarray:
    """Each site's order over all positions, sites × positions.

    A site without data at a position is given a task that it has no data of, and is idle there, as in the paper. Of the
    remaining tasks it is given the one that arrives first at any site. `before` are the orders at the positions that
    have passed: a site keeps the idle tasks that it had there, unless it has data of them now.
    """
    arrivals = [first_position(task, orders, default=tasks) for task in range(tasks)]
    rows = []
    for site, order in enumerate(orders):
        kept = {p: t for p, t in enumerate(before[site] if before else ()) if t not in order.values()}
        filled = {**kept, **order}
        remaining = sorted(set(range(tasks)) - set(filled.values()), key=lambda t: (arrivals[t], t))
        rows.append([filled[p] if p in filled else remaining.pop(0) for p in range(tasks)])
    return np.array(rows, dtype=np.int64)


def first_position(task: int, orders: Sequence[Mapping[int, int]], default: int) -> int:
    """The first position at which a task arrives at any site."""
    return min((p for order in orders for p, t in order.items() if t == task), default=default)


def joint_plan(
    federation: Federation,
    declarations: Mapping[int, Mapping[str, Any]],
    settings: StreamSettings,
    seed: int,
    orders: np.ndarray | None = None,
) -> Plan:
    """The plan of all sites. The server has no examples; it makes one label for each declared example. `orders` are
    those of a plan that has grown."""
    declared = [declared_order(declarations.get(c, {})) for c in range(len(federation.sites))]
    clients: list[int] = []
    labels: list[int] = []
    counts: list[int] = []
    for client, declaration in sorted(declarations.items()):
        for label, count in declaration["counts"].items():
            clients.append(client)
            labels.append(int(label))
            counts.append(int(count))
    y = np.repeat(labels, counts).astype(np.int64)
    owner = np.repeat(clients, counts).astype(np.int64)
    complete = complete_orders(declared, len(federation.tasks)) if orders is None else orders
    joined = joined_positions(federation, declarations)
    return assemble(y, owner, federation.task_ids(), complete, settings, seed, joined, federation.declared)


def joined_positions(federation: Federation, declarations: Mapping[int, Mapping[str, Any]]) -> tuple[int, ...]:
    """The position from which each site takes part; 0 also for a site that is left out."""
    return tuple(int(declarations.get(c, {}).get("joined", 0)) for c in range(len(federation.sites)))


def declared_order(declaration: Mapping[str, Any]) -> dict[int, int]:
    return {int(p): int(t) for p, t in declaration.get("order", {}).items()}
