"""The commands: an app that Flower accepts, valid certificates, and the status of any run folder."""

from __future__ import annotations

import json
import os
import ssl
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from memory_grid import tiny
from test_faults import all_clients, fault_at, no_reply

from profcil.cli.main import main
from profcil.deploy.policy import Policy, read_policy
from profcil.deploy.run_config import config_from_text, config_to_text
from profcil.deploy.status import status
from profcil.errors import ConfigError
from profcil.resolve import to_toml


def test_flower_accepts_the_app(tmp_path, capsys):
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.config_utils import load_and_validate

    line = ["deploy", "app", "--method", "fedavg", "--set", "clients=6", "--out", str(tmp_path / "app")]
    assert main([*line, "--run", str(tmp_path / "run"), "--deadline", "7", "--min-replies", "2"]) == 0
    assert "flwr run" in capsys.readouterr().out
    config, warnings = load_and_validate(tmp_path / "app" / "pyproject.toml")
    assert not warnings
    assert build_fab_from_disk(tmp_path / "app")
    settings = config["tool"]["flwr"]["app"]["config"]
    assert read_policy(settings) == Policy(deadline=7.0, min_replies=2)
    run_config = config_from_text(settings["recipe"])
    assert (run_config.method, run_config.stream.clients, run_config.accelerate) == ("fedavg", 6, "off")
    assert config["project"]["dependencies"] == []  # each node installs profcil and torch itself


def test_the_environment_turns_off_telemetry(capsys):
    assert main(["deploy", "env"]) == 0
    assert "export FLWR_TELEMETRY_ENABLED=0\n" in capsys.readouterr().out


def test_a_configuration_survives_as_text():
    config = tiny("promax", noise=0.3)
    assert config_from_text(config_to_text(config)) == config


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"mode": "wait"}, "mode = wait"),
        ({"mode": "buffer", "stragglers": 0.5}, "stragglers"),
        ({"mode": "buffer", "example_seconds": 1.0}, "example_seconds"),
        ({"mode": "buffer", "dropout": 0.5}, "dropout"),
    ],
)
def test_a_node_refuses_simulated_clocks(settings, name):
    with pytest.raises(ConfigError, match=f"clock.{name} .* a deployment has real ones"):
        config_from_text(to_toml(tiny("promax", **{f"clock__{key}": value for key, value in settings.items()})))


def test_a_node_accepts_a_server_that_takes_replies_as_they_come():
    config = tiny("promax", clock__mode="buffer", clock__buffer=2, clock__staleness=1.0, clock__max_staleness=9)
    assert config_from_text(config_to_text(config)) == config


def test_an_incomplete_configuration_is_refused():
    with pytest.raises(ConfigError, match="deploy app"):
        config_from_text('dataset = "digits"')


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (["deploy", "ap"], "did you mean app"),
        (["deploy", "app", "--deadline", "0"], "deadline = 0.0 is out of range"),
        (["deploy", "app", "--federation", __file__], "give both or none"),
        (["deploy", "app", "--method", "promx"], "did you mean promax"),
        (["deploy", "app", "--set", "clock.mode=wait"], "a deployment has real ones"),
        (["status", "nowhere"], "does not exist"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, monkeypatch, capsys, line, sentence):
    monkeypatch.chdir(tmp_path)
    assert main(line) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert len(error.strip().splitlines()) == 1


def test_certificates_are_valid_and_keys_are_secret(tmp_path, capsys):
    line = ["deploy", "certs", "--out", str(tmp_path / "c"), "--nodes", "2", "--host", "fed.example.org", "--json"]
    assert main(line) == 0
    files = [Path(p) for p in json.loads(capsys.readouterr().out)["files"]]
    names = {p.name for p in files}
    assert names == {"ca.key", "ca.crt", "server.key", "server.crt", "node-0", "node-0.pub", "node-1", "node-1.pub"}
    readable = {p.name for p in files if stat.S_IMODE(os.stat(p).st_mode) & 0o077}
    assert readable <= {"ca.crt", "server.crt", "node-0.pub", "node-1.pub"}
    assert main(line) == 2  # an authority is not overwritten
    tls_handshake(tmp_path / "c", "fed.example.org")
    tls_handshake(tmp_path / "c", "127.0.0.1")
    with pytest.raises(ssl.SSLCertVerificationError):
        tls_handshake(tmp_path / "c", "elsewhere.example.org")


