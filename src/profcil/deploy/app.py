"""The Flower app: a ServerApp that runs the training loop, and a ClientApp that computes for one client.

`profcil deploy app` writes a folder that `flwr run` accepts and that refers to this module. torch is imported only when
a message needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp


def make_client_app(mods: Sequence[Any] = ()) -> ClientApp:
    """The ClientApp. `mods` are Flower's hooks around a message."""
    app = ClientApp(mods=list(mods))
    app.query("hello")(hello)
    app.train("turn")(turn)
    app.query("survey")(survey)
    app.query("count")(count)
    app.query("sum")(answer_sum)
    return app


def hello(message: Message, context: Context) -> Message:
    """Reports which client this node is and which blocks it holds, or why it cannot take part."""
    from profcil.deploy.client import screen
    from profcil.deploy.client.identity import identity_of, site_name
    from profcil.deploy.hello import fault_response, hello_response
    from profcil.deploy.wire import unpack
    from profcil.errors import ProfcilError

    head, _ = unpack(message.content)
    try:
        identity = identity_of(context.node_config, context.run_config).with_facts(head, int(head.get("position", 0)))
        answer = identity.hello(str(head["run"]))
    except ProfcilError as error:
        screen.cannot_join(str(error))
        return Message(fault_response(site_name(context.node_config), str(error)), reply_to=message)
    screen.connected(answer.client, site_name(context.node_config), head.get("enrolled"))
    return Message(hello_response(answer), reply_to=message)


def turn(message: Message, context: Context) -> Message:
    """Computes a client's turn."""
    return handle("turn", message, context)


def survey(message: Message, context: Context) -> Message:
    """Computes a client's survey: statistics without training."""
    return handle("survey", message, context)


def count(message: Message, context: Context) -> Message:
    """Counts a client's examples of each class, for a secure sum of the counts."""
    return handle("count", message, context)


def answer_sum(message: Message, context: Context) -> Message:
    """Answers a message of a secure sum."""
    from profcil.deploy.client.identity import identity_of
    from profcil.deploy.client.respond import respond_to_sum
    from profcil.deploy.sum_messages import sum_records

    home = identity_of(context.node_config, context.run_config).home
    return Message(sum_records(respond_to_sum(message.content, home)), reply_to=message)


def handle(action: str, message: Message, context: Context) -> Message:
    """Reads a request, computes the reply and packs it."""
    from profcil.deploy.client.identity import identity_of
    from profcil.deploy.client.respond import respond
    from profcil.deploy.wire import read_request, response_records

    request = read_request(message.content)
    identity = identity_of(context.node_config, context.run_config).with_facts(request.facts, request.when.position)
    response = respond(action, request, identity)
    return Message(response_records(response), reply_to=message)


def make_server_app() -> ServerApp:
    """The ServerApp."""
    app = ServerApp()
    app.main()(main)
    return app


def main(grid: Grid, context: Context) -> None:
    """Starts or resumes the run that the app's settings describe."""
    from profcil.deploy.server.entry import start

    start(grid, dict(context.run_config))


server_app = make_server_app()
client_app = make_client_app()
