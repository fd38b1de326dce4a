"""Who is best, and whether the champion's lead over the best baseline is more than the luck of the seeds."""

from __future__ import annotations

from profcil.reporting.grid import METRICS, TESTED, Column, Entry, Row, Table
from profcil.reporting.paper import figures, is_baseline, title


def best(rows: list[Row], column: Column) -> float | None:
    """The best mean of a column within a block, where there is something to choose from."""
    sign = METRICS[column.metric][2]
    means = [m for r in rows if column in r.entries and (m := r.entries[column].mean) is not None]
    return max(means, key=lambda m: sign * m) if sign and len(set(means)) > 1 else None


def winners(table: Table) -> set[tuple[tuple[str, ...], Column]]:
    """The rows and columns whose entry is the best of its block."""
    return {
        (row.names, c)
        for block in table.blocks()
        for c in table.columns
        for row in block
        if c in row.entries and row.entries[c].mean is not None and row.entries[c].mean == best(block, c)
    }


def verdicts(table: Table) -> list[str]:
    """A sentence per block and tested column: the champion against the best baseline, paired over common seeds."""
    out = []
    for block in table.blocks():
        for c in (c for c in table.columns if c.metric in TESTED):
            pair = rivals(block, c)
            if pair is not None:
                place = " ".join(filter(None, [*block[0].names[:-1], c.group, c.title]))
                ours, other = pair
                names = f"{title(ours.method)} against {title(other.method)}"
                out.append(f"{place}: {names}, {paired(ours.entries[c], other.entries[c])}")
    return out


def rivals(block: list[Row], column: Column) -> tuple[Row, Row] | None:
    """The champion's row and the best baseline's, where both were measured."""
    there = [r for r in block if column in r.entries and r.entries[column].seeds]
    ours = next((r for r in there if r.method == figures()["champion"]), None)
    others = [r for r in there if is_baseline(r.method)]
    sign = METRICS[column.metric][2]
    return (ours, max(others, key=lambda r: sign * (r.entries[column].mean or 0.0))) if ours and others else None


def paired(ours: Entry, other: Entry) -> str:
    """The mean difference and the p value of a two-sided paired t-test over common seeds, and how many they are."""
    common = sorted(ours.seeds.keys() & other.seeds.keys())
    apart = [ours.seeds[s] - other.seeds[s] for s in common]
    if not common:
        return "no common seed, so no test"
    head = f"difference {sum(apart) / len(apart):+.2f}, n = {len(common)}"
    if len(common) < 2:
        return f"{head}, one seed is no test"
    if max(apart) - min(apart) < 1e-9:
        return f"{head}, the same difference in every seed, so no test"
    from scipy.stats import ttest_rel

    p = ttest_rel([ours.seeds[s] for s in common], [other.seeds[s] for s in common]).pvalue
    return f"{head}, paired t-test p = {p:.3g}"
