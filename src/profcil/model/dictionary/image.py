"""A dictionary of image patches: how strongly each quarter of an image responds to each of some whitened patches.

It is found from sums over clients. In the first round clients sum first and second moments of their patches; from these
the server computes a whitening matrix. In each later round they assign their patches to the present centres and sum
them by centre; the normalised sums are the next centres (spherical k-means, after Coates and Ng, 2012).

An entry is a mean direction of at least `min_support` patches, or a random direction that no client has influenced. The
sums of one client with few images reveal more of them than the pooled sums do.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.data.bundle import Inputs
from profcil.model.layers import unit

PATCH_SIZE = 6  # pixels along each side, at most half of an image's side
POOLED_SIZE = 2  # responses are averaged over 2 x 2 quarters
KMEANS_ROUNDS = 3  # on CIFAR-100, 6 and 12 give less
GRID = 6  # in a round of sums, every sixth patch of every sixth row is used; more of them in small images
MIN_DEVIATION = 0.05  # of an image's pixels; the contrast of flatter images is not raised further
PATCH_VARIANCE = 0.01  # added to a patch's variance
WHITENING = 0.1  # added to the eigenvalues of the patches' covariance
THRESHOLD = 0.25  # a response below this counts as none
VALUES_AT_ONCE = 2**26  # responses that are held in memory at a time

Entries = dict[str, Tensor]


class ImageDictionary:
    """The dictionary of patches; `width` features per image."""

    rounds = 1 + KMEANS_ROUNDS
    usable_untrained = True  # random patches

    def __init__(self, width: int, shape: tuple[int, ...], min_support: int = 1, mirror: bool = False) -> None:
        """`shape` is that of an image: channels, height and width. With `mirror`, features are the mean of those of an
        image and of its mirror image."""
        self.width = width
        self.mirror = mirror
        self.channels, height, breadth = shape
        side = min(height, breadth)
        self.size = min(PATCH_SIZE, side // 2)
        self.step = max(1, min(GRID, side // 4))
        self.min_support = min_support

    @property
    def numbers(self) -> int:
        """The length of a patch."""
        return self.channels * self.size * self.size

    def begin(self, rng: torch.Generator) -> Entries:
        """Random unit directions as centres, and no whitening."""
        count = ceil(self.width / POOLED_SIZE**2)
        centres = torch.randn(count, self.numbers, generator=rng)
        whitening = torch.eye(self.numbers)
        mean = torch.zeros(self.numbers)
        return {"centres": F.normalize(centres, dim=1), "whitening": whitening, "mean": mean}

    def sums(self, entries: Entries, inputs: Inputs, round: int) -> Entries:
        """The sums of some images in one round of the search. Sums of disjoint sets of images are additive."""
        patches = self.patches(normalised(inputs), round)
        if round == 0:
            return moments(patches.double())
        centres = entries["centres"]
        whitened = (patches - entries["mean"]) @ entries["whitening"]
        nearest = (whitened @ centres.T).argmax(1)
        # A product with one-hot rows has the same bits in every run; index_add on a GPU does not.
        chosen = F.one_hot(nearest, len(centres)).to(whitened.dtype)
        total = chosen.T @ whitened
        count = chosen.sum(0)
        return {"sum": total.double(), "patches": count.double()}

    def patches(self, x: Tensor, round: int) -> Tensor:
        """The patches of a round, [patches, numbers]: a grid over each image, shifted from round to round. Each patch
        has zero mean and about unit variance."""
        step = self.step
        places = x.unfold(2, self.size, 1).unfold(3, self.size, 1)
        row, column = divmod(round * (step + 1), step)  # every shift is used in turn
        chosen = places[:, :, row % step :: step, column::step]
        by_place = chosen.permute(0, 2, 3, 1, 4, 5)
        flat = by_place.reshape(-1, self.numbers)
        variance, mean = torch.var_mean(flat, 1, keepdim=True, correction=0)
        return (flat - mean) / (variance + PATCH_VARIANCE).sqrt()

    def update(self, entries: Entries, sums: Entries, round: int) -> Entries:
        """The entries after a round, from the sums of all clients."""
        if round == 0:
            mean, whitening = whiten(sums["sum"], sums["second"], sums["patches"])
            return {**entries, "mean": mean, "whitening": whitening}
        supported = (sums["patches"] >= self.min_support)[:, None]
        moved = F.normalize(sums["sum"], dim=1)
        moved = moved.to(entries["centres"].dtype)
        centres = torch.where(supported, moved, entries["centres"])
        return {**entries, "centres": centres}

    def features(self, entries: Entries, inputs: Inputs) -> Tensor:
        """The mean response to each centre over each quarter of each image, [images, width]."""
        x = normalised(inputs)
        found = self.responses(entries, x)
        if self.mirror:
            mirrored = self.responses(entries, x.flip(3))
            return (found + mirrored) / 2
        return found

    def responses(self, entries: Entries, x: Tensor) -> Tensor:
        """The features of normalised images."""
        filters = entries["centres"] @ entries["whitening"]
        offset = filters @ entries["mean"] + THRESHOLD
        filters = filters - filters.mean(1, keepdim=True)
        filters = filters.unflatten(1, (self.channels, self.size, self.size))
        chunks = self.chunks(x, len(filters))
        found = [pooled_responses(chunk, filters, offset) for chunk in chunks]
        return torch.cat(found)[:, : self.width]

    def chunks(self, x: Tensor, filters: int) -> Iterator[Tensor]:
        """The images in chunks that bound the memory for responses. In an exported graph their number is free."""
        if torch.compiler.is_compiling():
            return iter([x])
        _, _, height, breadth = x.shape
        values = filters * height * breadth
        images = max(1, VALUES_AT_ONCE // values)
        return iter(x.split(images))


def normalised(inputs: Inputs) -> Tensor:
    """Images with zero mean and unit deviation."""
    x = unit(inputs[0])
    deviation, mean = torch.std_mean(x, (1, 2, 3), keepdim=True)
    return (x - mean) / deviation.clamp(min=MIN_DEVIATION)


def moments(patches: Tensor) -> Entries:
    """The sums of the patches and of their products, and their number."""
    count = patches.new_full((1,), len(patches))
    return {"sum": patches.sum(0), "second": patches.T @ patches, "patches": count}


def whiten(total: Tensor, second: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of the patches and the matrix that whitens them (ZCA), from their moments."""
    number = count.clamp(min=1)
    mean = total / number
    covariance = second / number - torch.outer(mean, mean)
    values, vectors = torch.linalg.eigh(covariance)
    scales = (values.clamp(min=0) + WHITENING).rsqrt()
    whitening = vectors @ torch.diag(scales) @ vectors.T
    return mean.float(), whitening.float()


def pooled_responses(x: Tensor, filters: Tensor, offset: Tensor) -> Tensor:
    """ReLU(response − threshold), averaged over quarters. The filters have zero mean, so that a patch's own mean does
    not count; its deviation is divided out afterwards."""
    one_filter = filters[:1]
    window = x.new_ones(one_filter.shape) / one_filter.numel()
    mean = F.conv2d(x, window)
    mean_square = F.conv2d(x.square(), window)
    variance = (mean_square - mean.square()).clamp(min=0)
    response = F.conv2d(x, filters) / (variance + PATCH_VARIANCE).sqrt()
    strong = (response - offset[:, None, None]).relu()
    return F.adaptive_avg_pool2d(strong, POOLED_SIZE).flatten(1)