def tls_handshake(folder: Path, host: str) -> None:
    """A TLS handshake in memory with a client that trusts only this authority."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.crt", folder / "server.key")
    client = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    up = ssl.MemoryBIO()
    down = ssl.MemoryBIO()
    ends = [client.wrap_bio(down, up, server_hostname=host), server.wrap_bio(up, down, server_side=True)]
    for _ in range(4):
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue
    assert not ends


def test_a_node_key_has_the_format_that_flower_reads(tmp_path):
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

    assert main(["deploy", "certs", "--out", str(tmp_path / "c"), "--nodes", "1", "--json"]) == 0
    private = load_ssh_private_key((tmp_path / "c" / "node-0").read_bytes(), None)
    public = load_ssh_public_key((tmp_path / "c" / "node-0.pub").read_bytes())
    assert private.public_key().public_numbers() == public.public_numbers()
    assert private.curve.name == "secp384r1"


def test_status_shows_replies_and_problems(deployed, capsys):
    folder, _ = deployed(all_clients(), fault=fault_at(2, no_reply))
    found = status(folder)
    assert (found["state"], found["position"], found["rounds"]) == ("done", 2, 2)
    assert found["clients"] == {"0": 4, "1": 3, "2": 4}
    assert found["trouble"] == {"silent": 1}
    assert found["flower_bytes"] > found["payload_bytes"] > 0
    assert len(found["accuracy"]) == 2
    lines = (folder / "ledger.csv").read_text().splitlines()[1:]
    assert found["payload_bytes"] == found["bytes"] == sum(int(line.rsplit(",", 1)[1]) for line in lines)
    assert main(["status", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "silent 1" in text
    assert "FAA" in text
    assert "last request (round, position 2, round 2)" in text  # counted from 1


def test_status_of_a_run_that_is_stopped_or_running(deployed, tmp_path, capsys):
    from profcil.deploy.server.fleet import TooFewClients
    from profcil.runs.folder import RunFolder

    with pytest.raises(TooFewClients):
        deployed(all_clients(), fault=fault_at(2, no_reply), min_replies=3, attempts=1)
    run = tmp_path / "run"
    assert (status(run)["state"], status(run)["position"], status(run)["round"]) == ("stopped", 0, 1)
    with open(run / "events.jsonl", "a") as file:
        file.write('{"event": "as')  # an incomplete line
    with RunFolder(run):
        assert status(run)["state"] == "running"
    capsys.readouterr()
    assert main(["status", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["last"]["silent"] == [1]
    assert main(["status", str(run)]) == 0
    assert "next: position 1, round 2 of 2" in capsys.readouterr().out


def test_the_live_view_of_a_deployment(deployed, tmp_path):
    from profcil.deploy.server.fleet import TooFewClients
    from profcil.live.state import describe_folder

    with pytest.raises(TooFewClients):
        deployed(all_clients(), fault=fault_at(2, no_reply), min_replies=3, attempts=1)
    shown = describe_folder(tmp_path / "run")
    assert (shown["state"], shown["done"], shown["total"]) == ("stopped", 1, 4)
    assert shown["advice"] == "flwr run, with the same app"
    assert shown["sites"] == {"answered": 2, "silent": 1, "left_out": [], "problems": {"silent": 1}}


def test_status_before_the_first_state(tmp_path, capsys):
    (tmp_path / "config.toml").write_text(config_to_text(all_clients()))
    assert main(["status", str(tmp_path)]) == 0
    assert "in the warm-up" in capsys.readouterr().out


def test_the_flags_of_deploy_are_in_groups(capsys):
    assert main(["deploy", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0] == "usage: profcil deploy ACTION [DIR or RECIPE] [options]"
    titles = ("sites with their own data:", "the machines:", "app: clients that are late", "what is learned:")
    places = [text.index(f"\n{title}") for title in titles]
    flags = ("--federation", "--host", "--deadline", "--dataset")
    assert [sum(place < text.index(f"\n  {flag} ") for place in places) for flag in flags] == [1, 2, 3, 4]


def test_help_and_status_need_neither_torch_nor_flower():
    code = "import sys; from profcil.cli.main import main; main(['deploy', '--help']); main(['status', 'nowhere'])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules or 'flwr' in sys.modules)"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "certificates and keys" in done.stdout


def test_settings_of_the_app_survive_as_toml(tmp_path):
    from profcil.deploy.app_folder import write_app

    values = {"recipe": 'a = "ü"\nb = "\\t"\n', "deadline": 1.5, "attempts": 2}
    write_app(tmp_path, values)
    assert tomllib.loads((tmp_path / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"] == values
