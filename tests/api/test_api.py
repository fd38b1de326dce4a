"""The public Python API: runs, results and models."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import profcil
from profcil.errors import ConfigError, DataError, ReuseNote, RunFolderError

TINY = {"train.rounds": 1, "epochs": 1, "warmup.rounds": 1, "clients": 4, "participants": 2, "task_size": 5}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path_factory.getbasetemp() / "warm"))
    monkeypatch.delenv("PROFCIL_DATA", raising=False)


def test_run_and_its_results():
    messages = []
    run = profcil.run("digits-severe", method="fedavg", seed=1, settings=TINY, observe=messages.append)
    assert run.done and run.path == Path("runs/digits-severe-fedavg-seed1") and messages
    assert run.config["train"]["rounds"] == 1 and run.config["seed"] == 1
    assert set(run.metrics) >= {"faa", "cta", "af"} and run.bytes("up") > 0
    assert profcil.load_run(run.path).metrics == run.metrics
    assert profcil.resume(run.path).metrics == run.metrics


def test_the_observer_of_the_api_page_sees_the_results_so_far():
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    names: dict = {}
    exec(example, names)
    curve, run = names["curve"], names["run"]
    assert [position for position, _, _ in curve] == list(range(1, run.positions + 1))
    assert [faa for _, faa, _ in curve] == pytest.approx(run.seen_accuracy().tolist())
    assert curve[-1][1] == pytest.approx(run.metrics["faa"]) and curve[-1][2] == run.bytes_total()


def test_an_equal_run_is_returned_with_a_note():
    messages: list = []
    first = profcil.run("digits", method="fedavg", settings=TINY)
    with pytest.warns(ReuseNote, match="digits-severe-fedavg-seed0 has the same settings, data and code"):
        again = profcil.run("digits", method="fedavg", settings=TINY, observe=messages.append)
    assert again.path == first.path and not messages
    repeated = profcil.run("digits", method="fedavg", settings=TINY, again=True, observe=messages.append)
    assert repeated.path != first.path and repeated.metrics == first.metrics and messages


def test_a_class_is_always_computed():
    """Its helpers may have been edited in a notebook, which a hash of its own source does not show."""
    from profcil.extend import Method

    class Mine(Method):
        pass

    paths = [profcil.run("digits", method=Mine, settings=TINY).path for _ in range(2)]
    assert paths[0] != paths[1]


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("promax", {}),
        ("promax", {"covariance": "shared", "closed_head": True}),
        ("prolin", {}),
        ("prolin", {"dictionary": 30}),
        ("prolin", {"dictionary": 30, "base_rounds": 0}),
        ("fedproto", {"predict": "prototype"}),
        ("hr", {}),
    ],
)
def test_model_predicts_as_in_the_run(method, more):
    run = profcil.run("digits", method=method, out="run", settings=TINY | more)
    model = profcil.load_model("run")
    test = profcil.load_data("digits").test
    correct = (model(test.x) == test.y).numpy()
    counts = [sum(correct[np.isin(test.y.numpy(), list(task))]) for task in run.plan.tasks]
    assert counts == run.scores.correct[-1].tolist()
    assert len(model.names) == 10 and model.seen == tuple(range(10))


def test_model_takes_arrays_and_refuses_other_shapes():
    profcil.run("digits", method="fedavg", out="run", settings=TINY)
    model = profcil.load_model("run")
    x = profcil.load_data("digits").test.x[:3]
    assert torch.equal(model(x.numpy()), model(x)) and model.scores(x).shape == (3, 10)
    for wrong in (x[0], x.float(), x[:, :, :4]):
        with pytest.raises(DataError, match=r"this model takes \[n, 1, 8, 8\] of torch.uint8"):
            model(wrong)


def test_unseen_classes_are_never_predicted():
    profcil.run("digits", method="fedavg", out="run", settings=TINY)
    model = profcil.load_model("run")
    x = profcil.load_data("digits").test.x
    model.seen = (2, 5)
    assert set(model(x).tolist()) <= {2, 5} and torch.isinf(model.scores(x)[:, 0]).all()


def test_model_of_graphs():
    from profcil.runs.models.trained_model import Model

    like = (torch.zeros(0, 4), torch.zeros(2, 0, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    model = Model(torch.nn.Linear(1, 1), None, None, (0,), ("a",), like)
    x = torch.randn(5, 4)
    edges = torch.tensor([[0, 1], [1, 0]])
    assert model.examples(x, edges).nodes.tolist() == [0, 1, 2, 3, 4]
    assert len(model.examples(x, edges, torch.tensor([3]))) == 1
    for wrong in ((x,), (x, edges.T.repeat(2, 1)), (x[:, :3], edges)):
        with pytest.raises(DataError, match="this model takes"):
            model.examples(*wrong)


def test_example_of_readme(capsys):
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    code = text.partition("From Python:")[2].partition("```python\n")[2].partition("```")[0]
    assert "profcil.load_model" in code and len(code.splitlines()) < 14
    exec(compile(code, "README.md", "exec"), {})
    assert "'faa'" in capsys.readouterr().out


def test_mistakes_raise_errors_of_profcil():
    with pytest.raises(ConfigError, match="did you mean promax"):
        profcil.run("digits", method="promx")
    with pytest.raises(ConfigError, match="did you mean seed"):
        profcil.run("digits", sede=1)
    with pytest.raises(ConfigError, match=r"no argument 'rounds'; give a setting as settings=\{'rounds': 1\}"):
        profcil.run("digits", rounds=1)
    with pytest.raises(ConfigError, match="did you mean"):
        profcil.run("digits", settings={"train.lrr": 1})
    with pytest.raises(ConfigError, match="is not a number"):
        profcil.run("digits", settings={"train.lr": [1]})
    with pytest.raises(RunFolderError, match="does not exist"):
        profcil.load_model("nowhere")
    with pytest.raises(AttributeError, match="no attribute 'rnu'"):
        _ = profcil.rnu


def test_without_a_model_file_the_data_of_the_run_is_needed():
    profcil.run("digits", method="fedavg", out="run", settings=TINY)
    Path("run/model.safetensors").unlink()  # as in runs of older versions
    facts = json.loads(Path("run/run.json").read_text())
    facts.pop("digests")
    Path("run/run.json").write_text(json.dumps({**facts, "data": "0" * 32}))
    with pytest.raises(RunFolderError, match="is not the data that run was trained on"):
        profcil.load_model("run")


def test_load_run_does_not_import_torch():
    profcil.run("digits", method="fedavg", out="run", settings=TINY)
    code = "import sys, profcil; assert 'numpy' not in sys.modules; assert set(profcil.__all__) <= set(dir(profcil)); "
    code += "from profcil import load_run; load_run('run'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
