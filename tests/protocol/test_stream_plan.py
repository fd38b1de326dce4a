from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil.errors import ConfigError, DataError, RunFolderError
from profcil.protocol.heterogeneity import half_up
from profcil.protocol.plan import Plan, StreamSettings, assemble, make_plan

few = settings(max_examples=40, deadline=None)
fractions = st.integers(0, 20).map(lambda n: n / 20)
SEVERE = StreamSettings(clients=20, participants=10, task_size=10, support=0.4, coverage=0.5, disorder=0.6)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, int, StreamSettings, int]:
    clients, classes = draw(st.integers(1, 12)), draw(st.integers(1, 10))
    chosen = StreamSettings(
        clients,
        draw(st.integers(1, clients)),
        draw(st.integers(1, classes)),
        *draw(st.tuples(fractions, fractions, fractions)),
        draw(st.sampled_from(["derange", "adjacent"])),
        draw(st.sampled_from([0.0, 0.1, 1.0])),
    )
    counts = draw(st.lists(st.integers(1, 8), min_size=classes, max_size=classes))
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(classes), counts))
    return labels, classes, chosen, draw(st.integers(0, 1000))


def cells(plan: Plan) -> list[tuple[int, int]]:
    return [(c, p) for c in range(plan.clients) for p in range(plan.positions)]


@few
@given(cases())
def test_every_sample_is_in_exactly_one_place_and_every_class_is_supported(case) -> None:
    labels, classes, _, _ = case
    plan = make_plan(*case)
    everything = np.concatenate([plan.samples(c, p) for c, p in cells(plan)])
    assert sorted(everything.tolist()) == list(range(len(labels)))
    assert {y for c, p in cells(plan) for y in plan.observed(c, p)} == set(range(classes))
    assert plan.audit()["support_assumption"]
    assert plan.seen(plan.positions - 1) == set(range(classes))


@few
@given(cases())
def test_cells_agree_with_the_labels(case) -> None:
    labels, plan = case[0], make_plan(*case)
    for c, p in cells(plan):
        ids = plan.samples(c, p)
        assert ids.tolist() == sorted(ids.tolist())
        assert plan.observed(c, p) == tuple(np.unique(labels[ids]).tolist())
        assert set(plan.observed(c, p)) <= set(plan.tasks[plan.orders[c, p]])
        assert (c in plan.active(p)) == (len(ids) > 0) == (c in plan.supporters(plan.orders[c, p]))
    for c in range(plan.clients):
        parts = [plan.samples(c, p).tolist() for p in range(plan.positions)]
        assert plan.owned(c).tolist() == sorted(i for part in parts for i in part)


@few
@given(cases())
def test_with_enough_samples_support_and_coverage_are_exact(case) -> None:
    _, classes, chosen, seed = case
    plan = make_plan(np.repeat(np.arange(classes), 12), classes, replace(chosen, dirichlet=0.0), seed)
    grown = plan.audit()["quotas_grown"]
    for t, task in enumerate(plan.tasks):
        who = plan.supporters(t)
        seen = [len(plan.observed(c, list(plan.orders[c]).index(t))) for c in who]
        quota = max(1, half_up(chosen.coverage * len(task)))
        assert len(who) == max(1, half_up(chosen.support * chosen.clients))
        assert sum(seen) == quota * len(who) + grown[t]
        assert min(seen) == quota + grown[t] // len(who)


def test_the_severe_setting_is_what_it_says() -> None:
    plan = make_plan(np.repeat(np.arange(100), 40), 100, SEVERE, 1)
    facts = plan.audit()
    assert facts["support"] == [0.4] * 10
    assert facts["coverage"] == [0.5] * 10
    assert facts["disorder"] == pytest.approx(0.6)
    assert facts["idle_cells"] == 120
    assert facts["quotas_grown"] == [0] * 10
    assert json.loads(json.dumps(facts)) == facts


def test_the_homogeneous_setting_is_a_special_case() -> None:
    plan = make_plan(np.repeat(np.arange(6), 12), 6, StreamSettings(4, 4, 2), 0)
    assert (plan.orders == np.arange(3)).all()
    for p, task in enumerate(plan.tasks):
        assert plan.active(p).tolist() == [0, 1, 2, 3]
        assert plan.seen(p) == {y for t in plan.tasks[: p + 1] for y in t}
        assert all(plan.observed(c, p) == tuple(sorted(task)) for c in range(4))
        assert all(len(plan.samples(c, p)) == 6 for c in range(4))
    assert plan.audit()["idle_cells"] == plan.audit()["untaught_cells"] == 0


