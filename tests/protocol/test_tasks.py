from __future__ import annotations

import pytest

from profcil.errors import ConfigError
from profcil.protocol.tasks import class_order, split


@pytest.mark.parametrize(
    ("classes", "size", "expected"),
    [(7, 2, [2, 2, 3]), (40, 5, [5] * 8), (100, 10, [10] * 10), (5, 5, [5]), (5, 3, [5])],
)
def test_the_remainder_goes_to_the_last_task(classes: int, size: int, expected: list[int]) -> None:
    tasks = split(class_order(classes, 3), size)
    assert [len(t) for t in tasks] == expected
    assert sorted(y for t in tasks for y in t) == list(range(classes))


def test_tasks_follow_the_class_order() -> None:
    assert split((4, 0, 3, 1, 2), 2) == ((4, 0), (3, 1, 2))


def test_the_class_order_is_a_seeded_permutation() -> None:
    orders = {class_order(20, seed) for seed in range(10)}
    assert len(orders) == 10
    assert class_order(20, 4) == class_order(20, 4)
    assert all(sorted(o) == list(range(20)) for o in orders)


@pytest.mark.parametrize("size", [0, -1, 8])
def test_a_task_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=rf"task_size is {size}, allowed is 1 to 7"):
        split(range(7), size)
