"""Tests of the kernels for GPUs, by Triton's interpreter on a CPU.

A kernel is made for the interpreter or for a GPU when its module is imported. So these tests need a process with
TRITON_INTERPRET=1, which tests/accel/test_kernels_by_interpreter.py starts. The interpreter does not know tiles of
bfloat16; the kernels compute in float32 here.
"""

from __future__ import annotations

import os

import pytest
import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(0)
