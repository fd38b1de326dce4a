"""PRO and PRO-MAX with one covariance matrix for all classes: what is measured, stored, sent and drawn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from profcil.errors import ConfigError
from profcil.memory import linear
from profcil.memory.rehearsal import Rehearsal
from profcil.memory.symmetric import unpack
from profcil.methods.parts.pro_settings import ProParams
from profcil.runs.folder import RunFolder

LAST = 2  # the last of three rounds
SHARED = {"covariance": "shared", "noise": 1.0}


def current_features(run, position: int, round: int) -> tuple[Tensor, Tensor]:
    """Features and labels of all participants under the server's base."""
    clients = [run.client(c, position, round) for c in run.clients(position, round)]
    u = torch.cat([client.features(run.server.weights()["base"]) for client in clients])
    return u, torch.cat([client.y for client in clients])


def scatter(u: Tensor, y: Tensor) -> Tensor:
    centred = torch.cat([u[y == label] - u[y == label].mean(0) for label in y.unique()]).double()
    return centred.T @ centred


def stored(run) -> tuple[Tensor, int]:
    block = run.server.blocks["covariance"]
    return unpack(block.tensors["matrix"]), int(block.tensors["count"])


def played(fresh, method: str = "pro", **settings):
    """A run after its first position."""
    run = fresh(method, **SHARED | settings)
    for r in range(LAST + 1):
        run.play(0, r)
    run.state.server = run.method.end_position(run.server, run.when(0, LAST))
    return run


def rehearsal(run, position: int, round: int) -> Rehearsal:
    """The source of the first participant's rehearsal in a frozen round without fitting."""
    client = run.client(run.clients(position, round)[0], position, round)
    inbox = {n: run.server.blocks[n] for n in run.method.broadcast(run.server, client.when)}
    return next(run.method.turn(client, inbox)).source


@pytest.mark.parametrize("method", ["pro", "promax"])
@pytest.mark.parametrize("refresh_at", ["final", "both"])
def test_the_server_stores_the_covariance_of_all_examples_once(fresh, method, refresh_at):
    run = played(fresh, method, refresh_at=refresh_at, setting="homogeneous")
    u, y = current_features(run, 0, LAST)
    matrix, count = stored(run)
    assert count == len(u)
    torch.testing.assert_close(matrix, scatter(u, y) / len(u), rtol=1e-3, atol=1e-4)
    assert "covariance_before_refresh" not in run.server.blocks


def test_positions_are_weighted_by_their_examples(fresh):
    run = played(fresh, setting="homogeneous", refresh_at="both")
    old, n = stored(run)
    for r in range(LAST + 1):
        run.play(1, r)
    u, y = current_features(run, 1, LAST)
    matrix, count = stored(run)
    assert count == n + len(u)
    torch.testing.assert_close(matrix, (n * old + scatter(u, y)) / count, rtol=1e-3, atol=1e-4)


def test_statistics_of_local_models_give_a_covariance_too(fresh):
    matrix, count = stored(played(fresh, refresh="local"))
    assert count > 0
    assert float(matrix.diagonal().min()) >= 0


def test_rehearsal_draws_with_the_shared_covariance(fresh):
    run = played(fresh, base_rounds=0, fit_when_frozen=False, quota=5000)
    source = rehearsal(run, 1, 0)
    matrix, _ = stored(run)
    epoch = source.epoch(torch.Generator().manual_seed(0))
    old = int(epoch["y"][-1])
    drawn = epoch["u"][epoch["y"] == old].T.cov().double()
    torch.testing.assert_close(drawn, matrix, rtol=0, atol=0.1 * float(matrix.diagonal().max()))
    assert float((matrix - matrix.diagonal().diag()).norm()) > 0.2 * float(matrix.norm())


def test_the_diagnostics_see_what_is_rehearsed(fresh):
    run = played(fresh)
    label = run.server.blocks["memory"].labels[0]
    rng = torch.Generator().manual_seed(0)
    samples = run.method.replay(run.world.net, run.server, [], label, 5000, rng)
    matrix, _ = stored(run)
    drawn = samples.tensors[0].T.cov().double()
    torch.testing.assert_close(drawn, matrix, rtol=0, atol=0.1 * float(matrix.diagonal().max()))


