"""One site: its manifest, its data, and what it declares of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from profcil.data.bundle import Examples
from profcil.deploy.federation import Federation, fill, loads
from profcil.deploy.readers import read_examples
from profcil.errors import DataError, unknown
from profcil.protocol.plan import Plan, assemble
from profcil.protocol.settings import StreamSettings


@dataclass(frozen=True)
class Site:
    """A site's data, and what it declares of them."""

    client: int
    examples: Examples
    order: Mapping[int, int]  # position → task, where the site has data
    counts: Mapping[int, int]  # class id → examples that take part

    def declared(self) -> dict[str, Any]:
        order, counts = ({str(k): v for k, v in d.items()} for d in (self.order, self.counts))
        return {"order": order, "counts": counts}

    def plan(self, terms: Federation, settings: StreamSettings, seed: int) -> Plan:
        """The stream as this site sees it: itself alone, as client 0. Classes it did not declare stay out."""
        y = self.examples.y.numpy()
        owner = np.where(np.isin(y, list(self.counts)), 0, -1)
        orders = fill([self.order], len(terms.tasks))
        return assemble(y, owner, terms.task_ids(), orders, settings, seed)


def read_site(folder: Path, terms: Federation) -> Site:
    """A site's folder: manifest.toml, and the data it names."""
    path = Path(folder) / "manifest.toml"
    if not path.is_file():
        raise DataError(f"{path} is not there; a site's folder needs a manifest, see the page on deployment")
    manifest = loads(path.read_text(encoding="utf-8"), path)
    for key in ("site", "data", "position"):
        if key not in manifest:
            raise DataError(f"{path} does not give '{key}'; it must name the site, its data and its positions")
    if manifest["site"] not in terms.sites:
        raise unknown("site", str(manifest["site"]), terms.sites)
    examples = read_examples(Path(folder) / str(manifest["data"]), terms)
    order, named = arrivals(manifest["position"], terms, path)
    found = {int(y): int(n) for y, n in zip(*np.unique(examples.y.numpy(), return_counts=True), strict=True)}
    if lacking := [terms.classes[y] for y in named if y not in found]:
        raise DataError(f"{path} declares class '{lacking[0]}', but the data has no example of it; take it out")
    return Site(terms.sites.index(manifest["site"]), examples, order, {y: found[y] for y in named})


def arrivals(positions: Sequence[Mapping[str, Any]], terms: Federation, path: Path) -> tuple[dict[int, int], list[int]]:
    """Which task arrives at which position, and the classes of it that the site has."""
    order: dict[int, int] = {}
    named: list[int] = []
    for p, entry in enumerate(positions):
        names = list(entry.get("classes", []))
        for name in names:
            if name not in terms.classes:
                raise unknown("class", str(name), terms.classes)
        tasks = {t for t, task in enumerate(terms.tasks) if set(task) & set(names)}
        if len(tasks) > 1 or tasks & set(order.values()) or (tasks and p >= len(terms.tasks)):
            raise DataError(
                f"{path} lets classes of {len(tasks)} tasks arrive at position {p}; a position brings classes of one "
                f"task, a task comes once, and there are {len(terms.tasks)} positions"
            )
        order |= dict.fromkeys([p] if tasks else [], next(iter(tasks), 0))
        named += [terms.classes.index(name) for name in names]
    return order, named
