"""What every base encoder promises, and what each of them is."""

from __future__ import annotations

import builtins
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from profcil import registry
from profcil.data.bundle import Bundle, Examples, Facts, Nodes, Rows
from profcil.encoders import convnet, gat, resnet18, textcnn
from profcil.errors import ConfigError, DataError
from profcil.model import augmentations
from profcil.model.layers import BatchNorm
from profcil.randomness import torch_generator


def bundle(modality: str, examples: Examples, **more: object) -> Bundle:
    facts = Facts("toy", "Toy", modality, 2, None, None, views=("crop", "flip", "jitter"), encoder="right")
    return Bundle(facts, examples, examples, None, ("a", "b"), **more)


def images(channels: int = 3, size: int = 32, n: int = 6) -> Bundle:
    shape = (n, channels, size, size)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch_generator(0, "images"))
    half, quarter = (0.5,) * channels, (0.25,) * channels
    return bundle("image", Rows(x, torch.arange(n) % 2), mean=half, std=quarter)


def texts(n: int = 6, length: int = 10) -> Bundle:
    x = torch.randint(2, 30, (n, length), generator=torch_generator(0, "texts"))
    x[:, 7:] = 0
    return bundle("text", Rows(x, torch.arange(n) % 2), vocabulary=30)


def graph(n: int = 6) -> Bundle:
    x = torch.rand(n, 5, generator=torch_generator(0, "graph"))
    ends = torch.tensor([[0, 0, 1, 2, 3], [1, 2, 3, 3, 4]])  # node 5 has no neighbour
    return bundle("graph", Nodes(x, torch.cat([ends, ends.flip(0)], 1), torch.arange(n) % 2, torch.arange(n)))


def table(n: int = 6) -> Bundle:
    x = torch.randn(n, 7, generator=torch_generator(0, "table"))
    return bundle("table", Rows(x, torch.arange(n) % 2), mean=(0.5,) * 7, std=(2.0,) * 7)


def fresh(*address: object) -> torch.Generator:
    return torch_generator(1, "encoder", *address)


def fitting(name: str) -> Bundle | None:
    """The first toy dataset this encoder accepts: the tests need not know what it reads."""
    for made in (images(3, 8), texts(), graph(), table()):
        try:
            registry.find("encoders", name).build(made, generator=fresh())
            return made
        except ConfigError:
            continue
    return None


ENCODERS = registry.names("encoders")  # a file in that folder without `build` must be listed in HELPERS


@pytest.fixture(params=ENCODERS)
def case(request) -> tuple[nn.Module, Bundle]:
    made = fitting(request.param)
    assert made is not None, f"no toy dataset fits the encoder {request.param}"
    return registry.find("encoders", request.param).build(made, generator=fresh()), made


def test_the_encoders_of_all_modalities_are_there():
    assert {"convnet", "gat", "perceptron", "resnet18", "textcnn"} <= set(ENCODERS)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 6])
def test_any_batch_gives_one_row_per_example(case, batch, training):
    encoder, data = case
    u = encoder.train(training)(*data.train.inputs(torch.arange(batch)))
    assert u.shape == (batch, encoder.features)
    assert u.isfinite().all()


def test_views_can_be_encoded_and_every_parameter_learns(case):
    encoder, data = case
    for view in (augmentations.weak, augmentations.strong):
        u = encoder.train()(*view(data.facts, data.train.inputs(torch.arange(6)), fresh("view")))
        (u * torch.randn(u.shape, generator=fresh("loss"))).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in encoder.parameters())


def test_same_input_same_bits_and_no_row_depends_on_the_batch(case):
    encoder, data = case
    encoder.eval()
    whole, again = (encoder(*data.train.inputs(torch.arange(6))) for _ in range(2))
    assert torch.equal(whole, again)
    assert torch.allclose(whole[2:4], encoder(*data.train.inputs(torch.arange(2, 4))), atol=1e-5)


def test_state_is_floating_and_loads_from_a_plain_dict(case):
    encoder, data = case
    state = {key: value.clone() for key, value in encoder.state_dict().items()}
    assert all(value.is_floating_point() for value in state.values())
    build = registry.find("encoders", type(encoder).__module__.rsplit(".", 1)[-1]).build
    other = build(data, generator=fresh("other"))
    other.load_state_dict(state)
    inputs = data.train.inputs(torch.arange(6))
    assert torch.equal(encoder.eval()(*inputs), other.eval()(*inputs))


