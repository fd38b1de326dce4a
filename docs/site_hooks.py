"""What `make docs` adds to MkDocs: pages from the repository's root, links that fit the site, no other host."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}  # a file of the root: its name on the site
LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"(^```.*?^```)", re.S | re.M)
LOADED = re.compile(r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']?(?:https?:)?//|<link\b[^>]*\bhref=[\"']?(?:https?:)?//|"
                    r"@import\s+(?:url\()?[\"']?(?:https?:)?//|url\([\"']?(?:https?:)?//", re.I)  # fmt: skip


def on_files(files: Files, config: Any) -> Files:
    """The pages of the root are pages of the site."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=rewritten(text, "")))
    return files


def on_page_markdown(markdown: str, page: Any, **rest: Any) -> str:
    return markdown if page.file.src_uri in PAGES.values() else rewritten(markdown, "docs")


def on_post_build(config: Any) -> None:
    """A site that fetches something from another host when it is viewed is no site."""
    for path in sorted(Path(config["site_dir"]).rglob("*")):
        if path.suffix in (".html", ".css") and LOADED.search(path.read_text(encoding="utf-8")):
            raise PluginError(f"{path} would load something from another host")


def rewritten(text: str, folder: str) -> str:
    """Links as the site has them; a link to a file that is no page becomes its text."""

    def fit(match: re.Match[str]) -> str:
        label, link, heading = match[1], match[2], match[3] or ""
        target = posixpath.normpath(posixpath.join(folder, link))
        if target in PAGES:
            return f"[{label}]({PAGES[target]}{heading})"
        if target.startswith("docs/"):
            return f"[{label}]({target.removeprefix('docs/')}{heading})"
        return label

    parts = FENCE.split(text)  # code, at odd places, stays as it is
    return "".join(part if i % 2 else LINK.sub(fit, part) for i, part in enumerate(parts))
