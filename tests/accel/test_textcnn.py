"""The fast TextCNN against the plain one: the same outputs and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from profcil.accel.net import install
from profcil.accel.textcnn import FastTextCNN
from profcil.data.bundle import Bundle, Facts, Rows
from profcil.encoders import textcnn
from profcil.encoders.textcnn import TextCNN
from profcil.model.net import Net
from profcil.randomness import torch_generator

VOCABULARY = 30
WIDTHS = [(1, 2, 3), (2, 5), (3, 4, 5)]


def rng(*address: object) -> torch.Generator:
    return torch_generator(1, "textcnn", *address)


def texts() -> Bundle:
    x = torch.randint(2, VOCABULARY, (6, 10), generator=rng("texts"))
    facts = Facts("toy", "Toy", "text", 2, None, None)
    rows = Rows(x, torch.arange(6) % 2)
    return Bundle(facts, rows, rows, None, ("a", "b"), vocabulary=VOCABULARY)


def encoders(widths: tuple[int, ...]) -> tuple[TextCNN, FastTextCNN]:
    """The plain encoder, and a fast one with the same parameters. No bias is 0."""
    plain = textcnn.build(texts(), generator=rng(), widths=widths)
    for conv in plain.convolutions:
        nn.init.normal_(conv.bias, generator=rng("bias"))
    fast = copy.deepcopy(plain)
    fast.__class__ = FastTextCNN
    return plain, fast


def tokens_with_gaps() -> Tensor:
    """Padding in the middle, as a view leaves it; one text without tokens, one with a single token."""
    x = torch.randint(0, VOCABULARY, (9, 8), generator=rng("tokens"))
    x[torch.rand(x.shape, generator=rng("gaps")) < 0.4] = 0
    x[4] = 0
    x[5, 1:] = 0
    return x


TOKENS = {
    "full": texts().train.x,
    "padded at the end": torch.cat([texts().train.x, torch.zeros(6, 9, dtype=torch.long)], 1),
    "gaps, an empty text and a single token": tokens_with_gaps(),
    "only empty texts": torch.zeros(3, 5, dtype=torch.long),
    "shorter than a window": texts().train.x[:, :1],
    "one text": texts().train.x[:1],
}


def gradients(encoder: TextCNN, features: Tensor) -> tuple[Tensor, ...]:
    weight = torch.randn(features.shape, generator=rng("loss"))
    return torch.autograd.grad((features * weight).sum(), list(encoder.parameters()), materialize_grads=True)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_fast_and_plain_agree_in_outputs_and_gradients(tokens, widths):
    plain, fast = encoders(widths)
    x = TOKENS[tokens]
    expected, found = plain(x), fast(x)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        assert torch.equal(fast(x), found)
    names = [name for name, _ in plain.named_parameters()]
    for name, ours, theirs in zip(names, gradients(fast, found), gradients(plain, expected), strict=True):
        torch.testing.assert_close(
            ours, theirs, atol=1e-4, rtol=1e-4, msg=lambda message, name=name: f"{name}: {message}"
        )


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_the_function_for_a_gpu_agrees_too(tokens, widths, monkeypatch):
    """`pooled_over_all` is what a GPU runs; it is plain torch and can be run here."""
    plain, fast = encoders(widths)
    monkeypatch.setattr(FastTextCNN, "pooled_over_best", FastTextCNN.pooled_over_all)
    x = TOKENS[tokens]
    expected, found = plain(x), fast(x)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(gradients(fast, found), gradients(plain, expected), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_empty_texts_give_zero_and_padding_changes_nothing():
    _, fast = encoders((1, 2, 3))
    for conv in fast.convolutions:
        nn.init.ones_(conv.bias)  # a window of padding alone would give 1
    x = texts().train.x
    assert torch.equal(fast(torch.zeros(2, 5, dtype=torch.long)), torch.zeros(2, fast.features))
    assert torch.allclose(fast(x), fast(TOKENS["padded at the end"]), atol=1e-6)


def test_several_batches_are_encoded_as_one_with_the_same_result():
    data = texts()
    net = Net(textcnn.build(data, generator=rng()), data.facts, vocabulary=VOCABULARY, generator=rng())
    batches = [(data.train.x,), (data.train.x.flip(0),)]
    plain = net.encode(*batches)
    install(net)
    calls = []
    net.base.register_forward_hook(lambda *_: calls.append(1))
    for ours, theirs in zip(net.encode(*batches), plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert calls == [1]