def test_cora_is_two_two_three() -> None:
    plan = make_plan(np.arange(70) % 7, 7, StreamSettings(5, 5, 2), 0)
    assert [len(t) for t in plan.tasks] == [2, 2, 3]


def by_hand() -> Plan:
    """Two clients, three tasks; client 0 has data of tasks 0 and 2, client 1 of task 1."""
    orders = np.array([[0, 2, 1], [2, 0, 1]])
    owner = np.array([0, 0, 1, 0, -1])
    labels = np.array([5, 1, 3, 0, 5])
    return assemble(labels, owner, ((5, 1), (3, 2), (0, 4)), orders, StreamSettings(2, 1, 2), 0)


def test_a_small_plan_by_hand() -> None:
    plan = by_hand()
    assert [plan.seen(p) for p in range(3)] == [{5, 1, 0, 4}, {5, 1, 0, 4}, {0, 1, 2, 3, 4, 5}]
    assert plan.samples(0, 0).tolist() == [0, 1]
    assert plan.observed(0, 0) == (1, 5)
    assert plan.samples(0, 1).tolist() == [3]
    assert plan.samples(1, 2).tolist() == [2]
    assert plan.owned(0).tolist() == [0, 1, 3]
    assert [plan.active(p).tolist() for p in range(3)] == [[0], [0], [1]]


def test_the_audit_by_hand() -> None:
    facts = by_hand().audit()
    assert facts["support"] == [0.5, 0.5, 0.5]
    assert facts["coverage"] == [1.0, 0.5, 0.5]
    assert facts["disorder"] == pytest.approx(5 / 6)
    assert facts["unsupported_classes"] == [2, 4]
    assert not facts["support_assumption"]
    assert (facts["cells"], facts["idle_cells"], facts["samples"], facts["empty_clients"]) == (6, 3, 4, 0)
    assert facts["untaught_cells"] == 1  # client 1 meets task 2 at 0, its only data arrives with client 0 at 1


@few
@given(cases())
def test_the_plan_is_a_pure_function(case) -> None:
    labels, classes, chosen, seed = case
    plan = make_plan(*case)
    again = make_plan(labels.astype(np.uint8).tolist(), classes, replace(chosen), seed)
    assert plan == again
    assert hash(plan) == hash(again)


def test_the_seed_and_each_control_matter_alone() -> None:
    labels = np.repeat(np.arange(100), 40)
    plan = make_plan(labels, 100, SEVERE, 1)
    calm = make_plan(labels, 100, replace(SEVERE, disorder=0.0), 1)
    assert plan != make_plan(labels, 100, SEVERE, 2)
    assert plan != calm
    assert (plan.ids == calm.ids).all()  # the order sweep keeps who owns what
    wide = make_plan(labels, 100, replace(SEVERE, support=0.8), 1)
    assert (plan.orders == wide.orders).all()
    assert wide.tasks == plan.tasks


def test_the_digest_is_pinned() -> None:
    chosen = StreamSettings(5, 2, 2, support=0.6, coverage=0.5, disorder=0.7)
    plan = make_plan(np.arange(35) % 7, 7, chosen, 11)
    assert plan.digest == "44b54a7eda32dc0ca3a19af4399ed701"


def test_the_digest_covers_every_part() -> None:
    plan = make_plan(np.arange(35) % 7, 7, StreamSettings(5, 2, 2), 11)
    changed = [
        replace(plan, settings=replace(plan.settings, participants=3)),
        replace(plan, seed=12),
        replace(plan, tasks=plan.tasks[::-1]),
        replace(plan, orders=plan.orders[:, ::-1]),
        replace(plan, ids=plan.ids[::-1]),
        replace(plan, starts=plan.starts + 1),
        replace(plan, labels=plan.labels[::-1]),
        replace(plan, label_starts=plan.label_starts + 1),
    ]
    assert len({p.digest for p in [plan, *changed]}) == 9


def test_a_plan_cannot_be_changed() -> None:
    plan = by_hand()
    with pytest.raises(FrozenInstanceError):
        plan.seed = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        plan.samples(0, 0)[0] = 9


