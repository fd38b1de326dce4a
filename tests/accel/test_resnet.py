"""Normalisation, sum and ReLU as one function: its formulas against autograd, for one group and several."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from profcil.accel import resnet
from profcil.accel.net import FASTER
from profcil.accel.resnet import FusedBatchNorm, FusedBlock, FusedResNet18
from profcil.encoders.resnet18 import ResNet18
from profcil.model.layers import BatchNorm


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]))


def separately(x, weight, bias, added, mean, var, groups, rectify):
    """The results of the groups one after another, by torch's own functions."""
    y = torch.cat([F.batch_norm(part, mean, var, weight, bias, True, 0.1, 1e-5) for part in x.chunk(groups)])
    y = y if added is None else y + added
    return y.relu() if rectify else y


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("rectify", [False, True])
@pytest.mark.parametrize("read", [(0,), (1,), (0, 1)], ids=["first handle", "second handle", "both"])
def test_output_gradients_and_running_statistics_are_those_of_separate_batches(groups, adds, rectify, read):
    start = [3 + 2 * drawn(6, 4, 5, 5), 1 + drawn(4), drawn(1, 4)[0], drawn(6, 4, 5, 5).flip(0)]
    results = []
    for fast in (True, False):
        x, w, b, added = (t.clone().requires_grad_() for t in start)
        mean, var = torch.zeros(4), torch.ones(4)
        extra = added if adds else None
        if fast:
            handles = resnet.Normalise.apply(x, w, b, extra, None, mean, var, 0.1, 1e-5, groups, rectify)
        else:
            handles = [separately(x, w, b, extra, mean, var, groups, rectify)] * 2
        wanted = [x, w, b, added] if adds else [x, w, b]
        loss = sum((handles[i] * drawn(6 + i, 4, 5, 5)[:6]).sum() for i in read)
        results.append([*handles, mean, var, *torch.autograd.grad(loss, wanted)])
    for fast, plain in zip(*results, strict=True):
        assert torch.allclose(fast, plain, atol=2e-5)


def test_handles_share_their_memory_and_stored_gradients_are_rounded():
    start, w = drawn(2, 4, 3, 3), torch.ones(4)
    x, added = (t.clone().requires_grad_() for t in (start, start.flip(0)))
    one, two = resnet.Normalise.apply(x, w, w, added, None, w.clone(), w.clone(), 0.1, 1e-5, 1, True)
    assert one.data_ptr() == two.data_ptr() and torch.equal(one, two)
    low, grads = start.bfloat16(), [drawn(2, 4, 3, 3).bfloat16(), drawn(3, 4, 3, 3)[:2].bfloat16()]
    *_, gradient = resnet.backward(grads, low, low, w, w, w[None], w[None], 1, True, True)
    assert torch.equal(gradient, (grads[0] + grads[1]) * (low > 0))


def test_a_residual_network_has_the_same_gradients_either_way(monkeypatch):
    """The plain network, the fused one without kernels, and the fused one with formulas in place of kernels."""
    with torch.random.fork_rng():  # other random weights could make rounding larger
        torch.manual_seed(0)
        net = ResNet18(nn.Identity(), (3, 8, 8), 4, BatchNorm).train()  # type: ignore[arg-type]
    x = drawn(6, 3, 8, 8)
    plain = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    for module in net.modules():
        module.__class__ = FASTER.get(type(module), type(module))
    assert isinstance(net, FusedResNet18) and all(isinstance(block, FusedBlock) for block in net.blocks)
    for kernels in (False, True):
        monkeypatch.setattr(resnet, "fits", lambda x, kernels=kernels: kernels)
        fused = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
        for one, other in zip(plain, fused, strict=True):
            assert (one - other).norm() < 1e-4 * one.norm()


