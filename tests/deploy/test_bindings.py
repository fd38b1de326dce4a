"""A node's key is one client. What it declares is bounded, and bound to the key that first declared it."""

from __future__ import annotations

import subprocess
import tracemalloc
from pathlib import Path

import pytest
from flwr.app import Message
from memory_grid import Grid
from test_faults import VICTIM, all_clients, events, fault_at, no_reply
from test_sites import fedavg_config, federation_text, write_sites

from profcil.cli.main import main
from profcil.deploy.app_folder import settings_table
from profcil.deploy.local.certs import write_certs
from profcil.deploy.server import entry
from profcil.deploy.server.bindings import Bindings, fingerprint
from profcil.deploy.server.node_registry import NodeRegistry
from profcil.deploy.sites.declarations import declaration_error, joint_plan
from profcil.deploy.sites.federation_file import read_federation
from profcil.deploy.status import status
from profcil.deploy.wire import pack, unpack
from profcil.errors import ConfigError
from profcil.protocol.settings import StreamSettings

RIVAL = 200


def test_a_second_claimant_is_refused_even_after_the_first_is_gone(deployed, tmp_path, capsys):
    def add_rival(grid, request, reply):
        grid.nodes.setdefault(RIVAL, {"client": 1, "home": str(tmp_path / "rival")})
        return fault_at(3, no_reply)(grid, request, reply)

    folder, grid = deployed(all_clients(), fault=add_rival)
    [claim] = events(folder, "claimed twice")
    assert (claim["client"], claim["node"]) == (1, RIVAL)
    assert grid.work_count(RIVAL) == 0
    assert grid.work_count(VICTIM) == 4  # it came back after it missed a deadline
    assert {"who": f"node {RIVAL}", "reason": claim["reason"]} in status(folder)["left_out"]
    assert main(["status", str(folder)]) == 0
    assert "claimed twice 1" in capsys.readouterr().out


def test_a_resumed_run_knows_the_keys(deployed, tmp_path):
    from profcil.deploy.server.fleet import TooFewClients

    with pytest.raises(TooFewClients):
        deployed(all_clients(), fault=fault_at(3, no_reply), min_replies=3, attempts=1)

    settings = settings_table(all_clients(), tmp_path / "run", tmp_path, deadline=0.3, join=0.3)
    nodes = {100 + i: {"client": i, "home": str(tmp_path / "sites")} for i in range(3)}
    grid = Grid(settings, nodes, keys={VICTIM: b"a new key"})
    folder = entry.start(grid, settings)
    assert {e["client"] for e in events(folder, "claimed twice")} == {1}
    assert grid.work_count(VICTIM) == 0


def test_one_key_cannot_be_two_clients():
    bindings = Bindings(expected={5: "named"})
    assert bindings.bind(0, "a", {}) == ""
    assert bindings.bind(0, "a", {}) == ""
    assert "belongs to client 0" in bindings.bind(1, "a", {})
    assert "belongs to client 5" in bindings.bind(1, "named", {})
    assert "names another" in bindings.bind(5, "b", {})
    assert bindings.bind(5, "named", {}) == ""


def test_a_site_cannot_change_its_declaration_within_a_run():
    bindings = Bindings(rebind=True)
    assert bindings.bind(0, "a", {"counts": {"0": 3, "1": 2}}) == ""
    assert bindings.bind(0, "b", {"counts": {"1": 2, "0": 3}}) == ""
    assert "other data" in bindings.bind(0, "a", {"counts": {"0": 4, "1": 2}})


def forged_counts(counts: dict[str, int], site: int = 8):
    """A site that declares other counts than it has."""

    def fault(grid, request, reply):
        if request.metadata.message_type != "query.hello" or request.metadata.dst_node_id != site:
            return [reply]
        head, _ = unpack(reply.content)
        head["site"]["counts"] = counts
        return [Message(pack(head, {}), reply_to=request)]

    return fault


