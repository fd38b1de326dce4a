"""Data and methods that are given from Python."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import profcil
from profcil import registry
from profcil.errors import BrokenPlugin, ConfigError, DataError, RunFolderError
from profcil.extend import Method

QUICK = {"train.rounds": 1, "train.epochs": 1, "warmup.rounds": 1}


class Halved(Method):
    """FedAvg, under another name."""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path_factory.getbasetemp() / "warm"))
    monkeypatch.setattr(registry, "GIVEN_METHODS", {})


def rows(n: int = 120) -> tuple[np.ndarray, np.ndarray]:
    y = np.arange(n) % 3
    return np.random.default_rng(0).normal(size=(n, 4)) + 4 * np.eye(4)[y], y


def test_arrays_of_a_table():
    x, y = rows()
    run = profcil.run(data=(x, y), method="prolin", settings=QUICK)
    assert run.path == Path("runs/own-prolin") and run.metrics["faa"] > 90
    model = profcil.load_model(run.path)
    assert (model(x.astype(np.float32)).numpy() == y).mean() > 0.9


def test_parts_and_names_of_arrays():
    x, y = rows()
    data = {"x": x[:90], "y": y[:90], "test_x": x[90:], "test_y": y[90:], "names": ["a", "b", "c"]}
    run = profcil.run(data=data, method="fedavg", settings=QUICK, tasks=3, out="r")
    assert run.scores.total.sum() == 30 and run.plan.positions == 3
    assert profcil.load_model("r").names == ("a", "b", "c")


def test_arrays_and_tensors_of_images():
    x = torch.randint(0, 256, (60, 1, 8, 8), dtype=torch.uint8)
    run = profcil.run(data=(x, [i % 2 for i in range(60)]), method="fedavg", settings=QUICK)
    assert run.config["own"]["modality"] == "image"


def test_lists_of_texts():
    texts = [f"{'sun and light' if i % 2 else 'rain and wind'} {i}" for i in range(80)]
    run = profcil.run(data=(texts, ["good" if i % 2 else "bad" for i in range(80)]), method="prolin", settings=QUICK)
    assert run.metrics["faa"] > 90 and (run.path / "data.jsonl").exists()


def test_a_bundle_is_learned_as_its_dataset_is():
    settings = QUICK | {"clients": 4, "participants": 2, "task_size": 5, "model.norm": "group", "lr": 0.01}
    known = profcil.run("digits", method="fedavg", settings=settings | {"train.batch": 32}, out="known")
    given = profcil.run(data=profcil.load_data("digits"), method="fedavg", settings=settings, out="given")
    assert known.config["train"] == given.config["train"] and known.plan.digest == given.plan.digest
    assert given.done and given.config["dataset"] == "own"


def test_a_method_class():
    run = profcil.run(data=rows(), method=Halved, settings=QUICK, out="r")
    other = profcil.run(data=rows(), method="fedavg", settings=QUICK, out="s")
    assert run.config["method"] == "halved" and np.array_equal(run.scores.correct, other.scores.correct)
    assert run.facts["plugins"]["methods"]["source"]
    registry.GIVEN_METHODS.clear()  # as in a new process
    with pytest.raises(ConfigError, match="unknown method 'halved'"):
        profcil.resume("r")
    assert profcil.resume("r", method=Halved).done


def test_a_class_of_a_known_method_is_that_method():
    from profcil.methods.fedprox import METHOD

    assert registry.give_method(METHOD) == "fedprox" and not registry.GIVEN_METHODS


def test_classes_that_are_no_methods():
    class FedAvg(Method):
        pass

    with pytest.raises(ConfigError, match="has the name of the method 'fedavg'; rename the class"):
        profcil.run(method=FedAvg)
    with pytest.raises(BrokenPlugin, match=r"derive it from profcil.extend.Method"):
        profcil.run(method=dict)


@pytest.mark.parametrize("data", [3, {}, {"x": [[1.0]], "z": [1]}, ([[1.0, 2.0]] * 3, [0, 1]), object()])
def test_data_that_is_not_understood_leaves_nothing_behind(data):
    with pytest.raises(DataError) as caught:
        profcil.run(data=data, method="fedavg", settings=QUICK, out="r")
    assert "; " in str(caught.value) and not Path("r").exists()


def test_a_folder_that_holds_a_run_is_not_overwritten():
    profcil.run(data=rows(), method="fedavg", settings=QUICK, out="r")
    before = Path("r/data.npz").read_bytes()
    with pytest.raises(RunFolderError, match="already holds a run"):
        profcil.run(data=rows(60), method="fedavg", settings=QUICK, out="r")
    assert Path("r/data.npz").read_bytes() == before


def test_a_method_file_from_python(tmp_path):
    source = "from profcil.extend import Method\nclass A(Method):\n    pass\nMETHOD = A\n"
    Path("mine.py").write_text(source)
    run = profcil.run(data=rows(), method="mine.py", settings=QUICK)
    assert run.config["method"] == str(tmp_path / "mine.py")
    assert not [name for name in sys.modules if name == "mine"]


def test_names_may_come_first_and_are_those_of_texts_too():
    x = np.random.default_rng(0).integers(0, 256, (40, 8, 8)).astype(np.uint8)
    y = np.arange(40) % 2
    run = profcil.run(data={"names": ["no", "yes"], "x": x, "y": y}, method="fedavg", settings=QUICK)
    assert run.config["own"]["modality"] == "image" and profcil.load_model(run.path).names == ("no", "yes")
    texts = [f"{'sun' if i % 2 else 'rain'} {i}" for i in range(40)]
    run = profcil.run(data={"x": texts, "y": y, "names": ["bad", "good"]}, method="fedavg", settings=QUICK)
    assert profcil.load_model(run.path).names == ("bad", "good")
