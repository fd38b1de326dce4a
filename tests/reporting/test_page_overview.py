"""The overview of methods by datasets on a page: which runs a cell has, what is bold, what is marked."""

from __future__ import annotations

from pathlib import Path

import pytest

from profcil.errors import ConfigError, StoreError
from profcil.reporting.results_page import render
from profcil.runs.results.store import Content, write_contents
from profcil.runs.results.stored_run import COLUMNS
from profcil.runs.results.stored_settings import describe_differences, hash_recipe, recipe_settings


def row(dataset: str, method: str, faa: float, seed: int = 0, preset: str | None = None, **cells: str) -> dict:
    """An imported row of a severe stream, by the recipe or by a preset."""
    recipe = recipe_settings(dataset, "severe", method)
    settings = describe_differences(recipe_settings(dataset, "severe", method, preset), recipe)
    names = {"dataset": dataset, "method": method, "setting": "severe", "seed": str(seed), "part": "test"}
    more = {"origin": "imported", "profcil": "0.6.0", "recipe": hash_recipe(recipe), "settings": settings}
    return dict.fromkeys(COLUMNS, "") | names | more | {"faa": str(faa), "cta": "50.0", "af": "5.0"} | cells


def write(store: Path, *rows: dict) -> Path:
    contents: dict[str, Content] = {}
    for cells in rows:
        content = contents.setdefault(cells["dataset"], Content())
        content.rows.append(cells)
        content.recipes[cells["recipe"]] = recipe_settings(cells["dataset"], "severe", cells["method"])
    write_contents(contents, store)
    return store


