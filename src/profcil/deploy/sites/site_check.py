"""What a site's folder has, what is wrong with it, and what would be sent. Nothing is sent here.

`read_site` stops at the first fault. Here all faults are found, as far as they do not depend on each other. At the end
`read_site` is called, so that a folder without faults is one that can join.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from profcil.deploy.sites.declarations import declaration_error
from profcil.deploy.sites.federation import LAST_POSITION, Federation
from profcil.deploy.sites.federation_file import read_federation
from profcil.deploy.sites.site import KEYS, read_site
from profcil.deploy.sites.site_data_check import check_data, may_be_declared, undeclared
from profcil.errors import ConfigError, ProfcilError, file_error, nearest

KIND_WORDS = {
    "model": "weights of the model, which the site has trained on its examples",
    "memory": "numbers about each class: means, spreads and counts of features, and what is solved from them",
    "statistics": "sums over the site's examples: means, second moments and counts of features by class",
    "transport": "how features have shifted during training: shifts of classes with a confidence, or sums of them",
    "replay": "what is replayed of old classes: labels, row numbers or features of single examples, or made-up inputs",
    "generator": "weights of a generator of made-up inputs",
    "prototype": "mean features of classes or of groups of examples, with counts",
}
ALWAYS_SENT = "with each reply: the number of examples, the training loss, and counts such as lost private tensors"
AT_CONNECTION = (
    "when the node connects: the declaration, and how it computes (path, device, precision, torch, processor)"
)


@dataclass
class SiteCheck:
    """The result of a check."""

    folder: Path
    site: str = ""
    modality: str = ""
    classes: dict[str, int] = field(default_factory=dict)  # label in the data → number of examples
    positions: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)  # class → examples of it that the manifest does not declare
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    declaration: dict[str, Any] | None = None
    method: str = ""
    sends: dict[str, str] = field(default_factory=dict)  # kind of block → in words
    app: str = ""  # the digest of the app that the site would run; empty if no app was given, or without Flower

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "folder": str(self.folder), "can_join": not self.faults}


def read_terms(path: Path) -> tuple[Federation, str]:
    """The federation, and the method if it is known. `path` is a federation.toml, or the folder of an app."""
    project = path / "pyproject.toml" if path.is_dir() else path
    try:
        text = project.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{project} cannot be read as TOML: {error}; correct that place") from None
    if project.name != "pyproject.toml":
        return read_federation(text, str(path)), ""
    try:
        settings = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
        method = str(tomllib.loads(settings["recipe"])["method"])
        federation = str(settings["federation"])
    except (ValueError, RecursionError, KeyError, TypeError):
        raise ConfigError(
            f"{project} is not an app of `profcil deploy app`; give its folder or a federation.toml"
        ) from None
    if not federation:
        raise ConfigError(f"{project} has no federation: its clients use parts of one dataset; give another app")
    return read_federation(federation, str(project)), method


def check_site(folder: Path, terms: Federation | None, method: str = "") -> SiteCheck:
    """Checks a site's folder."""
    result = SiteCheck(Path(folder))
    manifest = check_manifest(result)
    if terms is None:
        result.faults.append(
            "the federation's terms are unknown; give --federation FILE, a federation.toml or the folder of an app"
        )
        return result
    terms = terms.at(LAST_POSITION)  # with the classes that are declared later
    result.modality = terms.modality
    check_name(result, manifest, terms)
    check_positions(result, manifest, terms)
    check_data(result, manifest, terms)
    check_declared(result, terms)
    add_declaration(result, terms)
    add_sent_kinds(result, method)
    return result


def check_manifest(result: SiteCheck) -> dict[str, Any]:
    """What the manifest says, as far as it can be read."""
    path = result.folder / "manifest.toml"
    if not path.is_file():
        result.faults.append(f"{path} does not exist; write a manifest for the site, docs/deployment.md shows one")
        return {}
    try:
        manifest = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        result.faults.append(f"{path} cannot be read as TOML: {error}; correct that place")
        return {}
    for key in KEYS:
        if key not in manifest:
            result.faults.append(
                f"{path} does not give '{key}'; it must give the site's name, its data and its positions"
            )
    return manifest


def check_name(result: SiteCheck, manifest: Mapping[str, Any], terms: Federation) -> None:
    if "site" not in manifest:
        return
    result.site = str(manifest["site"])
    if result.site not in terms.sites:
        result.faults.append(f"the federation has no site '{result.site}'; {nearest(result.site, terms.sites)}")


