from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import official
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil.data import _graphs, coauthor_cs, cora, loading, ogbn_arxiv, ogbn_arxiv_standin
from profcil.errors import DataError


@pytest.fixture(autouse=True)
def small_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the fact tables by those of the tiny copies."""
    without_sizes = tuple(replace(file, size=None) for file in cora.FACTS.files)
    monkeypatch.setattr(cora, "FACTS", replace(cora.FACTS, classes=2, train=12, test=4, files=without_sizes))
    monkeypatch.setattr(cora, "NAMES", ("even", "odd"))
    monkeypatch.setattr(coauthor_cs, "FACTS", replace(coauthor_cs.FACTS, classes=3, train=12, test=5))
    for arxiv in (ogbn_arxiv, ogbn_arxiv_standin):
        monkeypatch.setattr(arxiv, "FACTS", replace(arxiv.FACTS, classes=2, train=2, test=1))


@pytest.mark.parametrize("place", ["cora/raw", "cora"])
def test_cora_assigns_test_rows_by_the_index_file(tmp_path: Path, place: str) -> None:
    x, labels = official.cora(tmp_path / place)
    bundle = loading.load_bundle("cora", tmp_path)
    assert torch.equal(bundle.train.x, torch.from_numpy(x / x.sum(1, keepdims=True)))
    for part in (bundle.train, bundle.validation, bundle.test):
        assert part.y.tolist() == labels[part.nodes].tolist()
        assert part.x is bundle.train.x  # one graph, stored once


def test_cora_edges_are_undirected_unique_and_without_self_loops(tmp_path: Path) -> None:
    official.cora(tmp_path / "cora")
    edges = set(map(tuple, cora.load(tmp_path).train.edges.T.tolist()))
    assert edges == {(i, (i + d) % 20) for i in range(20) for d in (1, -1)}


def test_cora_split_is_seeded_and_contains_every_node(tmp_path: Path) -> None:
    official.cora(tmp_path / "cora")
    one, same, other = (loading.load_bundle("cora", tmp_path, seed) for seed in (0, 0, 1))
    nodes = torch.cat([one.train.nodes, one.validation.nodes, one.test.nodes])
    assert sorted(nodes.tolist()) == list(range(20))
    assert torch.bincount(one.train.y).tolist() == [6, 6]
    assert one.fingerprint == same.fingerprint != other.fingerprint


def test_inconsistent_cora_files_are_refused(tmp_path: Path) -> None:
    official.cora(tmp_path / "cora")
    (tmp_path / "cora/ind.cora.test.index").write_text("16\n17\n18\n99\n")
    with pytest.raises(DataError, match="do not fit together"):
        cora.load(tmp_path)
    (tmp_path / "cora/ind.cora.ty").unlink()
    with pytest.raises(DataError, match=r"ind\.cora\.ty is missing"):
        cora.load(tmp_path)


@pytest.mark.parametrize("place", ["coauthor_cs/coauthor_cs.npz", "graphs/coauthor_cs.npz"])
def test_coauthor_reads_plain_arrays_only(tmp_path: Path, place: str) -> None:
    official.coauthor(tmp_path / place)
    bundle = loading.load_bundle("coauthor_cs", tmp_path)
    assert bundle.train.x.sum(1).tolist() == pytest.approx([1.0] * 20)
    assert bundle.train.edges.shape == (2, 40)
    assert torch.bincount(torch.cat([bundle.train.y, bundle.validation.y, bundle.test.y])).tolist() == [7, 7, 6]


def test_coauthor_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "graphs/coauthor_cs.npz"
    official.coauthor(path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match=r"coauthor_cs\.npz"):
        coauthor_cs.load(tmp_path)


@pytest.mark.parametrize("place", ["ogbn_arxiv", "ogbn_arxiv/arxiv", "arxiv"])
def test_arxiv_raw_files_are_parsed_once(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    official.arxiv(tmp_path / place)
    bundle = loading.load_bundle("ogbn_arxiv", tmp_path)
    assert bundle.train.x.tolist() == [[0.5, -0.25], [1, 2], [3, 4], [5, 6]]
    assert bundle.train.edges.T.tolist() == [[0, 1], [1, 0], [2, 3], [3, 2]]
    assert (bundle.train.nodes.tolist(), bundle.validation.nodes.tolist(), bundle.test.y.tolist()) == ([0, 1], [2], [0])
    monkeypatch.setattr(ogbn_arxiv, "parse", lambda *_: pytest.fail("parsed again"))
    assert loading.load_bundle("ogbn_arxiv", tmp_path).fingerprint == bundle.fingerprint


@pytest.mark.parametrize("place", ["ogbn_arxiv_standin/ogbn_arxiv", "ogbn_arxiv_standin", "ogbn_arxiv"])
def test_arxiv_with_other_features_is_a_dataset_of_its_own(tmp_path: Path, place: str) -> None:
    official.arxiv(tmp_path / place)
    with pytest.raises(DataError, match=r"FEATURES-ARE-NOT-OGB\.txt was not found"):  # these may be the official files
        loading.load_bundle("ogbn_arxiv_standin", tmp_path)
    (tmp_path / place / ogbn_arxiv.MARK).write_text("computed from references")
    bundle = loading.load_bundle("ogbn_arxiv_standin", tmp_path)
    assert bundle.facts.name == "ogbn_arxiv_standin" and "stand-in" in bundle.facts.title
    assert bundle.train.x.tolist() == [[0.5, -0.25], [1, 2], [3, 4], [5, 6]]
    (tmp_path / place / "raw/edge.csv.gz").unlink()
    with pytest.raises(DataError, match=r"edge\.csv\.gz was not found"):
        ogbn_arxiv_standin.load(tmp_path)


def test_arxiv_refuses_features_that_are_not_the_official_ones(tmp_path: Path) -> None:
    official.arxiv(tmp_path / "ogbn_arxiv")
    (tmp_path / "ogbn_arxiv" / ogbn_arxiv.MARK).write_text("computed from references")
    with pytest.raises(DataError, match="use --dataset ogbn_arxiv_standin"):
        loading.load_bundle("ogbn_arxiv", tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("raw/num-node-list", "5\n"),
        ("raw/edge", "0,1\n1,0\n2,3\n2,9\n"),
        ("split/time/test", "-1\n"),
        ("raw/edge", "a\n"),
    ],
)
def test_inconsistent_arxiv_files_are_refused(tmp_path: Path, name: str, text: str) -> None:
    official.arxiv(tmp_path / "arxiv")
    (tmp_path / f"arxiv/{name}.csv.gz").write_bytes(gzip.compress(text.encode()))
    with pytest.raises(DataError, match="ogbn-arxiv"):
        ogbn_arxiv.load(tmp_path)


def test_arxiv_truncated_gzip_is_refused(tmp_path: Path) -> None:
    official.arxiv(tmp_path / "arxiv")
    path = tmp_path / "arxiv/raw/node-feat.csv.gz"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match="node-feat"):
        ogbn_arxiv.load(tmp_path)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=20))
def test_undirected_equals_the_set_of_both_directions(pairs: list[tuple[int, int]]) -> None:
    ends = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    expected = sorted({e for a, b in pairs if a != b for e in ((a, b), (b, a))})
    assert list(map(tuple, _graphs.undirected(ends, 7).T.tolist())) == expected
