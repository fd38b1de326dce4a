"""Writes the folder that `flwr run` takes: two references into this package, and the run's settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from profcil import __version__
from profcil.deploy.policy import Policy
from profcil.deploy.run_config import write_recipe
from profcil.io.atomic_files import write_text
from profcil.resolve import RunConfig

APP = '''"""The app's two halves live in profcil.deploy.app; Flower looks for them here."""

from profcil.deploy import app

server_app = app.server_app
client_app = app.client_app
'''


def settings_table(config: RunConfig, out: Path, data: Path, federation: str = "", **policy: Any) -> dict[str, Any]:
    """What the app carries: the whole recipe, where the server finds its data and puts its run, and the policy."""
    where = {"out": str(Path(out).absolute()), "data-dir": str(Path(data).absolute())}
    rules = {f.name.replace("_", "-"): policy.get(f.name, f.default) for f in fields(Policy)}
    return {"recipe": write_recipe(config), "federation": federation, **where, **rules}


def write_app(folder: Path, settings: Mapping[str, Any]) -> None:
    """The package itself is not among the app's dependencies: every node has it installed, with a torch that fits."""
    table = "\n".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in settings.items())
    write_text(folder / "profcil_app.py", APP)
    write_text(
        folder / "pyproject.toml",
        f"""[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "profcil-app"
version = "{__version__}"
description = "A federated class-incremental run"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "profcil"

[tool.flwr.app.components]
serverapp = "profcil_app:server_app"
clientapp = "profcil_app:client_app"

[tool.flwr.app.config]
{table}
""",
    )
