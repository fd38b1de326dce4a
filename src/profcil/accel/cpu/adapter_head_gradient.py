"""The analytic gradient of `losses.classification`, for one client on a CPU. Most steps of a stream are such steps.

Autograd needs one more matrix product, twice as many small operations, and a new tensor for each result.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from profcil.model.net import Tail


class Classification:
    """The buffers of `write_gradients`: the gradient of cross_entropy(tail.classify(u), y, allowed) for a linear head.

    The head's rows are sorted by `order`: allowed classes first. Nothing is computed for the others, whose gradients
    are 0. Logits are stored [classes, rows], because matrix products are fastest with an odd length first.
    """

    def __init__(self, tail: Tail, into: Tail, rows: int, constants: Mapping[str, Tensor]) -> None:
        head = tail.head["weight"]
        head_gradient = into.head["weight"]
        allowed = int(constants["allowed"].sum())
        narrow, d = tail.adapter["down"].shape
        self.head_rows = self.order(constants).argsort()  # the row of each class in the head
        self.weights = {**tail.adapter, "head": head[:allowed]}
        self.gradients = {**into.adapter, "head": head_gradient[:allowed], "barred": head_gradient[allowed:]}
        shapes = {"v": (rows, d), "z": (rows, d), "dz": (rows, d), "h": (rows, narrow), "dh": (rows, narrow)}
        shapes |= {"x": (narrow, d), "scaled": (narrow, d), "logits": (allowed, rows), "p": (allowed, rows)}
        self.buffers = {name: head.new_empty(shape) for name, shape in shapes.items()}
        self.buffers["minus"] = head.new_empty(1, rows).fill_(-1)

    @staticmethod
    def order(constants: Mapping[str, Tensor]) -> Tensor:
        """Class ids, the allowed ones first."""
        return (~constants["allowed"]).argsort(stable=True)


def write_gradients(
    a: dict[str, Tensor], to: dict[str, Tensor], buffers: dict[str, Tensor], u: Tensor, y: Tensor
) -> None:
    """Writes the gradients of one batch of features `u` with the head rows `y` of their classes. The logits stay in
    `buffers`.

    With n = LayerNorm(u), v = scale ⊙ n + shift, h = ReLU(down v + bias) and X = dhᵀ n, the gradient of `down` is
    X ⊙ scale + Σdh shiftᵀ, and that of `scale` is the column sums of X ⊙ down. The gradient of v is not needed, which
    saves a matrix product.
    """
    n = torch.native_layer_norm(u, u.shape[1:], None, None, 1e-5)[0]
    v = buffers["v"]
    z = buffers["z"]
    h = buffers["h"]
    p = buffers["p"]
    dz = buffers["dz"]
    dh = buffers["dh"]
    x = buffers["x"]
    torch.addcmul(a["shift"], n, a["scale"], out=v)
    torch.addmm(a["down_bias"], v, a["down"].t(), out=h).relu_()
    torch.add(u, a["up_bias"], out=z).addmm_(h, a["up"].t())
    torch.mm(a["head"], z.t(), out=buffers["logits"])
    torch.softmax(buffers["logits"], 0, out=p)
    p.scatter_add_(0, y, buffers["minus"])  # ∂loss/∂logits = (softmax − one-hot) / rows
    to["barred"].zero_()
    to["head"].addmm_(p, z, beta=0, alpha=1 / len(u))
    dz.addmm_(p.t(), a["head"], beta=0, alpha=1 / len(u))
    torch.sum(dz, [0], out=to["up_bias"])
    torch.mm(dz.t(), h, out=to["up"])
    torch.mm(dz, a["up"], out=dh)
    torch.ops.aten.threshold_backward(dh, h, 0, grad_input=dh)
    torch.sum(dh, [0], out=to["down_bias"])
    torch.mm(dh.t(), n, out=x)
    torch.mul(x, a["down"], out=buffers["scaled"])
    torch.sum(buffers["scaled"], [0], out=to["scale"])
    torch.mv(a["down"].t(), to["down_bias"], out=to["shift"])
    torch.mul(to["down_bias"].unsqueeze(1), a["shift"], out=to["down"]).addcmul_(x, a["scale"])
