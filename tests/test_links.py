"""Relative links of the documentation lead to files of the repository, and to headings that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
NAMED = re.compile(r"^\[[^\]]+\]:\s+(\S+)", re.M)
FENCE = re.compile(r"^(```|~~~).*?^\1", re.S | re.M)
ELSEWHERE = re.compile(r"[a-z][a-z+.-]*:|//", re.I)


def prose(page: Path) -> str:
    """The text without code, where brackets are no links."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "`code`", prose(page))
    found = LINK.findall(text) + NAMED.findall(text)
    return [link for link in found if not ELSEWHERE.match(link)]


def anchors(page: Path) -> set[str]:
    """The names under which GitHub lets a heading be linked."""
    titles = re.findall(r"^#+\s+(.*?)\s*#*$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def fault(page: Path, link: str) -> str:
    """What is wrong with a link; empty where nothing is."""
    where, _, heading = link.partition("#")
    target = (page.parent / where).resolve() if where else page
    if not target.is_relative_to(ROOT) or not target.exists():
        return f"{link}: no such file in the repository"
    if heading and target.suffix == ".md" and heading not in anchors(target):
        return f"{link}: no such heading"
    return ""


def test_there_are_pages_and_links() -> None:
    assert {"README.md", "architecture.md"} <= {page.name for page in PAGES}
    assert "docs/results.md" in links(ROOT / "README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    assert [fault(page, link) for link in links(page) if fault(page, link)] == []


@pytest.mark.parametrize("link", ["docs/nowhere.md", "../outside.md", "docs/methods.md#no-such-heading"])
def test_a_broken_link_is_noticed(link: str) -> None:
    assert fault(ROOT / "README.md", link)
