"""Which key each client has, and what was declared under it.

The first node that claims a client binds it to its key for the whole run, unless federation.toml names the key. What it
declares is bound, too: the plan is made from the declarations. They may change only when the server asks for new ones,
because classes were declared.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

REBIND_ADVICE = "start the node with its own key, or write the app with --rebind if nodes have none"


@dataclass
class Bindings:
    """The clients of a run and their keys."""

    expected: Mapping[int, str] = field(default_factory=dict)  # client → fingerprint, from federation.toml
    rebind: bool = False  # whether a node with another key may take the place of one that is gone
    known: dict[str, dict[str, Any]] = field(default_factory=dict)  # client → key, and digest of what it declared

    def bind(self, client: int, key: str, declaration: Mapping[str, Any], position: int = 0) -> str:
        """Binds a client to a key at its first claim. Returns why a claim is refused, or an empty string. `position` is
        that of the terms that the declaration is for."""
        bound = self.known.get(str(client))
        declared = declaration_digest(declaration)
        if reason := self.wrong_key(client, key, bound):
            return reason
        asked_again = bound is not None and position > bound.get("position", 0)
        if bound is not None and bound["declaration"] != declared and not asked_again:
            return (
                f"client {client} declares other data than before; "
                "restore the data, or declare the new data in a new run"
            )
        self.known[str(client)] = {"key": key, "declaration": declared, "position": position}
        return ""

    def wrong_key(self, client: int, key: str, bound: Mapping[str, Any] | None) -> str:
        """Why a key may not be used for a client; empty if it may."""
        if self.expected.get(client, key) != key:
            return f"client {client} is claimed with the key {key}, but federation.toml names another"
        if self.rebind:
            return ""
        if bound is not None and bound["key"] != key:
            return f"client {client} is claimed with the key {key}, but belongs to another; {REBIND_ADVICE}"
        named = {c for c, known in self.expected.items() if known == key}
        others = named | {int(c) for c, known in self.known.items() if known["key"] == key}
        if others - {client}:
            return f"client {client} is claimed with a key that belongs to client {min(others - {client})}"
        return ""


def declaration_digest(declaration: Mapping[str, Any]) -> str:
    text = json.dumps(declaration, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def node_keys(grid: Any) -> dict[int, str]:
    """The fingerprint of each connected node's key. Flower makes sure that a node has the key that it names."""
    return {info.node_id: fingerprint(info.public_key) or f"node {info.node_id}" for info in grid.get_nodes()}


@lru_cache(maxsize=100_000)
def fingerprint(public_key: bytes) -> str:
    """The fingerprint of a key as `ssh-keygen -l` prints it; empty without a key."""
    from cryptography.hazmat.primitives import serialization as s

    if not public_key:
        return ""
    try:
        key = s.load_pem_public_key(public_key).public_bytes(s.Encoding.OpenSSH, s.PublicFormat.OpenSSH)
        public_key = base64.b64decode(key.split()[1])
    except ValueError:  # not a key, as under Flower's simulation
        pass
    digest = hashlib.sha256(public_key).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")
