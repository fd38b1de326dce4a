"""Sites with their own data: reading the data, declarations, and errors in both."""

from __future__ import annotations

import csv
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from memory_grid import Grid
from test_faults import events

from profcil import registry
from profcil.cli.main import main
from profcil.data.input_format import hashed_id
from profcil.deploy.app_folder import settings_table
from profcil.deploy.run_config import sites_config
from profcil.deploy.server import entry
from profcil.deploy.sites import federation
from profcil.deploy.sites.declarations import complete_orders, declaration_error, joint_plan
from profcil.deploy.sites.federation_file import read_federation
from profcil.deploy.sites.site import read_site
from profcil.errors import ProfcilError
from profcil.randomness import generator
from profcil.runs.models.loading import load_model
from profcil.runs.reader import load_run

TASKS = [["cough", "fever"], ["sprain", "fracture"]]
CLASSES = [name for task in TASKS for name in task]
WORDS = {"cough": "throat dry", "fever": "hot chills", "sprain": "ankle swollen", "fracture": "bone broken"}
QUICK = ["train.rounds=2", "train.epochs=4", "train.batch=8", "warmup.rounds=1", "train.lr=0.05", "threads=1"]


def federation_text(modality: str) -> str:
    more = {
        "text": "length = 8\nvocabulary = 500",
        "image": "shape = [1, 8, 8]",
        "graph": "features = 4",
        "table": 'columns = ["a", "b", "c", "d"]\nmean = [1, 1, 1, 1]\nstd = [2, 2, 2, 2]',
    }[modality]
    return f'modality = "{modality}"\ntasks = {json.dumps(TASKS)}\nsites = ["north", "south"]\n{more}\n'


def write_manifest(folder: Path, site: str, data: str, *positions: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f'site = "{site}"', f'data = "{data}"', *(f"[[position]]\nclasses = {json.dumps(p)}" for p in positions)]
    (folder / "manifest.toml").write_text("\n".join(lines))
    return folder


def write_texts(path: Path, labels: list[str], each: int = 12) -> Path:
    """Writes texts as CSV or JSON, by the file's suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"text": f"{WORDS[y]} patient number {i}, since yesterday", "label": y} for y in labels for i in range(each)
    ]
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["text", "label"])
            writer.writeheader()
            writer.writerows(rows)
    return path


def write_images(path: Path, labels: list[str], each: int = 10) -> Path:
    """Writes images. Each class is bright in another quarter."""
    image = pytest.importorskip("PIL.Image")
    for label in labels:
        (path / label).mkdir(parents=True)
        row, column = divmod(CLASSES.index(label), 2)
        for i in range(each):
            x = generator(0, "picture", label, i).integers(0, 60, (12, 12)).astype(np.uint8)
            x[6 * row : 6 * row + 6, 6 * column : 6 * column + 6] += 180
            image.fromarray(x).save(path / label / f"{i}.png")
    return path


def write_graph(path: Path, labels: list[str], each: int = 8) -> Path:
    """Writes a graph. Each class has its own feature; the nodes of a class form a chain."""
    path.mkdir(parents=True)
    nodes = [(f"{y}-{i}", y, [int(y == c) for c in CLASSES]) for y in labels for i in range(each)]
    with (path / "nodes.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "label", *"abcd"], *([n, y, *x] for n, y, x in nodes)])
    with (path / "edges.csv").open("w", newline="") as file:
        ends = [(a[0], b[0]) for a, b in pairwise(nodes) if a[1] == b[1]]
        csv.writer(file).writerows([["source", "target"], *ends])
    return path


def write_table(path: Path, labels: list[str], each: int = 10) -> Path:
    """Writes rows of numbers. Each class is large in another column."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["label", *"abcd"])
        for label in labels:
            noise = generator(0, "row", label).normal(size=(each, 4))
            writer.writerows([label, *row] for row in noise + 4 * (np.arange(4) == CLASSES.index(label)))
    return path


WRITERS = {
    "text": (write_texts, "data.csv"),
    "image": (write_images, "images"),
    "graph": (write_graph, "graph"),
    "table": (write_table, "table.csv"),
}


