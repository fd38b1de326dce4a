"""The setting `uncertainty`: what is stored and sent, when it grows, and what is computed from it."""

from __future__ import annotations

import pytest
import torch

from profcil.errors import ConfigError
from profcil.memory.uncertainty import ratios
from profcil.methods.parts import mean_uncertainty
from profcil.methods.parts.memory_blocks import bank_of
from profcil.methods.parts.pro_settings import ProParams

LAST = 2  # the last of three rounds
PLUS = {"covariance": "shared", "closed_head": True, "noise": 1.0}
RARE = {"stream.rare": 0.5, "stream.rare_examples": 2}


def close(run, position: int):
    """The run after all rounds of a position and its close."""
    for r in range(LAST + 1):
        run.play(position, r)
    with torch.no_grad():
        run.state.server = run.method.end_position(run.server, run.when(position, LAST))
    run.world.forget_features()
    return run


def dispersion(run, name: str) -> dict[int, list[float]]:
    block = run.server.blocks[name]
    return dict(zip(block.labels, block.tensors["dispersion"].tolist(), strict=True))


@pytest.mark.parametrize(("method", "bank"), [("pro", "memory"), ("promax", "memory"), ("prolin", "bank")])
def test_it_is_stored_only_where_the_setting_is_on(fresh, method, bank):
    on, off = fresh(method, uncertainty="shrink"), fresh(method)
    for run in (on, off):
        close(run, 0)
    assert "dispersion" in on.server.blocks[bank].tensors
    assert mean_uncertainty.NAME in on.server.blocks
    assert "dispersion" not in off.server.blocks[bank].tensors
    assert mean_uncertainty.NAME not in off.server.blocks


@pytest.mark.parametrize("method", ["pro", "prolin"])
def test_clients_send_nothing_more(fresh, method):
    sent = []
    for choice in ("off", "shrink"):
        run = close(fresh(method, uncertainty=choice, setting="homogeneous"), 0)
        sent.append(sum(e.bytes for e in run.ledger.entries if e.direction == "up"))
    assert sent[0] == sent[1]


@pytest.mark.parametrize(("method", "bank"), [("pro", "memory"), ("prolin", "bank")])
def test_several_clients_of_a_class_make_its_mean_surer(fresh, method, bank):
    """Each class has the sum of squared shares of the clients that measured it."""
    run = close(fresh(method, uncertainty="shrink", setting="homogeneous", participants=4), 0)
    shares = {}
    for label in run.server.blocks[bank].labels:
        counts = [int((run.client(c, 0, LAST).y == label).sum()) for c in run.clients(0, LAST)]
        shares[label] = sum(n * n for n in counts) / sum(counts) ** 2
    found = dispersion(run, bank)
    for label, share in shares.items():
        assert found[label] == pytest.approx([share, 0.0], abs=1e-6)
        assert share < 0.9
    between, _ = ratios(mean_uncertainty.sums_of(run.server))
    assert float(run.server.blocks[mean_uncertainty.NAME].tensors["sums"][1]) > 0
    assert float(between) >= 0


@pytest.mark.parametrize(("method", "bank"), [("pro", "memory"), ("promax", "memory"), ("prolin", "bank")])
def test_old_classes_age_once_a_position(fresh, method, bank):
    run = close(fresh(method, uncertainty="shrink", setting="homogeneous", participants=4), 0)
    first = set(run.server.blocks[bank].labels)
    close(run, 1)
    close(run, 2)
    found = dispersion(run, bank)
    assert {y for y, (_, age) in found.items() if age == 2.0} == first
    assert sorted({age for _, age in found.values()}) == [0.0, 1.0, 2.0]


def test_a_base_that_never_moves_makes_no_class_older(fresh):
    run = close(close(fresh("prolin", uncertainty="shrink", base_rounds=0, setting="homogeneous"), 0), 1)
    assert {age for _, age in dispersion(run, "bank").values()} == {0.0}


@pytest.mark.parametrize("settings", [{}, PLUS])
def test_pseudo_features_of_uncertain_classes_spread_further(fresh, settings):
    """A class with two examples is drawn with half the within-class variance added to the noise."""
    given = {"setting": "homogeneous", "fit_when_frozen": "false", **settings}
    run = close(fresh("pro", uncertainty="shrink", **given), 0)
    memory = run.server.blocks["memory"]
    memory.tensors["count"][0] = 2
    client = run.client(run.clients(1, LAST)[0], 1, LAST)
    inbox = {n: run.server.blocks[n] for n in run.method.broadcast(run.server, client.when)}
    source = next(run.method.turn(client, inbox)).source
    v = mean_uncertainty.variance_of(memory, mean_uncertainty.sums_of(run.server))
    noise = run.method.params.noise
    plain = source.spread / (noise**2 + v).sqrt()[:, None]
    assert source.noise == 1.0
    assert float(v[0]) > 0.4 > 0.1 > float(v[1])
    if settings:
        torch.testing.assert_close(plain, torch.ones_like(plain), rtol=1e-4, atol=1e-4)
    else:
        assert float(plain[1].mean()) == pytest.approx(float(bank_of(memory).spread[1].mean()), rel=0.2)
    drawn = source.epoch(torch.Generator().manual_seed(0))
    assert torch.isfinite(drawn["u"]).all()


@pytest.mark.parametrize(("method", "settings"), [("promax", PLUS), ("prolin", {})])
def test_the_closed_head_of_few_examples_differs_and_predicts_all_classes(fresh, method, settings):
    scores = {}
    for choice in ("off", "shrink"):
        run = close(fresh(method, uncertainty=choice, **settings, **RARE), 0)
        views = torch.cat([run.method.views(run.server, run.client(c, 0, LAST).features) for c in run.clients(0, LAST)])
        scores[choice] = run.method.scores(run.world.net, run.server, views)
        deployed = run.method.deployed(run.server)
        again = run.method.scores(run.world.net, deployed, views)
        torch.testing.assert_close(again, scores[choice])
        assert run.method.temperature(deployed) >= 1.0
    known = list(run.server.blocks["memory" if settings else "bank"].labels)
    assert not torch.allclose(scores["off"][:, known], scores["shrink"][:, known])


def test_noise_and_uncertainty_exclude_each_other(fresh):
    with pytest.raises(ConfigError, match="uncertainty = off"):
        fresh("prolin", uncertainty="shrink", base_rounds=0, **{"privacy.unit": "example", "privacy.epsilon": 8})


@pytest.mark.parametrize("where", ["adapted", "none"])
def test_it_needs_a_memory_of_base_features(where):
    with pytest.raises(ConfigError, match="old_memory"):
        ProParams(uncertainty="shrink", old_memory=where)
