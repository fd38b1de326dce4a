"""Whatever is wrong with a reply is found before it is taken; whatever an honest client sends is taken."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from profcil import registry
from profcil.deploy.expected_reply import Understudy
from profcil.engine.fleet import Here
from profcil.engine.payload import Block, Reply
from profcil.engine.reply_checks import Terms, fault


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
TERMS = Terms(
    EXPECTED, NEEDED, frozenset({"model", "statistics", "transport"}), frozenset({1, 2, 5}), 100, confidence=5.0
)


def honest(**blocks: Block) -> Reply:
    return Reply(3, 60, {"base": model(1.5), "moments": moments((5,)), "moves": moves(4.9), **blocks})


def without(name: str) -> Reply:
    whole = honest()
    return replace(whole, blocks={n: b for n, b in whole.blocks.items() if n != name})


def tensors(block: Block, **values: torch.Tensor | None) -> Block:
    return replace(block, tensors={k: v for k, v in {**block.tensors, **values}.items() if v is not None})


def test_an_honest_reply_is_taken():
    assert fault(honest(), TERMS) == ""
    assert fault(honest(radius=RADIUS, points=points(60)), TERMS) == ""  # may come, need not


BAD = {
    "a block is missing": (without("base"), "base is missing"),
    "a block about classes is missing": (without("moments"), "moments is missing"),
    "a block too many": (honest(extra=model()), "extra was not asked for"),
    "a tensor is missing": (honest(base=tensors(model(), weight=None)), "weight is missing"),
    "a tensor too many": (honest(base=tensors(model(), more=torch.ones(1))), "more was not asked for"),
    "a wrong shape": (honest(base=tensors(model(), weight=torch.ones(3, 4))), "shape"),
    "a wrong number of dimensions": (honest(base=tensors(model(), weight=torch.ones(12))), "shape"),
    "more rows than classes": (honest(moments=tensors(moments((5,)), mean=torch.ones(3, 3))), "shape"),
    "rows of another width": (honest(points=points(3, 4)), "shape"),
    "labels where there are none": (honest(points=replace(points(5), labels=(2,))), "shape"),
    "a wrong type": (honest(base=tensors(model(), weight=torch.ones(4, 3).double())), "type"),
    "a complex type": (honest(base=tensors(model(), weight=torch.ones(4, 3) * 1j)), "type"),
    "another kind": (honest(base=replace(model(), kind="statistics")), "kind"),
    "an undeclared kind": (honest(base=replace(model(), kind="generator")), "kind"),
    "NaN": (honest(base=model(float("nan"))), "not finite"),
    "infinity": (honest(moments=tensors(moments((5,)), mean=torch.tensor([[1, 2, -torch.inf]]))), "not finite"),
    "a negative count": (honest(moments=tensors(moments((5,)), count=torch.tensor([-1.0]))), "counts outside"),
    "a count beyond all examples": (
        honest(moments=tensors(moments((5,)), count=torch.tensor([1e6]))),
        "counts outside",
    ),
    "a negative whole number": (honest(base=tensors(model(), steps=torch.tensor(-1))), "negative counts"),
    "a negative confidence": (honest(moves=moves(-0.1)), "outside 0 to 5"),
    "a confidence too high": (honest(moves=moves(5.1)), "outside 0 to 5"),
    "a class never declared": (honest(moments=moments((7,))), "class 7"),
    "an absurd norm": (honest(base=model(1e6)), "absurdly large"),
    "no examples": (replace(honest(), samples=0), "0 examples"),
    "negative examples": (replace(honest(), samples=-5), "-5 examples"),
    "more examples than it has": (replace(honest(), samples=101), "101 examples"),
    "a note that is no number": (replace(honest(), notes={"loss": float("nan")}), "notes"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_reply_is_refused_with_a_reason(name):
    reply, reason = BAD[name]
    assert reason in fault(reply, TERMS)


class Watched(Here):
    """The simulation, with every reply judged as a deployment would; the understudy knows no one's data."""

    def __init__(self) -> None:
        self.understudy, self.judged = Understudy(), 0

    def turns(self, world, method, state, when, inboxes):
        return self.judge("turn", super().turns, world, method, state, when, inboxes)

    def surveys(self, world, method, state, when, inboxes):
        return self.judge("survey", super().surveys, world, method, state, when, inboxes)

    def judge(self, what, ask, world, method, state, when, inboxes):
        terms = {c: self.understudy.terms(what, world, method, when, c, inbox) for c, inbox in inboxes.items()}
        done = ask(world, method, state, when, inboxes)
        for c, reply in done.items():
            assert fault(reply, terms[c]) == "", (what, when)
            self.judged += 1
        return done


def brief(name: str) -> dict[str, int]:
    """Little of what a server would train: it is not what is tested here."""
    long = (
        "pool",
        "iterations",
        "generator_batch",
        "synthesis_rounds",
        "synthesis_steps",
        "synthesis_batch",
        "student_steps",
    )
    known = {f.name for f in fields(registry.find("methods", name).METHOD.Params)}
    return {f"params__{key}": 4 for key in long if key in known}


def on_images() -> list[str]:
    return [n for n in registry.names("methods") if "image" in registry.find("methods", n).METHOD.modalities]


@pytest.mark.parametrize("name", on_images())
def test_what_any_method_sends_is_admitted(fresh, same_bits, tiny, name):
    """The server knows what to expect of every method without being told, and looking does not change the run."""
    size = {
        "model__norm": "batch",
        "task_size": 5,
        "support": 1.0,
        "train__rounds": 2,
        **brief(name),
    }  # some methods need that norm
    run = fresh(name, **size)
    run.world.fleet = watched = Watched()
    run.stream()
    assert watched.judged > 0
    assert same_bits(run.server, tiny(name, **size).server)
