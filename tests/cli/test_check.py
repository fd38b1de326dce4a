"""`profcil check`: a method that keeps the contract, and methods that each break one promise."""

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
from profcil.engine.channel import Block
from profcil.methods.base import Method, Params


class Images(Method):
    modalities = frozenset({"image"})


class UndeclaredKind(Images):
    kinds = frozenset()


class Crashing(Images):
    def end_position(self, state: Any, when: Any) -> Any:
        raise ValueError("no\nidea")


class GlobalRandom(Images):
    def end_position(self, state: Any, when: Any) -> Any:
        torch.rand(1), np.random.rand(), random.random()
        return state


class Irreproducible(Images):
    def aggregate(self, state: Any, replies: Any, when: Any) -> Any:
        state = super().aggregate(state, replies, when)
        head = {k: t + 1e-3 * torch.randn(t.shape) for k, t in state.blocks["head"].tensors.items()}
        return state.put(head=Block("model", head))


class HiddenState(Images):
    def end_position(self, state: Any, when: Any) -> Any:
        self.rounds = getattr(self, "rounds", 0) + 1
        return state.put(count=Block("memory", {"count": torch.tensor([float(self.rounds)])}))


class UnseenLabels(Images):
    def end_position(self, state: Any, when: Any) -> Any:
        return state.put(all=Block("memory", {"mean": torch.zeros(10, 2)}, tuple(range(10))))


class ModifiesMask(Images):
    def turn(self, client: Any, inbox: Any) -> Any:
        if self.params.label_space == "local":
            client.allowed(client.labels)[0] = True
        return super().turn(client, inbox)


class ModifiesCached(Images):
    def turn(self, client: Any, inbox: Any) -> Any:
        _, turns = client.once("turns", lambda: ("taken", torch.zeros(1)))
        turns += 1
        return super().turn(client, inbox)


class ModifiesInbox(Images):
    def turn(self, client: Any, inbox: Any) -> Any:
        result = yield from super().turn(client, inbox)
        for tensor in inbox["head"].tensors.values():
            tensor[0] += 0
        return result


class IncompleteModel(Images):
    def scores(self, net: Any, state: Any, features: Any) -> Any:
        return super().scores(net, state, features) + ("bias" in state.blocks)

    def begin(self, weights: Any) -> Any:
        return super().begin(weights).put(bias=Block("memory", {}))

    def deployed(self, state: Any) -> Any:
        return state.only("base", "adapter", "head")


class UnknownKind(Images):
    kinds = frozenset({"model", "secrets"})


@dataclass(frozen=True)
class ParamsWithoutHelp(Params):
    mu: float = 0.1
    nu: float = field(default=0.2, metadata={"help": "known"})


class NoHelp(Images):
    Params = ParamsWithoutHelp


def broken_promises(
    register_method: Callable[[type], None], capsys: Any, method: type, status: int = 1
) -> dict[str, str]:
    """The promises that do not hold, with the reasons."""
    register_method(method)
    assert main(["check", "registered", "--json"]) == status
    return {row["promise"]: row["why_not"] for row in json.loads(capsys.readouterr().out) if not row["holds"]}


def test_method_that_keeps_the_contract(register_method, capsys):
    assert broken_promises(register_method, capsys, Images, 0) == {}
    assert main(["check", "registered"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(PROMISES) + 1 and all(line.startswith("holds ") for line in lines)


@pytest.mark.parametrize(
    ("method", "promise", "why"),
    [
        (UndeclaredKind, "sends only the kinds it declares", "a block of kind 'model', but declares only"),
        (Crashing, "runs a stream", "ValueError: no idea"),
        (GlobalRandom, "does not use the global random states", "global generator of torch, numpy, random"),
        (Irreproducible, "a resumed run is bit-identical", "server state differs"),
        (Irreproducible, "for any order of clients", "server state differs"),
        (HiddenState, "no attributes but its settings", "keeps rounds as attributes"),
        (HiddenState, "a resumed run is bit-identical", "server state differs"),
        (HiddenState, "an idle position changes nothing", "changes the server"),
        (UnseenLabels, "labels are sets of class ids", "classes [8, 9] that no client has seen"),
        (ModifiesMask, "does not write to what it was given", "with label_space=local"),
        (ModifiesCached, "does not write to what it was given", "cached once as turns"),
        (ModifiesInbox, "does not write to what it was given", "block head"),
        (IncompleteModel, "its saved model predicts", "let `deployed` keep every block"),
        (UnknownKind, "declares only kinds that exist", "secrets"),
        (NoHelp, "a default and a help text", "mu: no help text"),
    ],
)
def test_broken_promise_is_reported(register_method, capsys, method, promise, why):
    broken = broken_promises(register_method, capsys, method)
    assert [reason for name, reason in broken.items() if promise in name and why in reason], broken


def test_text_output_names_broken_promise(register_method, capsys):
    broken_promises(register_method, capsys, UnknownKind)
    assert main(["check", "registered"]) == 1
    assert "DOES NOT HOLD  image: declares only kinds that exist (secrets: no such kind" in capsys.readouterr().out


def test_unknown_method_is_reported(capsys):
    assert main(["check", "promx"]) == 2
    err = capsys.readouterr().err
    assert "did you mean promax" in err and err.count("\n") == 1


def test_builtin_methods_for_texts_and_with_server_training(capsys):
    for name in ("fedseit", "target"):
        assert main(["check", name, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)
