"""What the server, or anybody who reads replies and models, learns about single examples: attacks on a finished run.

    identify    a client has one example of a class and reports it. The attacker has a hundred inputs, one of which is
                the client's, and picks the one whose features are nearest to the reported mean. For images and tables
                it also reconstructs the input, by a ridge regression of inputs on features of its own examples.
    member      a client reports a class of few examples. The attacker has an example and decides from the reported
                mean whether it is among them.
    head        the attacker has the trained model and decides from the probability of the true class whether an example
                was trained on.

`attacker` says what the attacker knows and sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from profcil.data.bundle import Examples
from profcil.diagnostics.attacker import Attacker, ProtectionCase, own_protection_case, protection_cases
from profcil.engine.client import embed
from profcil.engine.evaluation import evaluation_features
from profcil.engine.run_state import RunState
from profcil.engine.world import World
from profcil.methods.base import Method
from profcil.randomness import generator

CANDIDATES = 100
GROUP = 5  # examples of a class in a report
RIDGE = 1e-3  # of the attacker's regression, as a share of the mean diagonal


def audit(world: World, method: Any, state: RunState, trials: int) -> list[dict[str, Any]]:
    """The results of all attacks, one row for each attack and protection. Without reports the model alone is
    attacked."""
    attacker = Attacker(world, method, state)
    rows: list[dict[str, Any]] = []
    has_reports = type(method).survey is not Method.survey
    if has_reports and attacker.class_row(attacker.report(world.bundle.train, [0], ProtectionCase("none"))) is not None:
        for case in [*protection_cases(world.config.privacy), *own_protection_case(world)]:
            rows += identify(attacker, case, trials)
            rows.append(member(attacker, case, trials))
    rows.append(head(attacker))
    return rows


def identify(attacker: Attacker, case: ProtectionCase, trials: int) -> Iterator[dict[str, Any]]:
    """How often the input behind a report of one example is found, and how like it a reconstruction is."""
    train = attacker.world.bundle.train
    rng = generator(attacker.world.config.seed, "audit", "identify")
    chosen = rng.choice(len(train), size=min(CANDIDATES, len(train)), replace=False).tolist()
    features = attacker.features(train, chosen, case)
    decoder = Decoder.fit(attacker, case)
    hits = 0
    likeness = []
    sent = 0
    for number in range(min(trials, len(chosen))):
        row = attacker.seen_row(train, [chosen[number]], case, number)
        if row is None:
            continue
        sent += 1
        hits += int((features - row).norm(dim=1).argmin()) == number
        if decoder:
            likeness.append(decoder.likeness(row, train, chosen[number]))
    found = f"{hits} of {min(trials, len(chosen))} inputs picked out of {len(chosen)}" if sent else "nothing was sent"
    yield result("identify", case, hits / max(1, sent) if sent else 0.0, found, 1 / len(chosen))
    if decoder and sent:
        mean = sum(likeness) / len(likeness)
        text = f"inputs rebuilt with correlation {mean:.2f} (another input of the class: {decoder.guess:.2f})"
        yield result("rebuild", case, mean, text, decoder.guess)


@dataclass(frozen=True)
class Decoder:
    """A linear map from features to inputs, fitted on test examples."""

    weight: Tensor
    mean: Tensor
    guess: float  # the correlation of two inputs of one class

    @classmethod
    def fit(cls, attacker: Attacker, case: ProtectionCase) -> Decoder | None:
        """None where inputs are no arrays of numbers: token ids, graphs."""
        if attacker.world.bundle.facts.modality not in ("image", "table"):
            return None
        test = attacker.world.bundle.test
        rows = list(range(min(400, len(test))))
        features = with_one(attacker.features(test, rows, case))
        inputs = flat_inputs(test, rows)
        gram = features.T @ features
        gram.diagonal().add_(RIDGE * gram.diagonal().mean())
        centred = inputs - inputs.mean(0)
        weight = torch.linalg.solve(gram, features.T @ centred)
        y = test.y[rows]
        pairs = [(i, j) for i in range(100) for j in range(i) if y[i] == y[j]]
        guess = sum(correlation(inputs[i], inputs[j]) for i, j in pairs) / max(1, len(pairs))
        return cls(weight, inputs.mean(0), guess)

    def likeness(self, row: Tensor, examples: Examples, index: int) -> float:
        rebuilt = with_one(row[None]) @ self.weight + self.mean
        return correlation(rebuilt[0], flat_inputs(examples, [index])[0])


def member(attacker: Attacker, case: ProtectionCase, trials: int) -> dict[str, Any]:
    """The area under the ROC curve of deciding who is in a report of few examples of one class."""
    train = attacker.world.bundle.train
    rng = generator(attacker.world.config.seed, "audit", "member")
    inside: list[float] = []
    outside: list[float] = []
    labels = train.y.cpu()
    for number in range(max(1, trials // GROUP)):
        label = int(labels[int(rng.integers(len(labels)))])
        ids = torch.nonzero(labels == label).flatten().numpy()
        if len(ids) < 2 * GROUP:
            continue
        rows = rng.choice(ids, size=2 * GROUP, replace=False).tolist()
        row = attacker.seen_row(train, rows[:GROUP], case, number)
        if row is None:
            continue
        features = attacker.features(train, rows, case)
        near = -(features - row).norm(dim=1)
        inside += near[:GROUP].tolist()
        outside += near[GROUP:].tolist()
    area = roc_area(inside, outside) if inside else 0.5
    return result("member", case, area, f"AUC {area:.2f} for reports of {GROUP} examples", 0.5)


def head(attacker: Attacker) -> dict[str, Any]:
    """The area under the ROC curve of deciding from the final model who was trained on."""
    world = attacker.world
    method = attacker.method
    server = attacker.state.server
    used = sorted({int(i) for p in range(world.plan.positions) for c in range(world.plan.clients)
                   for i in world.plan.samples(c, p)})  # fmt: skip
    train = world.bundle.train
    index = torch.tensor(used, device=world.device)
    with torch.no_grad():
        members = method.views(server, lambda feature_map: embed(world.net, feature_map, train, index))
        others = evaluation_features(world, method, server)
        inside = true_class(method.scores(world.net, server, members), train.y[index])
        outside = true_class(method.scores(world.net, server, others), world.evaluation_examples.y)
    area = roc_area(inside, outside)
    return result("head", ProtectionCase("as the run was"), area, f"AUC {area:.2f} from the final model", 0.5)


def true_class(scores: Tensor, y: Tensor) -> list[float]:
    """The score of the true class less the highest other one."""
    scores = scores.double().clone()
    own = scores.gather(1, y[:, None])
    scores.scatter_(1, y[:, None], -torch.inf)
    margin: list[float] = (own[:, 0] - scores.amax(1)).tolist()
    return margin


def result(attack: str, case: ProtectionCase, value: float, text: str, chance: float) -> dict[str, Any]:
    """One row: attack, protection, its number, what an attacker gets by guessing, and a verdict."""
    gained = (value - chance) / (1 - chance)
    verdict = "nothing" if gained < 0.1 else "something" if gained < 0.5 else "much"
    return {
        "attack": attack, "protection": case.name, "value": value, "guessing": chance, "found": text,
        "verdict": f"reveals {verdict}",
    }  # fmt: skip


def roc_area(inside: Sequence[float], outside: Sequence[float]) -> float:
    """The probability that a member has a higher score than another example; a tie counts half."""
    a = torch.tensor(inside, dtype=torch.float64)
    b = torch.tensor(outside, dtype=torch.float64)
    higher = (a[:, None] > b).double() + 0.5 * (a[:, None] == b).double()
    return float(higher.mean())


def with_one(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_ones(len(rows), 1)], 1)


def flat_inputs(examples: Examples, rows: Sequence[int]) -> Tensor:
    """Inputs as rows of numbers."""
    index = torch.tensor(list(rows), device=examples.y.device)
    return examples.inputs(index)[0].double().flatten(1)


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's correlation of two vectors; 0 if one is constant."""
    a = a - a.mean()
    b = b - b.mean()
    length = float(a.norm() * b.norm())
    return float(a @ b) / length if length else 0.0
