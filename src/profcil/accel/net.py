"""The model with faster versions of its parts. Parameters, their names and, up to rounding, results are the same."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from profcil.accel import augmentations, resnet
from profcil.accel.cpu import sparse_linear
from profcil.accel.cpu.stacked_convnet import StackedConvNet
from profcil.accel.cuda_graphs.recorded_features import RecordedFeatures
from profcil.accel.resnet import FusedBatchNorm, FusedBlock, FusedResNet18
from profcil.accel.textcnn import FastTextCNN
from profcil.data.bundle import Examples, Inputs, Rows
from profcil.encoders.convnet import ConvNet
from profcil.encoders.gat import GAT
from profcil.encoders.resnet18 import ResidualBlock, ResNet18
from profcil.encoders.textcnn import TextCNN
from profcil.model.layers import BatchNorm, unit
from profcil.model.net import Net


class SparseGAT(GAT):
    """`GAT` that skips the zeros of node features on a CPU."""

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        return sparse_linear.product(x, weight)


FASTER: dict[type[nn.Module], type[nn.Module]] = {
    ResNet18: FusedResNet18,
    ResidualBlock: FusedBlock,
    BatchNorm: FusedBatchNorm,
    ConvNet: StackedConvNet,
    TextCNN: FastTextCNN,
    GAT: SparseGAT,
}


class AcceleratedNet(Net):
    """`Net` with faster views, passes over several batches, and features."""

    recorded_features: RecordedFeatures | None = None  # recorded passes over many rows, on a GPU

    def weak(self, inputs: Inputs, rng: torch.Generator) -> Inputs:
        return augmentations.weak(self.facts, inputs, rng) if self.augment else inputs

    def strong(self, inputs: Inputs, rng: torch.Generator) -> Inputs:
        return augmentations.strong(self.facts, inputs, rng)

    def encode(self, *batches: Inputs) -> tuple[Tensor, ...]:
        """Several batches as one, where each is still normalised by its own statistics."""
        count = len(batches)
        if count == 1:
            return super().encode(*batches)
        if isinstance(self.base, FastTextCNN) and self.base.encode_together(batches):
            texts = torch.cat([unit(x) for (x,) in batches])
            return self.base(texts).chunk(count)
        if not resnet.can_join(self.base, batches):
            return super().encode(*batches)
        images = torch.cat([x for (x,) in batches])
        with resnet.groups(self.base, count):
            return self.base(images).chunk(count)

    @torch.no_grad()
    def embed(self, examples: Examples, index: Tensor) -> Tensor:
        are_images = isinstance(examples, Rows) and self.facts.modality == "image"
        can_be_recorded = are_images and len(index) > 0
        if self.recorded_features is None or not can_be_recorded:
            return super().embed(examples, index)
        self.eval()
        return self.recorded_features(examples, lambda rows: self.base(*examples.inputs(rows)), index)

    @torch.no_grad()
    def map_rows(self, function: Callable[[Tensor], Tensor], rows: Tensor, key: object) -> Tensor:
        if self.recorded_features is None or not len(rows):
            return super().map_rows(function, rows, key)
        return self.recorded_features(key, function, rows)


def install(net: Net) -> None:
    """Replaces the classes of a model and its modules by their faster versions, in place. Tensors stay as they are,
    but convolutions in bfloat16 get channels-last weights, which they are fastest with."""
    if type(net) is Net:
        net.__class__ = AcceleratedNet
    for module in net.modules():
        if type(module) in FASTER:
            module.__class__ = FASTER[type(module)]
    if net.bf16:
        net.base.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
