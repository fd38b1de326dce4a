"""A dictionary of graphs: frequent words, at several radii."""

from __future__ import annotations

import pytest
import torch

from profcil.data.bundle import Nodes
from profcil.model.dictionary.graph import RADII, GraphDictionary

CHAIN = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 4], [1, 0, 2, 1, 3, 2, 4, 3]])  # 0 - 1 - 2 - 3 - 4
WORDS = 10


def graph(n: int = 40) -> Nodes:
    rng = torch.Generator().manual_seed(5)
    x = torch.rand(n, WORDS, generator=rng) * (torch.rand(n, WORDS, generator=rng) < 0.3)
    return Nodes(x, CHAIN, torch.zeros(n, dtype=torch.long), torch.arange(n))


def inputs(examples: Nodes):
    return examples.inputs(torch.arange(len(examples)))


def found(dictionary, clients):
    entries = dictionary.begin(torch.Generator())
    sums = [dictionary.sums(entries, inputs(c), 0)["nodes"] for c in clients]
    return dictionary.update(entries, {"nodes": sum(sums)}, 0)


def test_entries_do_not_depend_on_order_and_partition_of_clients():
    dictionary, all_nodes = GraphDictionary(15, min_support=2), graph()
    ids = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    clients = [all_nodes.part(part) for part in ids.split([5, 20, 15])]
    central = found(dictionary, [all_nodes])["words"]
    assert torch.equal(found(dictionary, clients)["words"], central)
    assert torch.equal(found(dictionary, clients[::-1])["words"], central)


def test_only_the_nodes_of_the_examples_are_counted():
    x, edges, _ = inputs(graph())
    dictionary = GraphDictionary(15)
    sums = [dictionary.sums({}, (x, edges, nodes), 0)["nodes"] for nodes in torch.arange(40).split([12, 28])]
    assert torch.equal(sums[0] + sums[1], (x > 0).sum(0).int())
    assert not dictionary.sums({}, (x, edges, torch.zeros(0, dtype=torch.long)), 0)["nodes"].any()


@pytest.mark.parametrize("min_support", [1, 9, 1000])
def test_words_with_support_come_by_falling_count(min_support):
    examples = graph()
    counts = (examples.x > 0).sum(0)
    words = found(GraphDictionary(3 * WORDS, min_support), [examples])["words"].tolist()
    expected = sorted((w for w in range(WORDS) if counts[w] >= min_support), key=lambda w: (-int(counts[w]), w))
    assert words == expected + [-1] * (WORDS - len(expected))


def test_a_node_is_its_words_and_their_means_around_it():
    x = torch.eye(5)
    dictionary = GraphDictionary(15)
    entries = {"words": torch.arange(5)}
    own, one, two = dictionary.features(entries, (x, CHAIN, torch.tensor([0])))[0].view(RADII, 5)
    assert own.tolist() == [1, 0, 0, 0, 0]
    torch.testing.assert_close(one, torch.tensor([1.0, 1, 0, 0, 0]) / 2**0.5)
    expected = torch.tensor([5.0, 5, 2, 0, 0])  # (1/2)(e0 + e1)/2 + (1/2)(e0 + e1 + e2)/3
    torch.testing.assert_close(two, expected / expected.norm())


def test_each_radius_has_unit_length_whatever_the_number_of_words():
    examples = graph()
    dictionary = GraphDictionary(3 * WORDS)
    features = dictionary.features(found(dictionary, [examples]), inputs(examples)).view(40, RADII, WORDS)
    has_words = (examples.x > 0).any(1)
    torch.testing.assert_close(features[has_words].norm(dim=2), torch.ones(int(has_words.sum()), RADII))


@pytest.mark.parametrize("width", [1, 8, 3 * WORDS, 50])
def test_columns_without_an_entry_are_zero(width):
    examples = graph()
    dictionary = GraphDictionary(width)
    features = dictionary.features(found(dictionary, [examples]), inputs(examples))
    used = RADII * min(width // RADII, WORDS)
    assert features.shape == (40, width)
    assert not features[:, used:].any()
    assert features[:, :used].any(0).all()


def test_without_entries_or_nodes_nothing_is_found():
    x, edges, nodes = inputs(graph())
    dictionary = GraphDictionary(6)
    before = dictionary.features(dictionary.begin(torch.Generator()), (x, edges, nodes))
    assert before.shape == (40, 6)
    assert not before.any()
    assert dictionary.features(found(dictionary, [graph()]), (x, edges, nodes[:0])).shape == (0, 6)
    no_edges = torch.zeros(2, 0, dtype=torch.long)
    assert dictionary.features(found(dictionary, [graph()]), (x, no_edges, nodes)).shape == (40, 6)


def test_many_words_are_averaged_some_columns_at_a_time(monkeypatch):
    examples = graph()
    dictionary = GraphDictionary(3 * WORDS)
    entries = found(dictionary, [examples])
    together = dictionary.features(entries, inputs(examples))
    monkeypatch.setattr("profcil.model.dictionary.graph.COLUMNS", 3)
    torch.testing.assert_close(dictionary.features(entries, inputs(examples)), together)
