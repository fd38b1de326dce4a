"""A table as Markdown, LaTeX with booktabs, or CSV: mean ± standard deviation over seeds, the paper's figure in
brackets, the best of each column in bold, and under it the paired tests."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable

from profcil.reporting.grid import METRICS, Column, Entry, Row, Table
from profcil.reporting.significance import verdicts, winners

LEGEND = "Mean ± standard deviation over seeds; in brackets the paper's figure; the best of each column in bold."
TEX = {"&": r"\&", "%": r"\%", "_": r"\_", "±": r"$\pm$", "→": r"$\to$", "²": "$^2$", "`": "", "#": r"\#"}


def seeds_of(row: Row) -> str:
    """How many finished seeds stand behind a row, and how many were planned."""
    counts = {len(e.ran) for e in row.entries.values() if e.applicable}
    planned = max((len(e.planned) for e in row.entries.values()), default=0)
    if not counts:
        return "0"
    span = str(min(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    return span if counts == {planned} else f"{span} of {planned}"


def texts(table: Table, bold: Callable[[str], str], spread: Callable[[str], str]) -> list[list[str]]:
    """The body: names, seeds and entries of every row."""
    won = winners(table)

    def show(row: Row, c: Column) -> str:
        strong = bold if (row.names, c) in won else str
        return entry_text(row.entries.get(c, Entry()), METRICS[c.metric][1], strong, spread)

    return [[*row.names, seeds_of(row), *(show(row, c) for c in table.columns)] for row in table.rows]


def entry_text(entry: Entry, digits: int, bold: Callable[[str], str], spread: Callable[[str], str]) -> str:
    """An entry; the paper's figure stands in brackets, whether or not there is one of ours."""
    beside = f" [{entry.paper[0]:.{digits}f}]" if entry.paper else ""
    if entry.mean is None:
        return entry.state + beside
    around = spread(f"{entry.spread:.{digits}f}") if entry.spread is not None else ""
    fewer = f" (n = {len(entry.seeds)})" if len(entry.seeds) < len(entry.ran) else ""
    return bold(f"{entry.mean:.{digits}f}") + around + fewer + beside


def notes(table: Table) -> list[str]:
    return [f"{LEGEND} {table.note}".strip(), *(verdicts(table) if table.tested else [])]


def markdown(table: Table) -> str:
    titles = [f"{c.group}: {c.title}" if c.group else c.title for c in table.columns]
    head = [*table.heads, "seeds", *titles]
    lines = [head, ["---"] * len(head), *texts(table, lambda t: f"**{t}**", lambda t: f" ± {t}")]
    rows = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    legend, *compared = notes(table)
    under = ["\n".join(f"- {line}" for line in compared)] if compared else []
    return "\n\n".join([f"**{table.title}**", rows, legend, *under])


def latex(table: Table) -> str:
    """A booktabs table, set as the paper sets its own."""
    lead = len(table.heads) + 1
    body = texts(table, lambda t: rf"\textbf{{{t}}}", lambda t: rf" {{\scriptsize$\pm$ {t}}}")
    heads = [*map(escape, table.heads), "seeds", *(escape(c.title) + arrow(c) for c in table.columns)]
    lines = [*group_line(table, lead), " & ".join(heads) + r" \\"]
    for i, (row, line) in enumerate(zip(table.rows, body, strict=True)):
        new = not i or row.names[:-1] != table.rows[i - 1].names[:-1]
        lines += ([r"\midrule"] if new else []) + [" & ".join([*map(escape, line[:lead]), *line[lead:]]) + r" \\"]
    caption = escape(" ".join([f"{table.title}.", *(f"{n.rstrip('.')}." for n in notes(table))]))
    return "\n".join([
        r"\begin{table*}[t]", r"\centering", rf"\caption{{{caption}}}", r"\resizebox{\textwidth}{!}{%",
        r"\begin{tabular}{" + "l" * lead + "c" * len(table.columns) + "}", r"\toprule", *lines,
        r"\bottomrule", r"\end{tabular}", "}", r"\end{table*}",
    ])  # fmt: skip


def group_line(table: Table, lead: int) -> list[str]:
    """Headings over groups of columns, where there are any."""
    groups = [c.group for c in table.columns]
    if not any(groups):
        return []
    cells = [rf"\multicolumn{{{groups.count(g)}}}{{c}}{{{escape(g)}}}" for g in dict.fromkeys(groups)]
    return [" & ".join([*[""] * lead, *cells]) + r" \\"]


def arrow(column: Column) -> str:
    return {1: r" $\uparrow$", -1: r" $\downarrow$", 0: ""}[METRICS[column.metric][2]]


def escape(text: str) -> str:
    return "".join(TEX.get(letter, letter) for letter in text)


def to_csv(table: Table) -> str:
    """One line per entry, nothing rounded."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*table.heads, "group", "metric", "mean", "std", "seeds", "planned", "state", "paper", "paper_std"])
    for row in table.rows:
        for c in table.columns:
            e = row.entries.get(c, Entry())
            figures = [e.mean, e.spread, len(e.seeds), len(e.planned), e.state, *(e.paper or (None, None))]
            writer.writerow([*row.names, c.group, c.metric, *figures])
    return out.getvalue()


FORMATS = {"markdown": markdown, "latex": latex, "csv": to_csv}
