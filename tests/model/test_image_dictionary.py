"""The dictionary of image patches: sums over clients give what all images together give, and the features are those of
a slow direct computation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from profcil.data.bundle import Facts
from profcil.engine.dictionary import sent
from profcil.model.dictionary import image, make_dictionary
from profcil.model.dictionary.image import ImageDictionary, normalised

DIGIT = (1, 8, 8)
COLOUR = (3, 13, 11)  # odd sides: quarters overlap


def pictures(n: int, shape: tuple[int, ...] = COLOUR, seed: int = 0) -> torch.Tensor:
    """Random images with edges, as uint8."""
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, shape[0], 4, 4, generator=rng)
    smooth = F.interpolate(coarse, size=shape[1:], mode="nearest")
    return (200 * smooth + 55 * torch.rand(n, *shape, generator=rng)).to(torch.uint8)


def digits(n: int = 600) -> torch.Tensor:
    return torch.from_numpy(load_digits().images[:n] * 15).to(torch.uint8)[:, None]


def found(made: ImageDictionary, parts: list[torch.Tensor], seed: int = 0, rounds: int | None = None) -> dict:
    """The entries that some clients find, each with a part of the images. Sums are rounded as they are when sent."""
    entries = made.begin(torch.Generator().manual_seed(seed))
    for r in range(made.rounds if rounds is None else rounds):
        sums = [sent(made.sums(entries, (x,), r)) for x in parts]
        total = {name: sum(s[name].double() for s in sums) for name in sums[0]}
        entries = made.update(entries, total, r)
    return entries


def whitened(made: ImageDictionary, entries: dict, x: torch.Tensor) -> torch.Tensor:
    """All patches of some images, whitened."""
    patches = torch.cat([made.patches(normalised((x,)), r) for r in range(36)])
    return (patches - entries["mean"]) @ entries["whitening"]


# -- sums over clients --------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.lists(st.integers(0, 29), max_size=3), st.integers(0, 3))
def test_sums_are_additive_over_a_partition_of_the_images(seed, cuts, round):
    x = pictures(30, seed=seed)
    made = ImageDictionary(20, COLOUR)
    entries = found(made, [x], rounds=round)
    parts = [part for part in x.tensor_split(sorted(cuts)) if len(part)]
    whole = made.sums(entries, (x,), round)
    several = [made.sums(entries, (part,), round) for part in parts]
    assert len(whole["patches"])
    for name, value in whole.items():
        torch.testing.assert_close(sum(s[name] for s in several), value, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("seed", [0, 1])
def test_clients_find_the_dictionary_that_all_images_together_give(seed):
    x = digits()
    made = ImageDictionary(60, DIGIT)
    central = found(made, [x], seed)
    federated = found(made, list(x.split([1, 9, 90, 200, 300])), seed)
    for name, value in central.items():
        torch.testing.assert_close(federated[name], value, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(made.features(federated, (x,)), made.features(central, (x,)), rtol=1e-3, atol=1e-4)


def test_the_dictionary_does_not_depend_on_the_order_of_clients():
    parts = list(digits().split(100))
    made = ImageDictionary(60, DIGIT)
    one, two = (found(made, given) for given in (parts, parts[::-1]))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5)


def test_another_seed_gives_another_dictionary():
    made = ImageDictionary(60, DIGIT)
    one, two = (found(made, [digits()], seed)["centres"] for seed in (0, 1))
    assert not torch.allclose(one, two, atol=0.1)


# -- whitening ----------------------------------------------------------------------------------------------------


def test_whitened_patches_have_unit_covariance_up_to_the_regulariser():
    x = pictures(400, (1, 8, 8))
    made = ImageDictionary(20, DIGIT)
    patches = made.patches(normalised((x,)), 0).double()
    covariance = patches.T.cov(correction=0)
    values = torch.linalg.eigvalsh(covariance)
    entries = found(made, [x], rounds=1)
    torch.testing.assert_close(entries["mean"].double(), patches.mean(0), rtol=1e-3, atol=1e-4)
    after = ((patches.float() - entries["mean"]) @ entries["whitening"]).double().T.cov(correction=0)
    expected = values / (values + image.WHITENING)
    torch.testing.assert_close(torch.linalg.eigvalsh(after), expected.sort().values, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(entries["whitening"], entries["whitening"].T, rtol=1e-5, atol=1e-5)
    mixed, rest = (float(c.triu(1).abs().max()) for c in (covariance, after))
    assert rest < 0.5 * mixed


def test_without_the_regulariser_the_covariance_is_the_identity(monkeypatch):
    """Apart from one direction: the mean of a patch, which is zero in all of them."""
    monkeypatch.setattr(image, "WHITENING", 1e-7)
    x = pictures(600, (1, 8, 8))
    made = ImageDictionary(20, DIGIT)
    entries = found(made, [x], rounds=1)
    patches = made.patches(normalised((x,)), 0)
    after = ((patches - entries["mean"]) @ entries["whitening"]).double().T.cov(correction=0)
    expected = torch.eye(16) - torch.full((16, 16), 1 / 16)
    torch.testing.assert_close(after, expected.double(), atol=0.02, rtol=0)


# -- features -----------------------------------------------------------------------------------------------------


def slow_features(made: ImageDictionary, entries: dict, picture: torch.Tensor) -> torch.Tensor:
    """The features of one image from explicit patches, one after another, in float64."""
    x = picture.double() / 255
    x = (x - x.mean()) / x.std().clamp(min=0.05)
    size, centres = made.size, entries["centres"].double()
    high, wide = x.shape[1] - size + 1, x.shape[2] - size + 1
    strong = torch.zeros(len(centres), high, wide, dtype=torch.float64)
    for i in range(high):
        for j in range(wide):
            patch = x[:, i : i + size, j : j + size].flatten()
            patch = (patch - patch.mean()) / (patch.var(correction=0) + 0.01).sqrt()
            white = entries["whitening"].double() @ (patch - entries["mean"].double())
            strong[:, i, j] = (centres @ white - 0.25).clamp(min=0)
    quarters = [
        strong[:, rows, columns].mean((1, 2))
        for rows in (slice(0, -(-high // 2)), slice(high // 2, high))
        for columns in (slice(0, -(-wide // 2)), slice(wide // 2, wide))
    ]
    return torch.stack(quarters, 1).flatten()[: made.width]


@pytest.mark.parametrize("width", [20, 21, 23])
@pytest.mark.parametrize("shape", [DIGIT, COLOUR, (1, 4, 9)])
def test_features_equal_a_slow_direct_computation(shape, width):
    x = pictures(40, shape)
    made = ImageDictionary(width, shape)
    entries = found(made, [x])
    features = made.features(entries, (x[:6],))
    assert features.shape == (6, width)
    assert features.dtype == torch.float32
    expected = torch.stack([slow_features(made, entries, picture) for picture in x[:6]])
    assert float(expected.max()) > 0.05
    torch.testing.assert_close(features.double(), expected, rtol=1e-3, atol=1e-4)


def test_features_do_not_depend_on_the_images_beside_an_image(monkeypatch):
    x = digits(40)
    made = ImageDictionary(30, DIGIT)
    entries = found(made, [x])
    together = made.features(entries, (x,))
    monkeypatch.setattr(image, "VALUES_AT_ONCE", 1)  # one image at a time
    torch.testing.assert_close(made.features(entries, (x,)), together, rtol=1e-4, atol=1e-5)


def test_an_image_and_its_mirror_image_have_the_same_features():
    x = pictures(20)
    plain, mirror = (ImageDictionary(22, COLOUR, mirror=m) for m in (False, True))
    entries = found(plain, [x])
    one, two = (mirror.features(entries, (y,)) for y in (x, x.flip(3)))
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    halves = [plain.features(entries, (y,)) for y in (x, x.flip(3))]
    assert not torch.allclose(*halves, atol=1e-2)
    torch.testing.assert_close(one, sum(halves) / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("views", [(), ("crop",), ("crop", "flip")])
def test_images_are_mirrored_where_a_mirror_image_keeps_its_label(views):
    facts = Facts("some", "Some", "image", 10, 1, 1, views=views)
    made = make_dictionary(facts, (torch.zeros(0, *DIGIT),), 0, 20, 3)
    assert isinstance(made, ImageDictionary)
    assert (made.mirror, made.width, made.min_support) == ("flip" in views, 20, 3)


def test_one_image_gives_finite_entries_and_features():
    made = ImageDictionary(24, DIGIT)
    x = digits(1)
    entries = found(made, [x])
    assert all(bool(torch.isfinite(t).all()) for t in entries.values())
    assert bool(torch.isfinite(made.features(entries, (x,))).all())
    assert bool(torch.isfinite(made.features(entries, (digits(30),))).all())


@pytest.mark.parametrize("value", [0, 7, 255])
def test_a_constant_image_has_finite_features(value):
    flat = torch.full((3, *DIGIT), value, dtype=torch.uint8)
    made = ImageDictionary(24, DIGIT)
    for x in (digits(50), flat):  # found by others, or by itself
        entries = found(made, [x])
        features = made.features(entries, (flat,))
        assert all(bool(torch.isfinite(t).all()) for t in (*entries.values(), features))


# -- k-means ------------------------------------------------------------------------------------------------------


def test_centres_with_too_little_support_stay_random():
    made = ImageDictionary(400, DIGIT, min_support=8)
    start = made.begin(torch.Generator().manual_seed(0))["centres"]
    x = digits(200)
    entries = found(made, [x], rounds=1)
    counts = made.sums(entries, (x,), 1)["patches"]
    assert 0 < int((counts >= 8).sum()) < len(counts)
    after = found(made, [x], rounds=2)["centres"]
    unchanged = (after == start).all(1)
    assert torch.equal(unchanged, counts < 8)
    torch.testing.assert_close(after.norm(dim=1), torch.ones(len(after)), rtol=1e-5, atol=1e-5)
    silent = found(ImageDictionary(400, DIGIT, min_support=10_000), [x])["centres"]
    assert torch.equal(silent, start)


def test_support_is_counted_over_all_clients():
    """Clients with few images have influence together."""
    made = ImageDictionary(16, DIGIT, min_support=20)
    start = made.begin(torch.Generator().manual_seed(0))["centres"]
    x = digits(200)
    after = found(made, list(x.split(10)), rounds=2)["centres"]
    assert int((after != start).any(1).sum()) > 0


def mean_distance(patches: torch.Tensor, entries: dict) -> float:
    """The mean squared distance of whitened patches to the nearest centre."""
    return float(torch.cdist(patches, entries["centres"]).min(1).values.square().mean())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_round_of_kmeans_brings_its_patches_of_digits_nearer_to_their_centres(seed):
    x = digits()
    made = ImageDictionary(80, DIGIT)
    for r in range(1, made.rounds):
        before, after = (found(made, [x], seed, rounds) for rounds in (r, r + 1))
        used = (made.patches(normalised((x,)), r) - before["mean"]) @ before["whitening"]
        assert mean_distance(used, after) < 0.99 * mean_distance(used, before)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_in_the_end_all_patches_of_digits_are_nearer_to_their_centres(seed):
    x = digits()
    made = ImageDictionary(80, DIGIT)
    random, found_ones = (found(made, [x], seed, rounds) for rounds in (1, made.rounds))
    patches = whitened(made, random, x)
    assert mean_distance(patches, found_ones) < 0.97 * mean_distance(patches, random)


@pytest.mark.parametrize(("side", "step"), [(8, 2), (17, 4), (32, 6)])
def test_the_grid_of_patches_reaches_every_place_of_an_image_in_turn(side, step):
    """A patch is known by its place: the pixels are numbered, and patches are compared before normalisation."""
    made = ImageDictionary(20, (1, side, side))
    assert made.step == step
    x = torch.rand(1, 1, side, side, generator=torch.Generator().manual_seed(0))
    every = ImageDictionary(20, (1, side, side))
    every.step = 1
    places = every.patches(x, 0)
    hits = torch.zeros(len(places))
    for r in range(step * step):
        chosen = made.patches(x, r)
        nearest = torch.cdist(chosen, places, compute_mode="donot_use_mm_for_euclid_dist").min(1)
        assert float(nearest.values.max()) < 1e-4
        hits[nearest.indices] += 1
    assert torch.equal(hits, torch.ones(len(places)))
