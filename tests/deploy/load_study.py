"""A deployment server with 1,000 clients, of which 100 are bad: memory and CPU seconds of each round.

python tests/deploy/load_study.py --clients 1000 --rounds 20

One process holds the server and a grid in memory; there is no network. One client computes; the others send its reply
with other noise. Bad clients send, each in every round, what `BAD` says.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from memory_grid import Grid

from profcil.deploy.app_folder import settings_table
from profcil.deploy.client.respond import Reply
from profcil.deploy.server import entry
from profcil.deploy.wire import Response, read_request, read_response, response_records
from profcil.engine.channel import Block, Inbox
from profcil.resolve import RunConfig, resolve

Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # sent and broadcast tensor → false tensor


def config(clients: int, rounds: int) -> RunConfig:
    """FedAvg on digits, all clients in every round."""
    sets = [f"clients={clients}", f"participants={clients}", f"train.rounds={rounds}", "task_size=10", "support=1.0"]
    sets += ["train.epochs=1", "warmup.rounds=0", "model.width=8", "aggregation=clipped", "threads=1", "workers=1"]
    return resolve(
        flags={"dataset": "digits", "method": "fedavg", "setting": "homogeneous", "accelerate": "off"}, sets=sets
    )


def changed(change: Change) -> Callable[[Response, Inbox], RecordDict]:
    """A reply with changed weights."""

    def records(response: Response, inbox: Inbox) -> RecordDict:
        blocks = {}
        for name, block in response.reply.blocks.items():
            tensors = {key: change(t, inbox[name].tensors[key]) for key, t in block.tensors.items()}
            blocks[name] = replace(block, tensors=tensors)
        return response_records(replace(response, reply=replace(response.reply, blocks=blocks)))

    return records


def many_examples(response: Response, inbox: Inbox) -> RecordDict:
    return response_records(replace(response, reply=replace(response.reply, samples=2**31 - 1)))


def other_client(response: Response, inbox: Inbox) -> RecordDict:
    return response_records(replace(response, reply=replace(response.reply, client=0)))


def huge_array(response: Response, inbox: Inbox) -> RecordDict:
    """An array that claims a trillion numbers."""
    content = response_records(response)
    name = next(iter(content.array_records))
    key = next(iter(content.array_records[name]))
    text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }".ljust(117) + b"\n"
    data = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + b"\0" * 16
    content.array_records[name][key] = Array("float32", (4,), "numpy.ndarray", data)
    return content


def deep_header(response: Response, inbox: Inbox) -> RecordDict:
    return RecordDict({"head": ConfigRecord({"json": "[" * 100_000}), "block:base": ArrayRecord({})})


def long_text(response: Response, inbox: Inbox) -> RecordDict:
    text = "\x1b[2J" + "x" * 1_000_000
    return response_records(Response(Reply(response.reply.client, 0), response.when, error=text, error_kind="broken"))


def diverged(response: Response, inbox: Inbox) -> RecordDict:
    return response_records(Response(Reply(response.reply.client, 0), response.when, error="x", error_kind="diverged"))


BAD: dict[str, Callable[[Response, Inbox], RecordDict] | None] = {
    "NaN": changed(lambda t, b: t * torch.nan),
    "update x -100": changed(lambda t, b: b - 100 * (t - b)),
    "update with its sign flipped": changed(lambda t, b: 2 * b - t),
    "2^31 - 1 examples": many_examples,
    "the name of another client": other_client,
    "an array that claims 10^12 numbers": huge_array,
    "a header of 100,000 brackets": deep_header,
    "an error of a million characters": long_text,
    "a claim of divergence": diverged,
    "no reply": None,
}


def kind_of(node: int) -> str:
    """What a node does; empty for an honest one. Every tenth is bad."""
    return list(BAD)[node // 10 % len(BAD)] if node % 10 == 3 else ""


def without_silent(grid: Grid, request: Message, reply: Message) -> list[Message]:
    is_work = request.metadata.message_type != "query.hello"
    return [] if is_work and kind_of(request.metadata.dst_node_id) == "no reply" else [reply]


def resident_mb() -> float:
    """The memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@dataclass
class LoadGrid(Grid):
    """One node computes; the others send what it sent, with other noise."""

    template: tuple[str, Response] | None = None  # of one round
    inbox: dict[str, Block] = field(default_factory=dict)  # the last broadcast
    begins: list[tuple[float, float]] = field(default_factory=list)  # of each round: memory in MB, CPU seconds so far

    def __post_init__(self) -> None:
        self.fault = without_silent

    def reply(self, message: Message) -> Message:
        if message.metadata.message_type == "query.hello":
            return super().reply(message)
        request = read_request(message.content)
        self.inbox |= request.blocks
        if self.template is None or self.template[0] != str(request.when):
            self.template = (str(request.when), read_response(super().reply(message).content))
            self.begins.append((resident_mb(), time.process_time()))
            print(len(self.begins), *map(round, self.begins[-1]), file=sys.stderr, flush=True)
        response = self.like_template(request.client)
        falsify = BAD.get(kind_of(message.metadata.dst_node_id))
        content = falsify(response, self.inbox) if falsify else response_records(response)
        return Message(content, reply_to=message)

    def like_template(self, client: int) -> Response:
        """The reply of another client: the template's update with some noise."""
        assert self.template is not None
        response = self.template[1]
        rng = torch.Generator().manual_seed(client)
        blocks = {}
        for name, block in response.reply.blocks.items():
            tensors = {k: t + 1e-6 * torch.randn(t.shape, generator=rng) for k, t in block.tensors.items()}
            blocks[name] = replace(block, tensors=tensors)
        return replace(response, reply=replace(response.reply, client=client, samples=1, blocks=blocks))


def deployed_run(folder: Path, clients: int, rounds: int) -> tuple[list[dict[str, Any]], LoadGrid]:
    """The events of a run, and its grid."""
    policy = {"deadline": 0.5, "join": 60.0, "attempts": 1, "min_replies": clients // 2}
    settings = settings_table(config(clients, rounds), folder / "run", folder, **policy)
    nodes = {i: {"client": i, "home": str(folder / "sites")} for i in range(clients)}
    grid = LoadGrid(settings, nodes)
    out = entry.start(grid, settings)
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()], grid


def main() -> None:
    from flwr.supercore.task_identity import TaskIdentity

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    for name in ("_run_id", "_task_id", "_node_id"):
        setattr(TaskIdentity, name, 1)
    with tempfile.TemporaryDirectory() as folder:
        events, grid = deployed_run(Path(folder), args.clients, args.rounds)
    asked = [e for e in events if e["event"] == "asked"]
    rounds = [e for e in events if e["event"] == "round"]
    ends = [seconds for _, seconds in grid.begins[1:]] + [time.process_time()]
    print("| round | answered | refused | silent | dropped | against the others | MB | CPU s |")
    for one, other, (memory, begin), end in zip(asked, rounds, grid.begins, ends, strict=True):
        counts = [len(one["answered"]), len(one["refused"]), len(one["silent"]), other.get("dropped_replies", 0)]
        row = [other["round"], *counts, len(other.get("opposed", [])), round(memory), round(end - begin, 1)]
        print("| " + " | ".join(map(str, row)) + " |")


if __name__ == "__main__":
    main()
