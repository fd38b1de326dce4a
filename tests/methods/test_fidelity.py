"""The methods compared with the paper's formulas, written out here."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.diagnostics.probe import nearest_mean_accuracy
from profcil.engine import warmup
from profcil.engine.client import embed
from profcil.engine.evaluation import evaluation_features, examine
from profcil.methods.promax import calibration_subset
from profcil.model import augmentations
from profcil.model.losses import contrast
from profcil.model.net import MODEL, Tail

PLAIN = {"momentum": 0.0, "weight_decay": 0.0, "clip": 0.0, "optimiser": "sgd"}  # a step is −lr · gradient
BATCH_NORM = {"model__norm": "batch", "participants": 4}


def turn_of(run: Any, client: Any) -> Any:
    """A client's turn, before its first phase."""
    names = run.method.broadcast(run.server, client.when)
    return run.method.turn(client, {n: run.server.blocks[n] for n in names})


def fit_of(run: Any, id: int, position: int = 0, round: int = 0) -> Any:
    """The fitting phase of a client; nothing is trained."""
    return next(turn_of(run, run.client(id, position, round)))


def trained(weights: dict[str, dict[str, Tensor]]) -> Any:
    """A phase's result with these weights."""
    return type("Trained", (), {"weights": weights, "loss": 0.0, "steps": 1})


def batch_of(phase: Any, size: int = 12) -> dict[str, Any]:
    """The first examples of a phase, as a step sees them."""
    rows = phase.source.epoch(torch.Generator())
    index = rows["index"][:size]
    rng = torch.Generator().manual_seed(3)
    return {"inputs": phase.inputs(index), "y": rows["y"][:size], "rng": rng, **phase.constants}


def by_hand(a: Tensor, b: Tensor, temperature: float) -> float:
    """The symmetric contrastive loss, computed row by row."""
    total = 0.0
    for one, two in ((a, b), (b, a)):
        for i, view in enumerate(one):
            similarities = [exp(float(view @ other) / temperature) for other in two]
            total += -log(similarities[i] / sum(similarities))
    return total / (2 * len(a))


def supervised(run: Any, u: Tensor, batch: dict[str, Any]) -> float:
    """Cross-entropy over the allowed classes only."""
    allowed = batch["allowed"].nonzero().flatten()
    place = torch.searchsorted(allowed, batch["y"])
    return float(F.cross_entropy(run.world.net.classify(u)[:, allowed], place))


# -- the auxiliary loss -----------------------------------------------------------------------------------------------


def two_views() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    first = F.normalize(torch.randn(5, 4, generator=rng), dim=1)
    second = F.normalize(torch.randn(5, 4, generator=rng), dim=1)
    return first, second


def test_the_contrastive_loss_equals_its_formula():
    """The negative log-probability of the positive, averaged over both directions."""
    a, b = two_views()
    assert float(contrast(a, b, 0.3)) == pytest.approx(by_hand(a, b, 0.3), rel=1e-5)
    assert float(contrast(a, a, 0.3)) < float(contrast(a, b, 0.3))


def test_the_contrastive_loss_of_several_clients_equals_the_formula_for_each():
    batch = pytest.importorskip("profcil.accel.cpu.client_batch", reason="needs the package accel").ClientBatch
    a, b = two_views()
    stacked = contrast(batch(torch.stack([a, b])), batch(torch.stack([b, b])), 0.3).of
    assert stacked.tolist() == pytest.approx([by_hand(a, b, 0.3), by_hand(b, b, 0.3)], rel=1e-5)


