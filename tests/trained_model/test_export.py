"""`profcil export`: ONNX Runtime gives the answers of the model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import profcil
from profcil.cli.main import main
from profcil.runs.models.labelled_inputs import read_inputs

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))  # for the module `own_files`

from own_files import write_csv

TINY = {"train.rounds": 1, "epochs": 1, "warmup.rounds": 1, "clients": 4, "participants": 2, "task_size": 5}


def answers(path: str, *inputs: torch.Tensor) -> tuple[torch.Tensor, dict[str, str]]:
    """The probabilities that ONNX Runtime computes, and the file's metadata."""
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(path)
    given = {like.name: x.numpy() for like, x in zip(session.get_inputs(), inputs, strict=True)}
    (found,) = session.run(None, given)
    return torch.from_numpy(found), session.get_modelmeta().custom_metadata_map


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedavg", {}),
        ("promax", {}),
        ("prolin", {"dictionary": 30, "base_rounds": 1}),
        ("promax", {"model.head": "cosine"}),
        ("prolin", {"dictionary": 30, "base_rounds": 0, "anchor": False, "warmup.rounds": 0}),
        (
            "prolin",
            {"dictionary": 30, "base_rounds": 0, "warmup.rounds": 0, "privacy.unit": "example", "privacy.epsilon": 8},
        ),
    ],
)
def test_onnx_of_images(method, more, capsys):
    pytest.importorskip("onnxscript")
    profcil.run("digits", method=method, out="run", settings=TINY | more)
    assert main(["export", "run", "--onnx", "model.onnx"]) == 0 and capsys.readouterr().err == ""
    model = profcil.load_model("run")
    x = profcil.load_data("digits").test.x
    for part in (x, x[:1]):  # any number of examples
        found, about = answers("model.onnx", part)
        torch.testing.assert_close(found.double(), model.probabilities(part), atol=1e-5, rtol=0)
        assert torch.equal(found.argmax(1), model(part))
    assert tuple(json.loads(about["names"])) == model.names and about["method"] == method


def test_onnx_of_texts(saved):
    pytest.importorskip("onnxscript")
    found = saved("text")
    assert main(["export", str(found.folder), "--onnx", "model.onnx"]) == 0
    probabilities, about = answers("model.onnx", found.test.x)
    torch.testing.assert_close(
        probabilities.double(), profcil.load_model(found.folder).probabilities(found.test.x), atol=1e-5, rtol=0
    )
    assert json.loads(about["input_format"])["splitter"] == "words"


@pytest.mark.parametrize(("modality", "method"), [("image", "hr"), ("graph", "fedavg"), ("table", "fedproto")])
def test_onnx_of_distances_graphs_and_tables(saved, modality, method):
    pytest.importorskip("onnxscript")
    found = saved(modality, method)
    assert main(["export", str(found.folder), "--onnx", "model.onnx"]) == 0
    check_answers(found.folder, *found.test.inputs(torch.arange(len(found.test))))


def check_answers(run: Path | str, *inputs: torch.Tensor) -> None:
    """ONNX Runtime gives the model's answers, for all examples and for one."""
    model = profcil.load_model(run)
    *shared, last = inputs  # the last input has one row for each example
    for part in (last, last[:1]):
        found, _ = answers("model.onnx", *shared, part)
        torch.testing.assert_close(found.double(), model.probabilities(*shared, part), atol=1e-5, rtol=0)


@pytest.mark.parametrize("entries", ["contexts", "ngrams"])
def test_onnx_of_a_dictionary_of_texts(entries):
    pytest.importorskip("onnxscript")
    texts = [f"{word} number {i} of the {word} list" for i in range(30) for word in ("ant", "bee", "cat", "dog")]
    labels = [text.split()[0] for text in texts]
    settings = {**TINY, "task_size": 2, "clients": 2, "dictionary": 40, "text_entries": entries}
    profcil.run(data={"x": texts, "y": labels}, method="prolin", out="run", settings=settings)
    assert main(["export", "run", "--onnx", "model.onnx"]) == 0
    check_answers("run", profcil.load_model("run").read_texts([*texts[:40], "", "nothing of this is known"]))


def test_onnx_of_a_dictionary_of_graphs():
    pytest.importorskip("onnxscript")
    pytest.importorskip("torch_geometric")
    rows = [[f"n{i}", "ab"[i % 2], i % 2, (i + 1) % 2, int(i % 3 == 0), 0] for i in range(40)]
    write_csv(Path("graph/nodes.csv"), ("id", "label", *"wxyz"), rows)  # no node has z: a row without an entry
    write_csv(Path("graph/edges.csv"), ("source", "target"), [(f"n{i}", f"n{i + 2}") for i in range(38)])
    settings = {**TINY, "task_size": 1, "clients": 2, "dictionary": 12}
    profcil.run(data="graph", method="prolin", out="run", settings=settings)
    assert main(["export", "run", "--onnx", "model.onnx"]) == 0
    check_answers("run", *read_inputs(profcil.load_model("run"), ["graph"]).inputs)


def test_what_onnx_cannot_hold_is_one_sentence(saved, capsys, monkeypatch):
    """No built-in method has such operations; one of a plug-in may."""
    pytest.importorskip("onnxscript")

    model = profcil.load_model(saved("image").folder)
    original = type(model.method).scores

    def scores(self: object, net: object, state: object, features: torch.Tensor) -> torch.Tensor:
        return original(self, net, state, features) * torch.cdist(features, features[:1])

    monkeypatch.setattr(type(model.method), "scores", scores)
    assert main(["export", str(saved("image").folder), "--onnx", "model.onnx"]) == 2
    error = capsys.readouterr().err
    assert "has operations that ONNX lacks" in error and error.count("\n") == 1
    assert not Path("model.onnx").exists()


def test_a_graph_for_a_fixed_number_of_examples_is_refused(saved, capsys, monkeypatch):
    pytest.importorskip("onnxscript")
    model = profcil.load_model(saved("image").folder)
    original = type(model.method).scores

    def scores(self: object, net: object, state: object, features: torch.Tensor) -> torch.Tensor:
        return original(self, net, state, features) * torch.ones(len(features), 1)  # `len` fixes the number

    monkeypatch.setattr(type(model.method), "scores", scores)
    assert main(["export", str(saved("image").folder), "--onnx", "model.onnx"]) == 2
    assert "examples at a time only; use --safetensors" in capsys.readouterr().err


def test_without_the_packages_the_extra_is_named(saved, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    assert main(["export", str(saved("image").folder), "--onnx", "model.onnx"]) == 2
    assert "pip install 'profcil[export]'" in capsys.readouterr().err


def test_safetensors_is_the_model_file(saved, capsys):
    found = saved("image")
    assert main(["export", str(found.folder), "--safetensors", "new/copy.safetensors"]) == 0
    copy = Path("new/copy.safetensors")
    assert copy.read_bytes() == (found.folder / "model.safetensors").read_bytes()
    assert torch.equal(profcil.load_model(copy)(found.test.x), profcil.load_model(found.folder)(found.test.x))
    assert main(["export", str(found.folder)]) == 2
    assert "give --onnx FILE or --safetensors FILE" in capsys.readouterr().err
