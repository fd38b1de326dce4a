"""Which method is best: order by mean over seeds, the best of each value, what is unknown."""

from __future__ import annotations

from statistics import fmean, stdev

import pytest
from test_run_tables import make_run

from profcil.reporting.ranking import rank_runs
from profcil.reporting.tables import render
from profcil.runs.reader import Run, summarise_run


def scattered_runs() -> list[Run]:
    """FedAvg is below PRO-MAX in the mean, but above it in one seed."""
    fedavg = [make_run("fedavg", seed, right=right) for seed, right in ((0, 3), (1, 7))]
    promax = [make_run("promax", seed, right=right) for seed, right in ((0, 6), (1, 6))]
    return [*fedavg, *promax]


def test_methods_are_ordered_by_their_mean_over_seeds() -> None:
    runs = scattered_runs()
    (standings,) = rank_runs(runs).values()
    assert [one.group.label for one in standings] == ["PRO-MAX", "FedAvg"]
    values = [summarise_run(run)["faa"] for run in runs[:2]]
    faa = standings[1].values["faa"]
    assert (faa.mean, faa.sd) == pytest.approx((fmean(values), stdev(values)))


def test_the_best_of_each_value_is_marked_and_less_forgetting_is_better() -> None:
    (standings,) = rank_runs([make_run("fedavg", right=9), make_run("promax", right=3)]).values()
    fedavg, promax = standings
    assert fedavg.group.method == "fedavg" and fedavg.best == {"faa", "cta"} and promax.best == {"af"}


def test_nothing_is_best_without_a_rival() -> None:
    (standings,) = rank_runs([make_run("fedavg")]).values()
    assert standings[0].best == frozenset() and standings[0].values["faa"].sd is None


def test_every_stream_has_its_own_ranking() -> None:
    runs = [make_run("fedavg"), make_run("promax"), make_run("promax", setting="homogeneous")]
    chosen = make_run("promax", evaluate="validation")
    assert sorted(len(standings) for standings in rank_runs([*runs, chosen]).values()) == [1, 1, 2]


def test_traffic_relative_to_another_protocol_is_unknown() -> None:
    runs = [make_run("promax", 0), make_run("promax", 1, train={"rounds": 9}), make_run("fedavg", 0)]
    (standings,) = rank_runs(runs).values()
    found = {one.group.label: one.values["norm_comm"] for one in standings}
    assert found["PRO-MAX (rounds=1)"].mean == 1.0 and found["PRO-MAX (rounds=9)"] is None


def test_the_comparison_names_differing_settings() -> None:
    runs = [make_run("promax", params={"noise": noise, "quota": 20}) for noise in (0.5, 1.0)]
    text = render([*runs, make_run("fedavg")])
    assert "PRO-MAX (noise=0.5)" in text and "PRO-MAX (noise=1.0)" in text
    assert "quota" not in text and "FedAvg " in text
