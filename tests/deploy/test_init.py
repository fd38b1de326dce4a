"""`profcil deploy init`: the files of a new deployment are valid in their formats and agree with each other."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from test_sites import CLASSES, TASKS, WRITERS, federation_text, write_sites

from profcil.cli.main import main
from profcil.deploy.local.init_folder import federation_of_sites, joined_tasks
from profcil.deploy.run_config import config_from_text
from profcil.deploy.sites.federation_file import read_federation
from profcil.deploy.sites.site_check import check_site


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A deployment that was written from two sites with texts."""
    write_sites(tmp_path, "text")
    sites = ["--from", str(tmp_path / "north"), str(tmp_path / "south")]
    line = ["deploy", "init", str(tmp_path / "new"), *sites, "--host", "fed.hospital.org", "--method", "fedavg"]
    assert main([*line, "--test", str(tmp_path / "test" / "data.csv")]) == 0
    return tmp_path / "new"


def test_the_terms_are_read_from_the_sites(folder, tmp_path):
    federation = read_federation((folder / "federation.toml").read_text())
    assert federation.sites == ("north", "south") and federation.modality == "text"
    assert [list(task) for task in federation.tasks] == TASKS
    for name in federation.sites:
        assert check_site(tmp_path / name, federation).faults == []


@pytest.mark.parametrize("modality", WRITERS)
def test_the_form_of_the_inputs_is_read_from_the_data(tmp_path, modality):
    write_sites(tmp_path, modality)
    found = read_federation(federation_of_sites([tmp_path / "north", tmp_path / "south"]))
    assert found.modality == modality and found.classes == tuple(CLASSES)
    expected = {"text": {"length": 32}, "image": {"shape": (1, 12, 12)}, "graph": {"features": 4}}
    for name, value in expected.get(modality, {"columns": ("a", "b", "c", "d")}).items():
        assert getattr(found, name) == value


def test_classes_that_arrive_together_anywhere_are_one_task():
    manifests = [
        {"position": [{"classes": ["a"]}, {"classes": ["b", "c"]}, {"classes": []}]},
        {"position": [{"classes": ["d"]}, {"classes": ["c", "a"]}]},
    ]
    assert joined_tasks(manifests) == [["a", "b", "c"], ["d"]]


def test_app_and_keys_belong_to_the_sites(folder):
    settings = tomllib.loads((folder / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert config_from_text(settings["recipe"]).method == "fedavg"
    assert settings["out"] == str(folder / "runs" / "deployed")
    assert settings["federation"] == (folder / "federation.toml").read_text()
    assert {path.name for path in (folder / "certs").glob("node-*")} == {"node-0", "node-0.pub", "node-1", "node-1.pub"}
    flower = tomllib.loads((folder / "server" / "config.toml").read_text())["superlink"]["deployment"]
    assert flower == {"address": "fed.hospital.org:8000", "root-certificates": str(folder / "certs" / "ca.crt")}


def test_the_compose_files_are_yaml_with_the_options_of_flower(folder):
    yaml = pytest.importorskip("yaml")
    server = yaml.safe_load((folder / "server" / "compose.yaml").read_text())["services"]["superlink"]
    site = yaml.safe_load((folder / "site" / "compose.yaml").read_text())["services"]["node"]
    assert site["command"][:2] == ["profcil-supernode", "--allow-apps=/keys/allowed-apps.txt"]
    site["command"][:2] = ["flower-supernode"]
    for service, program in ((server, "flower-superlink"), (site, "flower-supernode")):
        assert service["command"][0] == program
        assert options_of(program) >= {word.partition("=")[0] for word in service["command"][1:]}
        assert service["cap_drop"] == ["ALL"]
    assert f"{folder}/runs:{folder}/runs" in server["volumes"]
    assert '--node-config=site="/site" home="/state"' in site["command"]
    assert "${SITE_FOLDER}:/site:ro" in site["volumes"] and "ports" not in site


def options_of(program: str) -> set[str]:
    """The options that a program of Flower names in its help."""
    from profcil.deploy.local.cluster import find_program

    text = subprocess.run([find_program(program), "--help"], capture_output=True, text=True, check=True).stdout
    return {word.strip("[],=") for word in text.replace("=", " ").split() if word.strip("[]").startswith("--")}


@pytest.mark.parametrize("name", ["server/profcil-server.service", "site/profcil-site.service"])
def test_the_units_are_units(folder, name):
    """systemd's own check, where it is installed. The programs and the user of the template do not exist here."""
    text = (folder / name).read_text()
    assert [line for line in text.splitlines() if line.startswith("[")] == ["[Unit]", "[Service]", "[Install]"]
    settings = [line for line in text.replace("\\\n", "").splitlines() if line and line[0] not in "[#"]
    assert all("=" in line and line.partition("=")[0].isalpha() for line in settings)
    analyze = shutil.which("systemd-analyze")
    if analyze:
        done = subprocess.run([analyze, "verify", str(folder / name)], capture_output=True, text=True, check=False)
        assert not [line for line in done.stderr.splitlines() if Path(name).name in line and "Unknown" in line]


def test_every_setting_of_the_site_is_used_by_both_templates(folder):
    lines = (folder / "site" / "site.env").read_text().splitlines()
    names = {line.partition("=")[0] for line in lines if not line.startswith("#")}
    assert names == {"SUPERLINK", "SITE_FOLDER", "KEY_FOLDER"}
    for name in ("compose.yaml", "profcil-site.service"):
        text = (folder / "site" / name).read_text()
        assert all("${" + setting + "}" in text for setting in names)


def test_without_sites_a_skeleton_is_written(tmp_path, capsys):
    assert main(["deploy", "init", str(tmp_path / "new")]) == 0
    assert "README.md next" in capsys.readouterr().out
    assert read_federation((tmp_path / "new" / "federation.toml").read_text()).sites == ("north", "south")
    assert not (tmp_path / "new" / "app").exists()
    assert "profcil deploy app --federation" in (tmp_path / "new" / "README.md").read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["deploy", "init"], "needs a new folder"),
        (["deploy", "init", "full"], "is not empty"),
        (["deploy", "init", "new", "--test", "t"], "needs the terms of the sites"),
        (["deploy", "init", "new", "--federation", "full/f.toml", "--from", "a"], "give one of them"),
        (["deploy", "init", "new", "--from", "nowhere"], "does not exist"),
        (["deploy", "init", "new", "--federation", "full/f.toml", "--test", "t", "--method", "fedavgg"], "fedavg"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, monkeypatch, capsys, words, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "f.toml").write_text(federation_text("text"))
    assert main(words) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
