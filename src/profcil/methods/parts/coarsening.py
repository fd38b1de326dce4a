"""Coarsening a graph: few nodes stay, every other one is merged into the most similar that stays.

A clustering names, for each node, the node that stands for it; it is itself where it stays. The coarse graph has the
mean features of each cluster and every edge between two clusters once. Everything is tensors in, tensors out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TOPOLOGY = 0.6  # share of the place in the graph in a node's score; each of four distances has 0.1
POWERS = 30  # iterations of the two centralities
DAMPING = 0.85  # of PageRank
PIECE = 1024  # rows of a kernel matrix at once


def quotient(x: Tensor, edges: Tensor, cluster: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The coarse graph's features and edges, without self-loops, and the coarse node of every node."""
    members, place, count = torch.unique(cluster, return_inverse=True, return_counts=True)
    total = x.new_zeros(len(members), x.shape[1]).index_add(0, place, x)
    source, target = place[edges]
    keys = torch.unique((source * len(members) + target)[source != target])
    return total / count[:, None], torch.stack([keys // len(members), keys % len(members)]), place


def merged(h: Tensor, y: Tensor, score: Tensor, keep: float, protected: Tensor) -> Tensor:
    """For each node the one that stands for it, of the same label: of every label the protected nodes stay and those
    with the highest scores, a part `keep` of all and at least one; the others join their most similar by cosine."""
    stands, direction = torch.arange(len(y), device=y.device), F.normalize(h, dim=1)
    score = score.masked_fill(protected, torch.inf)
    for label in torch.unique(y).tolist():
        rows = torch.nonzero(y == label).flatten()
        stay = max(1, int(protected[rows].sum()), int(len(rows) * keep + 0.5))
        order = rows[score[rows].argsort(descending=True, stable=True)]
        stays, goes = order[:stay], order[stay:]
        stands[goes] = stays[(direction[goes] @ direction[stays].T).argmax(1)]
    return stands


def worth(h: Tensor, edges: Tensor, rows: Tensor, nodes: int) -> Tensor:
    """How much some nodes of a graph should stay, in [0, 1]: by their place in the graph, and by how unlike each is to
    all of them in its features `h`."""
    return TOPOLOGY * centrality(edges, nodes)[rows].mean(1) + (1 - TOPOLOGY) * distinction(h).mean(1)


def centrality(edges: Tensor, nodes: int) -> Tensor:
    """Degree, clustering coefficient, PageRank, eigenvector centrality and spread of the neighbours' degrees, each
    scaled to [0, 1]; edges come in both directions and without self-loops."""
    degree = torch.bincount(edges[1], minlength=nodes).double()
    some = degree.clamp(min=1)
    mean = gathered(degree, edges) / some
    spread = (gathered(degree.square(), edges) / some - mean.square()).clamp(min=0).sqrt()
    closed = triangles(edges, nodes) / (degree * (degree - 1)).clamp(min=1)
    rank, vector = degree.new_full((nodes,), 1 / nodes), degree.new_full((nodes,), nodes**-0.5)
    for _ in range(POWERS):
        rank = (1 - DAMPING) / nodes + DAMPING * gathered(rank / some, edges)
        vector = F.normalize(vector + gathered(vector, edges), dim=0)
    return unit(torch.stack([degree, closed, rank, vector, spread], 1)).float()


def distinction(h: Tensor) -> Tensor:
    """Of each node against all: 1 − mean cosine, MMD, Mahalanobis distance and 1 − correlation with the mean, each
    scaled to [0, 1]."""
    h = h.double()
    direction, centre = F.normalize(h, dim=1), h - h.mean(0)
    noise = 1e-3 * centre.square().mean() + torch.finfo(h.dtype).tiny
    covariance = centre.T @ centre / len(h) + noise * torch.eye(h.shape[1], dtype=h.dtype, device=h.device)
    mahalanobis = (centre * torch.linalg.solve(covariance, centre.T).T).sum(1)
    level = h - h.mean(1, keepdim=True)
    pearson = F.cosine_similarity(level, level.mean(0, keepdim=True), dim=1)
    return unit(torch.stack([-direction @ direction.mean(0), -closeness(h), mahalanobis, -pearson], 1)).float()


def closeness(h: Tensor) -> Tensor:
    """mean_j k(h_i, h_j): all that differs between nodes in the MMD of one node against all. The kernel is Gaussian,
    its bandwidth the root mean square distance."""
    square = 2 * (h - h.mean(0)).square().sum(1).mean()
    pieces = h.split(PIECE)
    kernel = [torch.exp(-torch.cdist(p, h).square() / (2 * square + torch.finfo(h.dtype).tiny)) for p in pieces]
    return torch.cat([k.mean(1) for k in kernel])


def triangles(edges: Tensor, nodes: int) -> Tensor:
    """Ordered pairs of neighbours of each node that are neighbours themselves: all paths i, j, k are listed, and those
    counted whose ends are joined."""
    keys = (edges[0] * nodes + edges[1]).sort().values
    source, target = keys // nodes, keys % nodes
    degree = torch.bincount(source, minlength=nodes)
    first, paths = degree.cumsum(0) - degree, degree[target]  # where a node's edges begin; paths over each edge
    step = torch.arange(int(paths.sum()), device=keys.device) - (paths.cumsum(0) - paths).repeat_interleave(paths)
    start, end = source.repeat_interleave(paths), target[first[target].repeat_interleave(paths) + step]
    joined = torch.isin(start * nodes + end, keys)
    return torch.bincount(start[joined], minlength=nodes)


def gathered(values: Tensor, edges: Tensor) -> Tensor:
    """The sum over each node's neighbours."""
    return torch.zeros_like(values).index_add(0, edges[1], values[edges[0]])


def unit(columns: Tensor) -> Tensor:
    """Columns scaled to [0, 1]; a constant one becomes 0."""
    low, high = columns.amin(0), columns.amax(0)
    return (columns - low) / (high - low).clamp(min=torch.finfo(columns.dtype).tiny)
