"""The bench on tiny sizes: every case gives a row, and rows are reported as a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from profcil.bench import cases, flower, graph, label_spaces, own, scale, streams, table
from profcil.cli.main import main
from profcil.errors import ConfigError

TINY = tuple(
    part
    for item in ("train.rounds=1", "train.epochs=1", "warmup.rounds=1", "clients=4", "participants=2", "model.width=4")
    for part in ("--set", item)
)
COLUMNS = {"ours", "unit"}


@pytest.mark.parametrize("method", ["fedavg", "promax"])
def test_a_scale_case_gives_times_and_memory(method: str) -> None:
    row = scale.case(method, clients=40, classes=20, each=20, rounds=1, images=2_000)
    assert row.keys() >= COLUMNS | {"resident_first_mb", "resident_last_mb"} and row["ours"] > 0


def test_the_work_per_client_does_not_depend_on_the_number_of_clients() -> None:
    small, large = (scale.world_for("fedavg", n, 10, 20, 1, images=2_000).plan for n in (20, 100))
    assert len(small.ids) == 20 * 20 and len(large.ids) == 20 * 100
    mean = [plan.counts[plan.counts > 0].mean() for plan in (small, large)]
    assert mean[0] == pytest.approx(mean[1], rel=0.1)


def test_a_generated_graph_has_the_given_sizes_and_five_clients_take_part() -> None:
    bundle = graph.random_graph(800, 3_000)
    assert len(bundle.train) + len(bundle.test) + len(bundle.validation or ()) == len(bundle.train.x) == 800
    assert 0.8 * 6_000 < bundle.train.edges.shape[1] <= 6_000  # both directions, without duplicates and self-loops
    row = graph.case(nodes=800, edges=3_000)
    assert row["clients"] == 5 and row["ours"] > 0 and row["scoring_seconds"] > 0 and row["peak_memory_mb"] > 0


def test_the_default_graph_has_the_split_of_ogbn_arxiv() -> None:
    from profcil import registry

    facts = registry.find("data", "ogbn_arxiv").FACTS
    assert int(graph.PARTS[0] * graph.NODES) == pytest.approx(facts.train, rel=0.001)
    assert graph.NODES - int(graph.PARTS[1] * graph.NODES) == pytest.approx(facts.test, rel=0.001)


def test_the_default_path_is_compared_with_the_eager_sequential_one(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    def fake_case(dataset: str, method: str, data: Path, device: str = "cpu", flags: tuple[str, ...] = ()) -> dict:
        used.append(flags)
        seconds = 10.0 * len(used) if "off" in flags else float(len(used))
        return {"ours": seconds, "unit": "s"}

    monkeypatch.setattr(streams, "stream_case", fake_case)
    row = streams.first_release_case("digits", "promax", Path("nowhere"), repeats=2)
    assert row["ours"] == 1.0 and row["reference"] == 20.0 and "eager" in row["against"]
    assert used == [(), streams.FIRST_RELEASE, (), streams.FIRST_RELEASE]  # alternately


def test_both_paths_of_a_real_stream_are_measured() -> None:
    row = streams.first_release_case("digits", "promax", Path("nowhere"), repeats=1, flags=TINY)
    assert row["ours"] > 0 and row["reference"] > 0 and row["warmup_seconds"] > 0 and row["resident_last_mb"] > 0


class Grid:
    """A Flower grid that answers at once, in reverse order."""

    def get_node_ids(self) -> list[int]:
        return list(range(4))

    def send_and_receive(self, messages: list) -> list:
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = str(number)  # as a grid does
        return [flower.turn(message, SimpleNamespace()) for message in reversed(messages)]


def test_flower_and_our_executor_give_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(identity, name, 1)
    sets = ("setting=severe", *TINY[1::2])
    flower_seconds, flower_model = flower.serve(Grid(), sets)
    seconds, model = flower.run_here(sets)
    assert flower_seconds > 0 and seconds > 0
    assert model.keys() == flower_model.keys()
    assert flower.largest_difference(model, flower_model) < 1e-5  # ours computes the clients together


@pytest.mark.slow
def test_flowers_simulation_engine_is_measured() -> None:
    pytest.importorskip("flwr")
    pytest.importorskip("ray")
    row = flower.case("severe", *TINY[1::2])
    assert row["ours"] > 0 and row["reference"] > 0 and row["largest_difference"] < 1e-5


def test_without_flower_the_row_has_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    assert "flwr[simulation]" in flower.case()["note"]


def test_own_data_is_written_and_read() -> None:
    row = own.case(texts=300)
    assert row["ours"] > 0 and row["peak_memory_mb"] > 50


def test_a_failing_case_does_not_end_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["plan for 100,000 clients", "no such case"]
    monkeypatch.setattr(table, "select", lambda *a: dict.fromkeys(names, cases.Case("streams")))
    good, bad = table.measure([], Path("nowhere"), "cpu")
    assert good["ours"] > 0 and good["peak_memory_mb"] > 50 and "failed" not in good
    assert bad["failed"] and "no such case" in bad["note"]


def test_growing_sizes_are_compared_with_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"fedavg, 100 clients": 1.0, "fedavg, 10,000 clients": 2.0, "fedavg, 100,000 clients": 4.0}
    monkeypatch.setattr(table, "run_case", lambda name, *a: {"ours": seconds[name], "unit": "s a round"})
    rows = list(table.measure(list(seconds), Path("nowhere"), "cpu"))
    assert [row.get("ratio") for row in rows] == [None, 0.5, 0.25]
    assert rows[2]["against"] == "fedavg, 100 clients"


def test_words_select_cases_and_an_unknown_word_is_refused() -> None:
    found = table.select(["Flower", "100,000 clients"], Path("nowhere"), "cpu")
    assert len(found) == 5 and all("Flower" in n or "100,000 clients" in n for n in found)
    with pytest.raises(ConfigError, match=r"'promux'.*promax on digits"):
        table.select(["promux"], Path("nowhere"), "cpu")


def test_a_gpu_adds_cases() -> None:
    cpu, gpu = (cases.cases(Path("nowhere"), device) for device in ("cpu", "cuda"))
    assert gpu.items() >= cpu.items()
    added = gpu.keys() - cpu.keys()
    assert {"supervised step, cuda", "supervised step of 5, cuda", "promax on cifar100, cuda"} <= added


def test_every_case_has_a_function_with_matching_arguments() -> None:
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


def test_the_table_shows_the_columns_that_a_row_has() -> None:
    head, step, stream = table.render(ROWS).splitlines()
    order = ["what", "ours", "reference", "ratio", "peak MB", "images/s", "of peak"]
    assert [head.index(word) for word in order] == sorted(head.index(word) for word in order)
    assert step.split() == ["a", "step", "1.5", "ms", "3", "2", "1,234", "65,432", "33.3%", "as", "written"]
    assert "no data" in stream and "MB, first position" not in head  # an empty column is left out


@pytest.mark.parametrize("target", ["-", "found/bench.json"])
def test_the_verb_prints_a_table_or_writes_json(
    target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(table, "measure", lambda *a: iter(ROWS))
    assert main(["bench", "step", "--json", target, "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    written = json.loads(out if target == "-" else Path(target).read_text())
    assert written["rows"] == ROWS and written.keys() == {"date", "machine", "versions", "rows"}
    assert target == "-" or out.splitlines() == table.render(ROWS).splitlines()


def test_a_failed_case_sets_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "measure", lambda *a: iter([{"what": "x", "failed": True, "note": "this case failed"}]))
    assert main(["bench", "--device", "cpu"]) == 1


def test_a_missing_device_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(["bench", "--device", "cuda"]) == 2
    assert "no usable CUDA GPU" in capsys.readouterr().err


def test_a_case_without_data_says_how_to_get_the_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "promax on cora", "--device", "cpu", "--data-dir", str(tmp_path)]) == 0
    assert "profcil data fetch cora" in capsys.readouterr().out


def mixtures(classes: int, **settings: object) -> label_spaces.World:
    """A world of few classes that are mixtures of six classes of random features."""
    rng = torch.Generator().manual_seed(0)
    y = torch.arange(6).repeat(8)
    part = (torch.rand(len(y), 12, generator=rng) + torch.nn.functional.one_hot(y, 12), y)
    train, test = label_spaces.synthetic_classes(part, part, classes)
    return label_spaces.world_for(train, test, classes, settings)


def test_the_memory_of_many_classes_takes_the_bytes_of_the_papers_formula() -> None:
    plain = mixtures(10, transfer="full")
    state = label_spaces.run_stream(plain)
    sent = state.ledger.total(direction="down", kind="memory")
    assert sent == label_spaces.paper_downlink(plain) > 0
    assert state.server_bytes == 4 * 10 * (2 * 12 + 1)
    coded = mixtures(10, **{"transfer": "full", "channel.memory": "int8"})
    fewer = label_spaces.run_stream(coded).ledger.total(direction="down", kind="memory")
    assert fewer * (4 * (2 * 12 + 1)) == sent * (2 * (12 + 4) + 4)
    assert label_spaces.closed_form_accuracy(plain, state) > 50


def test_the_base_of_the_mixtures_returns_features_unchanged() -> None:
    world = mixtures(10)
    world.net.load({"base": label_spaces.passing_base(world.net.weights(["base"]))["base"]})
    features = world.net.embed(world.bundle.train, torch.arange(20))
    assert torch.equal(features, world.bundle.train.x[:20])
