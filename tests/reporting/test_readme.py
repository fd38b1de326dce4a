"""The numbers of the README's table are those of the results store."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean

import pytest

from profcil.reporting.groups import group_runs
from profcil.reporting.results_page import preset_of
from profcil.runs.results.store import load_store, rows_of_one_version

ROOT = Path(__file__).parents[2]
DATASETS = {
    "digits": "digits",
    "Cora": "cora",
    "Coauthor CS": "coauthor_cs",
    "CLINC150": "clinc150",
    "THUCNews-10": "thucnews10",
    "CIFAR-100": "cifar100",
}
NUMBER = re.compile(r"\d+\.\d")


def table() -> dict[str, dict[str, list[float]]]:
    """Row and dataset: the numbers for severe and homogeneous streams."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = text.partition("| | digits |")[2].split("\n\n")[0].splitlines()
    heads = [cell.strip() for cell in ("digits |" + lines[0]).split("|") if cell.strip()]
    rows = {}
    for line in lines[2:]:
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[name] = {
            head: [float(found) for found in NUMBER.findall(cell)] for head, cell in zip(heads, cells, strict=True)
        }
    return rows


def mean_faa(dataset: str, setting: str, label: str) -> float:
    """Of the runs by the recipe or by a preset."""
    runs = rows_of_one_version(load_store(ROOT / "results" / f"{dataset}.csv"))
    runs = [run for run in runs if run.values["part"] == "test" and run.config["setting"] == setting]
    groups = group_runs([run for run in runs if not run.values["settings"] or preset_of(run)])
    (found,) = [group for group in groups if group.label == label]
    return fmean(run.values["faa"] for run in found.runs)


@pytest.mark.parametrize("title", DATASETS)
@pytest.mark.parametrize("method", ["PRO-LIN", "PRO-MAX+"])
def test_the_table_has_the_means_of_the_store(title: str, method: str) -> None:
    shown = table()[method][title]
    for number, setting in zip(shown, ("severe", "homogeneous"), strict=True):
        assert number == pytest.approx(mean_faa(DATASETS[title], setting, method), abs=0.0501)


def test_the_best_of_our_runs_is_bold() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = table()
    (line,) = [line for line in text.splitlines() if line.startswith("| PRO-LIN | **")]
    assert line.count("**") == 4 * len(DATASETS)
    for title in DATASETS:
        for name in ("FedAvg, chosen", "PRO-MAX, chosen", "PRO-MAX+"):
            assert all(one > other for one, other in zip(rows["PRO-LIN"][title], rows[name][title], strict=True))
