"""The bench on tiny sizes: every case is measured, rows make one table and JSON; no time is judged."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from profcil.bench import cases, flower, graph, scale, streams, table
from profcil.cli.main import main
from profcil.errors import ConfigError

TINY = tuple(
    part
    for item in ("train.rounds=1", "train.epochs=1", "warmup.rounds=1", "clients=4", "participants=2", "model.width=4")
    for part in ("--set", item)
)
ROW = {"ours", "unit"}


@pytest.mark.parametrize("method", ["fedavg", "promax"])
def test_a_growing_federation_is_measured(method: str) -> None:
    row = scale.case(method, clients=40, classes=20, each=20, rounds=1, images=2_000)
    assert row.keys() >= ROW | {"resident_first_mb", "resident_last_mb"} and row["ours"] > 0


def test_every_client_has_the_same_work_however_many_there_are() -> None:
    few, many = (scale.world_for("fedavg", n, 10, 20, 1, images=2_000).plan for n in (20, 100))
    assert len(few.ids) == 20 * 20 and len(many.ids) == 20 * 100
    mean = [plan.counts[plan.counts > 0].mean() for plan in (few, many)]
    assert mean[0] == pytest.approx(mean[1], rel=0.1)


def test_a_generated_graph_has_the_sizes_asked_for_and_five_clients_take_part() -> None:
    bundle = graph.made_graph(800, 3_000)
    assert len(bundle.train) + len(bundle.test) + len(bundle.validation or ()) == len(bundle.train.x) == 800
    assert 0.8 * 6_000 < bundle.train.edges.shape[1] <= 6_000  # both directions, without repeated ones and loops
    row = graph.case(nodes=800, edges=3_000)
    assert row["clients"] == 5 and row["ours"] > 0 and row["scoring_seconds"] > 0 and row["peak_memory_mb"] > 0


def test_a_graph_of_the_true_size_is_what_its_name_says() -> None:
    from profcil import registry

    facts = registry.find("data", "ogbn_arxiv").FACTS
    assert int(graph.PARTS[0] * graph.NODES) == pytest.approx(facts.train, rel=0.001)
    assert graph.NODES - int(graph.PARTS[1] * graph.NODES) == pytest.approx(facts.test, rel=0.001)


def test_the_default_path_is_set_against_the_eager_sequential_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def played(dataset: str, method: str, data: Path, device: str = "cpu", flags: tuple[str, ...] = ()) -> dict:
        asked.append(flags)
        return {"ours": 10.0 * len(asked) if "serial" in flags else float(len(asked)), "unit": "s"}

    monkeypatch.setattr(streams, "stream_case", played)
    row = streams.first_release_case("digits", "promax", Path("nowhere"), repeats=2)
    assert row["ours"] == 1.0 and row["reference"] == 20.0 and "eager" in row["against"]
    assert asked == [(), streams.FIRST, (), streams.FIRST]  # in turn, so that a busy moment hits both


def test_both_paths_of_a_real_stream_are_measured() -> None:
    row = streams.first_release_case("digits", "promax", Path("nowhere"), repeats=1, flags=TINY)
    assert row["ours"] > 0 and row["reference"] > 0 and row["warmup_seconds"] > 0 and row["resident_last_mb"] > 0


class Grid:
    """Nodes that answer at once, in the wrong order."""

    def get_node_ids(self) -> list[int]:
        return list(range(4))

    def send_and_receive(self, asks: list) -> list:
        for number, ask in enumerate(asks):
            ask.metadata.__dict__["_message_id"] = str(number)  # a grid names what it sends
        return [flower.turn(ask, SimpleNamespace()) for ask in reversed(asks)]


def test_flower_and_our_executor_play_the_same_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(identity, name, 1)
    sets = ("setting=severe", *TINY[1::2])
    (theirs, other), (ours, model) = flower.served(Grid(), sets), flower.here(sets)
    assert theirs > 0 and ours > 0
    gap = max(float((model[b][k] - other[b][k]).abs().max()) for b in model for k in model[b])
    assert model.keys() == other.keys() and gap < 1e-5  # ours are stacked


@pytest.mark.slow
def test_flowers_simulation_engine_is_measured() -> None:
    pytest.importorskip("flwr")
    pytest.importorskip("ray")
    row = flower.case("severe", *TINY[1::2])
    assert row["ours"] > 0 and row["reference"] > 0 and row["largest_difference"] < 1e-5


def test_without_flower_the_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    assert "flwr[simulation]" in flower.case()["note"]


def test_a_case_runs_apart_and_a_broken_one_does_not_end_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["plan for 100,000 clients", "no such case"]
    monkeypatch.setattr(table, "chosen", lambda *a: dict.fromkeys(names, cases.Case("streams")))
    good, bad = table.measure([], Path("nowhere"), "cpu")
    assert good["ours"] > 0 and good["peak_memory_mb"] > 50 and "failed" not in good
    assert bad["failed"] and "no such case" in bad["note"]


def test_growth_is_set_against_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"fedavg, 100 clients": 1.0, "fedavg, 10,000 clients": 2.0, "fedavg, 100,000 clients": 4.0}
    monkeypatch.setattr(table, "apart", lambda name, data, device: {"ours": seconds[name], "unit": "s a round"})
    rows = list(table.measure([n for n in seconds], Path("nowhere"), "cpu"))
    assert [row.get("ratio") for row in rows] == [None, 0.5, 0.25]
    assert rows[2]["against"] == "fedavg, 100 clients"


def test_words_choose_cases_and_a_wrong_one_is_named() -> None:
    found = table.chosen(["Flower", "100,000 clients"], Path("nowhere"), "cpu")
    assert len(found) == 5 and all("Flower" in n or "100,000 clients" in n for n in found)
    with pytest.raises(ConfigError, match=r"'promux'.*promax on digits"):
        table.chosen(["promux"], Path("nowhere"), "cpu")


def test_a_gpu_adds_cases_and_takes_none_away() -> None:
    cpu, gpu = (cases.cases(Path("nowhere"), device) for device in ("cpu", "cuda"))
    assert gpu.items() >= cpu.items()
    added = gpu.keys() - cpu.keys()
    assert {"supervised step, cuda", "supervised step of 5, cuda", "promax on cifar100, cuda"} <= added


def test_every_case_names_something_that_can_be_called() -> None:
    import importlib
    import inspect

    for name, case in cases.cases(Path("nowhere"), "cuda").items():
        call = getattr(importlib.import_module(f"profcil.bench.{case.module}"), case.call)
        inspect.signature(call).bind(**case.args)
        assert not case.base or case.base in cases.cases(Path("nowhere"), "cpu"), name


ROWS = [
    {"what": "a step", "ours": 1.5, "unit": "ms", "reference": 3.0, "ratio": 2.0, "against": "as written",
     "peak_memory_mb": 1234.0, "images_per_second": 65432.1, "share_of_matmul_peak": 0.3333},
    {"what": "a stream", "note": "no data"},
]  # fmt: skip


def test_the_table_shows_what_ours_reference_ratio_and_memory() -> None:
    head, step, stream = table.render(ROWS).splitlines()
    order = ["what", "ours", "reference", "ratio", "peak MB", "images/s", "of peak"]
    assert [head.index(word) for word in order] == sorted(head.index(word) for word in order)
    assert step.split() == ["a", "step", "1.5", "ms", "3", "2", "1,234", "65,432", "33.3%", "as", "written"]
    assert "no data" in stream and "MB, first position" not in head  # a column that nobody fills is left out


@pytest.mark.parametrize("where", ["-", "found/bench.json"])
def test_the_verb_prints_a_table_or_writes_json(
    where: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(table, "measure", lambda *a: iter(ROWS))
    assert main(["bench", "step", "--json", where, "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    written = json.loads(out if where == "-" else Path(where).read_text())
    assert written["rows"] == ROWS and written.keys() == {"date", "machine", "versions", "rows"}
    assert where == "-" or out.splitlines() == table.render(ROWS).splitlines()


def test_a_failed_case_is_told_by_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "measure", lambda *a: iter([{"what": "x", "failed": True, "note": "this case failed"}]))
    assert main(["bench", "--device", "cpu"]) == 1


def test_a_device_that_is_not_there_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert main(["bench", "--device", "cuda"]) == 2
    assert "no usable CUDA GPU" in capsys.readouterr().err


def test_the_bench_says_what_it_could_not_measure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "promax on cora", "--device", "cpu", "--data-dir", str(tmp_path)]) == 0
    assert "profcil data fetch cora" in capsys.readouterr().out
