"""What a loaded dataset must be like, whoever wrote its loader: one sentence for the first thing that is not."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from profcil.data.bundle import AUGMENTATIONS, Bundle, Examples, Facts, Nodes
from profcil.errors import DataError, unknown


def advice(facts: Facts) -> str:
    """Where to look next, as the end of a sentence."""
    return f"compare the files with the official ones ({facts.homepage})" if facts.homepage else "look at its loader"


def named_parts(bundle: Bundle) -> Iterator[tuple[str, Examples]]:
    for part in ("train", "validation", "test"):
        examples = getattr(bundle, part)
        if examples is not None:
            yield part, examples


def check_facts(facts: Facts) -> None:
    """The modality is one of ours, and so are the views."""
    if facts.modality not in AUGMENTATIONS:
        raise unknown("modality", facts.modality, AUGMENTATIONS)
    for view in facts.views:
        if view not in AUGMENTATIONS[facts.modality]:
            raise unknown(f"view of {facts.title}", view, AUGMENTATIONS[facts.modality])


def check_part(bundle: Bundle, part: str, examples: Examples) -> None:
    """There are examples, each has a label, every label is a class id, and inputs are what encoders expect."""
    facts = bundle.facts
    what = f"{facts.title}'s {part} part"
    if len(examples) == 0:
        raise DataError(f"{what} is empty; {advice(facts)}")
    rows = examples.nodes if isinstance(examples, Nodes) else examples.x
    if len(rows) != len(examples.y) or examples.y.dtype != torch.int64 or examples.y.dim() != 1:
        raise DataError(
            f"{what} has {len(rows)} inputs and {len(examples.y)} labels "
            f"of type {examples.y.dtype} where each input needs one int64 label; {advice(facts)}"
        )
    low, high = int(examples.y.min()), int(examples.y.max())
    if low < 0 or high >= facts.classes:
        raise DataError(
            f"{what} has labels from {low} to {high} where 0 to {facts.classes - 1} are allowed; {advice(facts)}"
        )
    if wrong := INPUTS[facts.modality](bundle, examples):
        raise DataError(f"{what} {wrong}; {advice(facts)}")


def images(bundle: Bundle, examples: Examples) -> str:
    """What is wrong with some images, as the end of a sentence; empty where nothing is."""
    x = examples.x
    if x.dim() != 4 or x.dtype not in (torch.uint8, torch.float32):
        wanted = "images are uint8 or float32 [n, channels, height, width]"
        return f"has inputs {list(x.shape)} of type {x.dtype} where {wanted}"
    if x.is_floating_point() and not 0 <= float(x.min()) <= float(x.max()) <= 1:
        return f"has images with values from {float(x.min()):g} to {float(x.max()):g} where floats lie in 0 to 1"
    return ""


def texts(bundle: Bundle, examples: Examples) -> str:
    """The same for texts."""
    x = examples.x
    if x.dim() != 2 or x.is_floating_point():
        return f"has inputs {list(x.shape)} of type {x.dtype} where texts are token ids [n, length]"
    low, high = int(x.min()), int(x.max())
    if low < 0 or high >= bundle.vocabulary:
        return f"has token ids from {low} to {high} where the Bundle's vocabulary is {bundle.vocabulary}"
    return ""


def graphs(bundle: Bundle, examples: Examples) -> str:
    """The same for graphs."""
    if not isinstance(examples, Nodes):
        return "has independent rows where a graph has Nodes"
    edges, nodes, count = examples.edges, examples.nodes, len(examples.x)
    if edges.dim() != 2 or len(edges) != 2 or edges.dtype != torch.int64:
        return f"has edges {list(edges.shape)} of type {edges.dtype} where they are int64 [2, edges]"
    for name, ids in (("edges", edges), ("nodes", nodes)):
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
            return f"has {name} from {int(ids.min())} to {int(ids.max())} where the graph has nodes 0 to {count - 1}"
    return "" if both_ways(edges, count) else "has edges in one direction only where each is there in both"


def both_ways(edges: Tensor, nodes: int) -> bool:
    """Whether every edge is there in both directions."""
    source, target = edges
    return torch.equal((source * nodes + target).sort().values, (target * nodes + source).sort().values)


def check_classes(bundle: Bundle) -> None:
    """Every class has something to be learned from."""
    counts = torch.bincount(bundle.train.y, minlength=bundle.facts.classes)
    if len(empty := torch.nonzero(counts == 0).flatten().tolist()):
        named = f"class {empty[0]} ({bundle.names[empty[0]]})"
        more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise DataError(f"{bundle.facts.title} has no training example of {named}{more}; {advice(bundle.facts)}")


INPUTS = {"image": images, "text": texts, "graph": graphs}
