"""Generated tables of a Markdown page: they show the store, and docs/results.md agrees with results/."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev

import pytest

from profcil.errors import ConfigError, StoreError
from profcil.reporting.results_page import render, update
from profcil.runs.results.store import Content, load_store, write_contents
from profcil.runs.results.stored_run import COLUMNS
from profcil.runs.results.stored_settings import describe_differences, hash_recipe, recipe_settings

ROOT = Path(__file__).parents[2]
BEGIN = "<!-- table:"


def row(method: str, seed: int, setting: str = "severe", **cells: str) -> dict[str, str]:
    """An imported row of Cora."""
    names = {"dataset": "cora", "method": method, "setting": setting, "seed": str(seed), "part": "test"}
    recipe = hash_recipe(recipe_settings("cora", setting, method))
    more = {"origin": "imported", "profcil": "0.4.0", "recipe": recipe, "cta": "50.0", "af": "5.0"}
    return dict.fromkeys(COLUMNS, "") | names | more | {"faa": "60.0"} | cells


def content_of(rows: list[dict[str, str]]) -> Content:
    """The rows with their recipes."""
    found = {row["recipe"]: recipe_settings("cora", row["setting"], row["method"]) for row in rows}
    return Content(rows, found)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    rows = [
        row("fedavg", 0, faa="40.0", bytes_total="1000"),
        row("fedavg", 1, faa="50.0", bytes_total="1000"),
        row("prolin", 0, faa="80.0", bytes_total="500", centred="0.9", date="2026-11-01"),
        row("prolin", 1, faa="90.0", bytes_total="500", date="2026-11-03"),
        row("prolin", 2, faa="99.0", settings="params.dictionary=9"),
        row("prolin", 3, faa="11.0", part="validation"),
        row("prolin", 0, faa="12.0", profcil="0.3.9"),
        row("promax", 0, "homogeneous", faa="70.0"),
    ]
    write_contents({"cora": content_of(rows)}, tmp_path / "store")
    return tmp_path / "store"


def table(store: Path, definition: str) -> str:
    return render(f"{BEGIN} {definition} -->\nstale text\n<!-- end -->\n", store, store.parent / "page.md")


def lines(text: str) -> list[list[str]]:
    """The cells of every row below the header."""
    found = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return found[2:]


def test_a_table_has_means_deviations_seeds_paper_values_and_the_best_in_bold(store):
    text = table(store, "dataset=cora settings=severe methods=prolin,fedavg columns=faa,af,comm,mb,centred")
    assert "stale" not in text and "| setting | method | seeds | FAA | AF | NormComm | MB sent | centred |" in text
    fedavg, prolin = lines(text)
    assert fedavg[:4] == ["severe", "FedAvg", "2", f"45.0 ± {stdev([40, 50]):.1f} [39.8]"]
    assert prolin[:4] == ["severe", "PRO-LIN", "2", f"**{fmean([80, 90]):.1f}** ± {stdev([80, 90]):.1f}"]
    assert fedavg[4] == "5.0 ± 0.0 [61.8]"  # equal means: nothing is best
    assert (fedavg[5], prolin[5]) == ("1.000 ± 0.000 [1.000]", "0.500 ± 0.000")
    assert (fedavg[7], prolin[7]) == ("–", "0.90 (n = 1)")
    assert "profcil 0.4.0; 2026-11-01 to 2026-11-03; imported from an older table." in text
    assert "[`store/cora.csv`](store/cora.csv)" in text


def test_an_upper_bound_on_another_stream_is_never_bold(store):
    bound = row("fedavg", 0, faa="99.0", settings="stream.task_size=7 train.rounds=90")
    rows = [row("fedavg", 0, faa="40.0"), row("prolin", 0, faa="80.0"), bound]
    write_contents({"cora": content_of(rows)}, store)
    found = lines(table(store, "dataset=cora settings=severe columns=faa variants=all"))
    assert [cells[3].partition(" ")[0] for cells in found] == ["40.0", "99.0", "**80.0**"]


def test_a_missing_method_has_dashes_and_the_paper_beside(store):
    (missing,) = lines(table(store, "dataset=cora settings=severe methods=power"))
    assert missing == ["severe", "POWER", "0", "– [58.8]", "– [64.4]", "– [38.8]"]
    assert "No rows yet." in table(store, "dataset=digits methods=pro")


def test_variants_and_validation_rows_are_shown_only_if_asked_for(store):
    shown = lines(table(store, "dataset=cora settings=severe methods=prolin variants=all"))
    assert [(cells[1], cells[2]) for cells in shown] == [("PRO-LIN", "2"), ("PRO-LIN (params.dictionary=9)", "1")]
    (held_out,) = lines(table(store, "dataset=cora settings=severe methods=prolin part=validation"))
    assert held_out[2:4] == ["1", "11.0"]


def test_methods_are_by_default_those_of_the_store(store):
    shown = lines(table(store, "dataset=cora"))
    assert [cells[0] for cells in shown] == ["severe"] * 3 + ["homogeneous"] * 3
    assert [cells[1] for cells in shown] == ["FedAvg", "PRO-LIN", "PRO-MAX"] * 2
    several = lines(table(store, "dataset=cora,digits methods=prolin settings=severe"))
    assert [cells[:4] for cells in several] == [
        ["cora", "severe", "PRO-LIN", "2"],
        ["digits", "severe", "PRO-LIN", "0"],
    ]


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ("methods=prolin", "without dataset=NAME"),
        ("dataset=cora colums=faa", "unknown key of a table .* did you mean columns"),
        ("dataset=cora columns=fa", "unknown name after columns= .* did you mean faa"),
        ("dataset=cora settings=mild", "unknown name after settings="),
    ],
)
def test_a_wrong_definition_is_refused(store, definition, message):
    with pytest.raises((ConfigError, StoreError), match=message):
        table(store, definition)


def test_runs_by_a_preset_have_a_row_with_its_title(store):
    recipe = recipe_settings("cora", "severe", "promax")
    name = hash_recipe(recipe)
    plus = describe_differences(recipe_settings("cora", "severe", "promax", "plus"), recipe)
    rows = [
        row("promax", 0, recipe=name),
        row("promax", 1, recipe=name, settings=plus),
        row("promax", 2, recipe=name, settings="params.noise=0.5"),
    ]
    write_contents({"cora": Content(rows, {name: recipe})}, store)
    definition = "dataset=cora settings=severe variants"
    assert [cells[1] for cells in lines(table(store, f"{definition}=none"))] == ["PRO-MAX"]
    assert [cells[1] for cells in lines(table(store, f"{definition}=presets"))] == ["PRO-MAX", "PRO-MAX+"]
    every = {cells[1] for cells in lines(table(store, f"{definition}=all"))}
    assert every == {"PRO-MAX", "PRO-MAX+", "PRO-MAX (params.noise=0.5)"}


def test_a_table_of_a_larger_budget_has_its_runs_and_those_without_a_budget(store):
    rows, recipes = [], {}
    for method, budgets in (("fedcbdr", ("matched", "expanded")), ("prolin", ("matched",))):
        recipe = recipe_settings("cora", "severe", method)
        recipes[hash_recipe(recipe)] = recipe
        for budget in budgets:
            settings = describe_differences(recipe_settings("cora", "severe", method, regime=budget), recipe)
            faa = f"{10 * len(rows)}.0"
            rows.append(row(method, len(rows), recipe=hash_recipe(recipe), settings=settings, faa=faa))
    assert [cells["settings"] for cells in rows] == ["", "params.budget=100", ""]
    write_contents({"cora": Content(rows, recipes)}, store)
    for budget, faa in (("matched", "0.0"), ("expanded", "10.0")):
        shown = lines(table(store, f"dataset=cora settings=severe regime={budget}"))
        assert [cells[1:4] for cells in shown] == [["FedCBDR", "1", faa], ["PRO-LIN", "1", "**20.0**"]]


def test_a_table_without_an_end_is_refused(store):
    page = store.parent / "page.md"
    for text in (f"{BEGIN} dataset=cora -->\n", f"{BEGIN} dataset=cora -->\n{BEGIN} dataset=cora -->\n<!-- end -->\n"):
        with pytest.raises(StoreError, match="does not end"):
            render(text, store, page)


def test_only_what_is_between_markers_changes_and_a_second_time_nothing(store):
    page = store.parent / "page.md"
    page.write_text(f"before\n\n{BEGIN} dataset=cora -->\n<!-- end -->\n\nafter <!-- end -->\n")
    assert update(page, store) == 1
    text = page.read_text()
    assert text.startswith("before\n\n<!-- table: dataset=cora -->\n\n| setting")
    assert text.endswith("<!-- end -->\n\nafter <!-- end -->\n")
    written = page.stat().st_mtime_ns
    assert update(page, store) == 1 and page.read_text() == text and page.stat().st_mtime_ns == written


# -- the repository's own page ----------------------------------------------------------------------------------------


def test_the_page_of_results_agrees_with_the_store():
    """`make results-page` writes it anew."""
    page = ROOT / "docs" / "results.md"
    text = page.read_text(encoding="utf-8")
    assert text.count(BEGIN) >= 6
    assert render(text, ROOT / "results", page) == text


def test_a_missing_row_of_the_store_changes_the_page(tmp_path):
    page = ROOT / "docs" / "results.md"
    text = page.read_text(encoding="utf-8")
    other = tmp_path / "results"
    (other / "recipes").mkdir(parents=True)
    for file in [*ROOT.glob("results/*.csv"), *ROOT.glob("results/recipes/*.json")]:
        (other / file.relative_to(ROOT / "results")).write_bytes(file.read_bytes())
    cora = other / "cora.csv"
    lines_of_file = cora.read_text().splitlines()
    del lines_of_file[1]  # a changed digit would be refused: rows have digests
    cora.write_text("\n".join(lines_of_file) + "\n")
    assert render(text, other, page) != text


def test_every_row_of_the_store_is_readable_and_has_an_origin():
    runs = load_store(ROOT / "results")
    assert len(runs) >= 50
    assert all(run.values["digest"] for run in runs if run.values["origin"] == "run")