def test_weights_come_from_the_generator_alone(case):
    encoder, data = case
    build = registry.find("encoders", type(encoder).__module__.rsplit(".", 1)[-1]).build
    with torch.random.fork_rng(devices=[]):
        torch.rand(100)  # somewhere else in the global stream
        before = torch.get_rng_state()
        equal, other = build(data, generator=fresh()), build(data, generator=fresh("other"))
        assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(encoder.parameters(), equal.parameters(), strict=True))
    pairs = zip(encoder.parameters(), other.parameters(), strict=True)
    assert all(p.dim() == 1 or not torch.equal(p, q) for p, q in pairs)


def test_a_dataset_of_another_kind_is_refused_with_advice(case):
    encoder, data = case
    build = registry.find("encoders", type(encoder).__module__.rsplit(".", 1)[-1]).build
    for other in (images(), texts(), graph(), table()):
        if other.facts.modality != data.facts.modality:
            with pytest.raises(ConfigError, match="choose right"):
                build(other, generator=fresh())


# --- images ---------------------------------------------------------------------------------------------------------


def test_resnet18_has_its_known_size():
    encoder = resnet18.build(images(), generator=fresh())
    assert encoder.features == 512
    assert sum(p.numel() for p in encoder.parameters()) == 11_168_832
    assert encoder.stem.stride == (1, 1)
    assert resnet18.build(images(size=64), generator=fresh()).stem.stride == (2, 2)
    assert resnet18.build(images(), generator=fresh(), width=8).features == 64


@pytest.mark.parametrize("module", [resnet18, convnet])
def test_pixels_are_scaled_and_standardised(module):
    data = images(size=8)
    encoder = module.build(data, generator=fresh(), width=8).eval()
    x = data.train.x
    assert torch.allclose(encoder.pixels(x), (x.float() / 255 - 0.5) / 0.25)
    assert torch.equal(encoder(x), encoder(x.float() / 255))
    assert not any("mean" in key and "running" not in key for key in encoder.state_dict())
    with pytest.raises(DataError, match="one of each per channel"):
        module.build(replace(data, mean=()), generator=fresh())


def test_batch_norm_learns_running_statistics_and_falls_back_on_them():
    norm = BatchNorm(3).train()
    norm(torch.randn(8, 3, 2, 2, generator=fresh()) + 5)
    mean, var = norm.running_mean.clone(), norm.running_var.clone()
    assert (mean > 0.3).all()
    x = torch.ones(1, 3, 1, 1)
    alone = norm(x)
    assert torch.equal(alone, norm.eval()(x))
    assert torch.equal(norm.running_mean, mean)
    assert torch.equal(norm.running_var, var)


@pytest.mark.parametrize(("module", "norms"), [(resnet18, {"batch", "group"}), (convnet, {"batch", "group", "none"})])
def test_norm_is_a_setting_and_an_unknown_one_is_an_error(module, norms):
    for norm in norms:
        encoder = module.build(images(size=8), generator=fresh(), norm=norm, width=8).train()
        assert encoder(images(size=8).train.x).isfinite().all()
        assert any("running" in key for key in encoder.state_dict()) == (norm == "batch")
        assert any(isinstance(part, nn.GroupNorm) for part in encoder.modules()) == (norm == "group")
    with pytest.raises(ConfigError, match="unknown norm 'groop'"):
        module.build(images(size=8), generator=fresh(), norm="groop")


@pytest.mark.parametrize(("module", "data"), [(textcnn, texts()), (gat, graph())])
def test_a_norm_that_would_change_nothing_is_an_error(module, data):
    with pytest.raises(ConfigError, match="changes nothing"):
        module.build(data, generator=fresh(), norm="group")


# --- texts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("widths", [(1, 2, 3), (3, 4, 5)])
def test_textcnn_equals_a_convolution_over_the_real_tokens(widths):
    encoder = textcnn.build(texts(), generator=fresh(), widths=widths)
    assert encoder.features == 384
    for conv in encoder.convolutions:
        nn.init.normal_(conv.bias, generator=fresh("bias"))
    x = texts().train.x[:1, :7]
    parts = []
    for k, conv in zip(widths, encoder.convolutions, strict=True):
        embedded = F.pad(encoder.embedding(x).transpose(1, 2), (0, k - 1))
        parts.append(F.relu(conv(embedded)).amax(2))
    assert torch.allclose(encoder(x), torch.cat(parts, 1), atol=1e-5)


