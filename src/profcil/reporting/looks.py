"""How a method looks wherever it is shown: its colour on light and dark ground, and its marker.

A method looks the same in every figure and on every page, whatever other methods are shown beside it. Where two colours
are near for the colour-blind, the markers differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from zlib import crc32


@dataclass(frozen=True)
class Look:
    """A colour for light ground, one for dark ground, and a marker of matplotlib."""

    light: str
    dark: str
    marker: str


LOOKS = {
    "fedavg": Look("#59636e", "#8f9aa6", "X"),
    "fedprox": Look("#8a6d3b", "#b29461", "^"),
    "fedproto": Look("#b58400", "#c2901f", "v"),
    "target": Look("#7a5cc0", "#a387ef", "s"),
    "mfcl": Look("#b04a8c", "#df75b7", "P"),
    "hr": Look("#c2185b", "#fd628f", "D"),
    "fedspace": Look("#6b8e00", "#81a52c", "P"),
    "fedssi": Look("#008599", "#3ba5ba", "^"),
    "fedcbdr": Look("#8e24aa", "#d46ef2", "v"),
    "fedseit": Look("#a03c28", "#e67b64", "*"),
    "power": Look("#3f51b5", "#7892fc", "*"),
    "motion": Look("#5d4037", "#b39287", "P"),
    "probayes": Look("#b8860b", "#d9a441", "h"),
    "prolin": Look("#d55e00", "#ef762d", "D"),
    "pro": Look("#009e73", "#25ac80", "s"),
    "promax": Look("#0072b2", "#449fe2", "o"),
}


def method_look(method: str) -> Look:
    """The look of a method, the same in every figure."""
    return list(LOOKS.values())[look_number(method)]


def look_number(method: str) -> int:
    """The number of a method's look. That of a plug-in follows from its name alone; a built-in method may share it."""
    names = list(LOOKS)
    if method in LOOKS:
        return names.index(method)
    return crc32(method.encode()) % len(names)


def css_declarations(colours: Iterable[str]) -> str:
    return " ".join(f"--k{number}: {colour};" for number, colour in enumerate(colours))


def css_variables() -> str:
    """The colours as CSS variables --k0, --k1, ... for light and dark pages."""
    looks = LOOKS.values()
    light = css_declarations(look.light for look in looks)
    dark = css_declarations(look.dark for look in looks)
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
