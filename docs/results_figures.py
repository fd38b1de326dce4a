"""The figures of docs/results.md: accuracy against bytes of the runs by the present recipes and presets.

`make results-page` runs it: `python docs/results_figures.py [STORE] [FOLDER]`, which are `results` and `docs/figures`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from profcil.reporting.figures import make_figure
from profcil.reporting.page_lines import is_by_recipe, preset_of, with_present_settings
from profcil.runs.results.store import comparable_rows, load_store

DATASETS = ("cora", "coauthor_cs", "clinc150", "thucnews10")


def main(store: Path, folder: Path) -> None:
    for dataset in DATASETS:
        with tempfile.TemporaryDirectory() as temporary:
            shown = shown_rows(store / f"{dataset}.csv", Path(temporary))
            make_figure("bytes", [str(shown)], Path(temporary), ["svg"], print)
            shutil.copy(Path(temporary) / "bytes.svg", folder / f"accuracy-bytes-{dataset}.svg")


def shown_rows(file: Path, folder: Path) -> Path:
    """A copy of a file of the store with the rows that the tables show: scored on test data, by recipe or preset."""
    head, *lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    runs = with_present_settings(load_store(file))
    tested = [run for run in runs if run.values["part"] == "test" and (is_by_recipe(run, "matched") or preset_of(run))]
    kept = {id(run) for run in comparable_rows(tested)}
    shutil.copytree(file.parent / "recipes", folder / "recipes")
    copy = folder / file.name
    copy.write_text(head + "".join(line for line, run in zip(lines, runs, strict=True) if id(run) in kept), "utf-8")
    return copy


if __name__ == "__main__":
    given = [Path(argument) for argument in sys.argv[1:]]
    main(*given, *(Path("results"), Path("docs/figures"))[len(given) :])
