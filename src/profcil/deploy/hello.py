"""The hello of a node: the server asks a new node who it is, and the node answers with its client or a fault."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import RecordDict

from profcil import __version__
from profcil.deploy.execution import read_execution
from profcil.deploy.wire import UnreadableMessage, pack, unpack
from profcil.io.texts import one_line

HELLO = "query.hello"  # Flower's message type
MAX_CLIENTS = 10_000_000
LONGEST_REASON = 500  # characters of a sentence that a site sends


@dataclass(frozen=True)
class Hello:
    """What a node reports about itself."""

    client: int
    holds: Mapping[str, str] = field(default_factory=dict)  # block → digest
    site: Mapping[str, Any] = field(default_factory=dict)  # the declaration of a site with its own data
    execution: Mapping[str, str] = field(default_factory=dict)  # how the node computes


class SiteFault(UnreadableMessage):
    """A site that cannot take part, and the reason that it gives."""

    def __init__(self, site: str, reason: str) -> None:
        super().__init__(reason)
        self.site = site


def hello_request(
    run: str, enrolled: Iterable[int] | None = None, terms: Mapping[str, Any] | None = None
) -> RecordDict:
    """A hello. `enrolled` are the clients of a run that has begun; another site learns from it that it comes later.
    `terms` are the federation, where it has changed, and the position that comes next."""
    return pack({"run": run, "enrolled": None if enrolled is None else sorted(enrolled), **(terms or {})}, {})


def fault_response(site: str, reason: str) -> RecordDict:
    """The answer of a site that cannot take part."""
    return pack({"fault": reason[:LONGEST_REASON], "site": site[:LONGEST_REASON], "as": __version__}, {})


def hello_response(hello: Hello) -> RecordDict:
    head = {"client": hello.client, "holds": dict(hello.holds), "site": dict(hello.site), "as": __version__}
    return pack(head | {"execution": dict(hello.execution)}, {})


def read_hello(content: RecordDict) -> Hello:
    head, _ = unpack(content, most=0)
    try:
        if head["as"] != __version__:
            raise UnreadableMessage(f"the node runs profcil {head['as']}, the server {__version__}")
        if "fault" in head:
            raise SiteFault(one_line(head["site"]), one_line(head["fault"], LONGEST_REASON))
        execution = read_execution(head["execution"])
        client = int(head["client"])
        if not 0 <= client < MAX_CLIENTS:
            raise ValueError(f"client must be from 0 to {MAX_CLIENTS - 1}")
        return Hello(client, dict(head["holds"]), dict(head["site"]), execution)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UnreadableMessage(f"the message is not a hello ({error})") from None
