"""An invalid reply is refused with a reason, and every method's own replies are accepted."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from profcil import registry
from profcil.engine.channel import Block, Reply
from profcil.engine.expected_reply import ReplyForecast
from profcil.engine.fleet import LocalFleet
from profcil.engine.reply_checks import Knowledge, ReplyRequirements, fault


def model(scale: float = 1.0) -> Block:
    return Block("model", {"weight": torch.full((4, 3), scale), "steps": torch.tensor(5)})


def moments(labels: tuple[int, ...] = (2, 5)) -> Block:
    n = len(labels)
    return Block("statistics", {"mean": torch.ones(n, 3), "count": torch.full((n,), 4.0)}, labels)


def moves(value: float = 0.5) -> Block:
    return Block("transport", {"shift": torch.zeros(1, 3), "confidence": torch.tensor([value])}, (1,))


def points(rows: int, width: int = 3) -> Block:
    return Block("statistics", {"centroids": torch.ones(rows, width)})


RADIUS = Block("statistics", {"r": torch.ones(())})
OPTIONAL = {"radius": RADIUS, "points": points(2)}
EXPECTED = Reply(9, 8, {"base": model(), "moments": moments(), "moves": moves(), **OPTIONAL})
NEEDED = frozenset({"base", "moments", "moves"})
KNOWN = Knowledge(frozenset({1, 2, 5}), 100, confidence=5.0)
TERMS = ReplyRequirements(EXPECTED, NEEDED, frozenset({"model", "statistics", "transport"}), KNOWN)


def valid(**blocks: Block) -> Reply:
    return Reply(3, 60, {"base": model(1.5), "moments": moments((5,)), "moves": moves(4.9), **blocks})


def without(name: str) -> Reply:
    reply = valid()
    return replace(reply, blocks={n: b for n, b in reply.blocks.items() if n != name})


def with_tensors(block: Block, **values: torch.Tensor | None) -> Block:
    return replace(block, tensors={k: v for k, v in {**block.tensors, **values}.items() if v is not None})


def test_a_valid_reply_is_accepted():
    assert fault(valid(), TERMS) == ""
    assert fault(valid(radius=RADIUS, points=points(60)), TERMS) == ""  # both blocks are optional


INVALID = {
    "a block is missing": (without("base"), "base is missing"),
    "a block with labels is missing": (without("moments"), "moments is missing"),
    "an extra block": (valid(extra=model()), "extra was not asked for"),
    "a tensor is missing": (valid(base=with_tensors(model(), weight=None)), "weight is missing"),
    "an extra tensor": (valid(base=with_tensors(model(), more=torch.ones(1))), "more was not asked for"),
    "a wrong shape": (valid(base=with_tensors(model(), weight=torch.ones(3, 4))), "shape"),
    "a wrong number of dimensions": (valid(base=with_tensors(model(), weight=torch.ones(12))), "shape"),
    "more rows than classes": (valid(moments=with_tensors(moments((5,)), mean=torch.ones(3, 3))), "shape"),
    "rows of another width": (valid(points=points(3, 4)), "shape"),
    "labels in a block without labels": (valid(points=replace(points(5), labels=(2,))), "shape"),
    "a wrong type": (valid(base=with_tensors(model(), weight=torch.ones(4, 3).double())), "type"),
    "a complex type": (valid(base=with_tensors(model(), weight=torch.ones(4, 3) * 1j)), "type"),
    "another kind": (valid(base=replace(model(), kind="statistics")), "kind"),
    "an undeclared kind": (valid(base=replace(model(), kind="generator")), "kind"),
    "NaN": (valid(base=model(float("nan"))), "not finite"),
    "infinity": (valid(moments=with_tensors(moments((5,)), mean=torch.tensor([[1, 2, -torch.inf]]))), "not finite"),
    "a negative count": (valid(moments=with_tensors(moments((5,)), count=torch.tensor([-1.0]))), "counts outside"),
    "a count above the number of examples": (
        valid(moments=with_tensors(moments((5,)), count=torch.tensor([1e6]))),
        "counts outside",
    ),
    "an integer count above the number of examples": (
        valid(moments=with_tensors(moments((5,)), count=torch.tensor([2**31 - 1], dtype=torch.int32))),
        "type",
    ),
    "counts that are too many together": (
        valid(moments=with_tensors(moments((2, 5)), count=torch.tensor([60.0, 60.0]))),
        "counts outside",
    ),
    "a broken count": (valid(moments=with_tensors(moments((5,)), count=torch.tensor([1.5]))), "counts outside"),
    "a class twice": (valid(moments=moments((5, 5))), "several rows for one class"),
    "a negative integer": (valid(base=with_tensors(model(), steps=torch.tensor(-1))), "negative counts"),
    "a negative confidence": (valid(moves=moves(-0.1)), "outside 0 to 5"),
    "a confidence too high": (valid(moves=moves(5.1)), "outside 0 to 5"),
    "an undeclared class": (valid(moments=moments((7,))), "class 7"),
    "a huge norm": (valid(base=model(1e6)), "absurdly large"),
    "no examples": (replace(valid(), samples=0), "0 examples"),
    "negative examples": (replace(valid(), samples=-5), "-5 examples"),
    "more examples than the client has": (replace(valid(), samples=101), "101 examples"),
    "a note that is NaN": (replace(valid(), notes={"loss": float("nan")}), "notes"),
    "a note that is infinite": (replace(valid(), notes={"loss": float("inf")}), "notes"),
    "a note whose sum is infinite": (replace(valid(), notes={"drawn": 1e308}), "notes"),
    "a note that is the event's name": (replace(valid(), notes={"event": 1.0}), "note event is a field of the log"),
    "a note that is the round": (replace(valid(), notes={"round": 1.0}), "note round is a field of the log"),
    "a note that is the server's count": (replace(valid(), notes={"refused_replies": -1.0}), "field of the log"),
    "a note named by a terminal's code": (replace(valid(), notes={"\x1b[2J": 1.0}), "names that are not short"),
    "a note with a long name": (replace(valid(), notes={"x" * 41: 1.0}), "names that are not short"),
    "too many notes": (replace(valid(), notes={f"n{k}": 1.0 for k in range(33)}), "33 notes where 32 are allowed"),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_reply_is_refused_with_a_reason(name):
    reply, reason = INVALID[name]
    assert reason in fault(reply, TERMS)


class CheckedFleet(LocalFleet):
    """The simulation's fleet, which checks every reply as a deployment does. The forecast sees no client's data."""

    def __init__(self) -> None:
        self.forecast = ReplyForecast()
        self.checked = 0

    def turns(self, world, method, state, when, inboxes):
        return self.check("turn", super().turns, world, method, state, when, inboxes)

    def surveys(self, world, method, state, when, inboxes):
        return self.check("survey", super().surveys, world, method, state, when, inboxes)

    def check(self, action, compute, world, method, state, when, inboxes):
        terms = {c: self.forecast.terms(action, world, method, when, c, inbox) for c, inbox in inboxes.items()}
        replies = compute(world, method, state, when, inboxes)
        for c, reply in replies.items():
            assert fault(reply, terms[c]) == "", (action, when)
            self.checked += 1
        return replies


def short_server_training(name: str) -> dict[str, int]:
    """Settings that shorten a method's training on the server, which is not tested here."""
    settings = (
        "pool",
        "iterations",
        "generator_batch",
        "synthesis_rounds",
        "synthesis_steps",
        "synthesis_batch",
        "student_steps",
    )
    known = {f.name for f in fields(registry.find("methods", name).METHOD.Params)}
    return {f"params__{key}": 4 for key in settings if key in known}


def image_methods() -> list[str]:
    return [n for n in registry.names("methods") if "image" in registry.find("methods", n).METHOD.modalities]


@pytest.mark.parametrize("name", image_methods())
def test_replies_of_every_method_are_accepted(fresh, same_bits, tiny, name):
    """The server derives the form of every method's replies, and doing so does not change the run."""
    size = {
        "model__norm": "batch",  # some methods need it
        "task_size": 5,
        "support": 1.0,
        "train__rounds": 2,
        **short_server_training(name),
    }
    run = fresh(name, **size)
    run.world.fleet = fleet = CheckedFleet()
    run.stream()
    assert fleet.checked > 0
    assert same_bits(run.server, tiny(name, **size).server)
