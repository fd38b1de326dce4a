"""The tasks of own data, and the settings that follow from its kind and size."""

from __future__ import annotations

import pytest
from own_files import write_csv, write_graph, write_images, write_table, write_texts

from profcil.config import OwnSettings
from profcil.data.own.tasks import default_task_size, tasks_of
from profcil.engine.world import draw_plan, load_data
from profcil.errors import ConfigError, DataError
from profcil.resolve import resolve, to_toml

NAMES = ("a", "b", "c", "d", "e", "f", "g")


def plan_of(path, *sets, **flags):
    config = resolve(None, {"data": path, **flags}, list(sets))
    return draw_plan(config, load_data(config, path))


@pytest.mark.parametrize(("classes", "size"), [(2, 1), (3, 1), (4, 2), (7, 2), (10, 2), (11, 3), (100, 20)])
def test_default_size_of_tasks(classes, size):
    assert default_task_size(classes) == size


def test_a_number_of_tasks_is_met_exactly():
    tasks = tasks_of(NAMES, OwnSettings(tasks=5), seed=3)
    assert [len(task) for task in tasks] == [2, 2, 1, 1, 1] and sorted(sum(tasks, ())) == list(range(7))
    assert tasks != tasks_of(NAMES, OwnSettings(tasks=5), seed=4)
    with pytest.raises(ConfigError, match="7 classes"):
        tasks_of(NAMES, OwnSettings(tasks=8), 0)


def test_tasks_in_the_order_of_arrival(tmp_path):
    rows = [(f"{name} {i}", name) for name in ("dog", "ant", "cat", "bee") for i in range(12)]
    path = write_csv(tmp_path / "m.csv", ("text", "label"), rows)
    config = resolve(None, {"data": path, "tasks": "arrival"}, [])
    bundle = load_data(config, path)
    assert bundle.names == ("dog", "ant", "cat", "bee") and bundle.tasks == ((0, 1), (2, 3))
    assert draw_plan(config, bundle).tasks == ((0, 1), (2, 3))


def test_tasks_from_a_file(tmp_path):
    path = write_texts(tmp_path / "m.csv")
    (tmp_path / "tasks.txt").write_text("dog\n\nant, bee, cat\n")
    assert plan_of(path, tasks=str(tmp_path / "tasks.txt")).tasks == ((3,), (0, 1, 2))
    with pytest.raises(ConfigError, match="`arrival`, or a file"):
        plan_of(path, tasks="nowhere.txt")


@pytest.mark.parametrize(
    ("lists", "part"),
    [((("a", "b"),), "leave out the class 'c'"), ((("a", "A"),), "'A'"), ((("a",), ("a",)), "'a' twice")],
)
def test_lists_of_tasks_are_checked(lists, part):
    with pytest.raises(ConfigError, match=part):
        tasks_of(("a", "b", "c"), OwnSettings(task_list=lists), 0)


def test_the_size_of_tasks_can_be_set_unless_tasks_are_given(tmp_path):
    path = write_texts(tmp_path / "m.csv")
    assert len(plan_of(path).tasks) == 2 and len(plan_of(path, "task_size=1").tasks) == 4
    assert [len(task) for task in plan_of(path, tasks="3").tasks] == [2, 1, 1]
    with pytest.raises(ConfigError, match="leave task_size out"):
        plan_of(path, "task_size=1", tasks="3")


@pytest.mark.parametrize(
    ("write", "name", "modality", "optimiser", "dictionary"),
    [
        (write_texts, "m.csv", "text", "adam", 3000),
        (write_table, "m.csv", "table", "adam", 204),
        (write_images, "m", "image", "sgd", 800),
        (write_graph, "m", "graph", "adam", 12),
    ],
)
def test_defaults_by_modality(tmp_path, write, name, modality, optimiser, dictionary):
    config = resolve(None, {"data": write(tmp_path / name), "method": "prolin"}, [])
    assert config.dataset == "own" and config.own.modality == modality and config.own.name == "m"
    assert (config.stream.clients, config.stream.participants, config.stream.task_size) == (5, 5, 2)
    assert config.train.optimiser == config.warmup.optimiser == optimiser
    assert config.params.dictionary == dictionary and config.params.base_rounds == 0


def test_clients_grow_with_the_data(tmp_path):
    clients = [resolve(None, {"data": write_texts(tmp_path / "m.csv", n)}, []).stream.clients for n in (3, 200, 2000)]
    assert clients == [5, 10, 20]


def test_a_given_setting_overrides_and_the_stored_ones_are_complete(tmp_path):
    path = write_texts(tmp_path / "m.csv")
    config = resolve(
        None, {"data": path, "method": "prolin"}, ["clients=3", "participants=2", "own.length=9", "lr=0.5"]
    )
    assert (config.stream.clients, config.own.length, config.train.lr) == (3, 9, 0.5)
    (tmp_path / "config.toml").write_text(to_toml(config))
    path.unlink()
    assert resolve(str(tmp_path / "config.toml")) == config


def test_settings_of_own_data_are_written_in_full(tmp_path):
    path = write_texts(tmp_path / "m.csv")
    with pytest.raises(ConfigError, match=r"unknown setting 'label'; did you mean own.label"):
        resolve(None, {"data": path}, ["label=text"])
    (tmp_path / "r.toml").write_text("own = 3")
    with pytest.raises(ConfigError, match=r"own = 3 is not a table"):
        resolve(str(tmp_path / "r.toml"), {"data": path}, [])
    (tmp_path / "r.toml").write_text("[own]\nlength = 5\n[train]\nlr = 0.25")
    config = resolve(str(tmp_path / "r.toml"), {"data": path}, [])
    assert (config.dataset, config.own.length, config.train.lr) == ("own", 5, 0.25)


def test_fewer_examples_than_clients(tmp_path):
    path = write_texts(tmp_path / "m.csv", 3)
    with pytest.raises(DataError, match="8 training examples for 9 clients; give more examples, or fewer clients"):
        plan_of(path, "clients=9")


def test_own_settings_belong_to_own_data(tmp_path):
    with pytest.raises(ConfigError, match=r"own.label is set, but the dataset is digits; give own data with --data"):
        resolve(None, {"dataset": "digits"}, ["own.label=x"])
    with pytest.raises(ConfigError, match="--tasks divides own data"):
        resolve(None, {"dataset": "digits", "tasks": "3"}, [])
    with pytest.raises(ConfigError, match="give it with --data PATH"):
        resolve(None, {"dataset": "own"}, [])
    assert "[own]" not in to_toml(resolve(None, {"dataset": "digits"}, []))


def test_with_a_named_dataset_the_path_is_the_folder_of_the_datasets(tmp_path):
    assert resolve(None, {"dataset": "digits", "data": tmp_path}, []).dataset == "digits"
