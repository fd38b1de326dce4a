"""The table of a method in a recipe may have sections of its own, which override those of the recipe for it alone."""

from __future__ import annotations

import tomllib

import pytest

from profcil.errors import ConfigError
from profcil.resolve import resolve, to_toml

GIVEN = {
    "dataset": "digits",
    "warmup": {"rounds": 4},
    "methods": {"fedavg": {"warmup": {"rounds": 2}, "severe": {"train": {"lr": 0.5}}, "label_space": "local"}},
}


def test_sections_are_for_one_method_and_one_setting():
    fedavg = resolve(GIVEN, {"method": "fedavg"})
    assert (fedavg.warmup.rounds, fedavg.train.lr, fedavg.params.label_space) == (2, 0.5, "local")
    even = resolve(GIVEN, {"method": "fedavg", "setting": "homogeneous"})
    assert (even.warmup.rounds, even.train.lr) == (2, resolve(None, {"method": "fedavg"}).train.lr)
    assert resolve(GIVEN, {"method": "promax"}).warmup.rounds == 4


def test_sections_are_for_own_data_too(tmp_path):
    data = tmp_path / "points.csv"
    data.write_text("a,b,label\n" + "".join(f"{i},{-i},{'xyz'[i % 3]}\n" for i in range(60)))
    given = {key: value for key, value in GIVEN.items() if key != "dataset"}
    config = resolve(given, {"method": "fedavg", "data": str(data)})
    assert (config.warmup.rounds, config.train.lr, config.params.label_space) == (2, 0.5, "local")


def test_sections_of_a_method_are_overridden_like_those_of_the_recipe():
    """By a given recipe, a preset, and --set; and a written recipe is read back as it was."""
    built_in = resolve(None, {"method": "prolin"})
    assert (built_in.warmup.rounds, built_in.params.anchor) == (0, False)
    assert resolve(None, {"method": "promax"}).warmup.rounds == 10
    assert resolve(GIVEN, {"method": "prolin"}).warmup.rounds == 4
    assert resolve(None, {"method": "prolin"}, ["warmup.rounds=3"]).warmup.rounds == 3
    moving = resolve(None, {"dataset": "cifar100", "method": "prolin", "preset": "moving"})
    assert (moving.warmup.rounds, moving.params.base_rounds, moving.params.anchor) == (20, 10, True)
    for config in (built_in, moving, resolve(GIVEN, {"method": "fedavg"})):
        assert resolve(tomllib.loads(to_toml(config))) == config


@pytest.mark.parametrize(
    ("methods", "reason"),
    [
        ({"fedavg": {"warmup": 3}}, "warmup = 3 is not a table"),
        ({"fedavg": 3}, "methods.fedavg = 3 is not a table"),
        ({"fedavg": {"warmup": {"round": 3}}}, "unknown setting 'round' in warmup"),
        (3, "methods = 3 is not a table"),
        ({"fedavg": {"severe": 1}}, "methods.fedavg.severe = 1 is not a table"),
    ],
)
def test_a_wrong_section_is_one_sentence(methods, reason):
    with pytest.raises(ConfigError, match=reason):
        resolve({"dataset": "digits", "methods": methods}, {"method": "fedavg"})


def test_a_preset_for_other_datasets_names_them():
    with pytest.raises(ConfigError, match="nothing for prolin on digits, it is for prolin on cifar100; leave it out"):
        resolve(None, {"method": "prolin", "preset": "moving"})