def write_sites(tmp_path: Path, modality: str) -> dict[int, dict]:
    """Writes two sites with opposite task orders; the south lacks a class. Returns the nodes' configurations."""
    write, name = WRITERS[modality]
    north = write_manifest(tmp_path / "north", "north", name, TASKS[0], TASKS[1])
    south = write_manifest(tmp_path / "south", "south", name, ["sprain"], TASKS[0])
    write(north / name, CLASSES)
    write(south / name, ["sprain", *TASKS[0]])
    write(tmp_path / "test" / name, CLASSES)
    return {i: {"site": str(folder), "home": str(tmp_path / "home")} for i, folder in ((7, north), (8, south))}


def run_sites(tmp_path: Path, modality: str, method: str, **flags: str) -> Path:
    """Runs a method on the two sites. Returns the run folder."""
    if modality == "graph":
        pytest.importorskip("torch_geometric")
    text = federation_text(modality)
    nodes = write_sites(tmp_path, modality)
    config = sites_config(read_federation(text), None, {"method": method, **flags}, QUICK)
    test = tmp_path / "test" / WRITERS[modality][1]
    settings = settings_table(config, tmp_path / "run", test, federation=text, deadline=0.5, join=0.5)
    return entry.start(Grid(settings, nodes), settings)


def methods_only_for(modality: str) -> list[tuple[str, str]]:
    """The methods that support one modality only."""
    methods = {name: registry.find("methods", name).METHOD for name in registry.names("methods")}
    return [(modality, name) for name, m in methods.items() if m.modalities == {modality}]


@pytest.mark.parametrize(("modality", "method"), [*methods_only_for("text"), *methods_only_for("graph")])
def test_replies_of_methods_for_one_modality_are_accepted(tmp_path, modality, method):
    folder = run_sites(tmp_path, modality, method)
    assert load_run(folder).done
    assert [e["refused"] for e in events(folder, "asked") if e["refused"]] == []


@pytest.mark.parametrize("modality", WRITERS)
def test_a_federation_learns_from_data_that_stay_at_the_sites(tmp_path, modality):
    folder = run_sites(tmp_path, modality, "promax")
    run = load_run(folder)
    assert [e["sites"] for e in events(folder, "enrolled")] == [["north", "south"]]
    assert run.plan.orders.tolist() == [[0, 1], [1, 0]]
    assert run.plan.observed(1, 0) == (2,)  # the first position of the south: sprain without fracture
    assert run.done
    assert run.metrics["faa"] > 60  # four classes that are easy to separate
    assert {e.kind for e in run.ledger.entries} <= {"model", "memory", "statistics", "transport", "header"}
    assert all(not e["refused"] and not e["silent"] for e in events(folder, "asked"))


