"""What `make docs` adds to MkDocs: pages from the repository's root, notebooks, the gallery, formulas, links that
fit the site, no other host."""

from __future__ import annotations

import html
import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

sys.path.append(str(Path(__file__).parent))

from notebooks import to_markdown

ROOT = Path(__file__).parents[1]
GALLERY = ROOT / "build" / "gallery"
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}  # a file of the root: its name on the site
LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"(^```.*?^```)", re.S | re.M)
GALLERY_HEAD = """# Gallery

Every figure, and the page and the live view at two widths, drawn anew by `make docs` from small runs on digits. They
show what the figures look like; the numbers are no results."""
FORMULA = re.compile(r"\$<code>(.*?)</code>\$", re.S)
LOADED = re.compile(r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']?(?:https?:)?//|<link\b[^>]*\bhref=[\"']?(?:https?:)?//|"
                    r"@import\s+(?:url\()?[\"']?(?:https?:)?//|url\([\"']?(?:https?:)?//", re.I)  # fmt: skip


def on_files(files: Files, config: Any) -> Files:
    """The pages of the root are pages of the site."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=rewritten(text, "")))
    for notebook in sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")):
        files.append(File.generated(config, f"tutorials/{notebook.stem}.md", content=to_markdown(notebook)))
    for picture in sorted(GALLERY.glob("*.png")):
        files.append(File.generated(config, f"gallery/{picture.name}", abs_src_path=str(picture)))
    files.append(File.generated(config, "gallery.md", content=gallery_page()))
    return files


def on_page_markdown(markdown: str, page: Any, **rest: Any) -> str:
    place = page.file.src_uri
    is_ready = place in PAGES.values() or place.startswith("tutorials/")
    return markdown if is_ready else rewritten(markdown, "docs")


def on_page_content(content: str, **rest: Any) -> str:
    """Formulas, $`like this`$, as MathML, which browsers show without a script."""
    return FORMULA.sub(lambda found: f'<span class="formula">{convert(html.unescape(found[1]))}</span>', content)


def on_post_build(config: Any) -> None:
    """A site that fetches something from another host when it is viewed is no site."""
    for path in sorted(Path(config["site_dir"]).rglob("*")):
        if path.suffix in (".html", ".css") and LOADED.search(path.read_text(encoding="utf-8")):
            raise PluginError(f"{path} would load something from another host")


def gallery_page() -> str:
    """All figures, and how the page and the live view look: what `docs/gallery.py` has drawn."""
    file = GALLERY / "pictures.json"
    if not file.exists():
        return "# Gallery\n\n`make docs` draws the pictures.\n"
    pictures = json.loads(file.read_text(encoding="utf-8"))
    parts = [GALLERY_HEAD]
    for picture in pictures:
        about = picture["about"]
        parts.append(f"## {picture['title']}\n\n{about}\n\n![{about}](gallery/{picture['file']})")
    return "\n\n".join(parts) + "\n"


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
