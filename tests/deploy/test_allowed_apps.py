"""A site runs only the apps on its list: the check is in the site's own process, before anything of an app is used."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Message, RecordDict
from flwr.supernode import start_client_internal as flower
from memory_grid import tiny
from test_sites import federation_text, write_sites

from profcil.cli.main import main
from profcil.deploy.app_folder import settings_table, write_app
from profcil.deploy.client import supernode
from profcil.deploy.client.allowed_apps import app_digest, guard, read_allowed

CODE = b"the bundle of an app"
DIGEST = hashlib.sha256(CODE).hexdigest()


class Node:
    """What Flower's function that receives messages is given, and what it stored."""

    def __init__(self, allowed: set[str], bundle: bytes = CODE, claimed: str = DIGEST, **run: Any) -> None:
        self.stored: list[str] = []
        self.refusals: list[str] = []
        self.bundle = SimpleNamespace(content=bundle, hash_str=claimed, verifications={})
        self.run = SimpleNamespace(fab_hash=claimed, override_config={}, series_id=1, primary_task_type="x", **run)
        self.pull = guard(self.pull_like_flower, self.refuse, allowed)

    def pull_like_flower(self, *, receive, get_run, get_fab, state, object_store) -> int:
        receive()
        run = get_run(1)
        get_fab(run.fab_hash, 1)
        self.stored.append(run.fab_hash)
        return 1

    def refuse(self, message: Any, reason: str, state: Any, store: Any) -> None:
        self.refusals.append(reason)

    def receive(self) -> int:
        message = Message(RecordDict(), 7, "query.hello")
        return self.pull(
            receive=lambda: (message, None),
            get_run=lambda run_id: self.run,
            get_fab=lambda digest, run_id: self.bundle,
            state=None,
            object_store=None,
        )


def test_an_app_on_the_list_is_run():
    node = Node({DIGEST})
    assert node.receive() == 1
    assert (node.stored, node.refusals) == ([DIGEST], [])


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (Node(set()), "not on this site's list"),
        (Node({DIGEST}, b"other code"), "does not have the digest"),
        (Node({DIGEST}, b"other code", hashlib.sha256(b"other code").hexdigest()), "not on this site's list"),
    ],
)
def test_another_app_is_refused_before_it_is_stored(node, reason):
    node.receive()
    assert node.stored == [] and reason in node.refusals[0]


def test_settings_of_an_allowed_app_cannot_be_replaced():
    node = Node({DIGEST})
    node.run.override_config = {"recipe": "method = 'other'"}
    node.receive()
    assert node.stored == [] and "replaces settings" in node.refusals[0]


def test_the_guard_fits_flowers_function():
    """Flower's own function, up to the place where it would store the app."""
    refusals: list[str] = []
    pull = guard(flower._pull_and_store_message, lambda message, reason, *_: refusals.append(reason), set())
    message = Message(RecordDict(), 7, "query.hello")
    message.metadata.__dict__["_run_id"] = 5
    others = {"node_config": {}, "pull_object": None, "confirm_message_received": None, "trusted_entities": None}
    state = SimpleNamespace(get_run=lambda run_id: None)  # it has no place to store an app
    run = SimpleNamespace(fab_hash=DIGEST, override_config={})
    found = pull(
        receive=lambda: (message, None),
        get_run=lambda run_id: run,
        get_fab=None,
        state=state,
        object_store=None,
        **others,
    )
    assert found == 5 and len(refusals) == 1


def test_a_flower_without_this_function_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(flower, "_pull_and_store_message", lambda message: None)
    (tmp_path / "list").write_text(f"{DIGEST}  # ours\n\n")
    assert supernode.main(["--allow-apps", str(tmp_path / "list")]) == 1
    assert "cannot be guarded" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "sentence"), [(b"abc\n", "no digest"), (b"\xff", "not a text file"), (None, "could not be read")]
)
def test_a_wrong_list_is_one_sentence(tmp_path, capsys, content, sentence):
    if content is not None:
        (tmp_path / "list").write_bytes(content)
    assert supernode.main([f"--allow-apps={tmp_path / 'list'}", "--insecure"]) == 2
    assert sentence in capsys.readouterr().err
    assert supernode.main(["--insecure"]) == 2


def test_the_list_is_read_and_the_other_options_are_flowers(tmp_path):
    (tmp_path / "list").write_text(f"# allowed\n{DIGEST}  # ours\n")
    assert read_allowed(tmp_path / "list") == {DIGEST}
    assert supernode.split_options(["--a", "--allow-apps", "f", "--b"]) == ("f", ["--a", "--b"])
    assert supernode.split_options(["--allow-apps=f", "--b", "1"]) == ("f", ["--b", "1"])


def test_the_check_of_a_site_prints_the_digest_of_the_app(tmp_path, capsys):
    nodes = write_sites(tmp_path, "text")
    app = tmp_path / "app"
    settings = settings_table(tiny(), tmp_path / "run", tmp_path, federation=federation_text("text"))
    write_app(app, settings)
    assert main(["deploy", "check", str(Path(nodes[7]["site"])), "--federation", str(app)]) == 0
    assert f"the site would run the app {app_digest(app)}" in capsys.readouterr().out
    before = app_digest(app)
    with (app / "profcil_app.py").open("a") as file:
        file.write("print('more')\n")
    assert app_digest(app) != before
