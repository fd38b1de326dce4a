"""Kernels are there where Triton is."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from profcil import kernels


def test_a_module_of_kernels_is_none_where_triton_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    encoders = [f"encoders.{name}" for name in ("_kernels", "_filters", "_stem", "_views", "_tails")]
    for name in (*encoders, "engine._kernels"):
        monkeypatch.delitem(sys.modules, f"profcil.{name}", raising=False)
        assert kernels.found.__wrapped__(name) is None


def test_triton_reads_itself_beside_other_work_where_there_is_one(monkeypatch):
    read = []
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", SimpleNamespace(triton_key=lambda: read.append(1)))
    for parent in ("triton", "triton.runtime"):
        monkeypatch.setitem(sys.modules, parent, SimpleNamespace(__path__=[]))
    kernels.wake().join()
    assert read == [1]
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", None)  # no such module
    kernels.wake().join()
    assert read == [1]