@pytest.mark.parametrize("accelerate", ["auto", "off"])
@pytest.mark.parametrize("settings", [{}, {"auxiliary": 2.0, "params__temperature": 0.1}], ids=["defaults", "others"])
def test_the_plastic_loss_is_supervised_plus_weight_times_auxiliary(fresh, settings, accelerate):
    """The loss of one batch, with the same random views. The default weight is 0.05, the default temperature 0.5."""
    run = fresh("pro", all_seen=True, accelerate=accelerate, **settings)
    weight = settings.get("auxiliary", 0.05)
    temperature = settings.get("params__temperature", 0.5)
    phase = fit_of(run, run.clients(0, 0)[0])
    net = run.world.net
    net.load(phase.weights)
    found = float(phase.loss(net, batch_of(phase)).detach())
    batch = batch_of(phase)
    rng = batch["rng"]
    with torch.no_grad():
        first = net.project(net.base(*augmentations.strong(net.facts, batch["inputs"], rng)))
        second = net.project(net.base(*augmentations.strong(net.facts, batch["inputs"], rng)))
        u = net.base(*augmentations.weak(net.facts, batch["inputs"], rng))
        plain = supervised(run, u, batch)
        expected = plain + weight * by_hand(first, second, temperature)
        assert plain > 0.1  # several classes compete
    assert found == pytest.approx(expected, rel=1e-4)


def test_the_auxiliary_loss_sees_strong_views_and_the_supervised_one_weak_views(fresh, monkeypatch):
    """If all strong views are equal, positives and negatives have the same similarity: the auxiliary loss is log n."""
    run = fresh("pro", all_seen=True)
    phase = fit_of(run, run.clients(0, 0)[0])
    net = run.world.net
    net.load(phase.weights)
    batch = batch_of(phase)
    monkeypatch.setattr(net, "strong", lambda inputs, rng: tuple(torch.ones_like(x.float()) for x in inputs))
    monkeypatch.setattr(net, "weak", lambda inputs, rng: tuple(x.float().flip(-1) for x in inputs))
    with torch.no_grad():
        u = net.base(*(x.float().flip(-1) for x in batch["inputs"]))
        expected = supervised(run, u, batch) + 0.05 * log(len(u))
    assert float(phase.loss(net, batch).detach()) == pytest.approx(expected, rel=1e-5)


def test_all_clients_of_a_round_have_the_same_projector_and_rounds_differ(fresh):
    """So that all bases that are averaged were regularised in the same way."""
    run = fresh("pro", setting="homogeneous")

    def projectors(position: int, round: int) -> list[Tensor]:
        fits = [fit_of(run, id, position, round) for id in run.world.plan.active(position)]
        return [torch.cat([t.flatten() for t in fit.weights["projector"].values()]) for fit in fits]

    first = projectors(0, 0)
    assert len(first) > 1
    assert all(torch.equal(one, first[0]) for one in first)
    for moment in ((0, 1), (1, 0)):
        assert not torch.equal(projectors(*moment)[0], first[0])
    assert torch.equal(projectors(0, 0)[-1], first[0])


# -- the turn ---------------------------------------------------------------------------------------------------------


def test_current_features_for_rehearsal_come_from_the_fitted_base(fresh):
    """In a plastic round, current features are computed with the base that was just fitted."""
    run = fresh("pro")
    client = run.client(run.clients(0, 0)[0], 0, 0)
    turn = turn_of(run, client)
    fit = next(turn)
    fitted = {b: {k: t + 0.05 for k, t in tensors.items()} for b, tensors in fit.weights.items()}
    rehearse = turn.send(trained(fitted))
    expected = embed(client.net, fitted["base"], client.examples, client.current)
    broadcast = embed(client.net, fit.weights["base"], client.examples, client.current)
    assert torch.equal(rehearse.source.features, expected)
    assert not torch.allclose(expected, broadcast)


def test_current_features_of_a_frozen_round_come_from_the_broadcast_base(fresh):
    """The base is not fitted; rehearsal starts from the fitted adapter and head."""
    run = fresh("pro")
    client = run.client(run.clients(0, 2)[0], 0, 2)
    turn = turn_of(run, client)
    fit = next(turn)
    fitted = fit.weights | {b: {k: t + 0.05 for k, t in fit.weights[b].items()} for b in ("adapter", "head")}
    rehearse = turn.send(trained(fitted))
    expected = embed(client.net, run.server.blocks["base"], client.examples, client.current)
    assert torch.equal(rehearse.source.features, expected)
    assert torch.equal(rehearse.weights["head"]["weight"], fitted["head"]["weight"])


