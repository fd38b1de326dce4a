"""The graph of ogbn-arxiv with other node features than the official ones: real citations, classes and years.

A dataset of its own, so that its results are never taken for those of ogbn-arxiv: they have another name in run
folders, tables and results stores. The files are of the official form, beside a text that says what the features are.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from profcil.data import files, ogbn_arxiv
from profcil.data.bundle import Bundle, File

FOLDER = "ogbn_arxiv"
FACTS = replace(
    ogbn_arxiv.FACTS,
    name="ogbn_arxiv_standin",
    title="ogbn-arxiv's graph with stand-in features",
    files=tuple(File(f"{FOLDER}/{path}") for path in (ogbn_arxiv.MARK, *ogbn_arxiv.PATHS)),
    get=f"write the official files with features of your own, and {ogbn_arxiv.MARK}, which says what they are,",
)


def load(root: Path, seed: int = 0) -> Bundle:
    """The citation graph, made undirected. All files are those beside the text about the features."""
    folder = files.locate(FACTS, root, f"{FOLDER}/{ogbn_arxiv.MARK}").parent
    sources = [folder / path for path in ogbn_arxiv.PATHS]
    for source in sources:
        if not source.exists():
            raise files.missing(FACTS, root, f"{FOLDER}/{source.relative_to(folder)}")
    return ogbn_arxiv.read(FACTS, sources)
