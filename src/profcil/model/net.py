"""The model x → h → u → adapter → z → head → logits, divided into named blocks.

A block is trained, frozen, sent and averaged as a whole: `base` (h), `adapter` (a), `head` (W) and, for
self-supervision only, `projector` (r). The base is an ordinary torch module. Adapter, head and projector are functions
of their tensors, which may carry a leading client axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profcil.data.bundle import Examples, Facts, Inputs
from profcil.model import augmentations
from profcil.model.layers import unit

Tensors = dict[str, Tensor]
Weights = dict[str, Tensors]  # block name → tensor name → tensor

MODEL = ("base", "adapter", "head")  # the blocks of a deployed model
TAIL = ("adapter", "head")  # the blocks that can be trained on features alone
COSINE_SCALE = 16.0
CHUNK = 512  # rows in one call where a function is applied to many


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b. Where weight and bias have a leading client axis, x must have one too."""
    if weight.dim() == 2:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.bmm(x, weight.mT)
    return torch.baddbmm(bias.unsqueeze(-2), x, weight.mT)


class Tail:
    """Adapter and head over base features: z = u + Up(ReLU(Down(LayerNorm(u)))), logits = W z."""

    def __init__(self, adapter: Mapping[str, Tensor], head: Mapping[str, Tensor], cosine: bool = False) -> None:
        self.adapter = adapter
        self.head = head
        self.cosine = cosine

    def adapt(self, u: Tensor) -> Tensor:
        a = self.adapter
        scale = a["scale"].unsqueeze(-2)
        shift = a["shift"].unsqueeze(-2)
        v = F.layer_norm(u, u.shape[-1:]) * scale + shift
        hidden = linear(v, a["down"], a["down_bias"]).relu()
        return u + linear(hidden, a["up"], a["up_bias"])

    def score(self, z: Tensor) -> Tensor:
        weight = self.head["weight"]
        if self.cosine:
            cosine = linear(F.normalize(z, dim=-1), F.normalize(weight, dim=-1))
            return COSINE_SCALE * cosine
        return linear(z, weight)

    def classify(self, u: Tensor) -> Tensor:
        return self.score(self.adapt(u))


