"""What robust aggregation does to the replies of a round: which are dropped and why, and what the others become."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from profcil.engine.channel import Block, Reply
from profcil.robust.aggregation import robust_replies
from profcil.robust.rules import geometric_median
from profcil.robust.screen import out_of_range

WIDTH = 8
BROADCAST = Block("model", {"weight": torch.ones(4, 4), "bias": torch.zeros(4)})
CENTRES = 5 * torch.eye(WIDTH)[:6] + 5  # of six classes


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def model(seed: int, size: float = 0.01) -> Block:
    moved = {"weight": 1 + size * noise(seed, 4, 4), "bias": size * noise(seed + 50, 4)}
    return Block("model", moved)


def statistics(seed: int, labels: tuple[int, ...]) -> Block:
    mean = CENTRES[list(labels)] + 0.1 * noise(seed, len(labels), WIDTH)
    count = torch.full((len(labels),), 4, dtype=torch.int32)
    return Block("statistics", {"mean": mean, "second": mean.square() + 1, "count": count}, labels)


def models(n: int = 5, **false: Block) -> list[Reply]:
    """Replies with models; `c3` replaces that of client 3."""
    return [Reply(c, 10, {"base": false.get(f"c{c}", model(c))}) for c in range(n)]


def reports(*labels: tuple[int, ...], **false: Block) -> list[Reply]:
    return [Reply(c, 10, {"moments": false.get(f"c{c}", statistics(c, own))}) for c, own in enumerate(labels)]


def inboxes(n: int = 5) -> dict[int, dict[str, Block]]:
    return {c: {"base": BROADCAST} for c in range(n)}


def dropped(replies: list[Reply], stored: dict[str, Block] | None = None) -> dict[int, str]:
    return out_of_range(replies, inboxes(len(replies)), stored or {})


def distance(block: Block) -> float:
    squares = [(t - BROADCAST.tensors[k]).square().sum() for k, t in block.tensors.items()]
    return float(sum(squares)) ** 0.5


# -- models ------------------------------------------------------------------------------------------------------------


def test_honest_models_are_in_range():
    assert dropped(models()) == {}


@pytest.mark.parametrize("number", [2, 3, 5])
def test_a_far_model_is_dropped_whoever_sends_it(number):
    for liar in range(number):
        found = dropped(models(number, **{f"c{liar}": model(9, size=3.0)}))
        assert list(found) == [liar] and "moved" in found[liar]


def test_a_still_model_makes_no_other_one_far():
    """An honest update is any number of times longer than none, but short beside the model."""
    assert dropped(models(2, c0=BROADCAST)) == {}


def test_clipping_pulls_long_updates_back_and_leaves_the_others_to_the_bit():
    replies = models(c2=model(2, size=0.03))
    kept, none = robust_replies("clipped", replies, inboxes(), {})
    lengths = sorted(distance(r.blocks["base"]) for r in replies)
    assert none == {}
    assert distance(kept[2].blocks["base"]) == pytest.approx(lengths[2], rel=1e-4)
    inside = [i for i, r in enumerate(replies) if distance(r.blocks["base"]) <= lengths[2]]
    assert len(inside) == 3 and all(kept[i] is replies[i] for i in inside)


def test_clipping_keeps_the_direction():
    replies = models(c2=model(2, size=0.03))
    kept, _ = robust_replies("clipped", replies, inboxes(), {})
    before, after = (r.blocks["base"].tensors["weight"].flatten() - 1 for r in (replies[2], kept[2]))
    assert torch.cosine_similarity(before, after, 0) > 0.9999


@pytest.mark.parametrize("rule", ["median", "trimmed"])
def test_combined_models_are_equal_and_inside_the_honest_range(rule):
    replies = models(c2=Block("model", {"weight": torch.full((4, 4), 1.5), "bias": torch.full((4,), 0.5)}))
    kept, _ = robust_replies(rule, replies, inboxes(), {})
    weights = [r.blocks["base"].tensors["weight"] for r in kept]
    assert all(torch.equal(w, weights[0]) for w in weights)
    honest = torch.stack([r.blocks["base"].tensors["weight"] for r in replies if r.client != 2])
    assert bool((weights[0] <= honest.amax(0)).all())


def test_the_geometric_median_is_of_whole_models():
    replies = models(c2=model(2, size=0.2))
    kept, _ = robust_replies("geometric", replies, inboxes(), {})
    for name in BROADCAST.tensors:
        together = [r.blocks["base"].tensors[name] for r in kept]
        assert all(torch.equal(t, together[0]) for t in together)
    assert distance(kept[0].blocks["base"]) < distance(replies[2].blocks["base"]) / 10
    vectors = [torch.cat([t.flatten() for t in r.blocks["base"].tensors.values()]) for r in (*replies, kept[0])]
    assert torch.allclose(vectors[-1], geometric_median(torch.stack(vectors[:-1])), atol=1e-6)


def test_krum_drops_the_model_without_neighbours():
    replies = models(c2=model(2, size=0.1))
    kept, none = robust_replies("krum", replies, inboxes(), {})
    assert [r.client for r in kept] == [0, 1, 3, 4] and none == {}


# -- rows by class -----------------------------------------------------------------------------------------------------

FOUR = ((0, 1), (0, 2), (1, 2), (3,))


def test_honest_rows_are_in_range():
    assert dropped(reports(*FOUR)) == {}


@pytest.mark.parametrize("factor", [10.0, -1.0])
@pytest.mark.parametrize("liar", range(4))
def test_far_rows_are_dropped_also_of_a_class_with_one_reporter(liar, factor):
    false = statistics(liar, FOUR[liar])
    mean = false.tensors["mean"] * factor
    false = replace(false, tensors={**false.tensors, "mean": mean, "second": mean.square() + 1})
    found = dropped(reports(*FOUR, **{f"c{liar}": false}))
    assert list(found) == [liar] and "far from what all others sent" in found[liar]


def test_large_second_moments_are_dropped():
    block = statistics(1, FOUR[1])
    false = replace(block, tensors={**block.tensors, "second": block.tensors["second"] * 100})
    assert list(dropped(reports(*FOUR, c1=false))) == [1]


def test_swapped_labels_are_dropped_and_the_honest_reporter_stays():
    false = replace(statistics(0, (1, 0)), labels=(0, 1))
    assert list(dropped(reports(*FOUR, c0=false))) == [0]


def test_of_two_clients_that_contradict_each_other_neither_is_dropped():
    false = replace(statistics(0, (1, 0)), labels=(0, 1))
    assert dropped(reports((0, 1), (0, 1), (2, 3), (2, 3), c0=false)) == {}


def test_swapped_labels_are_dropped_among_many_reporters():
    everyone = [(0, 1, 2)] * 6
    false = replace(statistics(4, (1, 0, 2)), labels=(0, 1, 2))
    assert list(dropped(reports(*everyone, c4=false))) == [4]


def test_with_two_other_rows_nothing_is_compared():
    false = replace(statistics(0, (1, 0)), labels=(0, 1))
    assert dropped(reports((0, 1), (0,), c0=false)) == {}


def test_rows_are_compared_with_those_that_the_server_stores():
    bank = Block("memory", {"mean": CENTRES.clone(), "count": torch.ones(6)}, tuple(range(6)))
    false = statistics(0, (2,))
    false = replace(false, tensors={**false.tensors, "mean": -false.tensors["mean"]})
    assert list(dropped([Reply(0, 10, {"moments": false})], {"memory": bank})) == [0]
    assert dropped([Reply(0, 10, {"moments": statistics(0, (2,))})], {"memory": bank}) == {}


def test_one_stored_row_is_enough_to_find_a_far_one():
    bank = Block("memory", {"mean": CENTRES[:1].clone(), "count": torch.ones(1)}, (0,))
    honest = statistics(0, (2,))
    false = replace(honest, tensors={**honest.tensors, "mean": -honest.tensors["mean"]})
    assert list(dropped([Reply(0, 10, {"moments": false})], {"memory": bank})) == [0]
    assert dropped([Reply(0, 10, {"moments": honest})], {"memory": bank}) == {}


def test_long_shifts_are_dropped():
    def shifts(seed: int, size: float) -> Block:
        return Block("transport", {"shift": size * noise(seed, 3, WIDTH), "confidence": torch.ones(3)}, (0, 1, 2))

    replies = [Reply(c, 10, {"moves": shifts(c, 100.0 if c == 3 else 1.0)}) for c in range(5)]
    assert list(dropped(replies)) == [3]


def test_the_median_of_rows_needs_three_reporters():
    replies = reports((0, 1), (0,), (0,), (1,))
    kept, _ = robust_replies("median", replies, inboxes(), {})
    rows = [r.blocks["moments"].tensors["mean"][0] for r in kept[:3]]
    together = torch.stack([r.blocks["moments"].tensors["mean"][0] for r in replies[:3]]).median(0).values
    assert all(torch.equal(row, together) for row in rows)
    assert torch.equal(kept[3].blocks["moments"].tensors["mean"], replies[3].blocks["moments"].tensors["mean"])


def test_rows_that_belong_to_a_matrix_stay():
    matrix = Block("statistics", {"factor": torch.ones(3)})
    replies = [replace(r, blocks={**r.blocks, "second_moments": matrix}) for r in reports((0,), (0,), (0,))]
    kept, _ = robust_replies("median", replies, inboxes(), {})
    for before, after in zip(replies, kept, strict=True):
        assert torch.equal(before.blocks["moments"].tensors["mean"], after.blocks["moments"].tensors["mean"])


# -- sums --------------------------------------------------------------------------------------------------------------


def test_sums_may_grow_with_the_examples_and_not_otherwise():
    def sums(client: int, samples: int, size: float) -> Reply:
        return Reply(client, samples, {"sums": Block("statistics", {"total": size * torch.ones(4)})})

    honest = [sums(c, 10 * (c + 1), 10.0 * (c + 1)) for c in range(5)]
    assert dropped(honest) == {}
    assert list(dropped([*honest[:4], sums(4, 50, 50_000.0)])) == [4]
