"""Random features of the inputs themselves."""

from __future__ import annotations

import pytest
import torch

from profcil.errors import ConfigError
from profcil.model.sketch import sketch


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def images() -> torch.Tensor:
    return torch.rand(5, 3, 8, 8, generator=rng())


CHAIN = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 4], [1, 0, 2, 1, 3, 2, 4, 3]])  # 0 - 1 - 2 - 3 - 4
GIVEN = {
    "image": (images(),),
    "text": (torch.tensor([[3, 4, 5, 0], [3, 3, 0, 0], [9, 8, 7, 6]]),),
    "graph": (torch.rand(5, 30, generator=rng()), CHAIN, torch.tensor([4, 0, 2])),
}


@pytest.mark.parametrize("modality", GIVEN)
@pytest.mark.parametrize("width", [5, 16])
def test_everyone_draws_the_same_features_one_row_an_example(modality, width):
    one, two = (sketch(modality, GIVEN[modality], width, 10) for _ in range(2))
    assert one.shape == (len(GIVEN[modality][-1]), width)
    assert torch.equal(one, two)
    assert bool((one >= 0).all())
    assert bool((one > 0).any())


@pytest.mark.parametrize("modality", GIVEN)
def test_examples_do_not_depend_on_each_other(modality):
    *shared, last = GIVEN[modality]
    both = sketch(modality, GIVEN[modality], 12, 10)
    alone = torch.cat([sketch(modality, (*shared, last[i : i + 1]), 12, 10) for i in range(len(last))])
    torch.testing.assert_close(alone, both)


def test_bytes_are_the_pixels_they_stand_for():
    pixels = torch.randint(256, (4, 1, 8, 8), generator=rng(), dtype=torch.uint8)
    torch.testing.assert_close(sketch("image", (pixels,), 8), sketch("image", (pixels / 255,), 8))


def test_an_image_is_seen_whatever_its_brightness_and_contrast():
    x = images()
    torch.testing.assert_close(sketch("image", (x,), 20), sketch("image", (0.5 * x + 0.2,), 20), rtol=1e-4, atol=1e-4)
    flat = sketch("image", (torch.full((1, 3, 8, 8), 0.3),), 20)  # no contrast at all: nothing to raise
    assert float(flat.abs().max()) < 1e-4


def test_a_text_is_its_words_in_any_order():
    texts = torch.tensor([[3, 4, 5, 0, 0], [5, 0, 3, 4, 0], [3, 4, 6, 0, 0], [0, 0, 0, 0, 0]])
    one, other, third, empty = sketch("text", (texts,), 30, 10)
    torch.testing.assert_close(one, other)
    assert not torch.allclose(one, third)
    assert not empty.any()


def test_a_node_sees_two_steps_and_no_further():
    x, edges, _ = GIVEN["graph"]
    nodes = torch.arange(5)
    before, moved = sketch("graph", (x, edges, nodes), 40), x.clone()
    moved[4] += torch.rand(30, generator=rng())
    changed = (sketch("graph", (moved, edges, nodes), 40) - before).abs().amax(1) > 1e-6
    assert changed.tolist() == [False, False, True, True, True]


def test_a_modality_that_nobody_knows_is_named():
    with pytest.raises(ConfigError, match="modality 'sound'"):
        sketch("sound", (torch.zeros(1, 1),), 4)
