"""The best value of each column, and paired tests of the proposed method against the best baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from profcil.reporting.grid import Column, Row, Table, TableEntry
from profcil.reporting.paper import is_baseline, method_title, paper_values
from profcil.reporting.table_metrics import METRICS, TESTED

FEWEST_SEEDS = 3  # of a test between two methods of a ranking


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


def paired_test(ours: TableEntry, baseline: TableEntry) -> str:
    """The mean difference, the number of common seeds and the p value of a two-sided paired t-test over them."""
    common = sorted(ours.seeds.keys() & baseline.seeds.keys())
    if not common:
        return "no common seed, so no test"
    differences = [ours.seeds[seed] - baseline.seeds[seed] for seed in common]
    mean = sum(differences) / len(differences)
    head = f"difference {mean:+.2f}, n = {len(common)}"
    if len(common) < 2:
        return f"{head}, no test with one seed"
    p = paired_p(differences)
    if p is None:
        return f"{head}, the same difference in every seed, so no test"
    return f"{head}, paired t-test p = {p:.3g}"


def paired_p(differences: Sequence[float]) -> float | None:
    """The two-sided p value of a paired t-test; None if there are too few differences or all are equal."""
    if len(differences) < 2 or max(differences) - min(differences) < 1e-9:
        return None
    from scipy.special import stdtr

    freedom = len(differences) - 1
    t = fmean(differences) / (stdev(differences) / len(differences) ** 0.5)
    return float(2 * stdtr(freedom, -abs(t)))


def p_against(best: Mapping[int, float], other: Mapping[int, float]) -> float | None:
    """The p value of a difference from the best over common seeds; None with fewer than three of them."""
    common = sorted(best.keys() & other.keys())
    return paired_p([best[seed] - other[seed] for seed in common]) if len(common) >= FEWEST_SEEDS else None


def holm(values: Sequence[float | None]) -> list[float | None]:
    """P values of several tests, adjusted by the method of Holm; unknown ones stay unknown."""
    known = sorted((p, i) for i, p in enumerate(values) if p is not None)
    adjusted: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (p, i) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[i] = largest
    return adjusted
