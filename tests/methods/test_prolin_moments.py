"""PRO-LIN with a sketch of second moments, and with none of them."""

from __future__ import annotations

import pytest
import torch

from profcil.errors import ConfigError
from profcil.memory import linear, sketch
from profcil.methods.parts.summaries import report, stored_summary, summary_of_report
from profcil.methods.prolin import ProLin

FROZEN = {"base_rounds": 0, "dictionary": 60, "participants": 4}
RANK = 12


def reported(run) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and labels of all examples of a stream in which every client reports."""
    plan = run.world.plan
    rows = []
    for p in range(plan.positions):
        run.world.forget_features()
        for c in map(int, plan.active(p)):
            client = run.client(c, p, 0)
            rows.append((run.method.joint_features(run.server.blocks, client.features), client.y))
    features, labels = zip(*rows, strict=True)
    return torch.cat(features), torch.cat(labels)


def test_the_memory_is_the_sketch_of_all_examples(tiny):
    run = tiny("prolin", moments="sketch", sketch_rank=RANK, **FROZEN)
    features, labels = reported(run)
    expected = sketch.sketch_of(features, RANK)
    found = stored_summary(run.server, "bank")
    assert found is not None and found.sketch is not None
    assert found.labels == tuple(torch.unique(labels).tolist()) and not found.gram.numel()
    torch.testing.assert_close(found.sketch.product, expected.product, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found.sketch.diagonal, expected.diagonal, rtol=1e-4, atol=1e-3)


def test_a_sketch_of_full_rank_predicts_as_the_matrix(tiny):
    whole, full = (tiny("prolin", **FROZEN, **more) for more in ({}, {"moments": "sketch", "sketch_rank": 999}))
    features, _ = reported(whole)
    one, other = (run.method.scores(run.world.net, run.server, features).argmax(1) for run in (whole, full))
    assert float((one == other).double().mean()) > 0.995


def test_without_second_moments_the_nearest_class_mean_predicts(tiny):
    run = tiny("prolin", moments="none", **FROZEN)
    features, labels = reported(run)
    classes, _, mean = linear.class_means(features, labels)
    nearest = torch.cdist(features.double(), mean).argmin(1)
    found = run.method.scores(run.world.net, run.server, features).argmax(1)
    assert torch.equal(found, torch.tensor(classes)[nearest])
    assert run.server.blocks["bank_gram"].tensors == {}


@pytest.mark.parametrize(("moments", "numbers"), [("sketch", RANK + 1), ("none", 0)])
def test_the_ledger_counts_a_sketch_by_its_rank_whatever_the_number_of_examples(tiny, moments, numbers):
    run = tiny("prolin", moments=moments, sketch_rank=RANK, **FROZEN)
    width = run.world.net.features + 60
    for c in map(int, run.world.plan.active(0)):
        rows = len(run.client(c, 0, 0).labels)
        sent = run.ledger.total(stage="refresh", position=0, client=c, direction="up", kind="statistics")
        assert sent == 4 * (rows * (width + 1) + numbers * width)


@pytest.mark.parametrize("rank", [None, 0, RANK])
def test_a_report_holds_the_summary_of_its_examples(rank):
    rng = torch.Generator().manual_seed(0)
    features, y = torch.randn(30, 20, generator=rng), torch.randint(4, (30,), generator=rng)
    blocks = report(features, y, rank=rank)
    found = summary_of_report(blocks)
    assert ("second_moments" in blocks) == (rank != 0)
    assert (found.sketch is not None) == bool(rank) and bool(found.gram.numel()) == (rank is None)


def test_a_saved_model_has_the_head_in_place_of_the_sketch(tiny):
    run = tiny("prolin", moments="sketch", sketch_rank=RANK, **FROZEN)
    deployed = run.method.deployed(run.server)
    assert "bank_gram" not in deployed.blocks
    features, _ = reported(run)
    one, other = (run.method.scores(run.world.net, state, features) for state in (run.server, deployed))
    assert torch.equal(one, other)


@pytest.mark.parametrize("moments", ["sketch", "none"])
def test_what_needs_the_whole_matrix_is_refused(moments):
    with pytest.raises(ConfigError, match="cannot follow a base that moves; set base_rounds = 0"):
        ProLin.Params(moments=moments)
    with pytest.raises(ConfigError, match='uncertainty = "shrink" shrinks by the whole matrix'):
        ProLin.Params(moments=moments, base_rounds=0, uncertainty="shrink")
