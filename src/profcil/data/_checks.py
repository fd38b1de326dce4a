"""Checks of a loaded dataset, third-party ones included. The first fault is raised as a DataError."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from profcil.data.bundle import AUGMENTATIONS, Bundle, Examples, Facts, Nodes
from profcil.errors import DataError, unknown


def advice(facts: Facts) -> str:
    """What to do about a wrong dataset, as the end of a sentence."""
    if facts.homepage:
        return f"compare the files with the official ones ({facts.homepage})"
    return "check its loader"


def named_parts(bundle: Bundle) -> Iterator[tuple[str, Examples]]:
    """The parts of a dataset that exist, with their names."""
    for part in ("train", "validation", "test"):
        examples = getattr(bundle, part)
        if examples is not None:
            yield part, examples


def check_facts(facts: Facts) -> None:
    """Check that the modality and the augmentations are known ones."""
    if facts.modality not in AUGMENTATIONS:
        raise unknown("modality", facts.modality, AUGMENTATIONS)
    allowed = AUGMENTATIONS[facts.modality]
    for view in facts.views:
        if view not in allowed:
            raise unknown(f"view of {facts.title}", view, allowed)


def check_part(bundle: Bundle, part: str, examples: Examples) -> None:
    """Check one part: it is not empty, every example has a valid label, and the inputs have the expected form."""
    facts = bundle.facts
    what = f"{facts.title}'s {part} part"
    if len(examples) == 0:
        raise DataError(f"{what} is empty; {advice(facts)}")
    fault = label_fault(examples, facts.classes) or INPUT_FAULTS[facts.modality](bundle, examples)
    if fault:
        raise DataError(f"{what} {fault}; {advice(facts)}")


def label_fault(examples: Examples, classes: int) -> str:
    """What is wrong with the labels, as the end of a sentence; empty if nothing is."""
    y = examples.y
    inputs = examples.nodes if isinstance(examples, Nodes) else examples.x
    are_ids = y.dtype == torch.int64 and y.dim() == 1
    if len(inputs) != len(y) or not are_ids:
        given = f"has {len(inputs)} inputs and {len(y)} labels of type {y.dtype}"
        return f"{given} where each input needs one int64 label"
    low = int(y.min())
    high = int(y.max())
    if low < 0 or high >= classes:
        return f"has labels from {low} to {high} where 0 to {classes - 1} are allowed"
    return ""


def image_fault(bundle: Bundle, examples: Examples) -> str:
    """What is wrong with images, as the end of a sentence; empty if nothing is."""
    x = examples.x
    if x.dim() != 4 or x.dtype not in (torch.uint8, torch.float32):
        expected = "images are uint8 or float32 [n, channels, height, width]"
        return f"has inputs {list(x.shape)} of type {x.dtype} where {expected}"
    if not x.is_floating_point():
        return ""
    low = float(x.min())
    high = float(x.max())
    if not 0 <= low <= high <= 1:
        return f"has images with values from {low:g} to {high:g} where floats lie in 0 to 1"
    return ""


def text_fault(bundle: Bundle, examples: Examples) -> str:
    """What is wrong with texts, as the end of a sentence; empty if nothing is."""
    x = examples.x
    if x.dim() != 2 or x.is_floating_point():
        return f"has inputs {list(x.shape)} of type {x.dtype} where texts are token ids [n, length]"
    low = int(x.min())
    high = int(x.max())
    if low < 0 or high >= bundle.vocabulary:
        return f"has token ids from {low} to {high} where the Bundle's vocabulary is {bundle.vocabulary}"
    return ""


def graph_fault(bundle: Bundle, examples: Examples) -> str:
    """What is wrong with a graph, as the end of a sentence; empty if nothing is."""
    if not isinstance(examples, Nodes):
        return "has independent rows where a graph needs Nodes"
    edges = examples.edges
    count = len(examples.x)
    are_pairs = edges.dim() == 2 and len(edges) == 2
    if not are_pairs or edges.dtype != torch.int64:
        return f"has edges {list(edges.shape)} of type {edges.dtype} where they are int64 [2, edges]"
    for name, ids in (("edges", edges), ("nodes", examples.nodes)):
        if not ids.numel():
            continue
        low = int(ids.min())
        high = int(ids.max())
        if low < 0 or high >= count:
            return f"has {name} from {low} to {high} where the graph has nodes 0 to {count - 1}"
    if not is_symmetric(edges, count):
        return "has edges in one direction only where both directions are needed"
    return ""


def table_fault(bundle: Bundle, examples: Examples) -> str:
    """What is wrong with rows of a table, as the end of a sentence; empty if nothing is."""
    x = examples.x
    if x.dim() != 2 or x.dtype != torch.float32:
        return f"has inputs {list(x.shape)} of type {x.dtype} where a table is float32 [n, columns]"
    return "" if bool(torch.isfinite(x).all()) else "has values that are missing or infinite"


def is_symmetric(edges: Tensor, nodes: int) -> bool:
    """Whether every edge is present in both directions."""
    source, target = edges
    forward = (source * nodes + target).sort().values
    backward = (target * nodes + source).sort().values
    return torch.equal(forward, backward)


def check_classes(bundle: Bundle) -> None:
    """Check that every class has training examples."""
    counts = torch.bincount(bundle.train.y, minlength=bundle.facts.classes)
    empty = torch.nonzero(counts == 0).flatten().tolist()
    if not empty:
        return
    label = empty[0]
    first = f"class {label} ({bundle.names[label]})"
    more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
    raise DataError(f"{bundle.facts.title} has no training example of {first}{more}; {advice(bundle.facts)}")


INPUT_FAULTS = {"image": image_fault, "text": text_fault, "graph": graph_fault, "table": table_fault}