class PlainKernels:
    """Torch's convolution in place of the kernels."""

    @staticmethod
    def supports(x, weight, step, groups):
        return True

    @staticmethod
    def forward(x, weight, step):
        return F.conv2d(x, weight, None, step, weight.shape[2] // 2), torch.zeros(1, 2, len(weight))

    @staticmethod
    def input_gradient(d, weight, step, beside=None):
        shape = (*d.shape[:1], weight.shape[1], *(n * step for n in d.shape[2:]))
        dx = torch.nn.grad.conv2d_input(shape, weight, d, step, 1)
        return dx if beside is None else dx + torch.nn.grad.conv2d_input(shape, beside[1], beside[0], step, 0)

    @staticmethod
    def filter_gradient(d, x, step, side=3):
        return torch.nn.grad.conv2d_weight(x, (d.shape[1], x.shape[1], side, side), d, step, side // 2)


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)], ids=["both", "inputs", "weights"])
def test_a_fused_convolution_has_the_gradients_of_torch_and_only_those_needed(monkeypatch, step, wanted):
    monkeypatch.setattr(resnet, "conv_kernels", lambda: PlainKernels)
    x, weight = drawn(2, 4, 8, 8).requires_grad_(wanted[0]), drawn(5, 4, 3, 3).requires_grad_(wanted[1])
    leaves = [t for t in (x, weight) if t.requires_grad]
    y, sums = resnet.FusedConv3x3.apply(x, weight, step)
    assert not sums.requires_grad
    own = torch.autograd.grad((y * drawn(*y.shape)).sum(), leaves)
    plain = torch.autograd.grad((F.conv2d(x, weight, None, step, 1) * drawn(*y.shape)).sum(), leaves)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(own, plain, strict=True))
    thin = drawn(5, 4, 1, 1).requires_grad_(wanted[1])
    leaves = [t for t in (x, thin) if t.requires_grad]
    made = [resnet.StridedConv1x1.apply(x, thin, step), F.conv2d(x, thin, None, step)]
    own, plain = (torch.autograd.grad((y * drawn(*y.shape)).sum(), leaves) for y in made)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(own, plain, strict=True))


@pytest.mark.parametrize("wanted", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=["all", "inputs", "3x3", "1x1"])
@pytest.mark.parametrize("read", [(0,), (1,), (0, 1)], ids=["3x3", "1x1", "both"])
def test_a_pair_of_convolutions_has_the_gradients_of_torch(monkeypatch, wanted, read):
    monkeypatch.setattr(resnet, "conv_kernels", lambda: PlainKernels)
    start = drawn(2, 4, 8, 8), drawn(5, 4, 3, 3), drawn(5, 4, 1, 1)
    x, weight, thin = (t.requires_grad_(bool(wants)) for t, wants in zip(start, wanted, strict=True))
    y, sums, z, others = resnet.FusedConvPair.apply(x, weight, thin, 2)
    assert not sums.requires_grad and not others.requires_grad
    leaves, factors = [t for t in (x, weight, thin) if t.requires_grad], (drawn(*y.shape), drawn(*y.shape).flip(0))
    own = torch.autograd.grad(sum(((y, z)[i] * factors[i]).sum() for i in read), leaves)
    right = F.conv2d(x, weight, None, 2, 1), F.conv2d(x, thin, None, 2)
    plain = torch.autograd.grad(sum((right[i] * factors[i] * (i in read)).sum() for i in (0, 1)), leaves)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(own, plain, strict=True))


@pytest.mark.parametrize("norm", [FusedBatchNorm, lambda channels: nn.GroupNorm(2, channels)], ids=["batch", "group"])
@pytest.mark.parametrize("record", [False, True])
def test_a_block_that_changes_shape_is_its_two_layers_and_its_shortcut(monkeypatch, norm, record):
    """To the bit where the layers are computed separately, up to rounding where both convolutions are one function."""
    block, start = FusedBlock(4, 8, 2, norm).train(), drawn(2, 4, 8, 8)
    other = copy.deepcopy(block)
    assert {"shortcut.0.weight", "shortcut.1.weight", "shortcut.1.bias"} <= block.state_dict().keys()
    if record:
        monkeypatch.setattr(resnet, "conv_kernels", lambda: PlainKernels)
        monkeypatch.setattr(resnet, "fits", lambda x: True)

    def run(how, net: nn.Module) -> tuple[list[torch.Tensor], bool]:
        """Outputs, gradients and statistics; and whether the second handle was not used."""
        handles = [start.clone().requires_grad_() for _ in range(2)]
        y = how(handles)
        *gradients, one, two = torch.autograd.grad(y.square().sum(), [*net.parameters(), *handles], allow_unused=True)
        return [y, *gradients, one if two is None else one + two, *net.buffers()], two is None

    def apart(handles) -> torch.Tensor:
        y, _ = resnet.layer(other.conv1, other.norm1, handles[0])
        added, _ = resnet.layer(*other.shortcut, handles[1], rectify=False)
        return resnet.layer(other.conv2, other.norm2, y, added)[0]

    with resnet.recorded() if record else nullcontext():
        found, alone = run(lambda handles: block(handles)[0], block)
    right, never = run(apart, other)
    assert alone == record and not never
    same = (lambda a, b: torch.allclose(a, b, atol=1e-4)) if record else torch.equal
    assert all(same(a, b) for a, b in zip(found, right, strict=True))


