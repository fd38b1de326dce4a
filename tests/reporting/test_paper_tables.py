"""The tables of the paper on synthetic items: means, deviations, bold entries, tests and missing values."""

from __future__ import annotations

import csv
import io
from statistics import fmean, stdev

import pytest
from test_run_tables import make_run

from profcil.errors import RunFolderError
from profcil.reporting.formats import FORMATS, latex, markdown, to_csv
from profcil.reporting.grid import Column, Item, Table, TableEntry, build_table
from profcil.reporting.layouts import LAYOUTS
from profcil.reporting.paper import is_baseline, method_rank, method_title, paper_value
from profcil.reporting.significance import best_entries, describe_tests, paired_test
from profcil.reporting.table_metrics import METRICS, measure_runs
from profcil.runs.reader import Run

STREAM = {"support": 0.4, "disorder": 0.6, "weak_task": -1, "weak_strength": ""}


def item(method: str, seed: int = 0, variant: str = "", applicable: bool = True, **more) -> Item:
    config = {"method": method, "dataset": "cifar100", "setting": "severe", "seed": seed, "device": "cpu",
              "transfer": "changed", "regime": "matched", "stream": STREAM}  # fmt: skip
    values = more.pop("values", None)
    return Item(config | more, variant, applicable, values)


def results(method: str, faa: list[float], **more) -> list[Item]:
    return [item(method, s, values={"faa": v, "cta": v, "af": v, "comm": 1.0}, **more) for s, v in enumerate(faa)]


def severe(*items: Item) -> Table:
    return build_table(LAYOUTS["severe"], items)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (("results", "cifar100", "homogeneous", "fedcbdr", "cta"), (69.18, 1.04)),
        (("results", "cifar100", "homogeneous_expanded", "mfcl", "comm"), (3.0, None)),
        (("results", "cifar100", "severe", "promax", "faa"), (46.12, 0.88)),
        (("results", "thucnews10", "severe", "fedseit", "af"), (25.86, 1.39)),
        (("results", "cora", "homogeneous", "motion", "comm"), (1.36, None)),
        (("results", "tinyimagenet", "severe", "fedspace", "faa"), (24.88, 1.35)),
        (("results", "ogbn_arxiv", "homogeneous", "power", "cta"), (61.74, 2.18)),
        (("support", "cifar100", "0.2", "hr", "af"), (55.84, 2.18)),
        (("disorder", "cifar100", "0.0", "pro", "faa"), (43.76, 0.88)),
        (("ablation", "cifar100", "w/o shared warmup", "comm"), (1.04, None)),
        (("sensitivity", "cifar100", "proximal", "0.0001", "faa"), (43.84, 1.04)),
        (("sensitivity", "cifar100", "calibration", "256", "af"), (26.02, 1.06)),
        (("mismatch", "cifar100", "target", "drop"), (13.42, 1.06)),
        (("alignment", "cora", "promax", "align_z"), (0.81, 0.03)),
        (("cost", "clinc150", "fedseit", "down_gb"), (17.6, None)),
        (("cost", "cifar100", "promax", "warmup_hours"), (0.6, None)),
        (("results", "cifar100", "severe", "unknown", "faa"), None),
        (("results", "cifar100", "severe"), None),
    ],
)
def test_values_of_the_paper_are_found_by_their_keys(path, expected):
    assert paper_value(*path) == expected


def test_methods_are_in_the_order_of_the_paper_and_others_follow():
    assert sorted(["promax", "zeta", "hr", "fedavg"], key=method_rank) == ["fedavg", "hr", "promax", "zeta"]
    assert method_title("promax") == "PRO-MAX" and method_title("zeta") == "zeta"
    assert is_baseline("fedcbdr") and is_baseline("zeta") and not is_baseline("pro")


def test_markdown_has_mean_deviation_paper_value_and_seeds():
    values = [40.0, 44.0, 45.0]
    text = markdown(severe(*results("promax", values), *results("fedcbdr", [30.0, 31.0, 35.0])))
    assert f"**{fmean(values):.2f}** ± {stdev(values):.2f} [46.12]" in text
    assert "| cifar100 | FedCBDR | 3 |" in text


