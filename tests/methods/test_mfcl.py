"""MFCL: one generator for all positions, images labelled by the teacher, and a loss of three terms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from profcil.engine.channel import Inbox
from profcil.errors import NotApplicable
from profcil.methods import mfcl
from profcil.methods.mfcl import MFCL, generate_labelled, generator_of
from profcil.methods.parts.data_free import class_list
from profcil.methods.parts.distillation import old_head_distance, teacher_logits
from profcil.methods.parts.generator import BatchNormStatistics, gaussian_divergence, generate_images, load_frozen
from profcil.methods.parts.starting_model import START, start_names
from profcil.model.net import MODEL, Tail

ONE = {"setting": "homogeneous", "clients": 1, "participants": 1, "model__norm": "batch", "model__width": 8}
SHORT = {"train__rounds": 1, "train__epochs": 4, "params__iterations": 60, "generator_batch": 64, "latent": 64}
QUICK = {"train__rounds": 2, "params__budget": 3, "params__iterations": 2, "latent": 16, "model__norm": "batch"}


@pytest.fixture(scope="module")
def halfway(fresh):
    """Five classes learned by one client in one round, the generator trained, five classes to come."""
    run = fresh("mfcl", task_size=5, **ONE, **SHORT)
    run.trail.append(("start", run.when(0, 0), run.server))
    run.play(0, 0)
    return run


def teacher_of(run, server=None):
    blocks = (server or run.server).blocks
    return load_frozen(run.world.net, {b: dict(blocks[b].tensors) for b in (*MODEL, "generator")})


def inbox(run, position: int, round: int) -> Inbox:
    names = run.method.broadcast(run.server, run.when(position, round))
    return {n: run.server.blocks[n] for n in names}


@torch.no_grad()
def divergence_of(run, images: torch.Tensor) -> float:
    """The divergence of images from the statistics of the model that the generator was trained against."""
    teacher = teacher_of(run)
    with BatchNormStatistics(teacher.base) as statistics:
        teacher(images)
        return float(gaussian_divergence(statistics.batch, statistics.running, statistics.layer_mask))


# -- the server -------------------------------------------------------------------------------------------------------


def test_images_match_the_statistics_better_than_noise_and_than_before_training(halfway):
    before = halfway.trail[0][2].blocks["generator"]
    net = teacher_of(halfway)
    trained = generate_images(net, generator_of(net), 200, torch.Generator().manual_seed(1))
    rng = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, trained.shape, generator=rng).to(torch.uint8)
    of_trained, of_noise = (divergence_of(halfway, x) for x in (trained, noise))
    net.load({"generator": dict(before.tensors)})
    untrained = generate_images(net, generator_of(net), 200, torch.Generator().manual_seed(1))
    of_untrained = divergence_of(halfway, untrained)
    assert of_trained < 0.5 * min(of_noise, of_untrained)


def test_images_are_labelled_by_the_teacher_among_the_classes_it_knows(halfway):
    seen = tuple(sorted(halfway.world.plan.seen(0)))
    assert halfway.server.blocks["generator"].labels == seen != tuple(range(5))
    teacher = teacher_of(halfway)
    x, y, logits = generate_labelled(teacher, 300, seen, torch.Generator().manual_seed(0))
    assert set(y.tolist()) == set(seen)  # balanced enough that every class occurs
    torch.testing.assert_close(logits, teacher_logits(teacher, x))
    assert all(seen[int(row[list(seen)].argmax())] == label for row, label in zip(logits, y.tolist(), strict=True))


def test_the_balance_term_prevents_that_one_class_dominates(halfway):
    """Without the term the most frequent class is more frequent than with it."""
    seen = tuple(sorted(halfway.world.plan.seen(0)))
    shares = {}
    for weight in (0.0, 20.0):
        method = MFCL(replace(halfway.method.params, balance=weight, iterations=30))
        fresh = halfway.server.put(generator=halfway.trail[0][2].blocks["generator"])
        moved = fresh.put(head=fresh.blocks["head"])  # a newer model than the generator's
        state = method.train_server(halfway.world.server(halfway.when(0, 0)), moved)
        _, y, _ = generate_labelled(teacher_of(halfway, state), 500, seen, torch.Generator().manual_seed(0))
        shares[weight] = float(torch.bincount(y).max()) / 500
    assert shares[20.0] < 0.8 * shares[0.0]


def test_training_continues_from_the_old_generator(halfway):
    """One Adam step moves a weight by at most the learning rate: training starts from the old generator."""
    method = MFCL(replace(halfway.method.params, iterations=1))
    moved = halfway.server.put(head=halfway.server.blocks["head"], trained_classes=class_list((1, 2)))
    state = method.train_server(halfway.world.server(halfway.when(1, 0)), moved)
    old, new = (s.blocks["generator"].tensors["first.weight"] for s in (halfway.server, state))
    step = float((new - old).abs().max())
    assert 0 < step <= 1.01 * method.params.lr_generator
    assert state.blocks["generator"].labels == (1, 2)


def test_recorded_steps_train_the_same_generator(halfway):
    recorders = pytest.importorskip("recorders", reason="needs the package accel")
    recorder = recorders.OperationRecorder()
    state = halfway.server.put(head=halfway.server.blocks["head"])
    server = halfway.world.server(halfway.when(1, 0))
    servers = server, replace(server, repeated=recorders.recording(recorder))
    one, other = (halfway.method.train_server(s, state).blocks["generator"].tensors for s in servers)
    assert recorder.made == 1
    assert all(torch.equal(one[k], other[k]) for k in one)
    assert not torch.equal(one["first.weight"], state.blocks["generator"].tensors["first.weight"])


def test_a_seen_class_that_nobody_has_trained_is_neither_generated_nor_replayed(fresh):
    """In a severe stream a position introduces classes of clients that do not take part."""
    run = fresh("mfcl", participants=1, setting="severe", **QUICK)
    had: set[int] = set()
    for r in range(2):
        for c in run.clients(0, r):
            had |= set(run.client(c, 0, r).labels)
        run.play(0, r)
    assert had < run.world.plan.seen(0)
    assert set(run.server.blocks["generator"].labels) == had
    client = run.client(run.clients(1, 0)[0], 1, 0)
    old = tuple(sorted(had - set(client.labels)))
    source, drawn = run.method.source(client, inbox(run, 1, 0), old)
    assert {int(name.removeprefix("drawn_")) for name in drawn} <= had
    assert set(source.epoch(torch.Generator())["y"].tolist()) <= had | set(client.labels)


def test_the_generator_is_not_trained_again_for_an_unchanged_model(halfway):
    assert halfway.method.train_server(halfway.world.server(halfway.when(0, 0)), halfway.server) is halfway.server


# -- the client -------------------------------------------------------------------------------------------------------


def gradients(run, rows: slice, **settings) -> dict[str, float]:
    """The largest absolute gradient in each block, of the loss on some rows of a client's epoch."""
    client = run.client(0, 1, 0)
    known = run.server.blocks["generator"].labels
    old = tuple(sorted(set(known) - set(client.labels)))
    source, _ = run.method.source(client, inbox(run, 1, 0), old)
    phase = run.method.fit(client, inbox(run, 1, 0), old, source)
    net = run.world.net
    rng = torch.Generator().manual_seed(0)
    net.load({b: dict(run.server.blocks[b].tensors) for b in MODEL})
    net.train().requires_grad_()
    batch = {k: v[rows] for k, v in source.epoch(rng).items()} | phase.constants | {"rng": rng}
    loss = MFCL(replace(run.method.params, **settings)).replay_loss(net, batch)
    found = {}
    for block in MODEL:
        grads = torch.autograd.grad(loss, net.trainable([block]), retain_graph=True, materialize_grads=True)
        found[block] = max(float(g.abs().max()) for g in grads)
    net.load({b: dict(run.server.blocks[b].tensors) for b in MODEL})
    return found


