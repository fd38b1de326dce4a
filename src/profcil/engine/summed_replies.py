"""One summed reply in place of the clients' replies, by secure sums: what the server gets with `privacy.secure_sum`.

A method says how each of its blocks is a sum over clients (`Method.additive`). Every client sends numbers for the same
arrays: zeros for a block that it does not have, and for classes of which it has no examples. So neither the numbers nor
the labels of one client are visible. From the sum the server makes one reply of the usual form, which the method reads
like the reply of one large client.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from profcil.engine.channel import Block, Channel, Inbox, Reply, When
from profcil.errors import ConfigError, Failure
from profcil.privacy.settings import PrivacySettings
from profcil.randomness import derive_bytes

if TYPE_CHECKING:
    from profcil.privacy.protection import Protection
    from profcil.privacy.secure_sum.collection import SecureSum
    from profcil.privacy.secure_sum.fixed_point import Real, Ring
    from profcil.privacy.secure_sum.protocol import Terms
    from profcil.privacy.secure_sum.shares import Draw
    from profcil.privacy.summed_noise import SumNoise
    from profcil.resolve import RunConfig

NOT_SUMMED = "extra_bytes"  # a note on the memory of one client, of which the largest is wanted
SAMPLES = "samples"
NOTES = "notes/"  # starts the names of the arrays of notes


class Addend(Protocol):
    """How the blocks of one name are sums over clients."""

    def parts(self, block: Block, samples: int, classes: Sequence[int]) -> dict[str, Tensor]:
        """What a client adds to the sums. Class rows are for all `classes`, in this order."""

    def block(self, sums: Mapping[str, Tensor], like: Block, samples: float, classes: Sequence[int]) -> Block | None:
        """The block that all clients together would have sent; None if they had nothing. `like` is that of a client."""


Additive = Mapping[str, Addend]  # by the name of a block
Shapes = Mapping[str, tuple[int, ...]]  # of the arrays of a sum, by name


@dataclass(frozen=True)
class SumLayout:
    """The arrays of a sum, the same for all its clients. They follow from method, model and round."""

    blocks: Mapping[str, Block]  # a block of each name, for its kind and its labels
    shapes: Shapes
    classes: tuple[int, ...]  # that any client may have examples of


def check_secure_sums(config: RunConfig, additive: Additive, others: Callable[[], list[str]]) -> None:
    """Refuses settings with which sums cannot be secure. `others` names the methods that could be chosen instead."""
    settings = config.privacy
    if not settings.secure_sum:
        return
    if not additive:
        possible = ", ".join(others())
        raise ConfigError(
            f"{config.method} does not say how its blocks are sums over clients, so privacy.secure_sum cannot hide "
            f"single replies; choose one of {possible}, or set privacy.secure_sum = false"
        )
    if config.robust.aggregation != "mean":
        raise ConfigError(
            "privacy.secure_sum hides single replies, which robust.aggregation has to compare; set aggregation = mean, "
            "or privacy.secure_sum = false"
        )
    if settings.unit != "none" and settings.sum_range:
        raise ConfigError("noise needs numbers of 8 bytes in a secure sum; leave out privacy.sum_range")
    if config.transfer == "full":
        raise ConfigError(
            'privacy.secure_sum sends what has changed, not the accounting of transfer = "full"; set transfer = changed'
        )
    if config.stream.participants < settings.sum_clients:
        raise ConfigError(
            f"stream.participants = {config.stream.participants} is below privacy.sum_clients = "
            f"{settings.sum_clients}, so that no round would have a sum; raise the first or lower the second"
        )
    if find_spec("cryptography") is None:
        raise ConfigError(
            "privacy.secure_sum needs the package cryptography; install it with `pip install 'profcil[privacy]'`"
        )


def sum_replies(
    replies: Mapping[int, Reply],
    expected: Reply,
    additive: Additive,
    classes: Sequence[int],
    settings: PrivacySettings,
    seed: int,
    channel: Channel,
    when: When,
    protection: Protection | None = None,
    inboxes: Mapping[int, Inbox] | None = None,
) -> list[Reply]:
    """The sum of the replies as a list of one reply. It is empty, and the round goes on without replies, if there are
    too few clients to hide in a sum. `expected` has all blocks and notes that a client may have: what a server knows
    that sees no single reply. With a protection the sum has its noise, which depends on what the clients were sent."""
    clients = tuple(sorted(replies))
    if not clients:
        return []
    layout = layout_of(expected, additive, classes)
    if not layout.shapes:
        return [Reply(clients[0], 0, members=clients)]
    if len(clients) < settings.sum_clients:
        channel.facts["skipped_sums"] += 1
        return []
    arrays = {c: arrays_of(replies[c], additive, classes) for c in clients}
    sent = inboxes or {}
    inbox = sent.get(clients[0], {})
    noise = sum_noise(protection, layout, settings, when, len(clients), inbox) if protection else None
    total, members = add_arrays(arrays, layout, settings, seed, channel, when, noise, sent)
    return [reply_of(total, layout, additive, members, noise)]


# -- the client -------------------------------------------------------------------------------------------------------


def arrays_of(reply: Reply, additive: Additive, classes: Sequence[int]) -> dict[str, Real]:
    """What a client adds to the sums: number of examples, notes, and the parts of its blocks."""
    arrays = {SAMPLES: np.array(float(reply.samples))}
    for name, value in sorted(reply.notes.items()):
        if name != NOT_SUMMED:
            arrays[f"{NOTES}{name}"] = np.array(float(value))
    for name, block in sorted(reply.blocks.items()):
        if name not in additive:
            raise Failure(
                f"the method sends the block {name}, but does not say how it is a sum; add it to its `additive`"
            )
        for part, tensor in additive[name].parts(block, reply.samples, classes).items():
            arrays[f"{name}/{part}"] = tensor.double().cpu().numpy()
    return arrays


def with_zeros(arrays: Mapping[str, Real], shapes: Shapes, client: int) -> dict[str, Real]:
    """The arrays of a client in the order of a sum, with zeros for those that it does not have. Notes that the sum does
    not have are left out."""
    for name, array in arrays.items():
        if name.startswith(NOTES) or (name == SAMPLES and not shapes):
            continue
        if name not in shapes:
            raise Failure(f"client {client} adds {name} to a secure sum that has no such array")
        if array.shape != shapes[name]:
            raise Failure(f"client {client} adds {name} of shape {array.shape} to a secure sum of {shapes[name]}")
    return {name: arrays[name] if name in arrays else np.zeros(shape) for name, shape in shapes.items()}


def vector_of(
    arrays: Mapping[str, Real], shapes: Shapes, settings: PrivacySettings, members: int, client: int, width: int
) -> Ring:
    """A client's arrays as the vector that it adds to a sum of so many members."""
    from profcil.privacy.secure_sum import fixed_point

    complete = with_zeros(arrays, shapes, client)
    return fixed_point.encode(complete, settings.sum_bits, members, client, width)


