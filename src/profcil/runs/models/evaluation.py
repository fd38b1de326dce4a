"""Scores a trained model on labelled data: accuracy, confusions, calibration, and rejection of inputs of no class."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profcil.errors import DataError, RunFolderError
from profcil.io.atomic_files import write_json, write_text
from profcil.runs.models.loading import CALIBRATION, load_model, model_file
from profcil.runs.models.saved_model import read_model
from profcil.runs.models.trained_model import Model, probabilities_of
from profcil.runs.reader import load_run

if TYPE_CHECKING:  # the functions import torch when they are called
    from torch import Tensor

BINS = 15  # of the calibration error
SUPPORT = (5, 20, 100)  # upper ends of the ranges of training examples by which classes are grouped
TEMPERATURES = (0.01, 1000.0)  # the range in which a temperature is searched


@dataclass(frozen=True)
class Evaluation:
    """What a model predicted for labelled examples."""

    names: tuple[str, ...]
    scores: Tensor  # [examples, classes]
    y: Tensor  # class ids
    temperature: float | None
    support: tuple[int, ...] = ()  # training examples of each class over all clients; empty = not known

    @property
    def probabilities(self) -> Tensor:
        return probabilities_of(self.scores, self.temperature)

    @property
    def confusion(self) -> Tensor:
        """How often a class (row) was predicted as each class (column)."""
        import torch

        classes = len(self.names)
        cells = self.y * classes + self.scores.argmax(1)
        return torch.bincount(cells, minlength=classes * classes).view(classes, classes)

    @property
    def accuracy(self) -> float:
        return float((self.scores.argmax(1) == self.y).double().mean())

    def per_class(self) -> dict[str, dict[str, Any]]:
        """Number of examples and accuracy of every class that has examples."""
        table = self.confusion
        found = {}
        for i, name in enumerate(self.names):
            examples = int(table[i].sum())
            if examples:
                accuracy = int(table[i, i]) / examples
                found[name] = {"examples": examples, "accuracy": accuracy}
        return found

    def confusions(self, count: int = 10) -> list[dict[str, Any]]:
        """The most frequent wrong predictions."""
        wrong = self.confusion.clone().fill_diagonal_(0)
        cells = wrong.flatten().sort(descending=True, stable=True)
        found = []
        for times, cell in zip(cells.values[:count].tolist(), cells.indices[:count].tolist(), strict=True):
            if times:
                row, column = divmod(cell, len(self.names))
                found.append({"class": self.names[row], "predicted": self.names[column], "times": times})
        return found

    def by_support(self) -> dict[str, dict[str, Any]]:
        """Classes, examples, accuracy and calibration error by the training examples of a class."""
        found = {}
        for title, low, high in ranges(SUPPORT):
            chosen = self.with_support(low, high)
            if len(chosen.y):
                found[title] = {
                    "classes": len(chosen.y.unique()),
                    "examples": len(chosen.y),
                    "accuracy": chosen.accuracy,
                    "calibration_error": calibration_error(chosen.probabilities, chosen.y),
                }
        return found

    def with_support(self, low: int, high: float) -> Evaluation:
        """The part with the examples of classes that have this many training examples."""
        import torch

        if not self.support:
            return replace(self, scores=self.scores[:0], y=self.y[:0])
        support = torch.tensor(self.support)[self.y]
        rows = (support >= low) & (support <= high)
        return replace(self, scores=self.scores[rows], y=self.y[rows])

    def summary(self) -> dict[str, Any]:
        """The results as plain values."""
        return {
            "examples": len(self.y),
            "accuracy": self.accuracy,
            "calibration_error": calibration_error(self.probabilities, self.y),
            "temperature": self.temperature,
            "per_class": self.per_class(),
            "confusions": self.confusions(),
            "by_support": self.by_support(),
        }


def ranges(ends: Sequence[int]) -> list[tuple[str, int, float]]:
    """Title, smallest and largest number of consecutive ranges from 1 on."""
    found: list[tuple[str, int, float]] = []
    low = 1
    for end in ends:
        found.append((f"{low} to {end}", low, end))
        low = end + 1
    return [*found, (f"{low} and more", low, float("inf"))]


def evaluate(model: Model, inputs: Sequence[Tensor], y: Sequence[int]) -> Evaluation:
    """The scores of a model on examples with these class ids."""
    import torch

    scores = model.scores(*inputs).cpu()
    return Evaluation(model.names, scores, torch.tensor(y, dtype=torch.long), model.temperature)


def evaluate_run(path: str | Path, data_dir: Path | None = None, model: Model | None = None) -> Evaluation:
    """The scores of a run's model on the part of its own data that the run was scored on. `model` may be loaded."""
    import torch

    from profcil.config import SITES
    from profcil.engine.world import load_data
    from profcil.resolve import resolve

    run = load_run(path)
    if run.config["dataset"] == SITES:
        raise DataError(f"the data of {path} is at its sites; give labelled data with --data PATH")
    bundle = load_data(resolve(str(run.path / "config.toml")), Path(data_dir or run.facts["data_dir"]))
    if bundle.fingerprint != run.facts.get("data"):
        raise DataError(
            f"the data under {data_dir or run.facts['data_dir']} is not that of {path}; give its --data-dir"
        )
    scored = bundle.validation if run.config.get("evaluate") == "validation" and bundle.validation else bundle.test
    found = evaluate(model or load_model(path), scored.inputs(torch.arange(len(scored))), scored.y.tolist())
    return replace(found, support=training_examples(run.path, bundle.train.y.numpy(), len(found.names)))


