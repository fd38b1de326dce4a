"""`profcil export`: ONNX Runtime gives the answers of the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import profcil
from profcil.cli.main import main

TINY = {"train.rounds": 1, "epochs": 1, "warmup.rounds": 1, "clients": 4, "participants": 2, "task_size": 5}


def answers(path: str, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, str]]:
    """The probabilities that ONNX Runtime computes, and the file's metadata."""
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(path)
    (given,) = session.get_inputs()
    (found,) = session.run(None, {given.name: x.numpy()})
    return torch.from_numpy(found), session.get_modelmeta().custom_metadata_map


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedavg", {}),
        ("promax", {}),
        ("prolin", {"dictionary": 30, "base_rounds": 1}),
        ("promax", {"model.head": "cosine"}),
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


def test_what_onnx_cannot_hold_is_one_sentence(saved, capsys):
    pytest.importorskip("onnxscript")
    assert main(["export", str(saved("graph").folder), "--onnx", "model.onnx"]) == 2
    assert "a model of graphs cannot be exported to ONNX; use --safetensors" in capsys.readouterr().err
    assert main(["export", str(saved("image", "hr").folder), "--onnx", "model.onnx"]) == 2
    error = capsys.readouterr().err
    assert "has operations that ONNX lacks" in error and error.count("\n") == 1
    assert not Path("model.onnx").exists()


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
