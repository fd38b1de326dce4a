"""TARGET: the teacher recognises the generated images, which match its statistics; clients distil on them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from profcil.engine.channel import Inbox
from profcil.errors import NotApplicable
from profcil.methods.parts import synthesis
from profcil.methods.parts.distillation import soft_cross_entropy
from profcil.methods.parts.generator import BatchNormStatistics, load_frozen, moment_distance
from profcil.methods.parts.synthesis import Synthesis, disagreement
from profcil.methods.target import Target
from profcil.model.net import MODEL

ONE = {"setting": "homogeneous", "clients": 1, "participants": 1, "model__norm": "batch", "model__width": 8}
SHORT = {"train__rounds": 1, "train__epochs": 4, "params__pool": 20, "synthesis_batch": 64, "synthesis_rounds": 3}


@pytest.fixture(scope="module")
def learned(fresh):
    """All classes learned by one client in one position and one round, and the server's pool after it."""
    run = fresh("target", task_size=10, **ONE, **SHORT)
    run.play(0, 0)
    return run


@pytest.fixture(scope="module")
def halfway(fresh):
    """Five classes learned and pooled, five to come."""
    run = fresh("target", task_size=5, seed=2, **ONE, **SHORT)
    run.play(0, 0)
    return run


def teacher_of(run):
    return load_frozen(run.world.net, run.server.weights())


