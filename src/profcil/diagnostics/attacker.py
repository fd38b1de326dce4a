"""What an attacker on a finished run sees: reports of clients with any examples, behind a protection or none.

The attacker knows the model, and test data of the same kind. Reports come from the method's own `survey`, as a client
would send them; the features of an input are the report of a client that has this input alone. A secure sum is like the
report of one client with the examples of all: the others have examples of the same class, of which the attacker knows
the number, and takes as many times the mean of the class in its test data off the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from profcil.data.bundle import Examples
from profcil.engine.channel import Inbox, Reply, When
from profcil.engine.run_state import RunState
from profcil.engine.world import World
from profcil.privacy.accountant import multiplier_of
from profcil.privacy.protection import Protection
from profcil.privacy.settings import PrivacySettings
from profcil.randomness import derive_seed

EPSILONS = (8.0, 1.0)
SUPPORT = 2
OTHERS = 20  # examples of a class at the other clients of a secure sum
KNOWN = 40  # test examples of a class, from which the attacker knows its mean


@dataclass(frozen=True)
class ProtectionCase:
    """A protection that the attacks are tried against."""

    name: str
    min_support: int = 1
    protection: Protection | None = None
    summed: bool = False  # whether reports are seen in secure sums alone


def protection_cases(settings: PrivacySettings) -> list[ProtectionCase]:
    """No protection, minimum support, secure sums, and noise, with the bound of a run's settings."""
    found = [ProtectionCase("none"), ProtectionCase(f"minimum support {SUPPORT}", min_support=SUPPORT)]
    found.append(ProtectionCase("secure sum", summed=True))
    for epsilon in EPSILONS:
        chosen = replace(settings, unit="example", epsilon=epsilon, secure_sum=False)
        noise = Protection(chosen, multiplier_of(epsilon, settings.delta), 1)
        found.append(ProtectionCase(f"noise, ε = {epsilon:g}", protection=noise))
        found.append(ProtectionCase(f"both, ε = {epsilon:g}", protection=noise, summed=True))
    return found


def own_protection_case(world: World) -> list[ProtectionCase]:
    """The protection of the run itself, if it has any."""
    limits = world.limits()
    settings = world.config.privacy
    if world.protection is None and limits["min_support"] == 1 and not settings.secure_sum:
        return []
    noise = world.protection
    if noise:  # the noise of a sum is added to the report that stands for it
        noise = replace(noise, settings=replace(noise.settings, secure_sum=False))
    return [ProtectionCase("as the run was", limits["min_support"], noise, settings.secure_sum)]


@dataclass
class Attacker:
    """A finished run, and reports of clients with any examples."""

    world: World
    method: Any
    state: RunState
    known: dict[tuple[int, int, Protection | None], Tensor] = field(default_factory=dict)  # features of examples

    def report(
        self, examples: Examples, rows: Sequence[int], case: ProtectionCase, number: int = 0, noised: bool = True
    ) -> Reply:
        """What a client with these examples would report under the final model."""
        when = When("refresh", self.world.plan.positions - 1, 0, 1)
        bound = case.protection.settings.bound if case.protection else math.inf
        rows = [*rows, *self.others(examples, rows, case)]
        current = torch.tensor(list(rows), device=self.world.device)
        some = self.world.client(0, when)
        client = replace(
            some, examples=examples, current=current, cache={}, kept={}, bound=bound, min_support=case.min_support
        )
        with torch.no_grad():
            reply = self.method.survey(client, self.inbox(when))
        if case.protection is None or not noised:
            return reply
        secret = derive_seed(self.world.config.seed, "audit", number)
        return case.protection.protect(reply, {}, when, len(rows), secret)

    def others(self, examples: Examples, rows: Sequence[int], case: ProtectionCase) -> list[int]:
        """The examples of the same class at the other clients of a secure sum."""
        if not case.summed:
            return []
        same = self.of_class(examples, int(examples.y[rows[0]]))
        return [row for row in same if row not in rows][:OTHERS]

    def of_class(self, examples: Examples, label: int) -> list[int]:
        """The examples of a class."""
        found: list[int] = torch.nonzero(examples.y == label).flatten().tolist()
        return found

    def seen_row(self, examples: Examples, rows: Sequence[int], case: ProtectionCase, number: int) -> Tensor | None:
        """What the attacker gets of the mean of these examples. None if nothing is sent."""
        reply = self.report(examples, rows, case, number)
        others = len(self.others(examples, rows, case))
        mean = self.class_row(reply, len(rows))
        if mean is None or not others:
            return mean
        test = self.world.bundle.test
        known = self.of_class(test, int(examples.y[rows[0]]))[:KNOWN]
        return mean - self.features(test, known, case).mean(0) * others / len(rows)

    def inbox(self, when: When) -> Inbox:
        """The blocks that a survey needs, without those that say who has reported."""
        blocks = self.state.server.blocks
        names = self.method.survey_blocks(self.state.server, when)
        return {name: blocks[name] for name in names if name in blocks and name not in ("reported_clients",)}

    def class_row(self, reply: Reply, examples: int = 1) -> Tensor | None:
        """The mean of the first class in a report, by the attacker's own number of examples: a reported count may have
        noise. None if there is no class."""
        for block in reply.blocks.values():
            if block.labels and {"mean", "count"} <= block.tensors.keys():
                total = block.tensors["mean"][0].double() * float(block.tensors["count"][0])
                return total / examples
        return None

    def features(self, examples: Examples, rows: Sequence[int], case: ProtectionCase | None = None) -> Tensor:
        """The features of some examples as they are summed under a protection, without noise."""
        limits = ProtectionCase("none", protection=case.protection if case else None)
        for row in rows:
            if (id(examples), row, limits.protection) not in self.known:
                found = self.class_row(self.report(examples, [row], limits, noised=False))
                assert found is not None
                self.known[id(examples), row, limits.protection] = found
        return torch.stack([self.known[id(examples), row, limits.protection] for row in rows])
