"""Settings of every type are set on the command line, written into a run folder and read back."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

import pytest

from profcil.cli.main import main
from profcil.config import setting
from profcil.errors import ConfigError
from profcil.methods.base import Method, Params
from profcil.resolve import resolve, to_toml
from profcil.runs.reader import load_run


@dataclass(frozen=True)
class Wide(Params):
    cap: float | None = setting(None, "largest norm; none = no limit", low=0.0)
    floor: Optional[int] = setting(3, "smallest count")  # noqa: UP045 - a common spelling
    taus: tuple[float, ...] = setting((1.0,), "temperatures", low=0.0)
    pair: tuple[int, str] = setting((1, "a"), "two things")
    name: str | float = setting("x", "a word or a number")


class Plugin(Method):
    """A method of another package."""

    Params = Wide
    regimes = {"expanded": {"cap": 4.0}}  # noqa: RUF012 - a constant of the class


@pytest.fixture(autouse=True)
def plugin(register_method: Callable[[type], None]) -> None:
    register_method(Plugin)


def config_of(*sets: str):
    return resolve("digits", {"method": "registered"}, sets)


@pytest.mark.parametrize(
    ("item", "value"),
    [
        ("cap=0.5", 0.5),
        ("cap=2", 2.0),
        ("cap=none", None),
        ("floor=7", 7),
        ("floor=none", None),
        ("taus=[1.0, 2]", (1.0, 2.0)),
        ("taus=[]", ()),
        ("pair=[2, 'b']", (2, "b")),
        ("name=0.5", 0.5),
        ("name='0.5'", "0.5"),
        ("name=word", "word"),
    ],
)
def test_value_is_parsed_by_type_and_read_back(tmp_path: Path, item: str, value: object) -> None:
    config = config_of(item)
    found = getattr(config.params, item.partition("=")[0])
    assert found == value and type(found) is type(value)
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert resolve(str(tmp_path / "again.toml")) == config


def test_none_is_left_out_if_it_is_the_default() -> None:
    text = to_toml(config_of())
    assert "cap" not in tomllib.loads(text)["params"]
    assert tomllib.loads(to_toml(config_of("floor=none")))["params"]["floor"] == "none"


def test_none_is_written_if_the_regime_differs(tmp_path: Path) -> None:
    assert config_of("regime=expanded").params.cap == 4.0
    config = config_of("regime=expanded", "cap=none")
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert config.params.cap is None and resolve(str(tmp_path / "again.toml")) == config


def test_infinity_and_unicode_are_read_back(tmp_path: Path) -> None:
    config = replace(config_of("clip=inf"), device="cpu")
    config = replace(config, params=replace(config.params, name="Größe 😀"))
    (tmp_path / "again.toml").write_text(to_toml(config), encoding="utf-8")
    again = resolve(str(tmp_path / "again.toml"))
    assert again == config and math.isinf(again.train.clip)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("cap=much", "cap = 'much' is not a number or none"),
        ("cap=-1", "cap = -1.0 is out of range; it must be at least 0.0"),
        ("cap=[1.0]", "is not a number or none"),
        ("floor=1.5", "is not a whole number or none"),
        ("taus=1.0", r"is not a list \(each a number\)"),
        ("taus=[1.0, 'x']", r"taus\[1\] = 'x' is not a number"),
        ("taus=[1.0, -1.0]", "taus = -1.0 is out of range"),
        ("pair=[1]", r"is not a list \(a whole number, text\)"),
    ],
)
def test_value_of_wrong_type_is_refused(item: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_of(item)


def test_run_with_none_is_read_back(small: list[str]) -> None:
    assert main(["run", "--method", "registered", "--out", "run", "--quiet", *small]) == 0
    assert load_run("run").done
    assert main(["resume", "run"]) == 0
