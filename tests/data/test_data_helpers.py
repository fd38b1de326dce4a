from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from profcil import registry
from profcil.data import cifar100, files, loading, unpickle
from profcil.data.bundle import Bundle, Facts, File
from profcil.errors import ConfigError, DataError


class Malicious:
    def __reduce__(self) -> tuple:
        return os.system, ("touch owned",)


@pytest.mark.parametrize("allowed", [unpickle.ARRAYS, unpickle.GRAPHS])
def test_a_pickle_that_calls_a_function_is_refused_before_the_call(tmp_path, monkeypatch, allowed) -> None:
    monkeypatch.chdir(tmp_path)
    for protocol in (0, 2, 4):
        Path("bad").write_bytes(pickle.dumps({"data": Malicious()}, protocol=protocol))
        with pytest.raises(DataError, match=r"asks for (posix|nt)\.system"):
            unpickle.load(Path("bad"), allowed)
    assert not Path("owned").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80\x02", b"garbage", b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R."],
)
def test_a_damaged_pickle_is_a_data_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(DataError, match="could not be read as a pickle"):
        unpickle.load(tmp_path / "bad")


def test_the_restricted_unpickler_reads_arrays(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    (tmp_path / "ok").write_bytes(pickle.dumps({"a": array}, protocol=2))
    assert np.array_equal(unpickle.array(unpickle.load(tmp_path / "ok")["a"]), array)


@pytest.mark.parametrize(
    "indices, indptr", [([0, 5], [0, 1, 2]), ([0, -1], [0, 1, 2]), ([0, 1], [0, 2, 1]), ([0], [0, 1])]
)
def test_inconsistent_sparse_arrays_are_refused(indices: list[int], indptr: list[int]) -> None:
    with pytest.raises(ValueError, match="sparse matrix"):
        unpickle.densify(np.ones(len(indices)), np.array(indices), np.array(indptr), (2, 3))


def test_cache_falls_back_when_the_data_folder_is_read_only(tmp_path: Path) -> None:
    read_only = tmp_path / "file"  # a file, so that nothing can be written below it
    read_only.write_text("")
    calls = []

    def make() -> dict[str, np.ndarray]:
        calls.append(1)
        return {"x": np.arange(3)}

    for _ in range(2):
        assert files.cached(read_only, "key", make)["x"].tolist() == [0, 1, 2]
    assert len(calls) == 1
    assert files.user_cache().joinpath("key/x.npy").exists()


def test_a_damaged_cache_is_made_again(tmp_path: Path) -> None:
    for content in (b"", b"not an array"):
        files.cached(tmp_path, "key", lambda: {"x": np.arange(3)})
        (tmp_path / ".profcil/key/x.npy").write_bytes(content)
        assert files.cached(tmp_path, "key", lambda: {"x": np.arange(3)})["x"].tolist() == [0, 1, 2]
    assert [p.name for p in (tmp_path / ".profcil").iterdir()] == ["key"]  # no temporary folder remains


def test_a_failed_write_leaves_no_partial_cache(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        files.write_arrays(tmp_path / "key", {"x": np.arange(3), "y": np.array([{}], dtype=object)})
    assert list(tmp_path.iterdir()) == []


def test_fault_compares_size_then_checksum(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"abc")
    sha1 = "a9993e364706816aba3e25717850c26c9cd0d89d"  # FIPS 180's example
    assert files.fault(File("f", size=3, sha1=sha1), path) is None
    assert "has 3 bytes" in files.fault(File("f", size=4), path)
    assert "has sha1" in files.fault(File("f", sha1=sha1[::-1]), path)
    assert files.fault(File("f", sha1=sha1[::-1]), path, checksum=False) is None


def test_verify_reports_a_wrong_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import official

    official.cifar_binary(tmp_path / "cifar100", classes=100)
    without_sizes = tuple(replace(file, size=None) for file in cifar100.FACTS.files)
    monkeypatch.setattr(cifar100, "FACTS", replace(cifar100.FACTS, files=without_sizes))
    assert all("has sha1" in problem for problem in loading.verify(tmp_path, "cifar100"))
    assert len(loading.verify(tmp_path, "cifar100")) == 2


def test_verify_and_status_of_an_empty_folder(tmp_path: Path) -> None:
    rows = {row["dataset"]: row for row in loading.status(tmp_path)}
    assert rows["digits"]["complete"]
    assert [name for name, row in rows.items() if row["present"]] == ["digits"]
    assert "profcil data fetch cora" in rows["cora"]["how"]
    assert len(loading.verify(tmp_path, "cora")) == 8
    assert loading.verify(tmp_path, "digits") == []


def test_the_error_for_an_unknown_dataset_suggests_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean cifar100"):
        loading.load_bundle("cifar10", tmp_path)


@pytest.mark.parametrize("name", registry.names("data"))
def test_every_dataset_has_a_complete_fact_table(name: str, tmp_path: Path) -> None:
    module = registry.find("data", name)
    facts: Facts = module.FACTS
    assert facts.name == name
    assert facts.modality in {"image", "text", "graph"}
    assert facts.classes > 1 and facts.train > facts.classes and facts.test > facts.classes
    assert all([facts.title, facts.views, facts.encoder, facts.homepage, facts.licence, facts.get])
    assert all(file.url or not file.archive for file in facts.files)
    has_address = any(file.url for file in facts.files)
    assert has_address or not facts.files or name == "ogbn_arxiv_standin"  # whose features are a user's own
    try:
        assert isinstance(module.load(tmp_path, seed=0), Bundle)
        assert not facts.files
    except DataError as error:
        assert "was not found; looked in" in str(error) and "\n" not in str(error)
