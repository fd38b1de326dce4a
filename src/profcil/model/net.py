"""The model x → h → u → adapter → z → head → logits, cut into named blocks.

A block is what is trained, frozen, sent and averaged as one: `base` (h), `adapter` (a), `head` (W) and, during
self-supervision only, `projector` (r). The base is an ordinary module. Everything behind it is a pure function of
tensors whose parameters may carry a leading client axis, so that the same lines train one client or many at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profcil.accel import resnet
from profcil.accel.cpu.client_batch import carried
from profcil.data.bundle import Facts, Inputs
from profcil.model import augmentations
from profcil.model.layers import unit
from profcil.model.sketch import sketch

Tensors = dict[str, Tensor]
Weights = dict[str, Tensors]  # block name → tensor name → tensor

MODEL = ("base", "adapter", "head")  # what a deployed model consists of
TAIL = ("adapter", "head")  # what trains on features alone
COSINE_SCALE = 16.0


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b; a leading client axis on weight and bias must be matched by one on x."""
    if weight.dim() == 2:
        return F.linear(x, weight, bias)
    return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(-2), x, weight.mT)


class Tail:
    """Adapter and head over base features: z = u + Up(ReLU(Down(LayerNorm(u)))), logits = W z."""

    def __init__(self, adapter: Mapping[str, Tensor], head: Mapping[str, Tensor], cosine: bool = False) -> None:
        self.adapter, self.head, self.cosine = adapter, head, cosine

    def adapt(self, u: Tensor) -> Tensor:
        a = self.adapter
        v = F.layer_norm(u, u.shape[-1:]) * a["scale"].unsqueeze(-2) + a["shift"].unsqueeze(-2)
        return u + linear(linear(v, a["down"], a["down_bias"]).relu(), a["up"], a["up_bias"])

    def score(self, z: Tensor) -> Tensor:
        weight = self.head["weight"]
        if self.cosine:
            return COSINE_SCALE * linear(F.normalize(z, dim=-1), F.normalize(weight, dim=-1))
        return linear(z, weight)

    def classify(self, u: Tensor) -> Tensor:
        return self.score(self.adapt(u))


