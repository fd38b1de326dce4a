"""The protocol of the paper's appendix against the recipes and the preset `paper`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import profcil
from profcil import registry
from profcil.cli.main import main
from profcil.errors import ConfigError
from profcil.methods.promax import ProMaxParams
from profcil.protocol.tasks import class_order, split
from profcil.resolve import PRESETS, load_toml, recipe_names, resolve, to_toml
from profcil.studies.definition import load_study

FULL = 0  # the full local graph as one batch
CORE: dict[str, tuple[Any, ...]] = {  # Table "Core experimental protocol"; a split as sizes of tasks
    "cifar100": ([10] * 10, 20, 10, 20, 5, 64),
    "tinyimagenet": ([10] * 20, 20, 10, 20, 5, 64),
    "thucnews10": ([2] * 5, 20, 10, 10, 3, 64),
    "clinc150": ([10] * 15, 20, 10, 10, 3, 64),
    "cora": ([2, 2, 3], 5, 5, 30, 5, FULL),
    "ogbn_arxiv": ([5] * 8, 10, 5, 20, 3, 1024),
}
MODALITY: dict[str, tuple[Any, ...]] = {  # optimiser, lr, weight decay, warm-up rounds, λ_aux, backbone
    "image": ("sgd", 0.05, 5e-4, 20, 0.05, "resnet18"),
    "text": ("adam", 1e-3, 1e-4, 10, 0.01, "textcnn"),
    "graph": ("adam", 5e-3, 5e-4, 10, 0.01, "gat"),
}
SETTINGS = {"homogeneous": (1.0, 1.0, 0.0), "severe": (0.4, 0.5, 0.6)}  # support, coverage, disorder
BUDGETS = {"target": "budget", "mfcl": "budget", "hr": "budget", "fedcbdr": "budget"}  # matched 20, expanded 100
datasets = pytest.mark.parametrize("dataset", CORE)
our_methods = pytest.mark.parametrize("method", ["pro", "promax"])


def paper_config(dataset: str, method: str = "promax", **flags: Any) -> Any:
    return resolve(None, {"dataset": dataset, "method": method, "preset": "paper", **flags})


@datasets
@our_methods
def test_the_core_protocol(dataset: str, method: str) -> None:
    sizes, *rest = CORE[dataset]
    c = paper_config(dataset, method)
    tasks = split(class_order(registry.find("data", dataset).FACTS.classes, 0), c.stream.task_size)
    assert [len(task) for task in tasks] == sizes
    assert [c.stream.clients, c.stream.participants, c.train.rounds, c.train.epochs, c.train.batch] == rest


@datasets
@our_methods
def test_optimisation_warm_up_and_backbone(dataset: str, method: str) -> None:
    facts = registry.find("data", dataset).FACTS
    optimiser, lr, decay, rounds, auxiliary, encoder = MODALITY[facts.modality]
    c = paper_config(dataset, method)
    for part in (c.train, c.warmup):
        assert (part.optimiser, part.lr, part.weight_decay, part.decay) == (optimiser, lr, decay, "coupled")
        assert part.momentum == 0.9
    assert (c.warmup.rounds, c.warmup.epochs, c.warmup.projector) == (rounds, 1, "local")
    assert (c.params.auxiliary, c.params.temperature) == (auxiliary, 0.5)
    assert (c.model.encoder or facts.encoder) == encoder
    assert (c.model.head, c.model.norm, c.transfer) == ("linear", "batch", "full")


@datasets
@our_methods
def test_projected_memory_and_alignment(dataset: str, method: str) -> None:
    p = paper_config(dataset, method).params
    assert (p.quota, p.noise, p.proximal, p.base_rounds) == (20, 0.1, 0.01, 2)
    assert (p.fit_when_frozen, p.refresh, p.refresh_at, p.merge) == (True, "global", "final", "replace")
    assert (p.fit_space, p.rehearse_space, p.batch_statistics) == ("seen", "seen", "averaged")
    assert (p.fit_lr, p.rehearse_lr, p.fit_epochs, p.rehearse_epochs) == (0, 0, 0, 0)
    assert (p.fit_schedule, p.rehearse_schedule) == ("constant", "constant")
    if method == "promax":
        assert (p.calibration, p.neighbours, p.transport) == (128, 5, "local")


@pytest.mark.parametrize("setting", SETTINGS)
def test_heterogeneity(setting: str) -> None:
    stream = paper_config("cifar100", setting=setting).stream
    assert (stream.support, stream.coverage, stream.disorder) == SETTINGS[setting]


@pytest.mark.parametrize("method", BUDGETS)
def test_replay_budgets(method: str) -> None:
    for regime, budget in (("matched", 20), ("expanded", 100)):
        c = resolve(None, {"dataset": "cifar100", "method": method, "preset": "paper"}, [f"regime={regime}"])
        assert getattr(c.params, BUDGETS[method]) == budget
        assert resolve(None, {"dataset": "cifar100", "preset": "paper"}, [f"regime={regime}"]).params.quota == 20


@pytest.mark.parametrize("study", ["homogeneous", "severe", "modality", "scale-up", "ablation"])
def test_five_seeds(study: str) -> None:
    assert len(load_study(study).seeds) == 5


# -- presets -----------------------------------------------------------------------------------------------------------


def test_the_preset_states_every_setting_of_pro_max() -> None:
    """So that changed defaults do not change the preset."""
    stated = load_toml(PRESETS / "paper.toml")["methods"]["promax"]
    assert stated.keys() == set(ProMaxParams.__dataclass_fields__)


def test_a_preset_overrides_recipes_and_is_overridden_by_settings(tmp_path: Path) -> None:
    plain = resolve("digits")
    assert (plain.params.noise, plain.params.proximal) == (1.0, 10.0)
    for recipe in ("digits", "digits-severe"):
        assert resolve(recipe, {"preset": "paper"}).params.noise == 0.1
    (tmp_path / "mine.toml").write_text(to_toml(plain))
    found = resolve(str(tmp_path / "mine.toml"), {"preset": "paper", "transfer": "changed"}, ["noise=0.7"])
    assert (found.params.noise, found.params.proximal, found.transfer) == (0.7, 0.01, "changed")


@pytest.mark.parametrize("method", ["fedavg", "prolin"])
def test_a_preset_does_not_change_other_methods(method: str) -> None:
    assert paper_config("digits", method).params == resolve("digits", {"method": method}).params


def test_a_preset_works_on_every_dataset() -> None:
    for dataset in recipe_names():
        assert paper_config(dataset).params.fit_when_frozen


def test_the_preset_plus_is_pro_max_with_options_beyond_the_paper() -> None:
    found = resolve("cora", {"preset": "plus"}).params
    assert (found.transport, found.covariance, found.closed_head, found.noise) == ("linear", "shared", True, 1.0)
    assert found.base_rounds == resolve("cora").params.base_rounds


@pytest.mark.parametrize(("setting", "weight"), [("severe", 2.0), ("homogeneous", 5.0)])
def test_a_preset_may_differ_by_heterogeneity(setting: str, weight: float) -> None:
    for flags, sets in (({"setting": setting}, []), ({}, [f"setting={setting}"])):
        found = resolve("cifar100", {"preset": "plus", **flags}, sets).params
        assert (found.keep_scores, found.base_rounds) == (weight, 10)


def test_a_preset_without_settings_for_a_method_is_refused() -> None:
    with pytest.raises(ConfigError, match="the preset plus has nothing for fedavg on cora, it is for promax; leave it"):
        resolve("cora", {"preset": "plus", "method": "fedavg"})


def test_a_preset_may_have_settings_of_sections_for_one_method() -> None:
    flags = {"preset": "chosen", "method": "fedavg"}
    found = resolve("digits", {**flags, "setting": "severe"})
    assert (found.model.head, found.params.label_space) == ("cosine", "seen")
    found = resolve("digits", {**flags, "setting": "homogeneous"})
    assert (found.model.head, found.params.label_space) == ("linear", "local")
    assert resolve("digits", {"preset": "chosen", "method": "fedprox"}).model.head == "linear"
    with pytest.raises(ConfigError, match=r"nothing for fedavg on ogbn_arxiv, it is for .* on digits"):
        resolve("ogbn_arxiv", flags)


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(ConfigError, match="paper"):
        resolve(None, {"preset": "papr"})


def test_the_preset_by_flag_and_from_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--preset", "paper", "--dry-run"]) == 0
    assert 'merge = "replace"' in capsys.readouterr().out
    assert main(["plan", "--preset", "paper"]) == 0
    small = {"train.rounds": 1, "train.epochs": 1, "warmup.rounds": 1, "model.width": 4}
    run = profcil.run(preset="paper", settings=small, out=tmp_path / "run")
    assert run.config["params"]["merge"] == "replace"