def test_generated_images_train_the_features_by_distillation_only(halfway):
    generated = slice(-40, None)
    real = slice(0, 40)
    head_only = gradients(halfway, generated, distill=0.0)
    assert head_only["head"] > 1e-4
    assert head_only["base"] == head_only["adapter"] == 0
    assert gradients(halfway, generated, finetune=0.0)["base"] > 1e-6
    assert gradients(halfway, generated, finetune=0.0)["head"] == 0  # the term uses the old head, which is fixed
    assert gradients(halfway, real, distill=0.0, finetune=0.0)["base"] > 1e-4


def test_distillation_preserves_old_scores_better_than_plain_training(halfway):
    """One turn on the second half of the classes from the same model; drift of real old examples along the old head."""
    old = sorted(halfway.world.plan.seen(0))
    usual = halfway.method
    drift = {}
    test = halfway.world.bundle.test
    among = torch.zeros(10, dtype=torch.bool)
    among[old] = True
    x = test.x[among[test.y]]
    start = teacher_logits(teacher_of(halfway), x)
    head = halfway.server.blocks["head"].tensors["weight"]
    for weight in (0.0, 1.0):
        halfway.method = MFCL(replace(usual.params, distill=weight))
        (answer,) = halfway.turns(1, 0)
        net = load_frozen(halfway.world.net, answer.weights())
        z = net.tail.adapt(net.base(x))
        drift[weight] = float(old_head_distance(Tail({}, {"weight": head}).score(z), start, among).mean())
    halfway.method = usual
    assert drift[1.0] < 0.5 * drift[0.0]


