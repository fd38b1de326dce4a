"""One HTML file with everything in it: styles, scripts and data inline, nothing fetched, opens from a disk."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from profcil.errors import RunFolderError
from profcil.reporting.page.data import page_data
from profcil.runs.reader import Run

HERE = Path(__file__).parent
SCRIPTS = ("base.js", "summary.js", "curves.js", "detail.js", "stream.js", "differ.js", "start.js")


def render(runs: Sequence[Run], title: str = "profcil runs", notes: Sequence[str] = ()) -> str:
    """The page as text; the same runs give the same text."""
    parts = {
        "TITLE": html.escape(title),
        "STYLE": read("style.css"),
        "DATA": embedded(page_data(runs, notes)),
        "SCRIPT": "\n".join(read(name) for name in SCRIPTS),
    }
    out = []
    for piece in read("template.html").split("@@"):  # one pass: what was filled in is never looked at again
        out.append(parts.get(piece, piece))
    return "".join(out)


def embedded(data: Any) -> str:
    """JSON that can stand inside a script element: no character of it can end the element or begin a comment."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def write(path: Path, text: str) -> None:
    """The whole file or none of it."""
    if path.is_dir():
        raise RunFolderError(f"{path} is a folder, allowed is a file; name one with --out, e.g. page.html")
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise RunFolderError(f"{path} cannot be written ({error.strerror}); choose another file with --out") from None