def training_examples(path: Path, labels: Any, classes: int) -> tuple[int, ...]:
    """The training examples of each class in a run's stream."""
    import numpy as np

    from profcil.protocol.plan import Plan

    plan = Plan.load(path / "plan.npz")
    counts: list[int] = np.bincount(labels[plan.ids], minlength=classes).tolist()
    return tuple(counts)


def reliability(probabilities: Tensor, y: Tensor) -> list[dict[str, float]]:
    """Bins of equal width of the predicted class's probability: number of examples, mean probability and accuracy.
    Empty bins are left out."""
    confidence, predicted = probabilities.max(1)
    right = (predicted == y).double()
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    found = []
    for number in bins.unique():
        inside = bins == number
        about = {"probability": float(confidence[inside].mean()), "accuracy": float(right[inside].mean())}
        found.append({"examples": int(inside.sum()), **about})
    return found


def calibration_error(probabilities: Tensor, y: Tensor) -> float:
    """The expected calibration error: in bins of equal width of the predicted class's probability, the difference of
    mean probability and accuracy, weighted by examples."""
    bins = reliability(probabilities, y)
    return sum(b["examples"] * abs(b["accuracy"] - b["probability"]) for b in bins) / max(1, len(y))


def rejection_auroc(inside: Tensor, outside: Tensor) -> float:
    """The probability that an input of a known class has a larger confidence than one of no class; ties count half."""
    import torch

    both = torch.cat([inside, outside])
    _, place, count = torch.unique(both, return_inverse=True, return_counts=True)
    number = len(inside)
    mean_rank = count.cumsum(0).double() - (count - 1) / 2  # of equal confidences
    rank_sum = mean_rank[place][:number].sum()
    pairs = number * len(outside)
    return float((rank_sum - number * (number + 1) / 2) / pairs)


def fit_temperature(scores: Tensor, y: Tensor) -> float:
    """The temperature with the smallest negative log-likelihood, by golden-section search over its logarithm."""
    import math

    ratio = (math.sqrt(5) - 1) / 2
    low, high = (math.log(bound) for bound in TEMPERATURES)
    for _ in range(60):
        third = (high - low) * ratio
        lower = loss_at(scores, y, math.exp(high - third))
        upper = loss_at(scores, y, math.exp(low + third))
        if lower < upper:
            high = low + third
        else:
            low = high - third
    return math.exp((low + high) / 2)


def loss_at(scores: Tensor, y: Tensor, temperature: float) -> float:
    """The mean negative log-likelihood. Of a class that the model cannot predict it is that of the smallest number."""
    import torch

    chosen = probabilities_of(scores, temperature).gather(1, y[:, None])
    smallest = torch.finfo(torch.float64).tiny
    log_likelihood = chosen.clamp(min=smallest).log().mean()
    return float(-log_likelihood)


def write_calibration(path: Path, found: Evaluation) -> float:
    """Fits a temperature to labelled examples and writes it beside the model file, where `load_model` finds it."""
    file = model_file(path)
    if file is None:
        raise RunFolderError(f"{path} has no model file; write it with `profcil resume {path}`")
    fitted = fit_temperature(found.scores, found.y)
    saved = read_model(file)
    facts = {"temperature": fitted, "model": saved.digest, "examples": len(found.y)}
    write_json(file.parent / CALIBRATION, facts)
    return fitted


def write_confusion(path: Path, found: Evaluation) -> None:
    """Writes the confusion matrix as CSV: a row for each class, a column for each predicted class."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["class", *found.names])
    for name, row in zip(found.names, found.confusion.tolist(), strict=True):
        writer.writerow([name, *row])
    write_text(path, text.getvalue())
