"""Secure sums: exact whatever drops out, and a masked vector says nothing about its client."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil.errors import Failure
from profcil.privacy.secure_sum import fixed_point, masks, protocol, shares, simulation
from profcil.privacy.secure_sum.fixed_point import Ring
from profcil.privacy.secure_sum.protocol import SumFailed, Terms
from profcil.privacy.secure_sum.shares import Draw
from profcil.privacy.secure_sum.simulation import SecureSum, add_securely
from profcil.randomness import derive_bytes

TERMS = Terms("round 1.1", threshold=4, least=3)
CLIENTS = (2, 3, 5, 7, 11, 13)
LENGTH = 50


def drawing(seed: int = 0):
    def draw(client: int) -> Draw:
        return lambda purpose, size: derive_bytes(seed, client, purpose, size=size)

    return draw


def vectors(seed: int = 0, clients: Collection[int] = CLIENTS, length: int = LENGTH) -> dict[int, Ring]:
    rng = np.random.default_rng(seed)
    return {c: rng.integers(0, 2**64, length, dtype=np.uint64) for c in clients}


def plain(given: Mapping[int, Ring], clients: Collection[int]) -> Ring:
    return np.sum([given[c] for c in clients], axis=0, dtype=np.uint64)


def add(lost: Mapping[str, Collection[int]] | None = None, seed: int = 0) -> SecureSum:
    return add_securely(vectors(), TERMS, drawing(seed), lost)


# -- the sum ----------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(clients=st.sets(st.integers(0, 1000), min_size=4, max_size=6), seed=st.integers(0, 2**30))
def test_masked_sums_are_plain_sums(clients, seed):
    given_vectors = vectors(seed, clients, 5)
    done = add_securely(given_vectors, TERMS, drawing(seed))
    assert done.clients == tuple(sorted(clients))
    assert np.array_equal(done.total, plain(given_vectors, clients))


@pytest.mark.parametrize("round", simulation.ROUNDS)
@pytest.mark.parametrize("gone", list(combinations(CLIENTS, 2)))
def test_two_of_six_may_stop_before_any_round(round, gone):
    """Those that stop in recovery have sent their vectors, so these are in the sum."""
    done = add({round: gone})
    counted = CLIENTS if round == "recovery" else tuple(c for c in CLIENTS if c not in gone)
    assert done.clients == counted
    assert np.array_equal(done.total, plain(vectors(), counted))


def test_one_may_stop_in_each_of_two_rounds():
    done = add({"masked": [3], "recovery": [13]})
    assert np.array_equal(done.total, plain(vectors(), [2, 5, 7, 11, 13]))


@pytest.mark.parametrize("round", simulation.ROUNDS)
def test_below_the_threshold_a_sum_fails(round):
    with pytest.raises(SumFailed, match=r"round 1\.1 was given up: 3 clients .*, 4 are needed"):
        add({round: CLIENTS[:3]})


def test_a_sum_has_at_least_so_many_clients_whatever_the_threshold():
    terms = Terms("a sum", threshold=2, least=5)
    with pytest.raises(SumFailed, match="4 clients sent a vector, 5 are needed"):
        add_securely(vectors(), terms, drawing(), {"masked": CLIENTS[:2]})


# -- what the server sees ---------------------------------------------------------------------------------------------


def sharing_clients(given: Mapping[int, Ring], seed: int = 0, name: str = TERMS.name):
    """The states of the clients and their masked vectors."""
    terms = Terms(name, TERMS.threshold, TERMS.least)
    advertised = {c: protocol.advertise(c, terms, drawing(seed)(c)) for c in given}
    keys = {c: message for c, (_, message) in advertised.items()}
    shared = {c: protocol.share_secrets(state, keys) for c, (state, _) in advertised.items()}
    delivered = protocol.deliver({c: messages for c, (_, messages) in shared.items()})
    masked = {c: protocol.mask(shared[c][0], delivered[c], given[c]) for c in given}
    states = {c: state for c, (state, _) in masked.items()}
    return states, keys, {c: vector for c, (_, vector) in masked.items()}


def test_a_masked_vector_of_zeros_looks_uniform():
    zeros = {c: np.zeros(20_000, np.uint64) for c in CLIENTS}
    _, _, masked = sharing_clients(zeros)
    for vector in masked.values():
        bits = np.unpackbits(vector.view(np.uint8)).reshape(-1, 64).mean(0)
        assert np.abs(bits - 0.5).max() < 0.02  # more than five standard deviations of a fair bit
        assert len(np.unique(vector)) == len(vector)
    assert plain(masked, CLIENTS)[0] != 0  # own masks do not cancel


def test_masks_hide_a_vector_from_all_who_lack_one_of_them():
    """Without the client's own mask, or without that of one pair, what is left is as random as before."""
    given_vectors = vectors()
    states, keys, masked = sharing_clients(given_vectors)
    state = states[5]
    left = masked[5] - masks.stream(state.seed, TERMS.name, LENGTH)
    others = [c for c in CLIENTS if c != 5]
    for other in others:
        assert not np.any(left == given_vectors[5])
        protocol.add_pair_mask(left, states[other].mask_key, keys[5], TERMS, other < 5)
    assert np.array_equal(left, given_vectors[5])


