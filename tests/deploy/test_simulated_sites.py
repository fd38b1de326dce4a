"""`profcil run --federation`: the sites of a deployment in one process, with the bits of the deployment."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from memory_grid import Grid
from test_same_run import outcome
from test_sites import (
    QUICK,
    TASKS,
    WRITERS,
    federation_text,
    run_sites,
    write_manifest,
    write_sites,
)

from profcil.cli.main import main
from profcil.deploy.app_folder import settings_table
from profcil.deploy.run_config import config_from_text, config_to_text, sites_config
from profcil.deploy.server import entry
from profcil.deploy.sites.federation_file import read_federation
from profcil.deploy.sites.simulation import read_simulated_sites
from profcil.engine import recorder
from profcil.engine import run as engine
from profcil.errors import ProfcilError
from profcil.runs.reader import load_run


def simulate(tmp_path: Path, modality: str, method: str, sites: tuple[str, ...] = ("north", "south")) -> Path:
    """Runs the command on folders that `write_sites` wrote. Returns the run folder."""
    (tmp_path / "federation.toml").write_text(federation_text(modality))
    assert main([*line(tmp_path, modality, method, sites), "--quiet"]) == 0
    return tmp_path / "simulated"


def line(tmp_path: Path, modality: str, method: str, sites: tuple[str, ...]) -> list[str]:
    sets = [word for setting in QUICK for word in ("--set", setting)]
    data = [
        "--sites",
        *(str(tmp_path / name) for name in sites),
        "--test",
        str(tmp_path / "test" / WRITERS[modality][1]),
    ]
    federation = ["--federation", str(tmp_path / "federation.toml")]
    return ["run", *federation, *data, "--method", method, *sets, "--out", str(tmp_path / "simulated")]


def result(folder: Path) -> dict:
    """The outcome of a run, without the numbers of examples: the server of a deployment makes up its own."""
    found = outcome(folder)
    found.pop("plan.npz")
    plan = load_run(folder).plan
    return {**found, "orders": plan.orders.tolist(), "counts": plan.counts.tolist(), "tasks": plan.tasks}


@pytest.mark.parametrize(
    ("modality", "method"),
    [("text", "promax"), ("text", "prolin"), ("image", "fedspace"), ("graph", "promax"), ("table", "promax")],
)
def test_a_simulation_of_the_sites_has_the_bits_of_the_deployment(tmp_path, capsys, modality, method):
    deployed = run_sites(tmp_path, modality, method, accelerate="off")
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    simulated = simulate(tmp_path, modality, method)
    assert result(simulated) == result(deployed)
    assert "run folder" in capsys.readouterr().out


def test_only_row_numbers_differ_of_a_method_that_sends_them(tmp_path):
    """FedCBDR's server names examples by row: of a site's data in a deployment, of all data in a simulation."""
    deployed = result(run_sites(tmp_path, "text", "fedcbdr", accelerate="off"))
    simulated = result(simulate(tmp_path, "text", "fedcbdr"))
    tensors = deployed.pop("tensors")
    others = simulated.pop("tensors")
    assert simulated == deployed
    differing = {name for name in tensors if tensors[name] != others[name]}
    assert differing == {"server/keep/1/rows"}


def test_undeclared_examples_and_an_absent_site_are_left_out_as_in_the_deployment(tmp_path):
    nodes = write_sites(tmp_path, "text")
    write_manifest(tmp_path / "north", "north", "data.csv", TASKS[1], ["fever"])  # the data has coughs, too
    text = federation_text("text")
    config = sites_config(read_federation(text), None, {"method": "fedavg", "accelerate": "off"}, QUICK)
    test = tmp_path / "test" / "data.csv"
    settings = settings_table(config, tmp_path / "run", test, federation=text, deadline=0.5, join=0.3)
    deployed = entry.start(Grid(settings, {7: nodes[7]}), settings)
    simulated = simulate(tmp_path, "text", "fedavg", ("north",))
    assert result(simulated) == result(deployed)
    assert load_run(simulated).plan.counts.sum() == 36


def test_the_order_of_the_folders_changes_nothing(tmp_path):
    write_sites(tmp_path, "text")
    one = outcome(simulate(tmp_path, "text", "fedavg"))
    shutil.rmtree(tmp_path / "simulated")
    assert outcome(simulate(tmp_path, "text", "fedavg", ("south", "north"))) == one


def test_other_commands_work_on_a_simulation_of_sites(tmp_path, capsys):
    write_sites(tmp_path, "text")
    folder = simulate(tmp_path, "text", "promax")
    test = str(tmp_path / "test" / "data.csv")
    model = str(folder / "model.safetensors")
    commands = [
        ["compare", str(folder)],
        ["diagnose", str(folder)],
        ["report", str(folder), "--out", str(tmp_path / "page.html")],
        ["status", str(folder)],
        ["eval", model, "--data", test],
        ["resume", str(folder)],
    ]
    for command in commands:
        assert main(command) == 0, capsys.readouterr().err
    assert (tmp_path / "page.html").exists()
    output = capsys.readouterr().out
    assert "a simulation in one process" in output  # the status names no replies, which a simulation has not
    assert "accepted replies" not in output


def stop_after_two_rounds(progress: recorder.Progress) -> None:
    if progress.what == "round" and progress.done == 2:
        raise KeyboardInterrupt


def test_an_interrupted_simulation_is_resumed_to_the_same_bits(tmp_path, capsys):
    from profcil.deploy.sites import simulation

    write_sites(tmp_path, "text")
    whole = outcome(simulate(tmp_path, "text", "promax"))
    sites = read_simulated_sites(tmp_path / "simulated" / "sites.toml")
    flags = {"method": "promax", "accelerate": "off"}
    config = sites_config(read_federation(sites.federation), None, flags, QUICK)
    with pytest.raises(engine.Interrupted):
        simulation.start(sites, config, tmp_path / "half", stop_after_two_rounds)
    assert not load_run(tmp_path / "half").done
    assert main(["resume", str(tmp_path / "half"), "--quiet"]) == 0
    assert outcome(tmp_path / "half") == whole


def test_a_dry_run_counts_the_work_of_the_sites(tmp_path, capsys):
    write_sites(tmp_path, "text")
    (tmp_path / "federation.toml").write_text(federation_text("text"))
    assert main([*line(tmp_path, "text", "fedavg", ("north", "south")), "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["accelerate"] == "off"
    assert found["work"]["training_examples"] == 84 and found["work"]["positions"] == 2
    assert not (tmp_path / "simulated").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda words: [words[0], *words[3:]], "give all three"),  # without --federation
        (lambda words: [*words, "--dataset", "digits"], "leave out --dataset"),
        (lambda words: [("nowhere" if w.endswith("south") else w) for w in words], "does not exist"),
        (lambda words: [(w.replace("south", "north")) for w in words], "one folder for each site"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_nothing_behind(tmp_path, monkeypatch, capsys, change, sentence):
    monkeypatch.chdir(tmp_path)
    write_sites(tmp_path, "text")
    (tmp_path / "federation.toml").write_text(federation_text("text"))
    words = line(tmp_path, "text", "fedavg", ("north", "south"))
    assert main(change(words)) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "simulated").exists()


def test_the_data_of_a_real_deployment_is_not_here(tmp_path):
    with pytest.raises(ProfcilError, match="at its sites"):
        read_simulated_sites(tmp_path / "data.csv")


def test_sites_leave_out_classes_with_one_example_by_default():
    """That such a class is in no statistics is tested in tests/privacy; this is about the setting of sites."""
    federation = read_federation(federation_text("text"))
    config = sites_config(federation, None, {"method": "prolin"}, [])
    assert config_from_text(config_to_text(config)).privacy.min_support == 2
    off = sites_config(federation, None, {"method": "prolin"}, ["privacy.min_support=1"])
    assert config_from_text(config_to_text(off)).privacy.min_support == 1