def test_the_teacher_is_the_model_that_the_position_started_from(fresh):
    run = fresh("mfcl", setting="homogeneous", **QUICK).stream()
    before = run.before()
    for (position, round), server in before.items():
        sent = set(run.method.broadcast(server, run.when(position, round))) - set(MODEL)
        expected = {"generator"} if position else set()
        if position and round:
            expected |= set(start_names(MODEL))
        assert sent == expected
        if round:
            start = before[position, 0]
            for b in MODEL:
                for k, t in start.blocks[b].tensors.items():
                    assert torch.equal(server.blocks[START + b].tensors[k], t)
    assert all(not any(n.startswith(START) for n in s.blocks) for s in run.after_positions())
    crossed = {(e.kind, e.direction) for e in run.ledger.entries}
    assert ("generator", "down") in crossed and ("generator", "up") not in crossed


def test_a_client_replays_the_budget_of_every_old_class_and_logs_the_counts(halfway):
    client = halfway.client(0, 1, 0)
    known = halfway.server.blocks["generator"].labels
    source, drawn = halfway.method.source(client, inbox(halfway, 1, 0), known)
    epoch = source.epoch(torch.Generator().manual_seed(0))
    generated = epoch["y"][~epoch["real"]].tolist()
    assert {y: generated.count(y) for y in set(generated)} == dict.fromkeys(known, 20)
    assert sum(drawn.values()) == 2 * 20 * 5 and set(drawn) == {f"drawn_{y}" for y in known}
    (answer,) = halfway.turns(1, 0)
    assert answer.notes["replay_requested"] == answer.notes["replay_served"] == 4 * 20 * 5
    assert {k: v for k, v in answer.notes.items() if k.startswith("drawn_")} == drawn


def test_a_class_of_which_no_image_was_drawn_lowers_the_served_count(halfway, monkeypatch):
    known = halfway.server.blocks["generator"].labels

    def collapsed(*args):
        x, y, logits = generate_labelled(*args)
        return x, torch.full_like(y, known[2]), logits

    monkeypatch.setattr(mfcl, "generate_labelled", collapsed)
    (answer,) = halfway.turns(1, 0)
    assert (answer.notes["replay_requested"], answer.notes["replay_served"]) == (4 * 20 * 5, 4 * 20)
    assert [k for k in answer.notes if k.startswith("drawn_")] == [f"drawn_{known[2]}"]


def test_the_loss_on_real_examples_competes_over_the_chosen_label_space(fresh):
    for space in ("local", "seen"):
        run = fresh("mfcl", label_space=space, **QUICK)
        narrower = 0
        for position in (0, 1):
            for c in run.clients(position, 0):
                client = run.client(c, position, 0)
                phase = next(run.method.turn(client, inbox(run, position, 0)))
                assert ("old" in phase.constants) == bool(position)
                wanted = client.labels if space == "local" else client.seen
                assert tuple(phase.constants["allowed"].nonzero().flatten().tolist()) == wanted
                narrower += len(client.labels) < len(client.seen)
            for r in range(2):
                run.play(position, r)
        assert narrower > 0


