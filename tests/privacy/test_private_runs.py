"""Runs with noise: what they refuse, what they spend, when they stop, and that they resume to the same bits."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from profcil.cli.main import main
from profcil.engine import recorder, run
from profcil.engine.recorder import settings_of
from profcil.engine.run import resume, start
from profcil.errors import ConfigError
from profcil.io.atomic_files import read_tensors
from profcil.metrics.ledger import Entry
from profcil.privacy.accountant import epsilon_of
from profcil.privacy.meter import BudgetSpent, Meter, planned_releases, releases_of
from profcil.privacy.protection import Protection
from profcil.resolve import RunConfig, resolve, to_toml

TINY = {
    "stream.clients": 4, "stream.participants": 2, "stream.task_size": 3, "stream.support": 0.5, "train.rounds": 3,
    "train.epochs": 1, "warmup.rounds": 0, "model.width": 4, "threads": 1, "workers": 1,
}  # fmt: skip
EXAMPLE = {"privacy.unit": "example", "privacy.epsilon": 4.0}
CLIENT = {"privacy.unit": "client", "privacy.epsilon": 4.0, "privacy.update_bound": 0.01}


def config(method: str, **more: object) -> RunConfig:
    small = {"params.dictionary": 20, "params.base_rounds": 0} if method == "prolin" else {}
    sets = {**TINY, **small, **{key.replace("__", "."): value for key, value in more.items()}}
    return resolve(None, {"dataset": "digits", "method": method}, sets)


def private(method: str, unit: dict[str, object], **more: object) -> RunConfig:
    return config(method, **{key.replace(".", "__"): value for key, value in unit.items()} | more)


def about(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


def tensors(folder: Path) -> dict[str, bytes]:
    found = read_tensors(folder / "state.safetensors")
    assert found is not None
    return {name: tensor.numpy().tobytes() for name, tensor in found[0].items()}


@pytest.mark.parametrize(("method", "unit"), [("prolin", EXAMPLE), ("fedavg", CLIENT), ("pro", CLIENT)])
def test_a_run_ends_at_its_budget(tmp_path, method, unit):
    made = start(private(method, unit), tmp_path / "run", tmp_path)
    spent = about(made)["privacy"]
    assert spent["epsilon"] <= 4.0 * (1 + 1e-6)
    assert spent["epsilon"] > 3.0
    plain = start(config(method), tmp_path / "plain", tmp_path)
    assert "privacy" not in about(plain)
    assert "privacy" not in (plain / "config.toml").read_text()
    assert tensors(made) != tensors(plain)


def test_without_second_moments_the_sums_of_classes_get_their_share_of_the_budget(tmp_path):
    """The same budget with less to protect: there is less noise on what is left."""
    noise = []
    for moments in ("full", "none"):
        folder = start(private("prolin", EXAMPLE, params__moments=moments), tmp_path / moments, tmp_path)
        found = read_tensors(folder / "state.safetensors")
        assert found is not None
        (variance,) = (t for name, t in found[0].items() if name.endswith("bank/noise"))
        assert about(folder)["privacy"]["epsilon"] == pytest.approx(4.0, rel=1e-6)
        noise.append(float(variance.min()))
    assert noise[1] == pytest.approx(noise[0] * 1.1 / 1.3, rel=1e-4)


def test_an_example_is_released_once_however_many_rounds_there_are(tmp_path):
    made = start(private("prolin", EXAMPLE), tmp_path / "run", tmp_path)
    folder = start(private("prolin", EXAMPLE, train__rounds=6), tmp_path / "more", tmp_path)
    assert about(made)["privacy"]["noise"] == about(folder)["privacy"]["noise"]
    assert about(folder)["privacy"]["epsilon"] == pytest.approx(4.0, rel=1e-6)


def entry(client: int, stage: str, position: int, round: int, kind: str = "statistics") -> Entry:
    return Entry(stage, position, round, client, "up", kind, 8)


def test_releases_of_positions_concern_different_examples_but_the_same_client():
    settings = private("prolin", EXAMPLE).privacy
    entries = [entry(0, "refresh", p, 0) for p in range(4)] + [entry(0, "dictionary", 0, r) for r in range(2)]
    entries += [entry(0, "refresh", 1, 1, "header"), Entry("round", 1, 1, 0, "down", "model", 8)]  # no releases
    by_example = Meter(Protection(settings, 2.0, 1))
    assert by_example.spent(entries) == pytest.approx(epsilon_of(math.sqrt(2 + 1) / 2.0, 1e-5))
    by_client = Meter(Protection(private("fedavg", CLIENT).privacy, 2.0, 1))
    assert by_client.spent(entries) == pytest.approx(epsilon_of(math.sqrt(4 + 2) / 2.0, 1e-5))
    half_answered = Meter(Protection(private("fedavg", CLIENT).privacy, 2.0, 2))
    assert half_answered.spent(entries) == pytest.approx(epsilon_of(math.sqrt(2 * 6) / 2.0, 1e-5))
    assert by_example.spent([]) == 0.0
    assert releases_of([entry(0, "refresh", 0, 0), entry(0, "refresh", 0, 0)]) == {(0, ("refresh", 0, 0)): 2}


@pytest.mark.parametrize(("method", "unit"), [("prolin", EXAMPLE), ("fedavg", CLIENT), ("pro", CLIENT)])
def test_a_run_releases_no_more_than_was_planned(tmp_path, method, unit):
    from profcil import registry
    from profcil.engine.world import make_world
    from profcil.metrics.ledger import Ledger

    settings = private(method, unit)
    world = make_world(settings, tmp_path)
    made = start(settings, tmp_path / "run", tmp_path)
    ledger = Ledger.from_csv((made / "ledger.csv").read_text())
    meter = Meter(world.protection)
    by_client = world.protection.by_client
    found = (meter.by_client if by_client else meter.by_example)(releases_of(ledger.entries))
    one = registry.find("methods", method).METHOD(settings.params)
    assert 0 < found <= planned_releases(one, world.plan, 3, 0, by_client) + 1e-9


def test_a_run_stops_before_it_spends_more_than_its_budget_and_keeps_everything(tmp_path):
    settings = private("fedavg", CLIENT, privacy__noise_multiplier=1.0, privacy__epsilon=12.0)
    with pytest.raises(BudgetSpent, match=r"the privacy budget is spent: ε = .* of 12; everything up to here is saved"):
        start(settings, tmp_path / "run", tmp_path)
    facts = about(tmp_path / "run")
    assert not facts["done"]
    assert 0 < facts["privacy"]["epsilon"] <= 12.0
    before = tensors(tmp_path / "run")
    with pytest.raises(BudgetSpent):  # resumed, it stops at the same round
        resume(tmp_path / "run")
    assert tensors(tmp_path / "run") == before


def test_a_resumed_run_has_the_same_noise(tmp_path, monkeypatch):
    settings = private("prolin", EXAMPLE)
    whole = start(settings, tmp_path / "whole", tmp_path)
    monkeypatch.setattr(recorder, "SAVE_SECONDS", -1)

    def interrupt(progress: recorder.Progress) -> None:
        if progress.what == "round" and progress.done == 5:
            raise KeyboardInterrupt

    with pytest.raises(run.Interrupted):
        start(settings, tmp_path / "resumed", tmp_path, interrupt)
    assert tensors(resume(tmp_path / "resumed")) == tensors(whole)
    assert about(tmp_path / "resumed")["privacy"] == about(whole)["privacy"]


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (lambda: private("pro", EXAMPLE), "Pro sends model updates, which noise for single examples does not protect"),
        (lambda: private("prolin", EXAMPLE, params__base_rounds=1), "ProLin sends model updates"),
        (lambda: private("prolin", EXAMPLE, params__moments="sketch"), "a sketch of second moments is lost in noise"),
        (lambda: private("prolin", EXAMPLE, warmup__rounds=1), r"the warm-up sends model updates.*warmup\.rounds = 0"),
        (lambda: private("fedavg", CLIENT, model__norm="batch"), "negative; set model.norm = group"),
        (lambda: private("fedcbdr", CLIENT), "which noise does not protect; choose another method"),
        (lambda: private("promax", CLIENT), "ProMax sends transports"),
    ],
)
def test_what_noise_cannot_protect_is_refused_before_a_run_starts(tmp_path, made, sentence):
    with pytest.raises(ConfigError, match=sentence):
        start(made(), tmp_path / "run", tmp_path)


def test_noise_needs_a_budget_or_a_multiplier():
    with pytest.raises(ConfigError, match=r"give privacy\.epsilon or privacy\.noise_multiplier"):
        config("fedavg", privacy__unit="client")


def test_settings_without_protection_are_as_before():
    assert not [key for key in settings_of(config("prolin")) if key.startswith("privacy")]
    written = to_toml(private("prolin", EXAMPLE))
    assert '[privacy]\nunit = "example"\nepsilon = 4.0\n' in written


def test_pro_leaves_out_classes_with_few_examples(fresh):
    plain = fresh("pro", setting="homogeneous")
    plain.play(0, 0)
    clients = [plain.client(c, 0, 0) for c in plain.clients(0, 0)]
    counts = {(c.id, y): c.y_list.count(y) for c in clients for y in c.labels}
    least = sorted(counts.values())[len(counts) // 2]
    assert min(counts.values()) < least
    few = fresh("pro", setting="homogeneous", privacy__min_support=least)
    weights = few.server.weights()
    for c in clients:
        client = few.client(c.id, 0, 0)
        features = client.features(few.server.blocks["base"])
        sent = few.method.statistics(client, weights, features)
        enough = tuple(y for y in client.labels if counts[client.id, y] >= least)
        assert bool(sent) == bool(enough)
        if enough:
            block = sent["memory_moments"]
            assert block.labels == enough
            assert block.tensors["count"].tolist() == [counts[client.id, y] for y in enough]


def test_a_dry_run_says_what_a_run_will_spend_and_compare_what_it_has(tmp_path, capsys):
    sets = [f"--set={key}={value}" for key, value in {**TINY, **EXAMPLE, "params.dictionary": 20}.items()]
    assert main(["run", "--dataset", "digits", "--method", "prolin", "--dry-run", *sets]) == 0
    expected = "# privacy spent at the end: ε = 4 at δ = 1e-05 for each example, by at most 1 reply with"
    assert expected in capsys.readouterr().out
    folder = start(private("prolin", EXAMPLE), tmp_path / "run", tmp_path)
    plain = start(config("prolin"), tmp_path / "plain", tmp_path)
    assert main(["compare", str(folder), str(plain)]) == 0
    header, one, other, *_ = capsys.readouterr().out.splitlines()
    assert header.split()[-1] == "ε"
    assert one.split()[-1] == "4.00"
    assert other.split()[-1] == "-"
    assert main(["compare", str(plain)]) == 0
    assert "ε" not in capsys.readouterr().out