class Net(nn.Module):
    """One model of the federation; also the skeleton into which every client's weights are loaded in turn."""

    twins = True  # whether steps on it may be taken by a faster twin, such as a gradient that is written down
    lookup: Callable[..., Tensor] | None = None  # functions of many rows by replaying, where an executor can

    def __init__(
        self,
        base: nn.Module,
        facts: Facts,
        *,
        bottleneck: int = 4,
        head: str = "linear",
        augment: bool = True,
        vocabulary: int = 0,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.facts, self.augment, self.vocabulary, classes = facts, augment, vocabulary, facts.classes
        self.attached: tuple[str, ...] = ()
        d, narrow = int(base.features), max(1, int(base.features) // bottleneck)  # type: ignore[arg-type]
        self.base, self.cosine, self.classes, self.features = base, head == "cosine", classes, d
        base.register_forward_pre_hook(_units)  # whoever calls it: views, evaluation, a method of its own
        # The projector is drawn first: the shared warm-up must not depend on how adapter and head are set up.
        self.projector = nn.ParameterDict(
            {
                "first": _uniform((d, d), generator),
                "first_bias": torch.zeros(d),
                "second": _uniform((min(d, 128), d), generator),
            }
        )
        self.adapter = nn.ParameterDict(
            {
                "scale": torch.ones(d),
                "shift": torch.zeros(d),
                "down": _uniform((narrow, d), generator),
                "down_bias": torch.zeros(narrow),
                "up": torch.zeros(d, narrow),
                "up_bias": torch.zeros(d),
            }
        )
        self.head = nn.ParameterDict({"weight": _uniform((classes, d), generator)})

    def attach(self, block: str, module: nn.Module) -> None:
        """One more block, of a method's own: trained, sent and averaged like the others, where the method names it."""
        self.add_module(block, module.to(next(self.base.parameters()).device))
        self.attached = (*self.attached, block)

    @property
    def tail(self) -> Tail:
        return Tail(dict(self.adapter.items()), dict(self.head.items()), self.cosine)

    def weak(self, inputs: Inputs, rng: torch.Generator) -> Inputs:
        """Inputs as a supervised step sees them."""
        return augmentations.weak(self.facts, inputs, rng) if self.augment else inputs

    def strong(self, inputs: Inputs, rng: torch.Generator) -> Inputs:
        """One stochastic view of the inputs for the contrastive loss."""
        return augmentations.strong(self.facts, inputs, rng)

    def sketch(self, inputs: Inputs, width: int) -> Tensor:
        """Fixed random features of the inputs themselves."""
        return sketch(self.facts.modality, inputs, width, self.vocabulary)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.classify(self.base(*inputs))

    def classify(self, u: Tensor) -> Tensor:
        return self.tail.classify(u)

    def encode(self, *batches: Inputs) -> tuple[Tensor, ...]:
        """u of several batches as if one after another, each normalised by its own statistics; at once where that is
        faster."""
        if len(batches) > 1 and getattr(self.base, "joins", False) and not batches[0][0].is_cuda:
            return self.base(torch.cat([unit(x) for (x,) in batches])).chunk(len(batches))
        if len(batches) == 1 or not resnet.joins(self.base, batches):
            return tuple(self.base(*inputs) for inputs in batches)
        with resnet.groups(self.base, len(batches)):
            return self.base(torch.cat([x for (x,) in batches])).chunk(len(batches))

    def project(self, u: Tensor) -> Tensor:
        """v = r(u) / |r(u)|, the vector that the contrastive loss compares."""
        return project(dict(self.projector.items()), u)

    def weights(self, blocks: Iterable[str] = MODEL) -> Weights:
        """A copy of the blocks' tensors, buffers included."""
        return {b: {k: v.detach().clone() for k, v in self._block(b).items()} for b in blocks}

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Copies tensors into the blocks that are given; the others stay."""
        for block, tensors in weights.items():
            own = self._block(block)
            torch._foreach_copy_([own[name] for name in tensors], list(tensors.values()))

    def trainable(self, blocks: Iterable[str]) -> list[nn.Parameter]:
        return [p for b in blocks for p in getattr(self, b).parameters()]

    def _block(self, block: str) -> Tensors:
        return getattr(self, block).state_dict(keep_vars=True)


def consistency(net: Net, inputs: Inputs, rng: torch.Generator, temperature: float) -> Tensor:
    """The contrastive loss between two views of a batch, through base and projector."""
    a, b = net.encode(net.strong(inputs, rng), net.strong(inputs, rng))
    return contrast(net.project(a), net.project(b), temperature)


def project(r: Mapping[str, Tensor], u: Tensor) -> Tensor:
    """r(u) / |r(u)|, by the tensors of a projector."""
    return F.normalize(linear(linear(u, r["first"], r["first_bias"]).relu(), r["second"]), dim=-1)


@carried
def contrast(a: Tensor, b: Tensor, temperature: float) -> Tensor:
    """The symmetric contrastive consistency loss: each view must find its partner among the batch's other views."""
    similarity = a @ b.mT / temperature
    if similarity.dim() == 3:
        both = similarity.log_softmax(1) + similarity.log_softmax(2)
        return -0.5 * both.diagonal(dim1=1, dim2=2).mean(1)
    target = torch.arange(len(a), device=a.device)
    return 0.5 * (F.cross_entropy(similarity, target) + F.cross_entropy(similarity.T, target))


@carried
def cross_entropy(logits: Tensor, y: Tensor, allowed: Tensor) -> Tensor:
    """Mean cross-entropy over the last batch axis, with classes outside `allowed` masked out; one value a client."""
    logits = logits.masked_fill(~allowed.unsqueeze(-2), torch.finfo(logits.dtype).min)
    return -logits.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1).mean(-1)


def _units(base: nn.Module, inputs: Inputs) -> Inputs:
    """An encoder is never given bytes: images are numbers in [0, 1] wherever it is called."""
    return tuple(map(unit, inputs))


def _uniform(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
