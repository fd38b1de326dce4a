"""Kernels are there where Triton is, or a compiler."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from profcil.accel import loader

build = loader.load_or_compile.__wrapped__  # as in a process that has not asked yet
needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="no compiler")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@needs_compiler
def test_a_file_in_c_is_compiled_once_a_machine(folder, monkeypatch):
    assert build("cpu/adapter_head.c").room
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert build("cpu/adapter_head.c").room
    assert [f.suffix for f in folder.iterdir()] == [".so"]


@needs_compiler
def test_many_may_compile_at_once_and_another_processor_compiles_its_own(folder, monkeypatch):
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(build, ["cpu/adapter_head.c"] * 4))
    monkeypatch.setattr(loader, "processor", lambda: "another one")
    assert build("cpu/adapter_head.c") is not None
    assert len(list(folder.iterdir())) == 2


@needs_compiler
def test_a_cache_that_cannot_be_written_or_holds_a_broken_file_does_no_harm(folder):
    folder.parent.write_text("a file, where a folder should be")
    assert build("cpu/adapter_head.c") is not None
    folder.parent.unlink()
    assert build("cpu/adapter_head.c") is not None
    (kept,) = folder.iterdir()
    kept.unlink()
    kept.write_bytes(b"half of it")
    assert build("cpu/adapter_head.c") is not None
    assert kept.stat().st_size > 1000


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "cc -no-such-flag"])
def test_without_a_compiler_there_is_no_library(folder, monkeypatch, compiler):
    monkeypatch.setenv("CC", compiler)
    assert build("cpu/adapter_head.c") is None
    assert not folder.exists()


def test_a_module_of_kernels_is_none_where_triton_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    names = ("batchnorm", "conv3x3", "conv_stem", "augmentations", "adapter_head", "sgd")
    for name in [f"triton.{name}" for name in names]:
        monkeypatch.delitem(sys.modules, f"profcil.accel.{name}", raising=False)
        assert loader.kernel_module.__wrapped__(name) is None


def test_triton_reads_itself_beside_other_work_where_there_is_one(monkeypatch):
    read = []
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", SimpleNamespace(triton_key=lambda: read.append(1)))
    for parent in ("triton", "triton.runtime"):
        monkeypatch.setitem(sys.modules, parent, SimpleNamespace(__path__=[]))
    loader.prepare("cuda").join()
    assert read == [1]
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", None)  # no such module
    loader.prepare("cuda").join()
    assert read == [1]


@needs_compiler
def test_on_a_cpu_everything_in_c_is_compiled_beside_other_work_and_once(folder, monkeypatch):
    loader.load_or_compile.cache_clear()
    loader.prepare("cpu").join()
    assert len(list(folder.iterdir())) == len(list(loader.PACKAGE.rglob("*.c"))) > 1
    made, run = [], subprocess.run
    monkeypatch.setattr(loader, "processor", lambda: "another one")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: (made.append(a), run(*a, **k))[1])
    loader.load_or_compile.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        assert len(set(map(id, pool.map(loader.c_library, ["cpu/adapter_head.c"] * 4)))) == len(made) == 1
    loader.load_or_compile.cache_clear()
