"""FedSeIT: filters with a shared and a task-specific part, adaptives chosen by topic, and what is sent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil import registry
from profcil.data.bundle import Bundle, Rows
from profcil.engine import world as worlds
from profcil.engine.channel import Block, ServerState
from profcil.errors import NotApplicable
from profcil.methods import fedseit
from profcil.methods.parts import banks
from profcil.methods.parts.banks import banks_of, named, part
from profcil.methods.parts.sparse import pack, unpack
from profcil.methods.parts.topics import centroids, document_vectors, similarity

CLASSES = 6
OWN = 4  # words that only one class has, for each class
COMMON = 20  # words that all classes have


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def texts() -> Bundle:
    """Texts of seven words, five of them of their class."""

    def rows(seed: int, each: int) -> Rows:
        y = torch.arange(CLASSES).repeat(each)
        x = torch.randint(1, COMMON, (len(y), 8), generator=rng(seed))
        x[:, 1:6] = COMMON + OWN * y[:, None] + torch.randint(OWN, (len(y), 5), generator=rng(seed + 1))
        x[:, 7] = 0
        return Rows(x, y)

    facts = replace(registry.find("data", "clinc150").FACTS, classes=CLASSES)
    size = COMMON + OWN * CLASSES
    return Bundle(facts, rows(1, 24), rows(3, 8), None, ("",) * CLASSES, vocabulary=size, fingerprint="topics")


@pytest.fixture
def make(fresh, monkeypatch):
    monkeypatch.setattr(worlds, "load_bundle", lambda *a: texts())

    def begin(**wanted):
        plain = {"setting": "homogeneous", "task_size": 2, "clients": 3, "participants": 3}
        return fresh("fedseit", dataset="clinc150", **(plain | wanted))

    return begin


@pytest.fixture
def planted(make, assign_samples):
    """Client 1 starts with the second task of client 0. The first task of client 0 is the second one of the others."""

    def owner(labels, tasks):
        return np.arange(len(labels)) // CLASSES % 3

    assign_samples(owner, [[0, 1, 2], [1, 0, 2], [2, 0, 1]])
    return make


# -- topics and sparse tensors ----------------------------------------------------------------------------------------


def test_a_document_is_the_mean_of_its_words_without_padding():
    words = torch.randn(5, 3, generator=rng())
    found = document_vectors(words, torch.tensor([[2, 4, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]))
    torch.testing.assert_close(found, torch.stack([(words[2] + words[4]) / 2, words[1], torch.zeros(3)]))


def test_centroids_are_the_means_of_separated_groups():
    middle = torch.tensor([[0.0, 0.0], [50.0, 0.0]])
    points = torch.cat([m + torch.randn(30, 2, generator=rng(i)) for i, m in enumerate(middle)])
    found = centroids(points, 2, rng(1))
    expected = torch.stack([points[:30].mean(0), points[30:].mean(0)])
    torch.testing.assert_close(found[found[:, 0].argsort()], expected)
    assert torch.equal(found, centroids(points, 2, rng(1)))
    assert torch.equal(centroids(points, 60, rng()), points)
    assert torch.isfinite(centroids(torch.ones(9, 2), 4, rng())).all()  # with empty clusters


def test_similarity_is_the_mean_over_pairs_of_cosines_above_the_threshold():
    a = torch.randn(7, 3, generator=rng(1))
    b = torch.randn(5, 3, generator=rng(2))
    cosines = [float(torch.cosine_similarity(x, y, dim=0)) for x in a for y in b]
    expected = sum(c for c in cosines if c > 0.5) / len(cosines)
    assert 0 < expected == pytest.approx(float(similarity(a, b, 0.5)), abs=1e-6)
    assert float(similarity(a, a[:1], 0.999)) == pytest.approx(1 / 7, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 40), st.floats(0.0, 3.0), st.integers(0, 99))
def test_sparse_tensors_are_restored_and_have_the_smaller_size(size, threshold, seed):
    a = {"a": torch.randn(size, 2, generator=rng(seed)), "b": torch.ones(3)}
    packed = pack(a, threshold)
    expected = {k: torch.where(t.abs() > threshold, t, 0.0) for k, t in a.items()}
    back = unpack(packed, a)
    assert all(torch.equal(back[k], expected[k]) for k in a)
    bytes = Block("memory", packed).bytes
    assert bytes == sum(min(8 * int((t != 0).sum()), 4 * t.numel()) for t in expected.values())


# -- filters in two parts ---------------------------------------------------------------------------------------------


@pytest.fixture
def loaded(make):
    """A model with its parts and a new task loaded, this task, some texts, and the shared filters."""
    run = make()
    weights = run.server.weights()
    net = run.world.net
    task = banks.fresh_task(weights["shared"], 3)
    net.load({**weights, "task": task})
    return net, task, run.world.bundle.train.x[:20], banks_of(weights["shared"])


def no_foreign(shared):
    return [b.new_zeros(0, *b.shape) for b in shared]


def test_a_new_task_equals_the_base_and_so_does_an_open_gate_without_adaptive(loaded):
    net, _, tokens, shared = loaded
    with torch.no_grad():
        torch.testing.assert_close(banks.features(net, tokens, no_foreign(shared)), net.base(tokens))
        net.load({"task": named("gate", [b.new_full((len(b),), 50.0) for b in shared])})
        net.load({"task": named("adaptive", [torch.zeros_like(b) for b in shared])})
        torch.testing.assert_close(banks.features(net, tokens, no_foreign(shared)), net.base(tokens))


def test_a_task_changes_the_filters_by_the_formula(loaded):
    net, _, tokens, shared = loaded
    gates = [torch.randn(len(b), generator=rng(i)) for i, b in enumerate(shared)]
    adaptives = [torch.randn(b.shape, generator=rng(i)) for i, b in enumerate(shared)]
    with torch.no_grad():
        net.load({"task": {**named("gate", gates), **named("adaptive", adaptives)}})
        found = banks.features(net, tokens, no_foreign(shared))
        theta = [b * m.sigmoid().view(-1, 1, 1) + a for b, m, a in zip(shared, gates, adaptives, strict=True)]
        net.load({"base": {f"convolutions.{i}.weight": t for i, t in enumerate(theta)}})
        torch.testing.assert_close(found, net.base(tokens))


def test_foreign_adaptives_are_separate_convolutions_added_through_the_projection(loaded):
    net, _, tokens, shared = loaded
    others = [torch.randn(2, *b.shape, generator=rng(i)) for i, b in enumerate(shared)]
    mix = [torch.randn(len(b), 3 * len(b), generator=rng(i)) for i, b in enumerate(shared)]
    alpha = torch.tensor([0.5, 2.0, 9.0])
    with torch.no_grad():
        alone = banks.features(net, tokens, no_foreign(shared))
        net.load({"task": {"strength.0": alpha}})
        torch.testing.assert_close(banks.features(net, tokens, others), alone)  # the projection starts at zero
        net.load({"task": named("mix", mix)})
        found = banks.features(net, tokens, others) - alone
        bare = {k: torch.zeros_like(t) for k, t in net.base.state_dict().items() if k.endswith("bias")}
        expected = torch.zeros_like(found)
        for j in range(2):
            net.load({"base": {**bare, **{f"convolutions.{i}.weight": o[j] for i, o in enumerate(others)}}})
            pieces = net.base(tokens).split([len(b) for b in shared], 1)
            pairs = zip(pieces, mix, strict=True)
            expected += torch.cat([alpha[j] * f @ m[:, j * len(m) : (j + 1) * len(m)].T for f, m in pairs], 1)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


# -- past tasks -------------------------------------------------------------------------------------------------------


def test_the_drift_has_the_gradient_of_the_sum_over_past_tasks():
    own = {}
    total = 0.0
    shape = (3, 2, 2)
    b = torch.randn(shape, generator=rng(9)).requires_grad_()
    for i in range(3):
        bank, m, a = (torch.randn(s, generator=rng(10 * i + j)) for j, s in enumerate((shape, 3, shape)))
        theta = bank * m.sigmoid().view(-1, 1, 1) + a
        total = total + (b * m.sigmoid().view(-1, 1, 1) + a - theta).square().sum() / 2
        own = {**(own or banks.add_finished_task({}, [bank])), "gate.0": m, "bank.0": bank}
        own = {**own, **banks.add_finished_task(own, [bank])}
    (expected,) = torch.autograd.grad(total, [b])
    (found,) = torch.autograd.grad(banks.drift([b], part(own, "hold"), part(own, "centre")), [b])
    torch.testing.assert_close(found, expected)


def test_the_penalty_preserves_the_filters_of_past_tasks(make):
    def moved(weight: float) -> float:
        run = make(drift=weight, train__epochs=3, lr=0.01, optimiser="adam")
        for r in range(3):
            run.play(0, r)
        before = {c: dict(own) for c, own in run.state.private.items()}
        total = 0.0
        for reply in run.turns(1, 0):
            own, now = before[reply.client], banks_of(reply.weights()["shared"])
            gates = [m.sigmoid() for m in part(own, "gate")]
            was, is_now = (banks.compose(b, gates, part(own, "adaptive")) for b in (part(own, "bank"), now))
            total += sum(float((x - y).square().sum()) for x, y in zip(was, is_now, strict=True))
        return total

    assert 0 < moved(100.0) < 0.5 * moved(0.0)


# -- the classes that compete -----------------------------------------------------------------------------------------


def test_a_client_with_a_single_class_learns_it_against_the_seen_ones(make):
    run = make(setting="severe", coverage=0.5, support=1.0, optimiser="adam", lr=0.01, weight_decay=0.0)
    before = run.server.weights()["head"]["weight"]
    replies = run.turns(0, 0)
    assert replies
    for reply in replies:
        (label,) = run.client(reply.client, 0, 0).labels
        assert reply.notes["loss"] > 0.1
        moved = (reply.weights()["head"]["weight"] - before).abs().amax(1) > 0
        seen = run.world.plan.seen(0)
        assert {label} < set(moved.nonzero().flatten().tolist()) == set(seen)


def test_several_own_classes_compete_among_themselves_alone(make):
    run = make(optimiser="adam", lr=0.01, weight_decay=0.0)
    run.play(0, 0)
    before = run.server.weights()["head"]["weight"]
    for reply in run.turns(1, 0):
        moved = (reply.weights()["head"]["weight"] - before).abs().amax(1) > 0
        assert set(moved.nonzero().flatten().tolist()) == set(run.client(reply.client, 1, 0).labels)


# -- the choice of foreign adaptives ----------------------------------------------------------------------------------


def test_the_similar_task_of_another_client_is_chosen(planted):
    run = planted().stream()
    first = {c: run.server.blocks[f"chosen/{c}/1"].tensors["task"][0].tolist() for c in range(3)}
    assert first == {0: [1, 0], 1: [0, 0], 2: [0, 0]}
    for (c, p), block in {(c, p): run.server.blocks[f"chosen/{c}/{p}"] for c in range(3) for p in range(3)}.items():
        score, found = block.tensors["score"], block.tensors["task"].tolist()
        assert len(found) <= (3 if p else 0)
        assert all(other != c and position < p for other, position in found)
        assert (score > 0).all() and torch.equal(score, score.sort(descending=True).values)


def test_chosen_adaptives_are_used(planted):
    run = planted(train__rounds=2)
    run.play(0, 0)
    run.play(1, 0)
    assert not any(own["strength.0"].any() or own["mix.0"].any() for own in run.state.private.values())
    run.play(1, 1)
    for c, own in run.state.private.items():
        score = run.server.blocks[f"chosen/{c}/1"].tensors["score"]
        assert torch.equal(own["strength.0"] != 0, torch.arange(3) < len(score))
        torch.testing.assert_close(own["strength.0"][: len(score)], score / score.sum(), atol=0.1, rtol=0)
        assert own["mix.0"].any()


def test_private_state_and_foreign_adaptives_count_as_memory(planted):
    run = planted(train__rounds=2)
    run.play(0, 0)
    run.play(1, 0)
    for reply in run.turns(1, 1):
        own = run.state.private[reply.client]
        chosen = len(run.server.blocks[f"chosen/{reply.client}/1"].tensors["task"])
        foreign = chosen * sum(t.numel() for t in part(own, "adaptive"))
        kept = sum(t.numel() * t.element_size() for t in own.values())
        assert chosen and reply.notes["extra_bytes"] == kept + 4 * foreign


def test_without_similar_tasks_only_the_local_branch_is_used(planted, same_bits):
    unlike = planted(threshold=1.0).stream()
    none = planted(top=0).stream()
    assert not any(len(b.tensors["score"]) for n, b in unlike.server.blocks.items() if n.startswith("chosen/"))
    assert same_bits(
        *(ServerState({n: r.server.blocks[n] for n in ("base", "head", "shared")}) for r in (unlike, none))
    )
    pair = [banks_of(r.server.weights()["shared"])[2] for r in (planted().stream(), none)]
    assert not torch.equal(*pair)


def test_a_single_client_has_no_foreign_adaptives(make):
    run = make(clients=1, participants=1).stream()
    assert all(not len(run.server.blocks[f"chosen/0/{p}"].tensors["task"]) for p in range(3))
    assert (run.state.scores.correct[-1] >= 0).all()


def test_a_step_can_be_recorded_and_replayed(planted, max_difference):
    recorders = pytest.importorskip("recorders", reason="needs the package accel")
    eager, replayed = (planted(train__batch=8, train__epochs=2) for _ in range(2))
    graphs = recorders.replaying(replayed)
    for at in ((0, 0), (0, 1), (1, 0), (1, 1)):
        eager.play(*at)
        replayed.play(*at)
    assert graphs.recordings > 0
    models = [ServerState({n: b for n, b in r.server.blocks.items() if b.kind == "model"}) for r in (eager, replayed)]
    assert max_difference(*models) < 1e-4  # rounding can decide whether an entry is pruned


# -- what is sent and deployed ----------------------------------------------------------------------------------------


def test_the_ledger_has_the_sparse_sizes(planted):
    run = planted(prune=0.05, optimiser="adam", lr=0.01)
    for p in range(2):
        for r in range(2):
            run.play(p, r)
            for c, own in run.state.private.items():
                large = [(int((a.abs() > 0.05).sum()), a.numel()) for a in part(own, "adaptive")]
                sizes = [min(8 * n, 4 * of) for n, of in large]
                assert any(0 < 2 * n < of for n, of in large)
                up = sum(sizes) + 4 * sum(len(m) for m in part(own, "gate"))
                where = {"stage": "round", "position": p, "round": r, "client": c}
                assert run.ledger.total(direction="up", kind="memory", **where) == up
                points = 4 * 128 * len(run.client(c, p, r).current) if r == 0 else 0
                assert run.ledger.total(direction="up", kind="statistics", **where) == points
    for c in range(3):
        chosen = run.server.blocks[f"chosen/{c}/1"]
        down = chosen.bytes + sum(run.server.blocks[n].bytes for n in fedseit.adaptive_names(chosen))
        assert chosen.bytes == 12 * len(chosen.tensors["score"]) > 0
        assert run.ledger.total(direction="down", kind="memory", client=c) == down
        assert run.ledger.total(direction="down", kind="memory", client=c, position=1, round=1) == down


def test_frozen_words_go_down_once_and_never_up(make):
    run = make().stream()
    weights = run.server.weights()
    bytes = {b: sum(4 * t.numel() for t in ts.values()) for b, ts in weights.items()}
    changing = bytes["shared"] + bytes["adapter"] + bytes["head"]
    down = [e.bytes for e in run.ledger.entries if (e.stage, e.direction, e.kind) == ("round", "down", "model")]
    up = [e.bytes for e in run.ledger.entries if (e.stage, e.direction, e.kind) == ("round", "up", "model")]
    assert up == [changing] * 27 and sorted(down) == [changing] * 24 + [changing + bytes["words"]] * 3
    start = run.trail[0][2].weights()["base"]
    assert torch.equal(weights["base"]["embedding.weight"], start["embedding.weight"])
    trained = make(words="trained").stream().server.weights()
    assert not torch.equal(trained["words"]["embedding.weight"], start["embedding.weight"])
    assert torch.equal(trained["words"]["embedding.weight"], trained["base"]["embedding.weight"])


@pytest.mark.parametrize("deploy", ["current", "all"])
def test_the_global_model_is_the_mean_of_the_tasks_filters(make, deploy):
    run = make(deploy=deploy, clients=2, participants=2, dirichlet=0.5).stream()
    shared = banks_of(run.server.weights()["shared"])
    theta = 0.0
    tasks = [(c, p) for c in range(2) for p in range(3) if deploy == "all" or p == 2]
    samples = [len(run.world.plan.samples(c, p)) for c, p in tasks]
    assert len(set(samples)) > 1
    for at, n in zip(tasks, samples, strict=True):
        block = run.server.blocks[fedseit.block_name("adaptive", at)]
        gates = [m.sigmoid() for m in part(block.tensors, "gate")]
        theta = theta + banks.compose(shared, gates, fedseit.dense(block, shared))[2] * n / sum(samples)
    torch.testing.assert_close(run.server.weights()["base"]["convolutions.2.weight"], theta)


def test_images_are_rejected_before_a_run(fresh):
    with pytest.raises(NotApplicable, match="FedSeIT is made for text, not for image"):
        fresh("fedseit")