class Net(nn.Module):
    """The global model, and the skeleton into which the weights of each client are loaded in turn."""

    bf16 = False  # whether the encoder's products are computed in bfloat16

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
        self.facts = facts
        self.augment = augment
        self.vocabulary = vocabulary
        self.classes = facts.classes
        self.attached: tuple[str, ...] = ()
        self.cosine = head == "cosine"
        d = self.features = int(base.features)  # type: ignore[arg-type]
        narrow = max(1, d // bottleneck)
        self.base = base
        base.register_forward_pre_hook(_units)
        # The projector is drawn first: the shared warm-up must not depend on how adapter and head are set up.
        self.projector = _new_projector(d, generator)
        self.adapter = _new_adapter(d, narrow, generator)
        weight = _uniform((facts.classes, d), generator)
        self.head = nn.ParameterDict({"weight": weight})

    def attach(self, block: str, module: nn.Module) -> None:
        """Adds a block of a method: trained, sent and averaged like the others, where the method names it."""
        self.add_module(block, module.to(self.device))
        self.attached = (*self.attached, block)

    @property
    def device(self) -> torch.device:
        return next(self.base.parameters()).device

    @property
    def tail(self) -> Tail:
        adapter = dict(self.adapter.items())
        head = dict(self.head.items())
        return Tail(adapter, head, self.cosine)

    # -- views and passes ---------------------------------------------------------------------------------------------

    def weak(self, inputs: Inputs, rng: torch.Generator) -> Inputs:
        """A weakly augmented view of the inputs, for supervised steps."""
        return augmentations.weak(self.facts, inputs, rng) if self.augment else inputs

    def strong(self, inputs: Inputs, rng: torch.Generator) -> Inputs:
        """A strongly augmented view of the inputs, for the contrastive loss."""
        return augmentations.strong(self.facts, inputs, rng)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.classify(self.base(*inputs))

    def encode(self, *batches: Inputs) -> tuple[Tensor, ...]:
        """u of several batches, each normalised by its own statistics."""
        return tuple(self.base(*inputs) for inputs in batches)

    def classify(self, u: Tensor) -> Tensor:
        return self.tail.classify(u)

    def project(self, u: Tensor) -> Tensor:
        """v = r(u) / |r(u)|, the vector that the contrastive loss compares."""
        return project(dict(self.projector.items()), u)

    @torch.no_grad()
    def embed(self, examples: Examples, index: Tensor) -> Tensor:
        """u = h(x) for some examples under the loaded base, in evaluation mode and in chunks that bound the memory."""
        self.eval()
        chunks = index.split(examples.chunk)
        features = [self.base(*examples.inputs(chunk)) for chunk in chunks]
        return torch.cat(features)

    @torch.no_grad()
    def map_rows(self, function: Callable[[Tensor], Tensor], rows: Tensor, key: object) -> Tensor:
        """Applies a function of the loaded model to many rows; no row depends on another. `key` identifies the
        function: a faster version may reuse what it recorded for the same key."""
        mapped = [function(chunk) for chunk in rows.split(CHUNK)]
        return torch.cat(mapped)

    # -- precision ----------------------------------------------------------------------------------------------------

    def set_precision(self, precision: str) -> None:
        """`auto` is bf16 for convolutions of images on a GPU, else float32."""
        convolves = any(isinstance(m, nn.Conv2d) for m in self.base.modules())
        suits_bf16 = convolves and self.device.type == "cuda"
        self.bf16 = precision == "bf16" or (precision == "auto" and suits_bf16)

    def autocast(self) -> torch.autocast:
        """The precision in which this model is trained. Parameters, gradients and moments stay in float32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    # -- weights ------------------------------------------------------------------------------------------------------

    def weights(self, blocks: Iterable[str] = MODEL) -> Weights:
        """A copy of the blocks' tensors, buffers included."""
        copies: Weights = {}
        for block in blocks:
            tensors = self._block(block)
            copies[block] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        return copies

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Copies tensors into the given blocks; the others stay."""
        for block, tensors in weights.items():
            own = self._block(block)
            targets = [own[name] for name in tensors]
            torch._foreach_copy_(targets, list(tensors.values()))

    def trainable(self, blocks: Iterable[str]) -> list[nn.Parameter]:
        parameters: list[nn.Parameter] = []
        for block in blocks:
            parameters += getattr(self, block).parameters()
        return parameters

    def _block(self, block: str) -> Tensors:
        tensors: Tensors = getattr(self, block).state_dict(keep_vars=True)
        return tensors


def project(r: Mapping[str, Tensor], u: Tensor) -> Tensor:
    """r(u) / |r(u)|, from the tensors of a projector."""
    hidden = linear(u, r["first"], r["first_bias"]).relu()
    projected = linear(hidden, r["second"])
    return F.normalize(projected, dim=-1)


def _units(base: nn.Module, inputs: Inputs) -> Inputs:
    """Scales images from bytes to [0, 1] before any call of the encoder."""
    return tuple(map(unit, inputs))


def _new_projector(d: int, generator: torch.Generator) -> nn.ParameterDict:
    width = min(d, 128)
    first = _uniform((d, d), generator)
    second = _uniform((width, d), generator)
    return nn.ParameterDict({"first": first, "first_bias": torch.zeros(d), "second": second})


def _new_adapter(d: int, narrow: int, generator: torch.Generator) -> nn.ParameterDict:
    """An adapter that changes no feature: its last layer is zero."""
    normalisation = {"scale": torch.ones(d), "shift": torch.zeros(d)}
    down = {"down": _uniform((narrow, d), generator), "down_bias": torch.zeros(narrow)}
    up = {"up": torch.zeros(d, narrow), "up_bias": torch.zeros(d)}
    return nn.ParameterDict({**normalisation, **down, **up})


def _uniform(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
