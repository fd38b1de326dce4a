"""The settings of a run on own data, by its modality and size. `profcil run --data PATH --dry-run` shows them.

They follow the recipes of the known datasets of the same modality, which were chosen on validation data there.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from profcil.config import OwnSettings
from profcil.data.own.assemble import LARGE_TEXTS, default_words
from profcil.data.own.raw import DataSummary
from profcil.data.own.tasks import default_task_size

CLIENTS = ((500, 5), (5_000, 10), (math.inf, 20))  # fewer training examples than this -> clients
LARGE_IMAGES = 5_000  # training images from which on the encoder is a ResNet-18, if they have 24 pixels a side
LARGE_GRAPH = 10_000  # training nodes from which on a step takes a part of them
ADAM = {"optimiser": "adam", "lr": 1e-3, "weight_decay": 1e-4}
SGD = {"optimiser": "sgd", "lr": 0.01, "weight_decay": 5e-4}

Values = dict[str, Any]


def recipe_of_data(summary: DataSummary, settings: OwnSettings) -> Values:
    """The recipe of this data."""
    classes = len(summary.names)
    clients = next(count for limit, count in CLIENTS if summary.train < limit)
    clients = min(clients, summary.train)
    task_size = default_task_size(classes)
    tasks = settings.tasks
    if not tasks and settings.order == "arrival":
        tasks = ceil_divided(classes, task_size)
    if settings.task_list:
        task_size = max(len(task) for task in settings.task_list)
    elif tasks:
        task_size = ceil_divided(classes, tasks)
    participants = min(clients, max(5, clients // 2))
    stream = {"clients": clients, "participants": participants, "task_size": task_size}
    own = {"name": data_name(summary.path), "modality": summary.modality, "tasks": tasks}
    found = BY_MODALITY[summary.modality](summary)
    return {**found, "stream": stream, "own": {**own, **found.get("own", {})}}


def ceil_divided(count: int, size: int) -> int:
    return -(-count // size)


def data_name(path: Path) -> str:
    """The name of a file or folder; data that was given from Python is called after its run folder."""
    path = path.absolute()
    return path.parent.name if path.stem == "data" else path.stem


def training(optimiser: Values, batch: int, rounds: int = 10) -> Values:
    """The tables of training and warm-up."""
    warmup = {**optimiser, "batch": max(batch, 2)} if batch else dict(optimiser)
    train = {**optimiser, "batch": batch, "rounds": rounds, "epochs": 3}
    return {"train": train, "warmup": {**warmup, "rounds": 10}}


def images(summary: DataSummary) -> Values:
    large = summary.train >= LARGE_IMAGES and min(summary.shape[1:]) >= 24
    values = training({**SGD, "lr": 0.05} if large else SGD, 64 if large else 32)
    model = {"encoder": "resnet18" if large else "convnet", "norm": "batch" if large else "group"}
    prolin = {"base_rounds": 0, "dictionary": 4_000 if summary.train >= LARGE_IMAGES else 800, "shrink_deployed": 0.1}
    return {**values, "model": model, "methods": {"prolin": prolin}, "own": {"shape": list(summary.shape)}}


def texts(summary: DataSummary) -> Values:
    large = summary.train >= LARGE_TEXTS
    entries = (
        {"text_entries": "ngrams", "dictionary": 8_000} if large else {"text_entries": "contexts", "dictionary": 3_000}
    )
    prolin = {"base_rounds": 0, "shrink_deployed": 0.05, **entries}
    own = {"length": summary.shape[0], "vocabulary": default_words(summary.train)}
    return {**training(ADAM, 64), "methods": {"prolin": prolin}, "own": own}


def graphs(summary: DataSummary) -> Values:
    large = summary.train >= LARGE_GRAPH
    adam = {**ADAM, "lr": 5e-3, "weight_decay": 5e-4}
    width = 3 * min(max(summary.shape[0], 1), 1_500)
    prolin = {"base_rounds": 0, "dictionary": width, "shrink_deployed": 1.0}
    return {**training(adam, 1024 if large else 0), "methods": {"prolin": prolin}}


def tables(summary: DataSummary) -> Values:
    large = summary.train >= 5_000
    width = summary.shape[0] + (1_000 if large else 200)
    prolin = {"base_rounds": 0, "dictionary": width, "shrink_deployed": 0.1}
    return {**training(ADAM, 64 if large else 32), "model": {"norm": "group"}, "methods": {"prolin": prolin}}


BY_MODALITY = {"image": images, "text": texts, "graph": graphs, "table": tables}
