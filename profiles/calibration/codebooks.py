"""Residual codebooks of keys, learned by k-means in the space of the queries."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv.profiles.schema.codes import VECTORS, nearest

FLOOR = 1e-5
"""Of the largest eigenvalue of the queries' second moment: smaller ones are raised to it, so that its root has an inverse."""
SMALLEST = 1e-4
"""Of the widest channel of a head: narrower ones count as so wide."""
LEVELS = 127
"""A book's numbers are stored as whole multiples, up to so many, of its scale."""


def space_of(queries: Tensor, keys: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The space in which keys are compared: float32 [H, D, rank] into it and [H, rank, D] back, from second moments [H, D, D] of queries
    and of keys about their mean.

    Where root root^T is the queries' moment, the distance of two keys times `root` is the mean square by which their products with
    queries differ. Of that space the `rank` directions are kept along which keys are longest there: no others lose less of the products
    (Eckart & Young, 1936). Of queries that are all zero, the keys' own directions. Queries are 16 long, but for a power of two, so that
    both tensors fit half precision whatever size they are.
    """
    values, vectors = torch.linalg.eigh(queries.double())
    largest = values.amax(-1, keepdim=True)
    unit = torch.where(largest > 0, largest.sqrt().log2().round().exp2() / 16, 1.0)
    lengths = torch.where(largest > 0, values.clamp(min=FLOOR * largest), 1.0).sqrt() / unit
    root, inverse = vectors * lengths[..., None, :], (vectors / lengths[..., None, :]).mT
    axes = torch.linalg.eigh(root.mT @ keys.double() @ root).eigenvectors[..., -rank:]
    return (root @ axes).float(), (axes.mT @ inverse).float()


def balance_of(moment: Tensor, variance: Tensor) -> Tensor:
    """Powers of two float32 [H, D] after which the channels of keys are as wide as those of their queries, so that none takes more of a
    vector's few levels than it matters for.

    moment: [H, D, D], second moments of queries; variance: [H, D] of keys. In the middle of a head they are 1.
    """
    queries, keys = (
        x.double().clamp(min=SMALLEST * x.amax(-1, keepdim=True).clamp(min=SMALLEST))
        for x in (moment.diagonal(dim1=-2, dim2=-1), variance)
    )
    wide = (queries / keys).log2() / 4
    return (wide - wide.mean(-1, keepdim=True)).round().exp2().float()


def learn(x: Tensor, stages: int, rounds: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Books of float32 x [H, n, D] as the profile stores them: uint8 [H, stages, VECTORS, D] and scales float16 [H, stages, 1].

    Each stage learns of what the stored vectors of those before it leave.
    """
    books, scales = [], []
    for _ in range(stages):
        book = centroids(x, rounds, generator)
        scale = (book.abs().amax((-2, -1)) / LEVELS).clamp(min=1e-7).half()[:, None]
        code = (book / scale.float()[..., None]).round().clamp(-LEVELS, LEVELS)
        book = code * scale.float()[..., None]
        x = x - torch.take_along_dim(book, nearest(x, book)[..., None], 1)
        books.append((code + LEVELS + 1).to(torch.uint8))
        scales.append(scale)
    return torch.stack(books, 1), torch.stack(scales, 1)


def centroids(x: Tensor, rounds: int, generator: torch.Generator) -> Tensor:
    """k-means of x [H, n, D]: [H, VECTORS, D]. It begins with vectors drawn from x, and so does anew one that nothing is nearest to."""

    def drawn() -> Tensor:
        order = torch.randperm(x.shape[1], generator=generator, dtype=torch.int64, device="cpu")
        return x[:, order.repeat(-(-VECTORS // len(order)))[:VECTORS].to(x.device)]

    book = drawn().clone()
    for _ in range(rounds):
        label = nearest(x, book)
        counts = torch.zeros(book.shape[:2], dtype=x.dtype, device=x.device)
        counts.scatter_add_(1, label, torch.ones_like(label, dtype=x.dtype))
        sums = torch.zeros_like(book).scatter_add_(1, label[..., None].expand_as(x), x)
        book = torch.where(counts[..., None] > 0, sums / counts.clamp(min=1)[..., None], drawn())
    return book


__all__ = ["balance_of", "centroids", "learn", "space_of"]
