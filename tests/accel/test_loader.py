"""Kernels can be loaded where Triton is installed, or a compiler."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from profcil.accel import loader

SOURCE = "cpu/normal.c"  # the file that compiles fastest
build = loader.load_or_compile.__wrapped__  # without the cache of this process
needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="no compiler")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "compiled"


@needs_compiler
def test_a_file_in_c_is_compiled_once_a_machine(folder, monkeypatch):
    assert build(SOURCE).normal
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert build(SOURCE).normal
    assert [f.suffix for f in folder.iterdir()] == [".so"]


@needs_compiler
def test_many_may_compile_at_once_and_another_processor_compiles_its_own(folder, monkeypatch):
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(build, [SOURCE] * 4))
    monkeypatch.setattr(loader, "processor", lambda: "another one")
    assert build(SOURCE) is not None
    assert len(list(folder.iterdir())) == 2


@needs_compiler
def test_a_cache_that_cannot_be_written_or_holds_a_broken_file_does_no_harm(folder):
    folder.parent.write_text("a file, where a folder should be")
    assert build(SOURCE) is not None
    folder.parent.unlink()
    assert build(SOURCE) is not None
    (kept,) = folder.iterdir()
    kept.unlink()
    kept.write_bytes(b"half of it")
    assert build(SOURCE) is not None
    (again,) = folder.iterdir()
    assert again.stat().st_size > 1000


PLANTED = "void planted(void) {}  double normal(void) { return 1; }"


def plant(folder, path):
    """Compiles foreign code to the place of a cached library."""
    source = folder / "planted.c"
    source.write_text(PLANTED)
    path.unlink(missing_ok=True)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(path), str(source)], check=True)


def is_foreign(library):
    return hasattr(library, "planted")


@pytest.fixture
def cached(folder):
    """A cached library, as this user has compiled it."""
    assert build(SOURCE).normal
    (path,) = folder.iterdir()
    return path


@needs_compiler
def test_the_cache_is_made_for_this_user_alone(cached):
    modes = [oct(path.stat().st_mode & 0o777) for path in (cached.parent.parent, cached.parent, cached)]
    assert modes == ["0o700", "0o700", "0o600"]


@needs_compiler
def test_foreign_code_in_the_place_of_a_library_is_not_loaded(cached, tmp_path):
    plant(tmp_path, cached)  # its digest is not that of the name
    assert not is_foreign(build(SOURCE))
    (again,) = cached.parent.iterdir()
    named = again.with_name(f"{again.stem.rsplit('-', 1)[0]}-{'0' * 24}.so")
    plant(tmp_path, named)
    assert not is_foreign(build(SOURCE))


@needs_compiler
def test_a_flipped_bit_in_a_library_is_noticed(cached):
    before = cached.read_bytes()
    data = bytearray(before)
    data[len(data) // 2] ^= 1
    cached.unlink()
    cached.write_bytes(data)
    assert build(SOURCE).normal
    assert [path.read_bytes() for path in cached.parent.iterdir()] == [before]


@needs_compiler
@pytest.mark.parametrize("what", ["folder", "file", "link"])
def test_a_library_that_another_user_can_write_is_not_loaded(cached, tmp_path, what):
    """Even with the digest in its name: who writes the one can write the other."""
    folder = cached.parent
    source = tmp_path / "own"
    source.mkdir()
    plant(source, source / "planted.so")
    stem = cached.stem.rsplit("-", 1)[0]
    cached.unlink()
    forged = folder / f"{stem}-{loader.digest((source / 'planted.so').read_bytes())}.so"
    shutil.copy(source / "planted.so", forged)
    forged.chmod(0o600)
    assert is_foreign(build(SOURCE))  # as long as no other user can have written it
    if what == "folder":
        folder.chmod(0o777)
    elif what == "file":
        forged.chmod(0o666)
    elif what == "link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    assert not is_foreign(build(SOURCE))


OTHERS = [{"st_uid": 12345}, {"st_mode": 0o100620}, {"st_mode": 0o100602}, {"st_mode": 0o120600}]


@pytest.mark.parametrize("change", OTHERS)
def test_what_belongs_to_this_user_alone(change):
    ours = {"st_uid": os.geteuid(), "st_mode": 0o100644}
    assert loader.belongs_to_user(SimpleNamespace(**ours), stat.S_ISREG)
    assert not loader.belongs_to_user(SimpleNamespace(**ours | change), stat.S_ISREG)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "cc -no-such-flag"])
def test_without_a_compiler_there_is_no_library(folder, monkeypatch, compiler):
    monkeypatch.setenv("CC", compiler)
    assert build(SOURCE) is None
    assert not folder.exists()


def test_a_module_of_kernels_is_none_where_triton_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    names = ("batchnorm", "conv3x3", "conv_stem", "augmentations", "adapter_head", "sgd")
    for name in [f"triton.{name}" for name in names]:
        monkeypatch.delitem(sys.modules, f"profcil.accel.{name}", raising=False)
        assert loader.kernel_module.__wrapped__(name) is None


def test_the_hash_of_triton_is_computed_in_the_background(monkeypatch):
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
def test_on_a_cpu_all_c_files_are_compiled_once_in_the_background(folder, monkeypatch):
    loader.load_or_compile.cache_clear()
    loader.prepare("cpu").join()
    assert len(list(folder.iterdir())) == len(list(loader.PACKAGE.rglob("*.c"))) > 1
    made, run = [], subprocess.run
    monkeypatch.setattr(loader, "processor", lambda: "another one")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: (made.append(a), run(*a, **k))[1])
    loader.load_or_compile.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        assert len(set(map(id, pool.map(loader.c_library, [SOURCE] * 4)))) == len(made) == 1
    loader.load_or_compile.cache_clear()