def test_masks_change_with_the_keys_and_with_the_sum():
    base = sharing_clients(vectors())[2]
    assert all(np.array_equal(base[c], sharing_clients(vectors())[2][c]) for c in CLIENTS)
    for other in (sharing_clients(vectors(), seed=1)[2], sharing_clients(vectors(), name="round 1.2")[2]):
        assert not any(np.any(base[c] == other[c]) for c in CLIENTS)


def test_a_client_reveals_one_secret_of_each_client():
    """Seed shares of clients whose vectors arrived, key shares of the others; never both of one."""
    states, _, _ = sharing_clients(vectors())
    after, revealed = protocol.reveal(states[2], [2, 3, 5, 7])
    assert protocol.reveal(after, CLIENTS)[1] == {}
    assert revealed.keys() == set(CLIENTS)
    assert all(len(share) == shares.SHARE_BYTES for share in revealed.values())
    assert revealed[3] == states[2].held[3][shares.SHARE_BYTES :]
    assert revealed[11] == states[2].held[11][: shares.SHARE_BYTES]


def test_a_client_reveals_nothing_for_too_small_a_sum():
    states, _, _ = sharing_clients(vectors())
    with pytest.raises(SumFailed, match="3 clients sent a vector, 4 are needed"):
        protocol.reveal(states[2], [2, 3, 5])


# -- faults -----------------------------------------------------------------------------------------------------------


def other(share: bytes) -> bytes:
    return share[:-1] + bytes([share[-1] ^ 1])


@pytest.mark.parametrize("about", [5, 13])  # 13's vector is missing
def test_a_wrong_share_is_noticed(about):
    states, keys, masked = sharing_clients(vectors())
    del masked[13]
    revealed = {c: protocol.reveal(states[c], masked)[1] for c in masked}
    revealed[2][about] = other(revealed[2][about])
    with pytest.raises(Failure, match="wrong"):
        protocol.unmask(TERMS, keys, masked, CLIENTS, revealed)


def test_encrypted_shares_that_were_changed_are_noticed():
    terms = TERMS
    advertised = {c: protocol.advertise(c, terms, drawing()(c)) for c in CLIENTS}
    keys = {c: message for c, (_, message) in advertised.items()}
    shared = {c: protocol.share_secrets(state, keys) for c, (state, _) in advertised.items()}
    delivered = protocol.deliver({c: messages for c, (_, messages) in shared.items()})
    delivered[2][7] = other(delivered[2][7])
    with pytest.raises(SumFailed, match="the shares of client 7 for client 2 were changed"):
        protocol.mask(shared[2][0], delivered[2], vectors()[2])


# -- shares -----------------------------------------------------------------------------------------------------------


@given(secret=st.binary(min_size=32, max_size=32), threshold=st.integers(1, 5), seed=st.integers(0, 99))
def test_any_threshold_shares_give_the_secret(secret, threshold, seed):
    parts = shares.split(secret, range(1, 7), threshold, drawing(seed)(0))
    for chosen in combinations(parts, threshold):
        assert shares.recover({point: parts[point] for point in chosen}) == secret


def test_fewer_shares_fit_every_secret():
    """For any other secret there is one more share with which the given ones recover it."""
    parts = shares.split(bytes(32), range(1, 4), 3, drawing()(0))
    two = {1: parts[1], 2: parts[2]}
    wanted = 12345
    one, second = (int.from_bytes(two[point], "big") for point in (1, 2))
    third = (wanted - 3 * one + 3 * second) % shares.PRIME  # s = 3 f(1) − 3 f(2) + f(3)
    found = shares.recover({**two, 3: third.to_bytes(shares.SHARE_BYTES, "big")})
    assert int.from_bytes(found, "big") == wanted


def test_the_field_is_prime():
    assert all(pow(base, shares.PRIME - 1, shares.PRIME) == 1 for base in (2, 3, 5, 7, 11, 13))


# -- fixed-point numbers ----------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_numbers_survive_to_the_resolution(numbers):
    array = np.array(numbers)
    vector = fixed_point.encode({"a": array}, 28, 4, 0)
    found = fixed_point.decode(vector, {"a": array.shape}, 28)["a"]
    assert np.abs(found - array).max() <= 2.0**-29


def test_sums_of_the_largest_numbers_do_not_wrap():
    limit = 2.0**63 / 4 / 2**28
    low, high = -limit * (1 - 1e-15), limit * (1 - 1e-15)
    for value in (low, high):
        total = sum(fixed_point.encode({"a": np.array([value])}, 28, 4, c) for c in range(4))
        assert fixed_point.decode(total, {"a": (1,)}, 28)["a"][0] == pytest.approx(4 * value)


