"""FAA, CTA and AF against small examples and the paper's formulas written as loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil.metrics import client_first as m
from profcil.metrics.scores import Scores

# Three tasks with 10, 20 and 10 test examples. Client 0 has the order 0 1 2, client 1 the order 1 0 2, so tasks 0
# and 1 are introduced at position 0 and task 2 at the last position.
TOTAL = np.array([10, 20, 10])
ORDERS = np.array([[0, 1, 2], [1, 0, 2]])
CORRECT = np.array([[8, 10, -1], [6, 16, -1], [5, 12, 9]])


def test_cumulative_accuracy_pools_the_test_examples_of_the_tasks_so_far():
    assert m.cumulative_accuracy(CORRECT, TOTAL, ORDERS, 0).tolist() == [8 / 10, 10 / 20]
    assert m.cumulative_accuracy(CORRECT, TOTAL, ORDERS, 1).tolist() == [22 / 30, 22 / 30]


def test_faa_of_a_small_example():
    # Both clients have had all tasks: (5 + 12 + 9) / 40. A mean over tasks would give (.5 + .6 + .9) / 3 = .667.
    assert m.final_average_accuracy(CORRECT, TOTAL, ORDERS) == pytest.approx(26 / 40)


def test_cta_of_a_small_example():
    # Client 0: 8/10, 16/20, 9/10. Client 1: 10/20, 6/10, 9/10. Sum 4.5 over six cells.
    assert m.current_task_accuracy(CORRECT, TOTAL, ORDERS) == pytest.approx(0.75)
    assert m.current_by_position(CORRECT, TOTAL, ORDERS) == pytest.approx([0.65, 0.7, 0.9])


def test_af_of_a_small_example():
    # Client 0: task 0 from position 0: max(.8, .6, .5) - .5 = .3; task 1 from position 1: max(.8, .6) - .6 = .2.
    # Client 1: task 1 from position 0: max(.5, .8, .6) - .6 = .2; task 0 from position 1: max(.6, .5) - .5 = .1.
    assert m.average_forgetting(CORRECT, TOTAL, ORDERS) == pytest.approx((0.25 + 0.15) / 2)


def test_results_so_far_are_those_of_a_stream_that_ended_there():
    # After position 1 client 0 has had tasks 0 and 1, client 1 tasks 1 and 0: (6 + 16) / 30 for both. The current task
    # had 8/10 and 16/20 with client 0, 10/20 and 6/10 with client 1. Client 0 lost .8 - .6 of task 0, client 1 nothing.
    found = m.summary_so_far(CORRECT, TOTAL, ORDERS, 1)
    assert found == pytest.approx({"faa": 100 * 22 / 30, "cta": 100 * 2.7 / 4, "af": 100 * 0.2 / 2})
    first = m.summary_so_far(CORRECT, TOTAL, ORDERS, 0)
    assert first == pytest.approx({"faa": 65.0, "cta": 65.0, "af": 0.0})  # nothing can be forgotten yet


def test_results_so_far_end_at_the_results():
    assert m.summary_so_far(CORRECT, TOTAL, ORDERS, 2) == pytest.approx(m.summary(CORRECT, TOTAL, ORDERS))


def test_af_leaves_out_the_last_task_of_each_client():
    # All tasks are introduced at position 0; only task 0 is forgotten, from 1.0 to 0.0.
    correct = np.array([[10, 5, 5], [10, 5, 5], [0, 5, 5]])
    total = np.array([10, 10, 10])
    orders = np.array([[0, 1, 2], [1, 2, 0]])  # task 0 is the last task of client 1, so it is left out
    assert m.average_forgetting(correct, total, orders) == pytest.approx((0.5 + 0.0) / 2)


def test_accuracy_before_the_client_had_the_task_does_not_count_as_forgotten():
    # Task 1 has accuracy 1.0 at position 0, before client 0 has it, and 0.2 from position 1 on.
    correct = np.array([[5, 10, 5], [5, 2, 5], [5, 2, 5]])
    total = np.array([10, 10, 10])
    assert m.forgetting(correct, total, np.array([[0, 1, 2]]))[0].tolist() == [0.0, 0.0, 0.0]
    assert m.forgetting(correct, total, np.array([[1, 0, 2]]))[0].tolist() == [0.0, 0.8, 0.0]


def test_af_of_a_single_task_is_zero():
    correct = np.array([[7]])
    total = np.array([10])
    orders = np.zeros((3, 1), dtype=int)
    assert m.summary(correct, total, orders) == pytest.approx({"faa": 70.0, "cta": 70.0, "af": 0.0})


def test_accuracy_of_tasks_not_introduced_yet_is_nan():
    is_nan = np.isnan(m.accuracy(CORRECT, TOTAL))
    assert is_nan.tolist() == [[False, False, True], [False, False, True], [False] * 3]


def test_scores_are_written_to_json_and_read_back():
    scores = Scores.from_json(Scores(CORRECT, TOTAL).to_json())
    assert np.array_equal(scores.correct, CORRECT)
    assert np.array_equal(scores.total, TOTAL)
    assert (Scores.empty(2, np.array([3, 4])).correct == -1).all()


@st.composite
def streams(draw) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tasks = draw(st.integers(1, 5))
    clients = draw(st.integers(1, 4))
    orders = np.array([draw(st.permutations(range(tasks))) for _ in range(clients)])
    total = np.array([draw(st.integers(1, 9)) for _ in range(tasks)])
    correct = np.array([[draw(st.integers(0, int(n))) for n in total] for _ in range(tasks)])
    for p in range(tasks):
        unseen = set(range(tasks)) - set(orders[:, : p + 1].flatten().tolist())
        correct[p, list(unseen)] = -1
    return correct, total, orders


def reference(correct: np.ndarray, total: np.ndarray, orders: np.ndarray) -> dict[str, float]:
    """The definitions of the paper's appendix, cell by cell."""
    clients, tasks = orders.shape
    faa = cta = af = 0.0
    for c in range(clients):
        faa += sum(correct[-1, t] for t in orders[c]) / sum(total[t] for t in orders[c]) / clients
        for p in range(tasks):
            cta += correct[p, orders[c, p]] / total[orders[c, p]] / (clients * tasks)
        for t in set(range(tasks)) - {int(orders[c, -1])}:
            first = orders[c].tolist().index(t)
            best = max(correct[q, t] / total[t] for q in range(first, tasks))
            af += (best - correct[-1, t] / total[t]) / (tasks - 1) / clients
    return {"faa": 100 * faa, "cta": 100 * cta, "af": 100 * af}


