"""Writes the folder of a new deployment: terms, certificates, and templates of containers and services."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from profcil import __version__
from profcil.config import OwnSettings
from profcil.data.own.graphs import read_graph_folder
from profcil.data.own.images import class_images, image_shape
from profcil.data.own.records import read_records
from profcil.deploy.local import templates
from profcil.deploy.local.certs import write_certs
from profcil.deploy.local.cluster import FLOWER_ENVIRONMENT
from profcil.deploy.sites.federation import Federation
from profcil.deploy.sites.federation_file import read_federation
from profcil.deploy.sites.site import read_manifest
from profcil.errors import ConfigError, DataError
from profcil.io.atomic_files import write_text

PORT = 8000
DEFAULT_HOST = "fed.example.org"


@dataclass(frozen=True)
class Deployment:
    """What the files of a new deployment say."""

    folder: Path
    hosts: Sequence[str] = ()
    federation: str = ""  # the text of federation.toml; empty = a skeleton
    test: Path | None = None  # the server's test data; None = not known yet

    @property
    def runs(self) -> Path:
        return self.folder.absolute() / "runs"

    @property
    def terms(self) -> Federation:
        return read_federation(self.federation or templates.FEDERATION)


def write_deployment(deployment: Deployment) -> list[Path]:
    """Writes all files. A folder that has any is refused, so that no key and no edited file is lost."""
    folder = deployment.folder
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; choose a new folder for the deployment")
    files = filled_templates(deployment)
    for name, text in files.items():
        write_text(folder / name, text)
    deployment.runs.mkdir(parents=True, exist_ok=True)
    certs = write_certs(folder / "certs", deployment.hosts, len(deployment.terms.sites))
    return [*(folder / name for name in files), *certs]


def filled_templates(deployment: Deployment) -> dict[str, str]:
    """The text of each file, by its path in the folder."""
    values = template_values(deployment)
    texts = {
        "README.md": templates.README,
        "Containerfile": templates.CONTAINERFILE,
        "server/compose.yaml": templates.SERVER_COMPOSE,
        "server/profcil-server.service": templates.SERVER_UNIT,
        "server/config.toml": templates.FLOWER_CONFIG,
        "site/site.env": templates.SITE_ENV,
        "site/compose.yaml": templates.SITE_COMPOSE,
        "site/profcil-site.service": templates.SITE_UNIT,
    }
    filled = {name: Template(text).substitute(values) for name, text in texts.items()}
    return {"federation.toml": deployment.federation or templates.FEDERATION, **filled}


def template_values(deployment: Deployment) -> dict[str, str]:
    folder = deployment.folder.absolute()
    test = str(deployment.test.absolute()) if deployment.test else str(folder / "test")
    app = f"`profcil deploy app --federation federation.toml --test {test} --run {deployment.runs}/deployed --out app`"
    known = bool(deployment.federation)
    written = known and deployment.test is not None
    return {
        "version": __version__,
        "environment": " ".join(f"{name}={value}" for name, value in FLOWER_ENVIRONMENT.items()),
        "unit_environment": "\n".join(f"Environment={name}={value}" for name, value in FLOWER_ENVIRONMENT.items()),
        "user": f"{os.getuid()}:{os.getgid()}",
        "folder": str(folder),
        "certs": str(folder / "certs"),
        "runs": str(deployment.runs),
        "test": test,
        "host": next(iter(deployment.hosts), DEFAULT_HOST),
        "port": str(PORT),
        "federation_note": "Check what was read from the sites." if known else "Replace the examples in it.",
        "app_note": f"it is in app/; write it again with {app}." if written else f"write it with {app}.",
    }


def federation_of_sites(folders: Sequence[Path]) -> str:
    """A federation.toml from the manifests and data of some sites, to be checked by people."""
    manifests = {Path(folder): read_manifest(Path(folder) / "manifest.toml") for folder in folders}
    tasks = joined_tasks(list(manifests.values()))
    first, manifest = next(iter(manifests.items()))
    values: dict[str, Any] = {
        "tasks": tasks,
        "sites": [str(m["site"]) for m in manifests.values()],
        **describe_data(first / str(manifest["data"])),
    }
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    text = "# Read from the folders of the sites; check it before you use it.\n" + "\n".join(lines) + "\n"
    read_federation(text)  # raises an error if, for example, two sites have one name
    return text


def joined_tasks(manifests: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The tasks: classes that arrive together at a position of any site belong to one task."""
    tasks: list[list[str]] = []
    for manifest in manifests:
        for entry in manifest["position"]:
            names = [str(name) for name in entry.get("classes", [])]
            if not names:
                continue
            touched = [task for task in tasks if set(task) & set(names)]
            joined = list(dict.fromkeys([name for task in touched for name in task] + names))
            place = tasks.index(touched[0]) if touched else len(tasks)
            others = [task for task in tasks[place:] if task not in touched]
            tasks = [*tasks[:place], joined, *others]
    return tasks


def describe_data(path: Path) -> dict[str, Any]:
    """The modality of a site's data and the form of its inputs."""
    if not path.exists():
        raise DataError(f"{path} does not exist; put the data there or change the manifest")
    if (path / "nodes.csv").is_file():
        raw = read_graph_folder(path, OwnSettings(label="label"))
        return {"modality": "graph", "features": len(raw.columns)}
    if path.is_dir():
        files = [file for _, images in class_images(path) for file in images]
        shape, _ = image_shape(files, OwnSettings(), path)
        return {"modality": "image", "shape": list(shape)}
    columns = read_records(path).columns
    if "text" in columns:
        return {"modality": "text", "length": 32}
    return {"modality": "table", "columns": [name for name in columns if name != "label"]}