def sent(run, direction: str, kind: str) -> int:
    """The bytes of one kind in a direction."""
    return sum(e.bytes for e in run.ledger.entries if (e.direction, e.kind) == (direction, kind))


def test_the_matrix_is_counted_in_the_ledger(tiny):
    plain = tiny("pro")
    shared = tiny("pro", covariance="shared")
    d = plain.world.net.features
    triangle = 4 * d * (d + 1) // 2
    surveyed = sum(len(plain.clients(position, LAST)) for position in range(plain.world.plan.positions))
    assert sent(shared, "up", "statistics") - sent(plain, "up", "statistics") == surveyed * triangle
    more = sent(shared, "down", "memory") - sent(plain, "down", "memory")
    assert more > 0
    assert more % (triangle + 4) == 0  # with the number of examples
    assert sent(shared, "up", "model") == sent(plain, "up", "model")


@pytest.mark.parametrize("method", ["pro", "promax"])
def test_reference_and_default_path_agree(fresh, max_difference, method):
    runs = [fresh(method, accelerate=way, **SHARED) for way in ("off", "auto")]
    for run in runs:
        for position in (0, 1):
            for r in range(LAST + 1):
                run.play(position, r)
            run.state.server = run.method.end_position(run.server, run.when(position, LAST))
    assert max_difference(*(run.server for run in runs)) < 1e-2


def test_a_whole_stream_learns_with_the_shared_covariance(tiny):
    for value in ("diagonal", "shared"):
        run = tiny("promax", covariance=value, noise=1.0, train__epochs=2)
        assert run.state.scores.correct[-1].sum() > 0
        assert all(bool(torch.isfinite(t).all()) for b in run.server.blocks.values() for t in b.tensors.values())


def test_a_resumed_run_is_bit_identical(fresh, same_bits, tmp_path):
    """Saved between the two refreshes of the second position, with all that these settings store."""
    settings = SHARED | {"refresh_at": "both", "closed_head": True, "keep_scores": 1.0, "base_rounds": 2}
    run = fresh("promax", **settings)
    with RunFolder(tmp_path / "run") as folder:

        def save(what: str, when, facts: dict) -> None:
            if (what, when.position, when.round) == ("round", 1, 1):
                assert "covariance_before_refresh" in run.server.blocks
                folder.save(run.state, "", {})

        run.stream(save)
        again = fresh("promax", **settings)
        again.state = folder.load(torch.device("cpu"))[0]
    again.stream()
    assert same_bits(run.server, again.server)
    assert run.ledger.entries == again.ledger.entries


def test_an_adapted_memory_with_a_shared_covariance_is_refused():
    with pytest.raises(ConfigError, match="covariance of base features"):
        ProParams(covariance="shared", old_memory="adapted")


# -- the closed head --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["pro", "promax"])
def test_the_closed_head_is_that_of_all_examples(fresh, method):
    """At the first position memory and covariance are exact, so the head is that of PRO-LIN."""
    run = played(fresh, method, closed_head=True, setting="homogeneous", shrink=0.1)
    u, y = current_features(run, 0, LAST)
    weight, bias = linear.lda(linear.summarise(u, y), 0.1)
    scores = run.method.scores(run.world.net, run.server, u)
    labels = list(run.server.blocks["memory"].labels)
    torch.testing.assert_close(scores[:, labels], u.double() @ weight.T + bias, rtol=1e-2, atol=1e-2)
    assert set(scores.argmax(1).tolist()) <= set(labels)


def test_the_closed_head_does_not_change_training(tiny):
    with_head, without = (tiny("promax", **SHARED, closed_head=on) for on in (True, False))
    assert torch.equal(*(run.server.weights()["head"]["weight"] for run in (with_head, without)))
    assert (with_head.state.scores.correct != without.state.scores.correct).any()


def test_a_closed_head_without_a_shared_covariance_is_refused():
    with pytest.raises(ConfigError, match="shared covariance"):
        ProParams(closed_head=True)


def test_without_memory_all_scores_of_the_closed_head_are_equal(fresh):
    run = fresh("pro", covariance="shared", closed_head=True)
    scores = run.method.scores(run.world.net, run.server, torch.zeros(2, run.world.net.features))
    assert len(scores.unique()) == 1
