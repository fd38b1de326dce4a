"""Rounds of FedAvg under another framework: `python rounds.py pfl|flower WORK.npz`. Prints its seconds a round as JSON.

This file is run by the framework's own Python and imports nothing of profcil. WORK.npz holds initial weights, images,
the clients of each round and the rows of each of their batches. The framework gets the examples as tensors and nothing
else to do: no evaluation, no logging. The first round, in which it starts, is not timed.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Network(nn.Module):
    """The encoder of the digits with adapter and head, as ordinary modules."""

    def __init__(self, width: int, groups: tuple[int, int], narrow: int, classes: int, side: int = 8) -> None:
        super().__init__()
        features = 4 * width
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups[0], width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups[1], 2 * width)
        self.out = nn.Linear(2 * width * (side // 4) ** 2, features)
        self.adapt = nn.Sequential(
            nn.LayerNorm(features), nn.Linear(features, narrow), nn.ReLU(), nn.Linear(narrow, features)
        )
        self.head = nn.Linear(features, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        u = F.relu(self.out(x.flatten(1)))
        return self.head(u + self.adapt(u))

    def loss(self, x: Tensor, y: Tensor, excluded: Tensor) -> Tensor:
        logits = self(x).masked_fill(excluded, torch.finfo(torch.float32).min)
        return F.cross_entropy(logits, y)

    def metrics(self, x: Tensor, y: Tensor, excluded: Tensor) -> dict[str, Any]:
        """pfl asks for it; nothing is evaluated here."""
        return {}


class PeerWork:
    """What is to be computed."""

    def __init__(self, path: str) -> None:
        with np.load(path) as arrays:
            self.arrays = {name: arrays[name] for name in arrays.files}
        a = self.arrays
        self.facts = json.loads(str(a["facts"]))
        self.x = torch.from_numpy(a["x"])
        self.y = torch.from_numpy(a["y"])
        self.rounds, self.clients = a["samples"].shape

    def network(self) -> Network:
        f = self.facts
        network = Network(f["width"], tuple(f["groups"]), f["narrow"], f["classes"])
        names = [name for name in self.arrays if name.startswith("start/")]
        network.load_state_dict({n.removeprefix("start/"): torch.from_numpy(self.arrays[n]) for n in names})
        return network

    def batches(self, round: int, turn: int) -> np.ndarray:
        """The rows of all batches of a turn, [steps, batch]."""
        starts = self.arrays["starts"]
        number = round * self.clients + turn
        rows: np.ndarray = self.arrays["batches"][starts[number] : starts[number + 1]]
        return rows

    def batch(self, round: int, rows: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        index = torch.from_numpy(rows)
        return self.x[index], self.y[index], torch.from_numpy(self.arrays["excluded"][round])

    def samples(self, round: int, turn: int) -> int:
        return int(self.arrays["samples"][round, turn])


def optimiser(parameters: Any, facts: dict[str, Any], lr: float | None = None) -> torch.optim.Optimizer:
    more = {"momentum": facts["momentum"], "weight_decay": facts["weight_decay"]}
    return torch.optim.SGD(parameters, lr=facts["lr"] if lr is None else lr, **more)


def report(seconds: float, weights: dict[str, Tensor], out: str) -> None:
    """Stores the final model, and prints the seconds a round."""
    arrays: dict[str, Any] = {name: tensor.detach().numpy() for name, tensor in weights.items()}
    np.savez(out, **arrays)
    print(json.dumps({"seconds": seconds}), flush=True)


# -- pfl-research -----------------------------------------------------------------------------------------------------


def with_pfl(work: PeerWork, out: str) -> None:
    """The rounds by pfl's algorithm FederatedAveraging and its simulated backend, in one process."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class User(Dataset):
        """The examples of one turn. An epoch of it is all batches of the turn, which hold its epochs in order."""

        def __init__(self, round: int, turn: int) -> None:
            super().__init__((), user_id=str(turn))
            self.round = round
            self.rows = work.batches(round, turn)
            self.samples = work.samples(round, turn)

        def __len__(self) -> int:
            return self.samples

        def iter(self, batch_size: int | None) -> Iterator[tuple[Tensor, ...]]:
            for rows in self.rows:
                yield work.batch(self.round, rows)

    times: list[float] = []

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, *args: Any, **more: Any) -> tuple[bool, Metrics]:
            times.append(time.perf_counter())
            return False, Metrics()

    network = work.network()
    central = torch.optim.SGD(network.parameters(), lr=1.0)
    model = PyTorchModel(network, functools.partial(optimiser, facts=work.facts), central)
    turns = iter([(r, t) for r in range(work.rounds) for t in range(work.clients)])
    users = FederatedDataset(lambda turn: User(*turn), lambda: next(turns))
    backend = SimulatedBackend(users, users, postprocessors=[WeightByDatapoints()])
    wanted = NNAlgorithmParams(
        central_num_iterations=work.rounds,
        evaluation_frequency=10**9,
        train_cohort_size=work.clients,
        val_cohort_size=None,
    )
    training = NNTrainHyperParams(
        local_num_epochs=1,
        local_learning_rate=work.facts["lr"],
        local_batch_size=work.facts["batch"],
        local_max_grad_norm=work.facts["clip"],
    )
    algorithm = without_evaluation(FederatedAveraging)()
    algorithm.run(wanted, backend, model, training, callbacks=[Clock()], send_metrics_to_platform=False)
    seconds = (times[-1] - times[0]) / (work.rounds - 1)
    report(seconds, network.state_dict(), out)


