"""Coarsening of a graph: some nodes are retained, and every other one is merged into the most similar retained one.

A clustering names the representative of each node; a retained node represents itself. The coarse graph has the mean
features of each cluster and every edge between two clusters once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TOPOLOGY = 0.6  # weight of the topology in a node's score; each of the four distances has 0.1
POWERS = 30  # iterations of PageRank and of eigenvector centrality
DAMPING = 0.85  # of PageRank
CHUNK = 1024  # rows of a kernel matrix computed at once


def coarse_graph(x: Tensor, edges: Tensor, cluster: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The coarse graph's features and edges, without self-loops, and the coarse node of every node."""
    representatives, coarse_node, count = torch.unique(cluster, return_inverse=True, return_counts=True)
    size = len(representatives)
    zeros = x.new_zeros(size, x.shape[1])
    total = zeros.index_add(0, coarse_node, x)
    source, target = coarse_node[edges]
    numbers = source * size + target  # one per edge
    keys = torch.unique(numbers[source != target])
    coarse_edges = torch.stack([keys // size, keys % size])
    return total / count[:, None], coarse_edges, coarse_node


def merge_nodes(h: Tensor, y: Tensor, score: Tensor, keep: float, protected: Tensor) -> Tensor:
    """The representative of each node, which has the same label. Of every label the protected nodes and those with the
    highest scores are retained, a share `keep` of all and at least one. Every other node is merged into the most
    similar one by cosine."""
    representative = torch.arange(len(y), device=y.device)
    direction = F.normalize(h, dim=1)
    score = score.masked_fill(protected, torch.inf)
    for label in torch.unique(y).tolist():
        rows = torch.nonzero(y == label).flatten()
        share = int(len(rows) * keep + 0.5)
        count = max(1, int(protected[rows].sum()), share)
        order = rows[score[rows].argsort(descending=True, stable=True)]
        retained = order[:count]
        merged = order[count:]
        cosine = direction[merged] @ direction[retained].T
        representative[merged] = retained[cosine.argmax(1)]
    return representative


def retention_score(h: Tensor, edges: Tensor, rows: Tensor, nodes: int) -> Tensor:
    """The score in [0, 1] by which nodes are retained: their centrality in the graph, and how much their features `h`
    differ from those of the others. `rows` are the scored nodes, `nodes` is the number of all nodes."""
    topology = centrality(edges, nodes)[rows].mean(1)
    features = dissimilarity(h).mean(1)
    return TOPOLOGY * topology + (1 - TOPOLOGY) * features


def centrality(edges: Tensor, nodes: int) -> Tensor:
    """Degree, clustering coefficient, PageRank, eigenvector centrality and spread of the neighbours' degrees, each
    scaled to [0, 1]. Edges must be given in both directions and without self-loops."""
    degree = torch.bincount(edges[1], minlength=nodes).double()
    positive_degree = degree.clamp(min=1)
    mean = sum_neighbours(degree, edges) / positive_degree
    mean_square = sum_neighbours(degree.square(), edges) / positive_degree
    spread = (mean_square - mean.square()).clamp(min=0).sqrt()
    pairs = (degree * (degree - 1)).clamp(min=1)
    clustering = closed_pairs(edges, nodes) / pairs
    pagerank = degree.new_full((nodes,), 1 / nodes)
    eigenvector = degree.new_full((nodes,), nodes**-0.5)
    for _ in range(POWERS):
        received = sum_neighbours(pagerank / positive_degree, edges)
        pagerank = (1 - DAMPING) / nodes + DAMPING * received
        eigenvector = eigenvector + sum_neighbours(eigenvector, edges)
        eigenvector = F.normalize(eigenvector, dim=0)
    columns = torch.stack([degree, clustering, pagerank, eigenvector, spread], 1)
    return scale_columns(columns).float()


def dissimilarity(h: Tensor) -> Tensor:
    """Of each node against all: 1 − mean cosine, MMD, Mahalanobis distance and 1 − correlation with the mean, each
    scaled to [0, 1]."""
    h = h.double()
    direction = F.normalize(h, dim=1)
    centred = h - h.mean(0)
    ridge = 1e-3 * centred.square().mean() + torch.finfo(h.dtype).tiny
    identity = torch.eye(h.shape[1], dtype=h.dtype, device=h.device)
    covariance = centred.T @ centred / len(h) + ridge * identity
    whitened = torch.linalg.solve(covariance, centred.T).T
    mahalanobis = (centred * whitened).sum(1)
    row_centred = h - h.mean(1, keepdim=True)
    mean_row = row_centred.mean(0, keepdim=True)
    correlation = F.cosine_similarity(row_centred, mean_row, dim=1)
    negative_cosine = -direction @ direction.mean(0)
    columns = [negative_cosine, -mean_kernel(h), mahalanobis, -correlation]
    return scale_columns(torch.stack(columns, 1)).float()


def mean_kernel(h: Tensor) -> Tensor:
    """mean_j k(h_i, h_j): the only term of the MMD of one node against all that differs between nodes. The kernel is
    Gaussian, its bandwidth the root mean square distance."""
    centred = h - h.mean(0)
    square = 2 * centred.square().sum(1).mean()
    scale = 2 * square + torch.finfo(h.dtype).tiny
    means = []
    for chunk in h.split(CHUNK):
        squares = torch.cdist(chunk, h).square()
        kernel = torch.exp(-squares / scale)
        means.append(kernel.mean(1))
    return torch.cat(means)


def closed_pairs(edges: Tensor, nodes: int) -> Tensor:
    """The number of ordered pairs of neighbours of each node that are neighbours of each other. All paths i, j, k are
    listed, and those whose ends are joined by an edge are counted."""
    numbers = edges[0] * nodes + edges[1]
    keys = numbers.sort().values
    source = keys // nodes
    target = keys % nodes
    degree = torch.bincount(source, minlength=nodes)
    first_edge = degree.cumsum(0) - degree  # of each node, in the sorted edges
    paths = degree[target]  # number of paths whose first edge is this one
    first_path = paths.cumsum(0) - paths
    number = torch.arange(int(paths.sum()), device=keys.device)
    step = number - first_path.repeat_interleave(paths)
    start = source.repeat_interleave(paths)
    first_second_edge = first_edge[target].repeat_interleave(paths)
    end = target[first_second_edge + step]
    closed = torch.isin(start * nodes + end, keys)
    return torch.bincount(start[closed], minlength=nodes)


def sum_neighbours(values: Tensor, edges: Tensor) -> Tensor:
    """The sum of the values of each node's neighbours."""
    source, target = edges
    return torch.zeros_like(values).index_add(0, target, values[source])


def scale_columns(columns: Tensor) -> Tensor:
    """Columns scaled to [0, 1]; a constant one becomes 0."""
    low = columns.amin(0)
    high = columns.amax(0)
    smallest = torch.finfo(columns.dtype).tiny
    span = (high - low).clamp(min=smallest)
    return (columns - low) / span