def test_fused_convolutions_are_used_in_recorded_steps_only(monkeypatch):
    monkeypatch.setattr(resnet, "conv_kernels", lambda: PlainKernels)
    monkeypatch.setattr(resnet, "fits", lambda x: True)
    convolution, x = nn.Conv2d(4, 5, 3, 1, 1, bias=False), drawn(2, 4, 8, 8)
    plain, none = resnet.convolved(convolution, x)
    with resnet.recorded():
        own, sums = resnet.convolved(convolution, x)
    assert none is None and sums is not None and torch.equal(plain, own)
    with resnet.recorded():  # the kernels have no bias
        shifted = nn.Conv2d(4, 5, 3, 1, 1)
        assert torch.equal(resnet.convolved(shifted, x)[0], shifted(x))
    assert resnet.convolved(convolution, x)[1] is None


class PlainStem:
    """Torch's convolution in place of the kernels of the first one."""

    def __init__(self):
        self.taken, self.asked = True, []

    def supports(self, x, weight, *shape):
        self.asked.append(shape)
        return self.taken

    @staticmethod
    def forward(x, weight):
        return F.conv2d(x.to(weight.dtype), weight, None, 1, 1), torch.zeros(1, 2, len(weight))

    @staticmethod
    def filter_gradient(d, x, weight):
        return torch.nn.grad.conv2d_weight(x.to(weight.dtype), weight.shape, d, 1, 1)


def test_the_first_convolution_rounds_the_images(monkeypatch):
    monkeypatch.setattr(resnet, "fits_stem", lambda x: True)
    convolution, x, stem = nn.Conv2d(3, 5, 3, 1, 1, bias=False), drawn(2, 3, 8, 8), PlainStem()
    monkeypatch.setattr(resnet, "stem_kernels", lambda: stem)
    assert resnet.convolved(convolution, x)[1] is None  # nothing is recorded
    with resnet.recorded():
        y, sums = resnet.convolved(convolution, x, 2)
        assert resnet.convolved(nn.Conv2d(3, 5, 3, 1, 1), x)[1] is None  # a bias
    assert sums is not None and not sums.requires_grad and stem.asked == [(1, (1, 1), 2)]
    plain = F.conv2d(x.bfloat16(), convolution.weight.bfloat16(), None, 1, 1)
    assert y.dtype == torch.bfloat16 and torch.equal(y, plain)
    own, right = (torch.autograd.grad((z * drawn(*y.shape)).sum(), convolution.weight)[0] for z in (y, plain))
    assert own.dtype == torch.float32 and torch.allclose(own, right, atol=1e-2 * float(right.abs().max()))
    stem.taken = False
    with resnet.recorded():
        z, none = resnet.convolved(convolution, x)
    assert none is None and torch.equal(z, convolution(x))


@pytest.mark.parametrize("kind", [BatchNorm, FusedBatchNorm])
def test_without_kernels_the_layers_run_one_by_one(kind):
    convolution, norm, x = nn.Conv2d(4, 4, 3, 1, 1), kind(4).train(), drawn(2, 4, 3, 3)
    y, other = convolution(x), BatchNorm(4).train()
    assert torch.equal(resnet.layer(convolution, norm, x, x)[0], (other(y) + x).relu())
    one, two = resnet.layer(convolution, norm.eval(), x, rectify=False)
    assert one is two and torch.equal(one, other.eval()(y))
    assert not resnet.can_join(norm, [(x,), (x,)])


@pytest.mark.parametrize("kind", [BatchNorm, FusedBatchNorm])
def test_an_observer_is_called_with_the_layer_and_its_input(kind):
    """The fused layer passes the moments of the input, too."""
    norm, x, seen = kind(4).eval(), 3 + drawn(6, 4, 5, 5), []
    assert torch.equal(norm(x), BatchNorm(4).eval()(x))
    norm.observer = lambda *given: seen.append(given)
    norm(x)
    ((layer, given, *moments),) = seen
    assert layer is norm and given is x and len(moments) == (kind is FusedBatchNorm)
    for mean, var in moments:
        torch.testing.assert_close(mean, x.mean((0, 2, 3)))
        torch.testing.assert_close(var, x.var((0, 2, 3), correction=0))


def test_groups_are_set_for_a_while_only():
    norm = FusedBatchNorm(4)
    with pytest.raises(RuntimeError), resnet.groups(norm, 3):
        assert norm.groups == 3
        raise RuntimeError
    assert norm.groups == 1
