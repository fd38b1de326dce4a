"""Runs with secure sums: the method gets one summed reply, and learns as from the replies themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from profcil import registry
from profcil.cli.main import main
from profcil.engine import run as runs
from profcil.engine.channel import Block, Channel, Reply, When
from profcil.engine.summed_replies import sum_replies
from profcil.engine.world import summable_methods
from profcil.errors import ConfigError, Failure
from profcil.io.atomic_files import read_tensors
from profcil.metrics.ledger import Ledger
from profcil.privacy.secure_sum import simulation
from profcil.resolve import resolve

ALIKE = {"setting": "homogeneous", "clients": 4, "participants": 4, "task_size": 5, "train__rounds": 2}
SECURE = {"privacy__secure_sum": "true"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {}),
    ("fedprox", {}),
    ("pro", {}),
    ("pro", {"refresh": "local"}),
    ("pro", {"covariance": "shared", "adapted_bank": True}),
    ("promax", {"transport": "local"}),
    ("promax", {"transport": "global", "adapted_bank": True}),
    ("promax", {"transport": "linear", "covariance": "shared"}),
    ("prolin", {}),
    ("prolin", {"inertia": 1.0}),
    ("prolin", {"base_rounds": 0, "dictionary": 20}),
    ("prolin", {"base_rounds": 0, "dictionary": 20, "moments": "sketch", "sketch_rank": 8}),
    ("prolin", {"base_rounds": 0, "dictionary": 20, "moments": "none"}),
    ("probayes", {"dictionary": 20}),
]
IDS = ["-".join([method, *map(str, more.values())]) for method, more in CASES]
ROUNDS = set(simulation.ROUNDS)
SUMMABLE = {"fedavg", "fedprox", "pro", "promax", "prolin", "probayes"}


def tensors(run: Any) -> dict[str, torch.Tensor]:
    return {f"{name}/{key}": t for name, block in run.server.blocks.items() for key, t in block.tensors.items()}


# -- the result -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "more"), CASES, ids=IDS)
def test_a_secure_run_learns_as_a_plain_one(method: str, more: dict[str, Any], fresh: Callable) -> None:
    """Up to the rounding of fixed-point numbers, which later rounds amplify."""
    plain = fresh(method, **ALIKE, **more).stream()
    secure = fresh(method, **ALIKE, **more, **SECURE).stream()
    expected, found = tensors(plain), tensors(secure)
    assert {n: b.labels for n, b in plain.server.blocks.items()} == {
        n: b.labels for n, b in secure.server.blocks.items()
    }
    for name, tensor in expected.items():
        scale = float(tensor.double().abs().max()) if tensor.numel() else 0.0
        assert torch.allclose(found[name].double(), tensor.double(), rtol=1e-2, atol=1e-3 * scale + 1e-6), name


def test_no_example_of_a_summed_opening_report_counts_twice(fresh: Callable) -> None:
    run = fresh("prolin", **ALIKE, **SECURE).stream()
    assert int(run.server.blocks["bank"].tensors["count"].sum()) == len(run.world.bundle.train)


@pytest.mark.parametrize("method", ["fedavg", "promax", "prolin"])
def test_masked_sums_are_the_sums_without_masks_to_the_bit(
    method: str, fresh: Callable, same_bits: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    secure = fresh(method, **SECURE, warmup__rounds=0).stream()
    masked = simulation.add_securely

    def without_masks(vectors: Any, terms: Any, draw: Any, lost: Any = None) -> Any:
        done = masked(vectors, terms, draw, lost)
        done.total = np.sum(list(vectors.values()), axis=0, dtype=np.uint64)
        return done

    monkeypatch.setattr(simulation, "add_securely", without_masks)
    assert same_bits(fresh(method, **SECURE, warmup__rounds=0).stream().server, secure.server)


def test_a_secure_run_is_resumed_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [*("clients=4", "participants=4", "task_size=5", "model.width=4", "warmup.rounds=1", "train.rounds=2")]
    sets += ["train.epochs=1", "privacy.secure_sum=true"]
    config = resolve(flags={"dataset": "digits", "method": "promax", "setting": "homogeneous"}, sets=sets)

    def stop(progress: Any) -> None:
        if progress.what == "round" and progress.done == 3:
            raise KeyboardInterrupt

    whole = runs.start(config, tmp_path / "whole", tmp_path)
    with pytest.raises(runs.Interrupted):
        runs.start(config, tmp_path / "stopped", tmp_path, stop)
    resumed = runs.resume(tmp_path / "stopped")
    for name in ("ledger.csv", "scores.json"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes(), name
    found = [read_tensors(folder / "state.safetensors")[0] for folder in (resumed, whole)]
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


# -- what the server gets ---------------------------------------------------------------------------------------------


def test_the_method_gets_one_reply_of_all_clients(fresh: Callable) -> None:
    plain, secure = fresh("fedavg", **ALIKE), fresh("fedavg", **ALIKE, **SECURE)
    own = plain.turns(0, 0)
    (total,) = secure.turns(0, 0)
    assert total.clients == tuple(reply.client for reply in own) == secure.clients(0, 0)
    assert total.samples == sum(reply.samples for reply in own)
    assert total.notes["loss"] == pytest.approx(np.mean([reply.notes["loss"] for reply in own]), rel=1e-4)
    assert "extra_bytes" not in total.notes


def test_only_messages_of_the_protocol_go_up(fresh: Callable) -> None:
    for method in ("promax", "prolin"):
        run = fresh(method, **SECURE, base_rounds=1).stream()
        assert {entry.kind for entry in run.ledger.entries if entry.direction == "up"} == ROUNDS


def test_all_clients_of_a_sum_send_the_same_bytes_whatever_their_labels(fresh: Callable) -> None:
    """In the plain run they differ with the labels and examples that a client has."""

    def differing(run: Any) -> int:
        sizes: dict[tuple, set[int]] = {}
        for key, size in run.stream().ledger.by("stage", "position", "round", "client", "direction").items():
            *when, _, direction = key
            if direction == "up":
                sizes.setdefault(tuple(when), set()).add(size)
        return sum(len(found) > 1 for found in sizes.values())

    settings = {"setting": "severe", "clients": 6, "participants": 6, "base_rounds": 0, "task_size": 5}
    assert differing(fresh("prolin", **settings, dictionary=400))
    assert not differing(fresh("prolin", **settings, dictionary=400, **SECURE))
    assert not differing(fresh("promax", **settings, **SECURE))


def test_a_client_that_has_reported_is_in_no_further_sum(fresh: Callable) -> None:
    """It would add zeros, and the others would be fewer than the sum says."""
    run = fresh("prolin", base_rounds=0, setting="homogeneous", clients=7, participants=4, train__rounds=6, **SECURE)
    for round in range(6):
        before = set(run.method.reported(run.server))
        entries = len(run.ledger.entries)
        run.play(0, round)
        sent = {e.client for e in run.ledger.entries[entries:] if e.kind == "masked"}
        assert not sent & before
        assert not sent or len(sent) >= 3
        assert set(run.method.reported(run.server)) == before | sent
    assert len(run.method.reported(run.server)) > 4


# -- too few clients --------------------------------------------------------------------------------------------------


def test_a_round_with_too_few_clients_is_left_out(fresh: Callable) -> None:
    run = fresh("promax", clients=6, participants=6, support=0.5, privacy__sum_clients=4, **SECURE)
    small = [p for p in range(run.world.plan.positions) if 0 < len(run.clients(p, 0)) < 4]
    large = [p for p in range(run.world.plan.positions) if len(run.clients(p, 0)) >= 4]
    assert small and large
    facts = {}
    run.stream(lambda what, when, found: facts.update({(what, when.position, when.round): found}))
    entries = [e for e in run.ledger.entries if e.stage in ("round", "refresh")]
    assert {e.position for e in entries} == set(large)
    for p in range(run.world.plan.positions):
        found = facts["round", p, 0]
        assert found.get("skipped_sums", 0) == (1 if p in small else 0)
        assert len(found["skipped"]) == (len(run.clients(p, 0)) if p in small else 0)
    assert run.state.tally["skipped_sums"] >= len(small)


def test_the_command_says_how_many_sums_were_left_out(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    sets = ["clients=5", "participants=5", "support=0.3", "warmup.rounds=0", "train.rounds=1", "train.epochs=1"]
    sets += ["privacy.secure_sum=true"]
    command = ["run", "--dataset", "digits", "--method", "fedavg", *(t for s in sets for t in ("--set", s))]
    assert main([*command, "--dry-run", "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)["work"]["rounds_left_out_of_sums"]
    assert expected > 0
    assert main([*command, "--quiet", "--out", str(tmp_path / "run")]) == 0
    assert f"note: {expected} sums were left out" in capsys.readouterr().err


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_which_methods_can_be_summed() -> None:
    assert set(summable_methods()) == SUMMABLE


@pytest.mark.parametrize("method", sorted(set(registry.names("methods")) - SUMMABLE))
def test_a_method_whose_blocks_are_no_sums_is_refused(method: str, fresh: Callable) -> None:
    with pytest.raises(ConfigError, match=rf"{method} does not say .* choose one of .*fedavg.*prolin"):
        fresh(method, **SECURE)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"transfer": "full"}, "set transfer = changed"),
        ({"participants": 2}, "participants = 2 is below privacy.sum_clients = 3"),
        ({"privacy__sum_threshold": 0.3}, "sum_threshold = 0.3 is out of range"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], sentence: str, fresh: Callable) -> None:
    with pytest.raises(ConfigError, match=sentence):
        fresh("fedavg", **(SECURE | settings))


def summed(replies: list[Reply], additive: Any, bits: int = 28) -> list[Reply]:
    config = resolve(flags={"dataset": "digits", "method": "fedavg"}, sets=[f"privacy.sum_bits={bits}"])
    given = {reply.client: reply for reply in replies}
    return sum_replies(given, replies[0], additive, (), config.privacy, 0, Channel(Ledger()), When("round", 0, 0, 1))


def test_a_client_without_a_block_adds_zeros() -> None:
    """As one of PRO-LIN that has no examples of the classes that the head knows."""
    weights = {0: torch.tensor([1.0, -2.0]), 2: torch.tensor([3.0, 6.0])}
    replies = [Reply(c, 10 * (c + 1), {"head": Block("model", {"weight": w})}) for c, w in weights.items()]
    (total,) = summed([*replies, Reply(1, 0)], registry.find("methods", "fedavg").METHOD.additive)
    assert total.clients == (0, 1, 2) and total.samples == 40
    assert total.blocks["head"].tensors["weight"].tolist() == [2.5, 4.0]


def test_a_block_without_a_declaration_is_refused() -> None:
    replies = [Reply(c, 1, {"medians": Block("statistics", {"m": torch.ones(2)})}) for c in range(3)]
    with pytest.raises(Failure, match="block medians, but does not say how it is a sum"):
        summed(replies, registry.find("methods", "fedavg").METHOD.additive)


def test_a_weight_out_of_range_names_block_and_client() -> None:
    weights = [torch.ones(2), torch.ones(2), torch.tensor([1.0, 1e9])]
    replies = [Reply(c, 100, {"head": Block("model", {"weight": w})}) for c, w in enumerate(weights)]
    additive = registry.find("methods", "fedavg").METHOD.additive
    with pytest.raises(Failure, match="head/weight of client 2 has a value of size 1e\\+11"):
        summed(replies, additive)
    (total,) = summed(replies, additive, bits=16)
    assert float(total.blocks["head"].tensors["weight"][1]) == pytest.approx((2 + 1e9) / 3)
