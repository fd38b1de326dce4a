"""The model file of a run: it needs no data, and a file that cannot be used is refused in one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import profcil
from profcil.cli.main import main
from profcil.errors import ProfcilError, RunFolderError
from profcil.io.atomic_files import read_tensors, write_tensors
from profcil.methods.parts.solved_head import AT_THE_MEAN, temperature
from profcil.runs.models.saved_model import NAME

TINY = {"train.rounds": 1, "epochs": 1, "warmup.rounds": 1, "clients": 4, "participants": 2, "task_size": 5}
SOURCE = """
import json
import torch
from profcil.data.input_format import InputFormat
from profcil.extend import Bundle, Facts, Rows

FACTS = Facts("notes", "Notes", "text", 2, None, None, views=("drop",), encoder="textcnn")
RECIPE = {"stream": {"clients": 2, "participants": 2, "task_size": 1}, "train": {"rounds": 2}, "warmup": {"rounds": 0}}

def load(root, seed=0):
    rows = json.loads((root / "notes.json").read_text())
    form = InputFormat("text", (4,), splitter="words", vocabulary=50)
    x = form.encode_texts([text for text, _ in rows])
    y = torch.tensor([label for _, label in rows])
    return Bundle(FACTS, Rows(x, y), Rows(x, y), None, ("calm", "storm"), vocabulary=50, input_format=form)
"""


def test_a_model_is_loaded_and_used_when_data_and_run_are_gone(install_plugin, tmp_path):
    install_plugin(data={"notes": SOURCE})
    data = tmp_path / "data"
    data.mkdir()
    rows = [[f"{word} sea number {i}", label] for label, word in enumerate(("quiet", "wild")) for i in range(12)]
    (data / "notes.json").write_text(json.dumps(rows))
    profcil.run(dataset="notes", method="prolin", data=data, out="run")
    expected = profcil.load_model("run").scores(profcil.load_data("notes", data=data).test.x)
    shutil.rmtree(data)
    Path("run", NAME).rename("alone.safetensors")
    shutil.rmtree("run")
    model = profcil.load_model("alone.safetensors")
    texts = [text for text, _ in rows]
    assert torch.equal(model.scores(model.read_texts(texts)), expected)
    assert model.predict_texts(["the quiet sea", "a wild sea"]) == ["calm", "storm"]
    assert model.header["dataset"] == "notes" and model.header["profcil"] == profcil.__version__


def test_the_second_moments_of_prolin_stay_in_the_run_folder():
    profcil.run("digits", method="prolin", out="run", settings=TINY | {"dictionary": 60})
    tensors, header = read_tensors(Path("run", NAME))
    assert header["blocks"].keys() == {"dictionary", "solved_head"}
    assert not [name for name in tensors if "gram" in name or "count" in name]
    assert Path("run", NAME).stat().st_size < Path("run/state.safetensors").stat().st_size


def test_resume_writes_the_model_of_an_older_run(capsys):
    profcil.run("digits", method="fedavg", out="run", settings=TINY)
    file = Path("run", NAME)
    tensors, header = read_tensors(file)
    file.unlink()
    assert main(["resume", "run"]) == 0
    again, same_header = read_tensors(file)
    assert same_header == header and all(torch.equal(again[name], tensors[name]) for name in tensors)
    before = {path.name: path.stat().st_mtime_ns for path in Path("run").iterdir()}
    assert main(["resume", "run"]) == 0
    assert {path.name: path.stat().st_mtime_ns for path in Path("run").iterdir()} == before


def changed_copy(saved, **header):
    """A copy of a model file with another header and a valid digest."""
    tensors, facts = read_tensors(saved("image").folder / NAME)
    write_tensors(Path("changed.safetensors"), tensors, {**facts, **header})
    return "changed.safetensors"


def test_a_file_of_a_newer_version_is_refused(saved, capsys):
    path = changed_copy(saved, format=99, profcil="9.0.0")
    assert main(["predict", path, "x.png"]) == 2
    assert "was written by profcil 9.0.0 in format 99" in capsys.readouterr().err


def test_a_damaged_file_is_refused(saved, capsys):
    content = bytearray((saved("image").folder / NAME).read_bytes())
    content[-1] ^= 1
    Path("damaged.safetensors").write_bytes(content)
    assert main(["predict", "damaged.safetensors", "x.png"]) == 2
    assert "damaged.safetensors is damaged or is not a model file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"method": "lost"}, "unknown method 'lost'"),
        ({"model": {"encoder": "lost"}}, "unknown encoder 'lost'"),
        ({"params": {"lost": 1}}, "unknown setting 'lost'"),
        ({"names": None}, "the header of changed.safetensors cannot be read"),
    ],
)
def test_a_header_that_does_not_fit_this_installation_is_one_sentence(saved, change, sentence):
    path = changed_copy(saved, **change)
    with pytest.raises(ProfcilError, match=sentence):
        profcil.load_model(path)


def test_a_state_is_not_a_model():
    profcil.run("digits", method="fedavg", out="run", settings=TINY)
    with pytest.raises(RunFolderError, match=r"is not a model file; give a run folder or its model\.safetensors"):
        profcil.load_model("run/state.safetensors")


def test_probabilities_sum_to_one_and_agree_with_the_scores(saved):
    for method in ("fedavg", "prolin", "hr"):
        found = saved("image", method)
        model = profcil.load_model(found.folder)
        probabilities = model.probabilities(found.test.x)
        assert torch.allclose(probabilities.sum(1), torch.ones(len(probabilities)).double())
        assert torch.equal(probabilities.argmax(1), model(found.test.x))
        assert (model.temperature is None) == (method == "hr")  # distances are no log-probabilities


def test_temperature_of_a_solved_head():
    """Classes at equal distances: each has the agreed probability at its own mean. Scale does not matter."""
    mean = 40 * torch.eye(5).double()
    for scale in (1.0, 3.0):
        weight = scale * mean
        scores = (mean @ weight.T - 0.5 * (weight * mean).sum(1)) / temperature(weight, mean)
        torch.testing.assert_close(scores.softmax(1).diagonal(), torch.full((5,), AT_THE_MEAN).double())
    assert temperature(0.001 * mean, mean) == 1.0 == temperature(mean[:1], mean[:1])


def test_a_model_of_another_modality_says_what_it_takes(saved):
    model = profcil.load_model(saved("image").folder)
    with pytest.raises(ProfcilError, match="this is a model of images, which cannot read texts; give images"):
        model.predict_texts(["seven"])
