"""The kernels of a normalised layer against the formulas, without a GPU: see `interpreted`."""

from __future__ import annotations

PROGRAM = """
import itertools, torch, torch.nn.functional as F
from profcil.encoders import _kernels, fused

torch.manual_seed(0)
last = torch.channels_last
for shape, groups, adds, rectify, readers in itertools.product(
    [(6, 16, 3, 3), (3, 80, 5, 7)], [1, 3], [False, True], [False, True], [1, 2]
):
    c = shape[1]
    x, added, *grads = ((torch.randn(shape) * 2 + 1).to(memory_format=last) for _ in range(2 + readers))
    w, b, told = torch.rand(c) + 0.5, torch.rand(c), []
    for how in (_kernels, fused):
        mean, var = torch.zeros(c), torch.ones(c)
        y, centre, scale = how.forward(x, w, b, added if adds else None, mean, var, 0.1, 1e-5, groups, rectify)
        back = how.backward(grads, x, y if adds else None, w, b, centre, scale, groups, rectify, adds)
        told.append([y, centre, scale, mean, var, *(t for t in back if t is not None)])
    for a, right in zip(*told, strict=True):
        torch.testing.assert_close(a, right, rtol=1e-4, atol=1e-4)
    right = F.batch_norm(x, mean, var, w, b, False, 0.0, 1e-5) + (added if adds else 0)
    found = _kernels.apply(x, w, b, added if adds else None, mean, var, 1e-5, rectify)
    torch.testing.assert_close(found, right.relu() if rectify else right, rtol=1e-4, atol=1e-4)

x, known, told = (torch.randn(6, 80, 5, 7) * 2 + 1).to(memory_format=last).requires_grad_(), torch.rand(80), []
for by_kernels in (True, False):
    fused.fits = lambda x: by_kernels
    mean, var = fused.moments(x)
    told.append([mean, var, *torch.autograd.grad((mean * known).sum() + (var - known).square().sum(), x)])
for a, right in zip(*told, strict=True):
    torch.testing.assert_close(a, right, rtol=1e-4, atol=1e-5)
"""


def test_a_layer_s_kernels_compute_what_the_formulas_say(interpreted):
    interpreted(PROGRAM)
