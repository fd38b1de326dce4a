"""A state's copy on the host is complete while other work runs on the device."""

from __future__ import annotations

import pytest
import torch

from profcil.io.atomic_files import host_copies

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def test_copies_are_of_what_was_computed_before_and_not_after():
    a = torch.randn(2048, 2048, device="cuda")
    filters = torch.randn(64, 32, 3, 3, device="cuda").to(memory_format=torch.channels_last)
    for _ in range(20):
        a = (a @ a).div_(50)
    copies = host_copies({"a": a, "filters": filters, "host": torch.ones(3)})
    expected = a.clone(), filters.clone()
    a.zero_()
    filters.zero_()
    assert torch.equal(copies["a"], expected[0].cpu()) and torch.equal(copies["filters"], expected[1].cpu())
    assert all(t.device.type == "cpu" and t.is_contiguous() for t in copies.values())