def test_textcnn_ignores_padding_and_empty_texts_are_zero():
    encoder = textcnn.build(texts(), generator=fresh())
    for conv in encoder.convolutions:
        nn.init.ones_(conv.bias)  # a window of padding alone would give 1
    x = texts().train.x
    assert torch.allclose(encoder(x), encoder(F.pad(x, (0, 9))), atol=1e-6)
    assert torch.allclose(encoder(x), encoder(x[:, :7]), atol=1e-6)
    assert torch.equal(encoder(torch.zeros(2, 5, dtype=torch.long)), torch.zeros(2, 384))


def test_textcnn_padding_embedding_stays_zero():
    encoder = textcnn.build(texts(), generator=fresh())
    optimizer = torch.optim.AdamW(encoder.parameters(), 0.1)
    encoder(texts().train.x).sum().backward()
    optimizer.step()
    assert torch.equal(encoder.embedding.weight[0], torch.zeros(128))


# --- graphs ---------------------------------------------------------------------------------------------------------


def attention(conv: nn.Module, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
    """One GAT layer by the book, with a dense adjacency (row listens to column)."""
    h = (x @ conv.lin.weight.T).view(len(x), conv.heads, -1)
    ours, theirs = (h * conv.att_dst).sum(-1), (h * conv.att_src).sum(-1)
    scores = F.leaky_relu(ours[:, None] + theirs[None], 0.2).masked_fill(~adjacency[..., None], -torch.inf)
    return torch.einsum("ijh,jhc->ihc", scores.softmax(1), h).flatten(1) + conv.bias


def test_gat_equals_dense_attention():
    data = graph()
    encoder = gat.build(data, generator=fresh())
    x, edges, targets = data.train.inputs(torch.tensor([5, 0, 3]))
    adjacency = torch.eye(6, dtype=torch.bool)
    adjacency[edges[1], edges[0]] = True
    expected = attention(encoder.second, F.elu(attention(encoder.first, x, adjacency)), adjacency)
    assert encoder.features == 64
    assert torch.allclose(encoder(x, edges, targets), expected[targets], atol=1e-5)


def test_gat_follows_a_renaming_of_the_nodes():
    encoder = gat.build(graph(), generator=fresh())
    x, edges, targets = graph().train.inputs(torch.arange(6))
    order = torch.randperm(6, generator=fresh("order"))
    place = order.argsort()
    renamed = encoder(x[order], place[edges], place[targets])
    assert torch.allclose(encoder(x, edges, targets), renamed, atol=1e-5)


def test_gat_sees_self_edges_as_no_edges():
    encoder = gat.build(graph(), generator=fresh())
    x, edges, targets = graph().train.inputs(torch.arange(6))
    dropped = torch.arange(edges.shape[1]) % 3 == 0
    redirected = torch.where(dropped, edges[:1], edges)
    assert torch.allclose(encoder(x, redirected, targets), encoder(x, edges[:, ~dropped], targets), atol=1e-6)
    assert encoder(x, edges[:, :0], targets).isfinite().all()


def test_gat_sees_dropped_columns_as_zeros():
    encoder = gat.build(graph(), generator=fresh())
    x, edges, targets = graph().train.inputs(torch.arange(6))
    kept = torch.arange(x.shape[1]) % 2 == 0
    dropped = encoder(x, edges, targets, kept)
    assert torch.allclose(dropped, encoder(x * kept, edges, targets), atol=1e-6)
    assert not torch.allclose(dropped, encoder(x, edges, targets), atol=1e-3)


def test_gat_is_deterministic_in_training():
    encoder = gat.build(graph(), generator=fresh()).train()
    inputs = graph().train.inputs(torch.arange(6))
    assert torch.equal(encoder(*inputs), encoder(*inputs))


def test_gat_without_torch_geometric_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def missing(name: str, *rest: object, **more: object) -> object:
        if name.startswith("torch_geometric"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"pip install 'profcil\[graph\]'"):
        gat.build(graph(), generator=fresh())