def test_an_entry_without_value_is_missing_or_not_applicable_or_a_dash():
    table = severe(item("fedavg"), item("hr", applicable=False), item("pro", values={"faa": 3.0, "comm": None}))
    rows = {line.split(" | ")[1]: line for line in markdown(table).splitlines() if line.startswith("| cifar100")}
    assert "missing [7.86]" in rows["FedAvg"] and "| 0 of 1 |" in rows["FedAvg"]
    assert "not applicable" in rows["HR"] and "missing" not in rows["HR"]
    assert "| - [1.120] |" in rows["PRO"] and "3.00 [43.28]" in rows["PRO"]


def test_missing_seeds_are_counted_and_the_mean_is_over_the_others():
    table = severe(*results("pro", [10.0, 20.0]), item("pro", 2))
    (row,) = table.rows
    entry = row.entries[Column("", "faa")]
    assert entry.mean == 15.0 and "| 2 of 3 |" in markdown(table)


def test_a_second_run_of_a_seed_is_left_out_with_a_note():
    text = markdown(severe(*results("pro", [10.0]), *results("pro", [99.0])))
    assert "10.00 [43.28]" in text and "99" not in text and "4 values came from a second run" in text


def test_rows_of_variants_keep_the_order_of_the_study():
    variants = [("PRO-MAX", "promax"), ("PRO", "pro"), ("w/o global refresh", "promax")]
    table = build_table(LAYOUTS["ablation"], [item(method, variant=name) for name, method in variants])
    assert [r.names[1] for r in table.rows] == [name for name, _ in variants]


def test_the_best_entry_depends_on_the_metric_and_is_chosen_within_a_block():
    table = build_table(
        LAYOUTS["homogeneous"],
        [
            *results("fedavg", [9.0], variant="matched", setting="homogeneous"),
            *results("pro", [5.0], variant="matched", setting="homogeneous"),
            *results("pro", [1.0], variant="expanded", setting="homogeneous"),
        ],
    )
    best = {(names[1:], c.metric) for names, c in best_entries(table)}
    assert {(("matched", "FedAvg"), "faa"), (("matched", "PRO"), "af")} <= best
    assert not any(names[0] == "expanded" for names, _ in best)  # alone in its block
    assert [r.names[1] for r in table.rows] == ["matched", "matched", "expanded"]


def test_promax_is_tested_against_the_best_baseline_over_common_seeds():
    stats = pytest.importorskip("scipy.stats")
    ours, good, poor = [50.0, 52.0, 51.0], [49.0, 49.5, 50.5], [10.0, 11.0, 12.0]
    table = severe(
        *results("promax", ours), *results("fedcbdr", good), *results("fedavg", poor), *results("pro", [60.0])
    )
    result = next(line for line in describe_tests(table) if " FAA:" in line)
    p = stats.ttest_rel(ours, good).pvalue
    assert "PRO-MAX against FedCBDR" in result and f"p = {p:.3g}" in result and "n = 3" in result
    forgetting = next(line for line in describe_tests(table) if " AF:" in line)
    assert "against FedAvg" in forgetting  # less forgetting is better


@pytest.mark.parametrize(
    ("one", "two", "message"),
    [
        ({0: 1.0}, {0: 2.0}, "no test with one seed"),
        ({0: 1.0, 1: 2.0}, {0: 2.0, 1: 3.0}, "same difference"),
        ({0: 1.0}, {1: 2.0}, "no common seed"),
    ],
)
def test_the_reason_is_given_if_no_test_is_possible(one, two, message):
    assert message in paired_test(TableEntry(one), TableEntry(two)) and "p =" not in paired_test(
        TableEntry(one), TableEntry(two)
    )


def test_sweeps_have_a_group_of_columns_and_paper_values_for_each_value():
    half, most = (STREAM | {"support": v} for v in (0.6, 0.8))
    table = build_table(
        LAYOUTS["support-sweep"], [*results("pro", [1.0], stream=most), *results("pro", [2.0], stream=half)]
    )
    text = markdown(table)
    assert "support 80%: FAA" in text and "support 60%: AF" in text
    assert "1.00 [44.26]" in text and "2.00 [43.92]" in text