@pytest.mark.parametrize("modality", ["text", "image", "graph"])
def test_the_model_of_a_deployment_is_used_where_no_site_is(tmp_path, modality, capsys):
    """Its accuracy on the test data, read as new data, is that of the run."""
    folder = run_sites(tmp_path, modality, "promax")
    run = load_run(folder)
    model = (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    test = (tmp_path / "test").rename(tmp_path / "elsewhere") / WRITERS[modality][1]
    capsys.readouterr()  # progress of the run
    assert main(["eval", str(model), "--data", str(test), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["examples"] == sum(run.scores.total) and found["classes"] == CLASSES
    assert found["accuracy"] == pytest.approx(sum(run.scores.correct[-1]) / sum(run.scores.total))


def test_a_deployment_without_its_model_says_so(tmp_path):
    folder = run_sites(tmp_path, "text", "fedavg")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ProfcilError, match=r"has no model\.safetensors, and its dataset 'sites' is not known here"):
        load_model(folder)


@pytest.mark.parametrize("name", ["d.csv", "d.json", "d.jsonl"])
def test_texts_can_be_csv_or_json(tmp_path, name):
    write_texts(write_manifest(tmp_path, "north", name, TASKS[0]) / name, CLASSES, each=3)
    site = read_site(tmp_path, read_federation(federation_text("text")))
    assert site.examples.x.shape == (12, 8)
    assert site.counts == {0: 3, 1: 3}  # undeclared classes are left out
    assert site.order == {0: 0}


def test_token_ids_are_hashes_of_words_in_any_script():
    federation = read_federation(federation_text("text"))
    ids = federation.input_format().encode_texts(["Cough, COUGH 咳嗽 ñandú!"])[0].tolist()
    assert ids[0] == ids[1] == hashed_id("cough", 500) != ids[2]
    assert ids[4] == hashed_id("ñandú", 500)
    assert ids[5:] == [0, 0, 0]
    assert (
        federation.input_format().encode_texts(["..."])[0].tolist() == [1] + [0] * 7
    )  # a text without words is one unknown token
    assert all(2 <= hashed_id(str(i), 500) < 500 for i in range(200))


def test_a_site_without_data_at_a_position_is_idle_there():
    assert complete_orders([{0: 0, 1: 1}, {1: 0}], 2).tolist() == [[0, 1], [1, 0]]
    # The first site is given the tasks that it lacks in the order of their first arrival at any site.
    assert complete_orders([{0: 2}, {0: 1, 2: 0}], 3).tolist() == [[2, 1, 0], [1, 2, 0]]
    declarations = {0: {"order": {"0": 0, "1": 1}, "counts": {"0": 5, "2": 4}}}
    plan = joint_plan(read_federation(federation_text("text")), declarations, fedavg_config().stream, 0)
    assert plan.clients == 2
    assert plan.active(0).tolist() == [0]
    assert (len(plan.samples(0, 0)), len(plan.samples(0, 1)), len(plan.samples(1, 0))) == (5, 4, 0)


@pytest.mark.parametrize(
    ("declaration", "reason"),
    [
        ({}, "cannot be read"),
        ({"order": {"0": 0}, "counts": {"x": 1}}, "cannot be read"),
        ({"order": {"0": 2}, "counts": {"0": 1}}, "do not exist"),
        ({"order": {"-1": 0}, "counts": {"0": 1}}, "do not exist"),
        ({"order": {"0": 0, "1": 0}, "counts": {"0": 1}}, "twice"),
        ({"order": {"0": 0}, "counts": {"3": 1}}, "never arrives"),
        ({"order": {"0": 0}, "counts": {}}, "no class"),
        ({"order": {"0": 0}, "counts": {"0": -5}}, "counts"),
        ({"order": {"0": 0}, "counts": {"0": 10**12}}, "counts"),
    ],
)
def test_an_invalid_declaration_is_refused(declaration, reason):
    assert reason in declaration_error(declaration, read_federation(federation_text("text")))


def test_a_valid_declaration_is_accepted():
    declaration = {"order": {"0": 0}, "counts": {"0": 5}}
    assert declaration_error(declaration, read_federation(federation_text("text"))) == ""


def fedavg_config(**flags):
    return sites_config(read_federation(federation_text("text")), None, {"method": "fedavg", **flags}, QUICK)


def test_a_site_that_does_not_connect_is_left_out_of_the_run(tmp_path):
    nodes = write_sites(tmp_path, "text")
    test = tmp_path / "test" / "data.csv"
    rules = {"federation": federation_text("text"), "deadline": 0.5, "join": 0.3}
    settings = settings_table(fedavg_config(), tmp_path / "run", test, **rules)
    folder = entry.start(Grid(settings, {7: nodes[7]}), settings)
    assert [e["sites"] for e in events(folder, "enrolled")] == [["north"]]
    assert all(e["answered"] == [0] for e in events(folder, "asked"))


def write_file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


MISTAKES = {
    "no manifest": (lambda f: (f / "manifest.toml").unlink(), "manifest"),
    "not TOML": (lambda f: write_file(f / "manifest.toml", "site = "), "TOML"),
    "no positions": (lambda f: write_file(f / "manifest.toml", 'site = "north"\ndata = "d.csv"'), "'position'"),
    "an unknown site": (lambda f: write_manifest(f, "nrth", "d.csv", TASKS[0]), "did you mean north"),
    "an unknown class": (lambda f: write_manifest(f, "north", "d.csv", ["fevr"]), "did you mean fever"),
    "two tasks at once": (lambda f: write_manifest(f, "north", "d.csv", ["cough", "sprain"]), "one task"),
    "a task twice": (lambda f: write_manifest(f, "north", "d.csv", ["cough"], ["fever"]), "once"),
    "too many positions": (lambda f: write_manifest(f, "north", "d.csv", [], [], TASKS[0]), "2 positions"),
    "missing data": (lambda f: (f / "d.csv").unlink(), "does not exist"),
    "an empty table": (lambda f: write_file(f / "d.csv", "text,label\n"), "no examples"),
    "an unknown label": (lambda f: write_file(f / "d.csv", "text,label\nx,feverr\n"), "did you mean fever"),
    "no label column": (lambda f: write_file(f / "d.csv", "text\nx\n"), "cannot be read as text"),
    "not UTF-8": (lambda f: (f / "d.csv").write_bytes(b"text,label\n\xff\xfe,fever\n"), "cannot be read as text"),
    "a class without examples": (lambda f: write_file(f / "d.csv", "text,label\nx,cough\n"), "no example of it"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_at_a_site_is_one_sentence(tmp_path, name):
    make_mistake, sentence = MISTAKES[name]
    write_texts(write_manifest(tmp_path, "north", "d.csv", TASKS[0]) / "d.csv", TASKS[0], each=2)
    make_mistake(tmp_path)
    with pytest.raises(ProfcilError, match=sentence):
        read_site(tmp_path, read_federation(federation_text("text")))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tasks = [", "TOML"),
        ('modality = "text"', "tasks and sites"),
        (federation_text("text").replace('"text"', '"txt"'), "did you mean text"),
        (federation_text("text") + "lenght = 3\n", "did you mean length"),
        (federation_text("text").replace("fever", "cough"), "none of them twice"),
        (federation_text("text").replace('["north", "south"]', "[]"), "at least one site"),
        (federation_text("text").replace("length = 8", 'length = "8"'), "length and vocabulary"),
        (federation_text("text").replace("length = 8", "length = 0"), "length and vocabulary"),
        (federation_text("text").replace("vocabulary = 500", "vocabulary = 1e3"), "length and vocabulary"),
        (federation_text("text").replace('["north", "south"]', '"north"'), "list of texts"),
        (federation_text("text").replace('["north", "south"]', "[1, 2]"), "lists of texts"),
        (federation_text("text").replace(json.dumps(TASKS), "[1]"), "list of texts"),
        (federation_text("text").replace(json.dumps(TASKS), "3"), "list of lists"),
        (federation_text("text").replace('"text"', "5"), "modality"),
        (federation_text("image").replace("[1, 8, 8]", "[8, 8]"), "three whole numbers"),
        (federation_text("image").replace("[1, 8, 8]", "8"), "list of whole numbers"),
        (federation_text("graph").replace("features = 4", "features = -4"), "features"),
        (federation_text("text") + "views = [[1]]\n", "lists of texts"),
        (federation_text("text") + "std = 2\n", "list of numbers"),
        (federation_text("text") + 'mean = ["a"]\n', "lists of finite numbers"),
        ("tasks = " + "[" * 5000, "TOML"),
    ],
)
def test_a_mistake_in_the_federation_is_one_sentence(text, sentence):
    with pytest.raises(ProfcilError, match=sentence):
        read_federation(text)


def test_a_graph_without_edges_is_read(tmp_path):
    graph = write_graph(write_manifest(tmp_path, "north", "graph", TASKS[0]) / "graph", TASKS[0])
    (graph / "edges.csv").write_text("source,target\n")
    terms = read_federation(federation_text("graph"))
    assert terms.bundle(read_site(tmp_path, terms).examples).train.edges.shape == (2, 0)


def test_a_graph_must_have_the_agreed_features(tmp_path):
    write_graph(write_manifest(tmp_path, "north", "graph", TASKS[0]) / "graph", TASKS[0])
    with pytest.raises(ProfcilError, match="4 features where the federation has 9"):
        read_site(tmp_path, read_federation(federation_text("graph").replace("features = 4", "features = 9")))


def test_sites_have_no_validation_data():
    with pytest.raises(ProfcilError, match="validation"):
        fedavg_config(evaluate="validation")
    assert federation.ENCODERS.keys() == federation.VIEWS.keys()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("mean = [1, 1, 1, 1]", "mean = [1]"), "1 values in mean for 4 columns"),
        (("std = [2, 2, 2, 2]", "std = [2, 0, 2, 2]"), "not above 0"),
        (('columns = ["a", "b", "c", "d"]\nmean = [1, 1, 1, 1]\nstd = [2, 2, 2, 2]', ""), "must name the columns"),
    ],
)
def test_a_federation_of_tables_is_checked(change, sentence):
    with pytest.raises(ProfcilError, match=sentence):
        read_federation(federation_text("table").replace(*change))


def test_a_site_s_table_lacks_a_column(tmp_path):
    write_manifest(tmp_path, "north", "table.csv", TASKS[0])
    write_table(tmp_path / "table.csv", TASKS[0])
    with pytest.raises(ProfcilError, match="has no column 'e'"):
        read_site(tmp_path, read_federation(federation_text("table").replace('"d"]', '"e"]')))