def test_features_are_cached_by_version_of_the_base(fresh):
    """Features are computed again for a new version of the base, and reused for the same one."""
    run = fresh("pro")
    client = run.client(run.clients(0, 0)[0], 0, 0)
    old = run.server.blocks["base"]
    other = {k: t + 0.05 for k, t in old.tensors.items()}
    new = run.server.put(base=replace(old, tensors=other)).blocks["base"]
    first = client.features(old)
    assert torch.equal(client.features(new), embed(client.net, other, client.examples, client.current))
    assert not torch.allclose(client.features(new), first)
    assert client.features(old) is first


def test_pseudo_features_spread_by_the_noise_times_the_remembered_spread(fresh):
    """Rehearsal draws μ + γ σ ε of every remembered class that is not current."""
    run = fresh("pro", noise=0.5, quota=400)
    for round in range(3):
        run.play(0, round)
    client = run.client(run.clients(1, 0)[0], 1, 0)
    turn = turn_of(run, client)
    rehearse = turn.send(trained(next(turn).weights))
    epoch = rehearse.source.epoch(torch.Generator().manual_seed(0))
    memory = run.server.blocks["memory"]
    old = [y for y in memory.labels if y not in client.labels]
    assert old
    for label in old:
        row = memory.labels.index(label)
        spread = memory.tensors["spread"][row]
        wide = spread > 0.01
        away = (epoch["u"][epoch["y"] == label] - memory.tensors["mean"][row])[:, wide] / spread[wide]
        assert len(away) == 400
        assert float(away.mean()) == pytest.approx(0.0, abs=0.05)
        assert float(away.std()) == pytest.approx(0.5, rel=0.1)


def test_every_client_round_position_and_phase_has_its_own_seed(fresh):
    """The seeds are reproducible."""
    run = fresh("pro", setting="homogeneous")
    moments = [(id, position, round) for id in (0, 1) for position in (0, 1) for round in (0, 1)]
    seeds = []
    for moment in moments:
        turn = turn_of(run, run.client(*moment))
        fit = next(turn)
        seeds += [fit.seed, turn.send(trained(fit.weights)).seed]
    assert len(set(seeds)) == len(seeds) == 16
    assert fit_of(run, *moments[0]).seed == seeds[0]


@pytest.mark.parametrize(("method", "name", "factor"), [("fedprox", "mu", 0.5), ("pro", "proximal", 1.0)])
def test_the_proximal_term_has_its_factor(fresh, method, name, factor):
    """Two whole-batch steps against autograd on the objective: FedProx adds μ/2 ‖w − w_g‖², PRO λ ‖w − w_g‖²."""
    pull = 3.0
    settings = {f"train__{k}": v for k, v in PLAIN.items()} | {"train__epochs": 2, "train__batch": 0, "lr": 0.05}
    settings |= {"auxiliary": 0.0} if method == "pro" else {}
    run = fresh(method, all_seen=True, train__augment=False, **{name: pull}, **settings)
    id = run.clients(0, 0)[0]
    phase = fit_of(run, id)
    net = run.world.net
    net.load(phase.weights)
    net.requires_grad_(True)
    net.train()
    moving = net.trainable(MODEL)
    start = [p.detach().clone() for p in moving]
    rows = phase.source.epoch(torch.Generator())
    for _ in range(2):
        loss = phase.loss(net, {"inputs": phase.inputs(rows["index"]), "y": rows["y"], "rng": None, **phase.constants})
        loss = loss + factor * pull * sum((p - s).square().sum() for p, s in zip(moving, start, strict=True))
        gradients = torch.autograd.grad(loss, moving)
        with torch.no_grad():
            for p, slope in zip(moving, gradients, strict=True):
                p.sub_(slope, alpha=0.05)
    expected = net.weights(MODEL)
    assert not torch.allclose(expected["head"]["weight"], phase.weights["head"]["weight"], atol=1e-3)
    found = run.world.executor.run([phase])[id].weights
    for block in MODEL:
        for k, t in expected[block].items():
            torch.testing.assert_close(found[block][k], t, rtol=1e-4, atol=1e-6)


