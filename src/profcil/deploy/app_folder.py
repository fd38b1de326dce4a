"""Writes the folder that `flwr run` accepts: a module that refers to this package, and the run's settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from profcil import __version__
from profcil.deploy.policy import Policy
from profcil.deploy.run_config import config_to_text
from profcil.io.atomic_files import write_text
from profcil.resolve import RunConfig

APP_MODULE = '''"""Flower loads the two apps from this module. Their code is in profcil.deploy.app."""

from profcil.deploy import app

server_app = app.server_app
client_app = app.client_app
'''


def settings_table(config: RunConfig, out: Path, data: Path, federation: str = "", **policy: Any) -> dict[str, Any]:
    """The app's settings: the run's configuration, the server's run and data folders, and the policy."""
    folders = {"out": str(Path(out).absolute()), "data-dir": str(Path(data).absolute())}
    rules = {f.name.replace("_", "-"): policy.get(f.name, f.default) for f in fields(Policy)}
    return {"recipe": config_to_text(config), "federation": federation, **folders, **rules}


def write_app(folder: Path, settings: Mapping[str, Any]) -> None:
    """Writes the app. It has no dependencies, because each node installs profcil and a suitable torch itself."""
    table = "\n".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in settings.items())
    write_text(folder / "profcil_app.py", APP_MODULE)
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
