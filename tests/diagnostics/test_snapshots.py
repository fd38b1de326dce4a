"""Snapshots: which points are refreshed, stale and aligned, and that the saved memories are those of the run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from profcil.diagnostics.snapshots import Memory, gather, points
from profcil.engine.evaluation import evaluation_features
from profcil.engine.snapshots import path_of, save_memory
from profcil.errors import RunFolderError


def memory(means: dict[int, float], current: set[int]) -> Memory:
    rows = torch.tensor([[v, v] for v in means.values()]).reshape(-1, 2)
    return Memory(tuple(means), rows, 10 + rows, frozenset(current))


def test_current_classes_are_refreshed_and_old_ones_stale_and_aligned():
    before = memory({7: 1.0, 2: 2.0}, {7})
    after = memory({2: 2.5, 7: 1.5, 4: 4.0}, {4, 2})
    found = {(kind, label): (float(m[0]), float(o[0])) for _, kind, label, m, o in points(before, after, 3)}
    assert found == {
        ("refreshed", 2): (2.5, 12.5),  # an old class that is current again
        ("refreshed", 4): (4.0, 14.0),
        ("stale", 7): (1.0, 11.5),
        ("aligned", 7): (1.5, 11.5),
    }
    assert [kind for _, kind, *_ in points(None, before, 0)] == [
        "refreshed"
    ]  # there are no old classes at the first position


@pytest.fixture(scope="module")
def saved(fresh, tmp_path_factory):
    """A run of PRO-MAX with the memory of every position saved as by a run with `keep_memories`."""
    folder = tmp_path_factory.mktemp("saved")
    run = fresh("promax")

    def watch(what, when, facts):
        if what == "position":
            save_memory(folder, run.world, run.state.server, when.position)

    return folder, run.stream(watch)


def test_saved_means_are_those_of_the_memory_and_of_the_model_at_that_position(saved):
    folder, run = saved
    found = gather(folder, run.world.plan.positions)
    for p, server in enumerate(run.after_positions()):
        bank = server.blocks["memory"]
        features = evaluation_features(run.world, run.method, server)
        now = (found["position"] == p) & (found["kind"] != "stale")
        assert set(found["labels"][now]) <= set(bank.labels)
        for label, mean, truth in zip(found["labels"][now], found["means"][now], found["oracle"][now], strict=True):
            assert np.array_equal(mean, bank.tensors["mean"][bank.labels.index(label)])
            assert np.allclose(truth, features[run.world.evaluation_examples.y == label].mean(0), atol=1e-5)
    last = run.world.plan.positions - 1
    assert set(found["labels"][found["position"] == last]) == set(run.server.blocks["memory"].labels)


def test_saving_memories_does_not_change_the_run(saved, tiny, same_bits):
    assert same_bits(saved[1].server, tiny("promax").server)


def test_stale_means_are_those_of_the_previous_position_and_alignment_moves_them(saved):
    folder, run = saved
    found = gather(folder, run.world.plan.positions)
    servers = run.after_positions()
    stale = found["kind"] == "stale"
    aligned = found["kind"] == "aligned"
    assert stale.any() and found["labels"][stale].tolist() == found["labels"][aligned].tolist()
    for p, label, mean in zip(found["position"][stale], found["labels"][stale], found["means"][stale], strict=True):
        bank = servers[p - 1].blocks["memory"]
        assert np.array_equal(mean, bank.tensors["mean"][bank.labels.index(label)])
    assert not np.allclose(found["means"][stale], found["means"][aligned])


def test_real_features_are_of_the_seen_classes_of_their_position(saved):
    folder, run = saved
    found = gather(folder, run.world.plan.positions)
    for p in range(run.world.plan.positions):
        assert set(found["real_label"][found["real_position"] == p]) == run.world.plan.seen(p)


def test_without_saved_memories_there_are_no_points_and_a_missing_one_is_an_error(saved, tmp_path):
    folder, _ = saved
    assert gather(tmp_path, 3) is None
    path_of(tmp_path, 0).write_bytes(path_of(folder, 0).read_bytes())
    with pytest.raises(RunFolderError, match="memories of some positions"):
        gather(tmp_path, 2)
