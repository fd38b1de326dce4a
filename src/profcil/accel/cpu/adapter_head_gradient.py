"""The analytic gradient of `losses.classification`, for one client on a CPU. Most steps of a stream are such steps.

Autograd needs one more matrix product, twice as many small operations, and a new tensor for each result.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from profcil.model.net import Tail


class Classification:
    """The buffers of `slopes`, which is the gradient of cross_entropy(tail.classify(u), y, allowed) for a linear head.

    The head's rows are sorted by `order`: allowed classes first. Nothing is computed for the others, whose gradients
    are 0. Logits are stored [classes, rows], because matrix products are fastest with an odd length first.
    """

    def __init__(self, tail: Tail, into: Tail, rows: int, constants: Mapping[str, Tensor]) -> None:
        new = tail.head["weight"].new_empty
        few = int(constants["allowed"].sum())
        narrow, d = tail.adapter["down"].shape
        self.place = self.order(constants).argsort()  # the row of each class in the head
        self.weights = {**tail.adapter, "head": tail.head["weight"][:few]}
        self.slopes = {**into.adapter, "head": into.head["weight"][:few], "barred": into.head["weight"][few:]}
        shapes = {"v": (rows, d), "z": (rows, d), "dz": (rows, d), "h": (rows, narrow), "dh": (rows, narrow)}
        shapes |= {"x": (narrow, d), "scaled": (narrow, d), "logits": (few, rows), "p": (few, rows)}
        self.room = {k: new(shape) for k, shape in shapes.items()} | {"minus": new(1, rows).fill_(-1)}

    @staticmethod
    def order(constants: Mapping[str, Tensor]) -> Tensor:
        """Class ids, the allowed ones first."""
        return (~constants["allowed"]).argsort(stable=True)


def slopes(a: dict[str, Tensor], to: dict[str, Tensor], room: dict[str, Tensor], u: Tensor, y: Tensor) -> None:
    """Writes the gradients of one batch of features `u` with the head rows `y` of their classes. The logits stay in
    `room`.

    With n = LayerNorm(u), v = scale ⊙ n + shift, h = ReLU(down v + bias) and X = dhᵀ n, the gradient of `down` is
    X ⊙ scale + Σdh shiftᵀ, and that of `scale` is the column sums of X ⊙ down. The gradient of v is not needed, which
    saves a matrix product.
    """
    n = torch.native_layer_norm(u, u.shape[1:], None, None, 1e-5)[0]
    v = room["v"]
    z = room["z"]
    h = room["h"]
    p = room["p"]
    dz = room["dz"]
    dh = room["dh"]
    x = room["x"]
    torch.addcmul(a["shift"], n, a["scale"], out=v)
    torch.addmm(a["down_bias"], v, a["down"].t(), out=h).relu_()
    torch.add(u, a["up_bias"], out=z).addmm_(h, a["up"].t())
    torch.mm(a["head"], z.t(), out=room["logits"])
    torch.softmax(room["logits"], 0, out=p)
    p.scatter_add_(0, y, room["minus"])  # ∂loss/∂logits = (softmax − one-hot) / rows
    to["barred"].zero_()
    to["head"].addmm_(p, z, beta=0, alpha=1 / len(u))
    dz.addmm_(p.t(), a["head"], beta=0, alpha=1 / len(u))
    torch.sum(dz, [0], out=to["up_bias"])
    torch.mm(dz.t(), h, out=to["up"])
    torch.mm(dz, a["up"], out=dh)
    torch.ops.aten.threshold_backward(dh, h, 0, grad_input=dh)
    torch.sum(dh, [0], out=to["down_bias"])
    torch.mm(dh.t(), n, out=x)
    torch.sum(torch.mul(x, a["down"], out=room["scaled"]), [0], out=to["scale"])
    torch.mv(a["down"].t(), to["down_bias"], out=to["shift"])
    torch.mul(to["down_bias"].unsqueeze(1), a["shift"], out=to["down"]).addcmul_(x, a["scale"])
