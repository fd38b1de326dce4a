"""An app whose nodes write a marker file when work begins, and hang in the round that their configuration names."""

from __future__ import annotations

import time
from pathlib import Path

from profcil.deploy import app


def inject_fault(message, context, call_next):
    """Writes a marker file when work begins, and hangs in the round that the node's configuration names."""
    node = context.node_config
    group = message.metadata.group_id
    if group:
        Path(node["marks"], f"{node['client']} {group}").touch()
    if group and group == node.get("hang-at"):
        time.sleep(float(node["hang"]))
    return call_next(message, context)


server_app = app.server_app
client_app = app.make_client_app([inject_fault])
