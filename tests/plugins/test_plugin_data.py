"""A dataset plug-in is checked before a run starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from profcil.cli.main import main
from profcil.data import loading
from profcil.engine.world import make_world
from profcil.errors import ConfigError, DataError
from profcil.resolve import resolve

Install = Callable[..., Path]

HEAD = """
import torch
from profcil.extend import Bundle, Facts, File, Nodes, Rows

def facts(modality, encoder, **more):
    return Facts("mine", "Mine", modality, classes=3, train=None, test=None, encoder=encoder, **more)

y = torch.arange(12) % 3
RECIPE = {"stream": {"clients": 2, "participants": 2, "task_size": 1}, "train": {"rounds": 1}, "warmup": {"rounds": 1}}
"""
IMAGES = (
    HEAD
    + """
FACTS = facts("image", "convnet", views=("crop",))
x = torch.randint(0, 256, (12, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
def load(root, seed=0):
    return Bundle(FACTS, Rows(x, y), Rows(x, y), None, tuple("abc"))
"""
)
FLOATS = IMAGES.replace("def load", "x = x.float() / 255\ndef load")
TEXTS = (
    HEAD
    + """
FACTS = facts("text", "textcnn", views=("drop",))
x = torch.arange(36).view(12, 3) % 9
def load(root, seed=0):
    return Bundle(FACTS, Rows(x, y), Rows(x, y), None, tuple("abc"), vocabulary=9)
"""
)
GRAPH = (
    HEAD
    + """
FACTS = facts("graph", "gat")
x, nodes = torch.rand(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12)
edges = torch.tensor([[0, 1, 2, 1, 2, 3], [1, 2, 3, 0, 1, 2]])
def load(root, seed=0):
    part = Nodes(x, edges, y, nodes)
    return Bundle(FACTS, part, part, None, tuple("abc"))
"""
)


@pytest.mark.parametrize("source", [IMAGES, FLOATS, TEXTS, GRAPH], ids=["bytes", "floats", "texts", "graph"])
def test_valid_dataset_runs(source: str, install_plugin: Install, tmp_path: Path) -> None:
    install_plugin(data={"mine": source})
    world = make_world(resolve(flags={"dataset": "mine", "method": "fedavg"}), tmp_path)
    assert len(world.bundle.train) == 12


@pytest.mark.parametrize(
    ("source", "old", "new", "expected"),
    [
        (IMAGES, '("crop",)', '("corp",)', "unknown view of Mine 'corp'; did you mean crop"),
        (TEXTS, '("drop",)', '("crop",)', "unknown view of Mine 'crop'"),
        (IMAGES, '"image"', '"picture"', "unknown modality 'picture'"),
        (IMAGES, "y = torch.arange(12) % 3", "y = (torch.arange(12) % 3).int()", "int64 label"),
        (IMAGES, "arange(12) % 3", "arange(12) % 2", r"no training example of class 2 \(c\)"),
        (IMAGES, "arange(12) % 3", "zeros(12, dtype=torch.long)", r"class 1 \(b\) and 1 more"),
        (IMAGES, "def load", "x = x.long()\ndef load", "uint8 or float32"),
        (IMAGES, "def load", "x = x.flatten(1)\ndef load", "uint8 or float32"),
        (FLOATS, "/ 255", "", "where floats lie in 0 to 1"),
        (TEXTS, "vocabulary=9", "vocabulary=8", "token ids from 0 to 8 where the Bundle's vocabulary is 8"),
        (TEXTS, ", vocabulary=9", "", "vocabulary is 0"),
        (GRAPH, "1, 2, 3, 0, 1, 2]]", "1, 2, 99, 0, 1, 2]]", "edges from 0 to 99 where the graph has nodes 0 to 11"),
        (GRAPH, "[[0, 1, 2, 1, 2, 3], [1, 2, 3, 0, 1, 2]]", "[[0, 1, 2], [1, 2, 0]]", "one direction"),
        (GRAPH, "nodes = torch.rand(12, 4", "nodes = torch.rand(11, 4", "nodes from 0 to 11"),
        (IMAGES, "return Bundle(", "return (", "returns tuple where a Bundle is expected"),
    ],
)
def test_invalid_dataset_is_refused(
    source: str, old: str, new: str, expected: str, install_plugin: Install, tmp_path: Path
) -> None:
    assert old in source
    install_plugin(data={"mine": source.replace(old, new)})
    with pytest.raises((DataError, ConfigError), match=expected):
        loading.load_bundle("mine", tmp_path)


def test_statistics_of_a_loader_are_kept(install_plugin: Install, tmp_path: Path) -> None:
    install_plugin(data={"mine": FLOATS})
    computed = loading.load_bundle("mine", tmp_path)
    install_plugin(data={"mine": FLOATS.replace('tuple("abc")', 'tuple("abc"), mean=(0.1,), std=(0.2,)')})
    own = loading.load_bundle("mine", tmp_path)
    assert (own.mean, own.std) == ((0.1,), (0.2,)) and own.fingerprint != computed.fingerprint
    x = computed.train.x.double()
    assert computed.mean == pytest.approx([float(x.mean())])
    assert computed.std == pytest.approx([float(x.std(correction=0))])


def test_floats_and_bytes_have_the_same_statistics() -> None:
    x = torch.randint(0, 256, (5, 2, 3, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for exact, measured in zip(
        loading.channel_statistics(x), loading.channel_statistics(x.double() / 255), strict=True
    ):
        assert measured == pytest.approx(exact)


def test_missing_file_is_reported(
    install_plugin: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    install_plugin(data={"mine": IMAGES.replace("    return Bundle", '    open(root / "mine.npz")\n    return Bundle')})
    assert main(["run", "--dataset", "mine", "--data-dir", "nowhere"]) == 2
    err = capsys.readouterr().err
    assert "mine.npz" in err and err.count("\n") == 1 and "get it with ;" not in err
    assert loading.verify(tmp_path, "mine") and "mine.npz" in loading.verify(tmp_path, "mine")[0]


def test_status_is_not_known_without_a_list_of_files(
    install_plugin: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install_plugin(data={"mine": IMAGES})
    assert main(["data", "status", "mine", "--data-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "unknown" in out and "list no files" in out and "complete" not in out
    install_plugin(data={"mine": IMAGES.replace('views=("crop",)', 'files=(File("mine.npz"),)')})
    (row,) = [r for r in loading.status(tmp_path) if r["dataset"] == "mine"]
    assert not row["present"] and row["missing"] == ["mine.npz"]
    assert "put it there" in loading.verify(tmp_path, "mine")[0]
