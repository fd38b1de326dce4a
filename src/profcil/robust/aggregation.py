"""Robust aggregation: changes or drops replies before a method aggregates them, so that every method has it.

    mean      replies stay as they are
    clipped   a model block that moved further than the median of the round is pulled back to that distance
    median    every model becomes the median of each coordinate; so does the row of a class with three reporters
    trimmed   the same with the mean without the largest and smallest fifth
    geometric the same with the point that is nearest to all: of models as a whole, and of each row
    krum      the models are kept that have near neighbours; the others are dropped

All but `mean` first drop replies that are out of range (`screen`). A method that averages equal replies gets what they
are, so `median` and `trimmed` give each client's reply the combined value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from profcil.engine.channel import Block, Inbox, Reply
from profcil.robust import rules
from profcil.robust.directions import products
from profcil.robust.rules import COMBINED, FEWEST, Combine
from profcil.robust.screen import COMPARED, out_of_range

Inboxes = Mapping[int, Inbox]
Dropped = dict[int, str]  # client → reason


def robust_replies(
    rule: str, replies: Sequence[Reply], inboxes: Inboxes, stored: Mapping[str, Block]
) -> tuple[list[Reply], Dropped]:
    """The replies that a method may aggregate, and the clients whose replies were dropped."""
    dropped = out_of_range(replies, inboxes, stored)
    kept = [reply for reply in replies if reply.client not in dropped]
    if rule == "clipped":
        kept = clipped(kept, inboxes)
    elif rule == "krum":
        kept = chosen_by_krum(kept)
    elif rule == "geometric":
        kept = combined_rows(with_geometric_median(kept, inboxes), COMBINED[rule])
    else:
        kept = combined_rows(combined_models(kept, COMBINED[rule]), COMBINED[rule])
    return kept, dropped


def model_names(replies: Sequence[Reply]) -> list[str]:
    """The names of all model blocks in some replies."""
    return list(dict.fromkeys(n for reply in replies for n, b in reply.blocks.items() if b.kind == "model"))


def senders_of(replies: Sequence[Reply], name: str) -> list[int]:
    """The numbers of the replies that have a block."""
    return [i for i, reply in enumerate(replies) if name in reply.blocks]


def with_block(reply: Reply, name: str, tensors: Mapping[str, Tensor]) -> Reply:
    block = replace(reply.blocks[name], tensors=dict(tensors))
    return replace(reply, blocks={**reply.blocks, name: block})


# -- models ------------------------------------------------------------------------------------------------------------


def clipped(replies: Sequence[Reply], inboxes: Inboxes) -> list[Reply]:
    """The replies with each model block at most as far from the broadcast one as the median of the round."""
    changed = list(replies)
    for name in model_names(replies):
        senders = [i for i in senders_of(replies, name) if name in inboxes[replies[i].client]]
        if len(senders) < FEWEST:
            continue
        broadcast = {i: inboxes[replies[i].client][name].tensors for i in senders}
        distances = torch.tensor([rules.distance(replies[i].blocks[name].tensors, broadcast[i]) for i in senders])
        factors = rules.shrinkage(distances, float(rules.median(distances)))
        for i, factor in zip(senders, factors.tolist(), strict=True):
            if factor < 1:
                pulled = pull_back(replies[i].blocks[name].tensors, broadcast[i], factor)
                changed[i] = with_block(changed[i], name, pulled)
    return changed


def pull_back(tensors: Mapping[str, Tensor], broadcast: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
    """The tensors at a part of their distance from the broadcast ones."""
    pulled = {key: sent + factor * (tensors[key] - sent) for key, sent in broadcast.items() if key in tensors}
    return {**tensors, **pulled}


def combined_models(replies: Sequence[Reply], combine: Combine) -> list[Reply]:
    """The replies, all with the combined model blocks."""
    changed = list(replies)
    for name in model_names(replies):
        senders = senders_of(replies, name)
        keys = replies[senders[0]].blocks[name].tensors
        parts = [replies[i].blocks[name].tensors for i in senders]
        together = {key: combine(torch.stack([part[key] for part in parts])) for key in keys}
        for i in senders:
            changed[i] = with_block(changed[i], name, together)
    return changed


def with_geometric_median(replies: Sequence[Reply], inboxes: Inboxes) -> list[Reply]:
    """The replies, all with the geometric median of the models."""
    changed = list(replies)
    models = [i for i, reply in enumerate(replies) if reply.weights()]
    if not models:
        return changed
    shares = rules.geometric_shares(products([replies[i] for i in models], inboxes))
    for name in model_names(replies):
        senders = senders_of(replies, name)
        own = shares[[models.index(i) for i in senders]]
        parts = [replies[i].blocks[name].tensors for i in senders]
        keys = parts[0].keys()
        together = {key: rules.weighted(torch.stack([p[key] for p in parts]), own / own.sum()) for key in keys}
        for i in senders:
            changed[i] = with_block(changed[i], name, together)
    return changed


def chosen_by_krum(replies: Sequence[Reply]) -> list[Reply]:
    """The replies without those models that have no near neighbours."""
    models = [i for i, reply in enumerate(replies) if reply.weights()]
    if len(models) < FEWEST:
        return list(replies)
    parts = [[t.flatten().double() for ts in replies[i].weights().values() for t in ts.values()] for i in models]
    vectors = [torch.cat(part) for part in parts]
    if len({len(vector) for vector in vectors}) > 1:  # some sent other blocks than the rest
        return list(replies)
    choice = rules.krum_choice(torch.stack(vectors))
    left_out = set(models) - {models[k] for k in choice}
    return [reply for i, reply in enumerate(replies) if i not in left_out]


# -- rows by class -----------------------------------------------------------------------------------------------------


def combined_rows(replies: Sequence[Reply], combine: Combine) -> list[Reply]:
    """The replies, with the same row for a class that three or more clients report, in one row each. Statistics with a
    matrix over all classes stay: class means that differ from those in the matrix would not fit it."""
    changed = list(replies)
    names = dict.fromkeys(n for reply in replies for n, b in reply.blocks.items() if b.labels and b.kind in COMPARED)
    for name in names:
        senders = [i for i in senders_of(replies, name) if not has_matrix(replies[i])]
        for label in sorted({y for i in senders for y in replies[i].blocks[name].labels}):
            reporters = [i for i in senders if label in replies[i].blocks[name].labels]
            once = all(replies[i].blocks[name].labels.count(label) == 1 for i in reporters)
            if once and len(reporters) >= FEWEST:
                combine_class(changed, reporters, name, label, combine)
    return changed


def has_matrix(reply: Reply) -> bool:
    """Whether a reply has statistics without rows."""
    return any(b.kind == "statistics" and not b.labels for b in reply.blocks.values())


def combine_class(changed: list[Reply], reporters: Sequence[int], name: str, label: int, combine: Combine) -> None:
    """Sets the rows of one class in the replies of its reporters to the combined row. Counts and confidences stay."""
    blocks = [changed[i].blocks[name] for i in reporters]
    at = [block.labels.index(label) for block in blocks]
    tables = [key for key, t in blocks[0].tensors.items() if t.dim() == 2 and t.is_floating_point()]
    for key in tables:
        row = combine(torch.stack([block.tensors[key][k] for block, k in zip(blocks, at, strict=True)]))
        for i, k in zip(reporters, at, strict=True):
            tensors = dict(changed[i].blocks[name].tensors)
            tensors[key] = tensors[key].index_copy(0, torch.tensor([k], device=row.device), row[None])
            changed[i] = with_block(changed[i], name, tensors)