def noised_vectors(
    vectors: Mapping[int, Ring],
    layout: SumLayout,
    noise: SumNoise,
    secret: int,
    when: When,
    inboxes: Mapping[int, Inbox],
) -> dict[int, Ring]:
    """The numbers of all clients of a sum, each with its share of the noise."""
    from profcil.privacy.summed_noise import name_of_part, name_of_sum, with_noise

    noised = {}
    for c, vector in vectors.items():
        name = name_of_part(name_of_sum(when, tuple(vectors), inboxes.get(c, {}), noise), c, vector)
        noised[c] = with_noise(vector, layout.shapes, noise, secret, name)
    return noised


# -- the server -------------------------------------------------------------------------------------------------------


def layout_of(expected: Reply, additive: Additive, classes: Sequence[int]) -> SumLayout:
    """The blocks and arrays of a reply that has all that a client may have. No arrays if it has no block."""
    arrays = arrays_of(expected, additive, classes) if expected.blocks else {}
    shapes = {name: arrays[name].shape for name in sorted(arrays)}
    return SumLayout(expected.blocks, shapes, tuple(classes))


def terms_of(settings: PrivacySettings, members: int, when: When) -> Terms:
    """What the members of a sum must agree on. Each of them computes it from its own settings."""
    from profcil.privacy.secure_sum.fixed_point import width_for
    from profcil.privacy.secure_sum.protocol import Terms

    threshold = min(members, math.floor(settings.sum_threshold * members) + 1)
    name = f"{when.stage} {when.round + 1} of position {when.position + 1}"
    width = width_for(settings.sum_range, settings.sum_bits, members)
    return Terms(name, threshold, settings.sum_clients, width)