def test_without_old_images_real_examples_are_still_distilled(halfway, monkeypatch):
    client = halfway.client(0, 1, 0)
    known = halfway.server.blocks["generator"].labels

    def nothing_old(*args):
        x, y, logits = generate_labelled(*args)
        return x, torch.full_like(y, client.labels[0]), logits

    monkeypatch.setattr(mfcl, "generate_labelled", nothing_old)
    phase = next(halfway.method.turn(client, inbox(halfway, 1, 0)))
    assert phase.source.replayed == 0 and phase.source.size == len(client.current)
    assert tuple(phase.constants["old"].nonzero().flatten().tolist()) == known
    net = halfway.world.net
    rng = torch.Generator().manual_seed(0)
    loss = {}
    net.load({b: dict(halfway.server.blocks[b].tensors) for b in MODEL})
    net.eval()
    batch = phase.source.epoch(rng) | phase.constants
    moved = batch | {"target": batch["target"] + 1}  # another teacher's logits of real examples
    for weight in (0.0, 1.0):
        method = MFCL(replace(halfway.method.params, distill=weight))
        usual, other = (method.replay_loss(net, b | {"rng": torch.Generator().manual_seed(1)}) for b in (batch, moved))
        loss[weight] = float(other - usual)
    assert loss[0.0] == 0 and abs(loss[1.0]) > 0.1
    (answer,) = halfway.turns(1, 0)
    assert answer.notes["replay_served"] == 0 and answer.notes["replay_requested"] > 0


def test_without_a_budget_it_is_fedavg_over_local_classes(tiny):
    plain = tiny("fedavg", setting="homogeneous", label_space="local", model__norm="batch", train__rounds=2)
    run = tiny("mfcl", setting="homogeneous", **{**QUICK, "params__budget": 0})
    for block in MODEL:
        for name, tensor in plain.server.blocks[block].tensors.items():
            assert torch.equal(tensor, run.server.blocks[block].tensors[name])


def test_the_diagnostics_get_images_that_the_model_assigns_to_the_class(halfway):
    label = halfway.server.blocks["generator"].labels[1]
    rng = torch.Generator().manual_seed(0)
    shown = halfway.method.replay(halfway.world.net, halfway.server, [], label, 6, rng)
    assert shown.space == "inputs" and 1 <= len(shown.tensors[0]) <= 6
    seen = list(halfway.server.blocks["generator"].labels)
    logits = teacher_logits(teacher_of(halfway), shown.tensors[0])[:, seen]
    assert all(seen[int(i)] == label for i in logits.argmax(1))
    other = next(y for y in range(10) if y not in seen)
    assert halfway.method.replay(halfway.world.net, halfway.server, [], other, 6, rng) is None


def test_an_encoder_without_batchnorm_is_rejected_before_a_run(fresh):
    with pytest.raises(NotApplicable, match=r"MFCL needs BatchNorm .* image encoder; set model\.norm=batch"):
        fresh("mfcl", model__norm="group")


def test_the_teacher_is_evaluated_on_own_examples_once_a_position(fresh, monkeypatch):
    run = fresh("mfcl", task_size=5, **ONE, **{**SHORT, "train__rounds": 2})
    for round in range(2):
        run.play(0, round)
    run.state.server = run.method.end_position(run.server, run.when(0, 1))
    sizes = []

    def count_rows(teacher, x):
        sizes.append(len(x))
        return teacher_logits(teacher, x)

    monkeypatch.setattr(mfcl, "teacher_logits", count_rows)
    own = len(run.client(0, 1, 0).current)
    targets = []
    for round in range(2):
        client = run.client(0, 1, round)
        source, _ = run.method.source(client, inbox(run, 1, round), run.server.blocks["generator"].labels)
        targets.append(source.real["target"])
        run.play(1, round)
    assert sizes.count(own) == 1
    assert torch.equal(*targets)
