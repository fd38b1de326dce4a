"""Secure sums with noise over Flower: the bits and the accounting of the simulation, noise of the sites' own, dropouts
at every stage, and a server that asks for a sum with too little noise."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from memory_grid import Grid
from test_faults import events
from test_same_run import outcome
from test_secure_sums import VICTIM, at, gone, lie_before, quick, stage_of, write_three_sites
from test_simulated_sites import result
from test_sites import QUICK, TASKS

from profcil.cli.main import main
from profcil.deploy.app_folder import settings_table
from profcil.deploy.client import sum_noise
from profcil.deploy.client.identity import SiteIdentity
from profcil.deploy.run_config import sites_config
from profcil.deploy.server import entry
from profcil.deploy.sites.federation_file import read_federation
from profcil.deploy.wire import Request, SumRequest, read_request, read_response, request_records
from profcil.engine import run as engine
from profcil.errors import ConfigError
from profcil.privacy.accountant import multiplier_of
from profcil.privacy.secure_sum.collection import ROUNDS
from profcil.privacy.secure_sum.protocol import SumFailed
from profcil.runs.reader import load_run

EXAMPLE = {"privacy__unit": "example", "privacy__epsilon": 8.0}
CLIENT = {"privacy__unit": "client", "privacy__epsilon": 8.0, "privacy__update_bound": 0.05}
OUTCOMES: dict[str, dict] = {}  # of runs that several tests compare with
FEDERATION = f'modality = "text"\ntasks = {json.dumps(TASKS)}\nsites = ["north", "south", "west"]\n'
FEDERATION += "length = 8\nvocabulary = 500\n"


def noisy(**more: Any) -> Any:
    """FedAvg with five clients in two rounds, each client protected."""
    return quick(**{**CLIENT, **more})


# -- the same run -----------------------------------------------------------------------------------------------------

CASES = [
    ("probayes", {**EXAMPLE, "dictionary": 30, "privacy__min_support": 10}),
    ("prolin", {**EXAMPLE, "base_rounds": 0, "dictionary": 20}),
    ("prolin", {**CLIENT, "base_rounds": 1, "transport": "none"}),
    ("fedavg", {**CLIENT, "warmup__rounds": 1, "privacy__update_quantile": 0.5}),
    ("pro", {**CLIENT, "stream__task_size": 5, "setting": "severe", "stream__participants": 4}),
]


@pytest.mark.parametrize(("method", "more"), CASES, ids=[f"{m}-{i}" for i, (m, _) in enumerate(CASES)])
def test_a_deployment_of_simulated_clients_has_the_noise_of_the_simulation(deployed, tmp_path, method, more):
    """The bits, the ledger, and what is spent by it."""
    config = quick(method=method, **more)
    serial = engine.start(config, tmp_path / "serial", tmp_path)
    folder, _ = deployed(config, nodes=5)
    assert outcome(folder) == outcome(serial)
    found, expected = load_run(folder).facts["privacy"], load_run(serial).facts["privacy"]
    assert found == expected and 0 < found["epsilon"] <= 8.0 * (1 + 1e-6)


def deploy_sites(tmp_path: Path, *sets: str, out: str = "run", method: str = "probayes") -> Path:
    """A run on three sites, of which each has other classes at the first position."""
    nodes = write_three_sites(tmp_path)
    flags = {"method": method, "accelerate": "off"}
    config = sites_config(read_federation(FEDERATION), None, flags, [*QUICK, "warmup.rounds=0", *sets])
    test = tmp_path / "test.csv"
    settings = settings_table(config, tmp_path / out, test, federation=FEDERATION, deadline=0.5, join=0.5)
    return entry.start(Grid(settings, nodes), settings)


NOISED_SITES = ["privacy.unit=example", "privacy.epsilon=8", "privacy.secure_sum=true", "params.text_entries=hashes"]


def test_sites_with_their_own_data_add_the_noise_of_their_simulation(tmp_path, monkeypatch):
    """With noise from the seed, as in the simulation, the bits are the same."""
    monkeypatch.setattr(SiteIdentity, "noise_secret", lambda self, store: None)
    folder = deploy_sites(tmp_path, *NOISED_SITES)
    (tmp_path / "federation.toml").write_text(FEDERATION)
    words = ["run", "--federation", str(tmp_path / "federation.toml"), "--method", "probayes", "--quiet"]
    words += ["--sites", *(str(tmp_path / name) for name in ("north", "south", "west"))]
    words += ["--test", str(tmp_path / "test.csv"), "--out", str(tmp_path / "simulated")]
    sets = [*QUICK, "warmup.rounds=0", *NOISED_SITES]
    assert main([*words, *(word for setting in sets for word in ("--set", setting))]) == 0
    assert result(tmp_path / "simulated") == result(folder)


def test_each_site_draws_from_a_secret_of_its_own(tmp_path):
    """Two runs of one seed have other sums, and one ledger."""
    one, two = (deploy_sites(tmp_path, *NOISED_SITES, out=out) for out in ("one", "two"))
    secrets = [path.read_text() for path in (tmp_path / "home").rglob("noise-secret")]
    assert len(secrets) == len(set(secrets)) == 6 and {len(secret) for secret in secrets} == {64}
    found = [outcome(folder) for folder in (one, two)]
    assert found[0]["ledger.csv"] == found[1]["ledger.csv"]
    assert found[0]["tensors"] != found[1]["tensors"]


def test_sites_are_not_left_to_guess_how_often_others_take_part(tmp_path):
    with pytest.raises(ConfigError, match=r"give privacy\.noise_multiplier"):
        deploy_sites(tmp_path, "privacy.unit=client", "privacy.epsilon=8", "privacy.secure_sum=true", method="fedavg")


# -- what leaves a site -----------------------------------------------------------------------------------------------


def test_the_numbers_in_a_sites_folder_have_its_share_of_the_noise(deployed, tmp_path, monkeypatch):
    """Their deviation from the exact numbers is that of a share: 1/s of the variance, s of the clients must stay."""
    shares: dict[int, tuple[np.ndarray, Any]] = {}
    added = sum_noise.OwnShare.added

    def look(self: Any, vector: Any, request: Request) -> Any:
        noised, release = added(self, vector, request)
        shares[request.client] = ((noised - vector).view(np.int64), self.noise)
        return noised, release

    monkeypatch.setattr(sum_noise.OwnShare, "added", look)
    deployed(noisy(train__rounds=1), nodes=5)
    assert set(shares) == set(range(5))
    for found, noise in shares.values():
        (deviation,) = set(noise.deviations.values())  # all arrays are of the model update, which has one bound
        assert found[-1] == 0 and np.count_nonzero(found) == len(found) - 1  # the last one says that there is a reply
        assert found[:-1].std() == pytest.approx(deviation, rel=0.1)
    z = multiplier_of(8.0, 1e-5)
    assert deviation == pytest.approx(z * 0.05 * 2.0**28 / np.sqrt(3), rel=0.01)  # of five clients three must stay


# -- dropouts ---------------------------------------------------------------------------------------------------------


def without_victim(deployed: Callable) -> dict:
    if "without" not in OUTCOMES:
        OUTCOMES["without"] = outcome(deployed(noisy(), fault=at("keys", gone), nodes=5, out="without")[0])
    return OUTCOMES["without"]


@pytest.mark.parametrize("stage", ROUNDS)
def test_a_client_may_stop_at_every_stage(deployed, tmp_path, stage):
    """The others' noise is the same as if it had never sent keys; it takes part in the next round."""
    folder, _ = deployed(noisy(), fault=at(stage, gone), nodes=5)
    first, second = events(folder, "asked")
    assert first["silent"] == [1] and second["answered"] == [0, 1, 2, 3, 4]
    if stage == "recovery":
        assert outcome(folder)["tensors"] == outcome(engine.start(noisy(), tmp_path / "serial", tmp_path))["tensors"]
    else:
        assert first["answered"] == [0, 2, 3, 4]
        assert outcome(folder)["tensors"] == without_victim(deployed)["tensors"]