@pytest.mark.parametrize("value", [2.0**33, -(2.0**33), np.nan, np.inf])
def test_a_number_out_of_range_names_block_and_client(value):
    with pytest.raises(Failure, match=r"head/weight of client 7 has a value of size .*; lower privacy\.sum_bits"):
        fixed_point.encode({"head/weight": np.array([0.0, value])}, 28, 4, 7)


def test_arrays_keep_names_and_shapes():
    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": np.zeros((0, 3)), "c": np.array(1.5)}
    vector = fixed_point.encode(arrays, 28, 2, 0)
    found = fixed_point.decode(vector, {name: array.shape for name, array in arrays.items()}, 28)
    assert all(np.array_equal(found[name], array) for name, array in arrays.items())


# -- numbers of fewer bytes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", range(1, 9))
def test_sums_of_numbers_of_any_width_are_exact(width):
    """Also negative ones, and the largest that fit."""
    rng = np.random.default_rng(width)
    limit = 2 ** (8 * width - 1) // 6 - 1
    numbers = {c: rng.integers(-limit, limit, LENGTH, endpoint=True).astype(np.float64) for c in CLIENTS}
    numbers[2][:2] = [limit * (1 - 1e-15), -limit * (1 - 1e-15)]
    given_vectors = {c: fixed_point.encode({"a": v}, 0, 6, c, width) for c, v in numbers.items()}
    done = add_securely(given_vectors, replace(TERMS, width=width), drawing())
    found = fixed_point.decode(done.total, {"a": (LENGTH,)}, 0, width)["a"]
    expected = np.sum([np.rint(v).astype(np.int64) for v in numbers.values()], axis=0)
    assert np.array_equal(found, expected.astype(np.float64))
    assert {s.bytes for s in done.sent if s.kind == "masked" and s.direction == "up"} == {width * LENGTH}


@pytest.mark.parametrize("width", range(1, 9))
def test_masked_numbers_of_any_width_look_uniform(width):
    terms = replace(TERMS, width=width)
    zeros = np.zeros(4000, fixed_point.word_of(width))
    advertised = {c: protocol.advertise(c, terms, drawing()(c)) for c in CLIENTS}
    keys = {c: message for c, (_, message) in advertised.items()}
    shared = {c: protocol.share_secrets(state, keys) for c, (state, _) in advertised.items()}
    delivered = protocol.deliver({c: messages for c, (_, messages) in shared.items()})
    _, masked = protocol.mask(shared[2][0], delivered[2], zeros)
    bits = np.unpackbits(np.frombuffer(fixed_point.to_bytes(masked, width), np.uint8)).reshape(-1, 8 * width)
    assert np.abs(bits.mean(0) - 0.5).max() < 0.05  # more than six standard deviations of a fair bit


@pytest.mark.parametrize(
    ("largest", "bits", "clients", "width"), [(0.0, 28, 5, 8), (1.0, 0, 1, 1), (1500.0, 17, 5, 4), (1500.0, 18, 10, 5)]
)
def test_a_number_has_as_few_bytes_as_its_range_needs(largest, bits, clients, width):
    assert fixed_point.width_for(largest, bits, clients) == width
    if largest:
        fixed_point.encode({"a": np.array([largest])}, bits, clients, 0, width)
        with pytest.raises(Failure, match="a value of size"):
            fixed_point.encode({"a": np.array([largest])}, bits, clients, 0, width - 1)


def test_a_range_that_fits_no_number_is_refused():
    with pytest.raises(Failure, match="takes 9 bytes a number for 5 clients, 8 are possible"):
        fixed_point.width_for(1e12, 28, 5)


def test_a_number_above_the_range_says_which_setting_to_raise():
    with pytest.raises(Failure, match=r"4 bytes a number holds values below .*; raise privacy\.sum_range"):
        fixed_point.encode({"a": np.array([1e5])}, 17, 5, 0, 4)


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_bytes_by_formula():
    """n clients: 96 bytes of keys, two shares of 33 bytes and a tag of 16 for each other, 8 bytes a number, one share
    of each client to recover; ids of 4 bytes."""
    n = len(CLIENTS)
    done = add()
    found: dict[tuple[str, str], int] = {}
    for message in done.sent:
        key = (message.kind, message.direction)
        found[key] = found.get(key, 0) + message.bytes
    assert found == {
        ("keys", "up"): n * 96,
        ("keys", "down"): n * n * (4 + 96),
        ("shares", "up"): n * (n - 1) * (4 + 66 + 16),
        ("shares", "down"): n * (n - 1) * (4 + 66 + 16),
        ("masked", "up"): n * 8 * LENGTH,
        ("recovery", "down"): n * n * 4,
        ("recovery", "up"): n * n * (4 + 33),
    }