def test_fedssi_measures_importance_along_the_tied_surrogate(fresh):
    """Two whole-batch steps by hand: v ← v − η(∇ℓ + q(v − w)) with q = (1 − λ)/2λ, and Ω = max(s, 0)/((v − w)² + ξ)."""
    settings = {f"train__{k}": v for k, v in PLAIN.items()} | {"train__batch": 0, "lr": 0.2, "train__augment": False}
    run = fresh("fedssi", mix=0.25, xi=0.001, walk_epochs=2, **settings)
    client = run.client(run.clients(0, 0)[0], 0, 0)
    allowed = client.allowed(client.seen)
    weights = run.server.weights()
    found = run.method.surrogate_importance(client, weights, allowed)["head.weight"]
    net = run.world.net
    net.load(weights)
    net.requires_grad_(True)
    net.train()
    moving = net.trainable(MODEL)
    start = [p.detach().clone() for p in moving]
    head = len(moving) - 1  # the head is last and has one parameter
    path = torch.zeros_like(start[head])
    for _ in range(2):
        before = moving[head].detach().clone()
        batch = {"inputs": client.examples.inputs(client.current), "y": client.y, "allowed": allowed, "rng": None}
        gradients = torch.autograd.grad(run.method.fit_loss(net, batch), moving)
        with torch.no_grad():
            for p, slope, origin in zip(moving, gradients, start, strict=True):
                p.sub_(slope + 1.5 * (p - origin), alpha=0.2)
        path -= gradients[head] * (moving[head].detach() - before)
    moved = moving[head].detach() - start[head]
    expected = path.clamp(min=0) / (moved.square() + 0.001)
    assert float(expected.max()) > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


# -- BatchNorm --------------------------------------------------------------------------------------------------------


def normalised(x: Tensor, base: dict[str, Tensor], layer: str) -> Tensor:
    """BatchNorm by the running statistics."""
    mean = base[f"{layer}.running_mean"].view(-1, 1, 1)
    var = base[f"{layer}.running_var"].view(-1, 1, 1)
    scale = base[f"{layer}.weight"].view(-1, 1, 1)
    return (x - mean) / (var + 1e-5).sqrt() * scale + base[f"{layer}.bias"].view(-1, 1, 1)


def encoded(net: Any, base: dict[str, Tensor], x: Tensor) -> Tensor:
    """The convolutional base on digits, layer by layer, in evaluation mode."""
    x = net.base.pixels(x)
    for number in (1, 2):
        x = F.conv2d(x, base[f"conv{number}.weight"], padding=1)
        x = F.max_pool2d(normalised(x, base, f"norm{number}").relu(), 2)
    return F.linear(x.flatten(1), base["out.weight"], base["out.bias"]).relu()


