"""Views change what they should, keep what they must, and depend on their generator alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil.data.bundle import Facts
from profcil.errors import ConfigError
from profcil.model import augmentations
from profcil.randomness import torch_generator


def facts(modality: str, *names: str) -> Facts:
    return Facts("toy", "Toy", modality, 2, None, None, views=names)


def draw(*address: object) -> torch.Generator:
    return torch_generator(0, "views", *address)


def images(n: int = 16, channels: int = 3, size: int = 32) -> torch.Tensor:
    return torch.randint(0, 256, (n, channels, size, size), dtype=torch.uint8, generator=draw("images"))


def tokens(n: int = 200, length: int = 12) -> torch.Tensor:
    ids = torch.randint(2, 50, (n, length), generator=draw("tokens"))
    return ids * (torch.arange(length) < torch.arange(n)[:, None] % (length + 1))  # lengths 0 to 12


def graph() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ends = torch.stack([torch.arange(200), (torch.arange(200) + 7) % 200])
    return torch.rand(200, 300, generator=draw("graph")) + 1, torch.cat([ends, ends.flip(0)], 1), torch.arange(5)


CASES = [
    (facts("image", "crop", "flip", "jitter"), (images(),)),
    (facts("image", "crop", "jitter"), (images(channels=1, size=8),)),
    (facts("text"), (tokens(),)),
    (facts("graph"), graph()),
    (facts("table", "noise", "mask"), (torch.rand(40, 6, generator=draw("table")),)),
]


@pytest.mark.parametrize(("about", "inputs"), CASES)
@pytest.mark.parametrize("view", [augmentations.weak, augmentations.strong])
def test_a_view_is_a_pure_function_of_inputs_and_generator(view, about, inputs):
    before = [x.clone() for x in inputs]
    state = torch.get_rng_state()
    one, two = view(about, inputs, draw(1)), view(about, inputs, draw(1))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert [x.shape for x in one[: len(inputs)]] == [x.shape for x in inputs]


@pytest.mark.parametrize(("about", "inputs"), CASES)
def test_two_strong_views_differ(about, inputs):
    one, two = augmentations.strong(about, inputs, draw(1)), augmentations.strong(about, inputs, draw(2))
    assert any(not torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(("about", "inputs"), CASES[2:])
def test_weak_leaves_texts_and_graphs_alone(about, inputs):
    assert augmentations.weak(about, inputs, draw()) is inputs


@pytest.mark.parametrize("view", [augmentations.weak, augmentations.strong])
@pytest.mark.parametrize("channels", [1, 3])
def test_image_views_stay_in_the_unit_range(view, channels):
    (out,) = view(facts("image", "crop", "flip", "jitter"), (images(64, channels),), draw())
    assert out.dtype == torch.float32
    assert out.min() >= 0
    assert out.max() <= 1


@pytest.mark.parametrize("view", [augmentations.weak, augmentations.strong])
def test_only_the_views_that_are_named_happen(view):
    x = images()
    (out,) = view(facts("image"), (x,), draw())
    assert torch.equal(out, x.float() / 255)
    (out,) = view(facts("image", "flip"), (x,), draw())
    flips = [torch.allclose(o, e, atol=1e-5) for o, e in zip(out, (x.float() / 255).flip(3), strict=True)]
    stays = [torch.allclose(o, e, atol=1e-5) for o, e in zip(out, x.float() / 255, strict=True)]
    assert all(a or b for a, b in zip(flips, stays, strict=True))
    assert any(flips)
    assert any(stays)


def test_bytes_and_numbers_have_the_same_views():
    about, x = facts("image", "crop", "flip", "jitter"), images()
    for view in (augmentations.weak, augmentations.strong):
        assert torch.allclose(view(about, (x,), draw())[0], view(about, (x.float() / 255,), draw())[0])


@pytest.mark.parametrize(("size", "margin"), [(8, 1), (32, 4), (64, 8)])
def test_weak_crop_is_a_window_of_the_reflected_image(size, margin):
    x = images(1, 1, size)
    (out,) = augmentations.weak(facts("image", "crop"), (x.expand(400, -1, -1, -1),), draw())
    padded = torch.nn.functional.pad(x.float() / 255, [margin] * 4, mode="reflect")
    windows = padded[0, 0].unfold(0, size, 1).unfold(1, size, 1).flatten(0, 1).flatten(1)
    distinct = out.flatten(1).unique(dim=0)
    assert all((w == windows).all(1).any() for w in distinct)
    assert len(distinct) > len(windows) // 2


def test_strong_crop_keeps_at_least_its_area():
    """On a ramp the spread of values tells the window's size: never below the smallest side, never above 1."""
    ramp = torch.linspace(0, 1, 32).expand(300, 1, 32, 32)
    (out,) = augmentations.strong(facts("image", "crop"), (ramp,), draw())
    span = out[:, 0, 0, -1] - out[:, 0, 0, 0]
    smallest = (augmentations.AREA / augmentations.ASPECT) ** 0.5
    assert span.min() > smallest - 0.02
    assert span.min() < 0.75 < 0.95 < span.max()
    assert out.std((1, 2, 3)).std() > 0.01


def test_some_colour_images_turn_gray():
    (out,) = augmentations.strong(facts("image", "jitter"), (images(200, size=8),), draw())
    gray = (out == out[:, :1]).flatten(1).all(1).float().mean()
    assert 0.1 < gray < 0.3


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_no_text_loses_its_last_token(seed):
    x = tokens()
    (out,) = augmentations.strong(facts("text"), (x,), draw(seed))
    real = (x > 0).any(1)
    assert ((out > 1).any(1) == real).all()
    assert (out[x == 0] == 0).all()
    assert ((out == x) | (out == 0) | (out == augmentations.UNKNOWN)).all()


def test_tokens_are_dropped_and_masked_at_their_rates():
    x = torch.full((400, 50), 7)
    (out,) = augmentations.strong(facts("text"), (x,), draw())
    assert abs((out == 0).float().mean() - augmentations.DROP) < 0.01
    assert abs((out == augmentations.UNKNOWN).float().mean() - augmentations.MASK) < 0.01


def test_graph_views_drop_edges_and_columns_and_keep_targets():
    x, edges, targets = graph()
    whole, fewer, same, kept = augmentations.strong(facts("graph"), (x, edges, targets), draw())
    dropped = fewer[0] == fewer[1]
    assert torch.equal(same, targets)
    assert torch.equal(fewer[0], edges[0])
    assert torch.equal(fewer[:, ~dropped], edges[:, ~dropped])
    assert 0.12 < dropped.float().mean() < 0.28
    assert whole is x and kept.shape == x.shape[1:]
    assert 0.12 < (~kept).float().mean() < 0.28


def test_an_unknown_modality_is_an_error():
    with pytest.raises(ConfigError, match="unknown modality 'sound'"):
        augmentations.weak(facts("sound"), (torch.zeros(1),), draw())
