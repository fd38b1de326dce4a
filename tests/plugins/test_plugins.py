"""Plug-ins work like built-in modules; a broken one is reported in one sentence and does not affect the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from profcil import registry
from profcil.cli.main import main
from profcil.engine import run
from profcil.engine.client import embed
from profcil.engine.warmup import cache_key, warm
from profcil.engine.world import make_world
from profcil.errors import ConfigError
from profcil.io.cache_folder import cache_folder
from profcil.resolve import RunConfig, resolve
from profcil.runs.identity import hash_settings
from profcil.studies.definition import expand_methods

Install = Callable[..., Path]

METHOD = """
from dataclasses import dataclass
from profcil.extend import Method, Params, setting

@dataclass(frozen=True)
class MyParams(Params):
    alpha: float = setting(0.5, "a number", low=0.0)

class Mine(Method):
    Params = MyParams

METHOD = Mine
"""
ENCODER = """
from torch import nn
from profcil.extend import drawn

SEEN = set()

class Flat(nn.Module):
    def __init__(self, pixels, width):
        super().__init__()
        self.features, self.layer = width, nn.Linear(pixels, width)

    def forward(self, x):
        SEEN.add((x.dtype, bool(x.max() <= 1)))
        return self.layer(x.flatten(1)).relu()

def build(bundle, *, generator, norm="batch", width=0):
    return drawn(lambda: Flat(bundle.train.x[0].numel(), width or 16), generator)
"""
STACKED = ENCODER.replace(
    "def build(",
    """class Stacked(Flat):
    mixes = True

    def over_clients(self, own, x):
        SEEN.add((x.dtype, bool(x.max() <= 1)))
        return (x.flatten(2) @ own["layer.weight"].mT + own["layer.bias"].unsqueeze(1)).relu()