@torch.no_grad()
def accuracy_and_distance(run, images: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """The teacher's accuracy on images, and the distance of their statistics from its own."""
    teacher = teacher_of(run)
    with BatchNormStatistics(teacher.base) as statistics:
        accuracy = (teacher(images).argmax(1) == y).float().mean()
        distance = moment_distance(statistics.batch, statistics.running, statistics.layer_mask)
        return float(accuracy), float(distance)


def trained_classes(run) -> tuple[int, ...]:
    return run.server.blocks["trained_classes"].labels


def pool_with(run, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    """The pool that the server would generate with other settings."""
    params = replace(run.method.params, **settings)
    server = run.world.server(run.when(0, 0))
    images, _, y = Synthesis(params, server, teacher_of(run), trained_classes(run)).pool()
    return images, y


# -- the server -------------------------------------------------------------------------------------------------------


def test_images_are_recognised_and_match_the_statistics_better_than_noise(learned):
    pool = learned.server.blocks["pool"]
    y = torch.tensor(pool.labels)
    accuracy, distance = accuracy_and_distance(learned, pool.tensors["images"], y)
    rng = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, pool.tensors["images"].shape, generator=rng).to(torch.uint8)
    noise_accuracy, noise_distance = accuracy_and_distance(learned, noise, y)
    assert accuracy > 0.8
    assert noise_accuracy < 0.3
    assert distance < 0.4 * noise_distance


def test_labels_need_the_cross_entropy_and_statistics_need_their_term(learned):
    pool = learned.server.blocks["pool"]
    accuracy, distance = accuracy_and_distance(learned, pool.tensors["images"], torch.tensor(pool.labels))
    unclassified = pool_with(learned, classify=0.0)
    unmatched = pool_with(learned, statistics=0.0)
    assert accuracy_and_distance(learned, *unclassified)[0] < 0.4 < accuracy
    assert accuracy_and_distance(learned, *unmatched)[1] > 1.5 * distance


def test_the_pool_has_every_trained_class_equally_often_with_the_logits_of_the_teacher(learned, halfway):
    for run, position in ((learned, 0), (halfway, 0)):
        pool, seen = run.server.blocks["pool"], run.world.plan.seen(position)
        assert {y: pool.labels.count(y) for y in set(pool.labels)} == dict.fromkeys(seen, 20)
        assert pool.kind == "replay" and pool.tensors["images"].dtype == torch.uint8
        torch.testing.assert_close(pool.tensors["logits"], teacher_of(run)(pool.tensors["images"]).detach())


def test_the_student_learns_and_changes_the_images(learned):
    """The adversarial term, which the released configuration never reaches, is used."""
    server = learned.world.server(learned.when(0, 0))
    params = learned.method.params
    work = Synthesis(params, server, teacher_of(learned), trained_classes(learned))
    before = disagreement_on(work, learned)
    images, _, _ = work.pool()
    assert torch.equal(images, learned.server.blocks["pool"].tensors["images"])  # the same seed gives the same images
    assert disagreement_on(work, learned) < 0.7 * before  # on real examples that it was not trained on
    assert not torch.equal(images, pool_with(learned, adversary=0.0)[0])
    x = images[:64].float() / 255
    labels = torch.arange(64) % 10
    with torch.no_grad():
        plain, against = (work.loss(x, labels, student=s) for s in (False, True))
        gap = disagreement(work.student(x), work.teacher(x)[:, work.classes])
    assert float(gap) > 0
    torch.testing.assert_close(plain - against, params.adversary * gap, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def disagreement_on(work, run) -> float:
    x = run.world.bundle.test.x
    student, teacher = work.student.eval()(x), work.teacher(x)[:, work.classes]
    return float(torch.nn.functional.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="batchmean"))


def test_recorded_steps_generate_the_same_images(learned, monkeypatch):
    recorders = pytest.importorskip("recorders", reason="needs the package accel")

    def clip(grads, limit):  # as on a GPU, without reading a tensor's value
        norm = torch.stack(torch._foreach_norm(list(grads))).norm()
        torch._foreach_mul_(list(grads), (limit / (norm + 1e-6)).clamp(max=1.0))

    monkeypatch.setattr(synthesis, "clip_", clip)
    recorder = recorders.OperationRecorder()
    server = learned.world.server(learned.when(0, 0))
    recorded = replace(server, repeated=recorders.recording(recorder))
    params = learned.method.params
    classes = trained_classes(learned)
    pools = [Synthesis(params, s, teacher_of(learned), classes).pool() for s in (server, recorded)]
    assert recorder.made == 3  # steps with the student, without it, and its own
    for one, other in zip(*pools, strict=True):
        assert torch.equal(one, other)


def test_disagreement_counts_only_rows_with_the_same_prediction():
    teacher = torch.tensor([[2.0, 0.0], [2.0, 0.0]])
    student = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    p, q = teacher[0].softmax(0), student[0].softmax(0)
    assert float(disagreement(student, teacher)) == pytest.approx(float((p * (p / q).log()).sum()) / 2, abs=1e-6)


def test_the_pool_is_not_generated_again_for_an_unchanged_model(learned):
    again = learned.method.train_server(learned.world.server(learned.when(0, 0)), learned.server)
    assert again is learned.server


# -- the client -------------------------------------------------------------------------------------------------------


def test_distillation_preserves_old_logits_better_than_plain_training(halfway):
    """One turn on the second half of the classes, with and without distillation, from the same model."""
    pool = halfway.server.blocks["pool"]
    old = torch.tensor(sorted(halfway.world.plan.seen(0)))
    usual = halfway.method
    moved = {}
    accuracy = {}
    known = torch.isin(halfway.world.bundle.test.y, old)
    x = halfway.world.bundle.test.x[known]
    y = halfway.world.bundle.test.y[known]
    among = torch.zeros(10, dtype=torch.bool)
    among[old] = True
    start = teacher_of(halfway)(x).detach()
    plain = ((pool.tensors["images"], pool.tensors["logits"]), (x, start))
    for weight in (0.0, 1.0):
        halfway.method = Target(replace(usual.params, distill=weight))
        (reply,) = halfway.turns(1, 0)
        net = load_frozen(halfway.world.net, reply.weights())
        moved[weight] = [above_minimum(net(images).detach(), logits, among) for images, logits in plain]
        accuracy[weight] = float((old[net(x)[:, old].argmax(1)] == y).float().mean())
    halfway.method = usual
    generated, real = zip(moved[0.0], moved[1.0], strict=True)
    assert generated[1] < 0.5 * generated[0]  # on the images themselves
    assert real[1] < 0.7 * real[0]  # and on real examples that are stored nowhere
    assert accuracy[1.0] > accuracy[0.0]


def above_minimum(logits: torch.Tensor, target: torch.Tensor, among: torch.Tensor) -> float:
    """How far the distillation loss is above its minimum, the loss of the target itself."""
    loss = soft_cross_entropy(logits, target, among, 1.0)
    minimum = soft_cross_entropy(target, target, among, 1.0)
    return float((loss - minimum).mean())


def test_a_client_replays_the_budget_of_every_class_that_is_not_current(fresh):
    run = fresh("target", participants=3, model__norm="batch", setting="severe", **quick())
    for r in range(2):
        run.play(0, r)
    pool = run.server.blocks["pool"]
    position = 1
    for c in run.clients(position, 0):
        client = run.client(c, position, 0)
        source = run.method.source(client, inbox(run))
        old = set(pool.labels) - set(client.labels)
        epoch = source.epoch(torch.Generator().manual_seed(0))
        generated = epoch["y"][~epoch["real"]].tolist()
        assert {y: generated.count(y) for y in set(generated)} == dict.fromkeys(old, 3)
        assert epoch["y"][epoch["real"]].tolist() == client.y.tolist()
        assert client.extra_bytes == pool.bytes
    replies = run.turns(position, 0)
    for r in replies:
        client = run.client(r.client, position, 0)
        served = set(pool.labels) - set(client.labels)
        requested = set(client.seen) - set(client.labels)
        assert r.notes["replay_requested"] == 3 * len(requested)
        assert r.notes["replay_served"] == 3 * len(served)


def test_a_seen_class_that_nobody_has_trained_is_neither_generated_nor_replayed(fresh):
    """In a severe stream a position introduces classes of clients that do not take part."""
    run = fresh("target", participants=1, model__norm="batch", setting="severe", **quick())
    had: set[int] = set()
    for r in range(2):
        for c in run.clients(0, r):
            had |= set(run.client(c, 0, r).labels)
        run.play(0, r)
    seen = run.world.plan.seen(0)
    assert had < seen
    assert set(trained_classes(run)) == set(run.server.blocks["pool"].labels) == had
    client = run.client(run.clients(1, 0)[0], 1, 0)
    source = run.method.source(client, inbox(run))
    assert set(source.epoch(torch.Generator())["y"].tolist()) <= had | set(client.labels)
    (reply,) = run.turns(1, 0)
    assert reply.blocks["trained_classes"].labels == client.labels
    run.play(1, 0)
    assert set(trained_classes(run)) == had | set(client.labels)


def quick() -> dict:
    return {
        "train__rounds": 2,
        "params__budget": 3,
        "params__pool": 4,
        "synthesis_rounds": 1,
        "synthesis_steps": 2,
        "student_steps": 1,
    }


def inbox(run) -> Inbox:
    return {b: run.server.blocks[b] for b in (*MODEL, "pool")}


def test_a_pool_is_sent_to_each_client_once_and_never_back(tiny):
    run = tiny("target", setting="homogeneous", model__norm="batch", **quick())
    sent = [e for e in run.ledger.entries if e.kind == "replay"]
    assert sent and all(e.direction == "down" for e in sent)
    assert len({(e.position, e.client) for e in sent}) == len(sent)
    assert min(e.position for e in sent) == 1
    size = next(s for s in run.after_positions()).blocks["pool"].bytes
    assert {e.bytes for e in sent if e.position == 1} == {size}


def test_without_a_budget_it_is_fedavg_over_local_classes(tiny):
    plain = tiny("fedavg", setting="homogeneous", label_space="local", model__norm="batch")
    run = tiny(
        "target", setting="homogeneous", model__norm="batch", **{**quick(), "train__rounds": 3, "params__budget": 0}
    )
    assert "pool" not in run.server.blocks
    for block in MODEL:
        for name, tensor in plain.server.blocks[block].tensors.items():
            assert torch.equal(tensor, run.server.blocks[block].tensors[name])


def test_the_diagnostics_get_images_of_the_class(learned):
    pool = learned.server.blocks["pool"]
    rng = torch.Generator().manual_seed(0)
    shown = learned.method.replay(learned.world.net, learned.server, [], 3, 7, rng)
    of_class = pool.tensors["images"][torch.tensor(pool.labels) == 3]
    assert shown.space == "inputs" and len(shown.tensors[0]) == 7
    assert all((of_class == x).flatten(1).all(1).any() for x in shown.tensors[0])
    nothing = replace(learned.server, blocks={b: learned.server.blocks[b] for b in MODEL})
    assert learned.method.replay(learned.world.net, nothing, [], 3, 7, rng) is None


def test_an_encoder_without_batchnorm_is_rejected_before_a_run(fresh):
    with pytest.raises(NotApplicable, match=r"TARGET needs BatchNorm .* image encoder; set model\.norm=batch"):
        fresh("target", model__norm="group")
