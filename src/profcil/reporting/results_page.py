"""Tables of Markdown pages, generated from a results store.

A table stands between two markers, and is replaced as a whole:

    <!-- table: dataset=cora methods=prolin,promax columns=faa,cta,af,mb -->
    <!-- end -->

The first word is the kind of table: `table` has a row for each method of a dataset (`page_table`), `overview` a row for
each method and a column for each dataset (`page_overview`). Keys have lists of names with commas between.
"""

from __future__ import annotations

import re
from pathlib import Path

from profcil.errors import StoreError, unknown
from profcil.io.atomic_files import write_text
from profcil.reporting import page_overview, page_table

KINDS = {"table": page_table, "overview": page_overview}
BLOCK = re.compile(
    r"(?P<begin><!-- (?P<kind>table|overview): (?P<definition>[^\n]*?) -->\n)(?P<body>.*?)(?P<end><!-- end -->)", re.S
)
BEGIN = re.compile(r"<!-- (table|overview):")


def update(path: Path, store: Path) -> int:
    """Writes the tables of a page anew; the number of tables."""
    text = path.read_text(encoding="utf-8")
    rendered = render(text, store, path)
    if rendered != text:
        write_text(path, rendered)
    return len(BLOCK.findall(text))


def render(text: str, store: Path, path: Path) -> str:
    """The text of a page with the tables that the store gives."""
    if len(BEGIN.findall(text)) != len(BLOCK.findall(text)):
        raise StoreError(f"{path} has a table that does not end; close every '<!-- table: ... -->' with '<!-- end -->'")

    def replaced(match: re.Match[str]) -> str:
        if BEGIN.search(match["body"]):
            raise StoreError(f"{path} has a table that does not end: {match['definition']}; add '<!-- end -->'")
        chosen = read_definition(match["kind"], match["definition"], path)
        table = KINDS[match["kind"]].render_table(chosen, store, path)
        return f"{match['begin']}\n{table}\n\n{match['end']}"

    return BLOCK.sub(replaced, text)


def read_definition(kind: str, text: str, path: Path) -> dict[str, list[str]]:
    """The keys of a marker, each a list of names."""
    defaults = KINDS[kind].DEFAULTS
    given = dict(defaults)
    for pair in text.split():
        key, sign, value = pair.partition("=")
        if not sign or key not in defaults:
            raise unknown(f"key of a table in {path}", key, defaults)
        given[key] = value
    chosen = {}
    for key, value in given.items():
        chosen[key] = [name for name in value.split(",") if name]
    for key, names in KINDS[kind].ALLOWED.items():
        for name in chosen[key]:
            if name not in names:
                raise unknown(f"name after {key}= in {path}", name, names)
    for key in KINDS[kind].REQUIRED:
        if not chosen[key]:
            raise StoreError(f"{path} has a table without {key}=NAME: {text}; add it")
    return chosen
