"""FedSSI: importance is the path integral along the surrogate, and later positions are penalised by it."""

from __future__ import annotations

import pytest
import torch

from profcil.methods.fedssi import parameters_of
from profcil.methods.parts.importance import importance, path_integral, penalty
from profcil.model.net import MODEL

CURVES = torch.tensor([0.0, 0.5, 1.0, 3.0])


def descend(lr: float, steps: int, momentum: float = 0.0, pull: float = 0.0):
    """Minimises ½ Σ a_i v_i² from 2 with a proximal term to the start; returns start, end and the path integral."""
    v = torch.full((4,), 2.0, dtype=torch.float64, requires_grad=True)
    start = v.detach().clone()
    speed = torch.zeros(4, dtype=torch.float64)

    def step(grads: list[torch.Tensor]) -> None:
        with torch.no_grad():
            speed.mul_(momentum).add_(grads[0] + pull * (v - start))
            v.sub_(lr * speed)

    (path,) = path_integral([v], ((CURVES * v.square()).sum() / 2 for _ in range(steps)), step)
    return start, v.detach(), path


# -- the shared ingredient --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("pull", [0.0, 0.7])
def test_importance_is_the_path_integral_on_a_quadratic(momentum, pull):
    """For any update rule, the path integral of a coordinate is its decrease of the loss."""
    start, end, path = descend(1e-4, 4000, momentum, pull)
    decrease = CURVES * (start.square() - end.square()) / 2
    assert float(decrease[-1]) > 0.5
    torch.testing.assert_close(path, decrease, rtol=2e-3, atol=1e-6)


def test_the_path_integral_of_one_step_is_gradient_times_difference():
    start, end, path = descend(0.1, 1)
    torch.testing.assert_close(path, CURVES * start * (start - end))
    assert float(path[0]) == 0.0  # the loss does not depend on it


def test_importance_is_damped_and_never_negative():
    path = torch.tensor([2.0, -1.0, 0.0])
    start = torch.zeros(3)
    end = torch.ones(3)
    assert importance([path], [start], [end], 3.0)[0].tolist() == [0.5, 0.0, 0.0]


def test_the_penalty_weights_squared_distances():
    parameters = {"a": torch.tensor([1.0, 5.0]), "b": torch.tensor([3.0])}
    reference = {"a": torch.zeros(2), "b": torch.ones(1)}
    omega = {"a": torch.tensor([2.0, 0.0]), "b": torch.tensor([0.5])}
    assert float(penalty(parameters, omega, reference)) == 2.0 + 0.5 * 4.0


# -- the method -------------------------------------------------------------------------------------------------------


def part(private: dict[str, torch.Tensor], what: str) -> dict[str, torch.Tensor]:
    """The private tensors with a prefix, by parameter."""
    return {k.removeprefix(f"{what}/"): t for k, t in private.items() if k.startswith(f"{what}/")}


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(t, two[k]) for k, t in one.items())


def second_position(fresh, **settings):
    """A homogeneous run at the start of its second position, and the private tensors of the clients."""
    run = fresh("fedssi", setting="homogeneous", participants=4, **settings)
    for r in range(3):
        run.play(0, r)
    return run, {c: dict(own) for c, own in run.state.private.items()}


def test_without_a_penalty_it_is_fedavg_to_the_bit(tiny, same_bits):
    plain = tiny("fedavg", accelerate="off").server  # accelerated runs round differently
    assert same_bits(tiny("fedssi", accelerate="off", c=0.0).server, plain)
    assert not same_bits(tiny("fedssi", accelerate="off", c=50.0).server, plain)


def test_as_much_as_by_fedavg_is_sent(tiny):
    assert tiny("fedssi").ledger.entries == tiny("fedavg").ledger.entries


def test_in_its_first_position_a_client_trains_one_surrogate_and_has_no_penalty(fresh, same_bits):
    run = fresh("fedssi", participants=4, c=1e3)
    plain = fresh("fedavg", participants=4)
    assert same_bits(run.play(0, 0), plain.play(0, 0))
    first = {c: dict(own) for c, own in run.state.private.items()}
    assert first
    assert same_bits(run.play(0, 1), plain.play(0, 1))
    for c, own in first.items():
        assert equal(own, run.state.private[c])
        assert not part(own, "omega") and sum(float(t.sum()) for t in part(own, "pending").values()) > 0


def test_the_next_position_adds_the_pending_importance(fresh):
    run, first = second_position(fresh)
    weights = run.server.weights()
    run.play(1, 0)
    run.play(1, 1)
    for c, own in run.state.private.items():
        assert equal(part(own, "omega"), part(first[c], "pending"))
        reference = {f"{b}.{k}": t for b in MODEL for k, t in weights[b].items()}
        assert all(torch.equal(t, reference[k]) for k, t in part(own, "reference").items())
        assert int(own["position"]) == 1
    second = {c: dict(own) for c, own in run.state.private.items()}
    run.play(2, 0)
    for c, own in run.state.private.items():
        total = {k: t + part(second[c], "pending")[k] for k, t in part(second[c], "omega").items()}
        assert equal(part(own, "omega"), total)


def test_important_parameters_stay_near_their_reference(fresh):
    def moved(c: float) -> float:
        run, _ = second_position(fresh, c=c, train__epochs=3)
        total = 0.0
        for reply in run.turns(1, 0):
            own = run.state.private[reply.client]
            flat = {f"{b}.{k}": t for b, tensors in reply.weights().items() for k, t in tensors.items()}
            parameters = {k: flat[k] for k in part(own, "omega")}
            total += float(penalty(parameters, part(own, "omega"), part(own, "reference")))
        return total

    assert 0 < moved(100.0) < 0.7 * moved(0.0)


def test_buffers_and_rows_outside_the_label_space_have_no_importance(fresh):
    run = fresh("fedssi", label_space="local", participants=4, setting="homogeneous", model__norm="batch")
    run.play(0, 0)
    assert any("running" in k for k in run.server.weights()["base"])
    for c, own in run.state.private.items():
        found = part(own, "pending")
        assert found.keys() == parameters_of(run.world.net).keys()
        trained = (found["head.weight"].sum(1) > 0).nonzero().flatten().tolist()
        assert set(trained) == set(run.world.plan.observed(c, 0))


def test_the_surrogate_is_tied_to_the_global_model(fresh):
    def distance(mix: float) -> float:
        run = fresh("fedssi", mix=mix, walk_epochs=5)
        client = run.client(run.clients(0, 0)[0], 0, 0)
        weights = run.server.weights()
        run.method.surrogate_importance(client, weights, client.allowed(client.seen))
        now = client.net.weights(("adapter", "head"))
        return sum(float((t - weights[b][k]).square().sum()) for b in now for k, t in now[b].items())

    assert 0 < distance(0.02) < distance(0.2) < distance(1.0)


def test_the_private_memory_of_a_client_is_metered(fresh):
    run, _ = second_position(fresh)
    model = sum(p.numel() * 4 for p in parameters_of(run.world.net).values())
    assert run.state.client_bytes == model
    run.play(1, 0)
    assert run.state.client_bytes == 3 * model
