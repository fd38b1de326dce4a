"""Snapshots: what is refreshed, stale and aligned, and that a run which keeps memories keeps the true ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from profcil.diagnostics.snapshots import Memory, gather, path_of, points, save_memory
from profcil.engine.loop import judged_features
from profcil.errors import RunFolderError


def memory(means: dict[int, float], current: set[int]) -> Memory:
    rows = torch.tensor([[v, v] for v in means.values()]).reshape(-1, 2)
    return Memory(tuple(means), rows, 10 + rows, frozenset(current))


def test_kinds_follow_who_is_current_and_stale_is_where_the_position_began():
    before, after = memory({7: 1.0, 2: 2.0}, {7}), memory({2: 2.5, 7: 1.5, 4: 4.0}, {4, 2})
    found = {(kind, label): (float(m[0]), float(o[0])) for _, kind, label, m, o in points(before, after, 3)}
    assert found == {
        ("refreshed", 2): (2.5, 12.5),  # it returned at this position
        ("refreshed", 4): (4.0, 14.0),
        ("stale", 7): (1.0, 11.5),
        ("aligned", 7): (1.5, 11.5),
    }
    assert [kind for _, kind, *_ in points(None, before, 0)] == ["refreshed"]  # nothing is old before the stream


@pytest.fixture(scope="module")
def kept(fresh, tmp_path_factory):
    """A run of PRO-MAX with the memory of every position kept, as the run itself keeps it."""
    folder, run = tmp_path_factory.mktemp("kept"), fresh("promax")

    def watch(what, when, facts):
        if what == "position":
            save_memory(folder, run.world, run.state.server, when.position)

    return folder, run.stream(watch)


def test_what_is_kept_is_the_memory_and_the_truth_under_the_model_of_that_position(kept):
    folder, run = kept
    found = gather(folder, run.world.plan.positions)
    for p, server in enumerate(run.after_positions()):
        bank, features = server.blocks["memory"], judged_features(run.world, run.method, server)
        now = (found["position"] == p) & (found["kind"] != "stale")
        assert set(found["labels"][now]) <= set(bank.labels)
        for label, mean, truth in zip(found["labels"][now], found["means"][now], found["oracle"][now], strict=True):
            assert np.array_equal(mean, bank.tensors["mean"][bank.labels.index(label)])
            assert np.allclose(truth, features[run.world.judged.y == label].mean(0), atol=1e-5)
    last = run.world.plan.positions - 1
    assert set(found["labels"][found["position"] == last]) == set(run.server.blocks["memory"].labels)


def test_keeping_memories_moves_nothing(kept, tiny, same_bits):
    assert same_bits(kept[1].server, tiny("promax").server)


def test_stale_is_the_memory_of_the_position_before_and_alignment_moved_it(kept):
    folder, run = kept
    found, servers = gather(folder, run.world.plan.positions), run.after_positions()
    stale, aligned = (found["kind"] == k for k in ("stale", "aligned"))
    assert stale.any() and found["labels"][stale].tolist() == found["labels"][aligned].tolist()
    for p, label, mean in zip(found["position"][stale], found["labels"][stale], found["means"][stale], strict=True):
        bank = servers[p - 1].blocks["memory"]
        assert np.array_equal(mean, bank.tensors["mean"][bank.labels.index(label)])
    assert not np.allclose(found["means"][stale], found["means"][aligned])


def test_real_features_are_of_seen_classes_and_of_their_position(kept):
    folder, run = kept
    found = gather(folder, run.world.plan.positions)
    for p in range(run.world.plan.positions):
        assert set(found["real_label"][found["real_position"] == p]) == run.world.plan.seen(p)


def test_a_run_that_kept_none_has_none_and_a_lost_one_is_said(kept, tmp_path):
    folder, _ = kept
    assert gather(tmp_path, 3) is None
    path_of(tmp_path, 0).write_bytes(path_of(folder, 0).read_bytes())
    with pytest.raises(RunFolderError, match="memories of some positions"):
        gather(tmp_path, 2)
