"""A table as Markdown, LaTeX with booktabs, or CSV.

Entries are mean ± standard deviation over seeds, with the paper's value in brackets and the best of each column in
bold. The paired tests follow below the table.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence

from profcil.reporting.grid import Column, Row, Table, TableEntry
from profcil.reporting.markdown import markdown_table
from profcil.reporting.significance import best_entries, describe_tests
from profcil.reporting.table_metrics import METRICS

LEGEND = "Mean ± standard deviation over seeds; in brackets the paper's value; the best of each column in bold."
TEX = {"&": r"\&", "%": r"\%", "_": r"\_", "±": r"$\pm$", "→": r"$\to$", "²": "$^2$", "`": "", "#": r"\#"}
Style = Callable[[str], str]


def count_seeds(row: Row) -> str:
    """The number of finished seeds of a row, and the number planned if that differs."""
    entries = row.entries.values()
    counts = {len(entry.ran) for entry in entries if entry.applicable}
    planned = max((len(entry.planned) for entry in entries), default=0)
    if not counts:
        return "0"
    fewest = min(counts)
    most = max(counts)
    span = str(most) if fewest == most else f"{fewest} to {most}"
    return span if counts == {planned} else f"{span} of {planned}"


def format_rows(table: Table, bold: Style, spread: Style) -> list[list[str]]:
    """The body of the table: names, number of seeds and entries of every row."""
    best = best_entries(table)
    lines = []
    for row in table.rows:
        line = [*row.names, count_seeds(row)]
        for column in table.columns:
            entry = row.entries.get(column, TableEntry())
            emphasis = bold if (row.names, column) in best else str
            digits = METRICS[column.metric].digits
            line.append(format_entry(entry, digits, emphasis, spread))
        lines.append(line)
    return lines


def format_entry(entry: TableEntry, digits: int, emphasis: Style, spread: Style) -> str:
    """An entry, followed by the paper's value in brackets if there is one."""
    paper = f" [{entry.paper[0]:.{digits}f}]" if entry.paper else ""
    if entry.mean is None:
        return entry.state + paper
    text = emphasis(f"{entry.mean:.{digits}f}")
    if entry.spread is not None:
        text += spread(f"{entry.spread:.{digits}f}")
    if len(entry.seeds) < len(entry.ran):
        text += f" (n = {len(entry.seeds)})"
    return text + paper


def notes(table: Table) -> list[str]:
    """The legend, then the results of the tests."""
    legend = f"{LEGEND} {table.note}".strip()
    tests = describe_tests(table) if table.tested else []
    return [legend, *tests]


def markdown(table: Table) -> str:
    titles = []
    for column in table.columns:
        group = f"{column.group}: " if column.group else ""
        titles.append(group + column.title)
    head = [*table.heads, "seeds", *titles]
    body = format_rows(table, lambda text: f"**{text}**", lambda text: f" ± {text}")
    legend, *tests = notes(table)
    title = f"**{table.title}**"
    parts = [title, markdown_table(head, body), legend]
    if tests:
        parts.append("\n".join(f"- {line}" for line in tests))
    return "\n\n".join(parts)


def latex(table: Table) -> str:
    """A booktabs table in the style of the paper."""
    lead = len(table.heads) + 1
    body = format_rows(table, latex_bold, latex_spread)
    titles = [escape(column.title) + direction_arrow(column) for column in table.columns]
    heads = [escape(head) for head in table.heads]
    lines = [*group_line(table, lead), latex_line([*heads, "seeds", *titles])]
    block = None
    for row, texts in zip(table.rows, body, strict=True):
        if row.block != block:
            lines.append(r"\midrule")
        block = row.block
        names = [escape(text) for text in texts[:lead]]
        lines.append(latex_line([*names, *texts[lead:]]))
    sentences = [f"{text.rstrip('.')}." for text in notes(table)]
    caption = escape(" ".join([f"{table.title}.", *sentences]))
    alignment = "l" * lead + "c" * len(table.columns)
    return "\n".join([
        r"\begin{table*}[t]", r"\centering", rf"\caption{{{caption}}}", r"\resizebox{\textwidth}{!}{%",
        rf"\begin{{tabular}}{{{alignment}}}", r"\toprule", *lines,
        r"\bottomrule", r"\end{tabular}", "}", r"\end{table*}",
    ])  # fmt: skip


def latex_bold(text: str) -> str:
    return rf"\textbf{{{text}}}"


def latex_spread(text: str) -> str:
    return rf" {{\scriptsize$\pm$ {text}}}"


def group_line(table: Table, lead: int) -> list[str]:
    """The line of headings above groups of columns; empty if there are none."""
    groups = [column.group for column in table.columns]
    if not any(groups):
        return []
    cells = [""] * lead
    for group in dict.fromkeys(groups):
        cells.append(rf"\multicolumn{{{groups.count(group)}}}{{c}}{{{escape(group)}}}")
    return [latex_line(cells)]


def latex_line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def direction_arrow(column: Column) -> str:
    """An arrow that shows whether higher or lower values are better."""
    better = METRICS[column.metric].better
    arrows = {1: r" $\uparrow$", -1: r" $\downarrow$", 0: ""}
    return arrows[better]


def escape(text: str) -> str:
    return "".join(TEX.get(letter, letter) for letter in text)


def to_csv(table: Table) -> str:
    """One line per entry, unrounded."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*table.heads, "group", "metric", "mean", "std", "seeds", "planned", "state", "paper", "paper_std"])
    for row in table.rows:
        for column in table.columns:
            entry = row.entries.get(column, TableEntry())
            paper = entry.paper or (None, None)
            names = [*row.names, column.group, column.metric]
            counts = [len(entry.seeds), len(entry.planned)]
            writer.writerow([*names, entry.mean, entry.spread, *counts, entry.state, *paper])
    return out.getvalue()


FORMATS = {"markdown": markdown, "latex": latex, "csv": to_csv}
