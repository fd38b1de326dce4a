"""Which method is best: order by mean over seeds, the best of each value, what is unknown."""

from __future__ import annotations

from statistics import fmean, stdev

import pytest
from test_run_tables import make_run

from profcil.reporting.groups import label_of
from profcil.reporting.presets import named_differences
from profcil.reporting.ranking import rank_runs
from profcil.reporting.significance import holm, paired_p
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


def test_methods_are_tested_against_the_best_if_there_are_three_seeds() -> None:
    """As scipy's paired t-test, adjusted for two comparisons; not with two seeds."""
    stats = pytest.importorskip("scipy.stats")
    right = {"promax": (8, 9, 9), "pro": (3, 5, 6), "fedavg": (1, 2, 1)}
    runs = [make_run(method, seed, right=n) for method, counts in right.items() for seed, n in enumerate(counts)]
    (standings,) = rank_runs(runs).values()
    faa = {method: [summarise_run(run)["faa"] for run in runs if run.config["method"] == method] for method in right}
    raw = {method: stats.ttest_rel(faa["promax"], faa[method]).pvalue for method in ("pro", "fedavg")}
    smaller, larger = sorted(raw.values())
    found = {one.group.method: one.p for one in standings}
    assert found["promax"] is None
    assert sorted([found["pro"], found["fedavg"]]) == pytest.approx([2 * smaller, max(2 * smaller, larger)])
    (few,) = rank_runs([run for run in runs if run.config["seed"] < 2]).values()
    assert [one.p for one in few] == [None, None, None]


def test_equal_differences_have_no_test() -> None:
    assert paired_p([2.0, 2.0, 2.0]) is None and paired_p([1.0]) is None
    assert holm([None, 0.01, 0.03, 0.02]) == [None, 0.03, 0.04, 0.04]


def test_own_data_of_two_files_is_not_ranked_together() -> None:
    runs = [make_run("fedavg", dataset="own", own={"name": name}) for name in ("reviews", "letters")]
    assert list(rank_runs(runs)) == ["own letters, severe", "own reviews, severe"]


def test_a_run_by_a_preset_has_the_name_of_the_preset():
    config = {"dataset": "cora", "setting": "severe", "method": "promax", "seed": 0}
    plain = config | {"params": {"covariance": "diagonal", "closed_head": False, "noise": 0.5, "transport": "local"}}
    plus = {"covariance": "shared", "closed_head": True, "noise": 1.0, "transport": "linear"}
    ridges = [config | {"params": plus | {"ridge": value}} for value in (0.01, 0.1)]
    assert named_differences([plain]) == [{}]
    assert named_differences([plain, ridges[0]]) == [{}, {"preset": "plus"}]
    both = named_differences([plain, *ridges])
    assert [label_of("promax", settings) for settings in both] == [
        "PRO-MAX",
        "PRO-MAX+ (ridge=0.01)",
        "PRO-MAX+ (ridge=0.1)",
    ]
    assert label_of("fedavg", {"preset": "paper"}) == "FedAvg (literal reading)"
