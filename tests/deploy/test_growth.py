"""Sites that join and classes that are declared while a run goes on: deployed, simulated, and after a kill."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_grid import Grid
from test_faults import events
from test_same_run import outcome
from test_simulated_sites import result
from test_sites import WORDS, write_graph, write_manifest, write_texts

from profcil.cli.main import main
from profcil.deploy.app_folder import settings_table
from profcil.deploy.run_config import sites_config
from profcil.deploy.server import entry
from profcil.deploy.sites import simulation
from profcil.deploy.sites.declarations import complete_orders
from profcil.deploy.sites.enrolment import STAGE, Enrolment
from profcil.deploy.sites.federation_file import read_federation
from profcil.deploy.sites.simulation import SimulatedSites
from profcil.deploy.status import status
from profcil.engine import recorder
from profcil.engine import run as engine
from profcil.errors import ProfcilError
from profcil.metrics.client_first import current_by_position, summary, summary_so_far
from profcil.protocol.plan import Plan
from profcil.runs.models.loading import load_model
from profcil.runs.reader import load_run

TASKS = [["cough", "fever"], ["sprain", "fracture"]]
BURN = '\n[[later]]\nposition = 2\ntasks = [["burn"]]\n'
QUICK = ["train.rounds=2", "train.epochs=1", "train.batch=8", "warmup.rounds=1", "train.lr=0.05", "threads=1"]
ALL = ["cough", "fever", "sprain", "fracture", "burn"]


@pytest.fixture(autouse=True)
def a_fifth_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(WORDS, "burn", "skin blister")
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "cache"))


def terms(more: str = "", reserve: int = 2) -> str:
    head = f'modality = "text"\ntasks = {json.dumps(TASKS)}\nsites = ["north", "south", "west"]\n'
    return f"{head}length = 8\nvocabulary = 500\nreserve = {reserve}\n{more}"


def join_at(folder: Path, position: int) -> None:
    manifest = folder / "manifest.toml"
    manifest.write_text(f"joins = {position}\n" + manifest.read_text())


def write_three_sites(tmp_path: Path) -> dict[int, dict[str, Any]]:
    """North and south from the start; west comes at position 2 with coughs, which the others had before. North and west
    have burns at position 3. All files hold burns from the start."""
    plans = {
        "north": (TASKS[0], TASKS[1], ["burn"]),
        "south": (["sprain"], TASKS[0]),
        "west": (["fracture"], ["cough"], ["burn"]),
    }
    nodes = {}
    for number, (site, positions) in enumerate(plans.items(), start=7):
        folder = write_manifest(tmp_path / site, site, "data.csv", *positions)
        write_texts(folder / "data.csv", ["burn", *ALL[:4]], each=4)
        nodes[number] = {"site": str(folder), "home": str(tmp_path / "home")}
    write_texts(tmp_path / "test.csv", ["burn", *ALL[:4]], each=3)
    return nodes


def config_of(text: str, method: str) -> Any:
    return sites_config(read_federation(text), None, {"method": method, "accelerate": "off"}, QUICK)


def simulate(tmp_path: Path, text: str, method: str = "promax", out: str = "simulated") -> Path:
    folders = tuple(tmp_path / name for name in ("north", "south", "west"))
    sites = SimulatedSites(text, folders, tmp_path / "test.csv")
    return simulation.start(sites, config_of(text, method), tmp_path / out)


class LateGrid(Grid):
    """A grid on which something happens once the first position is trained."""

    def __init__(self, settings: dict[str, Any], nodes: dict[int, Any], happens: Callable[[LateGrid], None]) -> None:
        super().__init__(settings, nodes)
        self.happens = happens
        self.turns = 0

    def deliver(self, message: Any) -> str:
        id = super().deliver(message)
        self.turns += message.metadata.message_type == "train.turn"
        if self.turns == 6:  # two clients: one round of warm-up, two rounds of the first position
            self.turns += 1
            self.happens(self)
        return id


def deploy(tmp_path: Path, text: str, happens: Callable[[LateGrid], None], nodes: dict, method: str = "promax") -> Path:
    rules = {"federation": text, "deadline": 0.5, "join": 0.3}
    settings = settings_table(config_of(text, method), tmp_path / "run", tmp_path / "test.csv", **rules)
    return entry.start(LateGrid(settings, nodes, happens), settings)


@pytest.mark.parametrize("method", ["promax", "prolin"])
def test_a_site_joins_and_a_class_is_declared_while_it_runs_with_the_bits_of_the_simulation(tmp_path, capsys, method):
    nodes = write_three_sites(tmp_path)

    def happens(grid: LateGrid) -> None:
        grid.nodes[9] = nodes[9]
        (tmp_path / "run" / "federation.toml").write_text(terms(BURN))

    folder = deploy(tmp_path, terms(), happens, {7: nodes[7], 8: nodes[8]}, method)
    run = load_run(folder)
    assert [(e["position"], e["sites"], e["classes"]) for e in events(folder, "extended")] == [(1, ["west"], ["burn"])]
    assert run.plan.positions == 3 and run.plan.tasks[2] == (4,)
    assert run.plan.active(1).tolist() == [0, 1, 2] and run.plan.active(2).tolist() == [0, 2]
    assert run.plan.audit()["joined_later"] == {"2": 1} and run.plan.audit()["declared_later"] == {"2": 1}
    assert run.plan.seen(0) == {0, 1, 2, 3} and run.plan.seen(2) == {0, 1, 2, 3, 4}
    entries = run.ledger.entries
    assert {(e.client, e.direction) for e in entries if e.stage == STAGE} == {
        (c, d) for c in range(3) for d in ("down", "up")
    } - {(1, "up")}
    assert min(e.position for e in entries if e.client == 2) == 1
    assert not [e for e in entries if e.client == 2 and e.stage in ("warmup", "dictionary")]
    assert run.done and all(0 <= value <= 100 for value in run.metrics.values())
    assert status(folder)["left_out"] == []
    assert main(["verify", str(folder)]) == 0
    model = load_model(folder)
    assert "burn" in model.predict_texts(["skin blister patient"] * 3) or method != "prolin"
    assert 5 not in model.seen  # one of the two reserved classes was not used
    # Two lines give the same to the simulation: when west joins, and when burns are declared.
    join_at(tmp_path / "west", 2)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    assert result(simulate(tmp_path, terms(BURN), method)) == result(folder)


def test_without_growth_nothing_is_recorded_of_it(tmp_path):
    nodes = write_three_sites(tmp_path)
    folder = deploy(tmp_path, terms(), lambda grid: None, {7: nodes[7], 8: nodes[8]}, "fedavg")
    run = load_run(folder)
    assert events(folder, "extended") == [] and run.plan.positions == 2
    assert "joined_later" not in run.plan.audit() and "joined later" not in run.plan.describe()
    assert not [e for e in run.ledger.entries if e.stage == STAGE]


def test_a_known_site_that_connects_late_needs_no_new_terms(tmp_path):
    nodes = write_three_sites(tmp_path)
    folder = deploy(
        tmp_path, terms(reserve=1), lambda grid: grid.nodes.update({9: nodes[9]}), {7: nodes[7], 8: nodes[8]}
    )
    assert [e["sites"] for e in events(folder, "extended")] == [["west"]]
    assert "joined later       client 2 from position 2" in load_run(folder).plan.describe()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (terms(BURN.replace("= 2", "= 3")), "allowed is 2 to 2"),
        (terms(BURN).replace("cough", "coughs"), "changes what holds before position 2"),
        (terms(BURN).replace("burn", "scald"), "no example of class 'scald'"),
        ("modality = ", "TOML"),
        (terms(BURN, reserve=3), "changes what holds before position 2"),
        (terms(BURN.replace('"burn"', '"burn", "cough"')), "names a class twice"),
        (terms(BURN, reserve=0), "reserve = 0"),
    ],
)
def test_terms_that_cannot_be_used_are_refused_and_the_run_goes_on(tmp_path, capsys, changed, sentence):
    nodes = write_three_sites(tmp_path)

    def happens(grid: LateGrid) -> None:
        (tmp_path / "run" / "federation.toml").write_text(changed)

    folder = deploy(tmp_path, terms(), happens, {7: nodes[7], 8: nodes[8]}, "fedavg")
    assert load_run(folder).done and load_run(folder).plan.positions == 2
    [refused] = events(folder, "refused")
    assert sentence in refused["reason"]
    assert "REFUSED" in capsys.readouterr().out


class Killed(Exception):
    """Ends a server in the middle of its work."""


@pytest.mark.parametrize("moment", ["before the plan's file", "in the next round"])
def test_a_server_killed_after_growth_is_resumed_with_the_same_bits(tmp_path, monkeypatch, moment):
    nodes = write_three_sites(tmp_path)
    join_at(tmp_path / "west", 2)
    text = terms(BURN)
    whole = deploy(tmp_path, text, lambda grid: None, nodes).rename(tmp_path / "whole")
    shutil.rmtree(tmp_path / "home")
    if moment == "before the plan's file":
        target = "profcil.runs.folder.RunFolder.save_plan"
    else:
        target = "profcil.protocol.plan.Plan.current"  # called after the rounds of a position, for its examination
    calls = []

    def kill(*_: object) -> None:
        calls.append(1)
        raise Killed

    with monkeypatch.context() as patch:
        if moment == "in the next round":
            original = Plan.current
            patch.setattr(target, lambda self, p: kill() if p == 1 else original(self, p))
        else:
            patch.setattr(target, kill)
        with pytest.raises(Killed):
            deploy(tmp_path, text, lambda grid: None, nodes)
    assert calls and not load_run_is_done(tmp_path / "run")
    folder = deploy(tmp_path, text, lambda grid: None, nodes)
    assert outcome(folder) == outcome(whole)
    assert len(events(folder, "resumed")) == 1


def load_run_is_done(path: Path) -> bool:
    return bool(json.loads((path / "run.json").read_text())["done"])


def stop_in_position_two(progress: recorder.Progress) -> None:
    if progress.what == "round" and progress.done == 3:
        raise KeyboardInterrupt


def test_a_simulation_that_has_grown_is_resumed_to_the_same_bits(tmp_path):
    write_three_sites(tmp_path)
    join_at(tmp_path / "west", 2)
    whole = simulate(tmp_path, terms(BURN))
    sites = SimulatedSites(terms(BURN), tuple(tmp_path / n for n in ("north", "south", "west")), tmp_path / "test.csv")
    with pytest.raises(engine.Interrupted):
        simulation.start(sites, config_of(terms(BURN), "promax"), tmp_path / "half", stop_in_position_two)
    assert load_run(tmp_path / "half").plan.positions == 3
    assert main(["resume", str(tmp_path / "half"), "--quiet"]) == 0
    assert outcome(tmp_path / "half") == outcome(whole)
    assert main(["diagnose", str(tmp_path / "half")]) == 0


def test_graphs_grow_with_the_bits_of_the_simulation(tmp_path, monkeypatch):
    pytest.importorskip("torch_geometric")
    monkeypatch.setattr("test_sites.CLASSES", ALL[:4])
    nodes = write_three_sites(tmp_path)
    text = terms(BURN).replace('"text"', '"graph"').replace("length = 8\nvocabulary = 500", "features = 4")
    for site in ("north", "south", "west"):
        manifest = tmp_path / site / "manifest.toml"
        manifest.write_text(manifest.read_text().replace("data.csv", "graph"))
        write_graph(tmp_path / site / "graph", ALL)
    write_graph(tmp_path / "graph", ALL).rename(tmp_path / "test")
    (tmp_path / "test.csv").unlink()
    (tmp_path / "test").rename(tmp_path / "test.csv")
    folder = deploy(tmp_path, text, lambda grid: grid.nodes.update({9: nodes[9]}), {7: nodes[7], 8: nodes[8]})
    join_at(tmp_path / "west", 2)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    assert result(simulate(tmp_path, text)) == result(folder)


def test_a_check_says_which_classes_wait_to_be_declared(tmp_path, capsys):
    write_three_sites(tmp_path)
    (tmp_path / "federation.toml").write_text(terms())
    line = ["deploy", "check", str(tmp_path / "north"), "--federation", str(tmp_path / "federation.toml")]
    assert main(line) == 0
    assert "4 examples of the class 'burn', which the federation has not declared" in capsys.readouterr().out
    (tmp_path / "federation.toml").write_text(terms(BURN))
    assert main(line) == 0
    assert "not declared" not in capsys.readouterr().out


def test_terms_are_those_of_a_position():
    federation = read_federation(terms(BURN))
    first = federation.at(0)
    second = federation.at(1)
    assert first.classes == tuple(ALL[:4]) and first.reserve == 2
    assert second.classes == tuple(ALL) and second.reserve == 1 and second.declared == (0, 0, 1)
    assert first.facts().classes == second.facts().classes == 6


def test_a_late_site_keeps_what_it_has_data_of_and_others_keep_their_past():
    # The second site was absent, and joins at position 1 with task 0: its idle past gets another task.
    assert complete_orders([{0: 0, 1: 1}, {1: 0}], 3, [[0], [0]]).tolist() == [[0, 1, 2], [1, 0, 2]]
    # An idle past that the site has no data of stays.
    assert complete_orders([{1: 2}], 3, [[1]]).tolist() == [[1, 2, 0]]


def test_the_past_of_a_declaration_stays():
    federation = read_federation(terms(BURN)).at(1)
    old = Enrolment().extended(federation, {0: {"order": {"0": 0, "1": 1}, "counts": {"0": 5, "2": 4}}}, 0)
    new = {"order": {"0": 1, "1": 0, "2": 2}, "counts": {"0": 9, "2": 9, "4": 3}}
    after = old.extended(federation, {0: new}, 1)
    assert after.declarations[0] == {"order": {"0": 0, "2": 2}, "counts": {"0": 5, "4": 3}, "joined": 0}
    assert old.extended(federation, {}, 1).is_like(old)
    waiting = {1: {"order": {"0": 0}, "counts": {"0": 5}, "joins": 2}}
    assert old.extended(federation, waiting, 1).is_like(old)
    passed = {1: {"order": {"0": 0}, "counts": {"0": 5}}}  # all its positions have passed
    assert 1 not in old.extended(federation, passed, 1).declarations


def test_a_site_that_was_not_there_lowers_no_score():
    """Its cells before it joined, whose task was unknown, are left out of CTA."""
    correct = np.array([[5, -1], [5, 8]])
    total = np.array([10, 10])
    orders = np.array([[0, 1], [1, 0]])  # the second client joined at position 1; task 1 was unknown before
    assert current_by_position(correct, total, orders).tolist() == [0.5, (0.8 + 0.5) / 2]
    assert summary(correct, total, orders)["faa"] == pytest.approx(65)
    so_far = summary_so_far(correct, total, orders, 0)
    assert (so_far["faa"], so_far["cta"]) == (50, 50)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ('\n[[later]]\nposition = 1\ntasks = [["burn"]]\n', "from 2 on"),
        ("\n[[later]]\nposition = 2\ntasks = []\n", "tasks"),
        ("\n[[later]]\nposition = 2\ntasks = [[1]]\n", "lists of texts"),
        ('\n[[later]]\nposition = 2\ntasks = [["a", "b", "c"]]\n', "3 classes later, but reserve = 2"),
        ("\nlater = 3\n", "wrong form"),
    ],
)
def test_a_mistake_in_later_terms_is_one_sentence(more, sentence):
    with pytest.raises(ProfcilError, match=sentence):
        read_federation(terms(more))


@pytest.mark.parametrize("joins", ["0", "true", '"two"'])
def test_a_mistake_in_joins_is_one_sentence(tmp_path, joins):
    write_three_sites(tmp_path)
    join_at(tmp_path / "west", joins)
    with pytest.raises(ProfcilError, match="a position from 1 on"):
        simulate(tmp_path, terms(BURN))