def test_costs_are_split_by_transfer_and_paper_traffic_belongs_to_full():
    values = {"mb_down": 5.0, "mb_up": 4.0, "comm": 0.3, "seconds": 9.0, "warmup_seconds": 1.0}
    both = [item("pro", transfer=t, values=values | {"mb_down": d}) for t, d in (("changed", 5.0), ("full", 50.0))]
    entries = build_table(LAYOUTS["cost"], both).rows[0].entries
    assert entries[Column("changed", "mb_down")].mean == 5.0 and entries[Column("full", "mb_down")].mean == 50.0
    assert entries[Column("changed", "mb_down")].paper is None
    assert entries[Column("full", "mb_down")].paper == (110600.0, None)
    assert entries[Column("", "seconds")].paper == (3.2 * 3600, None)
    assert entries[Column("", "peak_memory_mb")].paper == (12000.0, None)


def test_norm_comm_is_relative_to_runs_with_the_same_transfer(monkeypatch):
    monkeypatch.setattr(Run, "final_alignment", lambda run: {})
    sizes = [("fedavg", "changed", 50), ("fedavg", "full", 350), ("pro", "changed", 150), ("pro", "full", 750)]
    runs = [make_run(m, up=up, transfer=t) for m, t, up in sizes]
    assert [v["comm"] for v in measure_runs(runs)] == [1.0, 1.0, 2.0, 2.0]
    assert measure_runs(runs)[3]["mb_up"] == 750 / 1e6


def test_runs_with_different_settings_cannot_share_an_entry():
    with pytest.raises(RunFolderError, match=r"runs of pro on cifar100 .* differ in params.noise"):
        severe(item("pro", 0, params={"noise": 0.1}), item("pro", 1, params={"noise": 1.0}))
    severe(item("pro", 0, device="cpu"), item("pro", 1, device="cuda"))


def test_methods_on_different_streams_cannot_be_compared():
    other = STREAM | {"support": 0.8}
    with pytest.raises(RunFolderError, match=r"pro and promax on cifar100 are not of one stream.*stream.support"):
        severe(*results("pro", [1.0, 2.0]), *results("promax", [3.0, 4.0], stream=other))
    with pytest.raises(RunFolderError, match="evaluate"):
        severe(item("pro", evaluate="test"), item("promax", evaluate="validation"))


def test_latex_rows_have_equal_length_and_special_characters_are_escaped():
    table = build_table(
        LAYOUTS["modality"], [*results("pro", [1.0, 2.0]), *results("fedavg", [2.0], dataset="ogbn_arxiv")]
    )
    text = latex(table)
    lines = [line for line in text.splitlines() if line.endswith(r"\\")]
    spans = [
        line.count("&") + sum(int(n.split("}")[0]) - 1 for n in line.split(r"\multicolumn{")[1:]) for line in lines
    ]
    assert set(spans) == {len(table.heads) + len(table.columns)}
    assert r"ogbn\_arxiv" in text and text.count("{") == text.count("}") and r"\toprule" in text
    assert r"{\scriptsize$\pm$ 0.71}" in text


def test_csv_is_unrounded_and_has_the_state():
    rows = list(csv.DictReader(io.StringIO(to_csv(severe(*results("pro", [1 / 3, 1.0]), item("fedavg"))))))
    faa = {r["method"]: r for r in rows if r["metric"] == "faa"}
    assert float(faa["PRO"]["mean"]) == pytest.approx(2 / 3, abs=1e-15) and faa["PRO"]["paper_std"] == "0.94"
    assert faa["FedAvg"]["state"] == "missing" and faa["FedAvg"]["mean"] == ""


def test_every_layout_has_known_metrics_and_prints_in_every_format():
    for name, layout in LAYOUTS.items():
        assert set(layout.metrics) <= set(METRICS), name
        table = build_table(layout, [item("promax", variant="noise 0.1"), item("fedavg", variant="noise 0.2")])
        assert all(make(table) for make in FORMATS.values()), name