def without_evaluation(algorithm: Any) -> Any:
    """pfl evaluates in its first iteration whatever the frequency. This subclass does not."""
    from dataclasses import replace

    class Plain(algorithm):  # type: ignore[misc]
        def get_next_central_contexts(self, *args: Any, **more: Any) -> Any:
            contexts, model, metrics = super().get_next_central_contexts(*args, **more)
            if contexts is not None:
                contexts = tuple(replace(context, do_evaluation=False) for context in contexts)
            return contexts, model, metrics

    return Plain


# -- Flower -----------------------------------------------------------------------------------------------------------


def with_flower(work: PeerWork, out: str, path: str) -> None:
    """The rounds by messages to the nodes of Flower's simulation engine, one Ray actor a core."""
    import ray  # noqa: F401
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    client = ClientApp()
    server = ServerApp()
    client.train()(train)
    server.main()(lambda grid, context: serve(grid, work, out, path))
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"log_to_driver": False}}
    run_simulation(server, client, work.clients, backend_config=resources)  # type: ignore[arg-type]


def serve(grid: Any, work: PeerWork, out: str, path: str) -> None:
    """The server: sends the model to the clients of each round and averages their replies."""
    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

    while len(nodes := sorted(grid.get_node_ids())) < work.clients:
        time.sleep(0.01)
    weights = dict(work.network().state_dict())
    for round in range(work.rounds):
        if round == 1:
            began = time.perf_counter()
        record = ArrayRecord(weights)
        messages = []
        for number in range(work.clients):
            ask = ConfigRecord({"round": round, "turn": number, "path": path})
            messages.append(Message(RecordDict({"model": record, "ask": ask}), nodes[number], "train"))
        weights = mean_of(list(grid.send_and_receive(messages)))
    report((time.perf_counter() - began) / (work.rounds - 1), weights, out)


def train(message: Any, context: Any) -> Any:
    """The client: one turn."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    ask = message.content["ask"]
    work = loaded(ask["path"])
    trained = turn(work, message.content["model"].to_torch_state_dict(), ask["round"], ask["turn"])
    facts = MetricRecord({"samples": work.samples(ask["round"], ask["turn"])})
    return Message(RecordDict({"model": ArrayRecord(trained), "facts": facts}), reply_to=message)


@functools.lru_cache(maxsize=1)
def loaded(path: str) -> PeerWork:
    """The work, read once by each process."""
    torch.set_num_threads(1)
    return PeerWork(path)


def turn(work: PeerWork, weights: dict[str, Tensor], round: int, number: int) -> dict[str, Tensor]:
    """A client's turn in plain torch."""
    network = work.network()
    network.load_state_dict(weights)
    steps = optimiser(network.parameters(), work.facts)
    for rows in work.batches(round, number):
        steps.zero_grad()
        network.loss(*work.batch(round, rows)).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), work.facts["clip"])
        steps.step()
    return network.state_dict()


def mean_of(replies: list[Any]) -> dict[str, Tensor]:
    """The mean of the models, weighted by examples."""
    for reply in replies:
        if reply.has_error():
            raise RuntimeError(reply.error.reason)
    counts = [float(reply.content["facts"]["samples"]) for reply in replies]
    models = [reply.content["model"].to_torch_state_dict() for reply in replies]
    shares = [count / sum(counts) for count in counts]
    return {name: sum(s * m[name] for s, m in zip(shares, models, strict=True)) for name in models[0]}


def main(framework: str, path: str, out: str) -> None:
    torch.set_num_threads(1)  # faster than more for a network of this size
    with_pfl(PeerWork(path), out) if framework == "pfl" else with_flower(PeerWork(path), out, path)


if __name__ == "__main__":
    import rounds  # type: ignore[import-not-found]  # by its name, as Ray's actors import it

    rounds.main(*sys.argv[1:])
