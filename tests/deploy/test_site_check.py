"""`profcil deploy check`: all faults of a site's folder, and what would leave it."""

from __future__ import annotations

import json

import pytest
from test_sites import (
    MISTAKES,
    TASKS,
    WRITERS,
    federation_text,
    write_file,
    write_graph,
    write_images,
    write_manifest,
    write_sites,
    write_table,
    write_texts,
)

from profcil.cli.main import main
from profcil.deploy.sites.federation_file import read_federation
from profcil.deploy.sites.site import read_site
from profcil.deploy.sites.site_check import KIND_WORDS, check_site
from profcil.engine.channel import KINDS
from profcil.errors import ProfcilError


def terms(modality: str):
    return read_federation(federation_text(modality))


@pytest.mark.parametrize("modality", WRITERS)
def test_a_correct_site_can_join_and_its_declaration_is_shown(tmp_path, modality):
    write_sites(tmp_path, modality)
    found = check_site(tmp_path / "south", terms(modality), "promax")
    assert found.faults == []
    assert found.declaration == read_site(tmp_path / "south", terms(modality)).declaration()
    assert [(p["classes"], p["tasks"]) for p in found.positions] == [(["sprain"], [2]), (TASKS[0], [1])]
    assert set(found.sends) == {"model", "memory", "statistics", "transport"}
    assert found.left_out == {}


def test_the_command_says_what_would_leave_the_site(tmp_path, capsys):
    write_sites(tmp_path, "text")
    (tmp_path / "federation.toml").write_text(federation_text("text"))
    line = ["deploy", "check", str(tmp_path / "north"), "--federation", str(tmp_path / "federation.toml")]
    before = sorted(tmp_path.rglob("*"))
    assert main([*line, "--method", "fedavg"]) == 0
    text = capsys.readouterr().out
    assert '{"order": {"0": 0, "1": 1}, "counts": {"0": 12, "1": 12, "2": 12, "3": 12}}' in text
    assert "fedavg exchanges model with the server" in text
    assert "the site can join; nothing was sent" in text
    assert sorted(tmp_path.rglob("*")) == before
    assert main([*line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["can_join"] is True


def test_the_method_is_that_of_the_app(tmp_path, capsys):
    write_sites(tmp_path, "text")
    (tmp_path / "federation.toml").write_text(federation_text("text"))
    words = ["--federation", str(tmp_path / "federation.toml"), "--test", str(tmp_path / "test" / "data.csv")]
    assert main(["deploy", "app", "--method", "fedproto", *words, "--out", str(tmp_path / "app")]) == 0
    assert main(["deploy", "check", str(tmp_path / "north"), "--federation", str(tmp_path / "app")]) == 0
    assert "fedproto exchanges prototype with the server" in capsys.readouterr().out


@pytest.mark.parametrize("name", MISTAKES)
def test_every_mistake_that_stops_a_site_is_a_fault(tmp_path, capsys, name):
    make_mistake, _ = MISTAKES[name]
    write_texts(write_manifest(tmp_path, "north", "d.csv", TASKS[0]) / "d.csv", TASKS[0], each=2)
    make_mistake(tmp_path)
    with pytest.raises(ProfcilError):
        read_site(tmp_path, terms("text"))
    found = check_site(tmp_path, terms("text"))
    assert found.faults and found.declaration is None
    write_file(tmp_path / "federation.toml", federation_text("text"))  # found beside the manifest
    assert main(["deploy", "check", str(tmp_path)]) == 2
    text = capsys.readouterr().out
    assert text.count("FAULT: ") == len(found.faults)
    assert "the site cannot join" in text


def test_all_faults_are_found_at_once(tmp_path):
    write_manifest(tmp_path, "nrth", "d.csv", ["cough", "sprain"], ["fevr"], ["fever"])
    write_file(tmp_path / "d.csv", "text,label\nx,cough\ny,feverr\nz,cold\n")
    faults = "\n".join(check_site(tmp_path, terms("text")).faults)
    sentences = (
        "no site 'nrth'; did you mean north",
        "position 1 has classes of the tasks 1 and 2",
        "position 2 has the class 'fevr'",
        "task 1 comes again at position 3",
        "federation has 2 positions",
        "1 examples with the label 'feverr'",
        "1 examples with the label 'cold'",
        "declares class 'sprain'",
        "declares class 'fever'",
    )
    for sentence in sentences:
        assert sentence in faults


def test_undeclared_examples_and_single_examples_are_noted(tmp_path):
    write_manifest(tmp_path, "north", "d.csv", ["cough"])
    write_file(tmp_path / "d.csv", "text,label\nx,cough\ny,fever\nz,fever\n")
    found = check_site(tmp_path, terms("text"))
    assert found.faults == [] and found.left_out == {"fever": 2}
    assert "class 'cough' has a single example" in found.notes[0]
    assert found.declaration == {"order": {"0": 0}, "counts": {"0": 1}}


def test_images_of_another_size_are_noted_and_unreadable_ones_are_faults(tmp_path):
    write_images(write_manifest(tmp_path, "north", "images", TASKS[0]) / "images", TASKS[0])
    found = check_site(tmp_path, terms("image"))
    assert found.faults == []
    assert found.notes == ["20 of 20 images have another size and are resized to 8 x 8"]
    for name in ("a.png", "b.png"):
        write_file(tmp_path / "images" / "cough" / name, "no image")
    assert (
        len([fault for fault in check_site(tmp_path, terms("image")).faults if "cannot be read as an image" in fault])
        == 2
    )


def test_features_and_columns_that_do_not_agree_are_faults(tmp_path):
    write_graph(write_manifest(tmp_path / "g", "north", "graph", TASKS[0]) / "graph", TASKS[0])
    nine = read_federation(federation_text("graph").replace("features = 4", "features = 9"))
    assert "4 features where the federation has 9" in check_site(tmp_path / "g", nine).faults[0]
    write_table(write_manifest(tmp_path / "t", "north", "table.csv", TASKS[0]) / "table.csv", TASKS[0])
    other = read_federation(federation_text("table").replace('"c", "d"]', '"e", "f"]'))
    faults = check_site(tmp_path / "t", other).faults
    assert ["'e'" in faults[0], "'f'" in faults[1]] == [True, True]


def test_without_terms_only_the_manifest_is_checked(tmp_path, capsys):
    write_sites(tmp_path, "text")
    assert main(["deploy", "check", str(tmp_path / "north")]) == 2
    assert "give --federation FILE" in capsys.readouterr().out
    assert main(["deploy", "check"]) == 2
    assert "needs the folder of a site" in capsys.readouterr().err


def test_every_kind_of_block_is_described():
    assert set(KIND_WORDS) == set(KINDS)
