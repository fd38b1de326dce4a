"""The kernels of image views against the formulas, on the device and through recordings."""

from __future__ import annotations

import pytest
import torch

from profcil.accel import augmentations
from profcil.data.bundle import Facts

cuda = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda or augmentations.kernels() is None, reason="needs CUDA and Triton"),
]

NEAR = 5e-5
NAMES = [(), ("flip",), ("crop",), ("crop", "jitter"), ("crop", "flip", "jitter")]


def facts(*names: str) -> Facts:
    return Facts("toy", "Toy", "image", 2, None, None, views=names)


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def images(*shape: int, numbers: bool) -> torch.Tensor:
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw(), device="cuda")
    return x.float() / 255 if numbers else x


def both(view, names, x, monkeypatch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Views by kernels and by formulas, from one generator and from two, and the states that are left behind."""
    seen, states = [], []
    for fits in (True, False):
        assert augmentations.fits(x)
        with monkeypatch.context() as patch:
            if not fits:
                patch.setattr(augmentations, "fits", lambda x: False)
            rngs = [draw(1), draw(2)]
            seen.append(torch.cat([*view(facts(*names), (x,), rngs[0]), *view(facts(*names), (x,), rngs)]))
            states.append(torch.stack([g.get_state() for g in rngs]))
    return seen, states


@pytest.mark.parametrize("names", NAMES, ids="-".join)
@pytest.mark.parametrize("shape", [(64, 3, 32, 32), (6, 1, 28, 28), (6, 3, 64, 64), (2, 3, 73, 73)], ids=str)
@pytest.mark.parametrize("numbers", [False, True], ids=["bytes", "numbers"])
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_kernels_make_the_views_that_the_formulas_make(shape, names, numbers, last, monkeypatch):
    x = images(*shape, numbers=numbers)
    x = x.to(memory_format=torch.channels_last) if last else x
    seen, states = both(augmentations.weak, names, x, monkeypatch)
    assert torch.equal(*seen) and torch.equal(*states)
    seen, states = both(augmentations.strong, names, x, monkeypatch)
    assert (seen[0] - seen[1]).abs().max() <= NEAR and torch.equal(*states)
    assert seen[0].is_contiguous() and seen[0].dtype == torch.float32


def test_a_recorded_strong_view_draws_and_makes_what_an_eager_one_does():
    x, about, rng, graph = images(64, 3, 32, 32, numbers=False), facts(*NAMES[-1]), draw(), torch.cuda.CUDAGraph()
    eager = [augmentations.strong(about, (x,), rng)[0] for _ in range(3)]
    graph.register_generator_state(rng)
    with torch.cuda.graph(graph):
        (found,) = augmentations.strong(about, (x,), rng)
    rng.manual_seed(0)
    for right in eager:
        graph.replay()
        assert torch.equal(found, right)


def test_unsupported_images_use_the_formulas():
    x = images(2, 3, 32, 32, numbers=True)
    assert not augmentations.fits(x.bfloat16()) and not augmentations.fits(x.clone().requires_grad_())
    assert not augmentations.fits(images(2, 3, 96, 96, numbers=False))