def overview(store: Path, definition: str) -> tuple[list[list[str]], str]:
    """The cells of head and rows, and the line below."""
    text = render(f"<!-- overview: {definition} -->\n<!-- end -->\n", store, store.parent / "page.md")
    lines = text.splitlines()
    table = [line.removeprefix("|").removesuffix("|") for line in lines if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")] for line in table]
    return [cells[0], *cells[2:]], lines[-3]


def test_rows_are_recipes_presets_and_the_paper_and_columns_are_datasets(tmp_path):
    seeds = range(3)
    store = write(
        tmp_path / "store",
        *[row("cora", "fedavg", 30 + seed, seed, "chosen") for seed in seeds],
        *[row("cora", "fedavg", 20, seed) for seed in seeds],
        *[row("cora", "prolin", 80, seed) for seed in seeds],
        *[row("digits", "prolin", 90, seed) for seed in seeds],
    )
    rows = "rows=fedavg,fedavg@chosen,prolin,paper:promax"
    found, origin = overview(store, f"dataset=digits,cora settings=severe {rows}")
    assert found == [
        ["", "digits", "Cora"],
        ["FedAvg", "", "20.0"],
        ["FedAvg (chosen)", "", "31.0"],
        ["PRO-LIN", "90.0", "**80.0**"],
        ["the paper's PRO-MAX", "", "66.2"],
    ]
    assert "[`store/cora.csv`]" in origin and "[`store/digits.csv`]" in origin and "fewer" not in origin


def test_few_seeds_are_marked_and_missing_settings_have_a_dash(tmp_path):
    store = write(tmp_path / "store", row("cora", "prolin", 80))
    found, note = overview(store, "dataset=cora rows=prolin,fedavg")
    assert found[1:] == [["PRO-LIN", "80.0\\* / –"], ["FedAvg", ""]]
    assert note.startswith("\\* fewer than three seeds. From ")
    _, short = overview(store, "dataset=cora rows=prolin,fedavg origin=none")
    assert short == "\\* fewer than three seeds."


def test_an_upper_bound_on_another_stream_is_never_bold(tmp_path):
    store = write(
        tmp_path / "store", row("cora", "fedavg", 95, preset="joint"), row("cora", "prolin", 80), row("cora", "pro", 70)
    )
    found, _ = overview(store, "dataset=cora settings=severe rows=pro,prolin,fedavg@joint")
    assert [cells[1] for cells in found[1:]] == ["70.0\\*", "**80.0**\\*", "95.0\\*"]
    assert found[3][0] == "FedAvg with all classes at once"


def test_runs_of_an_older_recipe_and_validation_runs_are_left_out(tmp_path):
    older = row("cora", "prolin", 99, settings="params.dictionary=1900")
    held_out = row("cora", "prolin", 98, part="validation")
    store = write(tmp_path / "store", older, held_out)
    found, origin = overview(store, "dataset=cora settings=severe rows=prolin")
    assert found[1] == ["PRO-LIN", ""] and origin == "No rows yet."


@pytest.mark.parametrize("definition", ["dataset=cora", "rows=prolin", "dataset=cora rows=prolin columns=faa"])
def test_a_definition_that_lacks_or_misspells_a_key_is_refused(tmp_path, definition):
    with pytest.raises((ConfigError, StoreError), match=r"without (rows|dataset)=NAME|columns"):
        overview(tmp_path, definition)


def test_a_row_of_an_older_recipe_is_not_shown_as_one_of_the_recipe(tmp_path):
    """Its own recipe had other settings than the present one has."""
    older = {**recipe_settings("cora", "severe", "prolin"), "params.dictionary": 2000}
    outdated = [row("cora", "prolin", 99, seed, profcil="0.1.0", recipe=hash_recipe(older)) for seed in range(3)]
    present = [row("cora", "prolin", 80, seed) for seed in range(3)]
    content = Content([*outdated, *present], {hash_recipe(older): older})
    content.recipes[present[0]["recipe"]] = recipe_settings("cora", "severe", "prolin")
    store = tmp_path / "store"
    write_contents({"cora": content}, store)
    found, _ = overview(store, "dataset=cora settings=severe rows=prolin")
    assert found[1] == ["PRO-LIN", "80.0"]


def test_rows_with_the_same_settings_are_one_line_whatever_the_recipe_was(tmp_path):
    """Two seeds were run with settings that are those of the recipe since."""
    present = recipe_settings("cora", "severe", "prolin")
    older = {**present, "params.dictionary": 2000}
    changed = {"recipe": hash_recipe(older), "settings": describe_differences(present, older)}
    rows = [row("cora", "prolin", 80 + seed, seed, **(changed if seed < 2 else {})) for seed in range(3)]
    content = Content(rows, {hash_recipe(older): older, hash_recipe(present): present})
    write_contents({"cora": content}, tmp_path / "store")
    text = render("<!-- table: dataset=cora -->\n<!-- end -->\n", tmp_path / "store", tmp_path / "page.md")
    assert "| severe | PRO-LIN | 3 | 81.0 ± 1.0" in text


def test_a_run_with_noise_is_not_shown_as_one_of_the_recipe(tmp_path):
    """A recipe without noise has no settings of it."""
    noise = "privacy.epsilon=8.0 privacy.unit=example"
    store = write(tmp_path / "store", *[row("cora", "prolin", 20, seed, settings=noise) for seed in range(3)])
    text = render("<!-- table: dataset=cora -->\n<!-- end -->\n", store, tmp_path / "page.md")
    assert "20.0" not in text
    text = render("<!-- table: dataset=cora variants=all -->\n<!-- end -->\n", store, tmp_path / "page.md")
    assert "PRO-LIN (privacy.epsilon=8.0 privacy.unit=example) | 3 | 20.0" in text


def test_a_preset_that_changes_nothing_is_no_name(tmp_path):
    store = write(tmp_path / "store", *[row("cora", "prolin", 80, seed, "dictionary") for seed in range(3)])
    text = render("<!-- table: dataset=cora variants=presets -->\n<!-- end -->\n", store, tmp_path / "page.md")
    assert "| severe | PRO-LIN | 3 |" in text
