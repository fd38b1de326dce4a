"""One site: its manifest, its data, and what it declares about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from profcil.data.bundle import Examples
from profcil.deploy.sites.declarations import complete_orders
from profcil.deploy.sites.federation import Federation
from profcil.deploy.sites.federation_file import parse_toml
from profcil.deploy.sites.readers import read_examples
from profcil.errors import DataError, unknown
from profcil.protocol.plan import Plan
from profcil.protocol.plan_making import assemble
from profcil.protocol.settings import StreamSettings

KEYS = ("site", "data", "position")  # that a manifest must have


@dataclass(frozen=True)
class Site:
    """A site's data and its declaration."""

    client: int
    examples: Examples
    order: Mapping[int, int]  # position → task, for positions at which the site has data
    counts: Mapping[int, int]  # class id → number of examples used
    joins: int = 0  # the first position at which the site takes part

    def declaration(self) -> dict[str, Any]:
        """What the site sends to the server about its data, as JSON values."""
        declaration = {
            "order": {str(position): task for position, task in self.order.items()},
            "counts": {str(label): count for label, count in self.counts.items()},
        }
        return {**declaration, "joins": self.joins} if self.joins else declaration

    def restricted(self, federation: Federation, joined: int = 0) -> Site:
        """The site with the positions from `joined` on, and the tasks that the federation has."""
        tasks = federation.task_ids()
        order = {p: t for p, t in self.order.items() if p >= joined and t < len(tasks)}
        arriving = {y for t in order.values() for y in tasks[t]}
        return replace(self, order=order, counts={y: n for y, n in self.counts.items() if y in arriving})

    def plan(self, federation: Federation, settings: StreamSettings, seed: int) -> Plan:
        """A plan with this site as its only client, client 0. Examples of undeclared classes are left out."""
        labels = self.examples.y.numpy()
        owner = np.where(np.isin(labels, list(self.counts)), 0, -1)
        orders = complete_orders([self.order], len(federation.tasks))
        return assemble(labels, owner, federation.task_ids(), orders, settings, seed)


def read_site(folder: Path, federation: Federation) -> Site:
    """Reads a site's folder: manifest.toml and the data that it names."""
    path = Path(folder) / "manifest.toml"
    manifest = read_manifest(path)
    if manifest["site"] not in federation.sites:
        raise unknown("site", str(manifest["site"]), federation.sites)
    examples = read_examples(Path(folder) / str(manifest["data"]), federation)
    order, declared = read_positions(manifest["position"], federation, path)
    labels, numbers = np.unique(examples.y.numpy(), return_counts=True)
    counts = {int(y): int(n) for y, n in zip(labels, numbers, strict=True)}
    if missing := [federation.classes[y] for y in declared if y not in counts]:
        raise DataError(
            f"{path} declares class '{missing[0]}', but the data has no example of it; "
            "remove the class from the manifest or add examples"
        )
    client = federation.sites.index(manifest["site"])
    return Site(client, examples, order, {y: counts[y] for y in declared}, read_joins(manifest, path))


def read_joins(manifest: Mapping[str, Any], path: Path) -> int:
    """The first position at which a site takes part, counted from 0."""
    joins = manifest.get("joins", 1)
    if type(joins) is not int or joins < 1:
        raise DataError(f"{path} gives joins = {joins!r}, allowed is a position from 1 on; correct it or leave it out")
    return joins - 1


def read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DataError(f"{path} does not exist; write a manifest for the site, docs/deployment.md shows one")
    manifest = parse_toml(path.read_text(encoding="utf-8"), path)
    for key in KEYS:
        if key not in manifest:
            raise DataError(f"{path} does not give '{key}'; it must give the site's name, its data and its positions")
    return manifest


def read_positions(
    positions: Sequence[Mapping[str, Any]], federation: Federation, path: Path
) -> tuple[dict[int, int], list[int]]:
    """The task of each position, and the ids of all classes that the site declares."""
    order: dict[int, int] = {}
    declared: list[int] = []
    for position, entry in enumerate(positions):
        ids = list(class_ids(entry, federation))
        tasks = {t for t, task in enumerate(federation.task_ids()) if set(task) & set(ids)}
        if len(tasks) > 1 or tasks & set(order.values()) or (tasks and position >= len(federation.tasks)):
            raise DataError(
                f"{path} gives classes of {len(tasks)} tasks at position {position + 1}; a position has classes of "
                f"one task, each task comes once, and there are {len(federation.tasks)} positions"
            )
        for task in tasks:
            order[position] = task
        declared += ids
    return order, declared


def class_ids(entry: Mapping[str, Any], federation: Federation) -> Iterator[int]:
    """The ids of the classes that a position of a manifest names."""
    for name in entry.get("classes", []):
        if name in federation.classes:
            yield federation.classes.index(name)
        elif not federation.grows:  # otherwise it may be declared later
            raise unknown("class", str(name), federation.classes)
