"""Dictionaries of texts: frequent words and pairs, and words with their contexts."""

from __future__ import annotations

import pytest
import torch

from profcil.model.dictionary.context import ContextDictionary, mutual_information
from profcil.model.dictionary.text import TextDictionary, column_in_table, column_of, count_texts, most_frequent

VOCABULARY = 12
KINDS = [TextDictionary, ContextDictionary]


def texts(n: int = 60, length: int = 6) -> torch.Tensor:
    rng = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, VOCABULARY, (n, length), generator=rng)
    lengths = torch.randint(1, length + 1, (n, 1), generator=rng)
    return tokens * (torch.arange(length) < lengths)


def found(dictionary, clients):
    entries = dictionary.begin(torch.Generator())
    sums = [dictionary.sums(entries, (tokens,), 0) for tokens in clients]
    total = {name: sum(part[name] for part in sums) for name in sums[0]}
    return dictionary.update(entries, total, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sums_of_clients_are_the_sums_of_all_their_texts(kind):
    dictionary = kind(20, VOCABULARY)
    x = texts()
    (name,) = whole = dictionary.sums({}, (x,), 0)
    parts = [dictionary.sums({}, (part,), 0)[name] for part in x.split([7, 0, 33, 20])]
    assert torch.equal(sum(parts), whole[name])
    assert not whole[name].is_floating_point()


@pytest.mark.parametrize("kind", KINDS)
def test_entries_do_not_depend_on_order_and_partition_of_clients(kind):
    dictionary = kind(20, VOCABULARY, min_support=2)
    x = texts()
    shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))]
    (central,) = found(dictionary, [x]).values()
    for clients in (x.split(7), x.split(7)[::-1], shuffled.split(25)):
        (entries,) = found(dictionary, clients).values()
        assert torch.equal(entries, central)


@pytest.mark.parametrize("kind", KINDS)
def test_entries_keep_the_shape_they_begin_with(kind):
    dictionary = kind(20, VOCABULARY)
    before, after = dictionary.begin(torch.Generator()), found(dictionary, [texts()])
    assert {k: (v.shape, v.dtype) for k, v in before.items()} == {k: (v.shape, v.dtype) for k, v in after.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_texts_do_not_depend_on_each_other(kind):
    dictionary = kind(40, VOCABULARY)
    entries, x = found(dictionary, [texts()]), texts()[:9]
    both = dictionary.features(entries, (x,))
    alone = torch.cat([dictionary.features(entries, (row[None],)) for row in x])
    assert both.shape == (9, 40)
    assert both.dtype == torch.float32
    torch.testing.assert_close(alone, both, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 6), (3, 6), (3, 1)])
def test_without_words_there_is_nothing_to_count_and_all_features_are_zero(kind, shape):
    dictionary = kind(8, VOCABULARY)
    empty = torch.zeros(shape, dtype=torch.long)
    assert not any(t.any() for t in dictionary.sums({}, (empty,), 0).values())
    for entries in (dictionary.begin(torch.Generator()), found(dictionary, [texts()])):
        features = dictionary.features(entries, (empty,))
        assert features.shape == (shape[0], 8)
        assert not features.any()


def test_a_text_is_its_frequent_words_and_pairs():
    dictionary = TextDictionary(6, VOCABULARY, min_support=2)
    x = torch.tensor([[2, 3, 0, 0], [2, 3, 2, 3], [2, 4, 0, 0], [1, 5, 1, 0]])
    entries = found(dictionary, [x[:1], x[1:]])
    assert entries["ngrams"].tolist()[:2] == [2, 3]  # in three texts, in two; 4 and 5 are in one each
    assert (entries["ngrams"] >= 0).tolist() == [True, True, True, False, False, False]  # the third is the pair 2 3
    expected = torch.tensor([[1.0, 1, 1], [1, 1, 1], [1, 0, 0], [0, 0, 0]])
    expected = expected / expected.sum(1, keepdim=True).clamp(min=1).sqrt()
    torch.testing.assert_close(dictionary.features(entries, (x,)), torch.nn.functional.pad(expected, (0, 3)))


def test_pairs_have_an_order_and_do_not_span_unknown_words():
    dictionary = TextDictionary(50, VOCABULARY)
    entries = found(dictionary, [torch.tensor([[2, 3]])])
    backward, apart, same = dictionary.features(entries, (torch.tensor([[3, 2, 0], [2, 1, 3], [2, 3, 0]]),))
    assert int((backward > 0).sum()) == int((apart > 0).sum()) == 2
    assert int((same > 0).sum()) == 3


def test_counts_are_of_texts_and_ties_go_to_the_smaller_id():
    counts = count_texts(torch.tensor([[4, 4, 1, -1], [4, 2, 2, 2]]), 6)
    assert counts.tolist() == [0, 1, 1, 0, 2, 0]
    assert most_frequent(counts, 3, 1).tolist() == [4, 1, 2]
    assert most_frequent(counts, 3, 2).tolist() == [4, -1, -1]
    assert most_frequent(counts, 8, 1).tolist() == [4, 1, 2, -1, -1, -1, -1, -1]


def test_an_id_without_an_entry_has_the_last_column():
    assert column_of(torch.tensor([7, 3, 5, -1]), torch.tensor([5, 3, -1]), size=8).tolist() == [3, 1, 0, 3]


def test_words_in_the_same_contexts_have_the_same_row():
    dictionary = ContextDictionary(30, VOCABULARY)
    x = torch.tensor([[2, 5, 3], [2, 6, 3], [4, 7, 8], [2, 5, 3], [2, 6, 3]])
    (rows,) = found(dictionary, [x]).values()
    torch.testing.assert_close(rows[5], rows[6])
    assert float(rows[5] @ rows[7]) == 0
    assert rows[[0, 1, 9]].eq(0).all()


def test_rare_contexts_are_left_out():
    x = torch.tensor([[2, 5], [2, 5], [3, 6]])
    (rows,) = found(ContextDictionary(30, VOCABULARY, min_support=2), [x]).values()
    assert bool(rows[2].any())
    assert not rows[3].any()


def test_mutual_information_is_high_for_what_occurs_together_only():
    information = mutual_information(torch.tensor([[4.0, 0], [0, 4]]), 1)
    torch.testing.assert_close(information, torch.full((2,), 2.0).log().diag())


def test_a_context_text_is_rectified_and_depends_on_the_order_of_words():
    dictionary = ContextDictionary(64, VOCABULARY)
    entries = found(dictionary, [texts()])
    x = torch.tensor([[2, 3, 4, 0], [4, 3, 2, 0], [2, 3, 4, 1]])
    forward, backward, unknown = dictionary.features(entries, (x,))
    assert bool((forward >= 0).all())
    assert not torch.allclose(forward, backward)
    torch.testing.assert_close(forward, unknown)


def test_a_table_of_columns_gives_the_columns_of_the_search():
    """An exported model finds entries in a table."""
    ids = torch.tensor([[7, 3, 5, -1], [0, 5, 5, 2]])
    entries = torch.tensor([5, 3, -1])
    assert torch.equal(column_in_table(ids, entries, size=8), column_of(ids, entries, size=8))