def test_features_are_computed_by_running_statistics(fresh):
    """Features of clients and of evaluation do not depend on the other examples of a batch."""
    run = fresh("pro", **BATCH_NORM)
    for round in range(3):
        run.play(0, round)
    base = dict(run.server.blocks["base"].tensors)
    assert float((base["norm1.running_var"] - 1).abs().max()) > 0.01  # the statistics were updated
    before = {k: t.clone() for k, t in base.items()}
    client = run.client(run.clients(0, 2)[0], 0, 2)
    expected = encoded(client.net, base, client.examples.inputs(client.current)[0])
    run.world.forget_features()
    torch.testing.assert_close(client.features(run.server.blocks["base"]), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(client.features(base, client.current[:1]), expected[:1], rtol=1e-4, atol=1e-4)
    judged = encoded(client.net, base, run.world.evaluation_examples.inputs(torch.arange(20))[0])
    found = evaluation_features(run.world, run.method, run.server)[:20]
    torch.testing.assert_close(found, judged, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(t, before[k]) for k, t in run.server.blocks["base"].tensors.items())
    assert all(torch.equal(t, before[k]) for k, t in run.world.net.base.state_dict().items())


def test_the_memory_is_measured_by_running_statistics(fresh):
    """The refresh measures class means under the base of this round, in evaluation mode."""
    run = fresh("pro", base_rounds=3, **BATCH_NORM)
    for round in range(3):
        run.play(1, round)
    base = dict(run.server.blocks["base"].tensors)
    clients = [run.client(id, 1, 2) for id in run.clients(1, 2)]
    u = torch.cat([encoded(c.net, base, c.examples.inputs(c.current)[0]) for c in clients])
    y = torch.cat([c.y for c in clients])
    memory = run.server.blocks["memory"]
    assert set(memory.labels) == set(y.tolist())
    for label, mean in zip(memory.labels, memory.tensors["mean"], strict=True):
        torch.testing.assert_close(mean, u[y == label].mean(0), rtol=1e-3, atol=1e-3)


def test_running_statistics_are_averaged_by_examples_and_frozen_with_the_base(fresh):
    """They are part of the base: averaged in plastic rounds, unchanged in frozen ones."""
    run = fresh("pro", **BATCH_NORM)
    start = dict(run.server.blocks["base"].tensors)
    replies = run.turns(1, 0)
    counts = [len(run.world.plan.samples(r.client, 1)) for r in replies]
    assert len(set(counts)) > 1
    after = run.play(1, 0).blocks["base"].tensors
    for name in ("norm1.running_mean", "norm2.running_var"):
        sent = [r.blocks["base"].tensors[name] for r in replies]
        expected = sum(n * t for n, t in zip(counts, sent, strict=True)) / sum(counts)
        torch.testing.assert_close(after[name], expected)
        assert not torch.allclose(after[name], start[name])
    run.play(1, 1)
    moved = run.server.blocks["base"]
    assert run.play(1, 2).blocks["base"] is moved


# -- the cosine head --------------------------------------------------------------------------------------------------


def test_the_cosine_head_is_sixteen_times_the_cosine(fresh):
    """For the scores of a `Tail`, and for the scores of evaluation."""
    rng = torch.Generator().manual_seed(0)
    z = torch.randn(4, 6, generator=rng)
    weight = torch.randn(3, 6, generator=rng)
    found = Tail({}, {"weight": weight}, cosine=True).score(z)
    for i, row in enumerate(z):
        for j, class_row in enumerate(weight):
            cosine = float(row @ class_row) / float(row.norm() * class_row.norm())
            assert float(found[i, j]) == pytest.approx(16 * cosine, abs=1e-4)
    run = fresh("pro", model__head="cosine")
    u = evaluation_features(run.world, run.method, run.server)[:20]
    adapted = Tail(run.server.weights()["adapter"], {}).adapt(u)
    head = run.server.weights()["head"]["weight"]
    expected = 16 * F.cosine_similarity(adapted[:, None], head[None], dim=2)
    torch.testing.assert_close(run.method.scores(run.world.net, run.server, u), expected, rtol=1e-4, atol=1e-4)


# -- alignment and calibration ----------------------------------------------------------------------------------------


def test_alignment_counts_old_classes_only(tiny):
    """The mean cosine between remembered and true means, over remembered classes that no client observes now."""
    run = tiny("pro")
    counted = 0
    both = False
    for position, server in enumerate(run.after_positions()):
        u = evaluation_features(run.world, run.method, server)
        memory = server.blocks["memory"]
        current = {y for c in run.world.plan.active(position) for y in run.world.plan.observed(int(c), position)}
        both = both or bool(current & set(memory.labels))
        old = [y for y in memory.labels if y not in current]
        found = examine(run.world, run.method, server, position, u)
        if not old:
            assert found == {}
            continue
        truth = [u[run.world.evaluation_examples.y == y].mean(0) for y in old]
        means = [memory.tensors["mean"][memory.labels.index(y)] for y in old]
        cosines = [float(a @ b / a.norm() / b.norm()) for a, b in zip(means, truth, strict=True)]
        assert found["memory"]["classes"] == len(old)
        assert found["memory"]["align"] == pytest.approx(sum(cosines) / len(old), abs=1e-5)
        counted += 1
    assert counted > 1 and both


def test_the_calibration_subset_is_fixed_for_a_position_and_changes_with_the_next(fresh):
    """It depends on client and position, and not on the round."""
    run = fresh("promax")
    client = run.client(run.clients(0, 0)[0], 0, 0)
    size = len(client.current) // 2

    def subset(**change: Any) -> list[int]:
        """The subset without cached values, as after a restart."""
        other = replace(client, when=replace(client.when, **change), kept={})
        return calibration_subset(other, size).tolist()

    first = subset()
    assert len(set(first)) == size
    assert set(first) < set(client.current.tolist())
    for round in range(1, client.when.rounds):
        assert subset(round=round) == first
        again = run.client(client.id, 0, round)
        assert calibration_subset(again, size).tolist() == first
    assert set(subset(position=1)) != set(first)
    assert set(calibration_subset(replace(client, id=client.id + 1, kept={}), size).tolist()) != set(first)


def test_promax_measures_drift_on_the_calibration_subset_in_every_round(fresh, monkeypatch):
    """Drift is measured on the same examples before and after fitting, in every round of a position."""
    run = fresh("promax", calibration=5, base_rounds=3)
    for round in range(3):
        run.play(0, round)
    id = run.clients(1, 0)[0]
    expected = calibration_subset(run.client(id, 1, 0), 5).tolist()
    measured = []
    for round in range(3):
        run.world.kept = (None, {})
        client = run.client(id, 1, round)
        features = client.features

        def noted(feature_map: Any, index: Tensor | None = None, features: Any = features) -> Tensor:
            measured.extend([] if index is None else [index.tolist()])
            return features(feature_map, index)

        monkeypatch.setattr(client, "features", noted)
        turn = turn_of(run, client)
        turn.send(trained(next(turn).weights))
    assert measured == [expected] * 6


def test_memories_move_with_the_drift_of_the_nearest_calibration_features(fresh):
    """The formula with PRO-MAX's settings: K neighbours, and τ is the median distance times the bandwidth."""
    run = fresh("promax", neighbours=2, bandwidth=0.5, warmup__rounds=0)
    means = torch.tensor([[0.0, 0.0]])
    before = torch.tensor([[1.0, 0.0], [0.0, 2.0], [4.0, 0.0]])
    after = before + torch.tensor([[1.0, 0.0], [0.0, 3.0], [50.0, 50.0]])
    near = exp(-1 / 2)  # distances are 1, 2 and 4, and τ is 0.5 · 2
    far = exp(-4 / 2)
    shift, confidence = run.method.shift_of(means, before, after)
    assert shift[0].tolist() == pytest.approx([near / (near + far), 3 * far / (near + far)], rel=1e-5)
    assert confidence.tolist() == pytest.approx([near + far], rel=1e-5)


# -- the warm-up ------------------------------------------------------------------------------------------------------


def test_the_warm_up_lowers_its_loss_and_separates_classes(fresh):
    """The nearest-mean accuracy is higher than under the random base."""
    settings = {"setting": "homogeneous", "clients": 2, "participants": 2, "train__lr": 0.2, "warmup__epochs": 3}
    world = fresh("fedavg", warmup__rounds=0, **settings).world
    world = replace(world, config=replace(world.config, warmup=replace(world.config.warmup, rounds=3)))
    start = world.net.weights(("base",))["base"]
    losses: list[float] = []
    warmed = warmup.compute(world, lambda what, when, facts: losses.append(facts["loss"]))
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 0.2

    def separable(base: dict[str, Tensor]) -> float:
        train = world.bundle.train
        test = world.bundle.test
        u = embed(world.net, base, train, torch.arange(len(train.y)))
        v = embed(world.net, base, test, torch.arange(len(test.y)))
        return nearest_mean_accuracy(u, train.y, v, test.y)

    assert separable(warmed.weights["base"]) > separable(start) + 0.1


def test_the_warm_up_does_not_depend_on_labels(fresh):
    """With the same plan and other labels at the clients, the warmed-up base is the same to the bit."""
    world = fresh("fedavg", warmup__rounds=0).world
    world = replace(world, config=replace(world.config, warmup=replace(world.config.warmup, rounds=1)))
    start = world.net.weights((*MODEL, "projector"))
    found = []
    for y in (world.labels, world.labels.flip(0), torch.zeros_like(world.labels)):
        train = replace(world.bundle.train, y=y)
        other = replace(
            world, bundle=replace(world.bundle, train=train), labels=y, shares=type(world.shares)(), kept=(None, {})
        )
        other.net.load(start)
        found.append(warmup.compute(other, lambda *a: None).weights["base"])
    assert not torch.equal(found[0]["out.weight"], start["base"]["out.weight"])
    for one in found[1:]:
        assert all(torch.equal(t, one[k]) for k, t in found[0].items())
