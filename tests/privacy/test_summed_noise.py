"""Noise on secure sums: how much one unit can change the fixed-point numbers, how the shares add up, and what the
server gets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st
from test_protection import BOUND, CLIENT, EXAMPLE, examples

from profcil.cli.run import expected_spending
from profcil.engine.channel import Block, Channel, Reply, When
from profcil.engine.summed_replies import SumLayout, arrays_of, layout_of, noised_vectors, sum_replies, with_zeros
from profcil.errors import ConfigError, Failure
from profcil.memory.bank import measure
from profcil.methods.parts.addends import MODEL_MEANS, ClassRows, PlainSum
from profcil.methods.parts.memory_blocks import block_of_moments
from profcil.methods.parts.summaries import report
from profcil.metrics.ledger import Ledger
from profcil.privacy.discrete_noise import LEAST, MOST, discrete_gaussian, words_of
from profcil.privacy.meter import Meter
from profcil.privacy.protection import Protection
from profcil.privacy.secure_sum import fixed_point, simulation
from profcil.privacy.settings import PrivacySettings
from profcil.privacy.summed_noise import noise_of_sum
from profcil.randomness import derive_bytes

ADDITIVE = MODEL_MEANS | {"class_means": ClassRows(), "second_moments": PlainSum(), "bank": ClassRows()}
CLASSES = (0, 1, 2, 5)  # no client has class 5
WHEN = When("refresh", 1, 2, 3)
SETTINGS = replace(EXAMPLE, secure_sum=True)


def key(*address: object) -> bytes:
    return derive_bytes(0, *address, size=16)


def reply(x: torch.Tensor, y: torch.Tensor, client: int = 0) -> Reply:
    blocks = {**report(x, y, BOUND), "bank": block_of_moments(measure(x, y), BOUND)} if len(x) else {}
    return Reply(client, len(x), blocks)


def protected(settings: PrivacySettings, found: Reply, multiplier: float = 0.7) -> Reply:
    return Protection(settings, multiplier, 1).protect(found, {}, WHEN, max(1, found.samples), secret=0)


def layout(*replies: Reply) -> tuple[SumLayout, dict]:
    arrays = {r.client: arrays_of(r, ADDITIVE, CLASSES) for r in replies}
    return layout_of(replies[0], ADDITIVE, CLASSES), arrays


# -- the distribution -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deviation", [1000.3, 1e6 + 0.5, 2.0**40])
def test_the_numbers_are_gaussian_integers(deviation):
    drawn = discrete_gaussian(deviation, 60_000, words_of(key("gaussian", deviation)))
    assert drawn.dtype == np.int64 and len(drawn) == 60_000
    scaled = drawn / deviation
    assert abs(scaled.mean()) < 0.02
    assert scaled.std() == pytest.approx(1.0, rel=0.01)
    assert (scaled**4).mean() == pytest.approx(3.0, rel=0.06)
    for limit in (0.5, 1.0, 2.0, 3.0):
        expected = (math.erf(limit / math.sqrt(2)) + 1) / 2
        assert (scaled < limit).mean() == pytest.approx(expected, abs=0.006)


def test_each_integer_has_its_probability():
    """Against the definition, not against rounded Gaussian numbers, which differ at a small deviation."""
    drawn = discrete_gaussian(4.0, 400_000, words_of(key("probability")))
    values = np.arange(-12, 13)
    weights = np.exp(-(values**2) / 32.0)
    expected = weights / np.exp(-(np.arange(-60, 61) ** 2) / 32.0).sum()
    found = np.array([(drawn == v).mean() for v in values])
    assert np.abs(found - expected).max() < 0.002


def test_numbers_follow_from_the_key():
    draws = [discrete_gaussian(50.0, 40, words_of(key(name))).tolist() for name in ("a", "a", "b")]
    assert draws[0] == draws[1] != draws[2]
    with pytest.raises(ValueError, match="is not between"):
        discrete_gaussian(LEAST / 2, 3, words_of(key("a")))
    with pytest.raises(ValueError, match="is not between"):
        discrete_gaussian(MOST * 2, 3, words_of(key("a")))


# -- the sensitivity --------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6), removed=st.integers(0, 8), bits=st.sampled_from([2, 6, 28]))
@how(max_examples=40, deadline=None)
def test_no_example_changes_the_fixed_point_numbers_by_more_than_is_claimed(seed, removed, bits):
    """Over all arrays Σ (change · weight / deviation)² is at most 1/z², rounding included. With 2 binary places a
    number is rounded by more than most examples change it."""
    x, y = examples(seed)
    rest = [i for i in range(len(x)) if i != removed]
    both = [protected(SETTINGS, reply(x, y, 0)), protected(SETTINGS, reply(x[rest], y[rest], 1))]
    terms, arrays = layout(*both)
    noise = noise_of_sum(Protection(SETTINGS, 1000.0, 1), terms.blocks, terms.shapes, 1, bits)
    vectors = [fixed_point.encode(with_zeros(arrays[c], terms.shapes, c), bits, 2, c).view(np.int64) for c in (0, 1)]
    spent = 0.0
    start = 0
    for name, shape in terms.shapes.items():
        end = start + math.prod(shape)
        change = (vectors[0] - vectors[1])[start:end]
        start = end
        if name in noise.deviations:
            weight = np.broadcast_to(noise.weights[name].numpy(), change.shape)
            spent += float(((change * weight / noise.deviations[name]) ** 2).sum())
    assert 0 < spent <= 1 / 1000.0**2


def test_the_claim_is_nearly_reached():
    """A bound that is much too large would waste budget."""
    x = torch.zeros(9, 5)
    x[:, 0] = BOUND
    y = torch.arange(9) % 3
    both = [protected(SETTINGS, reply(x, y, 0)), protected(SETTINGS, reply(x[1:], y[1:], 1))]
    terms, arrays = layout(*both)
    noise = noise_of_sum(Protection(SETTINGS, 1.0, 1), terms.blocks, terms.shapes, 1, 28)
    spent = sum(
        float(
            (((arrays[0][name] - arrays[1][name]) * noise.weights[name].numpy()) ** 2).sum()
            / noise.deviation(name, 1) ** 2
        )
        for name in noise.deviations
    )
    assert spent == pytest.approx(1.0, rel=0.01)


def test_a_client_is_limited_to_its_examples_and_its_update_to_its_bound():
    settings = replace(CLIENT, secure_sum=True)
    x, y = examples(0, count=40)
    limited = protected(settings, reply(x, y))
    terms, arrays = layout(limited)
    for name, array in arrays[0].items():
        if name != "samples":
            noise = noise_of_sum(Protection(settings, 1.0, 1), terms.blocks, terms.shapes, 1, 28, 0.5)
            length = float(np.linalg.norm(array * noise.weights[name].numpy()))
            share = 0.2 if "gram" in name else 0.1 if "count" in name else 1.0
            parts = sum(0.2 if "gram" in n else 0.1 if "count" in n else 1.0 for n in noise.deviations)
            assert length <= noise.deviation(name, 1) * math.sqrt(share / parts)
    before = {"base": Block("model", {"w": torch.ones(3, 4)}), "head": Block("model", {"w": torch.ones(5)})}
    after = {name: Block("model", {"w": b.tensors["w"] + 2.0}) for name, b in before.items()}
    sent = Protection(settings, 1.0, 1).protect(Reply(0, 9, after), before, WHEN, 9, 0)
    moved = torch.cat([(sent.blocks[n].tensors["w"] - before[n].tensors["w"]).flatten() for n in before])
    assert float(moved.norm()) == pytest.approx(settings.update_bound, rel=1e-4)


def test_an_array_without_a_bound_is_refused():
    terms, _ = layout(protected(SETTINGS, reply(*examples(0))))
    shapes = {**terms.shapes, "notes/loss": ()}
    with pytest.raises(Failure, match="noise cannot protect notes/loss"):
        noise_of_sum(Protection(SETTINGS, 1.0, 1), terms.blocks, shapes, 1, 28)
    with pytest.raises(ConfigError, match=r"raise privacy\.sum_bits"):
        noise_of_sum(Protection(SETTINGS, 1.0, 1), terms.blocks, terms.shapes, 9, 0)


# -- the shares -------------------------------------------------------------------------------------------------------


def summed(replies, settings, seed: int, channel: Channel, protection: Protection) -> list[Reply]:
    return sum_replies(replies, replies[0], ADDITIVE, CLASSES, settings, seed, channel, WHEN, protection)


def total_noise(clients: int, lost: tuple[int, ...], monkeypatch, rounds: int = 60, **more) -> tuple[float, float]:
    """The deviation of the noise on the sums of class 5, of which no client has an example, and what the block says."""
    settings = replace(SETTINGS, sum_threshold=0.6, **more)
    protection = Protection(settings, 2.0, 1)
    add = simulation.add_securely
    monkeypatch.setattr(
        simulation, "add_securely", lambda vectors, terms, draw: add(vectors, terms, draw, {"masked": lost})
    )
    replies = {}
    for c in range(clients):
        x, y = examples(c)
        replies[c] = protection.protect(reply(x, y, c), {}, WHEN, len(x), 0)
    found, said = [], []
    for seed in range(rounds):
        (total,) = sum_replies(
            replies, replies[0], ADDITIVE, CLASSES, settings, seed, Channel(Ledger()), WHEN, protection
        )
        block = total.blocks["class_means"]
        if 5 in block.labels:
            row = block.labels.index(5)
            found.append(block.tensors["mean"][row].double() * float(block.tensors["count"][row]))
            said.append(float(block.tensors["noise"][row]) ** 0.5)
    monkeypatch.setattr(simulation, "add_securely", add)
    return float(torch.stack(found).std()), said[0]


def test_the_sum_has_the_whole_noise_if_as_many_drop_as_may(monkeypatch):
    """Ten clients, of which seven must stay: with seven the noise is what the accounting assumes, with ten 10/7 of its
    variance. A share for ten would be too little."""
    parts = 3.4  # two times class sums, one of squares, 0.2 for a matrix and twice 0.1 for counts
    whole = 2.0 * math.sqrt(parts) * BOUND
    few, said = total_noise(10, (1, 4, 8), monkeypatch)
    assert said == pytest.approx(whole, rel=0.01)
    assert few == pytest.approx(whole, rel=0.15)
    many, said = total_noise(10, (), monkeypatch)
    assert said == pytest.approx(whole * math.sqrt(10 / 7), rel=0.01)
    assert many == pytest.approx(whole * math.sqrt(10 / 7), rel=0.15)


def test_the_noise_does_not_grow_with_the_clients(monkeypatch):
    """Plain reports of n clients have the noise of n reports."""
    three, _ = total_noise(3, (), monkeypatch, rounds=30)
    twelve, _ = total_noise(12, (), monkeypatch, rounds=30)
    assert twelve < 1.6 * three


def test_the_same_sum_has_the_same_noise_and_any_other_its_own():
    """Of every client, also of those who add the same to both: else the difference of the two would have the noise of
    few shares."""
    replies = [protected(SETTINGS, reply(*examples(c), c)) for c in range(4)]
    terms, arrays = layout(*replies)
    noise = noise_of_sum(Protection(SETTINGS, 2.0, 1), terms.blocks, terms.shapes, 3, 28)
    numbers = {c: fixed_point.encode(with_zeros(arrays[c], terms.shapes, c), 28, 4, c) for c in range(4)}
    sent = {"base": Block("model", {"w": torch.ones(3)})}

    def shares(clients=(0, 1, 2), when=WHEN, secret=0, inbox=sent, of=numbers) -> list[list[int]]:
        vectors = {c: of[c] for c in clients}
        noised = noised_vectors(vectors, terms, noise, secret, when, dict.fromkeys(clients, inbox))
        return [(noised[c] - vectors[c]).view(np.int64)[:20].tolist() for c in (0, 1, 2)]

    first = shares()
    assert shares() == first
    more = {"base": Block("model", {"w": torch.full((3,), 1.5)})}
    for other in (shares((0, 1, 2, 3)), shares(when=replace(WHEN, round=1)), shares(secret=1), shares(inbox=more)):
        assert all(mine != before for mine, before in zip(other, first, strict=True))
    changed = shares(of={**numbers, 0: numbers[3]})  # those who add the same cannot know it
    assert changed[0] != first[0] and changed[1:] == first[1:]


# -- runs -------------------------------------------------------------------------------------------------------------

NOISY = {"privacy__secure_sum": "true", "warmup__rounds": 0, "setting": "homogeneous", "participants": 4}
CASES = [
    ("probayes", {"dictionary": 30, "privacy__unit": "example"}),
    ("prolin", {"base_rounds": 0, "dictionary": 20, "privacy__unit": "example"}),
    ("fedavg", {"privacy__unit": "client", "privacy__update_bound": 0.1}),
    ("pro", {"privacy__unit": "client", "privacy__update_bound": 0.1}),
    ("prolin", {"base_rounds": 1, "transport": "none", "privacy__unit": "client", "privacy__update_bound": 0.1}),
]


@pytest.mark.parametrize(("method", "more"), CASES, ids=[f"{m}-{i}" for i, (m, _) in enumerate(CASES)])
def test_with_little_noise_sums_teach_what_plain_replies_teach(fresh: Callable, method: str, more: dict) -> None:
    """And what the server gets are messages of the protocol alone."""
    run = fresh(method, **NOISY, **more, privacy__noise_multiplier=1e-5).stream()
    plain = fresh(method, **{**NOISY, "privacy__secure_sum": "false"}, **more, privacy__noise_multiplier=1e-5).stream()
    found, expected = run.state.scores.correct, plain.state.scores.correct
    assert np.abs(found - expected).sum() <= 0.1 * expected.sum()
    assert {e.kind for e in run.ledger.entries if e.direction == "up"} == set(simulation.ROUNDS)


@pytest.mark.parametrize(("method", "more"), CASES, ids=[f"{m}-{i}" for i, (m, _) in enumerate(CASES)])
def test_a_run_spends_its_budget(fresh: Callable, method: str, more: dict) -> None:
    run = fresh(method, **NOISY, **more, privacy__epsilon=4.0).stream()
    spent = Meter(run.world.protection).spent(run.ledger.entries)
    assert 3.0 < spent <= 4.0 * (1 + 1e-6)


def test_the_noise_of_a_summed_report_is_that_of_one_and_not_of_all(fresh: Callable) -> None:
    """PRO-BAYES keeps the variance of the noise beside its sums: with secure sums it is several times smaller."""
    settings = {"dictionary": 30, "privacy__unit": "example", "privacy__noise_multiplier": 1.0, **NOISY}
    summed = fresh("probayes", **settings).stream().server.blocks["class_sums"].tensors["noise"]
    settings["privacy__secure_sum"] = "false"
    plain = fresh("probayes", **settings).stream().server.blocks["class_sums"].tensors["noise"]
    assert float(summed.mean()) < 0.5 * float(plain.mean())


def test_a_dry_run_says_what_sums_spend(fresh: Callable) -> None:
    """A sum has the whole noise, also in rounds with fewer clients than planned."""
    settings = {**NOISY, "participants": 4, "privacy__unit": "client", "privacy__epsilon": 4.0, "setting": "severe"}
    world = fresh("fedavg", **settings).world
    assert expected_spending(world.config, world).startswith("ε = 4 at δ = 1e-05 for each client")
