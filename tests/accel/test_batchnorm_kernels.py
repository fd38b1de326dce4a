"""The kernels of a normalised layer against the formulas, without a GPU: see `run_interpreted`."""

from __future__ import annotations

PROGRAM = """
import itertools, torch, torch.nn.functional as F
from profcil.accel.triton import batchnorm
from profcil.accel import resnet

torch.manual_seed(0)
last = torch.channels_last
for shape, groups, adds, rectify, readers in itertools.product(
    [(6, 16, 3, 3), (3, 80, 5, 7)], [1, 3], [False, True], [False, True], [1, 2]
):
    c = shape[1]
    x, added, *grads = ((torch.randn(shape) * 2 + 1).to(memory_format=last) for _ in range(2 + readers))
    w, b, told = torch.rand(c) + 0.5, torch.rand(c), []
    for how in (batchnorm, resnet):
        mean, var = torch.zeros(c), torch.ones(c)
        y, centre, scale = how.forward(x, w, b, added if adds else None, mean, var, 0.1, 1e-5, groups, rectify)
        back = how.backward(grads, x, y if adds else None, w, b, centre, scale, groups, rectify, adds)
        told.append([y, centre, scale, mean, var, *(t for t in back if t is not None)])
    for a, right in zip(*told, strict=True):
        torch.testing.assert_close(a, right, rtol=1e-4, atol=1e-4)
    right = F.batch_norm(x, mean, var, w, b, False, 0.0, 1e-5) + (added if adds else 0)
    found = batchnorm.apply(x, w, b, added if adds else None, mean, var, 1e-5, rectify)
    torch.testing.assert_close(found, right.relu() if rectify else right, rtol=1e-4, atol=1e-4)

x, known, told = (torch.randn(6, 80, 5, 7) * 2 + 1).to(memory_format=last).requires_grad_(), torch.rand(80), []
for by_kernels in (True, False):
    resnet.fits = lambda x: by_kernels
    mean, var = resnet.moments(x)
    told.append([mean, var, *torch.autograd.grad((mean * known).sum() + (var - known).square().sum(), x)])
for a, right in zip(*told, strict=True):
    torch.testing.assert_close(a, right, rtol=1e-4, atol=1e-5)

resnet.kernels, c = lambda: batchnorm, 80
made = lambda: (torch.randn(6, c, 5, 7) * 2 + 1).to(memory_format=last).requires_grad_()
w, b, mean, var = torch.rand(c) + 0.5, torch.rand(c), torch.randn(c), torch.rand(c) + 0.5
for adds, rectify, watched, readers, summed in itertools.product([False, True], repeat=5):
    x, added, g, h, told = made(), made(), made().detach(), made().detach(), []
    parts = x.detach().permute(0, 2, 3, 1).reshape(6, -1, c)  # equal pieces of all pixels, in order
    sums = torch.stack([parts.sum(1), parts.var(1, correction=0) * parts.shape[1]], 1).contiguous() if summed else None
    for ours in (True, False):
        if ours:
            spread = (w, b, mean, var, 1e-5, rectify, watched)
            one, two, *seen = resnet.Settled.apply(x, added if adds else None, sums, *spread)
        else:
            one = F.batch_norm(x, mean, var, w, b, False, 0.0, 1e-5) + (added if adds else 0)
            one = two = one.relu() if rectify else one
            seen = torch.var_mean(x, (0, 2, 3), correction=0)[::-1]
        loss = (one * g).sum() + ((two * h).sum() if readers else 0)
        loss = loss + (((seen[0] * w).sum() + (seen[1] - b).square().sum()) * 1e3 if watched else 0)
        found = torch.autograd.grad(loss, [x, added] if adds else [x])
        told.append([one.detach(), *found, *(t.detach() for t in (seen if watched else ()))])
    for a, right in zip(*told, strict=True):
        torch.testing.assert_close(a, right, rtol=1e-3, atol=1e-3)
x = made()
*_, seen, _ = resnet.Settled.apply(x, None, None, w, b, mean, var, 1e-5, True, True)
(only,) = torch.autograd.grad((seen * w).sum(), x)
torch.testing.assert_close(only, (w / 210)[:, None, None].expand_as(x), rtol=1e-4, atol=1e-6)
"""


def test_a_layer_s_kernels_compute_what_the_formulas_say(run_interpreted):
    run_interpreted(PROGRAM)
