"""Noise on replies: how much one example can change, how much noise there is, and from what it is drawn."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from profcil.engine.channel import Block, Reply, When
from profcil.errors import Failure
from profcil.memory import linear
from profcil.memory.bank import measure
from profcil.methods.parts.memory_blocks import block_of_moments
from profcil.methods.parts.summaries import report, summary_of_report
from profcil.privacy.protection import Protection, drawn
from profcil.privacy.settings import PrivacySettings
from profcil.privacy.sums import sums_of
from profcil.randomness import derive_seed, generator

BOUND = 2.0
WHEN = When("refresh", 1, 2, 3)
EXAMPLE = PrivacySettings(unit="example", noise_multiplier=0.7, bound=BOUND)
CLIENT = PrivacySettings(unit="client", noise_multiplier=0.7, bound=BOUND, update_bound=0.5, examples=4)


def examples(seed: int, count: int = 9, width: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Features, some of them longer than the bound before they are clipped, and labels."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=rng) * torch.rand(count, 1, generator=rng) * 4
    y = torch.arange(count) % 3
    return linear.clipped(x, BOUND), y


def reports(x: torch.Tensor, y: torch.Tensor) -> dict[str, Block]:
    """Every form of statistics that noise is known for."""
    return {
        **report(x, y, BOUND),
        "bank": block_of_moments(measure(x, y), BOUND),
        "radii": block_of_moments(measure(x, y, radius=True), BOUND),
    }


def change(name: str, part: str, one: dict[str, Block], other: dict[str, Block]) -> tuple[float, float]:
    """The weighted norm of the difference of a sum, and the most that is claimed for it."""
    first = sums_of(name, one[name])[part]
    second = sums_of(name, other[name])[part]
    return float(((first.value - second.value) * first.weight).norm()), first.most


@given(seed=st.integers(0, 10**6), removed=st.integers(0, 8))
@how(max_examples=60, deadline=None)
def test_no_example_changes_a_sum_by_more_than_is_claimed(seed, removed):
    x, y = examples(seed)
    rest = [i for i in range(len(x)) if i != removed]
    with_it, without = reports(x, y), reports(x[rest], y[rest])
    for name in with_it:
        for part in sums_of(name, with_it[name]):
            moved, most = change(name, part, with_it, without)
            assert moved <= most * (1 + 1e-4), (name, part)


def test_the_claims_are_reached():
    """A bound that is twice too large would waste half of the budget."""
    x = torch.zeros(9, 5)
    x[:, 0] = BOUND
    y = torch.arange(9) % 3
    with_it, without = reports(x, y), reports(x[1:], y[1:])
    for name in with_it:
        for part in sums_of(name, with_it[name]):
            moved, most = change(name, part, with_it, without)
            assert moved == pytest.approx(most, rel=1e-4), (name, part)


def noised(settings: PrivacySettings, blocks: dict[str, Block], secret: int, clients: int = 1, **more) -> Reply:
    reply = Reply(3, 9, blocks, notes={"loss": 1.5})
    protection = Protection(settings, settings.noise_multiplier, clients)
    return protection.protect(reply, more.get("inbox", {}), WHEN, 9, secret)


@pytest.mark.parametrize(
    ("settings", "clients", "most"), [(EXAMPLE, 1, 1.0), (CLIENT, 16, 4.0)], ids=["example", "client"]
)
def test_noise_has_the_scale_that_the_accounting_assumes(settings, clients, most):
    """Over all sums of a reply Σ (Δ / deviation)² is 1/z², for a sum of replies that share the noise."""
    x, y = examples(0)
    blocks = reports(x, y)
    weight = 1.0 if settings is EXAMPLE else 4 / 9
    draws: dict[tuple[str, str], list[torch.Tensor]] = {}
    for secret in range(300):
        sent = noised(settings, blocks, secret, clients).blocks
        for name, block in blocks.items():
            exact, found = sums_of(name, block), sums_of(name, sent[name])
            for part in exact:
                noise = (found[part].value - weight * exact[part].value) * exact[part].weight
                draws.setdefault((name, part), []).append(noise)
    spent = 0.0
    for (name, part), noise in draws.items():
        deviation = float(torch.stack(noise).std()) * math.sqrt(clients)
        spent += (most * sums_of(name, blocks[name])[part].most / deviation) ** 2
    assert spent == pytest.approx(1 / settings.noise_multiplier**2, rel=0.05)


def test_exact_numbers_beside_the_blocks_are_removed():
    x, y = examples(0)
    sent = noised(EXAMPLE, reports(x, y), 0)
    assert sent.samples == 1
    assert sent.notes == {}


def test_a_model_update_is_clipped_as_a_whole_and_noised():
    before = {"base": Block("model", {"w": torch.ones(3, 4)}), "head": Block("model", {"w": torch.ones(5)})}
    after = {name: Block("model", {"w": b.tensors["w"] + 2.0}) for name, b in before.items()}
    changes = []
    for secret in range(400):
        sent = noised(CLIENT, after, secret, clients=4, inbox=before)
        moved = [(sent.blocks[n].tensors["w"] - before[n].tensors["w"]).flatten() for n in before]
        changes.append(torch.cat(moved))
    draws = torch.stack(changes)
    assert float(draws.mean(0).norm()) == pytest.approx(CLIENT.update_bound, rel=0.1)
    expected = CLIENT.noise_multiplier * CLIENT.update_bound / math.sqrt(4)
    assert float(draws.std(0).mean()) == pytest.approx(expected, rel=0.05)


def test_the_same_reply_has_the_same_noise_and_another_reply_has_its_own():
    """Else a server that asks twice would see noise cancel, or average it away."""
    x, y = examples(0)
    one = noised(EXAMPLE, reports(x, y), 5).blocks["second_moments"].tensors["gram"]
    again = noised(EXAMPLE, reports(x, y), 5).blocks["second_moments"].tensors["gram"]
    assert torch.equal(one, again)
    moved = x.clone()
    moved[0, 0] += 1e-3
    other = noised(EXAMPLE, reports(moved, y), 5).blocks["second_moments"].tensors["gram"]
    exact = [reports(f, y)["second_moments"].tensors["gram"] for f in (x, moved)]
    noise = [one - exact[0], other - exact[1]]
    assert float((noise[0] - noise[1]).abs().mean()) > float(noise[0].abs().mean()) / 2
    assert not torch.equal(one, noised(EXAMPLE, reports(x, y), 6).blocks["second_moments"].tensors["gram"])


def test_sums_survive_noise_in_the_form_that_a_server_reads():
    """The product of mean and count is the noised sum, also where the count is zero or negative."""
    x, y = examples(0)
    much = PrivacySettings(unit="example", noise_multiplier=50.0, bound=BOUND)
    counts = []
    for secret in range(20):
        sent = noised(much, report(x, y, BOUND), secret)
        found = summary_of_report(sent.blocks)
        assert bool(torch.isfinite(found.mean).all())
        assert torch.equal(found.gram, found.gram.T)
        assert found.noise > 0 and found.bound == BOUND
        counts += found.count.tolist()
    assert min(counts) < 0 < max(counts)
    assert 0 not in counts


@pytest.mark.parametrize(
    "block",
    [
        Block("transport", {"shift": torch.zeros(2, 3), "confidence": torch.ones(2)}, (0, 1)),
        Block("statistics", {"mean": torch.zeros(2, 3), "count": torch.ones(2)}, (0, 1)),  # no bound on its rows
        Block("replay", {"x": torch.zeros(2, 3)}, row_bound=1.0),
    ],
)
def test_a_block_that_is_no_bounded_sum_is_refused(block):
    with pytest.raises(Failure, match="noise cannot protect it"):
        noised(CLIENT, {"other": block}, 0)
    with pytest.raises(Failure, match=r"set privacy\.unit = client"):
        noised(EXAMPLE, {"head": Block("model", {"w": torch.zeros(2)})}, 0)


def test_a_noised_head_is_the_exact_one_where_noise_is_small():
    x, y = examples(1, count=90)
    x[:, :3] += torch.nn.functional.one_hot(y, 3)
    x = linear.clipped(x, BOUND)
    little = PrivacySettings(unit="example", noise_multiplier=1e-7, bound=BOUND)
    found = linear.lda(summary_of_report(noised(little, report(x, y, BOUND), 0).blocks), 0.1)
    exact = linear.lda(linear.summarise(x, y), 0.1)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_the_expected_noise_of_a_mean_does_not_decide_between_classes():
    """Two classes with equal means and different counts: without the correction the rare one has the lower bias."""
    x = torch.ones(220, 60) * BOUND / math.sqrt(60)
    y = (torch.arange(220) < 20).long()
    gaps = []
    for secret in range(600):
        sent = noised(PrivacySettings(unit="example", noise_multiplier=1.0, bound=BOUND), report(x, y, BOUND), secret)
        s = summary_of_report(sent.blocks)
        cov = linear.without_noise(linear.within_class_covariance(s), s)
        gaps.append(
            [float(b[0] - b[1]) for _, b in (linear.noised_discriminants(s, cov), linear.discriminants(s.mean, cov))]
        )
    corrected, plain = torch.tensor(gaps).mean(0).tolist()
    assert abs(corrected) < plain / 2


def test_normalised_rows_have_zero_mean_and_one_length():
    rows = torch.cat([torch.randn(5, 8, generator=torch.Generator().manual_seed(0)), torch.ones(1, 8)])
    found = linear.normalised(rows, 3.0)
    torch.testing.assert_close(found.mean(1), torch.zeros(6))
    torch.testing.assert_close(found.norm(dim=1), torch.tensor([3.0] * 5 + [0.0]))


def test_of_a_noised_covariance_only_what_stands_out_of_the_noise_is_kept():
    """Two strong directions of forty: their variance is found, and all others get one positive value."""
    rng = torch.Generator().manual_seed(0)
    variance = torch.full((40,), 0.1, dtype=torch.float64)
    variance[:2] = torch.tensor([9.0, 6.0])
    half = torch.randn(40, 40, generator=rng, dtype=torch.float64).triu(1) * 0.2
    noise = half + half.T
    s = linear.summarise(torch.zeros(1, 40), torch.zeros(1).long())
    found = linear.without_noise(variance.diag() + noise, replace(s, noise=0.2**2))
    values = torch.linalg.eigvalsh(found)
    torch.testing.assert_close(values[-2:].flip(0), variance[:2], rtol=0.15, atol=0)
    assert float(values[0]) > 0
    torch.testing.assert_close(values[:38], values[0].expand(38))


def test_noise_has_more_than_the_32_bits_of_a_seed_that_torch_uses():
    """Else somebody could try all seeds and take the noise off."""
    found: dict[int, int] = {}
    for secret in range(400_000):
        bits = derive_seed(secret, "privacy") & 0xFFFFFFFF
        if bits in found:
            break
        found[bits] = secret
    one, other = (drawn(torch.zeros(4), generator(s, "privacy")) for s in (found[bits], secret))
    assert not torch.allclose(one, other)
