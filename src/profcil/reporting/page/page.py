"""One HTML file with styles, scripts and data inline. It loads nothing else and opens from a disk."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from profcil.errors import RunFolderError
from profcil.io.atomic_files import write_text
from profcil.reporting.looks import css_variables
from profcil.reporting.page.data import page_data
from profcil.runs.reader import Run

HERE = Path(__file__).parent
SCRIPTS = (
    "base.js",
    "answer.js",
    "tradeoff.js",
    "curves.js",
    "why.js",
    "summary.js",
    "detail.js",
    "stream.js",
    "differ.js",
    "start.js",
)
LIVE_SCRIPTS = (*SCRIPTS, "now.js")


def render_page(runs: Sequence[Run], title: str = "profcil runs", warnings: Sequence[str] = ()) -> str:
    """The page as text; the same runs give the same text."""
    return fill_page(page_data(runs, warnings), title)


def fill_page(data: Mapping[str, Any], title: str, live: Mapping[str, Any] | None = None) -> str:
    """The page with the data of `page_data`. `live` is the first state of a served page, which asks for later ones."""
    is_live = live is not None
    style = read_asset("style.css") + css_variables()
    now = read_asset("now.html").replace("@@LIVE@@", embed_json(live)) if is_live else ""
    parts = {"TITLE": html.escape(title), "STYLE": style, "POLICY": page_policy(is_live), "NOW": now}
    parts |= {"DATA": embed_json(data), "SCRIPT": script(is_live)}
    # A single pass: a placeholder inside inserted text is not replaced.
    pieces = read_asset("template.html").split("@@")
    return "".join(parts.get(piece, piece) for piece in pieces)


@cache
def script(is_live: bool) -> str:
    names = LIVE_SCRIPTS if is_live else SCRIPTS
    return "\n" + "\n".join(read_asset(name) for name in names) + "\n"


@cache
def page_policy(is_live: bool) -> str:
    """What the page may load: its own script, known by its hash, and, if it is served, new data from its server."""
    digest = base64.b64encode(hashlib.sha256(script(is_live).encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    return f"{policy}; connect-src 'self'" if is_live else policy


def embed_json(data: Any) -> str:
    """JSON for a script element, without characters that could end the element or start a comment."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def read_asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def write_page(path: Path, text: str) -> None:
    """Writes the file atomically."""
    if path.is_dir():
        raise RunFolderError(f"{path} is a folder, allowed is a file; name one with --out, e.g. page.html")
    try:
        write_text(path, text)
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written ({error.strerror}); choose another file with --out") from None
