"""An app with a slow node: its turns last until a file exists, or so many seconds longer, as its configuration says."""

from __future__ import annotations

import time
from pathlib import Path

from profcil.deploy import app

LIMIT = 300.0  # seconds to wait for the file
STEP = 0.1


def take_time(message, context, call_next):
    """Delays a turn of the stream."""
    node = context.node_config
    if str(message.metadata.group_id).startswith("round"):
        if "until" in node:
            wait_for(Path(node["until"]))
        time.sleep(float(node.get("slow", 0.0)))
    return call_next(message, context)


def wait_for(file: Path) -> None:
    end = time.monotonic() + LIMIT
    while not file.exists() and time.monotonic() < end:
        time.sleep(STEP)


server_app = app.server_app
client_app = app.make_client_app([take_time])
