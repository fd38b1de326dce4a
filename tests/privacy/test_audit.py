"""Attacks on finished runs find what is there, and nothing where it is protected."""

from __future__ import annotations

import json

import pytest
from test_private_runs import EXAMPLE, private

from profcil.cli.main import main
from profcil.diagnostics.leakage import roc_area
from profcil.engine.run import start


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The audit of a small run with noise."""
    home = tmp_path_factory.mktemp("audit")
    folder = start(private("prolin", EXAMPLE), home / "run", home)
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["audit", str(folder), "--trials", "100", "--json"]) == 0
    return {(row["attack"], row["protection"]): row for row in json.loads(out.getvalue())}


def test_a_report_of_one_example_is_the_example(rows):
    assert rows["identify", "none"]["value"] == 1.0
    rebuilt = rows["rebuild", "none"]
    assert rebuilt["value"] > 0.85 > rebuilt["guessing"]
    assert rows["member", "none"]["value"] > 0.55


def test_minimum_support_sends_no_single_example_but_hides_no_member(rows):
    assert rows["identify", "minimum support 2"]["found"] == "nothing was sent"
    assert ("rebuild", "minimum support 2") not in rows
    assert rows["member", "minimum support 2"]["value"] == rows["member", "none"]["value"]


def test_a_sum_hides_an_example_among_others_of_its_class(rows):
    assert rows["identify", "secure sum"]["value"] < 0.5
    assert rows["rebuild", "secure sum"]["value"] < rows["rebuild", "none"]["value"]


@pytest.mark.parametrize("protection", ["noise, ε = 1", "both, ε = 1", "as the run was"])
def test_noise_hides_examples(rows, protection):
    assert rows["identify", protection]["value"] <= 0.15
    assert rows["rebuild", protection]["value"] < rows["rebuild", protection]["guessing"]
    assert 0.4 < rows["member", protection]["value"] < 0.6


def test_the_area_under_the_curve():
    assert roc_area([2.0, 3.0], [0.0, 1.0]) == 1.0
    assert roc_area([0.0], [1.0]) == 0.0
    assert roc_area([1.0], [1.0]) == 0.5


def test_mistakes_are_one_sentence(tmp_path, capsys):
    assert main(["audit", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["audit", str(tmp_path), "--trials", "0"]) == 2


def test_of_a_method_without_reports_the_model_alone_is_attacked(tmp_path, capsys):
    folder = start(private("fedavg", {}), tmp_path / "run", tmp_path)
    assert main(["audit", str(folder), "--trials", "5"]) == 0
    text = capsys.readouterr().out
    assert "fedavg sends no class means" in text and "from the final model" in text
