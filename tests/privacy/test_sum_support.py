"""Minimum support over the clients of a secure sum: rare classes of one client are used, rare ones of all are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from profcil.errors import ConfigError
from profcil.privacy.secure_sum.simulation import ROUNDS

MANY = {"setting": "homogeneous", "clients": 120, "participants": 40, "train__rounds": 1, "task_size": 5}
SECURE = {"privacy__secure_sum": "true", "warmup__rounds": 0}


def counts(run, position: int = 0) -> list[Counter]:
    clients = [run.client(c, position, 0) for c in run.clients(position, 0)]
    return [Counter(client.y_list) for client in clients]


@pytest.mark.parametrize(
    ("method", "block", "more"),
    [
        ("probayes", "class_sums", {"dictionary": 30}),
        ("prolin", "reported", {"base_rounds": 0, "dictionary": 20}),
        ("pro", "memory", {}),
    ],
)
def test_support_is_counted_over_the_clients_of_a_sum(fresh: Callable, method: str, block: str, more: dict) -> None:
    settings = {**MANY, **SECURE, **more}
    each = counts(fresh(method, **settings))
    total = sum(each, Counter())
    least = sorted(total.values())[2]  # some classes of the position have fewer examples, in all clients together
    assert min(total.values()) < least < max(total.values())
    assert max(max(count.values()) for count in each) < least  # no client alone has enough of any class
    run = fresh(method, **settings, privacy__min_support=least, privacy__sum_support="true")
    run.play(0, 0)
    found = run.server.blocks[block]
    kept = dict(zip(found.labels, found.tensors["count"].tolist(), strict=True))
    assert kept == {label: count for label, count in total.items() if count >= least}
    assert {e.kind for e in run.ledger.entries if e.direction == "up"} == set(ROUNDS)
    assert run.world.withheld is None
    alone = fresh(method, **settings, privacy__min_support=least)
    alone.play(0, 0)
    assert not alone.server.blocks[block].labels if block in alone.server.blocks else True


def test_what_is_left_out_is_in_no_matrix(fresh: Callable) -> None:
    """A second-moment matrix with the examples of a withheld class would reveal them as a difference."""
    settings = {**MANY, **SECURE, "base_rounds": 0, "dictionary": 20}
    total = sum(counts(fresh("prolin", **settings)), Counter())
    least = sorted(total.values())[2]
    run = fresh("prolin", **settings, privacy__min_support=least, privacy__sum_support="true")
    run.play(0, 0)
    gram = run.server.blocks["reported_gram"].tensors["gram"]
    examples = float(gram[-1])  # of the constant feature with itself
    assert examples == pytest.approx(sum(count for count in total.values() if count >= least), rel=1e-4)


def test_it_needs_secure_sums(fresh: Callable) -> None:
    with pytest.raises(ConfigError, match=r"set privacy\.secure_sum = true"):
        fresh("pro", privacy__sum_support="true")


def test_with_noise_nothing_is_counted_before(fresh: Callable) -> None:
    """The counts would have none."""
    noise = {"privacy__unit": "example", "privacy__epsilon": 8.0, "privacy__min_support": 5}
    run = fresh("probayes", **SECURE, **noise, privacy__sum_support="true", setting="homogeneous", dictionary=30)
    run.play(0, 0)
    sums = [e for e in run.ledger.entries if e.kind == "masked" and e.direction == "up"]
    assert len(sums) == len(run.clients(0, 0))
