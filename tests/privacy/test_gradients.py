"""Training with noise on gradients: what a step computes, what it hides, what it costs, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from profcil import registry
from profcil.cli.main import main
from profcil.engine import loop
from profcil.engine.channel import When
from profcil.engine.phases import GradientNoise, Shuffled, Train
from profcil.engine.run import resume, start
from profcil.engine.world import World, make_world
from profcil.errors import ConfigError
from profcil.io.atomic_files import read_tensors
from profcil.model.net import MODEL, Weights
from profcil.privacy.accountant import epsilon_of, epsilon_of_steps, multiplier_of_steps, renyi_divergence
from profcil.privacy.gradients import clipped_sum, named_parameters, train_privately
from profcil.privacy.meter import BudgetSpent, Meter
from profcil.privacy.plan import untrainable
from profcil.privacy.protection import Protection
from profcil.privacy.settings import PrivacySettings
from profcil.resolve import RunConfig, resolve

TINY = {
    "stream.clients": 4, "stream.participants": 2, "stream.task_size": 3, "stream.support": 0.5, "train.rounds": 3,
    "train.epochs": 2, "warmup.rounds": 0, "model.width": 4, "threads": 1, "workers": 1,
}  # fmt: skip
PRIVATE = {"privacy.unit": "example", "privacy.epsilon": 4.0, "privacy.gradient_bound": 1.0, "model.norm": "group"}
SGD = {
    "train__optimiser": "sgd", "train__lr": 0.1, "train__momentum": 0.0, "train__weight_decay": 0.0, "train__clip": 0.0,
}  # fmt: skip


def config(method: str = "fedavg", **more: object) -> RunConfig:
    sets = {**TINY, **PRIVATE, **{key.replace("__", "."): value for key, value in more.items()}}
    return resolve(None, {"dataset": "digits", "method": method}, sets)


def phase_of(world: World, noise: GradientNoise | None, method: str = "fedavg") -> Train:
    """The first training phase of a client, one epoch long, with other noise."""
    made = registry.find("methods", method).METHOD(world.config.params)
    state = made.begin(world.net.weights(MODEL))
    client = world.client(int(world.plan.active(0)[0]), When("round", 0, 0, 3))
    return replace(next(made.turn(client, dict(state.blocks))), noise=noise, epochs=1)


def changes(before: Weights, after: Weights) -> Tensor:
    """The difference of all model tensors, as one vector."""
    pairs = [(before[b][n], after[b][n]) for b in MODEL for n in before[b]]
    return torch.cat([(new - old).flatten() for old, new in pairs])


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def tensors(folder: Path) -> dict[str, bytes]:
    found = read_tensors(folder / "state.safetensors")
    assert found is not None
    return {name: tensor.numpy().tobytes() for name, tensor in found[0].items()}


# -- a step -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["group", "none"])
def test_without_noise_and_clipping_a_step_follows_the_gradient_of_the_summed_loss(tmp_path, norm):
    world = make_world(config(model__norm=norm, train__augment=False, **SGD), tmp_path)
    phase = phase_of(world, GradientNoise(bound=1e6, multiplier=1e-12, sampling=1.0, secret=0))
    done = train_privately(world.net, phase)
    world.net.load(phase.weights)
    world.net.train()
    inputs = phase.inputs(phase.source.index)
    batch = {"inputs": inputs, "y": phase.source.y, "rng": None, **phase.constants}
    parameters = list(named_parameters(world.net, MODEL).values())
    grads = torch.autograd.grad(phase.loss(world.net, batch) * phase.source.size, parameters, materialize_grads=True)
    expected = -0.1 / phase.settings.batch * torch.cat([g.flatten() for g in grads])
    found = changes(phase.weights, done.weights)
    assert float(expected.norm()) > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
    assert done.loss == 0.0  # it would be exact


def test_one_example_changes_the_sum_by_at_most_the_bound(tmp_path):
    world = make_world(config(train__augment=False), tmp_path)
    for bound, reached in ((0.5, True), (1e6, False)):
        phase = phase_of(world, GradientNoise(bound, 1.0, 1.0, 0))
        world.net.load(phase.weights)
        parameters = named_parameters(world.net, MODEL)
        every = torch.arange(phase.source.size)
        rng = torch.Generator().manual_seed(0)
        rows = phase.source.epoch(rng)
        total = clipped_sum(world.net, parameters, phase, rows, every, rng)
        without = clipped_sum(world.net, parameters, phase, rows, every[1:], rng)
        length = float(torch.cat([(total[n] - without[n]).flatten() for n in total]).norm())
        assert length <= bound * (1 + 1e-4)
        assert (length > 0.999 * bound) == reached  # else the gradient was within the bound, and nothing is shown


def test_an_example_whose_gradient_is_not_finite_adds_nothing(tmp_path):
    world = make_world(config(train__augment=False), tmp_path)
    phase = phase_of(world, GradientNoise(1.0, 1.0, 1.0, 0))
    world.net.load(phase.weights)
    parameters = named_parameters(world.net, MODEL)
    rng = torch.Generator()
    rows = {**phase.source.epoch(rng), "factor": torch.ones(phase.source.size)}
    rows["factor"][0] = torch.inf
    scaled = replace(phase, loss=lambda net, batch: phase.loss(net, batch) * batch["factor"].sum())
    every = torch.arange(phase.source.size)
    total = clipped_sum(world.net, parameters, scaled, rows, every, rng)
    without = clipped_sum(world.net, parameters, scaled, rows, every[1:], rng)
    for name, summed in total.items():
        torch.testing.assert_close(summed, without[name])


def test_views_of_images_follow_from_the_secret(tmp_path):
    """An example more changes the views of the others, so nobody may know them."""
    world = make_world(config(**SGD), tmp_path)
    noise = GradientNoise(bound=1.0, multiplier=1e-12, sampling=1.0, secret=7)
    phase = phase_of(world, noise)
    done = changes(phase.weights, train_privately(world.net, phase).weights)
    other = replace(phase, noise=replace(noise, secret=8))
    assert not torch.allclose(done, changes(phase.weights, train_privately(world.net, other).weights), rtol=1e-3)


def test_the_noise_has_the_deviation_that_is_accounted_for(tmp_path):
    world = make_world(config(train__augment=False, **SGD), tmp_path)
    noise = GradientNoise(bound=2.0, multiplier=50.0, sampling=1.0, secret=0)
    phase = phase_of(world, noise)
    plain = train_privately(world.net, phase_of(world, replace(noise, multiplier=1e-12)))
    moved = []
    for secret in range(20):
        drawn = replace(phase, noise=replace(noise, secret=secret))
        moved.append(changes(plain.weights, train_privately(world.net, drawn).weights))
    per_step = 0.1 * 50.0 * 2.0 / phase.settings.batch
    assert float(torch.cat(moved).std()) == pytest.approx(per_step, rel=0.03)


def test_the_same_turn_has_the_same_noise_and_any_other_has_its_own(tmp_path):
    world = make_world(config(**SGD), tmp_path)
    noise = GradientNoise(bound=1.0, multiplier=50.0, sampling=0.3, secret=7)
    phase = phase_of(world, noise)
    done = changes(phase.weights, train_privately(world.net, phase).weights)
    again = changes(phase.weights, train_privately(world.net, phase).weights)
    assert torch.equal(done, again)
    other_secret = replace(phase, noise=replace(noise, secret=8))
    assert not torch.allclose(done, changes(phase.weights, train_privately(world.net, other_secret).weights))
    allowed = phase.constants["allowed"].clone()
    absent = next(label for label in range(10) if label not in phase.source.y)
    allowed[absent] = ~allowed[absent]
    other_classes = replace(phase, constants={"allowed": allowed})
    assert correlation(done, changes(phase.weights, train_privately(world.net, other_classes).weights)) < 0.2
    y = phase.source.y.clone()
    y[0] = y[y != y[0]][0]  # one example has another label
    relabelled = replace(phase, source=Shuffled(phase.source.index, y))
    assert correlation(done, changes(phase.weights, train_privately(world.net, relabelled).weights)) < 0.2
    nudged = {b: {n: t + 1e-7 for n, t in tensors.items()} for b, tensors in phase.weights.items()}
    moved = replace(phase, weights=nudged)
    assert correlation(done, changes(nudged, train_privately(world.net, moved).weights)) < 0.2


def test_a_step_takes_each_example_by_chance_and_may_take_none(tmp_path):
    world = make_world(config(train__augment=False), tmp_path)
    rare = phase_of(world, GradientNoise(bound=1.0, multiplier=1.0, sampling=0.001, secret=0))
    done = train_privately(world.net, rare)
    assert done.steps == 1000
    assert torch.isfinite(changes(rare.weights, done.weights)).all()


def test_an_epoch_takes_each_example_once_on_average(tmp_path, monkeypatch):
    """And the steps are independent: most take a share near the chance, none takes all."""
    taken: list[Tensor] = []

    def recorded(net, parameters, phase, rows, index, rng):
        taken.append(index)
        return clipped_sum(net, parameters, phase, rows, index, rng)

    monkeypatch.setattr("profcil.privacy.gradients.clipped_sum", recorded)
    world = make_world(config(train__augment=False), tmp_path)
    phase = phase_of(world, GradientNoise(bound=1.0, multiplier=1.0, sampling=0.05, secret=0))
    train_privately(world.net, phase)
    size = phase.source.size
    assert len(taken) == 20
    assert sum(map(len, taken)) == pytest.approx(size, abs=5 * size**0.5)
    assert max(map(len, taken)) < 0.5 * size
    assert len({tuple(index.tolist()) for index in taken}) > 10


def test_the_proximal_term_of_fedprox_pulls_without_noise_of_its_own(tmp_path):
    world = make_world(config("fedprox", train__augment=False, params__mu=1e4, **SGD), tmp_path)
    noise = GradientNoise(bound=1.0, multiplier=1.0, sampling=0.25, secret=0)
    phase = replace(phase_of(world, noise, "fedprox"), settings=replace(world.config.train, lr=1e-4))
    free = replace(phase, proximal=0.0)
    pulled = changes(phase.weights, train_privately(world.net, phase).weights)
    assert float(pulled.norm()) < 0.9 * float(changes(free.weights, train_privately(world.net, free).weights).norm())


# -- the account ------------------------------------------------------------------------------------------------------


def test_the_divergence_of_a_step_is_that_of_opacus():
    """`compute_rdp` of Opacus 1.6.0 for order 6."""
    given = {(1.0, 0.1): 0.3710943530763128, (0.8, 0.01): 0.005518149336649831, (5.0, 0.1): 0.0012425809367883288}
    for (multiplier, sampling), expected in given.items():
        assert renyi_divergence(6, multiplier, sampling) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("multiplier", "sampling", "steps", "exact"),
    [(1.0, 0.1, 300, 12.4085), (1.0, 0.05, 600, 8.2998), (3.3, 0.5, 60, 5.5544), (5.0, 0.1, 1500, 3.3391)],
)
def test_epsilon_is_above_the_exact_one_but_not_far(multiplier, sampling, steps, exact):
    """The exact ones are those of the PRV accountant of Opacus 1.6.0."""
    found = epsilon_of_steps(multiplier, 1e-5, steps, sampling)
    assert exact <= found <= 1.2 * exact


def test_if_every_step_takes_every_example_the_account_is_exact():
    assert epsilon_of_steps(3.0, 1e-5, 30, 1.0) == epsilon_of(30**0.5 / 3.0, 1e-5)
    assert epsilon_of_steps(3.0, 1e-5, 0, 0.1) == 0.0
    for sampling in (1.0, 0.2):
        needed = multiplier_of_steps(4.0, 1e-5, 60, sampling)
        assert epsilon_of_steps(needed, 1e-5, 60, sampling) == pytest.approx(4.0, rel=1e-6)
        assert epsilon_of_steps(0.99 * needed, 1e-5, 60, sampling) > 4.0


def test_with_little_to_lose_rounding_does_not_hide_a_step():
    """A divergence that is rounded to zero or below would allow any number of steps."""
    for multiplier in (1e6, 1e9):
        assert epsilon_of_steps(multiplier, 1e-5, 10**18, 0.01) > epsilon_of_steps(multiplier, 1e-5, 1, 0.01)
        settings = PrivacySettings("example", 8.0, noise_multiplier=multiplier, gradient_bound=1.0, sampling=0.01)
        assert Meter(Protection(settings, multiplier, 1, 10.0, 100)).most_releases > 10**6


# -- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
@pytest.mark.parametrize("sampling", [1.0, 0.5])
def test_a_run_ends_at_its_budget(tmp_path, method, sampling):
    folder = start(config(method, privacy__sampling=sampling), tmp_path / "run", tmp_path)
    facts = json.loads((folder / "run.json").read_text())
    assert 3.0 < facts["privacy"]["epsilon"] <= 4.0 * (1 + 1e-6)
    assert [part["path"] for part in facts["execution"]] == ["reference"]


def test_a_subclass_states_for_itself_that_it_trains_on_single_examples(tmp_path):
    """Else a method that adds replay to FedAvg would send it without noise."""
    settings = config()
    net = make_world(settings, tmp_path).net
    base = registry.find("methods", "fedavg").METHOD
    silent = type("Silent", (base,), {})
    stated = type("Stated", (base,), {"mean_of_examples": True})
    assert (
        untrainable(settings, stated(settings.params), net) == untrainable(settings, base(settings.params), net) == ""
    )
    assert "Silent does more than train on single examples" in untrainable(settings, silent(settings.params), net)


def test_no_exact_loss_decides_whether_a_client_has_diverged(tmp_path):
    folder = start(config(train__loss_limit=1e-9), tmp_path / "run", tmp_path)
    assert json.loads((folder / "run.json").read_text())["metrics"]["faa"] > 0
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert {event["loss"] for event in events if event["event"] == "round"} == {None}


def test_noise_stops_learning_and_without_it_the_same_run_learns(tmp_path):
    longer = {"stream__task_size": 10, "train__rounds": 8, "train__epochs": 15}
    faa = {}
    for noise in (1e-6, 100.0):
        settings = {**longer, "privacy__epsilon": 0.0, "privacy__noise_multiplier": noise}
        folder = start(config(**settings), tmp_path / str(noise), tmp_path)
        faa[noise] = json.loads((folder / "run.json").read_text())["metrics"]["faa"]
    assert faa[1e-6] > faa[100.0] + 20


def test_a_run_stops_before_it_would_exceed_its_budget_with_everything_saved(tmp_path):
    enough = multiplier_of_steps(4.0, 1e-5, 4, 1.0)  # for two turns of two epochs, where three are planned
    with pytest.raises(BudgetSpent, match=r"the privacy budget is spent: ε = 4 so far, and round 3 of position 1"):
        start(config(privacy__noise_multiplier=enough, stream__participants=4), tmp_path / "run", tmp_path)
    assert (tmp_path / "run" / "state.safetensors").is_file()


def test_a_run_resumes_to_the_same_bits(tmp_path, monkeypatch):
    whole = start(config(), tmp_path / "whole", tmp_path)

    played = loop.next_round
    count = iter(range(100))

    def stopping(*given):
        if next(count) == 4:
            raise RuntimeError("stopped")
        return played(*given)

    monkeypatch.setattr(loop, "next_round", stopping)
    with pytest.raises(RuntimeError, match="stopped"):
        start(config(), tmp_path / "cut", tmp_path)
    monkeypatch.undo()
    assert tensors(resume(tmp_path / "cut", tmp_path)) == tensors(whole)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"method": "pro"}, "Pro does more than train on single examples"),
        ({"method": "fedproto"}, "does more than train on single examples"),
        ({"model__norm": "batch"}, "BatchNorm mixes examples"),
        ({"params__label_space": "local"}, "which classes compete would reveal an example"),
        ({"privacy__unit": "client"}, "privacy.gradient_bound is for privacy.unit = example"),
        ({"privacy__secure_sum": True}, "leave out privacy.secure_sum"),
        ({"warmup__rounds": 1}, "set warmup.rounds = 0"),
        ({"train__batch": 0}, "a step divides by train.batch"),
        ({"privacy__gradient_bound": float("inf")}, "gradient_bound = inf is out of range"),
        ({"privacy__epsilon": 0.001, "privacy__sampling": 0.5}, r"no ε below 0.0035 can be accounted for"),
        ({"privacy__gradient_bound": 0.0, "privacy__sampling": 0.5}, "or give privacy.gradient_bound"),
        ({"privacy__gradient_bound": 0.0}, "set privacy.gradient_bound, or set privacy.unit = client"),
    ],
)
def test_what_noise_on_gradients_cannot_hide_is_refused_before_the_run(tmp_path, given, reason):
    with pytest.raises(ConfigError, match=reason):
        make_world(config(**given), tmp_path)


def test_a_mistake_is_one_sentence_and_exit_status_2(tmp_path, capsys):
    sets = [f"--set={key}={value}" for key, value in {**TINY, **PRIVATE, "model.norm": "batch"}.items()]
    assert main(["run", "--dataset=digits", "--method=fedavg", *sets, f"--out={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err
    assert "set model.norm = group" in error
    assert len(error.strip().splitlines()) == 1


def test_the_dry_run_says_what_training_will_spend(tmp_path, capsys):
    sets = [f"--set={key}={value}" for key, value in {**TINY, **PRIVATE}.items()]
    assert main(["run", "--dataset=digits", "--method=fedavg", *sets, "--dry-run", f"--out={tmp_path / 'run'}"]) == 0
    assert "by at most 3 replies of 2 steps with noise multiplier" in capsys.readouterr().out
