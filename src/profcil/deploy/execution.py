"""How a site computes, as a few short texts. A node sends them with its hello, and the server stores them.

Equal facts are a condition of equal bits (docs/deployment.md). They are known before a site has read its data.
"""

from __future__ import annotations

from typing import Any

import torch

from profcil.engine.device import processor_name
from profcil.engine.executor import planned_report
from profcil.resolve import RunConfig

KEYS = ("path", "device", "precision", "torch", "processor", "compiler", "triton")
LONGEST = 80  # characters of a text


def execution_facts(config: RunConfig) -> dict[str, str]:
    """How this machine will compute with these settings. "none" stands for what is missing or not used."""
    device = torch.device(config.device)
    given = config.model.precision
    facts = planned_report(config.path, device.type) | {
        "precision": "float32" if given == "auto" and device.type == "cpu" else given,
        "torch": torch.__version__,
        "processor": gpu_name(device) if device.type == "cuda" else processor_name(),
    }
    return {key: short_text(facts.get(key)) for key in KEYS}


def gpu_name(device: torch.device) -> str | None:
    index = device.index or 0
    return torch.cuda.get_device_name(index) if index < torch.cuda.device_count() else None


def short_text(value: Any) -> str:
    """A value in the form that the server accepts."""
    return "".join(c for c in str(value or "") if c.isprintable())[:LONGEST] or "none"


def read_execution(found: Any) -> dict[str, str]:
    """The facts in a message. Raises an error unless they have the fixed keys and short printable texts."""
    if not isinstance(found, dict) or set(found) != set(KEYS):
        raise ValueError(f"execution must have {', '.join(KEYS)}")
    for key, text in found.items():
        if not isinstance(text, str) or not 0 < len(text) <= LONGEST or not text.isprintable():
            raise ValueError(f"execution has no short text for {key}")
    return {key: found[key] for key in KEYS}
