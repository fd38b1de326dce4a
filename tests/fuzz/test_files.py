"""Every reader of files, through the commands that use it: a damaged or hostile file ends in one sentence, or is read.

No traceback, no line that begins with "unexpected", no crash. `make fuzz` tries many more files.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hostile import apply, edits, fuzz, read_files, write_files
from hypothesis import given
from hypothesis import strategies as st
from tally import attempt

from profcil.cli.main import main
from profcil.data._unpack import unpack
from profcil.engine import run
from profcil.errors import ProfcilError
from profcil.resolve import resolve

sys.path.append(str(Path(__file__).parents[1] / "data"))  # for the writers of small datasets
import official
import own_files

TINY = ["clients=2", "participants=1", "train.rounds=1", "train.epochs=1", "warmup.rounds=0", "model.width=4"]
COUNT = iter(range(10**9))


def check_command(capsys: pytest.CaptureFixture[str], *line: str) -> None:
    with attempt() as one:
        status = main(list(line))
        out, err = capsys.readouterr()
        assert status in (0, 1, 2), (line, status)
        assert "profcil: unexpected" not in err and "Traceback" not in err + out, (line, err)
        assert status == 0 or len(err.splitlines()) <= 1, (line, err)
        one.refused = status != 0


@cache
def prepared(write: Callable[[Path], object], folder: Path) -> dict[str, bytes]:
    write(folder)
    return read_files(folder)


def json_lines(folder: Path) -> None:
    folder.mkdir()
    (folder / "d.jsonl").write_text("\n".join(json.dumps({"text": f"w{i}", "label": "ab"[i % 2]}) for i in range(8)))


def owned_npz(folder: Path) -> None:
    folder.mkdir()
    np.savez(folder / "d.npz", x=np.zeros((12, 4), "f4"), y=np.arange(12) % 3)


def federation(folder: Path) -> None:
    own_files.write_csv(folder / "north" / "data.csv", ["text", "label"], [(f"w{i}", "ab"[i % 2]) for i in range(8)])
    (folder / "north" / "manifest.toml").write_text(
        'site = "north"\ndata = "data.csv"\n[[position]]\nclasses = ["a"]\n[[position]]\nclasses = ["b"]\n'
    )
    (folder / "federation.toml").write_text(
        'modality = "text"\ntasks = [["a"], ["b"]]\nsites = ["north"]\nlength = 4\nmax_examples = 50\n'
        'keys = {north = "SHA256:' + "A" * 43 + '"}\n'
    )


OWN = {
    "texts": (lambda f: own_files.write_texts(f / "d.csv"), "d.csv"),
    "lines": (json_lines, "d.jsonl"),
    "table": (lambda f: own_files.write_table(f / "d.csv"), "d.csv"),
    "graph": (lambda f: own_files.write_graph(f / "d"), "d"),
    "images": (lambda f: own_files.write_images(f / "d"), "d"),
    "arrays": (owned_npz, "d.npz"),
}
DATASETS = {
    "cifar100": lambda f: official.cifar_python(f / "cifar-100-python"),
    "cora": lambda f: official.cora(f / "cora" / "raw"),
    "coauthor_cs": lambda f: official.coauthor(f / "coauthor_cs" / "ms_academic_cs.npz"),
    "clinc150": lambda f: official.clinc(f / "clinc150"),
    "thucnews10": lambda f: official.thucnews(f / "thucnews10"),
    "tinyimagenet": lambda f: official.tiny_imagenet(f / "tiny-imagenet-200"),
    "ogbn_arxiv": lambda f: official.arxiv(f / "ogbn_arxiv"),
}


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROFCIL_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        yield folder


def changed_copy(files: dict[str, bytes], data: st.DataObject, space: Path) -> Path:
    """A folder with these files, of which one is changed."""
    name = data.draw(st.sampled_from(sorted(files)))
    folder = space / str(next(COUNT))
    write_files(folder, files | {name: apply(files[name], data.draw(edits()))})
    return folder


@pytest.mark.parametrize("kind", OWN)
@fuzz
@given(data=st.data())
def test_own_data(kind, data, space, capsys):
    write, name = OWN[kind]
    folder = changed_copy(prepared(write, space / kind), data, space)
    check_command(capsys, "plan", "--data", str(folder / name))
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", DATASETS)
@fuzz
@given(data=st.data())
def test_official_data(name, data, space, capsys):
    if name in ("coauthor_cs", "cora", "ogbn_arxiv"):
        pytest.importorskip("torch_geometric")
    folder = changed_copy(prepared(DATASETS[name], space / name), data, space)
    check_command(capsys, "plan", "--dataset", name, "--data-dir", str(folder))
    check_command(capsys, "data", "verify", name, "--data-dir", str(folder))
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def finished(space: Path) -> dict[str, bytes]:
    config = resolve(None, {"dataset": "digits", "method": "prolin"}, [*TINY, "keep_states=1", "task_size=5"])
    return read_files(run.start(config, space / "run", space))


RUN_FILES = ("config.toml", "run.json", "scores.json", "ledger.csv", "events.jsonl", "plan.npz", "state.safetensors")
COMMANDS = [["compare"], ["verify"], ["status"], ["rollback"], ["figure", "accuracy"], ["report", "--out", "p.html"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@fuzz
@given(data=st.data())
def test_run_folders(command, data, finished, space, capsys):
    name = data.draw(st.sampled_from(RUN_FILES))
    folder = space / str(next(COUNT))
    write_files(folder, finished | {name: apply(finished[name], data.draw(edits()))})
    check_command(capsys, *command, str(folder))
    shutil.rmtree(folder)


@fuzz
@given(data=st.data())
def test_models(data, finished, space, capsys):
    folder = space / str(next(COUNT))
    write_files(folder, {"m.safetensors": apply(finished["model.safetensors"], data.draw(edits())), "a.png": b"x"})
    check_command(capsys, "predict", str(folder / "m.safetensors"), str(folder / "a.png"))
    shutil.rmtree(folder)


@pytest.mark.parametrize("command", [["run", "--dry-run"], ["plan"], ["study", "--dry-run"]], ids=" ".join)
@fuzz
@given(data=st.data())
def test_recipes_and_studies(command, data, space, capsys):
    recipe = b'dataset = "digits"\nmethod = "prolin"\nseed = 1\n[train]\nrounds = 2\n[stream]\nclients = 3\n'
    study = b'name = "s"\nmethods = ["fedavg"]\ndatasets = ["digits"]\nseeds = [0]\nset = ["train.rounds=1"]\n'
    text = study if command[0] == "study" else recipe
    file = space / "f.toml"
    file.write_bytes(apply(text, data.draw(edits())))
    check_command(capsys, *command, str(file))


@pytest.mark.parametrize("text", [b"seed = " + b"9" * 5000, b"seed = " + b"[" * 5000], ids=["long number", "depth"])
def test_a_recipe_that_python_cannot_read(text, space, capsys):
    (space / "odd.toml").write_bytes(text)
    check_command(capsys, "run", "--dry-run", str(space / "odd.toml"))


@fuzz
@given(data=st.data())
def test_sites_and_federations(data, space, capsys):
    pytest.importorskip("flwr")
    folder = changed_copy(prepared(federation, space / "federation"), data, space)
    check_command(capsys, "deploy", "check", str(folder / "north"), "--federation", str(folder / "federation.toml"))
    shutil.rmtree(folder)


def tar(folder: Path) -> None:
    folder.mkdir()
    (folder / "f.txt").write_text("some text\n" * 20)
    with tarfile.open(folder / "a", "w:gz") as archive:
        archive.add(folder / "f.txt", "folder/f.txt")


def zipped(folder: Path) -> None:
    folder.mkdir()
    with zipfile.ZipFile(folder / "a", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("folder/f.txt", "some text\n" * 20)


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tar", "a.zip"])
@fuzz
@given(data=st.data())
def test_archives(name, data, space):
    files = prepared(zipped if name == "a.zip" else tar, space / f"archive {name}")
    content = gzip.decompress(files["a"]) if name == "a.tar" else files["a"]
    folder = space / str(next(COUNT))
    write_files(folder, {name: apply(content, data.draw(edits()))})
    with attempt() as one:
        try:
            unpack(folder / name, folder / "out")
        except ProfcilError as error:
            assert len(str(error).splitlines()) == 1
            one.refused = True
        assert {p.name for p in folder.iterdir()} <= {name, "out"}
    shutil.rmtree(folder)


@fuzz
@given(data=st.data())
def test_results_stores(data, space, capsys):
    columns = (Path(__file__).parents[2] / "results" / "digits.csv").read_bytes().splitlines(keepends=True)
    folder = space / str(next(COUNT))
    write_files(folder, {"digits.csv": apply(b"".join(columns[:3]), data.draw(edits()))})
    check_command(capsys, "results", "list", "--store", str(folder))
    shutil.rmtree(folder)


def test_the_commands_succeed_on_files_that_are_not_changed(finished, space, capsys):
    """Else the tests above would test nothing."""
    write_files(space / "good", finished)
    for command in COMMANDS[:3]:
        assert main([*command, str(space / "good")]) == 0
    for kind, (write, name) in OWN.items():
        write(space / f"good {kind}")
        assert main(["plan", "--data", str(space / f"good {kind}" / name)]) == 0, capsys.readouterr().err
    federation(space / "good federation")
    site = str(space / "good federation" / "north")
    assert main(["deploy", "check", site, "--federation", str(Path(site).parent / "federation.toml")]) == 0
    assert json.loads((space / "good" / "run.json").read_text())["done"]
