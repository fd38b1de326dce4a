"""The verbs: an app that Flower accepts, certificates that fit together, and a status that reads any run folder."""

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
from test_faults import at, everyone

from profcil.cli.main import main
from profcil.deploy.policy import Policy, read_policy
from profcil.deploy.run_config import read_recipe, write_recipe
from profcil.deploy.status import status
from profcil.errors import ConfigError


def test_the_app_is_one_that_flower_takes(tmp_path, capsys):
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
    recipe = read_recipe(settings["recipe"])
    assert (recipe.method, recipe.stream.clients, recipe.executor) == ("fedavg", 6, "serial")
    assert config["project"]["dependencies"] == []  # every node has the package and a torch that fits


def test_the_environment_is_quiet(capsys):
    assert main(["deploy", "env"]) == 0
    assert "export FLWR_TELEMETRY_ENABLED=0\n" in capsys.readouterr().out


def test_a_recipe_travels_whole():
    config = tiny("promax", noise=0.3)
    assert read_recipe(write_recipe(config)) == config
    with pytest.raises(ConfigError, match="deploy app"):
        read_recipe('dataset = "digits"')


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (["deploy", "ap"], "did you mean app"),
        (["deploy", "app", "--deadline", "0"], "deadline = 0.0 is out of range"),
        (["deploy", "app", "--federation", __file__], "give both or none"),
        (["deploy", "app", "--method", "promx"], "did you mean promax"),
        (["status", "nowhere"], "does not exist"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, monkeypatch, capsys, line, sentence):
    monkeypatch.chdir(tmp_path)
    assert main(line) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.strip().splitlines()) == 1


def test_certificates_fit_together_and_keys_are_secret(tmp_path, capsys):
    line = ["deploy", "certs", "--out", str(tmp_path / "c"), "--nodes", "2", "--host", "fed.example.org", "--json"]
    assert main(line) == 0
    made = [Path(p) for p in json.loads(capsys.readouterr().out)["files"]]
    names = {p.name for p in made}
    assert names == {"ca.key", "ca.crt", "server.key", "server.crt", "node-0", "node-0.pub", "node-1", "node-1.pub"}
    open_to_all = {p.name for p in made if stat.S_IMODE(os.stat(p).st_mode) & 0o077}
    assert open_to_all <= {"ca.crt", "server.crt", "node-0.pub", "node-1.pub"}
    assert main(line) == 2  # an authority is not overwritten
    shake_hands(tmp_path / "c", "fed.example.org")
    shake_hands(tmp_path / "c", "127.0.0.1")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(tmp_path / "c", "elsewhere.example.org")


def shake_hands(folder: Path, host: str) -> None:
    """A TLS handshake in memory, as a node would do it that trusts only this authority."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.crt", folder / "server.key")
    client = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(down, up, server_hostname=host), server.wrap_bio(up, down, server_side=True)]
    for _ in range(4):
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue
    assert not ends


def test_a_node_key_is_what_flower_reads(tmp_path):
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

    assert main(["deploy", "certs", "--out", str(tmp_path / "c"), "--nodes", "1", "--json"]) == 0
    private = load_ssh_private_key((tmp_path / "c" / "node-0").read_bytes(), None)
    public = load_ssh_public_key((tmp_path / "c" / "node-0.pub").read_bytes())
    assert private.public_key().public_numbers() == public.public_numbers()
    assert private.curve.name == "secp384r1"


def test_status_tells_who_answered_and_what_went_wrong(deployed, capsys):
    folder, _ = deployed(everyone(), fault=at(2, lambda *_: []))
    found = status(folder)
    assert (found["state"], found["position"], found["rounds"]) == ("done", 2, 2)
    assert found["clients"] == {"0": 4, "1": 3, "2": 4}
    assert found["trouble"] == {"silent": 1}
    assert found["flower_bytes"] > found["payload_bytes"] > 0
    assert len(found["accuracy"]) == 2
    lines = (folder / "ledger.csv").read_text().splitlines()[1:]
    assert found["payload_bytes"] == found["bytes"] == sum(int(line.rsplit(",", 1)[1]) for line in lines)
    assert main(["status", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "silent 1" in said
    assert "FAA" in said


def test_status_of_a_run_that_is_stopped_or_running(deployed, tmp_path, capsys):
    from profcil.deploy.fleet import TooFew
    from profcil.runs.folder import RunFolder

    with pytest.raises(TooFew):
        deployed(everyone(), fault=at(2, lambda *_: []), min_replies=3, attempts=1)
    run = tmp_path / "run"
    assert (status(run)["state"], status(run)["position"], status(run)["round"]) == ("stopped", 0, 1)
    with open(run / "events.jsonl", "a") as file:
        file.write('{"event": "as')  # a line in the making
    with RunFolder(run):
        assert status(run)["state"] == "running"
    capsys.readouterr()
    assert main(["status", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["last"]["silent"] == [1]


def test_status_before_the_first_state(tmp_path, capsys):
    (tmp_path / "config.toml").write_text(write_recipe(everyone()))
    assert main(["status", str(tmp_path)]) == 0
    assert "in the warm-up" in capsys.readouterr().out


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


def test_settings_of_the_app_survive_toml(tmp_path):
    from profcil.deploy.app_folder import write_app

    values = {"recipe": 'a = "ü"\nb = "\\t"\n', "deadline": 1.5, "attempts": 2}
    write_app(tmp_path, values)
    assert tomllib.loads((tmp_path / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"] == values