def test_a_second_attempt_of_the_same_clients_has_the_same_sum(deployed, tmp_path):
    folder, _ = deployed(noisy(), fault=at("masked", gone, (100, 101, 102)), nodes=5)
    assert [e["answered"] for e in events(folder, "asked")] == [[], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert outcome(folder)["tensors"] == outcome(engine.start(noisy(), tmp_path / "serial", tmp_path))["tensors"]


def leaving(stage: str, nodes: tuple[int, ...]) -> Callable:
    """Nodes that are gone for good from a stage on."""

    def fault(grid: Grid, request: Message, reply: Message) -> list[Message]:
        if stage_of(request) == stage and request.metadata.dst_node_id in nodes:
            del grid.nodes[request.metadata.dst_node_id]
            return []
        return [reply]

    return fault


def seven(**more: Any) -> Any:
    """Seven clients, of which four must stay. PRO-BAYES has one sum a position."""
    return quick(method="probayes", **EXAMPLE, dictionary=30, stream__clients=7, stream__participants=7, **more)


def test_before_the_last_exchange_the_others_may_go_on_alone(deployed):
    """Nothing was revealed, so a sum of those who are left is their first."""
    folder, _ = deployed(seven(train__rounds=1), fault=leaving("masked", (100, 101, 102, 103)), nodes=7)
    first, second = events(folder, "asked")[1:]  # the turns have no numbers
    assert "3 clients sent a vector, 4 are needed" in first["given_up"]
    assert second["answered"] == [4, 5, 6]


def test_after_it_they_may_not(deployed, tmp_path):
    """Those who have helped to take off masks cannot know if enough others have: to them the example is spent."""
    with pytest.raises(SumFailed, match="0 clients sent keys"):
        deployed(seven(), fault=leaving("recovery", (100, 101, 102, 103)), nodes=7)
    second = events(tmp_path / "run", "asked")[2]
    assert set(second["refused"]) == {"4", "5", "6"}
    assert all("it has sent as much as the settings of the app plan" in r for r in second["refused"].values())


# -- a server that lies -----------------------------------------------------------------------------------------------


def refusals(tmp_path: Path, config: Any, *lies: Callable[[SumRequest], SumRequest]) -> list[str]:
    """The sentences with which client 1 refuses to take part in changed sums."""
    found: list[str] = []
    settings = settings_table(config, tmp_path / "run", tmp_path, deadline=0.3, join=0.3)
    nodes = {100 + i: {"client": i, "home": str(tmp_path / "sites")} for i in range(5)}

    def lie(grid: Grid, message: Message) -> str:
        request = read_request(message.content)
        assert request.sum is not None
        for change in lies:
            other = Message(request_records(replace(request, sum=change(request.sum))), VICTIM, "train.turn")
            other.metadata.__dict__["_message_id"] = "other"
            response = read_response(grid.reply(other).content)
            assert not response.sum_keys
            found.append(response.error)
        return ""

    entry.start(lie_before("keys", lie, [])(settings, nodes), settings)
    return found


def test_a_site_refuses_a_sum_in_which_its_noise_would_be_too_small(tmp_path):
    """It computes the size of its share itself: from the clients of the sum, and from arrays that it knows."""

    def more(asked: SumRequest) -> SumRequest:
        return replace(asked, members=tuple(range(40)))

    def fewer(asked: SumRequest) -> SumRequest:
        return replace(asked, members=(0, 1))

    def other(asked: SumRequest) -> SumRequest:
        return replace(asked, shapes=dict(list(asked.shapes.items())[1:]))

    def unknown(asked: SumRequest) -> SumRequest:
        return replace(asked, classes=(3, 4000))

    found = refusals(tmp_path, noisy(train__rounds=1), more, fewer, other, unknown)
    assert "a secure sum of 40 clients, where stream.participants = 5" in found[0]
    assert "a secure sum of 2 clients, and privacy.sum_clients = 3" in found[1]
    assert "of other arrays than fedavg adds here" in found[2]
    assert "classes that do not exist" in found[3]


def test_an_error_does_not_say_how_large_a_hidden_number_is(tmp_path, deployed):
    noise = {"privacy__unit": "example", "privacy__noise_multiplier": 1e-4, "privacy__sum_bits": 52}
    config = quick(method="prolin", **noise, dictionary=30, base_rounds=0)
    with pytest.raises(Exception, match="0 clients sent keys"):
        deployed(config, nodes=5)
    reasons = {reason for e in events(tmp_path / "run", "asked") for reason in e["refused"].values()}
    sentence = "has numbers that do not fit into the secure sum; lower privacy.sum_bits"
    assert reasons == {f"client {c} {sentence}" for c in range(5)}
