"""How a run handles clients that are late or absent, or that send replies it cannot use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from profcil.config import Checked, setting
from profcil.errors import ConfigError
from profcil.plain_values import build


@dataclass(frozen=True)
class Policy(Checked):
    """A round continues with the clients that replied by the deadline, if there are enough of them.

    A client that missed the deadline must answer a hello before it is given work again. Its late reply is counted and
    dropped. With too few replies, the other clients are asked again. After the last attempt the run stops; everything
    up to the last complete round is saved.
    """

    deadline: float = setting(600.0, "seconds that clients have for one turn or survey", low=0.1)
    min_replies: int = setting(1, "usable replies that a round needs", low=1)
    attempts: int = setting(2, "how often a round's clients are asked before the run stops", low=1)
    join: float = setting(
        120.0, "seconds to wait for clients at the start, and whenever too few are connected", low=0.0
    )
    max_message_mb: float = setting(1000.0, "largest reply that is decoded, in MB", low=0.001)
    rebind: bool = setting(False, "a client whose node is gone may come back with another key; for nodes without keys")
    norm_limit: float = setting(1000.0, "largest size of a tensor in a reply, in multiples of the expected", low=1.0)


def read_policy(values: Mapping[str, Any]) -> Policy:
    """The policy in a Flower app's settings, whose names have dashes instead of underscores."""
    known = {f.name for f in fields(Policy)}
    given = {k.replace("-", "_"): v for k, v in values.items()}
    try:
        return build(Policy, {k: v for k, v in given.items() if k in known}, "the app's settings")
    except ConfigError as error:
        raise ConfigError(str(error).replace("_", "-")) from None