def build(""",
).replace("lambda: Flat(", "lambda: Stacked(")
DATA = """
import torch
from profcil.extend import Bundle, Facts, Rows

FACTS = Facts(name="mine", title="Mine", modality="image", classes=4, train=None, test=None, encoder="convnet")
RECIPE = {"stream": {"clients": 3, "participants": 2, "task_size": 2}, "train": {"rounds": 1}, "warmup": {"rounds": 1}}

def load(root, seed=0):
    x = torch.randint(0, 256, (40, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    y = torch.arange(40) % 4
    return Bundle(FACTS, Rows(x, y), Rows(x, y), None, tuple("abcd"))
"""
SMALL = ["train.rounds=1", "train.epochs=1", "warmup.rounds=1", "clients=3", "participants=3", "task_size=5"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROFCIL_CACHE", str(tmp_path / "cache"))


def digits(method: str = "fedavg", *sets: str, encoder: str = "") -> RunConfig:
    chosen = [*SMALL, *sets, *([f"encoder={encoder}"] if encoder else [])]
    return resolve(flags={"dataset": "digits", "method": method}, sets=chosen)


def error_of(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    """The one-line message of a refused command line."""
    assert main(list(line)) == 2
    err = capsys.readouterr().err
    assert err.startswith("profcil: ") and err.count("\n") == 1 and "Traceback" not in err
    return err


# -- encoders get floats in [0, 1] -------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [ENCODER, STACKED])
@pytest.mark.parametrize("method", ["fedavg", "pro"])
@pytest.mark.parametrize("augment", ["true", "false"])
def test_encoder_always_gets_floats(
    source: str, method: str, augment: str, install_plugin: Install, tmp_path: Path
) -> None:
    install_plugin(encoders={"flat": source})
    run.start(digits(method, f"augment={augment}", encoder="flat"), tmp_path / "run", tmp_path)
    seen = registry.find("encoders", "flat").SEEN
    assert seen == {(torch.float32, True)}


def test_embedding_of_bytes_equals_embedding_of_floats(install_plugin: Install, tmp_path: Path) -> None:
    install_plugin(encoders={"flat": ENCODER})
    world = make_world(digits(encoder="flat"), tmp_path)
    base = world.net.weights(["base"])["base"]
    rows = world.bundle.test
    floats = replace(rows, x=rows.x.float() / 255)
    index = torch.arange(8)
    assert torch.equal(embed(world.net, base, rows, index), embed(world.net, base, floats, index))


# -- cache of warm-ups -------------------------------------------------------------------------------------------------


def test_edited_encoder_has_another_warmup(install_plugin: Install, tmp_path: Path) -> None:
    keys = []
    for source, version in ((ENCODER, "0.1"), (ENCODER.replace("relu", "tanh"), "0.1"), (ENCODER, "0.2")):
        install_plugin(version, encoders={"flat": source})
        keys.append(cache_key(make_world(digits(encoder="flat"), tmp_path)))
    assert len(set(keys)) == 3


def test_warmup_key_contains_shapes_of_base(tmp_path: Path) -> None:
    world = make_world(digits(), tmp_path)
    before = cache_key(world)
    world.net.base.out = torch.nn.Linear(3, 128)
    assert cache_key(world) != before


def test_cached_warmup_of_other_shape_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profcil.engine.warmup.cache_key", lambda world: "always")
    for width in (4, 8):
        world = make_world(digits("fedavg", f"width={width}"), tmp_path)
        warmed = warm(world, lambda *a: None)
        assert not warmed.cached and warmed.weights["base"]["conv1.weight"].shape[0] == width
    assert [f.name for f in (cache_folder() / "warmup").iterdir()] == ["always.safetensors"]


# -- key of a study's run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "source"), [("methods", METHOD), ("data", DATA), ("encoders", ENCODER)], ids=["method", "data", "encoder"]
)
def test_edited_plugin_changes_the_key(group: str, source: str, install_plugin: Install) -> None:
    keys = []
    for text, version in ((source, "0.1"), (source, "0.1"), (source + "\n# edited\n", "0.1"), (source, "0.2")):
        install_plugin(version, **{group: {"mine": text}})
        method, dataset, encoder = ("mine" if group == each else "" for each in ("methods", "data", "encoders"))
        flags = {"dataset": dataset or "digits", "method": method or "fedavg"}
        keys.append(hash_settings(resolve(flags=flags, sets=[f"encoder={encoder}"] if encoder else [])))
    assert keys[0] == keys[1] and len(set(keys)) == 3


def test_plugins_do_not_change_keys_of_builtin_modules(install_plugin: Install) -> None:
    config = resolve(flags={"dataset": "digits", "method": "promax"})
    before = hash_settings(config)
    install_plugin(methods={"mine": METHOD}, data={"mine": DATA}, encoders={"mine": ENCODER})
    assert hash_settings(config) == before


# -- broken plug-ins ---------------------------------------------------------------------------------------------------


def test_plugin_that_fails_to_import_is_isolated(install_plugin: Install, capsys: pytest.CaptureFixture[str]) -> None:
    methods = {"faulty": "import not_there", "mine": METHOD}
    install_plugin(methods=methods, data={"poor": "1 / 0"}, encoders={"odd": "x = ("})
    every = expand_methods("all")
    assert "faulty" not in every and {"mine", "fedavg", "promax"} <= set(every)
    for kind, name, reason in (
        ("methods", "faulty", "not_there"),
        ("datasets", "poor", "ZeroDivisionError"),
        ("encoders", "odd", "SyntaxError"),
    ):
        assert main(["list", kind, "--json"]) == 0
        rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
        assert rows[name]["broken"]
        for part in (f"otherpkg.{name}", "otherpkg 0.1", reason):
            assert part in rows[name]["title"]
        assert main(["list", kind]) == 0
        assert f"broken: {kind[:-1]} '{name}'" in capsys.readouterr().out
    assert main(["data", "status"]) == 0 and "poor" in capsys.readouterr().out
    assert main(["doctor"]) in (0, 1)
    capsys.readouterr()
    assert "not_there" in error_of(capsys, "run", "--method", "faulty")
    assert "otherpkg 0.1" in error_of(capsys, "run", "--dataset", "poor")
    assert "SyntaxError" in error_of(capsys, "run", "--set", "encoder=odd")
    assert "ZeroDivisionError" in error_of(capsys, "data", "verify", "poor")


def test_study_of_all_methods_names_broken_ones(install_plugin: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install_plugin(methods={"faulty": "import not_there"})
    Path("every.toml").write_text('methods = "all"')
    assert main(["study", "every.toml", "--dry-run"]) == 0
    assert "left out: method 'faulty'" in capsys.readouterr().err


NO_PARENT = METHOD.replace("class MyParams(Params)", "class MyParams")
NO_DATACLASS = METHOD.replace("@dataclass(frozen=True)\n", "")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"methods": {"mine": METHOD, "named": "=otherpkg.mine:Mine"}}, "must name a module that defines METHOD"),
        ({"methods": {"named": "x = 1"}}, "must name a module that defines METHOD"),
        ({"methods": {"named": "METHOD = dict"}}, "profcil.extend.Method"),
        ({"methods": {"named": NO_PARENT}}, "derive them from profcil.methods.base.Params"),
        ({"methods": {"named": NO_DATACLASS}}, "@dataclass(frozen=True)"),
        ({"data": {"named": DATA}}, "has the name 'mine' in its FACTS"),
        ({"data": {"named": "FACTS = 1"}}, "defines FACTS and load"),
        ({"data": {"named": DATA.replace('"mine"', '"named"').replace("RECIPE = {", "RECIPE = 1, {")}}, "RECIPE"),
        ({"encoders": {"named": "def make(): ..."}}, "defines build"),
    ],
)
def test_plugin_without_required_parts_is_refused(
    given: dict, expected: str, install_plugin: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install_plugin(**given)
    (group,) = given
    flags = {"methods": ["--method", "named"], "data": ["--dataset", "named"], "encoders": ["--set", "encoder=named"]}
    message = error_of(capsys, "run", *flags[group])
    assert expected in message and "otherpkg 0.1" in message
    assert not Path("runs").exists() or not any(Path("runs").iterdir())


def test_params_may_extend_those_of_any_method(install_plugin: Install) -> None:
    source = METHOD.replace("import Method, Params,", "import").replace("(Params)", "(Method.Params)")
    install_plugin(methods={"mine": "from profcil.methods.pro import METHOD as Method\n" + source})
    assert resolve(flags={"method": "mine"}, sets=["alpha=2", "noise=0.5"]).params.alpha == 2


@pytest.mark.parametrize(
    ("group", "name", "line"),
    [("methods", "fedavg", ["--method", "fedavg"]), ("data", "digits", []), ("encoders", "convnet", [])],
)
def test_plugin_with_builtin_name_is_refused(
    group: str, name: str, line: list[str], install_plugin: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install_plugin(**{group: {name: {"methods": METHOD, "data": DATA, "encoders": ENCODER}[group]}})
    message = error_of(capsys, "run", *line)
    assert f"'{name}'" in message and "otherpkg 0.1" in message and "another name" in message


def test_group_of_all_methods_refuses_plugin_with_builtin_name(install_plugin: Install) -> None:
    install_plugin(methods={"fedavg": METHOD})
    with pytest.raises(ConfigError, match="another name"):
        expand_methods("all")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (ENCODER.replace(', norm="batch", width=0', ""), 'norm="batch", width=0'),
        (ENCODER.replace("self.features, self.layer = width, ", "self.layer = "), "`features`"),
        (
            ENCODER.replace("= width, nn", '= "16", nn'),
            "`features`",
        ),
        (ENCODER.replace("return drawn(lambda: ", "return (lambda x: x)(").replace(", generator)\n", ")\n"), "drawn"),
        (
            ENCODER.replace(
                "nn.Linear(pixels, width)", "nn.Sequential(nn.BatchNorm1d(pixels), nn.Linear(pixels, width))"
            ),
            "averaged",
        ),
        ("def build(bundle, **given):\n    return len", "torch module"),
    ],
    ids=["signature", "features", "kind", "drawn", "counter", "module"],
)
def test_encoder_that_breaks_the_contract_is_refused(
    source: str, expected: str, install_plugin: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install_plugin(encoders={"flat": source})
    message = error_of(capsys, "run", "--set", "encoder=flat")
    assert "the flat encoder" in message and expected in message


# -- recipe of a dataset -----------------------------------------------------------------------------------------------


def test_recipe_of_a_dataset_plugin(install_plugin: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install_plugin(data={"mine": DATA})
    config = resolve(flags={"dataset": "mine", "method": "fedavg"}, sets=["clients=4"])
    assert (config.stream.clients, config.stream.task_size, config.train.rounds) == (4, 2, 1)
    assert resolve(flags={"dataset": "mine"}).stream.clients == 3, "settings of one run must not change the recipe"
    severe = resolve("mine-severe")
    assert (severe.dataset, severe.setting, severe.stream.clients) == ("mine", "severe", 3)
    assert main(["run", "--dataset", "mine", "--method", "fedavg", "--out", "own", "--quiet"]) == 0
    line = ["study", "severe", "--datasets", "mine", "--methods", "fedavg", "--seeds", "0", "--out", "study"]
    assert main([*line, "--set", "epochs=1"]) == 0
    capsys.readouterr()
    assert main(["list", "recipes", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["mine"]["sets"]["stream"]["clients"] == 3


def test_misspelt_recipe_is_reported(install_plugin: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install_plugin(data={"mine": DATA.replace('"rounds": 1}, "warmup"', '"round": 1}, "warmup"')})
    assert "rounds" in error_of(capsys, "run", "--dataset", "mine")