@settings(max_examples=50, deadline=None)
@given(streams())
def test_the_metrics_agree_with_the_papers_formulas(stream):
    assert m.summary(*stream) == pytest.approx(reference(*stream), abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(streams())
def test_homogeneous_streams_give_the_standard_class_incremental_metrics(stream):
    _, total, orders = stream
    tasks = len(total)
    rng = np.random.default_rng(int(total.sum()))
    correct = np.array([[rng.integers(0, n + 1) if t <= p else -1 for t, n in enumerate(total)] for p in range(tasks)])
    a = correct / total
    found = m.summary(correct, total, np.tile(np.arange(tasks), (len(orders), 1)))
    drops = [a[t:, t].max() - a[-1, t] for t in range(tasks - 1)]
    standard = {
        "faa": 100 * correct[-1].sum() / total.sum(),
        "cta": 100 * np.diag(a).mean(),
        "af": 100 * np.mean(drops) if drops else 0.0,
    }
    assert found == pytest.approx(standard)


@settings(max_examples=25, deadline=None)
@given(streams())
def test_the_order_of_the_clients_does_not_matter(stream):
    correct, total, orders = stream
    assert m.summary(correct, total, orders[::-1]) == pytest.approx(m.summary(correct, total, orders))


# -- clients and transfer ---------------------------------------------------------------------------------------------

EXAMPLES = np.array([[10, 0, 10], [0, 30, 10]])  # training examples of each client by task
SIZES = np.array([2, 3, 1])  # classes of each task


def test_client_accuracy_is_weighted_by_the_clients_own_examples():
    # Final accuracies .5, .6 and .9. Client 0: (10 x .5 + 10 x .9) / 20. Client 1: (30 x .6 + 10 x .9) / 40.
    assert m.client_accuracy(CORRECT, TOTAL, EXAMPLES) == pytest.approx([0.7, 0.675])


def test_a_client_without_examples_has_no_accuracy():
    found = m.client_accuracy(CORRECT, TOTAL, np.array([[0, 0, 0], [0, 1, 0]]))
    assert np.isnan(found[0]) and found[1] == pytest.approx(0.6)
    untested = m.client_accuracy(CORRECT, np.array([10, 0, 10]), EXAMPLES)  # task 1 has no test examples
    assert untested == pytest.approx([0.7, 0.9])


def test_backward_transfer_of_a_small_example():
    # Client 0: task 0 .5 - .8, task 1 .6 - .8. Client 1: task 1 .6 - .5, task 0 .5 - .6. The last task is left out.
    assert m.backward_transfer(CORRECT, TOTAL, ORDERS) == pytest.approx((-0.3 - 0.2 + 0.1 - 0.1) / 4)
    assert m.backward_transfer(CORRECT[:1, :1], TOTAL[:1], ORDERS[:1, :1]) == 0.0


def test_forward_transfer_counts_tasks_that_another_client_has_met_before():
    # At position 0 the classes of tasks 0 and 1 are introduced, 5 of them: guessing is right in .2 of the cases.
    # Client 0 meets task 1 at position 1: .5 - .2. Client 1 meets task 0 at position 1: .8 - .2.
    # Task 2 is new to all clients at position 2: none of its classes could be predicted before.
    assert m.forward_transfer(CORRECT, TOTAL, ORDERS, SIZES) == pytest.approx((0.3 + 0.6) / 2)


def test_there_is_no_forward_transfer_if_all_clients_have_one_order():
    same = np.array([[0, 1, 2], [0, 1, 2]])
    correct = np.array([[8, -1, -1], [6, 16, -1], [5, 12, 9]])
    assert m.forward_transfer(correct, TOTAL, same, SIZES) is None
    found = m.further_summary(correct, TOTAL, same, EXAMPLES, SIZES)
    assert found["fwt"] is None and found["worst_client"] == pytest.approx(67.5)
    assert found["client_sd"] == pytest.approx(100 * np.std([0.7, 0.675]))
    assert found["bwt"] == pytest.approx(100 * (-0.3 - 0.2) / 2)


def test_all_clients_have_the_same_accuracy_at_the_end_of_the_stream():
    """Which is why the spread over clients is that of their own mix of tasks."""
    assert len(set(m.cumulative_accuracy(CORRECT, TOTAL, ORDERS, 2).tolist())) == 1
