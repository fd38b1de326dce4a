"""HR: an autoencoder whose decoded codes are replayed, and centroids that repel each other."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil.methods.hr import BLOCKS, STARTS, first_of_each, stored_codes
from profcil.methods.parts.centroids import (
    EQUILIBRIUM,
    descend,
    negative_distances,
    no_centroids,
    place,
    potential_gradient,
    sample_around,
)
from profcil.methods.parts.decoder import DecodedSource, ImageDecoder, decode, encode, latent_size, make_decoder
from profcil.methods.parts.starting_model import start_weights
from profcil.metrics.client_first import summary
from profcil.model.layers import BatchNorm, unit

LEARNS = {"setting": "homogeneous", "optimiser": "adam", "lr": 0.003, "rebuild": 100.0, "model__width": 8}
# Two tasks of five classes.
LONGER = LEARNS | {"participants": 4, "train__epochs": 4, "stream__task_size": 5, "seed": 100}


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=rng(seed))


def distances(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a[:, None] - b[None]).norm(dim=2)


def potential(points: torch.Tensor, sigma: float) -> torch.Tensor:
    """V summed over all pairs."""
    sixth_power = (sigma / torch.nn.functional.pdist(points.double())) ** 6
    return (4 * (sixth_power**2 - sixth_power)).sum()


def autoencoder(run) -> dict:
    return {b: run.server.weights()[b] for b in BLOCKS}


# -- centroids --------------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 6), st.integers(0, 99), st.floats(0.01, 1.0))
def test_with_enough_dimensions_every_pair_reaches_the_least_potential(n, seed, width):
    placed = descend(width * randn(n, 12, seed=seed), torch.zeros(0, 12), 5.0, rng())
    apart = torch.nn.functional.pdist(placed)
    torch.testing.assert_close(apart, torch.full_like(apart, 5 * EQUILIBRIUM), rtol=1e-3, atol=0)
    assert float(potential(placed, 5.0)) == pytest.approx(-n * (n - 1) / 2, abs=1e-3)  # −ε a pair, the minimum


def test_the_gradient_is_that_of_the_potential():
    points = 2 * randn(5, 3).double()
    points.requires_grad_()
    (expected,) = torch.autograd.grad(potential(points, 1.5), points)
    torch.testing.assert_close(potential_gradient(points.detach(), points.detach(), 1.5) / 1.5, expected)


def test_new_centroids_are_repelled_by_old_ones_which_do_not_move():
    old = descend(randn(4, 12), torch.zeros(0, 12), 5.0, rng())
    bank = replace(no_centroids(old[0]), tensors={"mean": old}, labels=(1, 3, 5, 8))
    fresh = replace(bank, tensors={"mean": old[:2] + 0.01}, labels=(0, 7))  # very close to two of them
    placed = place(bank, fresh, 5.0, rng())
    assert placed.labels == (0, 1, 3, 5, 7, 8)
    assert torch.equal(placed.tensors["mean"][[1, 2, 3, 5]], old)
    gaps = distances(placed.tensors["mean"][[0, 4]], placed.tensors["mean"])
    assert float(gaps[gaps > 0].min()) > 0.98 * 5 * EQUILIBRIUM


def test_equal_means_separate_and_a_single_one_stays():
    pair = descend(torch.zeros(2, 4), torch.zeros(0, 4), 5.0, rng())
    assert float((pair[0] - pair[1]).norm()) == pytest.approx(5 * EQUILIBRIUM, rel=1e-3)
    single = descend(torch.ones(1, 4), torch.zeros(0, 4), 5.0, rng())
    torch.testing.assert_close(single, torch.ones(1, 4), atol=0.05, rtol=0)


def test_more_classes_than_dimensions_are_still_separated():
    placed = descend(0.1 * randn(12, 2), torch.zeros(0, 2), 5.0, rng())
    assert float(torch.nn.functional.pdist(placed).min()) > 0.9 * 5


def test_the_nearest_centroid_has_the_largest_score_and_an_absent_one_the_smallest():
    mean = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    bank = replace(no_centroids(torch.zeros(2)), tensors={"mean": mean}, labels=(2, 5))
    scores = negative_distances(torch.tensor([[0.0, 1.0], [3.0, 3.0]]), bank, 7)
    torch.testing.assert_close(scores[:, [2, 5]], torch.tensor([[-1.0, -18.0], [-18.0, -1.0]]))
    assert scores.argmax(1).tolist() == [2, 5]
    assert (scores[:, [0, 1, 3, 4, 6]] == torch.finfo(torch.float32).min).all()
    assert negative_distances(torch.zeros(1, 2), no_centroids(torch.zeros(2)), 3).shape == (1, 3)


# -- the decoder ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (3, 64, 64), (2, 7, 9), (1, 1, 1)])
def test_a_decoder_gives_images_of_the_given_shape(shape, norm):
    images = ImageDecoder(5, shape, norm)(randn(2, 5)).detach()
    assert images.shape == (2, *shape)
    assert 0 <= float(images.min()) <= float(images.max()) <= 1


def test_sizes_for_32_pixels_are_the_papers_and_small_images_have_a_minimum():
    decoder = ImageDecoder(latent_size((3, 32, 32)), (3, 32, 32), "batch")
    assert latent_size((3, 32, 32)) == 307
    assert sum(p.numel() for p in decoder.parameters()) == 1_411_459
    assert latent_size((1, 8, 8)) == 16


def test_the_decoder_has_the_normalisation_of_the_encoder(fresh):
    for norm in ("batch", "group"):
        run = fresh("hr", model__norm=norm)
        assert any(isinstance(m, BatchNorm) for m in run.world.net.decoder.modules()) == (norm == "batch")
    made = [make_decoder(4, (1, 8, 8), run.world.net.base, rng(7)) for _ in range(2)]
    assert torch.equal(made[0].widen.weight, made[1].widen.weight)


def test_a_stored_code_is_decoded_better_than_a_random_one(fresh):
    run = fresh("hr", **LEARNS, participants=4, train__epochs=6)
    for r in range(3):
        run.play(0, r)
    for c, own in run.state.private.items():
        client = run.client(c, 0, 2)
        codes = own["later"]
        order = torch.randperm(len(client.current), generator=rng(client.number("keep")))
        kept = order[first_of_each(client.y[order], 20)]
        real = unit(client.examples.inputs(client.current[kept])[0])
        assert torch.equal(own["later_y"], client.y[kept])
        random = codes.mean() + codes.std() * randn(*codes.shape)
        near, far = ((decode(run.world.net, autoencoder(run), z) - real).square().mean() for z in (codes, random))
        assert near < 0.75 * far
        own_class = real[client.y[kept] == client.labels[0]].mean(0)
        images = decode(run.world.net, autoencoder(run), codes)
        gaps = [float((images[own["later_y"] == y] - own_class).square().mean()) for y in client.labels]
        assert gaps[0] < gaps[1]


# -- a client's turn --------------------------------------------------------------------------------------------------


def second_task(run):
    """A client in the second round of the second position, and its inbox."""
    for r in range(run.world.config.train.rounds):
        run.play(0, r)
    run.state.server = run.method.end_position(run.server, run.when(0, 0))
    run.play(1, 0)
    c = next(c for c in run.clients(1, 1) if c in run.state.private)
    client = run.world.client(c, run.when(1, 1), run.state.private[c])
    return client, {n: run.server.blocks[n] for n in run.method.broadcast_to(c, run.server, client.when)}


def test_the_loss_is_the_papers_sum(fresh):
    run = fresh("hr", setting="homogeneous", budget=3, pull=7.0, distill=0.5, rebuild=2.0, participants=4)
    client, inbox = second_task(run)
    phase = next(run.method.turn(client, inbox))
    net = run.world.net
    net.load(phase.weights)
    net.eval()
    net.augment = False
    batch = phase.source.epoch(rng()) | phase.constants
    x = batch["x"]
    y = batch["y"]
    start = start_weights(inbox, BLOCKS)
    loss = phase.loss(net, batch | {"rng": rng(3)}).detach()
    with torch.no_grad():
        mu, logvar = net.latent(net.base(x))
        z = mu + logvar.exp().sqrt() * torch.randn(mu.shape, generator=rng(3))
        image = net.decoder(z)
        kl = torch.distributions.kl_divergence(
            torch.distributions.Normal(mu, logvar.exp().sqrt()), torch.distributions.Normal(0.0, 1.0)
        ).sum(1)
        centre = dict(zip(inbox["centroids"].labels, inbox["centroids"].tensors["mean"], strict=True))
        away = (z - torch.stack([centre[int(v)] for v in y])).square().sum(1)
        net.load(start)
        old_mu, old_logvar = net.latent(net.base(x))
        old_image = net.decoder(old_mu + old_logvar.exp().sqrt() * torch.randn(mu.shape, generator=rng(3)))
        hold = (mu - old_mu).square().sum(1) + (image - old_image).square().flatten(1).sum(1)
        total = 2 * (x - image).square().flatten(1).sum(1) + kl + 7 * away + 0.5 * hold
    torch.testing.assert_close(loss, total.mean() / 64)
    changed = [not torch.equal(t, inbox["base"].tensors[k]) for k, t in start["base"].items()]
    assert any(changed)  # the starting model differs from the broadcast one


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_the_distillation_is_zero_at_the_starting_model_and_positive_away_from_it(fresh, norm):
    """In training mode and on augmented images."""
    run = fresh("hr", setting="homogeneous", budget=3, participants=4, model__norm=norm)
    client, inbox = second_task(run)
    phase = next(run.method.turn(client, inbox))
    net = run.world.net
    batch = phase.source.epoch(rng()) | phase.constants

    def distillation() -> float:
        losses = [phase.loss(net.train(), batch | {"rng": rng(3), "distill": torch.tensor(w)}) for w in (0.0, 1.0)]
        return float((losses[1] - losses[0]).detach())

    start = start_weights(inbox, BLOCKS)
    net.load(phase.weights | start)
    assert net.augment
    assert distillation() == 0
    for block in BLOCKS:
        net.load(phase.weights | start | {block: phase.weights[block]})
        assert distillation() > 0


def test_training_leaves_the_starting_model_as_it_was(fresh):
    run = fresh("hr", setting="homogeneous", budget=3, participants=4)
    client, inbox = second_task(run)
    phase = next(run.method.turn(client, inbox))
    start = start_weights(inbox, BLOCKS)
    done = run.world.executor.run([phase])[client.id]
    for block, name in zip(BLOCKS, STARTS, strict=True):
        assert all(torch.equal(done.weights[name][k], t) for k, t in start[block].items())
        assert any(not torch.equal(done.weights[block][k], t) for k, t in phase.weights[block].items())


def test_in_the_first_position_there_is_no_old_model(fresh):
    run = fresh("hr", setting="homogeneous")
    server = run.method.absorb(run.server, [], run.when(0, 0))
    assert STARTS[0] not in server.blocks
    run.play(0, 0)
    client = run.client(run.clients(0, 1)[0], 0, 1)
    inbox = {n: run.server.blocks[n] for n in run.method.broadcast(run.server, client.when) if n in run.server.blocks}
    phase = next(run.method.turn(client, inbox))
    assert float(phase.constants["distill"]) == 0
    assert phase.source.replayed == 0


def test_real_and_decoded_images_get_the_same_augmentation(fresh, monkeypatch):
    run = fresh("hr", setting="homogeneous", budget=3, participants=4)
    client, inbox = second_task(run)
    phase = next(run.method.turn(client, inbox))
    net = run.world.net
    seen = []
    net.load(phase.weights)
    original = net.weak
    monkeypatch.setattr(net, "weak", lambda inputs, g: seen.append(inputs) or original(inputs, g))
    rows = phase.source.epoch(rng())
    phase.loss(net, rows | phase.constants | {"rng": rng()})
    assert len(seen) == 1
    assert seen[0][0].shape == (len(client.current) + 3 * 2, 1, 8, 8)
    assert not torch.equal(original((rows["x"],), rng())[0], rows["x"])


def test_an_epoch_has_every_real_image_once_and_the_quota_of_every_old_class():
    y = torch.tensor([4, 4, 9, 0, 0, 0, 7])
    source = DecodedSource(torch.arange(7.0), y, 2, y[3:])
    rows = source.epoch(rng())
    assert source.size == len(rows["y"]) == 3 + 2 * 2
    assert rows["x"][:3].tolist() == [0.0, 1.0, 2.0]
    assert rows["y"][3:].tolist() == [0, 0, 7, 7]
    assert len(set(rows["x"][3:5].tolist())) == 2
    alone = DecodedSource(torch.arange(2.0), y[:2], 5, y[:0])
    assert alone.size == len(alone.epoch(rng())["y"]) == 2


def test_classes_without_codes_are_sampled_around_their_centroid(fresh):
    run = fresh("hr", setting="homogeneous", budget=400, pull=4.0, participants=4)
    client, inbox = second_task(run)
    codes, y = stored_codes(client, inbox)
    lost, kept = sorted(set(y.tolist()))
    z, labels = run.method.codes_to_replay(client, inbox, codes[y == kept], y[y == kept])
    assert torch.equal(z[labels == kept], codes[y == kept])
    drawn = z[labels == lost]
    centre = inbox["centroids"].tensors["mean"][inbox["centroids"].labels.index(lost)]
    assert len(drawn) == 400
    torch.testing.assert_close(drawn.mean(0), centre, atol=0.1, rtol=0)
    assert float((drawn - centre).std()) == pytest.approx(9**-0.5, rel=0.05)  # 1/√(1 + 2λ)
    other = replace(client, when=run.when(1, 2))
    assert not torch.equal(run.method.codes_to_replay(other, inbox, codes[:0], y[:0])[0][:400], drawn)
    assert set(run.method.codes_to_replay(client, inbox, codes[:0], y[:0])[1].tolist()) == {lost, kept}
    assert sample_around(centre[None], 4.0, rng()).shape == (1, len(centre))


def test_classes_that_others_learn_in_this_position_are_not_replayed(tiny):
    run = tiny("hr")  # severe: orders differ
    before = run.before()
    checked = 0
    for p in range(run.world.plan.positions):
        for r, c in [(turn, who) for turn in range(3) for who in run.clients(p, turn)]:
            learned = set(before[p, 0].blocks["learned"].labels)
            state = before[p, r]
            inbox = {n: state.blocks[n] for n in run.method.broadcast(state, run.when(p, r)) if n in state.blocks}
            client = run.client(c, p, r)
            labels = set(run.method.codes_to_replay(client, inbox, *stored_codes(client, inbox))[1].tolist())
            assert labels == learned - set(client.labels)
            checked += len(set(state.blocks["centroids"].labels) - learned - set(client.labels)) > 0
    assert checked  # another client's new class did occur


@pytest.mark.parametrize("setting", ["homogeneous", "severe"])
def test_a_client_stores_codes_of_its_own_classes_within_the_budget(tiny, setting):
    run = tiny("hr", setting=setting, budget=6)
    plan, y = run.world.plan, run.world.bundle.train.y
    assert run.state.private
    for c, own in run.state.private.items():
        took = [p for p in range(plan.positions) if any(c in run.clients(p, r) for r in range(3))]
        held = sum(torch.bincount(y[torch.from_numpy(plan.samples(c, p).copy())], minlength=10) for p in took)
        assert torch.bincount(own["later_y"], minlength=10).tolist() == held.clamp(max=6).tolist()
        assert own["later"].shape == (len(own["later_y"]), 16)
        assert int(own["position"]) == took[-1]
        assert set(own["y"].tolist()).isdisjoint(plan.observed(c, took[-1]))


def test_codes_count_as_memory_and_are_re_encoded_once_a_position(fresh):
    run = fresh("hr", setting="homogeneous", budget=5, train__epochs=2, participants=4)
    client, inbox = second_task(run)
    before = {k: t.clone() for k, t in client.private.items()}
    assert len(before["codes"]) == 2 * 5
    reply = next(r for r in run.turns(1, 1) if r.client == client.id)
    own = run.state.private[client.id]
    assert torch.equal(own["codes"], before["codes"])  # unchanged until the position ends
    old = torch.isin(own["later_y"], own["y"])
    decoded = decode(run.world.net, start_weights(inbox, BLOCKS), before["codes"])
    expected = encode(run.world.net, reply.weights(), decoded)
    torch.testing.assert_close(own["later"][old], expected)  # f_new(g_old(m))
    assert (reply.notes["replay_requested"], reply.notes["replay_served"]) == (2 * 5 * 2, 2 * 5 * 2)
    start = [t for tensors in start_weights(inbox, BLOCKS).values() for t in tensors.values()]
    assert reply.notes["extra_bytes"] == sum(t.numel() * t.element_size() for t in (*own.values(), *start))
    again = replace(client, private=own, when=run.when(2, 0))
    assert torch.equal(stored_codes(again, inbox)[0], own["later"])
    assert reply.private is None  # the private state does not leave the client


def test_the_starting_model_counts_as_memory_if_there_is_one(fresh):
    run = fresh("hr", setting="homogeneous", budget=5, participants=4)
    for position, round in ((0, 1), (0, 2), (1, 0), (1, 1)):
        if (position, round) == (1, 0):
            run.state.server = run.method.end_position(run.server, run.when(0, 2))
        run.play(position, round)
        model = sum(run.server.blocks[b].bytes for b in BLOCKS)
        for reply in run.turns(position, round):
            codes = sum(t.numel() * t.element_size() for t in run.state.private[reply.client].values())
            assert reply.notes["extra_bytes"] == codes + (model if position else 0)


def test_the_first_of_each_class():
    assert first_of_each(torch.tensor([3, 0, 3, 3, 0]), 2).tolist() == [True, True, True, False, True]
    assert not first_of_each(torch.tensor([1, 1]), 0).any()


# -- the stream -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["homogeneous", "severe"])
def test_in_a_stream_old_centroids_never_change_and_new_ones_are_separated(tiny, setting):
    run = tiny("hr", setting=setting)
    banks = [server.blocks["centroids"] for _, _, server in run.trail]
    for one, two in pairwise(banks):
        now = dict(zip(two.labels, two.tensors["mean"], strict=True))
        assert all(torch.equal(now[y], row) for y, row in zip(one.labels, one.tensors["mean"], strict=True))
    plan = run.world.plan
    met = {y for p in range(plan.positions) for r in range(3) for c in run.clients(p, r) for y in plan.observed(c, p)}
    assert set(banks[-1].labels) == met
    gaps = torch.nn.functional.pdist(banks[-1].tensors["mean"])
    assert float(gaps.min()) > 0.95 * 5 * EQUILIBRIUM


def test_centroids_start_from_the_mean_codes_of_all_clients_with_the_class(fresh):
    run = fresh("hr", setting="homogeneous")
    when = replace(run.when(0, 0), stage="refresh")
    clients = [run.world.client(c, when) for c in run.clients(0, 0)]
    state = run.method.absorb(run.server, [run.method.survey(c, run.server.blocks) for c in clients], when)
    x, y = (torch.cat(parts) for parts in zip(*((c.examples.inputs(c.current)[0], c.y) for c in clients), strict=True))
    codes = encode(run.world.net, autoencoder(run), x)
    means = state.blocks["means"]
    for label, mean in zip(means.labels, means.tensors["mean"], strict=True):
        torch.testing.assert_close(mean, codes[y == label].mean(0), atol=1e-4, rtol=1e-4)
    placed = run.method.train_server(run.world.server(when), state)
    assert "means" not in placed.blocks
    survey = run.method.survey(clients[0], placed.blocks)
    assert not survey.blocks  # all its classes have a centroid


def test_the_old_model_is_the_one_of_the_first_round_and_is_not_sent_again(tiny):
    run = tiny("hr", setting="homogeneous", participants=4)
    for what, when, server in run.trail:
        if what == "round":
            assert (STARTS[0] in server.blocks) == (when.position > 0)
    model = sum(t.numel() * 4 for b in BLOCKS for t in run.server.weights()[b].values())
    for c in range(4):
        sent = [e for e in run.ledger.entries if (e.kind, e.direction, e.client) == ("model", "down", c)]
        down = [sum(e.bytes for e in sent if e.stage != "warmup" and e.position == p) for p in range(2)]
        assert down == [3 * model, 3 * model]
    up = run.ledger.total(kind="prototype", direction="up", stage="refresh")
    assert up == 4 * 10 * (16 * 4 + 4)  # a mean code and a count, of each class by each client, once


def test_replay_and_distillation_forget_less(tiny):
    results = {}
    for budget, distill in ((0, 0.0), (20, 1.0)):
        run = tiny("hr", budget=budget, distill=distill, **LONGER)
        s = run.state.scores
        results[budget] = summary(s.correct, s.total, run.world.plan.orders)
    assert results[20]["af"] < 0.5 * results[0]["af"]  # it is 0.2 to 0.3 on three seeds
    assert results[20]["faa"] > results[0]["faa"]


def test_the_diagnostics_get_decoded_images(tiny):
    run = tiny("hr", budget=20, distill=1.0, **LONGER)
    clients = [run.world.client(c, run.when(1, 2), own) for c, own in sorted(run.state.private.items())]
    label = run.server.blocks["learned"].labels[0]
    for who in (clients, []):  # from codes, or without clients from the centroid
        samples = run.method.replay(run.world.net, run.server, who, label, 7, rng())
        assert samples.space == "inputs"
        assert samples.tensors[0].shape == (7, 1, 8, 8)
    assert run.method.replay(run.world.net, fresh_state(run), clients, label, 7, rng()) is None


def fresh_state(run):
    return run.method.begin(run.world.net.weights(("base", "adapter", "head", "latent", "decoder")))


# -- edges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_clients_with_one_example_and_a_single_client(fresh, assign_samples, tiny, norm):
    def owner(labels, tasks):
        given = np.full(len(labels), -1)
        for task in tasks:
            for label in task:
                given[np.flatnonzero(labels == label)[5:25]] = 2
            given[np.flatnonzero(labels == task[0])[0]] = 0
            given[np.flatnonzero(labels == task[1])[0]] = 1
        return given

    alone = tiny("hr", clients=1, participants=1, setting="homogeneous", model__norm=norm)
    assign_samples(owner)
    few = fresh("hr", clients=3, participants=3, model__norm=norm).stream()
    for run in (alone, few):
        assert all(bool(torch.isfinite(t).all()) for b in run.server.blocks.values() for t in b.tensors.values())
    assert len(few.state.private[0]["later_y"]) == 5  # one example a task


def test_a_class_of_a_late_client_gets_its_centroid_when_the_client_participates(fresh, assign_samples):
    """Two clients with one class each; one participates per round."""
    assign_samples(lambda labels, tasks: [int(y == tasks[0][1]) if y in tasks[0] else -1 for y in labels])
    run = fresh("hr", clients=2, participants=1)
    rounds = [run.clients(0, r) for r in range(3)]
    assert len(set(rounds)) > 1
    for r in range(3):
        run.play(0, r)
        held = {y for rr in range(r + 1) for c in rounds[rr] for y in run.world.plan.observed(c, 0)}
        assert set(run.server.blocks["centroids"].labels) == held


def test_without_a_centroid_a_client_trains_nothing_and_changes_nothing(fresh, same_bits):
    run = fresh("hr", setting="homogeneous")
    client = run.client(run.clients(0, 0)[0], 0, 0)
    turn = run.method.turn(client, run.server.blocks)
    with pytest.raises(StopIteration) as end:
        next(turn)
    reply = end.value.value
    assert not reply.blocks
    assert same_bits(run.method.aggregate(run.server, [reply], client.when), run.server)


def test_it_is_for_images_only(fresh, monkeypatch):
    run = fresh("hr")
    net = run.world.net
    assert run.method.misfit(net) == ""
    monkeypatch.setattr(net, "facts", replace(net.facts, modality="text"))
    assert run.method.misfit(net) == "HR is made for image, not for text"
