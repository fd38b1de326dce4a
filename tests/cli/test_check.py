"""`profcil check`: a method that keeps the contract, and methods that break it, one promise each."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from profcil.cli.main import main
from profcil.contract.promises import PROMISES
from profcil.engine.payload import Block
from profcil.methods.base import Method, Params


class Images(Method):
    modalities = frozenset({"image"})


class Silent(Images):
    kinds = frozenset()


class Crashing(Images):
    def end_position(self, state: Any, when: Any) -> Any:
        raise ValueError("no\nidea")


class Drawing(Images):
    def end_position(self, state: Any, when: Any) -> Any:
        torch.rand(1), np.random.rand(), random.random()
        return state


class Noisy(Images):
    def aggregate(self, state: Any, replies: Any, when: Any) -> Any:
        state = super().aggregate(state, replies, when)
        head = {k: t + 1e-3 * torch.randn(t.shape) for k, t in state.blocks["head"].tensors.items()}
        return state.put(head=Block("model", head))


class Keeping(Images):
    def end_position(self, state: Any, when: Any) -> Any:
        self.rounds = getattr(self, "rounds", 0) + 1
        return state.put(count=Block("memory", {"count": torch.tensor([float(self.rounds)])}))


class Counting(Images):
    def end_position(self, state: Any, when: Any) -> Any:
        return state.put(all=Block("memory", {"mean": torch.zeros(10, 2)}, tuple(range(10))))


class Scribbling(Images):
    def turn(self, client: Any, inbox: Any) -> Any:
        if self.params.label_space == "local":
            client.allowed(client.labels)[0] = True
        return super().turn(client, inbox)


class Tallying(Images):
    def turn(self, client: Any, inbox: Any) -> Any:
        _, times = client.once("turns", lambda: ("taken", torch.zeros(1)))
        times += 1
        return super().turn(client, inbox)


class Overwriting(Images):
    def turn(self, client: Any, inbox: Any) -> Any:
        answer = yield from super().turn(client, inbox)
        for tensor in inbox["head"].tensors.values():
            tensor[0] += 0
        return answer


class Odd(Images):
    kinds = frozenset({"model", "secrets"})


@dataclass(frozen=True)
class Bare(Params):
    mu: float = 0.1
    nu: float = field(default=0.2, metadata={"help": "known"})


class Unexplained(Images):
    Params = Bare


def looked_at(register_method: Callable[[type], None], capsys: Any, method: type, status: int = 1) -> dict[str, str]:
    """What does not hold, and why not."""
    register_method(method)
    assert main(["check", "registered", "--json"]) == status
    return {row["promise"]: row["why_not"] for row in json.loads(capsys.readouterr().out) if not row["holds"]}


def test_a_method_that_keeps_all(register_method, capsys):
    assert looked_at(register_method, capsys, Images, 0) == {}
    assert main(["check", "registered"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(PROMISES) + 1 and all(line.startswith("holds ") for line in lines)


@pytest.mark.parametrize(
    ("method", "promise", "why"),
    [
        (Silent, "sends only the kinds it declares", "kind 'model' came to the door"),
        (Crashing, "runs a stream", "ValueError: no idea"),
        (Drawing, "does not use the global random states", "global generator of torch, numpy, random"),
        (Noisy, "a resumed run is bit-identical", "server state differs"),
        (Noisy, "for any order of clients", "server state differs"),
        (Keeping, "no attributes but its settings", "keeps rounds as attributes"),
        (Keeping, "a resumed run is bit-identical", "server state differs"),
        (Keeping, "an idle position changes nothing", "changes the server"),
        (Counting, "labels are sets of class ids", "classes [8, 9] that no client has seen"),
        (Scribbling, "does not write to what it was given", "with label_space=local"),
        (Tallying, "does not write to what it was given", "cached once as turns"),
        (Overwriting, "does not write to what it was given", "block head"),
        (Odd, "declares only kinds that exist", "secrets"),
        (Unexplained, "a default and a help text", "mu: no help text"),
    ],
)
def test_a_broken_promise_is_told(register_method, capsys, method, promise, why):
    broken = looked_at(register_method, capsys, method)
    assert [told for name, told in broken.items() if promise in name and why in told], broken


def test_text_says_what_does_not_hold(register_method, capsys):
    looked_at(register_method, capsys, Odd)
    assert main(["check", "registered"]) == 1
    assert "DOES NOT HOLD  image: declares only kinds that exist (secrets: no such kind" in capsys.readouterr().out


def test_an_unknown_method_is_one_sentence(capsys):
    assert main(["check", "promx"]) == 2
    err = capsys.readouterr().err
    assert "did you mean promax" in err and err.count("\n") == 1


def test_a_method_for_texts_and_one_whose_server_trains(capsys):
    for name in ("fedseit", "target"):
        assert main(["check", name, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)
