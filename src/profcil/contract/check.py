"""Checks every promise of the contract for one method, modality by modality."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from profcil import registry
from profcil.contract.case import MethodCase
from profcil.contract.promises import PROMISES, RUNS, SETTINGS, check_params
from profcil.contract.stream import BUNDLES
from profcil.errors import ProfcilError
from profcil.plugin_errors import explained


def check(name: str) -> Iterator[dict[str, Any]]:
    """Check every promise on every modality that the method declares. `holds` is None if it could not be checked.

    If a stream cannot be run at all, the other promises of that modality are left out.
    """
    yield row(SETTINGS, "", check_params(name))
    declared = registry.find("methods", name).METHOD.modalities
    for modality in BUNDLES:
        if modality not in declared:
            continue
        if modality == "graph" and find_spec("torch_geometric") is None:
            unchecked = row(RUNS, modality, "graphs need torch-geometric; `pip install 'profcil[graph]'`")
            yield {**unchecked, "holds": None}
            continue
        case = MethodCase(name, modality)
        for promise, check_promise in PROMISES.items():
            fault = fault_of(check_promise, case)
            yield row(promise, modality, fault)
            if fault and promise == RUNS:
                break


def fault_of(check_promise: Callable[[MethodCase], str], case: MethodCase) -> str:
    """What a check finds. An exception of the method is a fault as well."""
    try:
        return check_promise(case)
    except ProfcilError as error:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # third-party code may raise anything
        return explained(error)


def row(promise: str, data: str, fault: str) -> dict[str, Any]:
    """One line of the report."""
    return {"promise": promise, "data": data, "holds": not fault, "why_not": fault}
