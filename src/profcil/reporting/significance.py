"""The best value of each column, and paired tests of the proposed method against the best baseline."""

from __future__ import annotations

from profcil.reporting.grid import METRICS, TESTED, Column, Entry, Row, Table
from profcil.reporting.paper import is_baseline, method_title, paper_values


def best_mean(rows: list[Row], column: Column) -> float | None:
    """The best mean of a column within a block; None if there is nothing to compare."""
    sign = METRICS[column.metric].better
    entries = [row.entries[column] for row in rows if column in row.entries]
    means = [entry.mean for entry in entries if entry.mean is not None]
    if not sign or len(set(means)) < 2:
        return None
    return max(means, key=lambda mean: sign * mean)


def best_entries(table: Table) -> set[tuple[tuple[str, ...], Column]]:
    """The row names and columns of the entries that are the best of their block."""
    best_of_blocks = set()
    for block in table.blocks():
        for column in table.columns:
            best = best_mean(block, column)
            for row in block:
                entry = row.entries.get(column)
                if best is not None and entry is not None and entry.mean == best:
                    best_of_blocks.add((row.names, column))
    return best_of_blocks


def describe_tests(table: Table) -> list[str]:
    """A sentence per block and tested column: the proposed method against the best baseline, over common seeds."""
    sentences = []
    for block in table.blocks():
        for column in table.columns:
            pair = tested_pair(block, column) if column.metric in TESTED else None
            if pair is not None:
                ours, baseline = pair
                parts = [*block[0].names[:-1], column.group, column.title]
                place = " ".join(part for part in parts if part)
                names = f"{method_title(ours.method)} against {method_title(baseline.method)}"
                result = paired_test(ours.entries[column], baseline.entries[column])
                sentences.append(f"{place}: {names}, {result}")
    return sentences


def tested_pair(block: list[Row], column: Column) -> tuple[Row, Row] | None:
    """The rows of the proposed method and of the best baseline; None if one of them was not measured."""
    champion = paper_values()["champion"]
    measured = [row for row in block if column in row.entries and row.entries[column].seeds]
    ours = next((row for row in measured if row.method == champion), None)
    baselines = [row for row in measured if is_baseline(row.method)]
    if ours is None or not baselines:
        return None
    sign = METRICS[column.metric].better

    def merit(row: Row) -> float:
        return sign * (row.entries[column].mean or 0.0)

    return ours, max(baselines, key=merit)


def paired_test(ours: Entry, baseline: Entry) -> str:
    """The mean difference, the number of common seeds and the p value of a two-sided paired t-test over them."""
    common = sorted(ours.seeds.keys() & baseline.seeds.keys())
    if not common:
        return "no common seed, so no test"
    our_values = [ours.seeds[seed] for seed in common]
    baseline_values = [baseline.seeds[seed] for seed in common]
    differences = [a - b for a, b in zip(our_values, baseline_values, strict=True)]
    mean = sum(differences) / len(differences)
    head = f"difference {mean:+.2f}, n = {len(common)}"
    if len(common) < 2:
        return f"{head}, no test with one seed"
    if max(differences) - min(differences) < 1e-9:
        return f"{head}, the same difference in every seed, so no test"
    from scipy.stats import ttest_rel

    p = ttest_rel(our_values, baseline_values).pvalue
    return f"{head}, paired t-test p = {p:.3g}"
