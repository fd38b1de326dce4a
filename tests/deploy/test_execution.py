"""A deployment records how each site computes, and names a site that computes differently."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from memory_grid import tiny
from test_faults import all_clients, events, fault_at, no_reply

from profcil.cli.main import main
from profcil.deploy.client import identity
from profcil.deploy.execution import KEYS, LONGEST, execution_facts, read_execution, short_text
from profcil.deploy.hello import Hello, hello_response, read_hello
from profcil.deploy.server.fleet import TooFewClients
from profcil.deploy.wire import UnreadableMessage

VALID = dict.fromkeys(KEYS, "x")


def sites(folder: Path) -> dict[str, dict[str, str]]:
    return json.loads((folder / "run.json").read_text())["sites"]


def test_facts_of_the_reference_path():
    facts = execution_facts(tiny())
    assert tuple(facts) == KEYS
    assert {k: facts[k] for k in ("path", "device", "precision")} == {
        "path": "reference",
        "device": "cpu",
        "precision": "float32",
    }
    assert facts["torch"] == torch.__version__
    assert (facts["compiler"], facts["triton"]) == ("none", "none")
    assert read_execution(facts) == facts


def test_facts_of_the_accelerated_path_name_the_compiler():
    pytest.importorskip("profcil.accel")
    from profcil.accel.loader import compiler_version

    facts = execution_facts(tiny(accelerate="auto"))
    assert (facts["path"], facts["compiler"]) == ("accelerated", short_text(compiler_version()))


def test_a_text_is_made_short_and_printable():
    assert short_text("a\x1b[31m\nb" + 200 * "c") == ("a[31mb" + 200 * "c")[:LONGEST]
    assert short_text(None) == short_text("\n") == "none"


@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        {},
        VALID | {"more": "x"},
        {k: v for k, v in VALID.items() if k != "torch"},
        VALID | {"path": 3},
        VALID | {"path": ["x"]},
        VALID | {"path": ""},
        VALID | {"path": "x" * (LONGEST + 1)},
        VALID | {"path": "\x1b[31mred"},
        VALID | {"path": "two\nlines"},
    ],
)
def test_a_hello_with_other_facts_is_refused(found):
    content = hello_response(Hello(0, execution=VALID))
    assert read_hello(content).execution == VALID
    head = json.loads(content.config_records["head"]["json"])
    content.config_records["head"]["json"] = json.dumps(head | {"execution": found})
    with pytest.raises(UnreadableMessage, match="execution"):
        read_hello(content)


def test_a_node_with_other_facts_is_left_out(deployed, monkeypatch):
    sent = iter([VALID, VALID | {"path": "x" * 1000}, VALID])
    monkeypatch.setattr(identity, "execution_facts", lambda config: next(sent))
    folder, _ = deployed(all_clients())
    assert sites(folder) == {"0": VALID, "2": VALID}
    [refused] = events(folder, "refused")
    assert "no short text for path" in refused["reason"]


def test_the_run_records_every_site_and_status_shows_them(deployed, capsys):
    folder, _ = deployed(all_clients())
    expected = execution_facts(all_clients())
    assert sites(folder) == {"0": expected, "1": expected, "2": expected}
    assert main(["status", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "execution at 3 sites: device cpu, path reference, precision float32, processor" in text
    assert "computes differently" not in text
    assert main(["status", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sites"] == sites(folder)


def test_status_names_a_site_on_another_path(deployed, capsys, monkeypatch):
    usual = VALID | {"path": "reference", "compiler": "none"}
    other = usual | {"path": "accelerated", "compiler": "cc 12"}
    sent = iter([usual, other, usual])
    monkeypatch.setattr(identity, "execution_facts", lambda config: next(sent))
    folder, _ = deployed(all_clients())
    assert main(["status", str(folder)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "computes differently" in line]
    assert lines == ["client 1 computes differently, so that bits may differ: compiler cc 12, path accelerated"]


def test_a_resumed_run_keeps_the_facts_of_absent_sites(deployed, monkeypatch):
    monkeypatch.setattr(identity, "execution_facts", lambda config: VALID)
    with pytest.raises(TooFewClients):
        deployed(all_clients(), fault=fault_at(2, no_reply), min_replies=3, attempts=1)
    later = VALID | {"torch": "y"}
    monkeypatch.setattr(identity, "execution_facts", lambda config: later)
    folder, _ = deployed(all_clients(), nodes=2)
    assert sites(folder) == {"0": later, "1": later, "2": VALID}
