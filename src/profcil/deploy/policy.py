"""What a run does about clients that are late, gone, or send what cannot be used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from profcil.config import Checked, build, setting
from profcil.errors import ConfigError


@dataclass(frozen=True)
class Policy(Checked):
    """The round goes on with whoever has answered by the deadline, if they are enough.

    A client that did not answer is asked for a sign of life before it is given work again; what it sends late is
    counted and dropped. Too few replies: the silent ones are asked again, and after the last attempt the run stops
    with everything up to the last whole round saved.
    """

    deadline: float = setting(600.0, "seconds that clients have for one turn or survey", low=0.1)
    min_replies: int = setting(1, "usable replies that a round needs", low=1)
    attempts: int = setting(2, "times a round's clients are asked before the run gives up", low=1)
    join: float = setting(120.0, "seconds to wait for clients at the start, and whenever too few are there", low=0.0)
    norm_limit: float = setting(1000.0, "largest size of a tensor in a reply, in multiples of the expected", low=1.0)


def read_policy(values: Mapping[str, Any]) -> Policy:
    """The policy among the settings of a Flower app, where dashes stand for underscores."""
    known = {f.name for f in fields(Policy)}
    given = {k.replace("-", "_"): v for k, v in values.items()}
    try:
        return build(Policy, {k: v for k, v in given.items() if k in known}, "the app's settings")
    except ConfigError as error:
        raise ConfigError(str(error).replace("_", "-")) from None
