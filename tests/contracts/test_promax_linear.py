"""The contract of every method, for PRO-MAX with linear transport and all its options beyond the paper."""

from __future__ import annotations

import pytest

from profcil.contract.case import MethodCase
from profcil.contract.promises import PROMISES

OPTIONS = {"transport": "linear", "covariance": "shared", "closed_head": True, "keep_scores": 1.0}
ROUNDING = "accelerated computation gives the result of the reference, up to rounding"


@pytest.fixture(scope="module", params=["image", "text", "graph"])
def case(request) -> MethodCase:
    if request.param == "graph":
        pytest.importorskip("torch_geometric")
    return MethodCase("promax", request.param, settings={f"params.{name}": value for name, value in OPTIONS.items()})


@pytest.mark.parametrize("promise", PROMISES, ids=str)
def test_the_contract_holds(case, promise):
    if promise == ROUNDING and case.modality == "text":
        pytest.skip("a class with one example has a spread of rounding errors, with any transport")
    assert PROMISES[promise](case) == ""


def test_the_memory_is_carried(case):
    """The promises would say nothing about linear transport if nothing were reported."""
    assert case.finished.state.ledger.total(direction="up", kind="transport") > 0
