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
        shapes = dict.fromkeys(("v", "z", "dz"), (rows, d))
        shapes |= dict.fromkeys(("h", "dh"), (rows, narrow))
        shapes |= dict.fromkeys(("x", "scaled"), (narrow, d))
        shapes |= dict.fromkeys(("logits", "p"), (allowed, rows))
        self.buffers = {name: head.new_empty(shape) for name, shape in shapes.items()}
        self.buffers["minus"] = head.new_full((1, rows), -1)

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
    n = write_logits(a, buffers, u)
    z = buffers["z"]
    h = buffers["h"]
    p = buffers["p"]
    dz = buffers["dz"]
    dh = buffers["dh"]
    torch.softmax(buffers["logits"], 0, out=p)
    p.scatter_add_(0, y, buffers["minus"])  # ∂loss/∂logits = (softmax − one-hot) / rows
    share = 1 / len(u)
    to["barred"].zero_()
    to["head"].addmm_(p, z, beta=0, alpha=share)
    dz.addmm_(p.t(), a["head"], beta=0, alpha=share)
    torch.sum(dz, [0], out=to["up_bias"])
    torch.mm(dz.t(), h, out=to["up"])
    torch.mm(dz, a["up"], out=dh)
    torch.ops.aten.threshold_backward(dh, h, 0, grad_input=dh)
    write_input_gradients(a, to, buffers, n)


def write_logits(a: dict[str, Tensor], buffers: dict[str, Tensor], u: Tensor) -> Tensor:
    """The forward pass: v, h, z and the logits. Gives n."""
    n, _, _ = torch.native_layer_norm(u, u.shape[1:], None, None, 1e-5)
    v = buffers["v"]
    z = buffers["z"]
    h = buffers["h"]
    down = a["down"]
    up = a["up"]
    torch.addcmul(a["shift"], n, a["scale"], out=v)
    torch.addmm(a["down_bias"], v, down.t(), out=h)
    h.relu_()
    torch.add(u, a["up_bias"], out=z)
    z.addmm_(h, up.t())
    torch.mm(a["head"], z.t(), out=buffers["logits"])
    return n


def write_input_gradients(a: dict[str, Tensor], to: dict[str, Tensor], buffers: dict[str, Tensor], n: Tensor) -> None:
    """The gradients of `down` with its bias, of `scale` and of `shift`, from that of h."""
    dh = buffers["dh"]
    x = buffers["x"]
    scaled = buffers["scaled"]
    down = a["down"]
    ddown = to["down"]
    dbias = to["down_bias"]
    torch.sum(dh, [0], out=dbias)
    torch.mm(dh.t(), n, out=x)
    torch.mul(x, down, out=scaled)
    torch.sum(scaled, [0], out=to["scale"])
    torch.mv(down.t(), dbias, out=to["shift"])
    torch.mul(dbias.unsqueeze(1), a["shift"], out=ddown)
    ddown.addcmul_(x, a["scale"])
