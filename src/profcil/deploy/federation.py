"""What the sites of a federation agree on before a run: kind of data, classes, tasks, and who takes part.

federation.toml travels with the app. A site's own manifest.toml says which file or folder holds its data and which
classes arrive at which position. The server learns how many examples of which class a site has, and no example.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from profcil.data.bundle import Bundle, Examples, Facts
from profcil.data.loading import check, fingerprint
from profcil.errors import ConfigError, nearest, unknown
from profcil.protocol.plan import Plan, assemble
from profcil.protocol.settings import StreamSettings

ENCODERS = {"image": "convnet", "text": "textcnn", "graph": "gat"}
MOST = 10_000_000  # examples of a class that a site can plausibly have
VIEWS = {"image": ("crop", "jitter"), "text": ("drop", "mask"), "graph": ("drop", "mask")}


@dataclass(frozen=True)
class Federation:
    """The terms; class ids follow the order in which the tasks name the classes."""

    modality: str
    tasks: tuple[tuple[str, ...], ...]
    sites: tuple[str, ...]
    length: int = 32  # texts: tokens of each that are read
    vocabulary: int = 10_000  # texts: token ids; words share them by a hash, so that no site's words are told
    shape: tuple[int, ...] = (1, 28, 28)  # images: channels, height, width
    features: int = 0  # graphs: numbers a node comes with
    views: tuple[str, ...] | None = None  # augmentations that keep the label; those of the modality
    encoder: str = ""  # the modality's own

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(name for task in self.tasks for name in task)

    def task_ids(self) -> tuple[tuple[int, ...], ...]:
        ids = {name: i for i, name in enumerate(self.classes)}
        return tuple(tuple(ids[name] for name in task) for task in self.tasks)

    def facts(self) -> Facts:
        m = self.modality
        views, encoder = VIEWS[m] if self.views is None else self.views, self.encoder or ENCODERS[m]
        return Facts("sites", "the federation", m, len(self.classes), None, None, views=views, encoder=encoder)

    def bundle(self, examples: Examples) -> Bundle:
        """Some examples as a dataset; images are scaled the same everywhere, whatever a site's own mean is."""
        channels = self.shape[0] if self.modality == "image" else 0
        mean, std = (0.5,) * channels, (0.25,) * channels
        size = self.vocabulary if self.modality == "text" else 0
        made = Bundle(self.facts(), examples, examples, None, self.classes, size, mean, std)
        check(made)
        return replace(made, fingerprint=fingerprint(made))


def read_federation(text: str, source: str = "federation.toml") -> Federation:
    """The terms from their file; whatever is wrong with it is one sentence."""
    values = loads(text, source)
    known = {f.name for f in fields(Federation)}
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown setting '{key}' in {source}; {nearest(key, known)}")
    lists = {
        k: tuple(tuple(v) if isinstance(v, list) else v for v in vs) for k, vs in values.items() if type(vs) is list
    }
    try:
        terms = Federation(**{**values, **lists})
    except TypeError:
        raise ConfigError(f"{source} must give modality, tasks and sites; see the page on deployment") from None
    if terms.modality not in ENCODERS:
        raise unknown("modality", str(terms.modality), ENCODERS)
    names = terms.classes
    if not terms.sites or not names or len(set(names)) < len(names) or len(set(terms.sites)) < len(terms.sites):
        raise ConfigError(f"{source} must name at least one site and one class, and none of them twice")
    return terms


def loads(text: str, source: object) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} cannot be read as TOML: {error}") from None


def unsound(said: Mapping[str, Any], terms: Federation) -> str:
    """What is wrong with a site's declaration, which comes from outside; empty where nothing is."""
    tasks = terms.task_ids()
    try:
        order = {int(p): int(t) for p, t in said["order"].items()}
        counts = {int(y): int(n) for y, n in said["counts"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        return "its declaration cannot be read"
    if not {*order, *order.values()} <= set(range(len(tasks))) or len(set(order.values())) < len(order):
        return "its order names positions or tasks that do not exist, or one twice"
    if not counts or not set(counts) <= {y for t in order.values() for y in tasks[t]}:
        return "it declares no class, or one of a task that never arrives"
    return "" if all(1 <= n <= MOST for n in counts.values()) else f"its counts are not all within 1 and {MOST}"


def fill(orders: Sequence[Mapping[int, int]], tasks: int) -> np.ndarray:
    """Every site's order over all positions. Where a site has nothing, it counts, as in the paper, as idle in a task it
    has no data of: the one that came first anywhere among those left."""
    came = [min((p for o in orders for p, t in o.items() if t == task), default=tasks) for task in range(tasks)]
    rows = []
    for order in orders:
        left = sorted(set(range(tasks)) - set(order.values()), key=lambda t: (came[t], t))
        rows.append([order[p] if p in order else left.pop(0) for p in range(tasks)])
    return np.array(rows, dtype=np.int64)


def joint_plan(
    terms: Federation, declared: Mapping[int, Mapping[str, Any]], settings: StreamSettings, seed: int
) -> Plan:
    """The stream of all sites from what they declare: numbers of examples stand for the examples."""
    orders = [
        {int(p): int(t) for p, t in declared.get(c, {}).get("order", {}).items()} for c in range(len(terms.sites))
    ]
    cells = [(c, int(y), int(n)) for c, said in sorted(declared.items()) for y, n in said["counts"].items()]
    labels = np.repeat([y for _, y, _ in cells], [n for _, _, n in cells]).astype(np.int64)
    owner = np.repeat([c for c, _, _ in cells], [n for _, _, n in cells]).astype(np.int64)
    return assemble(labels, owner, terms.task_ids(), fill(orders, len(terms.tasks)), settings, seed)
