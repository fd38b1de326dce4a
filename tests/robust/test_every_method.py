"""Every method runs with robust aggregation, and no honest reply is called impossible."""

from __future__ import annotations

import pytest

from profcil import registry
from profcil.contract.stream import short_server_training
from profcil.engine import admission

RULES = ("clipped", "median", "trimmed", "krum", "geometric")


def image_methods() -> list[str]:
    return [n for n in registry.names("methods") if "image" in registry.find("methods", n).METHOD.modalities]


@pytest.mark.parametrize(("name", "number"), [(n, i) for i, n in enumerate(image_methods())])
def test_a_method_runs_with_a_rule(fresh, monkeypatch, name, number):
    found = []
    look = admission.impossible

    def noted(reply, known):
        reasons = list(look(reply, known))
        found.append(reasons)
        return iter(reasons)

    monkeypatch.setattr(admission, "impossible", noted)
    short = {f"params__{key}": value for key, value in short_server_training(name).items()}
    size = {"model__norm": "batch", "task_size": 5, "support": 1.0, "participants": 4, "clients": 4}
    run = fresh(name, **size, train__rounds=2, robust__aggregation=RULES[number % len(RULES)], **short)
    run.stream()
    assert found and not any(found)
    assert (run.state.scores.correct[-1] >= 0).all()