def test_a_declaration_above_the_limit_is_left_out(tmp_path):
    text = federation_text("text") + "max_examples = 100\n"
    rules = {"federation": text, "deadline": 0.5, "join": 0.3}
    settings = settings_table(fedavg_config(), tmp_path / "run", tmp_path / "test" / "data.csv", **rules)
    grid = Grid(settings, write_sites(tmp_path, "text"), forged_counts({"0": 60, "1": 60, "2": 60}))
    folder = entry.start(grid, settings)
    [left] = status(folder)["left_out"]
    assert left["who"] == "site south" and "100 in all" in left["reason"]


def test_the_largest_declaration_takes_little_memory():
    terms = read_federation(federation_text("text"))
    most = {"order": {"0": 0}, "counts": {"0": terms.max_examples - 1, "1": 1}}
    assert declaration_error(most, terms) == ""
    assert "in all" in declaration_error({"order": {"0": 0}, "counts": {"0": 10_000_000}}, terms)
    tracemalloc.start()
    joint_plan(terms, {0: most}, StreamSettings(clients=2, participants=2, task_size=2), 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 120 * terms.max_examples


def test_the_key_that_the_federation_names_is_required(tmp_path):
    write_certs(tmp_path / "certs", nodes=2)
    keys = [pem(tmp_path / "certs" / f"node-{i}.pub") for i in range(2)]
    text = federation_text("text") + f'keys = {{north = "{fingerprint(keys[0])}", south = "{fingerprint(keys[1])}"}}\n'
    nodes = write_sites(tmp_path, "text")
    settings = settings_table(
        fedavg_config(), tmp_path / "run", tmp_path / "test" / "data.csv", federation=text, deadline=0.5, join=0.3
    )
    stolen = {7: keys[0], 8: b"another key"}
    folder = entry.start(Grid(settings, nodes, keys=stolen), settings)
    [claim] = events(folder, "claimed twice")
    assert claim["client"] == 1 and "federation.toml names another" in claim["reason"]
    assert [e["sites"] for e in events(folder, "enrolled")] == [["north"]]


def pem(path: Path) -> bytes:
    """A public key as Flower gives it to a server."""
    from cryptography.hazmat.primitives import serialization as s

    return s.load_ssh_public_key(path.read_bytes()).public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)


def test_a_fingerprint_is_that_of_ssh_keygen(tmp_path):
    write_certs(tmp_path, nodes=1)
    try:
        found = subprocess.run(
            ["ssh-keygen", "-lf", tmp_path / "node-0.pub"], capture_output=True, text=True, timeout=9
        )
    except FileNotFoundError:
        pytest.skip("no ssh-keygen here")
    assert found.stdout.split()[1] == fingerprint(pem(tmp_path / "node-0.pub"))


@pytest.mark.parametrize(
    "line",
    ['keys = "x"', 'keys = {north = "x"}', "keys = {north = 3}", "max_examples = 0", "max_examples = 1e5"],
)
def test_a_mistyped_limit_or_key_is_one_sentence(line):
    with pytest.raises(ConfigError, match=r"federation.toml gives"):
        read_federation(federation_text("text") + line)


def test_a_site_that_was_corrected_is_asked_again(tmp_path):
    nodes = write_sites(tmp_path, "text")
    settings = settings_table(fedavg_config(), tmp_path / "run", tmp_path / "test", federation=federation_text("text"))
    manifest = Path(nodes[8]["site"]) / "manifest.toml"
    good = manifest.read_text()
    manifest.write_text(good.replace("sprain", "spraiin"))
    grid = Grid(settings, {8: nodes[8]})
    registry = NodeRegistry(grid, "run", lambda event: None)
    registry.update()
    assert registry.node_of(1) is None
    manifest.write_text(good)
    registry.update()
    assert registry.node_of(1) is None  # it is not asked again while it is connected
    config = grid.nodes.pop(8)
    registry.update()
    grid.nodes[8] = config
    registry.update()
    assert registry.node_of(1) == 8