def check_positions(result: SiteCheck, manifest: Mapping[str, Any], terms: Federation) -> None:
    """Checks the classes of each position."""
    positions = manifest.get("position", [])
    if not isinstance(positions, list) or not all(isinstance(entry, dict) for entry in positions):
        result.faults.append("the manifest's positions cannot be read; write [[position]] before each list of classes")
        return
    tasks: list[int] = []
    for number, entry in enumerate(positions, start=1):
        names = [str(name) for name in entry.get("classes", [])]
        found = list(dict.fromkeys(tasks_of(names, terms)))
        result.positions.append({"position": number, "classes": names, "tasks": [task + 1 for task in found]})
        result.faults += position_faults(number, names, found, tasks, terms)
        result.notes += [f"position {number} has {undeclared(name)}" for name in names if may_be_declared(name, terms)]
        tasks += found


def tasks_of(names: list[str], terms: Federation) -> Iterator[int]:
    """The task of each class that the federation has."""
    for name in names:
        for number, task in enumerate(terms.tasks):
            if name in task:
                yield number


def position_faults(
    number: int, names: list[str], found: list[int], earlier: list[int], terms: Federation
) -> Iterator[str]:
    """What is wrong with one position."""
    for name in names:
        if name not in terms.classes and not terms.grows:
            hint = nearest(name, terms.classes)
            yield f"position {number} has the class '{name}', which the federation has not; {hint}"
    if len(found) > 1:
        listed = " and ".join(str(task + 1) for task in found)
        yield f"position {number} has classes of the tasks {listed}; give a position classes of one task only"
    for task in found:
        if task in earlier:
            yield f"task {task + 1} comes again at position {number}; list all its classes at one position"
    if names and number > len(terms.tasks) and (found or not terms.grows):
        yield f"there is a position {number}, but the federation has {len(terms.tasks)} positions; remove it"


def check_declared(result: SiteCheck, terms: Federation) -> None:
    """Compares the classes of the manifest with those of the data."""
    declared = [name for entry in result.positions for name in entry["classes"] if name in terms.classes]
    for name in declared:
        if result.classes and name not in result.classes:
            result.faults.append(
                f"the manifest declares class '{name}', but the data has no example of it; "
                "remove the class from the manifest or add examples"
            )
        if result.classes.get(name) == 1:
            result.notes.append(
                f"class '{name}' has a single example, whose features its mean would be; statistics leave it out "
                "unless privacy.min_support = 1"
            )
    known = {name: count for name, count in result.classes.items() if name in terms.classes}
    result.left_out = {name: count for name, count in known.items() if name not in declared}


def add_declaration(result: SiteCheck, terms: Federation) -> None:
    """Reads the site as a node does. Another fault than those found until now is added."""
    if result.faults:
        return
    try:
        declaration = read_site(result.folder, terms).declaration()
    except OSError as error:
        result.faults.append(str(file_error(error)))
        return
    except ProfcilError as error:
        result.faults.append(str(error))
        return
    if reason := declaration_error(declaration, terms):
        result.faults.append(f"the server would refuse the site: {reason}; correct the manifest")
    result.declaration = declaration


def add_sent_kinds(result: SiteCheck, method: str) -> None:
    if not method:
        return
    from profcil import registry

    result.method = method
    kinds = registry.find("methods", method).METHOD.kinds
    result.sends = {kind: words for kind, words in KIND_WORDS.items() if kind in kinds}


def describe(result: SiteCheck) -> Iterator[str]:
    """The result as lines of text."""
    yield f"{result.folder}: site {result.site or 'without a name'}, {result.modality or 'unknown modality'}"
    for name, count in result.classes.items():
        yield f"  class {name}: {count} examples"
    for entry in result.positions:
        tasks = ", ".join(f"task {task}" for task in entry["tasks"]) or "no data"
        yield f"  position {entry['position']}: {', '.join(entry['classes']) or 'idle'} ({tasks})"
    for name, count in result.left_out.items():
        yield f"  left out: {count} examples of class {name}, which the manifest does not declare"
    yield from (f"  note: {note}" for note in result.notes)
    yield from (f"FAULT: {fault}" for fault in result.faults)
    if result.faults:
        yield f"the site cannot join; {len(result.faults)} faults"
    else:
        yield from sent_lines(result)
        yield "the site can join; nothing was sent"


def sent_lines(result: SiteCheck) -> Iterator[str]:
    """What would leave the site."""
    yield "what would leave the site:"
    yield f"  {AT_CONNECTION}"
    yield f"  the declaration (position to task, class id to examples, from 0): {json.dumps(result.declaration)}"
    yield f"  {ALWAYS_SENT}"
    for kind, words in result.sends.items():
        yield f"  {result.method} exchanges {kind} with the server: {words}"
    if not result.sends:
        yield "  the method's messages; give --federation APP or --method NAME to see their kinds"
    if result.app:
        yield f"the site would run the app {result.app}"
        yield "  a line for the file of `profcil-supernode --allow-apps FILE`, if you have read the app's files"
