"""The Triton kernels against the formulas in plain torch, and a batch of groups against separate batches."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from profcil.accel import resnet
from profcil.accel.net import FASTER
from profcil.accel.resnet import FusedBatchNorm, FusedBlock, FusedResNet18
from profcil.encoders.resnet18 import ResNet18
from profcil.model.layers import BatchNorm

cuda = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda or resnet.norm_kernels() is None, reason="needs CUDA and Triton"),
]

ROUNDING = 2e-2  # of bfloat16, relative to the largest value


def images(*shape: int, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(*shape, generator=rng, device="cuda") * 2 + 1
    return x.to(torch.bfloat16).to(memory_format=torch.channels_last)


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a.float() - b.float()).abs().max() <= ROUNDING * b.float().abs().max())


@pytest.mark.parametrize("shape", [(6, 64, 32, 32), (6, 128, 7, 5), (3, 512, 4, 4), (6, 16, 3, 3)], ids=str)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("rectify", [False, True])
@pytest.mark.parametrize("readers", [1, 2])
def test_kernels_compute_what_the_formulas_say(shape, groups, adds, rectify, readers):
    c = shape[1]
    x, added = images(*shape), images(*shape, seed=1) if adds else None
    grads = [images(*shape, seed=2 + i) for i in range(readers)]
    w, b = torch.rand(c, device="cuda") + 0.5, torch.rand(c, device="cuda")
    results = []
    for how in (resnet.norm_kernels(), resnet):
        mean, var = torch.zeros(c, device="cuda"), torch.ones(c, device="cuda")
        y, centre, scale = how.forward(x, w, b, added, mean, var, 0.1, 1e-5, groups, rectify)
        out = (results[0][0] if results else y) if adds else None
        back = how.backward(grads, x, out, w, b, centre, scale, groups, rectify, adds)
        results.append([y, centre, scale, mean, var, *(t for t in back if t is not None)])
    assert all(near(a, b) for a, b in zip(*results, strict=True))


class Plain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_groups_at_once_equal_batches_one_after_another():
    net = ResNet18(Plain(), (3, 32, 32), 16, BatchNorm).cuda().to(memory_format=torch.channels_last).train()  # type: ignore[arg-type]
    for module in net.modules():
        module.__class__ = FASTER.get(type(module), type(module))
    assert isinstance(net, FusedResNet18)
    other, parts = copy.deepcopy(net), [torch.rand(8, 3, 32, 32, device="cuda") for _ in range(3)]
    with torch.autocast("cuda", torch.bfloat16):
        assert resnet.can_join(net, [(p,) for p in parts])
        with resnet.groups(net, 3):
            one = net(torch.cat(parts))
        two = torch.cat([other(p) for p in parts])
    assert near(one, two)
    assert all(near(a, b) for a, b in zip(net.state_dict().values(), other.state_dict().values(), strict=True))
    grads = [torch.autograd.grad(u.float().square().sum(), list(n.parameters())) for u, n in ((one, net), (two, other))]
    gaps = [float((a - b).norm() / b.norm()) for a, b in zip(*grads, strict=True)]
    assert max(gaps) < 0.1  # rounding of twenty layers


tiled = pytest.mark.skipif(not cuda or resnet.conv_kernels() is None, reason="needs compute capability 9")


def convolution(channels: int, outputs: int, step: int = 1, side: int = 3) -> nn.Conv2d:
    made = nn.Conv2d(channels, outputs, side, step, side // 2, bias=False).cuda()
    return made.to(torch.bfloat16, memory_format=torch.channels_last)


STRAIGHT = [(64, 64, 64, 32, 1), (192, 128, 128, 16, 1), (64, 256, 256, 8, 1), (64, 512, 512, 4, 1)]
STEPPING = [(64, 64, 128, 32, 2), (64, 128, 256, 16, 2), (192, 256, 512, 8, 2)]
FORKING = [(number, *shape[1:4]) for number in (64, 192) for shape in STEPPING]


@tiled
@pytest.mark.parametrize("number, channels, outputs, size, step", [*STRAIGHT, *STEPPING])
def test_convolutions_are_those_of_cudnn_and_their_sums_those_of_the_output(number, channels, outputs, size, step):
    x, layer = images(number, channels, size, size).requires_grad_(), convolution(channels, outputs, step)
    with resnet.recorded():
        y, sums = resnet.convolved(layer, x)
        again = resnet.convolved(layer, x)[1]
    assert resnet.convolved(layer, x)[1] is None  # the library's
    assert sums is not None and torch.equal(again, sums)
    results = []
    for made in (y, layer(x)):
        results.append([made, *torch.autograd.grad((made * images(*made.shape, seed=1)).sum(), [x, layer.weight])])
    assert all(near(a, b) for a, b in zip(*results, strict=True))
    tiles = y.detach().float().permute(0, 2, 3, 1).reshape(len(sums), -1, outputs)
    assert near(sums[:, 0], tiles.sum(1)) and near(sums[:, 1], tiles.var(1, correction=0) * tiles.shape[1])


@tiled
@pytest.mark.parametrize("number, channels, outputs, size", FORKING)
def test_a_pair_of_convolutions_is_that_of_cudnn_and_repeats_to_the_bit(number, channels, outputs, size):
    x, layers = images(number, channels, size, size), [convolution(channels, outputs, 2, side) for side in (3, 1)]
    weights, factors = [layer.weight for layer in layers], images(2 * number, outputs, size // 2, size // 2, seed=1)
    assert all(resnet.conv_kernels().supports(x, weight, 2, 1) for weight in weights)
    leaves = [x.requires_grad_(), *weights]

    def with_gradients(y: torch.Tensor, z: torch.Tensor) -> list[torch.Tensor]:
        gradients = torch.autograd.grad([y, z], leaves, list(factors.chunk(2)))
        return [y.detach(), z.detach(), *gradients]

    y, sums, z, others = resnet.FusedConvPair.apply(x, *weights, 2)
    found, right = with_gradients(y, z), with_gradients(*(layer(x) for layer in layers))
    assert all(near(a, b) for a, b in zip(found, right, strict=True))
    for made, its in ((y, sums), (z, others)):
        tiles = made.detach().float().permute(0, 2, 3, 1).reshape(len(its), -1, outputs)
        assert near(its[:, 0], tiles.sum(1)) and near(its[:, 1], tiles.var(1, correction=0) * tiles.shape[1])
    for _ in range(5):
        y, its, z, theirs = resnet.FusedConvPair.apply(x, *weights, 2)
        again = [*with_gradients(y, z), its, theirs]
        assert all(torch.equal(a, b) for a, b in zip(again, [*found, sums, others], strict=True))


@tiled
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("channels, size", [(64, 32), (128, 16), (256, 8)])
def test_a_block_that_changes_shape_is_the_same_in_a_recording_and_outside(channels, size, groups, monkeypatch):
    """After a layer, both of whose handles it reads."""
    torch.manual_seed(0)
    before, norm = convolution(channels, channels), FusedBatchNorm(channels).cuda().train()
    block = FusedBlock(channels, 2 * channels, 2, FusedBatchNorm).cuda().to(memory_format=torch.channels_last).train()
    for part in block.modules():
        if isinstance(part, nn.Conv2d):
            part.to(torch.bfloat16)
    net = nn.ModuleList([before, norm, block])
    start, factor = images(192, channels, size, size), images(192, 2 * channels, size // 2, size // 2, seed=1)
    calls, apply = [], resnet.FusedConvPair.apply
    monkeypatch.setattr(resnet.FusedConvPair, "apply", lambda *a: calls.append(1) or apply(*a))

    def run(own: bool) -> list[torch.Tensor]:
        copied = copy.deepcopy(net)
        (before, norm, block), x = copied, start.clone().requires_grad_()
        with resnet.recorded() if own else nullcontext(), resnet.groups(copied, groups):
            handles = resnet.layer(before, norm, x)
            y, _ = block(handles)
        gradients = torch.autograd.grad(y, [x, *copied.parameters()], factor)
        return [y.detach(), *copied.buffers(), *gradients]

    one, again, other = run(True), run(True), run(False)
    assert len(calls) == 2
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    gaps = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(one, other, strict=True)]
    assert max(gaps) < 0.1  # rounding of four layers


@tiled
@pytest.mark.parametrize(
    "shape", [(64, 64, 24, 24), (63, 512, 4, 4), (64, 96, 8, 8)], ids=["size", "images", "channels"]
)
def test_sizes_without_whole_tiles_use_cudnn(shape):
    with resnet.recorded():
        assert resnet.convolved(convolution(shape[1], shape[1]), images(*shape))[1] is None


@tiled
def test_convolutions_that_fail_the_self_check_are_not_used(monkeypatch):
    own, shape, forking = (
        resnet.conv_kernels(),
        (64, 64, 32, 1, torch.device("cuda")),
        (64, 128, 16, 2, torch.device("cuda")),
    )
    assert own.agrees.__wrapped__(*shape) and own.agrees.__wrapped__(*forking)
    ahead, back, gradients = own.forward, own.input_gradient, own.filter_gradient
    wrong = {
        "forward": [lambda *a: (ahead(*a)[0] + 1, ahead(*a)[1]), lambda *a: (ahead(*a)[0], 2 * ahead(*a)[1])],
        "input_gradient": [lambda *a: back(*a) * 1.1],
        "filter_gradient": [lambda *a: gradients(*a) * 1.1, lambda *a: None],
    }
    for name, ones in wrong.items():
        for one in ones:
            with monkeypatch.context() as patch, pytest.warns(UserWarning, match="the library's are"):
                patch.setattr(own, name, one)
                assert not own.agrees.__wrapped__(*shape)
    thin = {  # wrong for 1x1 filters only
        "forward": lambda x, weight, step: ahead(x, weight * (1.1 if weight.shape[2] == 1 else 1), step),
        "input_gradient": lambda d, weight, step, *beside: back(d, weight, step),
        "filter_gradient": lambda d, x, step, side: gradients(d, x, step, side) * (1.1 if side == 1 else 1),
    }
    for name, one in thin.items():
        with monkeypatch.context() as patch, pytest.warns(UserWarning, match="the library's are"):
            patch.setattr(own, name, one)
            assert not own.agrees.__wrapped__(*forking)


@tiled
@pytest.mark.parametrize("number, channels, outputs, size, step", [*STRAIGHT, *STEPPING])
def test_convolutions_on_parallel_streams_give_the_same_bits(number, channels, outputs, size, step):
    """Other kernels on the tensor cores must not disturb them."""
    x, d = images(number, channels, size, size), images(number, outputs, size // step, size // step, seed=1)
    weight, streams = convolution(channels, outputs, step).weight.detach(), [torch.cuda.Stream() for _ in range(5)]
    own, thin = resnet.conv_kernels(), convolution(channels, outputs, step, 1).weight.detach()

    def run() -> tuple[torch.Tensor, ...]:
        made = *own.forward(x, weight, step), own.input_gradient(d, weight, step), own.filter_gradient(d, x, step)
        if step == 1:
            return made
        return (
            *made,
            *own.forward(x, thin, step),
            own.input_gradient(d, weight, step, (d, thin)),
            own.filter_gradient(d, x, step, 1),
        )

    alone = run()
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for stream in streams:
            with torch.cuda.stream(stream):
                found += [run() for _ in range(5)]
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for one in found for a, b in zip(one, alone, strict=True))


stemmed = pytest.mark.skipif(not cuda or resnet.stem_kernels() is None, reason="needs compute capability 9")


def pictures(number: int, size: int = 32, planes: bool = True, channels: int = 3) -> torch.Tensor:
    x = images(number, channels, size, size).float() + 1e-3  # which bfloat16 cannot hold
    return x.contiguous() if planes else x


@stemmed
@pytest.mark.parametrize("number, size, groups", [(64, 32, 1), (192, 32, 3), (64, 28, 1)])
@pytest.mark.parametrize("planes", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_convolution_is_that_of_cudnn_and_its_sums_those_of_the_output(number, size, groups, planes, dtype):
    x, layer = pictures(number, size, planes).to(dtype), convolution(3, 64)
    with torch.autocast("cuda", torch.bfloat16):
        with resnet.recorded():
            y, sums = resnet.convolved(layer, x, groups)
        other, none = resnet.convolved(layer, x, groups)
    assert none is None and sums is not None and not sums.requires_grad
    assert y.dtype == torch.bfloat16 and y.is_contiguous(memory_format=torch.channels_last)
    d = images(*y.shape, seed=1)
    own, right = (torch.autograd.grad(made, layer.weight, d)[0] for made in (y, other))
    assert near(y, other) and near(own, right) and own.stride() == layer.weight.stride()
    tiles = y.detach().float().permute(0, 2, 3, 1).reshape(len(sums), -1, 64)
    assert near(sums[:, 0], tiles.sum(1)) and near(sums[:, 1], tiles.var(1, correction=0) * tiles.shape[1])


@stemmed
def test_the_first_convolution_uses_cudnn_where_the_kernels_do_not_fit():
    layer, x = convolution(3, 64), pictures(64)
    shifted = nn.Conv2d(3, 64, 3, 1, 1).cuda()
    with resnet.recorded():
        with torch.autocast("cuda", torch.bfloat16):
            assert resnet.convolved(layer, x.clone().requires_grad_())[1] is None
            assert resnet.convolved(convolution(3, 64, 2), x)[1] is None
            assert resnet.convolved(shifted, x)[1] is None
            assert resnet.convolved(convolution(4, 64), pictures(64, channels=4))[1] is None
            assert resnet.convolved(layer, x[:1, :, :, :1])[1] is None
        with torch.autocast("cuda", torch.float16):
            assert resnet.convolved(layer, x)[1] is None
        assert resnet.convolved(layer, x.bfloat16())[1] is None


@stemmed
def test_a_first_convolution_that_fails_the_self_check_is_not_used(monkeypatch):
    own, kind = resnet.stem_kernels(), (3, 64, 32, 32, torch.float32, torch.device("cuda"))
    assert own.agrees.__wrapped__(*kind)
    ahead, gradients = own.forward, own.filter_gradient
    wrong = {
        "forward": [lambda *a: (ahead(*a)[0] + 1, ahead(*a)[1]), lambda *a: (ahead(*a)[0], 2 * ahead(*a)[1])],
        "filter_gradient": [lambda *a: gradients(*a) * 1.1, lambda *a: None],
    }
    for name, ones in wrong.items():
        for one in ones:
            with monkeypatch.context() as patch, pytest.warns(UserWarning, match="the library's are"):
                patch.setattr(own, name, one)
                assert not own.agrees.__wrapped__(*kind)


@stemmed
@pytest.mark.parametrize("number", [64, 192])
def test_first_convolutions_on_parallel_streams_give_the_same_bits(number):
    x, d, weight = pictures(number), images(number, 64, 32, 32, seed=1), convolution(3, 64).weight.detach()
    own, streams = resnet.stem_kernels(), [torch.cuda.Stream() for _ in range(5)]

    def run() -> tuple[torch.Tensor, ...]:
        return *own.forward(x, weight), own.filter_gradient(d, x, weight)

    alone = run()
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for stream in streams:
            with torch.cuda.stream(stream):
                found += [run() for _ in range(5)]
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for one in found for a, b in zip(one, alone, strict=True))


@stemmed
def test_a_recorded_first_layer_is_that_of_cudnn():
    """With filters in bfloat16; and replayed, it gives the same bits."""
    torch.manual_seed(0)
    layer, x = convolution(3, 64), pictures(192)
    norms, d = [FusedBatchNorm(64).cuda().train() for _ in range(3)], images(192, 64, 32, 32, seed=1)
    for norm in norms:
        norm.groups = 3

    def run(norm: FusedBatchNorm) -> list[torch.Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            y, _ = resnet.layer(layer, norm, x)
        return [y, *torch.autograd.grad(y, [layer.weight, norm.weight, norm.bias], d)]

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        plain = [*run(norms[0]), *norms[0].buffers()]
        with resnet.recorded():
            first = [*run(norms[1]), *norms[1].buffers()]
            with torch.cuda.graph(graph, stream=stream):
                replayed = run(norms[2])
    graph.replay()
    torch.cuda.synchronize()
    assert first[1].dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(first, [*replayed, *norms[2].buffers()], strict=True))
    assert all(near(a, b) for a, b in zip(first, plain, strict=True))


def test_the_same_numbers_give_the_same_bits():
    x, *grads = (images(64, 64, 16, 16, seed=i) for i in range(3))
    w = torch.ones(64, device="cuda")

    def run() -> list[torch.Tensor]:
        y, *rest = resnet.norm_kernels().forward(x, w, w, x, w.clone(), w.clone(), 0.1, 1e-5, 1, True)
        return [y, *rest, *resnet.norm_kernels().backward(grads, x, y, w, w, *rest, 1, True, True)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_the_gradients_of_two_handles_are_added_as_by_autograd():
    """One output that is read twice, and two readers of two handles, also recorded."""
    start, w = images(8, 64, 9, 9), torch.ones(64, device="cuda")
    factors = [images(8, 64, 9, 9, seed=i) for i in (1, 2)]

    def run(apart: bool) -> list[torch.Tensor]:
        x, added = start.clone().requires_grad_(), start.flip(0).clone().requires_grad_()
        one, two = resnet.Normalise.apply(x, w, w, added, None, w.clone(), w.clone(), 0.1, 1e-5, 1, True)
        readers = (one, two) if apart else (one, one)
        return list(torch.autograd.grad(sum((r * f).sum() for r, f in zip(readers, factors, strict=True)), [x, added]))

    graph, together = torch.cuda.CUDAGraph(), run(False)
    once = run(True)
    with torch.cuda.graph(graph):
        replayed = run(True)
    graph.replay()
    assert all(near(a, b) for a, b in zip(once, together, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(once, replayed, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adds", [False, True])
def test_a_layer_in_eval_mode_is_one_kernel_after_its_convolution(dtype, adds, monkeypatch):
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(16, 32, 3, padding=1, bias=False).cuda(), BatchNorm(32).cuda()
    norm.running_mean.uniform_(-1, 1), norm.running_var.uniform_(0.5, 2), nn.init.uniform_(norm.weight)
    conv, norm = conv.to(dtype, memory_format=torch.channels_last), norm.eval()
    x, added = images(6, 16, 7, 5).to(dtype), images(6, 32, 7, 5, seed=1).to(dtype) if adds else None
    calls = []
    right = resnet.layer(conv, norm, x, added)[0]  # with gradients: the library's
    own = resnet.norm_kernels().eval_forward
    monkeypatch.setattr(resnet.norm_kernels(), "eval_forward", lambda *a: calls.append(1) or own(*a))
    with torch.no_grad():
        assert near(resnet.layer(conv, norm, x, added)[0], right) and calls
    assert near(resnet.layer(conv, norm, x, added)[0], right) and len(calls) == 1