def test_save_and_load_return_the_same_plan(tmp_path: Path) -> None:
    plan = make_plan(np.repeat(np.arange(100), 10), 100, SEVERE, 1)
    plan.save(tmp_path / "plan.npz")
    again = Plan.load(tmp_path / "plan.npz")
    assert again == plan
    assert (again.settings, again.seed, again.tasks) == (plan.settings, plan.seed, plan.tasks)
    assert again.audit() == plan.audit()
    assert [f.name for f in tmp_path.iterdir()] == ["plan.npz"]


def test_a_damaged_file_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "plan.npz"
    by_hand().save(path)
    whole = path.read_bytes()
    for content in (b"", b"not a plan", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(DataError, match="cannot be read as a stream plan"):
            Plan.load(path)
    with pytest.raises(DataError, match="No such file"):
        Plan.load(tmp_path / "absent.npz")


def test_a_file_whose_content_was_changed_is_refused(tmp_path: Path) -> None:
    by_hand().save(tmp_path / "plan.npz")
    with np.load(tmp_path / "plan.npz") as stored:
        arrays = dict(stored)
    np.savez(tmp_path / "other.npz", **{**arrays, "ids": arrays["ids"][::-1]})
    with pytest.raises(DataError, match="digest"):
        Plan.load(tmp_path / "other.npz")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.npz"
    by_hand().save(path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(RunFolderError, match="No space left"):
        make_plan([0, 1], 2, StreamSettings(2, 1, 1), 0).save(path)
    assert Plan.load(path) == by_hand()
    assert [f.name for f in tmp_path.iterdir()] == ["plan.npz"]


def test_the_description_shows_who_sees_what_when() -> None:
    text = by_hand().describe()
    rows = [line.split() for line in text.splitlines()]
    assert ["client", "p0", "p1", "p2"] in rows
    assert ["0", "0", "2", "(1)"] in rows
    assert ["1", "(2)", "(0)", "1"] in rows
    assert "task 1: classes 3 2" in text
    assert "broken by classes [2, 4]" in text
    assert "... and 1 more clients" in by_hand().describe(limit=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clients": 0}, "clients is 0, allowed is a whole number of at least 1"),
        ({"clients": 2.5}, "clients is 2.5"),
        ({"clients": True}, "clients is True"),
        ({"participants": 6}, "participants is 6, allowed is a whole number from 1 to 5"),
        ({"task_size": 0}, "task_size is 0"),
        ({"support": 1.4}, "support is 1.4, allowed is a number from 0 to 1; change support"),
        ({"coverage": -0.1}, "coverage is -0.1"),
        ({"disorder": float("nan")}, "disorder is nan"),
        ({"disorder": "0.5"}, "disorder is '0.5'"),
        ({"dirichlet": float("inf")}, "dirichlet is inf"),
        ({"sampler": "adjacend"}, "unknown sampler 'adjacend'; did you mean adjacent"),
    ],
)
def test_a_bad_setting_is_named_with_its_range(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StreamSettings(**{"clients": 5, "participants": 2, "task_size": 2, **change})


@pytest.mark.parametrize("labels", [[], [[0, 1]], [0.0, 1.0], [0, 7], [-1, 0]])
def test_labels_that_are_no_class_ids_are_refused(labels: list) -> None:
    with pytest.raises(DataError, match="labels"):
        make_plan(labels, 7, StreamSettings(2, 1, 2), 0)


def test_what_is_not_in_the_plan_is_refused() -> None:
    plan = by_hand()
    for call in (lambda: plan.samples(2, 0), lambda: plan.owned(-1), lambda: plan.active(3), lambda: plan.seen(-1)):
        with pytest.raises(ConfigError, match="not in the plan"):
            call()
    with pytest.raises(ConfigError, match=r"seed is 1\.5"):
        make_plan([0, 1], 2, StreamSettings(2, 1, 1), 1.5)  # type: ignore[arg-type]


def test_many_clients_are_cheap() -> None:
    chosen = StreamSettings(20_000, 100, 5, support=0.4, coverage=0.5, disorder=0.6)
    plan = make_plan(np.arange(200_000) % 100, 100, chosen, 0)
    assert plan.audit()["disorder"] == pytest.approx(0.6)
    assert plan.counts.sum() == 200_000
    assert len(plan.describe().splitlines()) < 70