def reply_of_sum(
    done: SecureSum, layout: SumLayout, additive: Additive, terms: Terms, bits: int, noise: SumNoise | None = None
) -> Reply:
    """The summed reply in a completed sum."""
    from profcil.privacy.secure_sum import fixed_point

    total = fixed_point.decode(done.total, layout.shapes, bits, terms.width)
    return reply_of(total, layout, additive, done.clients, noise)


def sum_noise(
    protection: Protection,
    layout: SumLayout,
    settings: PrivacySettings,
    when: When,
    clients: int,
    inbox: Inbox,
) -> SumNoise:
    """The noise of a sum of so many clients, who were sent these blocks. It is whole if only as many stay as must."""
    from profcil.privacy.adaptive_bound import bound_of
    from profcil.privacy.summed_noise import noise_of_sum

    staying = terms_of(settings, clients, when).needed
    bound = bound_of(inbox, settings)
    return noise_of_sum(protection, layout.blocks, layout.shapes, staying, settings.sum_bits, bound)


def add_arrays(
    arrays: Mapping[int, Mapping[str, Real]],
    layout: SumLayout,
    settings: PrivacySettings,
    seed: int,
    channel: Channel,
    when: When,
    noise: SumNoise | None,
    inboxes: Mapping[int, Inbox],
) -> tuple[dict[str, Real], tuple[int, ...]]:
    """The sums of the clients' arrays by the protocol, and the clients in them. The ledger counts all messages."""
    from profcil.privacy.secure_sum import fixed_point
    from profcil.privacy.secure_sum.simulation import add_securely

    count = len(arrays)
    terms = terms_of(settings, count, when)
    vectors = {c: vector_of(parts, layout.shapes, settings, count, c, terms.width) for c, parts in arrays.items()}
    number = len(channel.ledger.entries)  # differs between two sums of one round

    def draw_of(client: int) -> Draw:
        return lambda purpose, size: derive_bytes(seed, "secure sum", terms.name, number, client, purpose, size=size)

    if noise:
        vectors = noised_vectors(vectors, layout, noise, seed, when, inboxes)
    done = add_securely(vectors, terms, draw_of)
    for message in done.sent:
        channel.record(when, message.client, message.direction, {message.kind: message.bytes})
    return fixed_point.decode(done.total, layout.shapes, settings.sum_bits, terms.width), done.clients


def reply_of(
    total: Mapping[str, Real],
    layout: SumLayout,
    additive: Additive,
    members: tuple[int, ...],
    noise: SumNoise | None = None,
) -> Reply:
    """The summed reply. Its loss is the mean over the clients; other notes are sums."""
    if noise:
        from profcil.privacy.summed_noise import counted, noised_block

        total = counted(total, noise)
    samples = float(total[SAMPLES])
    notes = {name.removeprefix(NOTES): float(sums) for name, sums in total.items() if name.startswith(NOTES)}
    if "loss" in notes:
        notes["loss"] /= len(members)
    blocks = {}
    for name, like in layout.blocks.items():
        device = next(iter(like.tensors.values())).device
        sums = {
            part.removeprefix(f"{name}/"): torch.from_numpy(array).to(device)
            for part, array in total.items()
            if part.startswith(f"{name}/")
        }
        block = additive[name].block(sums, like, samples, layout.classes)
        if noise:
            block = noised_block(name, block or like.rows(()), noise, len(members))
        if block is not None:
            blocks[name] = block
    return Reply(members[0], round(samples), blocks, notes=notes, members=members)
