"""The Flower app: a ServerApp that drives the one loop, and a ClientApp that plays one client's part.

`profcil deploy app` writes a folder that Flower can run and that points here. Nothing heavy is imported until a
message needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp


def make_client_app(mods: Sequence[Any] = ()) -> ClientApp:
    """The client's half; `mods` are Flower's own hooks around a message."""
    app = ClientApp(mods=list(mods))
    app.query("hello")(hello)
    app.train("turn")(turn)
    app.query("survey")(survey)
    return app


def hello(message: Message, context: Context) -> Message:
    """Who is there, and what does it hold?"""
    from profcil.deploy.identity import seat_of
    from profcil.deploy.node_registry import hello_records
    from profcil.deploy.wire import unpack

    run = str(unpack(message.content)[0]["run"])
    return Message(hello_records(seat_of(context.node_config, context.run_config).hello(run)), reply_to=message)


def turn(message: Message, context: Context) -> Message:
    return answered("turn", message, context)


def survey(message: Message, context: Context) -> Message:
    return answered("survey", message, context)


def answered(what: str, message: Message, context: Context) -> Message:
    from profcil.deploy.client import answer
    from profcil.deploy.identity import seat_of
    from profcil.deploy.wire import answer_records, read_ask

    said = answer(what, read_ask(message.content), seat_of(context.node_config, context.run_config))
    return Message(answer_records(said), reply_to=message)


def make_server_app() -> ServerApp:
    app = ServerApp()
    app.main()(main)
    return app


def main(grid: Grid, context: Context) -> None:
    from profcil.deploy.entry import start

    start(grid, dict(context.run_config))


server_app = make_server_app()
client_app = make_client_app()
